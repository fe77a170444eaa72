r"""Answers that are not plain numbers: math-verify reads and compares them, and unfinished arithmetic is counted."""

import logging
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from random import Random

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Float, Integral, Limit, MatrixBase, Mul, Pow, Product, Rational, Sum
from sympy.core.function import AppliedUndef
from sympy.functions.combinatorial.factorials import CombinatorialFunction
from sympy.logic.boolalg import Boolean

from .text import respell, split


# It warns that its own timeouts are off: they are signals, which work in no thread. Workers have limits of their own.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_CONFIG = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    ),
)
# What latex2sympy cannot read, under a name that it can; the same in gold and answer.
_NAMES = {
    r"(?<![A-Za-z\\])np\.(?=[a-z])": "",
    r"(?<![A-Za-z\\])(arcsin|arccos|arctan|sin|cos|tan|ln|log|exp)\s*(?=\()": r"\\\1",
    r"(?<![A-Za-z\\])pi(?![A-Za-z])": r"\\pi ",
    r"(?<![A-Za-z\\])E\s*_": r"\\Upsilon_",
    r"\\hbar(?![A-Za-z])": r"\\Xi ",
    r"\\odot(?![A-Za-z])": "o",
    r"\\[gG]amma(?![A-Za-z])(?!\s*\()": r"\\varsigma ",  # `\gamma^2-1` would be the function's pole at -1
    r"\\(?:text|mathrm)\s*\{\s*([A-Za-z])\s*\}": r" \1 ",
}
_WORDS = r"(?<![_^])\\text\s*\{[^{}]*[A-Za-z]{2}[^{}]*\}"
Sides = tuple[Basic | MatrixBase | None, Basic | MatrixBase | None]

# A derivative of a symbol would be evaluated to 0: `m v' + b v = f` would equal `b v = f`.
_BRACED = r"(?:[^{}]|\{[^{}]*\})*\}"
_DERIVATIVE = re.compile(rf"\\frac\s*\{{\s*d[^A-Za-z\\]*(?:\^[^A-Za-z]*)?\s*\\?[A-Za-z]{_BRACED}\s*\{{\s*d{_BRACED}")


@lru_cache(maxsize=256)
def parse_expression(text: str) -> Basic | MatrixBase | None:
    """Return the unevaluated expression; None if math-verify cannot read it."""
    text = _DERIVATIVE.sub(lambda match: f"\\Psi_{{{re.sub(r'[^A-Za-z0-9]', '', match[0][5:])}}}", text)
    text = respell(text, _NAMES)
    if len(split(text, _WORDS)) > 1:  # `0\text{ is wrong}` would be a product
        return None
    parsed = parse(f"${text}$", extraction_config=[_CONFIG], fallback_mode="no_fallback", parsing_timeout=None)
    return parsed[0] if parsed and not isinstance(parsed[0], str) else None


def is_set(text: str) -> bool:
    r"""Whether a text is a set, as `\{2\} \cup \{4\}` or `\mathbb{R}`, or an inequality, whose solutions are one."""
    return isinstance(parse_expression(text), sympy.Set | Boolean)


def equal(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """Whether math-verify finds two expressions equal, without the answer leaving more undone than the gold."""
    if undone(answer) > undone(gold):
        return False
    # With decimals as fractions: math-verify would round them to six places, and 1e-8 is not 0.
    gold, answer = (
        side.xreplace({number: Rational(str(number)) for number in side.atoms(Float)}) for side in (gold, answer)
    )
    if {symbol.name for symbol in gold.free_symbols | answer.free_symbols} == {"i"}:
        gold, answer = (side.xreplace(dict.fromkeys(side.free_symbols, sympy.I)) for side in (gold, answer))
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        ratio = _ratio(gold, answer, 0)
        if ratio is not None and abs(ratio - 1) > 1e-6:
            return False  # math-verify would take seconds to find no way from one to the other
    return verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True)


def same_relation(gold: Sides, answer: Sides, ordered: bool) -> bool:
    """Whether the sides' differences are the same up to a constant factor (`ordered`: above 0), at three points."""
    sides = [side for side in (*gold, *answer) if isinstance(side, sympy.Expr)]
    if len(sides) < 4 or sum(map(undone, sides[2:])) > sum(map(undone, sides[:2])):
        return False
    ratios = [_ratio(sides[0] - sides[1], sides[2] - sides[3], point) for point in range(3)]
    first = ratios[0]
    if first is None or first == 0 or (ordered and first.real < 0):
        return False
    return all(ratio is not None and abs(ratio - first) <= 1e-9 * abs(first) for ratio in ratios)


def _ratio(gold: sympy.Expr, answer: sympy.Expr, point: int) -> complex | None:
    """Ratio of two expressions in which every symbol has its own value; None if there is none."""
    values = []
    for expression in (gold, answer):
        functions = {node: sympy.Symbol(str(node)) for node in expression.atoms(AppliedUndef)}
        expression = expression.xreplace(functions)
        place = {symbol: _at(symbol.name, point) for symbol in expression.free_symbols}
        value = sympy.N(expression.xreplace(place))
        if not (value.is_number and value.is_finite):
            return None
        values.append(value)
    if values[1].is_zero:
        return None if values[0].is_zero else complex("inf")
    return complex(values[0] / values[1])


def _at(name: str, point: int) -> Rational:
    """Return a number for a symbol: a small integer for those that mostly count something."""
    random = Random(f"{name} {point}")
    return Rational(random.randint(3, 11)) if name in tuple("ijkmn") else Rational(random.randint(50, 400), 101)


def within(gold: Basic | MatrixBase, answer: Basic | MatrixBase, relative: float, absolute: float) -> bool:
    """Whether two constants differ by no more than the tolerance."""
    if not all(isinstance(value, sympy.Expr) and value.is_number for value in (gold, answer)):
        return False
    difference, size = abs(sympy.N(gold - answer)), abs(sympy.N(gold))
    return bool(difference <= max(absolute, relative * size))


def undone(expression: Basic | MatrixBase) -> int:
    r"""How often arithmetic is left to do: `40+6`, `2x+3x`, `3\cdot4`, `2^{10}`, `\sqrt{144}`, `10!`, `\int x dx`."""
    return sum(bool(_is_undone(node)) for node in sympy.preorder_traversal(expression))


def _is_undone(node: Basic) -> bool:
    if isinstance(node, Add):
        terms = list(_flat(node))
        return len(Add.make_args(Add(*terms))) < len(terms)
    if isinstance(node, Mul):
        return _is_undone_product(node)
    if isinstance(node, Pow):
        base, exponent = node.args
        if not (base.is_Rational and exponent.is_Rational):
            return isinstance(base, Add) and exponent.is_Integer and exponent > 1 and _is_constant(base)
        if exponent.is_Integer:
            return abs(exponent) != 1
        return exponent.q <= 100 and abs(base.p * base.q) < 10**100 and Pow(base, Rational(1, exponent.q)).is_Rational
    if isinstance(node, (Sum, Product, Integral, Limit)):
        return True
    if isinstance(node, sympy.Function) and not node.free_symbols:
        return isinstance(node, CombinatorialFunction) or bool(node.doit().is_Rational)
    return False


def _is_undone_product(node: Mul) -> bool:
    factors = list(_flat(node))
    rationals = [factor for factor in factors if factor.is_Rational]
    inverses = [factor.args[0] for factor in factors if isinstance(factor, Pow) and factor.args[1] == -1]
    tops = [abs(int(value.p)) for value in rationals if abs(value.p) != 1]
    bottoms = [int(value.q) for value in rationals if value.q != 1]
    bottoms += [abs(int(value)) for value in inverses if value.is_Integer and abs(value) != 1]
    decimals = sum(factor.is_Float for factor in factors)
    if len(tops) + decimals > 1 or len(bottoms) > 1 or (tops and bottoms and math.gcd(tops[0], bottoms[0]) > 1):
        return True
    sums = [factor for factor in factors if isinstance(factor, Add)]
    return len(sums) > 1 and all(map(_is_constant, sums))


def _flat(node: Basic) -> Iterator[Basic]:
    """Terms of a sum, those of `-(a - b)` too, or factors of a product."""
    for part in node.args:
        if isinstance(part, node.func):
            yield from _flat(part)
        elif node.is_Add and part.is_Mul and len(part.args) == 2 and part.args[0] == -1 and part.args[1].is_Add:
            yield from (-term for term in _flat(part.args[1]))
        else:
            yield part


def _is_constant(node: Basic) -> bool:
    return all(symbol.name == "i" for symbol in node.free_symbols)
