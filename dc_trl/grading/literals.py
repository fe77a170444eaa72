r"""Numbers with nothing left to compute: `-3`, `1,000`, `0.5`, `\frac{1}{2}`, `8.7e8`, `90^\circ`."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction


MAX_EXPONENT = 400

_DECIMAL = r"(?:(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[+-]?\s*{_DECIMAL}"
_EXPONENT = r"\^\s*(?:\{\s*([+-]?\s*\d+)\s*\}|([+-]?\d+))"
_ARGUMENT = rf"(\{{\s*{_SIGNED}\s*\}}|\d)"
_FRACTION = rf"(?:\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}|({_DECIMAL})\s*/\s*({_DECIMAL}))"
_SIGN = re.compile(r"\s*([+-]?)\s*(?:\\usd\s*([+-]?)\s*)?")

_UNIT_TEXT = r"\\(?:text|mathrm|operatorname|rm)\s*\{(?:[^{}]|\{[^{}]*\})*\}"
_UNIT = re.compile(
    rf"(?:\s?(?:/|\\cdot|\*)?\s?(?:{_UNIT_TEXT}|\\(?:usd|Omega|mu|AA|ohm)(?![a-zA-Z])|[ÅΩµμ€£¥]|[A-Za-z]{{2,}}(?![A-Za-z]))"
    r"(?:\s?\^\s?(?:\{\s?[+-]?\d\s?\}|-?\d))?)+"
)
_DEGREE = re.compile(r"\s?\^\\circ\s?(?:\\(?:text|mathrm)\s*\{\s*([A-Za-z]*)\s*\}|([CF]))?")
_BASE = re.compile(r"\s?_\s?(?:\{\s?(\d+)\s?\}|(\d))")
# A unit is made of these words, or ends in a plural: `12 apples`. Everything else says something about the number.
# Names that mean the same unit are joined by `=`; the first is the spelling that is compared.
_UNITS = """
    degree=deg dollar=usd %=percent=pct=percentage m=meter=metre cm=centimeter=centimetre mm=millimeter=millimetre
    km=kilometer=kilometre inch=inche=in foot=feet=ft second=sec=s minute=min hour=hr=h g=gram kg=kilogram aa amp
    ampere angstrom atm au aud bar bit byte c cad cal calorie candela carat cc celsius cent child children cl
    coulomb cu cubic cup d day db decade dime dl dm eur euro=€ ev f fahrenheit farad fluid fps franc gal gallon gb gbp
    gev gj gpa gw hectare henry hertz hl hpa hz j joule k kelvin kev khz kj kn knot kohm kpa kph kv kw kwh l lb
    light liter litre lumen lux ly ma man mb mbar men mev mg mhz mi mile mj ml mmol mol mole month mpa mph ms mu mv
    mw n newton nickel night nm ohm omega ounce oz pa pascal pc pence penny people person peso pint point pound=£ ppm
    psi pt quart rad radian rev revolution rpm rs rupee solar sq square sr steradian tesla tev ton tonne torr turn
    unit v volt w watt way wb weber week wk woman women yard yd year yen=¥ yr yuan µ å μ ω
"""
_BESIDE_UNITS = "per ordered different distinct possible integer real complex prime unique"
_UNIT_NAMES = {name: names.split("=")[0] for names in f"{_UNITS} {_BESIDE_UNITS}".split() for name in names.split("=")}
# What ends in s and is no unit: words that say something, and names of fractions and powers of ten.
_OTHER_WORDS = """
    afterwards always besides does equals exceeds fails gives guess has hers its less makes means minus others
    ours perhaps plus remains seems sometimes theirs this thus times towards us versus was works yes billions
    dozens eighths fifths fourths halves hundreds hundredths millions ninths ones quarters sevenths sixths
    tens tenths thirds thousands thousandths trillions
"""
_NO_PLURALS = frozenset(_OTHER_WORDS.split())


@dataclass(frozen=True)
class Literal:
    """A number with nothing left to compute.

    Attributes:
        value: without its unit: 50 for 50 %.
        unit: one spelling for each unit; "" where none is written.
        finished: written to the end: lowest terms, no leading zeros, a mantissa of at least 1 and below 10.
        scientific: written with a power of ten.
        misspelled: not finished in a way that no scientific notation excuses: `047`, `2/4`.
        decimal: an integer or a decimal, `50` or `0.5`, and no fraction, mixed number or power of ten.
    """

    value: Fraction
    unit: str = ""
    finished: bool = True
    scientific: bool = False
    misspelled: bool = False
    decimal: bool = False


def parse_literal(text: str) -> Literal | None:
    r"""Return the number that a cleaned text is; None for all else, such as `40+6`, `2^{10}`, `5 million` or `x`."""
    prefix = _SIGN.match(text)
    assert prefix is not None  # all of it is optional
    if prefix[1] and prefix[2]:
        return None
    body = text[prefix.end() :]
    for form, kind in _FORMS:
        if (match := form.match(body)) and (unit := parse_unit(body[match.end() :])) is not None:
            literal = _read(kind, [group for group in match.groups() if group])
            if literal is None:
                return None
            value = -literal.value if "-" in (prefix[1], prefix[2]) else literal.value
            return replace(literal, value=value, unit=unit or ("" if prefix[2] is None else "dollar"))
    return None


def parse_unit(text: str) -> str | None:
    """One spelling of what follows a number: a unit, a degree sign, `%`, a base; "" for nothing, None for no unit."""
    stripped = text.strip()
    if not stripped:
        return ""
    if stripped == "%":
        return "%"
    if match := _BASE.fullmatch(text):
        return f"base {match[1] or match[2]}"
    if match := _DEGREE.fullmatch(text):
        return f"degree{match[1] or match[2] or ''}".lower().removesuffix("s")
    # A bare word that is no known unit needs a space: `2ab` is a product, as `2*ab` is.
    bare = re.match(r"[A-Za-z]*", text)
    if bare and bare[0] and _singular(bare[0].lower()) not in _UNIT_NAMES:
        return None
    if re.match(r"/|\*|\\cdot", stripped) or not _UNIT.fullmatch(text) or re.search(r"\d{2}|[=+?!]", text):
        return None
    plain = re.sub(r"\\(?:text|mathrm|operatorname|rm|cdot)(?![a-zA-Z])|[{}~*]", " ", text)
    parts = re.findall(r"[^\W\d_]+|[€£¥]|\^\s*-?\d|/|%", re.sub(r"(?<=[a-z])\.", " ", plain.lower()))
    if not _is_unit([word for word in parts if word.isalpha()]):
        return None
    name = " ".join(_UNIT_NAMES.get(_singular(word), _singular(word)) for word in parts).replace("^ ", "^")
    return re.sub(r"^(?:(sq|square)|cu|cubic) (\S+)$", lambda match: f"{match[2]} ^{2 if match[1] else 3}", name)


def _is_unit(words: list[str]) -> bool:
    """Return whether words are a unit: `square cm`, `miles per hour`; not `and a half`, `is wrong` or `million`."""
    if all(_singular(word) in _UNIT_NAMES for word in words):
        return True
    noun = words[-1]
    is_plural = len(noun) > 3 and noun.endswith("s") and not noun.endswith("ss") and noun not in _NO_PLURALS
    return is_plural and all(_singular(word) in _UNIT_NAMES for word in words[:-1])


def _singular(word: str) -> str:
    return word.removesuffix("s") or "s"


def _read(kind: str, parts: list[str]) -> Literal | None:
    """Return the number that a text of this kind spells with these parts: digits, or a numerator perhaps in braces."""
    parts = [re.sub(r"[{},\s]", "", part) for part in parts]
    numbers = [Fraction(part.removesuffix(".")) for part in parts]
    misspelled = any(re.match(r"[+-]?0\d", part) for part in parts[: -1 if kind == "scientific" else None])
    if kind == "decimal":
        return Literal(numbers[0], finished=not misspelled, misspelled=misspelled, decimal=True)
    if kind == "scientific":
        *mantissa, exponent = numbers  # `10^8` has none, and so is not finished
        if abs(exponent) > MAX_EXPONENT:
            return None
        finished = bool(mantissa) and 1 <= mantissa[0] < 10 and not misspelled
        return Literal((mantissa or [Fraction(1)])[0] * Fraction(10) ** int(exponent), "", finished, True, misspelled)
    *whole, top, bottom = numbers
    if bottom == 0 or (whole and not 0 < top / bottom < 1):
        return None
    value = top / bottom
    misspelled |= abs(top) != abs(value.numerator) or not abs(bottom) == value.denominator > 1
    return Literal(sum(whole, value), finished=not misspelled, misspelled=misspelled)


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
