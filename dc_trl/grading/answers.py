r"""The verdict: lists, sets, intervals and matrices part by part, numbers as numbers, the rest as expressions."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from .expressions import equal, has_value, parse_expression, printed, same_relation, within
from .literals import Literal, parse_literal, parse_unit
from .structure import Node, last_value, parse, relation_sides
from .text import clean, extract_answer, gold_answer, is_reasonable, squash


logger = logging.getLogger("dc_trl.grading")


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
        ValueError: a tolerance is negative or not a number.
    """

    answer: str
    multiple_answers: bool = False
    unit: str | None = None
    relative_tolerance: float = 0.0
    absolute_tolerance: float = 0.0

    def __post_init__(self) -> None:
        for field in ("relative_tolerance", "absolute_tolerance"):
            if not 0 <= (value := self.__dict__[field]) < float("inf"):
                raise ValueError(f"{field}={value} is no tolerance: use a finite number of at least 0.")

    @property
    def unit_name(self) -> str:
        """`unit` in one spelling, "" for none."""
        return "" if self.unit is None else parse_unit(f" {clean(self.unit)}") or squash(self.unit)

    @property
    def is_tolerant(self) -> bool:
        return self.relative_tolerance > 0 or self.absolute_tolerance > 0


# Columns of a data set that a reward function reads besides the answer.
GRADING_COLUMNS = tuple(field.name for field in fields(Gold) if field.name != "answer")


class Verdict(NamedTuple):
    """What is known of a completion. It is true where the answer is correct.

    Attributes:
        correct: None where the gold answer cannot be graded.
        answer: the boxed answer in one spelling, so that equal answers vote together; None without a box.
    """

    correct: bool | None
    answer: str | None

    def __bool__(self) -> bool:
        return self.correct is True


_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}")
_TRAILING_UNIT = re.compile(r"(.*[^\s_^{])\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?|\^\\circ|%)")
_WORD = re.compile(r"[^\W\d_]{2,}|n/a", re.IGNORECASE)
_CLOCK = re.compile(r"\d+(?::\d+)+", re.ASCII)  # 12:00 is no division by zero
_OPERATOR = re.compile(r"[\d\\+*^=<>_]|\w\(")


def is_gradable(gold: Gold | str) -> bool:
    r"""Whether a gold answer can be graded: numbers, mathematics and `\text{...}`.

    False of prose, of broken LaTeX, and of what has no value, as `\frac{0}{0}`. Every other gold accepts its own text.
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
    if (parsed := _parse_gold(gold)) is None:
        return Verdict(None, answer)
    try:
        return _grade(answer, parsed, gold)
    except MemoryError:  # it is no property of the text alone
        raise
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _ParsedGold(NamedTuple):
    node: Node
    texts: frozenset[str]  # its own, which are right whatever they mean
    cleaned: str
    plain: bool  # nothing but numbers


def _grade(answer: str | None, parsed: _ParsedGold, gold: Gold) -> Verdict:
    if answer is None:
        return Verdict(False, None)
    is_own = answer in parsed.texts
    if not is_own and not is_reasonable(answer):
        return Verdict(False, squash(answer[:100]))
    cleaned = clean(answer)
    is_own = is_own or squash(cleaned) == squash(parsed.cleaned)
    node = parse(cleaned, gold.multiple_answers)
    correct = is_own or _equal(parsed.node, node, gold)
    return Verdict(correct, _canonical(parsed.node if is_own else node, symbolic=not parsed.plain))


@lru_cache(maxsize=256)
def _parse_gold(gold: Gold) -> _ParsedGold | None:
    """Return the parts of a gold answer; None if it cannot be graded."""
    text = gold_answer(gold.answer) or ""
    answer = extract_answer(text) or text
    # What cannot stand in a box, as `5}`, could not be answered by its own text.
    if not is_reasonable(answer) or not clean(answer) or extract_answer(f"\\boxed{{{answer}}}") != answer:
        return None
    cleaned = clean(answer)
    try:
        node = parse(last_value(cleaned), gold.multiple_answers)
        if not _is_gradable_node(node):
            return None
    except MemoryError:
        raise
    except Exception:  # what SymPy raises on mathematics without meaning is no closed list
        return None
    plain = all(parse_literal(text) is not None for text in _texts(node))
    return _ParsedGold(node, frozenset({gold.answer.strip(), text, answer}), cleaned, plain)


def _texts(node: Node) -> list[str]:
    """Return the texts of this node's scalars and relations."""
    if node.kind in ("scalar", "relation"):
        return [node.text]
    return [text for part in node.parts for text in _texts(part)]


def _is_gradable_node(node: Node) -> bool:
    if node.kind == "relation":
        sides = relation_sides(node.text)
        return sides is not None and _has_value(sides[0]) and _has_value(sides[2])
    if node.kind != "scalar":
        return all(map(_is_gradable_node, node.parts)) and (bool(node.parts) or node.kind == "set")
    text = node.text
    if parse_literal(text) is not None or (_TEXT.search(text) and _plain_text(text)) or _CLOCK.fullmatch(text):
        return True
    # Prose parses too, as a product of its letters: "none" would be e·n²·o.
    if not text or (_WORD.search(text) and not _OPERATOR.search(node.whole or text)):
        return False
    return _has_value(_without_unit(text)[0])


def _has_value(text: str) -> bool:
    return (expression := parse_expression(text)) is not None and has_value(expression)


def _equal(gold_node: Node, node: Node, gold: Gold) -> bool:
    if "relation" in (gold_node.kind, node.kind) or (gold_node.name and node.name and gold_node.name != node.name):
        return bool(gold_node.whole and node.whole) and _equal_relations(gold_node.whole, node.whole)
    if gold_node.kind == "scalar":
        return node.kind == "scalar" and _equal_scalars(gold_node.text, node.text, gold)
    kinds = {gold_node.kind, node.kind}
    if len(gold_node.parts) != len(node.parts) or (len(kinds) > 1 and kinds != {"list", "set"}):
        return False
    if gold_node.kind in ("list", "set", "union"):
        return _equal_in_any_order(gold_node.parts, list(node.parts), gold)
    pairs = [gold_node.parts, node.parts]
    if all(part.name for parts in pairs for part in parts):  # (q=2, p=5) is (p=5, q=2)
        pairs = [tuple(sorted(parts, key=lambda part: part.name)) for parts in pairs]
    return all(_equal(one, other, gold) for one, other in zip(*pairs, strict=True))


def _equal_relations(gold_text: str, text: str) -> bool:
    """Whether two equations or inequalities are the same up to a constant factor."""
    if squash(gold_text) == squash(text):
        return True
    gold_sides, sides = relation_sides(gold_text), relation_sides(text)
    if gold_sides is None or sides is None or gold_sides[1] != sides[1]:
        return False
    ordered = sides[1] in ("<", "\\le")
    one, other = ((parse_expression(left), parse_expression(right)) for left, _, right in (gold_sides, sides))
    return same_relation(one, other, ordered)


def _equal_in_any_order(golds: Sequence[Node], nodes: list[Node], gold: Gold) -> bool:
    """Whether each gold has an answer of its own: a matching, found by augmenting paths."""
    fits = [[_equal(one, other, gold) for other in nodes] for one in golds]
    taken: dict[int, int] = {}

    def assign(index: int, seen: set[int]) -> bool:
        for other, fit in enumerate(fits[index]):
            if fit and other not in seen:
                seen.add(other)
                if other not in taken or assign(taken[other], seen):
                    taken[other] = index
                    return True
        return False

    return all(assign(index, set()) for index in range(len(golds)))


def _equal_scalars(gold_text: str, text: str, gold: Gold) -> bool:
    if squash(gold_text) == squash(text):
        return True
    gold_literal, literal = parse_literal(gold_text), parse_literal(text)
    if gold_literal is not None:
        return literal is not None and _equal_literals(gold_literal, literal, gold)
    if _TEXT.search(gold_text) and _plain_text(gold_text):
        return _plain_text(gold_text) == _plain_text(text)
    gold_value, gold_unit = _without_unit(gold_text)
    value, unit = _without_unit(text)
    stated = gold_unit or gold.unit_name
    if (stated and unit and stated != unit) or _lacks_percent(gold_unit, unit, gold):
        return False
    if squash(gold_value) == squash(value):
        return True
    gold_expression, expression = parse_expression(gold_value), parse_expression(value)
    if gold_expression is None or expression is None:
        return False
    if gold.is_tolerant and within(gold_expression, expression, gold.relative_tolerance, gold.absolute_tolerance):
        return True
    return equal(gold_expression, expression)


def _equal_literals(gold_literal: Literal, literal: Literal, gold: Gold) -> bool:
    gold_unit = gold_literal.unit or gold.unit_name
    if gold_unit and literal.unit and gold_unit != literal.unit:
        return False
    if literal.misspelled or not (literal.finished or gold_literal.scientific or gold.is_tolerant):
        return False
    relative, absolute = Fraction(gold.relative_tolerance), Fraction(gold.absolute_tolerance)
    one, other = gold_literal.value, literal.value
    # 50 % is the same number as 1/2, and of an integer or a decimal the sign may be left out as other units are.
    pairs = [(one / 100 if gold_unit == "%" else one, other / 100 if literal.unit == "%" else other)]
    if not _lacks_percent(gold_literal.unit, literal.unit, gold) or (gold_literal.decimal and literal.decimal):
        pairs.append((one, other))
    return any(abs(one - other) <= max(absolute, relative * abs(one)) for one, other in pairs)


def _lacks_percent(gold_unit: str, unit: str, gold: Gold) -> bool:
    """Whether one side has a percent sign that the other lacks, and that `Gold.unit` does not state for both."""
    return gold.unit_name != "%" and (gold_unit == "%") != (unit == "%")


def _plain_text(text: str) -> str:
    r"""Words of `\text{Evelyn}` or `\text{(C)}`, "" for what is more than words."""
    words = re.sub(r"[\s()]+", " ", _TEXT.sub(r"\1", text)).strip().casefold()
    return words if re.fullmatch(r"[^\W_][\w ,.'/-]*", words) and not re.search(r"[\d_]", words) else ""


def _without_unit(text: str) -> tuple[str, str]:
    if (match := _TRAILING_UNIT.fullmatch(text)) and (written := parse_unit(match[2])):
        return match[1].strip(), written
    return text, ""


def _canonical(node: Node, symbolic: bool) -> str:
    if node.kind == "scalar":
        return _canonical_scalar(node.text, symbolic)
    if node.kind == "relation":
        return squash(node.text)
    parts = [_canonical(part, symbolic) for part in node.parts]
    if node.kind in ("list", "set"):
        return f"{{{', '.join(sorted(parts))}}}"
    if node.kind == "union":
        return " ∪ ".join(sorted(parts))
    if node.kind.startswith("matrix"):
        return f"{node.kind}: {', '.join(parts)}"
    return f"{node.kind[0]}{', '.join(parts)}{node.kind[1]}"


def _canonical_scalar(text: str, symbolic: bool) -> str:
    if (literal := parse_literal(text)) is not None and not literal.misspelled:
        return f"{literal.value}{'%' if literal.unit == '%' else ''}"
    if words := _plain_text(text):
        return words
    value, unit = _without_unit(text)
    expression = parse_expression(value) if symbolic else None
    spelling = (None if expression is None else printed(expression)) or squash(value)
    return f"{spelling}{'%' if unit == '%' else ''}"
