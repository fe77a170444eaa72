r"""The parts of an answer: lists, sets, tuples, intervals, matrices, and what stands before `=` or `<`."""

import re
from dataclasses import dataclass, replace

from .expressions import number
from .literals import parse_literal
from .text import clean, is_balanced, split, squash


_REALS = "\\mathbb{R}"
INTERVALS = ("()", "(]", "[)", "[]")

_LETTERS = r"\\?[A-Za-z]+(?:\s*[A-Za-z](?![A-Za-z]))*"
_SUBSCRIPT = r"(?:\s*_\s*(?:\w|\\[A-Za-z]+|\{[^{}]*\}))?"
_ATOM = (
    rf"(?:(?:m\s*)?\\angle\s*)?{_LETTERS}{_SUBSCRIPT}(?:\^\s*\{{-1\}}|'|\^\s*\{{?\s*\\prime\s*\}}?)*(?:\s*\([^()=]*\))?"
    r"|m?\s*\\angle[A-Z\s\w{}]*|\\frac\s*\{\s*d[^{}]*\}\s*\{\s*d[^{}]*\}|\\frac\s*\{[A-Za-z\s]+\}\s*\{[A-Za-z\s]+\}"
    rf"|\\(?:overline|overrightarrow|vec|hat|bar|text|math[a-z]+|boldsymbol|operatorname)\s*\{{[^{{}}\d]*\}}{_SUBSCRIPT}(?:\s*\([^()=]*\))?"
    r"|\\(?:sin|cos|tan|cot|sec|csc)\s*\\?[A-Za-z]+|\|\s*\\?[A-Za-z][^|\d=<>]*\||\[[A-Z]+\]"
)
_NAME = re.compile(rf"(?!\\(?:pi|infty|e)(?![A-Za-z]))(?:{_ATOM})")
_NAMES = re.compile(rf"\(\s*(?:{_ATOM})(?:\s*[,;]\s*(?:{_ATOM}))+\s*\)")
_COMPOUND = re.compile(rf"(?:{_ATOM})(?:\s*(?:[-+*/:]|\\cdot|\\times)\s*(?:{_ATOM}))+")
_ABSOLUTE = re.compile(rf"\|\s*({_LETTERS}{_SUBSCRIPT})\s*\|")
_RELATION = r"≈|[<>=]|\\(?:le|ge|ne|in)(?![A-Za-z])"
_AND = r"\s*,?\s*(?:\\(?:text|mathrm)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
_THOUSANDS_BEFORE = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:,\d{3})*$")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{([pb]?|small)(matrix|array)\}(?:\{[lcr|\s]*\})?((?:(?!\\begin|\\end).)*)\\end\{\1\2\}\s*[)\]]?",
    re.DOTALL,
)
_CASES = re.compile(r"\\begin\{cases\}([^&]*?)\\end\{cases\}", re.DOTALL)
_BUILDER = re.compile(rf"({_ATOM})\s*(?:\\in\s*\\mathbb{{R}}\s*)?[|:]\s*(.+)")


@dataclass(frozen=True)
class Node:
    r"""A part of an answer.

    Attributes:
        kind: `scalar` (text), `list`, `set`, `union`, `()`, `(]`, `[)`, `[]`, `relation` (text) or `matrix R+R`.
        parts: of a list, set, union, tuple, interval (its two ends) or matrix (its cells).
        text: of a scalar, or of a relation without a name: an equation, an inequality.
        name: what stands before `=`, `<` or `\in`: x of `x = 5`; "" where there is nothing.
        whole: the relation with its name, "" where there is none.
    """

    kind: str
    parts: tuple["Node", ...] = ()
    text: str = ""
    name: str = ""
    whole: str = ""


def parse(text: str, several: bool = False) -> Node:
    """Return the parts of a cleaned text; `several` if commas separate answers, never thousands."""
    text = text.strip()
    if parse_literal(text) is not None and not (several and "," in text):
        return Node("scalar", text=text)
    if match := _MATRIX.fullmatch(text):
        rows = [split(row, "&")[0] for row in re.split(r"\\\\", match[3]) if row.strip()]
        cells = tuple(parse(clean(cell)) for row in rows for cell in row)
        return Node(f"matrix {'+'.join(str(len(row)) for row in rows)}", cells)
    if match := _CASES.fullmatch(text):  # a system of equations
        return Node("list", tuple(parse(clean(line)) for line in re.split(r"\\\\", match[1]) if line.strip()))
    if listed := _parse_list(text):
        return listed
    sides, signs = split(text, _RELATION)
    if signs:
        return _parse_relation([side.strip() for side in sides], signs)
    pieces, _ = split(text, r"\\cup(?![A-Za-z])")
    if len(pieces) > 1:
        return _union(tuple(parse(clean(piece)) for piece in pieces))
    return _parse_brackets(text)


def relation_sides(text: str) -> tuple[str, str, str] | None:
    """Left side, sign and right side of a relation with one sign, turned so that the sign is not `>`."""
    sides, signs = split(text, _RELATION)
    if len(signs) != 1:
        return None
    turned = {">": "<", "\\ge": "\\le"}.get(signs[0])
    return (sides[1], turned, sides[0]) if turned else (sides[0], signs[0], sides[1])


def last_value(text: str) -> str:
    """`x = 11` of a chain such as `x = 5 + 6 = 11`."""
    sides, signs = split(text, _RELATION)
    is_chain = len(signs) > 1 and set(signs) == {"="} and not split(text, f"{_AND}|[,;]")[1]
    return f"{sides[0]}={sides[-1]}" if is_chain and _NAME.fullmatch(sides[0].strip()) else text


def _parse_list(text: str) -> Node | None:
    groups = [_split_commas(group) for group in split(text, ";")[0]]
    if len(groups) == 1 and len(groups[0]) == 1:
        return None
    nodes = [[parse(part) for part in group if part.strip()] for group in groups]
    if solutions := _solutions([node for group in nodes for node in group]):
        return solutions
    if len(groups) > 1 and all(len(group) > 1 for group in groups):  # 5, 2; 7, 2
        return Node("list", tuple(Node("()", tuple(group)) for group in nodes))
    flat = tuple(part for group in nodes for node in group for part in (node.parts if node.kind == "list" else [node]))
    are_ranges = all(part.kind in INTERVALS and part.whole and "=" not in part.whole for part in flat)
    if len(flat) > 1 and are_ranges and all(part.name == flat[0].name for part in flat):
        return replace(_join_inequalities(flat, "or" in text), name=flat[0].name)
    return Node("list", flat)


def _solutions(nodes: list[Node]) -> Node | None:
    """`p=5, q=2 and p=7, q=2` as a list of tuples, whatever stands between them; None where names do not repeat so."""
    names = list(dict.fromkeys(node.name for node in nodes))
    rows = [nodes[start : start + len(names)] for start in range(0, len(nodes), max(1, len(names)))]
    if len(names) < 2 or "" in names or len(rows) < 2:
        return None
    if any({node.name for node in row} != set(names) or len(row) != len(names) for row in rows):
        return None
    return Node("list", tuple(Node("()", tuple(sorted(row, key=lambda node: names.index(node.name)))) for row in rows))


def _split_commas(text: str) -> list[str]:
    """Parts between commas. Where commas with a space separate, those without one are of thousands: `1,234, 5,678`."""
    raw, separators = split(text, f"{_AND}|,")
    has_spaces = any(part.startswith(" ") for part in raw[1:])
    parts = raw[:1]
    for separator, part in zip(separators, raw[1:], strict=True):
        is_thousand = separator == "," and re.match(r"\d{3}(?!\d)", part) and _THOUSANDS_BEFORE.search(parts[-1])
        if has_spaces and is_thousand:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _join_inequalities(nodes: tuple[Node, ...], is_either: bool) -> Node:
    """`x > 2 and x < 5` is an interval, `x < 2 or x > 3` a union."""
    if len(nodes) == 2 and not is_either:
        below, above = sorted(nodes, key=lambda node: node.parts[1].text == "\\infty")
        low, high = number(above.parts[0].text), number(below.parts[1].text)
        are_rays = below.parts[0].text == "-\\infty" and above.parts[1].text == "\\infty"
        if are_rays and low is not None and high is not None and low < high:
            return Node(above.kind[0] + below.kind[1], (above.parts[0], below.parts[1]))
    return Node("union", nodes)


def _union(nodes: tuple[Node, ...]) -> Node:
    if not all(node.kind in ("set", "list") for node in nodes):
        return Node("union", nodes)
    return Node("set", tuple({squash(part.text) or part: part for node in nodes for part in node.parts}.values()))


def _parse_relation(sides: list[str], signs: list[str]) -> Node:
    text = "".join(f"{side}{sign} " for side, sign in zip(sides, [*signs, ""], strict=True)).strip()
    if set(signs) <= {"=", "≈"}:
        return _parse_equation(sides, signs, text)
    if signs == ["\\in"]:
        return replace(parse(sides[1]), name=squash(sides[0]))
    if signs == ["\\ne"] and _NAME.fullmatch(sides[0]):
        rays = (_interval("-\\infty", "<", "<", sides[1]), _interval(sides[1], "<", "<", "\\infty"))
        return Node("union", rays, name=squash(sides[0]), whole=text)
    if set(signs) <= {">", "\\ge"}:
        sides, signs = sides[::-1], [{">": "<", "\\ge": "\\le"}[sign] for sign in signs[::-1]]
    if set(signs) <= {"<", "\\le"} and (node := _parse_inequality(sides, signs)):
        return replace(node, whole=text)
    return Node("relation", text=text, whole=text)


def _parse_equation(sides: list[str], signs: list[str], text: str) -> Node:
    if "≈" in signs:  # of `1/3 ≈ 0.333` the first is the answer, of `x ≈ 0.333` the second
        first = signs.index("≈")
        sides = sides[: first + (2 if _NAME.fullmatch(sides[first]) else 1)]
        text = "=".join(sides)
    if len(sides) == 1:
        return parse(sides[0])
    *names, value = sides
    if len(sides) == 2 and _is_name(value, names[0]) and not _is_name(names[0], value):
        names, value = [value], names[0]
    if all(_is_name(name, value) for name in names):
        return replace(parse(value), name=squash("=".join(names)), whole=text)
    return Node("relation", text=text, whole=text)


def _is_name(text: str, value: str) -> bool:
    """Return whether `text = value` names a value: `x`, `f(x)`, `(x, y)`, and `m+n` if it is a number but 0."""
    if _NAME.fullmatch(text) or _NAMES.fullmatch(text):
        return True
    is_number = not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", value)) and re.search("[1-9]", value)
    return bool(is_number and _COMPOUND.fullmatch(text))


def _parse_inequality(sides: list[str], signs: list[str]) -> Node | None:
    """Return the interval that `2 < x`, `3 < x \\le 4` or `|x| < 3` is; signs are `<` and `\\le`."""
    if len(signs) > 2:
        return None
    if len(signs) == 2:
        low, name, high = sides
        first, last = signs
    elif _NAME.fullmatch(sides[0]):
        (name, high), low, first, last = sides, "-\\infty", "<", signs[0]
    else:
        (low, name), high, first, last = sides, "\\infty", signs[0], "<"
    if not _NAME.fullmatch(name):
        return None
    absolute = _ABSOLUTE.fullmatch(name)
    if not absolute:
        return replace(_interval(low, first, last, high), name=squash(name))
    if low == "-\\infty":
        return replace(_interval(_negative(high), last, last, high), name=squash(absolute[1]))
    rays = (_interval(_negative(high), last, first, _negative(low)), _interval(low, first, last, high))
    return Node("union", rays, name=squash(absolute[1]))


def _interval(low: str, first: str, last: str, high: str) -> Node:
    return Node(f"{'(' if first == '<' else '['}{')' if last == '<' else ']'}", (parse(low), parse(high)))


def _negative(text: str) -> str:
    return f"-({text})" if re.search(r"[+-]", text) else f"-{text}"


def _parse_brackets(text: str) -> Node:
    if text in ("\\emptyset", "\\{\\}"):
        return Node("set")
    if text == _REALS:
        return _interval("-\\infty", "<", "<", "\\infty")
    for opening, closing in (("\\{", "\\}"), *((a, b) for a in "([" for b in ")]")):
        if not (text.startswith(opening) and text.endswith(closing)):
            continue
        inner = text[len(opening) : -len(closing)]
        if not is_balanced(inner):
            break
        if opening == "\\{":
            builder = _BUILDER.fullmatch(inner.strip())
            node = parse(builder[2]) if builder else parse(inner, several=True)
            is_builder = builder and node.name == squash(builder[1])
            return node if is_builder else Node("set", node.parts if node.kind == "list" else (node,))
        if listed := _parse_list(inner):
            return Node(opening + closing, listed.parts)
        return parse(inner) if opening + closing == "()" else Node("scalar", text=text)
    if text.count("\\pm") == 1:
        return Node("list", tuple(Node("scalar", text=text.replace("\\pm", sign).lstrip(" +")) for sign in "+-"))
    return Node("scalar", text=text)
