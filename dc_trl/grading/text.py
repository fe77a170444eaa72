r"""The text of an answer: found in a completion, and spelled in one way."""

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from typing import Any


MAX_TEXT = 1_000_000  # characters at the end of a completion in which a box is looked for
MAX_ANSWER = 1_000  # characters; the longest gold answer of the six benchmarks has 171

# Bounded, so that a million backslashes take no more than a million steps. Some models escape the command twice, or
# leave the braces of a number out.
_TOKEN = re.compile(
    r"\\{1,2}(?:boxed|fbox)\s*(?:\{|(?P<bare>-?\d+(?:\.\d+)?)(?![\w^/{(]|\.\d|\\[A-Za-z]))|\\.|[{}]", re.DOTALL
)
_CUT_COMMAND = re.compile(r"\\(?:bo(?:xe?d?)?|fb(?:ox?)?)\s*\Z")  # a text that ends here was opening a box
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

# Other spellings of the same, in the order in which they go. `\\` separates the rows of a matrix, and stays.
_ROWS = r"(?<!\\)((?:\\\\)*)"
_SPELLINGS = {
    r"(?<=\d)(?:(?:\{\s*,\s*\}|\\[,;:!]\s*|\\ |[\u2009\u202f~])(?=\d{3}(?!\d))|,\\!\s*(?=\d))": "",  # thousands
    _ROWS + r"\\!\s*": r"\1",
    _ROWS + r"\\(?:[,;: ]|q?quad(?![a-zA-Z]))|~": r"\1 ",
    _ROWS + r"\\[()\[\]]|(?<!\\)\$": r"\1",
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?": "",
    r"\\[dtc]frac(?![a-zA-Z])": r"\\frac",
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|up|sc)|[mh]box)(?![a-zA-Z])": r"\\text",
    r"\\(?:leq(?:slant|q)?|le)(?![a-zA-Z])|<=|[≤⩽]": r"\\le ",
    r"\\(?:geq(?:slant|q)?|ge)(?![a-zA-Z])|>=|[≥⩾]": r"\\ge ",
    r"\\(?:neq?|not\s*=)(?![a-zA-Z])|!=|≠": r"\\ne ",
    r"\\lbrace(?![a-zA-Z])": r"\\{",
    r"\\rbrace(?![a-zA-Z])": r"\\}",
    r"\\%": "%",
    r"\\\$": r"\\usd ",
    r"\s*(?:\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])|°)": r"^\\circ",
    "[−–]": "-",
    "×": r"\\times ",
    "[·⋅]": r"\\cdot ",
    "∞": r"\\infty ",
    "π": r"\\pi ",
    "∪": r"\\cup ",
    r"\\varnothing(?![a-zA-Z])|∅": r"\\emptyset ",
    r"√\s*(\d+|[A-Za-z])": r"\\sqrt{\1}",
    r"\\(?:approx|simeq)(?![a-zA-Z])": "≈",
    r"\\(sqrt|mathbb)\s*([^\W_])": r"\\\1{\2}",  # braces that TeX lets one leave out
    r"\\frac\s*(\d)\s*(\d)": r"\\frac{\1}{\2}",
    r"\s+": " ",
}
_WRAPPED = re.compile(
    r"\\(?:math(?:bf|it|sf|cal|tt|normal)|boldsymbol|bm|boxed|fbox)\s*\{(.*)\}|\{(.*)\}"
    r"|\\(?:text|mathrm)\s*\{([^a-zA-Z{}]*|\s*[-+]?\d[^{}]*)\}|\(([^,;]*)\)",
    re.DOTALL,
)


def extract_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}` without outer spaces, None if there is none (`last_box`)."""
    box = last_box(text)
    return None if box is None else box.strip()


def last_box(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}` or `\fbox{...}`, None if there is none or a later one is cut off.

    Boxes end where they close, so of nested boxes the outer one is last. A text that ends within a box has no answer:
    the boxes before it are those that it went on from. A number alone needs no braces, as in `\boxed 7`. A box whose
    brace was forgotten, and which an empty line ended (as it does in TeX), does not count against a box that follows.
    Only the last million characters are read.
    """
    answer: tuple[int, int] | None = None
    newest = 0  # where the content of the box starts that was opened last
    opened: list[int | None] = []  # for each open brace where its box's content starts, None where it is no box's
    text = text[-MAX_TEXT:]
    if "box" not in text:
        return None
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                answer = (start, token.start())
        elif token["bare"]:
            answer = token.span("bare")
        elif token[0][-1] == "{" and "box" in token[0]:
            newest = token.end()
            opened.append(newest)
        elif token[0] == "{":
            opened.append(None)
    is_cut = any(start is not None and (start == newest or "\n\n" not in text[start:]) for start in opened)
    return None if is_cut or answer is None or _CUT_COMMAND.search(text) else text[slice(*answer)]


def gold_answer(value: Any) -> str | None:
    """Gold answer as text, None where there is none: whole numbers without a point, GSM8K's part after `####`."""
    if hasattr(value, "tolist"):  # of NumPy or PyTorch, neither of which the grader's workers load
        return gold_answer(value.tolist())
    if isinstance(value, list) and len(value) == 1:
        return gold_answer(value[0])
    if isinstance(value, int | float | Decimal | Fraction) and not isinstance(value, bool):
        return str(int(value)) if value == value // 1 else str(value)
    if not isinstance(value, str):
        return None
    return value.rsplit("####", 1)[-1].strip() or None


def is_reasonable(answer: str) -> bool:
    """Whether an answer can be one at all: not empty, not megabytes, without control characters."""
    return bool(answer.strip()) and len(answer) <= MAX_ANSWER and not _CONTROL.search(answer)


def clean(latex: str) -> str:
    r"""One spelling: no layout, spacing, math delimiters or thousands separators that are certain (`1{,}000`)."""
    # A command that is escaped twice looks like a row's end, which only a matrix has.
    text = latex if "\\begin" in latex else re.sub(r"\\\\(?=[A-Za-z])", r"\\", latex)
    text = respell(text, _SPELLINGS).strip().rstrip(".,;\\").strip()
    while match := _WRAPPED.fullmatch(text):  # fonts, boxes and braces that hold the whole of it
        inner = next(group for group in match.groups() if group is not None).strip()
        if not is_balanced(inner):
            break
        text = inner
    return text


def respell(text: str, spellings: Mapping[str, str]) -> str:
    """Replace regular expressions in a text, in their order."""
    for pattern, replacement in spellings.items():
        text = re.sub(pattern, replacement, text)
    return text


def is_balanced(text: str) -> bool:
    """Whether all brackets that open close, and none closes that is not open."""
    depths = list(accumulate((token in "([{") - (token in ")]}") for token in text))
    return not depths or min(depths) >= 0 == depths[-1]


def squash(text: str) -> str:
    """Without spaces, to compare spellings; those between digits stay, `4 6` is not 46."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def split(text: str, separator: str) -> list[str]:
    """Parts between separators (a regular expression) that stand outside all brackets."""
    parts, depth, start = [], 0, 0
    for token in re.finditer(rf"(?P<separator>{separator})|\\[A-Za-z]+|\\?[()\[\]{{}}]|\\.", text):
        if token["separator"] is None:
            depth += (token[0][-1] in "([{") - (token[0][-1] in ")]}")
        elif depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]
