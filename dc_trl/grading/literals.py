r"""Numbers with nothing left to compute: `-3`, `1,000`, `0.5`, `\frac{1}{2}`, `8.7e8`, `90^\circ`."""

import re
from fractions import Fraction
from typing import NamedTuple


MAX_EXPONENT = 400

_DECIMAL = r"(?:(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[+-]?\s*{_DECIMAL}"
_ARGUMENT = rf"(\{{\s*{_SIGNED}\s*\}}|\d)"
_FRACTION = rf"(?:\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}|({_DECIMAL})\s*/\s*({_DECIMAL}))"
_EXPONENT = r"\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+))"
# ASCII: 𝟒 is a digit too, but in no answer that means to be read.
_FORMS = [
    (re.compile(form, re.ASCII), kind)
    for form, kind in {
        rf"(\d+)(?:\s*(?=\\frac)|\s+){_FRACTION}": "fraction",
        _FRACTION: "fraction",
        rf"({_DECIMAL})\s*(?:[eE]([+-]?\d+)|(?:\\times|\\cdot|\*|x)\s*10\s*{_EXPONENT})": "scientific",
        rf"10\s*{_EXPONENT}": "scientific",
        rf"({_DECIMAL})": "decimal",
    }.items()
]
_SIGN = re.compile(r"\s*([+-]?)\s*(\\usd\s*)?([+-]?)\s*")
_UNIT = re.compile(
    r"(?:\s?/?\s?(?:\\(?:text|mathrm|operatorname|rm)\s*\{(?:[^{}]|\{[^{}]*\})*\}|\\(?:usd|Omega|mu|AA)(?![a-zA-Z])"
    r"|[ÅΩµμ€£¥]|[A-Za-z]{2,}(?![A-Za-z]))(?:\s?\^\s?(?:\{\s?[+-]?\d\s?\}|-?\d))?)+"
)
_DEGREE = re.compile(r"\s?\^\\circ\s?(?:\\(?:text|mathrm)\s*\{\s*([A-Za-z]*)\s*\}|([CF]))?")
_BASE = re.compile(r"\s?_\s?(?:\{\s?(\d+)\s?\}|(\d))")
# A unit is made of these words, or ends in a plural: `12 apples`. Everything else says something about the number.
# Names that mean the same unit are joined by `=`; the first is the spelling that is compared.
_UNITS = """
    degree=deg dollar=usd %=percent=pct=percentage m=meter=metre cm=centimeter=centimetre mm=millimeter=millimetre
    km=kilometer=kilometre inch=inche=in foot=feet=ft second=sec=s minute=min hour=hr=h g=gram kg=kilogram atm bit byte
    c cal calorie celsius cent child children cubic d day db ev f fahrenheit gallon gev h hz j joule k kelvin khz kj kn
    kpa kw lb light liter litre lux ly mb mev mg mhz mile mj ml mol mole month mpa mph ms mu n newton nm ohm omega
    ounce oz pa pc penny people person point pound=£ psi rad radian revolution rpm square sr ton torr unit v volt w
    watt way week woman yard year yen=¥ yuan euro å μ µ ω € aa angstrom erg dyn dyne solar per different integer
"""
_UNIT_NAMES = {name: names.split("=")[0] for names in _UNITS.split() for name in names.split("=")}
# What ends in s and is no unit: words that say something, and names of fractions and powers of ten.
_OTHER_WORDS = """
    billions dozens eighths fifths fourths halves has hundreds hundredths is minus millions plus quarters sixths tens
    tenths thirds thousands thousandths times this thus trillions versus
"""
_NO_PLURALS = frozenset(_OTHER_WORDS.split())


class Literal(NamedTuple):
    """A number with nothing left to compute."""

    value: Fraction  # without its unit: 50 for 50 %
    unit: str  # one spelling for each unit; "" where none is written
    finished: bool  # written to the end: lowest terms, no leading zeros, a mantissa of at least 1 and below 10
    kind: str  # `decimal` (an integer too), `fraction` (a mixed number too) or `scientific`
    misspelled: bool  # not finished in a way that no scientific notation excuses: `047`, `2/4`


def parse_literal(text: str) -> Literal | None:
    r"""Return the number that a cleaned text is; None for all else, such as `40+6`, `2^{10}`, `5 million` or `x`."""
    prefix = _SIGN.match(text)
    assert prefix is not None  # all of it is optional
    if prefix[1] and prefix[3]:
        return None
    body = text[prefix.end() :]
    for form, kind in _FORMS:
        if (match := form.match(body)) and (unit := parse_unit(body[match.end() :])) is not None:
            literal = _read(kind, [group for group in match.groups() if group])
            if literal is None:
                return None
            value = -literal.value if "-" in (prefix[1], prefix[3]) else literal.value
            return literal._replace(value=value, unit=unit or ("dollar" if prefix[2] else ""))
    return None


def parse_unit(text: str) -> str | None:
    """One spelling of what follows a number: a unit, a degree sign, `%`, a base; "" for nothing, None for no unit."""
    stripped = text.strip()
    if stripped in ("", "%"):
        return stripped
    if match := _BASE.fullmatch(text):
        return f"base {match[1] or match[2]}"
    if match := _DEGREE.fullmatch(text):
        return f"degree{match[1] or match[2] or ''}".lower().removesuffix("s")
    # A bare word that is no known unit needs a space: `2ab` is a product, as `2*ab` is.
    bare = re.match(r"[A-Za-z]*", text)
    if bare and bare[0] and _singular(bare[0].lower()) not in _UNIT_NAMES:
        return None
    if stripped[0] == "/" or not _UNIT.fullmatch(text) or re.search(r"\d{2}|[=+?!]", text):
        return None
    plain = re.sub(r"\\(?:text|mathrm|operatorname|rm|cdot)(?![a-zA-Z])|[{}~*]", " ", text)
    parts = re.findall(r"[^\W\d_]+|[€£¥]|\^\s*-?\d|/|%", re.sub(r"(?<=[a-z])\.", " ", plain.lower()))
    *others, noun = [word for word in parts if word.isalpha()] or [""]
    is_plural = len(noun) > 3 and noun.endswith("s") and not noun.endswith("ss") and noun not in _NO_PLURALS
    if not (is_plural or _singular(noun) in _UNIT_NAMES) or any(_singular(word) not in _UNIT_NAMES for word in others):
        return None
    name = " ".join(_UNIT_NAMES.get(_singular(word), _singular(word)) for word in parts).replace("^ ", "^")
    return re.sub(r"^(?:(square)|cubic) (\S+)$", lambda match: f"{match[2]} ^{2 if match[1] else 3}", name)


def _singular(word: str) -> str:
    return word.removesuffix("s") or "s"


def _read(kind: str, parts: list[str]) -> Literal | None:
    """Return the number that a text of this kind spells with these parts: digits, or a numerator perhaps in braces."""
    parts = [re.sub(r"[{},\s]", "", part) for part in parts]
    numbers = [Fraction(part.removesuffix(".")) for part in parts]
    misspelled = any(re.match(r"[+-]?0\d", part) for part in parts[: -1 if kind == "scientific" else None])
    if kind == "decimal":
        return Literal(numbers[0], "", not misspelled, kind, misspelled)
    if kind == "scientific":
        *mantissa, exponent = numbers  # `10^8` has none, and so is not finished
        if abs(exponent) > MAX_EXPONENT:
            return None
        finished = bool(mantissa) and 1 <= mantissa[0] < 10 and not misspelled
        return Literal((mantissa or [Fraction(1)])[0] * Fraction(10) ** int(exponent), "", finished, kind, misspelled)
    *whole, top, bottom = numbers
    if bottom == 0 or (whole and not 0 < top / bottom < 1):
        return None
    value = top / bottom
    misspelled |= abs(top) != abs(value.numerator) or not abs(bottom) == value.denominator > 1
    return Literal(sum(whole, value), "", not misspelled, kind, misspelled)
