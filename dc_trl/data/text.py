"""Problems as text: keys by which equal ones are found, and repair of what an export broke."""

import re
import unicodedata


# Commands whose backslash and first letter a JSON or Python reader takes for one control character: "\frac" in quotes
# is a form feed and "rac". Left out are those whose rest is a word or a variable: "\tan", "\to", "\top", "\nu", "\ne".
_COMMANDS = frozenset(
    re.findall(
        r"\w+",
        """
        alpha angle approx arccos arcsin arctan ast
        backslash bar because begin beta big bigcap bigcup bigg bigl bigr binom bmod boldsymbol bot boxed bullet
        fbox flat forall frac frown
        nabla neq notin
        rVert rangle rceil rfloor rho right rightarrow rvert
        tau tbinom text textbf textit textrm tfrac therefore theta tilde times triangle
        varepsilon varnothing varphi vartheta vdots vec vert
        """,
    )
)
_LETTERS = {"\a": "a", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", "\v": "v"}
_EATEN = re.compile(f"([{''.join(_LETTERS)}])([A-Za-z]+)")

# Cyrillic, Hebrew, Arabic, Indic, Thai, Korean, Japanese and Chinese letters: where one stands it is not English.
_OTHER_SCRIPTS = re.compile(
    "[\u0400-\u052f\u0590-\u06ff\u0900-\u0dff\u0e00-\u0e7f\u1100-\u11ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff]"
)


def restore_commands(text: str) -> str:
    r"""LaTeX commands whose first letter became a control character, restored: form feed and "rac" become `\frac`."""

    def restore(match: re.Match[str]) -> str:
        command = _LETTERS[match[1]] + match[2]
        return f"\\{command}" if command in _COMMANDS else match[0]

    return _EATEN.sub(restore, text)


def plain_whitespace(text: str) -> str:
    """Line ends as line feeds, tabs as spaces."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ")


def has_control_characters(text: str) -> bool:
    """Return whether text has a control character other than a line feed, or the sign of a lost one (U+FFFD)."""
    return re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\ufffd]", text) is not None


def is_english(text: str) -> bool:
    """Return whether all letters are Latin, Greek or mathematical. This tells scripts apart and not languages."""
    return not _OTHER_SCRIPTS.search(text)


def alphanumeric(text: str) -> str:
    """Letters and digits alone, case folded: equal for texts that differ in case, spaces and punctuation."""
    return "".join(character for character in _fold(text) if character.isalnum())


def problem_key(text: str) -> str:
    """`alphanumeric` with what tells two problems apart: operators, relations, and the separators between digits."""
    parts = re.split(r"(?<=\d)[\s,.]+(?=\d)", _fold(text).replace("\u2212", "-"))
    return ",".join("".join(filter(_tells_apart, part)) for part in parts)


def _tells_apart(character: str) -> bool:
    is_operator = character in "-*/^!%" or (character != "~" and unicodedata.category(character) == "Sm")
    return is_operator or character.isalnum()


def words(text: str) -> list[str]:
    """Words and numbers in order, case folded; LaTeX commands count by their names."""
    return re.findall(r"[^\W_]+", _fold(text))


def _fold(text: str) -> str:
    # Case folding can undo the normal form, so once more.
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
