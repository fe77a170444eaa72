r"""The verdict: lists, sets, intervals and matrices part by part, numbers as numbers, the rest as expressions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import NamedTuple

from .expressions import equal, exact, is_expensive, parse_expression, same_relation, within
from .literals import Literal, parse_literal, parse_unit
from .structure import Node, last_value, parse, relation_sides
from .text import clean, extract_answer, is_reasonable, squash


@dataclass(frozen=True)
class Gold:
    r"""The right answer, and how closely an answer has to meet it.

    Attributes:
        answer: LaTeX or a plain number, may be inside `\boxed{}`.
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
_TRAILING_UNIT = re.compile(r"(.*[^\s_^{])\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?|\^\\circ)")
_WORD = re.compile(r"[^\W\d_]{2,}|n/a", re.IGNORECASE)
_OPERATOR = re.compile(r"[\d\\+*^=<>_]|\w\(")


def is_gradable(gold: Gold | str) -> bool:
    r"""Whether a gold answer can be graded: numbers, mathematics and `\text{...}`, not prose or broken LaTeX."""
    return _parse_gold(gold if isinstance(gold, Gold) else Gold(gold)) is not None


def grade(text: str, gold: Gold) -> Verdict:
    """Verdict on the last boxed answer of a text, in this process and without limits of time and memory.

    [`Grader`] is the safe way to grade what a model wrote. What SymPy raises on mathematics without meaning is raised.
    """
    return grade_answer(extract_answer(text), gold)


def grade_answer(answer: str | None, gold: Gold) -> Verdict:
    """Verdict on what a box holds (None: there is no box)."""
    gold_node = _parse_gold(gold)
    if gold_node is None:
        return Verdict(None, answer)
    if answer is None:
        return Verdict(False, None)
    if not is_reasonable(answer):
        return Verdict(False, squash(answer[:100]))
    node = parse(clean(answer), gold.multiple_answers)
    plain = all(parse_literal(text) is not None for text in _texts(gold_node))
    if not plain and any(is_expensive(text, gold.answer) for text in _texts(node)):
        return Verdict(False, squash(answer))
    return Verdict(_equal(gold_node, node, gold), _canonical(node, symbolic=not plain))


def _parse_gold(gold: Gold) -> Node | None:
    answer = extract_answer(gold.answer) or gold.answer
    if not is_reasonable(answer) or not clean(answer):
        return None
    node = parse(last_value(clean(answer)), gold.multiple_answers)
    return node if _is_gradable_node(node) else None


def _texts(node: Node) -> list[str]:
    """Of its scalars and relations."""
    if node.kind in ("scalar", "relation"):
        return [node.text]
    return [text for part in node.parts for text in _texts(part)]


def _is_gradable_node(node: Node) -> bool:
    if node.kind == "relation":
        sides = relation_sides(node.text)
        return sides is not None and None not in (parse_expression(sides[0]), parse_expression(sides[2]))
    if node.kind != "scalar":
        return all(map(_is_gradable_node, node.parts)) and (bool(node.parts) or node.kind == "set")
    text = node.text
    if parse_literal(text) is not None or (_TEXT.search(text) and _plain_text(text)):
        return True
    # Prose parses too, as a product of its letters: "none" would be e·n²·o.
    if not text or (_WORD.search(text) and not _OPERATOR.search(node.whole or text)):
        return False
    return parse_expression(_without_unit(text)[0]) is not None


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
    return all(_equal(one, other, gold) for one, other in zip(gold_node.parts, node.parts, strict=True))


def _equal_relations(gold_text: str, text: str) -> bool:
    """Whether two equations or inequalities are the same up to a constant factor."""
    if squash(gold_text) == squash(text):
        return True
    gold_sides, sides = relation_sides(gold_text), relation_sides(text)
    if gold_sides is None or sides is None or gold_sides[1] != sides[1] or is_expensive(text, gold_text):
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
    gold_unit = gold_unit or gold.unit_name
    if gold_unit and unit and gold_unit != unit:
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
    if gold_unit and literal.unit and gold_unit != literal.unit and "%" not in (gold_unit, literal.unit):
        return False
    if literal.misspelled or not (literal.finished or gold_literal.scientific or gold.is_tolerant):
        return False
    relative, absolute = Fraction(gold.relative_tolerance), Fraction(gold.absolute_tolerance)
    golds, values = [gold_literal.value], [literal.value]
    # 50 % is the same number as 1/2, and the percent sign is also a unit that may be left out.
    if gold_unit == "%" and literal.unit != "%":
        golds.append(gold_literal.value / 100)
    if literal.unit == "%" and gold_unit != "%":
        values.append(literal.value / 100)
    return any(abs(one - other) <= max(absolute, relative * abs(one)) for one in golds for other in values)


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
    value, _ = _without_unit(text)
    expression = parse_expression(value) if symbolic else None
    return squash(value) if expression is None else str(exact(expression).doit())
