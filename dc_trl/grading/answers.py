r"""The verdict: numbers as numbers, words as words, all else by math-verify."""

import re
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from .expressions import equal, parse_expression, within
from .literals import Literal, parse_literal, parse_unit
from .text import clean, extract_answer, gold_answer, is_balanced, is_reasonable, split, squash


@dataclass(frozen=True)
class Gold:
    r"""The right answer, and how closely an answer has to meet it.

    Attributes:
        answer: LaTeX or a plain number, may be inside `\boxed{}`, or after `####` as in GSM8K's solutions.
        multiple_answers: `answer` holds several, separated by commas; all are needed, in any order.
        unit: unit of the answer; the same unit or none is accepted.
        relative_tolerance: largest |answer − gold| / |gold| of a number, ≥ 0.
        absolute_tolerance: largest |answer − gold| of a number, ≥ 0. The larger of the two tolerances counts.
    """

    answer: str
    multiple_answers: bool = False
    unit: str | None = None
    relative_tolerance: float = 0.0
    absolute_tolerance: float = 0.0

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
    """

    correct: bool | None
    answer: str | None

    def __bool__(self) -> bool:
        return self.correct is True


_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}")
_TRAILING_UNIT = re.compile(r"(.*[^\s_^{])\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?|\^\\circ|%)")
_WORD = re.compile(r"[^\W\d_]{2,}|n/a", re.IGNORECASE)
_OPERATOR = re.compile(r"[\d\\+*^=<>_]|\w\(")
# `x`, `x_1`, `f(x)`, `\vec{v}` may stand before an equals sign; before a number but 0 also `m+n` or `\angle ABC`.
_NAME = re.compile(
    r"(?!\\(?:pi|infty)(?![A-Za-z]))\\?[A-Za-z]+(?:\s*\{[^{}\d]*\})?(?:\s*_\s*(?:\w|\{[^{}]*\}))?'?(?:\s*\([^()=]*\))?"
)
_QUANTITY = re.compile(r"(?=.*[A-Za-z])(?:[^\d=<>]|_\d|_\{[^{}]*\})*")
_NUMBER = re.compile(r"(?=.*[1-9])(?:[^A-Za-z]|\\[A-Za-z]+)*")


def is_gradable(gold: Gold | str) -> bool:
    r"""Whether a gold answer can be graded: numbers, mathematics and `\text{...}`.

    False of prose and of broken LaTeX. Every other gold accepts its own text.
    """
    return _parse_gold(gold if isinstance(gold, Gold) else Gold(gold)) is not None


def grade(text: str, gold: Gold) -> Verdict:
    """Verdict on the last boxed answer of a text, in this process and without limits of time and memory.

    [`Grader`] is the safe way to grade what a model wrote: here SymPy's exceptions on what has no meaning go up.
    """
    return grade_answer(extract_answer(text), gold)


def grade_answer(answer: str | None, gold: Gold) -> Verdict:
    """Verdict on what a box holds; None: there is no box."""
    if (own := _parse_gold(gold)) is None:
        return Verdict(None, answer)
    if answer is None:
        return Verdict(False, None)
    if answer not in (gold.answer.strip(), own) and not is_reasonable(answer):
        return Verdict(False, squash(answer[:100]))
    cleaned = clean(answer)
    correct = answer == gold.answer.strip() or _equal(own, cleaned, gold)
    return Verdict(correct, _canonical(own if correct else cleaned))


@lru_cache(maxsize=256)
def _parse_gold(gold: Gold) -> str | None:
    """Return a gold answer in one spelling; None if it cannot be graded."""
    text = gold_answer(gold.answer) or ""
    answer = extract_answer(text) or text
    if not is_reasonable(answer) or not is_balanced(answer):
        return None
    cleaned = clean(answer)
    value = _split_name(cleaned)[1]
    if parse_literal(value) is not None or _plain_text(value):
        return cleaned
    # Prose parses too, as a product of its letters: "none" would be e·n²·o.
    if not value or (_WORD.search(value) and not _OPERATOR.search(cleaned)):
        return None
    value = _without_unit(value)[0]
    try:
        return cleaned if parse_literal(value) is not None or parse_expression(value) is not None else None
    except MemoryError:
        raise
    except Exception:  # what SymPy raises on mathematics without meaning is no closed list
        return None


def _equal(gold_whole: str, whole: str, gold: Gold) -> bool:
    (gold_name, gold_text), (name, text) = _split_name(gold_whole), _split_name(whole)
    if "=" in gold_text + text or (gold_name and name and squash(gold_name) != squash(name)):
        gold_text, text = gold_whole, whole
    if squash(gold_text) == squash(text):
        return True
    gold_literal = parse_literal(gold_text)
    if gold_literal is not None and not (gold.multiple_answers and "," in gold_text):
        literal = parse_literal(text)  # `40+6` is none
        return literal is not None and _equal_literals(gold_literal, literal, gold)
    if words := _plain_text(gold_text):
        return words == _plain_text(text, bare=True)
    gold_text, gold_unit = _without_unit(gold_text)
    text, unit = _without_unit(text)
    stated = gold_unit or gold.unit_name
    if stated and unit and stated != unit:
        return False
    if squash(gold_text) == squash(text):
        return True
    one, other = parse_expression(gold_text), parse_expression(text)
    if one is None or other is None:
        return False
    return within(one, other, gold.relative_tolerance, gold.absolute_tolerance) or equal(one, other)


def _equal_literals(gold_literal: Literal, literal: Literal, gold: Gold) -> bool:
    gold_unit = gold_literal.unit or gold.unit_name
    if literal.misspelled or (gold_unit and literal.unit and gold_unit != literal.unit):
        return False
    relative, absolute = Fraction(gold.relative_tolerance), Fraction(gold.absolute_tolerance)
    one, other = gold_literal.value, literal.value
    # 50 % is the same number as 1/2, and its sign may be left out as other units are.
    pairs = [(one, other), (one / 100 if gold_unit == "%" else one, other / 100 if literal.unit == "%" else other)]
    return any(abs(one - other) <= max(absolute, relative * abs(one)) for one, other in pairs)


def _split_name(text: str) -> tuple[str, str]:
    r"""Return the name and the value of `x = 5`, of `x \in (1, 2)` and of `x \approx 0.3`; "" where there is no name.

    What stands after ≈ is not read where something exact stands before it.
    """
    sides = [side.strip() for side in split(text, "≈")]
    if len(sides) > 1 and not _NAME.fullmatch(sides[0]):
        text = sides[0]
    *names, value = [side.strip() for side in split(text, r"[=≈]|\\in(?![A-Za-z])")]
    if not names or len(split(text, r",|[<>]|\\(?:le|ge|ne)(?![A-Za-z])")) > 1:
        return "", text
    if len(names) == 1 and _NUMBER.fullmatch(value) and _QUANTITY.fullmatch(names[0]):
        return names[0], value
    return ("=".join(names), value) if all(map(_NAME.fullmatch, names)) else ("", text)


def _plain_text(text: str, bare: bool = False) -> str:
    r"""Words of `\text{Evelyn}` or `\text{(C)}`, or `bare` ones; "" for what is more than words."""
    if not bare and not _TEXT.search(text):
        return ""
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
    return _plain_text(text, bare=True) or squash(text)
