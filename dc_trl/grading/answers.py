r"""The verdict: lists, tuples and intervals part by part, numbers as numbers, the rest as expressions."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from .expressions import equal, is_set, parse_expression, same_relation, within
from .literals import Literal, parse_literal, parse_unit
from .text import clean, extract_answer, gold_answer, is_balanced, is_reasonable, split, squash


logger = logging.getLogger("dc_trl.grading")


_TYPES: dict[str, tuple[type, ...]] = {"multiple_answers": (bool,), "unit": (str, type(None))}
_TYPES |= {"relative_tolerance": (float, int), "absolute_tolerance": (float, int)}


@dataclass(frozen=True)
class Gold:
    r"""The right answer, and how closely an answer has to meet it.

    Attributes:
        answer: LaTeX or a plain number, may be inside `\boxed{}`, or after `####` as in GSM8K's solutions.
        multiple_answers: `answer` holds several, separated by commas; all are needed, in any order.
        unit: unit of the answer; the same unit or none is accepted.
        relative_tolerance: largest |answer − gold| / |gold| of a number, ≥ 0.
        absolute_tolerance: largest |answer − gold| of a number, ≥ 0. The larger of the two tolerances counts.

    Raises:
        ValueError: a field has a value of another type, or a tolerance is negative or not a number.
    """

    answer: str
    multiple_answers: bool = False
    unit: str | None = None
    relative_tolerance: float = 0.0
    absolute_tolerance: float = 0.0

    def __post_init__(self) -> None:
        for field, kinds in _TYPES.items():
            if not isinstance(value := self.__dict__[field], kinds):
                raise ValueError(f"{field}={value!r} is no {kinds[0].__name__}: rename a column that is not for it.")
        for field in ("relative_tolerance", "absolute_tolerance"):
            if not 0 <= (value := self.__dict__[field]) < float("inf"):
                raise ValueError(f"{field}={value} is no tolerance: use a finite number of at least 0.")

    @property
    def unit_name(self) -> str:
        """`unit` in one spelling, "" for none."""
        return "" if self.unit is None else parse_unit(f" {clean(self.unit)}") or squash(self.unit)


# Columns of a data set that a reward function reads besides the answer.
GRADING_COLUMNS = tuple(field.name for field in fields(Gold) if field.name != "answer")


class Verdict(NamedTuple):
    """What is known of a completion. It is true where the answer is correct.

    Attributes:
        correct: None where the gold answer cannot be graded.
        answer: the boxed answer in one spelling, so that equal answers vote together; None without a box. All correct
            answers have that of the gold.
        failure: why grading failed, a key of `Grader.failures`; None where it did not.
    """

    correct: bool | None
    answer: str | None
    failure: str | None = None

    def __bool__(self) -> bool:
        return self.correct is True


_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}")
_TRAILING_UNIT = re.compile(r"(.*[^\s_^{])\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?|\^\\circ|%)")
_WORD = re.compile(r"[^\W\d_]{2,}|n/a", re.IGNORECASE)
_OPERATOR = re.compile(r"[\d\\+*^=<>_]|\w\(")
_AND = r"\s*,?\s*(?:\\(?:text|mathrm)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
_RELATION = r"≈|[<>=]|\\(?:le|ge|ne|neq|in)(?![A-Za-z])"
_THOUSANDS_BEFORE = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:,\d{3})*$")
# `x`, `x_1`, `f(x)`, `\theta`, `\vec{v}`, `(x, y)`, `\angle ABC`: what may stand before an equals sign.
_ATOM = (
    r"(?:m?\s*\\angle\s*)?\\?[A-Za-z]+(?:\s*_\s*(?:\w|\{[^{}]*\}))?'?(?:\s*\([^()=]*\))?"
    r"|\\(?:overline|vec|hat|bar|text|math[a-z]+|boldsymbol|operatorname)\s*\{[^{}\d]*\}(?:\s*\([^()=]*\))?"
    r"|\|\s*[A-Za-z][^|\d=<>]*\|"
)
_COMPOUND = re.compile(rf"(?:{_ATOM})(?:\s*(?:[-+*/:]|\\cdot)\s*(?:{_ATOM}))+")  # `m+n`, if it is a number but 0
_NAME = re.compile(rf"(?!\\(?:pi|infty)(?![A-Za-z]))(?:{_ATOM}|\(\s*(?:{_ATOM})(?:\s*,\s*(?:{_ATOM}))+\s*\))")


def is_gradable(gold: Gold | str) -> bool:
    r"""Whether a gold answer can be graded: numbers, mathematics and `\text{...}`.

    False of prose and of broken LaTeX. Every other gold accepts its own text.
    """
    return _parse_gold(gold if isinstance(gold, Gold) else Gold(gold)) is not None


def grade(text: str, gold: Gold) -> Verdict:
    """Verdict on the last boxed answer of a text, in this process and without limits of time and memory.

    [`Grader`] is the safe way to grade what a model wrote. Here too, no text raises: an answer whose comparison SymPy
    ends with an exception is wrong, as a warning says.
    """
    answer = extract_answer(text)
    verdict = try_to_grade(answer, gold)
    if isinstance(verdict, Verdict):
        return verdict
    logger.warning("Grading %.80r against %.80r raised %s. The answer counts as wrong.", answer, gold.answer, verdict)
    return Verdict(False, squash(answer or ""))


def try_to_grade(answer: str | None, gold: Gold) -> Verdict | str:
    """Verdict on what a box holds (None: there is no box), or the exception that the comparison raised, as text."""
    if (own := _parse_gold(gold)) is None:
        return Verdict(None, answer)
    if answer is None:
        return Verdict(False, None)
    if answer not in (gold.answer.strip(), own) and not is_reasonable(answer):
        return Verdict(False, squash(answer[:100]))
    cleaned = clean(answer)
    try:
        correct = answer == gold.answer.strip() or _equal(own, cleaned, gold, gold.multiple_answers)
    except MemoryError:  # it is no property of the text alone
        raise
    except Exception as error:  # what SymPy raises on mathematics without meaning is no closed list
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    spelled = _canonical(own if correct else cleaned)
    # A wrong answer may have the gold's value, in another unit or as `10^8`, and still votes for itself.
    return Verdict(correct, squash(cleaned) if not correct and spelled == _canonical(own) else spelled)


@lru_cache(maxsize=256)
def _parse_gold(gold: Gold) -> str | None:
    """Return a gold answer in one spelling; None if it cannot be graded."""
    text = gold_answer(gold.answer) or ""
    answer = extract_answer(text) or text
    if not is_reasonable(answer) or not is_balanced(answer):
        return None
    cleaned = clean(answer)
    sides = split(cleaned, "=")
    if len(sides) > 2 and _NAME.fullmatch(sides[0].strip()) and len(split(cleaned, f",|{_AND}")) == 1:
        cleaned = f"{sides[0]}={sides[-1]}"  # `x = 11` of a gold with steps, `x = 5 + 6 = 11`
    try:
        return cleaned if _is_gradable(cleaned, gold.multiple_answers) else None
    except MemoryError:
        raise
    except Exception:  # as in `try_to_grade`
        return None


def _is_gradable(text: str, several: bool = False) -> bool:
    whole, text = text, _split_name(text)[1]
    kind, parts = _parts(text, several)
    if kind != "scalar":
        return bool(parts) and all(map(_is_gradable, parts))
    if parse_literal(text) is not None or (_TEXT.search(text) and _plain_text(text)):
        return True
    # Prose parses too, as a product of its letters: "none" would be e·n²·o.
    if not text or (_WORD.search(text) and not _OPERATOR.search(whole)):
        return False
    value = _without_unit(text)[0]
    return parse_literal(value) is not None or parse_expression(value) is not None


def _equal(gold_whole: str, whole: str, gold: Gold, several: bool) -> bool:
    gold_name, gold_text = _split_name(gold_whole)
    name, text = _split_name(whole)
    if _is_equation(gold_text) or _is_equation(text) or (gold_name and name and squash(gold_name) != squash(name)):
        gold_text, text = gold_whole, whole
        if not (_is_equation(gold_text) and _is_equation(text)):
            return False
    if squash(gold_text) == squash(text):
        return True
    (gold_kind, golds), (kind, parts) = _parts(gold_text, several), _parts(text, several)
    if gold_kind == "scalar" and kind == "scalar":
        return _equal_scalars(gold_text, text, gold)
    if {gold_kind, kind} == {"()", "list"}:  # `(2,3)` is `x=2, y=3`
        if gold_kind == "list":
            golds = _coordinates(golds, name)
        else:
            parts = _coordinates(parts, gold_name)
    elif gold_kind != kind:  # `(3,4]` is `3 < x \le 4`, and `\{2\} \cup \{4\}` is `\{2,4\}`, which math-verify knows
        scalar = gold_text if gold_kind == "scalar" else text
        return "scalar" in (gold_kind, kind) and is_set(scalar) and _equal_expressions(gold_text, text, gold)
    if len(golds) != len(parts):
        return False
    if kind == gold_kind == "list":
        return _equal_in_any_order(golds, parts, gold)
    return all(_equal(one, other, gold, False) for one, other in zip(golds, parts, strict=True))


def _coordinates(texts: Sequence[str], names: str) -> list[str]:
    """Values of `y = 3, x = 2` in the order of `(x, y)`, or of the alphabet without names; [] for other texts."""
    values = {squash(name): value for name, value in map(_split_name, texts)}
    order = split(squash(names)[1:-1], ",") if names else sorted(values)
    return [values[name] for name in order] if {"", *order} == {"", *values} and "" not in values else []


def _is_equation(text: str) -> bool:
    return len(split(text, "=")) > 1 and len(_split_commas(text)) == 1


def _equal_in_any_order(golds: Sequence[str], texts: Sequence[str], gold: Gold) -> bool:
    left = list(texts)
    for one in golds:
        fit = next((other for other in left if _equal(one, other, gold, False)), None)
        if fit is None:
            return False
        left.remove(fit)
    return True


def _equal_scalars(gold_text: str, text: str, gold: Gold) -> bool:
    gold_literal, literal = parse_literal(gold_text), parse_literal(text)
    if gold_literal is not None:
        return literal is not None and _equal_literals(gold_literal, literal, gold)
    if _TEXT.search(gold_text) and (words := _plain_text(gold_text)):
        return words == _plain_text(text)
    gold_value, gold_unit = _without_unit(gold_text)
    value, unit = _without_unit(text)
    stated = gold_unit or gold.unit_name
    if stated != unit and ((stated and unit) or (not gold.unit_name and "%" in (stated, unit))):
        return False
    return squash(gold_value) == squash(value) or _equal_expressions(gold_value, value, gold)


def _equal_expressions(gold_text: str, text: str, gold: Gold) -> bool:
    if (gold_sides := _sides(gold_text)) and (sides := _sides(text)):
        pairs = [(parse_expression(left), parse_expression(right)) for left, _, right in (gold_sides, sides)]
        return gold_sides[1] == sides[1] and same_relation(pairs[0], pairs[1], ordered=sides[1] != "=")
    one, other = parse_expression(gold_text), parse_expression(text)
    if one is None or other is None:
        return False
    is_tolerant = gold.relative_tolerance or gold.absolute_tolerance
    if is_tolerant and within(one, other, gold.relative_tolerance, gold.absolute_tolerance):
        return True
    return equal(one, other)


def _sides(text: str) -> tuple[str, str, str] | None:
    """Left side, sign and right side of a relation with one sign, turned so that the sign is not `>`."""
    sides = split(text, r"[<>=]|\\(?:le|ge)(?![A-Za-z])")
    if len(sides) != 2 or len(split(text, _RELATION)) != 2:
        return None
    left, right = sides
    sign = text[len(left) : len(text) - len(right)]
    if sign in (">", "\\ge"):
        return right, "<" if sign == ">" else "\\le", left
    return left, sign, right


def _equal_literals(gold_literal: Literal, literal: Literal, gold: Gold) -> bool:
    gold_unit = gold_literal.unit or gold.unit_name
    if gold_unit and literal.unit and gold_unit != literal.unit:
        return False
    relative, absolute = Fraction(gold.relative_tolerance), Fraction(gold.absolute_tolerance)
    if literal.misspelled or not (literal.finished or gold_literal.kind == "scientific" or relative or absolute):
        return False
    one, other = gold_literal.value, literal.value
    mixed = (gold_unit == "%") != (literal.unit == "%")
    pairs = []
    if mixed:  # 50 % is the same number as 1/2
        pairs.append((one / 100 if gold_unit == "%" else one, other / 100 if literal.unit == "%" else other))
    if not mixed or gold.unit_name or gold_literal.kind == literal.kind == "decimal":
        pairs.append((one, other))  # the sign may be left out of a plain number, as other units are
    return any(abs(one - other) <= max(absolute, relative * abs(one)) for one, other in pairs)


def _split_name(text: str) -> tuple[str, str]:
    r"""Return the name and the value of `x = 5`, of `x \in (1, 2)` and of `x \approx 0.3`; "" where there is no name.

    What stands after ≈ is not read where something exact stands before it.
    """
    sides = [side.strip() for side in split(text, "≈")]
    if len(sides) > 1 and not _NAME.fullmatch(sides[0]):
        text = sides[0]
    sides = [side.strip() for side in split(text, r"[=≈]|\\in(?![A-Za-z])")]
    is_relation = len(split(text, _RELATION)) > len(sides)
    if len(sides) == 1 or is_relation or len(split(text, f",|{_AND}")) > 1:
        return "", text
    *names, value = sides
    if len(sides) == 2 and _NAME.fullmatch(value) and not _NAME.fullmatch(names[0]):
        names, value = [value], names[0]
    if re.fullmatch(r"(?=.*[1-9])(?:[^A-Za-z]|\\[A-Za-z]+)*", value) and _COMPOUND.fullmatch(names[0]):
        return names[0], value
    return ("=".join(names), value) if all(map(_NAME.fullmatch, names)) else ("", text)


def _parts(text: str, several: bool) -> tuple[str, list[str]]:
    r"""Return the kind of a text and its parts: `list` (`{1, 2}`, `1, 2`, `\pm 1`), brackets as `(]`, or `scalar`."""
    is_number = parse_literal(text) is not None and not (several and "," in text)
    if is_number or "\\begin" in text or len(split(text, r"\\cup(?![A-Za-z])")) > 1:
        return "scalar", [text]
    if len(parts := _split_commas(text)) > 1:
        return "list", parts
    for opening, closing in (("\\{", "\\}"), *((a, b) for a in "([" for b in ")]")):
        inner = text[len(opening) : -len(closing)]
        if not (text.startswith(opening) and text.endswith(closing)) or not is_balanced(inner):
            continue
        parts = _split_commas(inner)
        if opening == "\\{" and not re.search(r"[|:]|\\mid", inner):
            return "list", parts
        if len(parts) > 1:
            return opening + closing, parts
    if text.count("\\pm") == 1:
        return "list", [text.replace("\\pm", sign).lstrip(" +") for sign in "+-"]
    return "scalar", [text]


def _split_commas(text: str) -> list[str]:
    """Parts between commas. Where commas with a space separate, those without one are of thousands: `1,234, 5,678`."""
    raw = split(text, f"{_AND}|[,;]")
    has_spaces = any(part.startswith(" ") for part in raw[1:])
    parts = raw[:1]
    for part in raw[1:]:
        if has_spaces and re.match(r"\d{3}(?!\d)", part) and _THOUSANDS_BEFORE.search(parts[-1]):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return [part.strip() for part in parts if part.strip()]


def _plain_text(text: str) -> str:
    r"""Words of `\text{Evelyn}` or `\text{(C)}`, "" for what is more than words."""
    words = re.sub(r"[\s()]+", " ", _TEXT.sub(r"\1", text)).strip().casefold()
    return words if re.fullmatch(r"[^\W_][\w ,.'/-]*", words) and not re.search(r"[\d_]", words) else ""


def _without_unit(text: str) -> tuple[str, str]:
    if (match := _TRAILING_UNIT.fullmatch(text)) and (written := parse_unit(match[2])):
        return match[1].strip(), written
    return text, ""


def _canonical(text: str) -> str:
    text = _split_name(text)[1]
    if (literal := parse_literal(text)) is not None and not literal.misspelled:
        return f"{literal.value}{'%' if literal.unit == '%' else ''}"
    return _plain_text(text) or squash(text)
