r"""Numbers with nothing left to compute: `-3`, `1,000`, `0.5`, `\frac{1}{2}`, `8.7e8`, `90^\circ`."""

import re
from fractions import Fraction
from typing import NamedTuple


MAX_EXPONENT = 400

_DECIMAL = r"(?:(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
_ARGUMENT = rf"(?:\{{\s*([+-]?\s*{_DECIMAL})\s*\}}|(\d))"
_FRACTION = rf"(?:\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}|({_DECIMAL})\s*/\s*({_DECIMAL}))"
_POWER = r"10\s*\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+))"
# ASCII: 𝟒 is a digit too, but in no answer that means to be read.
_MIXED = re.compile(rf"(?:(\d+)(?:\s*(?=\\frac)|\s+))?{_FRACTION}", re.ASCII)
_NUMBER = re.compile(rf"{_POWER}|({_DECIMAL})(?:[eE]([+-]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*{_POWER})?", re.ASCII)
_SIGN = re.compile(r"\s*([+-]?)\s*(\\usd\s*)?([+-]?)\s*")
_BASE = re.compile(r"\s?_\s?(?:\{\s?(\d+)\s?\}|(\d))")
# Words in \text{…} or after a space. A single letter is a variable, and `2ab` a product.
_TEXT = r"\\(?:text|mathrm|operatorname|rm)\s*\{(?:[^{}\d=+?!]|\^\s?(?:\{-?\d\}|-?\d))*\}"
_UNIT = re.compile(rf"(?:\s?/?\s?(?:{_TEXT}|(?<=[\s/])[A-Za-z]{{2,}})(?:\s?\^\s?(?:\{{-?\d\}}|-?\d))?)+")
_DEGREE = re.compile(rf"\s?\^\\circ(?:\s?(?:{_TEXT}|[CF]))?")
# Names of one unit, of which the first is compared.
_UNITS = """
    degree=deg dollar=usd %=percent=pct=percentage m=meter=metre cm=centimeter=centimetre mm=millimeter=millimetre
    km=kilometer=kilometre inch=inche=in foot=feet=ft second=sec=s minute=min hour=hr=h g=gram kg=kilogram
"""
_UNIT_NAMES = {name: names.split("=")[0] for names in _UNITS.split() for name in names.split("=")}
_NUMBER_WORDS = re.compile(r"(?:hundred|thousand|[mb]illion|trillion|dozen|half|halve|third|fourth|tenth)(?:th)?s?")


class Literal(NamedTuple):
    """A number with nothing left to compute.

    Attributes:
        value: without its unit: 50 for 50 %.
        unit: one spelling for each unit; "" where none is written.
        misspelled: with leading zeros, or not in lowest terms: `047`, `2/4`.
    """

    value: Fraction
    unit: str
    misspelled: bool


def parse_literal(text: str) -> Literal | None:
    r"""Return the number that a cleaned text is; None for all else, such as `40+6`, `2^{10}`, `5 million` or `x`."""
    prefix = _SIGN.match(text)
    assert prefix is not None  # all of it is optional
    if prefix[1] and prefix[3]:
        return None
    body = text[prefix.end() :]
    for form, read in ((_MIXED, _fraction), (_NUMBER, _decimal)):
        match = form.match(body)
        if match is None or (unit := parse_unit(body[match.end() :])) is None:
            continue
        number = read([part and re.sub(r"[,\s]", "", part) for part in match.groups()])
        if number is None:
            return None
        value, misspelled = number
        return Literal(-value if "-" in prefix[0] else value, unit or ("dollar" if prefix[2] else ""), misspelled)
    return None


def _fraction(parts: list[str | None]) -> tuple[Fraction, bool] | None:
    whole, *others = parts
    top, bottom = (Fraction(part.removesuffix(".")) for part in others if part)
    if bottom == 0 or (whole and not 0 < top / bottom < 1):
        return None
    value = top / bottom
    misspelled = abs(top) != abs(value.numerator) or not abs(bottom) == value.denominator > 1
    return value + int(whole or 0), misspelled or any(map(_has_zeros, parts))


def _decimal(parts: list[str | None]) -> tuple[Fraction, bool] | None:
    mantissa, exponents = parts[2], parts[:2] + parts[3:]
    exponent = int(next(filter(None, exponents), "0"))
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = Fraction((mantissa or "1").removesuffix(".")) * Fraction(10) ** exponent
    return value, _has_zeros(mantissa)


def _has_zeros(part: str | None) -> bool:
    return part is not None and re.match(r"[+-]?0\d", part) is not None


def parse_unit(text: str) -> str | None:
    """One spelling of what follows a number: a unit, a degree sign, `%`, a base; "" for nothing, None for no unit."""
    if text.strip() in ("", "%"):
        return text.strip()
    if match := _BASE.fullmatch(text):
        return f"base {match[1] or match[2]}"
    bare = re.match(r"[A-Za-z]{2,}", text)
    if bare and bare[0].lower().removesuffix("s") in _UNIT_NAMES:  # `12cm`
        text = f" {text}"
    if not _DEGREE.fullmatch(text) and not _UNIT.fullmatch(text):
        return None
    plain = re.sub(r"\\(?:text|mathrm|operatorname|rm)(?![a-zA-Z])", " ", text.replace("^\\circ", " degree ")).lower()
    words = [word.removesuffix("s") or word for word in re.findall(r"[a-z]+|\^[\s{]*-?\d|/|%", plain)]
    if any(map(_NUMBER_WORDS.fullmatch, words)):
        return None
    name = " ".join(_UNIT_NAMES.get(word, re.sub(r"[\s{]", "", word)) for word in words)
    return re.sub(r"^(?:(square)|cubic) (\S+)$", lambda match: f"{match[2]} ^{2 if match[1] else 3}", name)
