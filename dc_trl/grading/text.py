r"""The text of an answer: found in a completion, and spelled in one way."""

import re
import unicodedata
from collections.abc import Iterable
from itertools import accumulate
from typing import Any


MAX_TEXT = 1_000_000  # characters at the end of a completion in which a box is looked for
MAX_ANSWER = 1_000  # characters; the longest gold answer of the six benchmarks has 171
MAX_DEPTH = 24  # open brackets at once
MAX_DIGITS = 400  # digits in a row

# Bounded, so that a million backslashes take no more than a million steps. Some models escape the command twice.
_TOKEN = re.compile(r"\\{1,2}(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_CUT_COMMAND = re.compile(r"\\(?:bo(?:xe?d?)?|fb(?:ox?)?)\s*\Z")  # a text that ends here was opening a box
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")

# Other spellings of the same, in the order in which they go. `\\` separates the rows of a matrix, and stays.
_ROWS = r"(?<!\\)((?:\\\\)*)"
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in {
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
        r"\\lt(?![a-zA-Z])": "<",
        r"\\gt(?![a-zA-Z])": ">",
        r"\\langle(?![a-zA-Z])": "(",
        r"\\rangle(?![a-zA-Z])": ")",
        r"\\(?:varnothing|empty)(?![a-zA-Z])|∅": r"\\emptyset",
        r"\\mathbb\s*\{\s*R\s*\}|\\(?:R|Reals)(?![a-zA-Z])|ℝ": r"\\mathbb{R}",
        r"\\lbrace(?![a-zA-Z])": r"\\{",
        r"\\rbrace(?![a-zA-Z])": r"\\}",
        r"\\[lr]?vert(?![a-zA-Z])|\\mid(?![a-zA-Z])": "|",
        r"\\%": "%",
        r"\\\$": r"\\usd ",
        r"\s*(?:\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])|°)": r"^\\circ",
        "[−–]": "-",
        "×": r"\\times ",
        "[·⋅]": r"\\cdot ",
        "±": r"\\pm ",
        "∞": r"\\infty ",
        "π": r"\\pi ",
        "∪": r"\\cup ",
        "∈": r"\\in ",
        r"√\s*(\d+|[A-Za-z])": r"\\sqrt{\1}",
        r"\\(?:approx|simeq)(?![a-zA-Z])": "≈",
        r"\\sqrt\s*([^\W_])": r"\\sqrt{\1}",  # braces that TeX lets one leave out
        r"\\frac\s*(\d)\s*(\d)": r"\\frac{\1}{\2}",
        r"\s+": " ",
    }.items()
]
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+|ⁿ")
_VULGAR = {  # `½` is `\frac{1}{2}`, and `1½` the mixed number `1\frac{1}{2}`
    ord(character): "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", character).split("\u2044"))
    for character in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞↉"
} | {ord("\u2044"): "/"}
_GROUP = r"(?:\([^()]*\)|\{[^{}]*\})"
# `x**6` and `2**-n`, but not the stars of `**5**`. The last of several powers is taken first, as Python does.
_POWER = re.compile(
    r"(.*[\w)}\]])\s*\*\*\s*(?=[\w({\\+-])"
    rf"([+-]?\s*(?:\d+(?:\.\d+)?|(?:\\?[A-Za-z]+)?{_GROUP}*)(?:\^\{{[^{{}}]*\}})?)",
    re.DOTALL,
)
# Constants in words. Where other words stand beside them it may be prose, and they stay.
_CONSTANTS = {"infinity": "\\infty ", "inf": "\\infty ", "oo": "\\infty ", "pi": "\\pi "}
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "ln", "log", "exp"}
_BARE_WORD = re.compile(
    rf"\\(?:text|mathrm)\s*\{{\s*(?P<text>{'|'.join(_CONSTANTS)})\s*\}}"
    r"|\\(?:text|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|(?<![A-Za-z\\])(?P<word>[A-Za-z]{2,})",
    re.IGNORECASE,
)
_BRACES = re.compile(r"\\.|[{}]")  # and, to pass over, what is escaped
_WRAPPED = re.compile(r"\\(?:math(?:bf|it|sf|cal|tt|normal)|boldsymbol|bm|boxed|fbox)\s*\{(.*)\}|\{(.*)\}", re.DOTALL)
_WRAPPED_NUMBER = re.compile(r"\\(?:text|mathrm)\s*\{([^a-zA-Z{}]*|\s*[-+]?\d[^{}]*)\}")


def extract_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}` without outer spaces, None if there is none (`last_box`)."""
    box = last_box(text)
    return None if box is None else box.strip()


def last_box(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{...}` or `\fbox{...}`, None if there is none or a later one is cut off.

    Boxes end where they close, so of nested boxes the outer one is last. A text that ends within a box has no answer:
    the boxes before it are those that it went on from. A box whose brace was forgotten, and which an empty line ended
    (as it does in TeX), does not count against a box that follows. Only the last million characters are read.
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
        elif token[0][-1] == "{" and "box" in token[0]:
            newest = token.end()
            opened.append(newest)
        elif token[0] == "{":
            opened.append(None)
    is_cut = any(start is not None and (start == newest or "\n\n" not in text[start:]) for start in opened)
    return None if is_cut or answer is None or _CUT_COMMAND.search(text) else text[slice(*answer)]


def gold_answer(value: Any) -> str | None:
    """Gold answer as text, None where there is none: whole numbers without a point, GSM8K's part after `####`."""
    if isinstance(value, list) and len(value) == 1:
        return gold_answer(value[0])
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            return None  # Python prints no integer of more than 4,300 digits, and none is gradable
        return str(int(value)) if value == value // 1 else str(value)
    if not isinstance(value, str):
        return None
    return value.rsplit("####", 1)[-1].strip() or None


def is_reasonable(answer: str) -> bool:
    """Whether an answer can be one at all: not empty, megabytes, control characters, deep or endless digits."""
    if not answer.strip() or len(answer) > MAX_ANSWER or _CONTROL.search(answer) or _DIGITS.search(answer):
        return False
    return max(_depths(answer)) <= MAX_DEPTH


def _depths(tokens: Iterable[str]) -> list[int]:
    """How many brackets are open before the first token, and after each; a token is a bracket or none."""
    return list(accumulate(((token in "([{") - (token in ")]}") for token in tokens), initial=0))


def is_balanced(tokens: Iterable[str]) -> bool:
    """Whether all brackets that open close, and none closes that is not open."""
    depths = _depths(tokens)
    return min(depths) == depths[-1] == 0


def clean(latex: str) -> str:
    r"""One spelling: no layout, spacing, math delimiters or thousands separators that are certain (`1{,}000`)."""
    # A command that is escaped twice looks like a row's end, which only a matrix has.
    text = latex if "\\begin" in latex else re.sub(r"\\\\(?=[A-Za-z])", r"\\", latex)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _SUPERSCRIPT.sub(_raised, text.translate(_VULGAR))
    text = _constants(text)
    while power := _POWER.match(text):
        text = f"{power[1]}^{{{power[2]}}}{text[power.end() :]}"
    return unwrap(text.strip().rstrip(".,;\\").strip())


def _raised(match: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _constants(text: str) -> str:
    """With the constants that are written as words (`pi`, `-infinity`) as commands, where no other words stand."""
    words = {match["word"].lower() for match in _BARE_WORD.finditer(text) if match["word"]}
    if not words <= _CONSTANTS.keys() | _FUNCTIONS | {"and", "or"}:
        return text
    return _BARE_WORD.sub(lambda match: _CONSTANTS.get((match["text"] or match["word"] or "").lower(), match[0]), text)


def unwrap(text: str) -> str:
    """Without the fonts, boxes and braces that hold the whole of it."""
    while match := _WRAPPED.fullmatch(text) or _WRAPPED_NUMBER.fullmatch(text):
        inner = next(group for group in match.groups() if group is not None).strip()
        if not is_balanced(_BRACES.findall(inner)):
            break
        text = inner
    return text


def squash(text: str) -> str:
    """Without spaces, to compare spellings; those between digits stay, `4 6` is not 46."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def split(text: str, separator: str) -> tuple[list[str], list[str]]:
    """Parts between separators (a regular expression) that stand outside all brackets, and the separators."""
    parts, separators, depth, start = [], [], 0, 0
    for token in re.finditer(rf"(?P<separator>{separator})|\\[A-Za-z]+|\\?[()\[\]{{}}]|\\.", text):
        if token["separator"] is not None:
            if depth == 0:
                parts.append(text[start : token.start()])
                separators.append(token[0].strip())
                start = token.end()
        else:
            depth += (token[0][-1] in "([{") - (token[0][-1] in ")]}")
    return [*parts, text[start:]], separators
