r"""The verdict: lists, sets, intervals and matrices part by part, numbers as numbers, the rest as expressions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from .expressions import equal, exact, is_expensive, parse_expression, within
from .literals import Literal, parse_literal, parse_unit
from .text import clean, extract_answer, is_reasonable, split, squash


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


class Verdict(NamedTuple):
    """What is known of a completion.

    Attributes:
        correct: None where the gold answer cannot be graded.
        answer: the boxed answer in one spelling, so that equal answers vote together; None without a box.
    """

    correct: bool | None
    answer: str | None


@dataclass(frozen=True)
class _Node:
    """A part of an answer: `scalar` (text), `list`, `set`, `union`, `()`, `(]`, `[)`, `[]`, or `matrix R×C`."""

    kind: str
    parts: tuple["_Node", ...] = ()
    text: str = ""


_NAME = r"(?:\\angle\s*)?\\?[A-Za-z]+(?:\s*[A-Za-z](?![A-Za-z]))*(?:\s*_\s*(?:\w|\{[^{}]*\}))?'*(?:\s*\([^()=]*\))?"
_DERIVATIVE = r"\\frac\s*\{\s*d[^{}]*\}\s*\{\s*d[^{}]*\}"
_NAMED = re.compile(rf"(?:({_NAME}|{_DERIVATIVE}|\\angle[A-Z\s\w{{}}]*)\s*)?=(?!=)\s*([^=]+)")
_INTERVALS = ("()", "(]", "[)", "[]", "union")
_EQUALS = re.compile(r"(?<![<>!])=")
_MEMBER = re.compile(rf"({_NAME})\s*\\in(?![a-z])\s*(.+)")
_LESS = r"\s*(<|\\le(?![a-z]))\s*"
_CHAIN = re.compile(rf"([^<>=\\]*(?:\\(?!le|ge)[^<>=\\]*)*?){_LESS}([A-Za-z]){_LESS}(.+)")
_BOUND = re.compile(r"([A-Za-z])\s*(<|>|\\le(?![a-z])|\\ge(?![a-z]))\s*(.+)")
_AND = re.compile(
    r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_MATRIX = re.compile(
    r"\(?\s*\\begin\{([pb]?|small)(matrix|array)\}(?:\{[lcr|\s]*\})?(.*)\\end\{\1\2\}\s*\)?", re.DOTALL
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_TRAILING_UNIT = re.compile(r"(.*[^\s_^{])\s*(\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?|\^\\circ)")
_WORD = re.compile(r"[^\W\d_]{2,}|n/a", re.IGNORECASE)
_OPERATOR = re.compile(r"[\d\\+*^=<>_]|\w\(")


def is_gradable(gold: Gold | str) -> bool:
    r"""Whether a gold answer can be graded: numbers, mathematics and `\text{...}`, not prose or broken LaTeX."""
    node = _parse_gold(gold if isinstance(gold, Gold) else Gold(gold))
    return node is not None and all(map(_is_gradable_scalar, _scalars(node)))


def grade(text: str, gold: Gold) -> Verdict:
    """Verdict on the last boxed answer of a text, in this process and without limits of time and memory.

    [`Grader`] is the safe way to grade what a model wrote.
    """
    return grade_answer(extract_answer(text), gold)


def grade_answer(answer: str | None, gold: Gold) -> Verdict:
    """Verdict on what a box holds (None: there is no box)."""
    gold_node = _parse_gold(gold)
    if gold_node is None or not all(map(_is_gradable_scalar, _scalars(gold_node))):
        return Verdict(None, answer)
    if answer is None:
        return Verdict(False, None)
    if not is_reasonable(answer):
        return Verdict(False, squash(answer[:100]))
    node = _parse(clean(answer), gold.multiple_answers, is_interval=gold_node.kind in _INTERVALS)
    plain = all(parse_literal(_value(text)) is not None for text in _scalars(gold_node))
    if not plain and any(is_expensive(text, gold.answer) for text in _scalars(node)):
        return Verdict(False, squash(answer))
    try:
        return Verdict(_equal(gold_node, node, gold), _canonical(node, symbolic=not plain))
    except MemoryError:
        raise
    except Exception:  # what SymPy raises on mathematics without a meaning is no closed list; the answer is wrong
        return Verdict(False, squash(answer))


def _parse_gold(gold: Gold) -> _Node | None:
    answer = extract_answer(gold.answer) or gold.answer
    return _parse(clean(answer), gold.multiple_answers) if is_reasonable(answer) and clean(answer) else None


def _scalars(node: _Node) -> list[str]:
    return [node.text] if node.kind == "scalar" else [text for part in node.parts for text in _scalars(part)]


def _is_gradable_scalar(text: str) -> bool:
    if parse_literal(_value(text)) is not None or (_TEXT.search(text) and _plain_text(text)):
        return True
    # Prose parses too, as a product of its letters: "none" would be e·n²·o.
    if not text or (_WORD.search(text) and not _OPERATOR.search(text)):
        return False
    return parse_expression(text) is not None or parse_expression(_value(text)) is not None


def _parse(text: str, multiple: bool = False, is_interval: bool = False) -> _Node:
    if parse_literal(text) is not None and not (multiple and "," in text):
        return _Node("scalar", text=text)
    if match := _MATRIX.fullmatch(text):
        rows = [split(row, "&") for row in re.split(r"\\\\", match[3]) if row.strip()]
        cells = tuple(_parse(clean(cell)) for row in rows for cell in row)
        return _Node(f"matrix {'+'.join(str(len(row)) for row in rows)}", cells)
    if match := _MEMBER.fullmatch(text):
        text = match[2]
    elif is_interval and all(intervals := [_inequality(part) for part in _AND.split(text)]):
        text = "\\cup".join(filter(None, intervals))
    parts = split(_AND.sub(", ", text), ",;")
    if len(parts) > 1:
        nodes = [_parse(part) for part in parts if part]
        return _Node("list", tuple(part for node in nodes for part in (node.parts if node.kind == "list" else [node])))
    pieces = text.split("\\cup")
    if len(pieces) > 1:
        return _Node("union", tuple(_parse(piece.strip()) for piece in pieces))
    for opening, closing in (("\\{", "\\}"), *((a, b) for a in "([" for b in ")]")):
        if text.startswith(opening) and text.endswith(closing) and len(split(text + ",", ",")) == 2:
            inner = text[len(opening) : -len(closing)]
            if not _closes_at_end(inner):
                break
            node = _parse(inner.strip())
            if opening == "\\{":
                return _Node("set", node.parts if node.kind == "list" else (node,))
            if node.kind == "list":
                return _Node(opening + closing, node.parts)
            return node if opening + closing == "()" else _Node("scalar", text=text)
    if text.count("\\pm") == 1:
        return _Node("list", tuple(_Node("scalar", text=_tidy(text.replace("\\pm", sign))) for sign in "+-"))
    return _Node("scalar", text=text)


def _closes_at_end(inner: str) -> bool:
    depth = 0
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _tidy(text: str) -> str:
    """Without a plus sign that leads the text or what `=` separates."""
    return re.sub(r"(^|=)\s*\+", r"\1", text).strip()


def _inequality(text: str) -> str | None:
    r"""The interval that `3 < x \le 4` or `x > 2` is."""
    if match := _CHAIN.fullmatch(text):
        return f"{'(' if match[2] == '<' else '['}{match[1]}, {match[5]}{')' if match[4] == '<' else ']'}"
    if match := _BOUND.fullmatch(text):
        if match[2] in (">", "\\ge"):
            return f"{'(' if match[2] == '>' else '['}{match[3]}, \\infty)"
        return f"(-\\infty, {match[3]}{')' if match[2] == '<' else ']'}"
    return None


def _equal(gold_node: _Node, node: _Node, gold: Gold) -> bool:
    if gold_node.kind == "scalar":
        return node.kind == "scalar" and _equal_scalars(gold_node.text, node.text, gold)
    kinds = {gold_node.kind, node.kind}
    if len(gold_node.parts) != len(node.parts) or (len(kinds) > 1 and kinds != {"list", "set"}):
        return False
    if gold_node.kind in ("list", "set", "union"):
        return _equal_in_any_order(gold_node.parts, list(node.parts), gold)
    return all(_equal(one, other, gold) for one, other in zip(gold_node.parts, node.parts, strict=True))


def _equal_in_any_order(golds: Sequence[_Node], nodes: list[_Node], gold: Gold) -> bool:
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


def _named(text: str) -> tuple[str, str]:
    """Name and value of `x = 5`, an empty name where there is none."""
    match = _NAMED.fullmatch(text)
    return (squash(match[1] or ""), match[2].strip()) if match else ("", text)


def _value(text: str) -> str:
    return _named(text)[1]


def _equal_scalars(gold_text: str, text: str, gold: Gold) -> bool:
    if squash(gold_text) == squash(text):
        return True
    (gold_name, gold_value), (name, value) = _named(gold_text), _named(text)
    if (gold_name and name and gold_name != name) or (_EQUALS.search(value) and _EQUALS.search(gold_text)):
        gold_value, value = gold_text, text
    if len(_EQUALS.findall(value)) != len(_EQUALS.findall(gold_value)):
        return False
    gold_literal, literal = parse_literal(gold_value), parse_literal(value)
    if gold_literal is not None:
        return literal is not None and _equal_literals(gold_literal, literal, gold)
    if _TEXT.search(gold_text) and _plain_text(gold_text):
        return _plain_text(gold_text) == _plain_text(text)
    gold_value, gold_unit = _without_unit(gold_value)
    value, unit = _without_unit(value)
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


def _canonical(node: _Node, symbolic: bool) -> str:
    if node.kind == "scalar":
        return _canonical_scalar(node.text, symbolic)
    parts = [_canonical(part, symbolic) for part in node.parts]
    if node.kind in ("list", "set"):
        return f"{{{', '.join(sorted(parts))}}}"
    if node.kind == "union":
        return " ∪ ".join(sorted(parts))
    if node.kind.startswith("matrix"):
        return f"{node.kind}: {', '.join(parts)}"
    return f"{node.kind[0]}{', '.join(parts)}{node.kind[1]}"


def _canonical_scalar(text: str, symbolic: bool) -> str:
    value = _value(text)
    if (literal := parse_literal(value)) is not None and not literal.misspelled:
        return f"{literal.value}{'%' if literal.unit == '%' else ''}"
    if words := _plain_text(text):
        return words
    value, _ = _without_unit(value)
    expression = parse_expression(value) if symbolic else None
    return squash(value) if expression is None else str(exact(expression).doit())
