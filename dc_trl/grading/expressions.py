r"""What is no plain number: read and compared by math-verify, with arithmetic that an answer leaves undone counted."""

import logging
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import NamedTuple

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Float, Integral, Limit, MatrixBase, Mul, Pow, Product, Rational, Sum
from sympy.core.function import AppliedUndef
from sympy.functions.combinatorial.factorials import CombinatorialFunction

from .text import split


# It warns that its own timeouts are off: they are signals, which work in no thread. Workers have limits of their own.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_CONFIG = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    ),
)
# What latex2sympy cannot read, under a name that it can; the same in gold and answer.
_NAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in {
        r"(?<![A-Za-z\\])np\.(?=[a-z])": "",
        r"(?<![A-Za-z\\])(arcsin|arccos|arctan|sin|cos|tan|ln|log|exp)\s*(?=\()": r"\\\1",
        r"\\operatorname\s*\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|gcd|lcm)\s*\}": r"\\\1 ",
        r"(?<![A-Za-z\\])pi(?![A-Za-z])": r"\\pi ",
        r"(?<![A-Za-z\\])E\s*_": r"\\Upsilon_",
        r"\\hbar(?![A-Za-z])": r"\\Xi ",
        r"\\odot(?![A-Za-z])": "o",
        r"\\[gG]amma(?![A-Za-z])(?!\s*\()": r"\\varsigma ",  # `\gamma^2-1` would be the function's pole at -1
        r"\\(?:text|mathrm)\s*\{\s*([A-Za-z])\s*\}": r" \1 ",
    }.items()
]
_BRACKET = re.compile(r"(\\sqrt\s*\[[^\[\]]*\])|([\[\]])")  # `[` groups, but not the index of a root
_WORDS = r"(?<![_^])\\text\s*\{[^{}]*[A-Za-z]{2}[^{}]*\}"
MAX_BITS = 2**20  # of a number that is computed; 2024^{4046} has 44,439
_PRINTED_BITS = 2_000  # of an integer that is printed; Python refuses above 4,300 digits, or 640 where it is told to
_FACTORIALS = (CombinatorialFunction, sympy.gamma)


# A derivative of a symbol would be evaluated to 0: `m v' + b v = f` would equal `b v = f`.
_BRACED = r"(?:[^{}]|\{[^{}]*\})*\}"
_DERIVATIVE = re.compile(rf"\\frac\s*\{{\s*d[^A-Za-z\\]*(?:\^[^A-Za-z]*)?\s*\\?[A-Za-z]{_BRACED}\s*\{{\s*d{_BRACED}")


@lru_cache(maxsize=256)
def parse_expression(text: str) -> Basic | MatrixBase | None:
    """Return the unevaluated expression; None if math-verify cannot read it."""
    text = _DERIVATIVE.sub(lambda match: f"\\Psi_{{{re.sub(r'[^A-Za-z0-9]', '', match[0][5:])}}}", text)
    for pattern, replacement in _NAMES:
        text = pattern.sub(replacement, text)
    if split(text, _WORDS)[1]:  # `0\text{ is wrong}` would be a product
        return None
    text = _BRACKET.sub(lambda match: match[1] or "()"[match[2] == "]"], text)
    parsed = parse(f"${text}$", extraction_config=[_CONFIG], fallback_mode="no_fallback", parsing_timeout=None)
    return parsed[0] if parsed and not isinstance(parsed[0], str) else None


def is_immense(expression: Basic | MatrixBase) -> bool:
    """Whether evaluating it would make numbers of over a million bits, such as `9^{9^9}` and `(10!)!`.

    SymPy takes minutes or all memory for them. Estimates from the leaves up; symbols count as the numbers of `_at`.
    """
    if isinstance(expression, MatrixBase):
        return any(map(is_immense, expression.flat()))
    sizes: dict[Basic, _Size] = {}
    for node in sympy.postorder_traversal(expression):
        if node not in sizes:
            sizes[node] = size = _size(node, [sizes[part] for part in node.args if isinstance(part, Basic)])
            if size.bits > MAX_BITS:
                return True
    return False


class _Size(NamedTuple):
    bits: float  # that computing the value takes
    log: float  # log₂ of its size, at least 0: what it adds as an exponent or under a factorial
    log_inverse: float  # log₂ of the size of its inverse, at least 0


def _size(node: Basic, parts: list[_Size]) -> _Size:
    if isinstance(node, Rational):
        top, bottom = max(abs(node.p) - 1, 0).bit_length(), (node.q - 1).bit_length()
        return _Size(top + bottom, max(0, top - bottom + bool(bottom)), max(0, bottom - top + 1))
    if isinstance(node, Float):
        log = float(sympy.log(abs(node), 2)) if node.is_finite and node else 0.0
        return _Size(53, max(0.0, log), max(0.0, -log))
    if not parts:
        return _Size(9, 4, 1)
    bits, log = sum(part.bits for part in parts), max(part.log for part in parts)
    if isinstance(node, Pow):
        base, exponent = parts
        factor = 2.0 ** min(exponent.log, 64)
        logs = [base.log * factor, base.log_inverse * factor]
        return _Size(base.bits * factor, *(logs[::-1] if node.args[1].could_extract_minus_sign() else logs))
    if isinstance(node, Mul):
        return _Size(bits, sum(part.log for part in parts), sum(part.log_inverse for part in parts))
    if isinstance(node, _FACTORIALS):
        log = (log + 1) * 2.0 ** min(log, 64)
        return _Size(log, log, 0)
    if isinstance(node, sympy.exp):
        return _Size(max(bits, log), 1.5 * 2.0 ** min(log, 64), 1.5 * 2.0 ** min(log, 64))
    return _Size(max(bits, log), log + len(parts), 4)


def printed(expression: Basic | MatrixBase) -> str | None:
    """One spelling of the value; None where that is too large to be printed. Sums and integrals stay as they are."""
    if is_immense(expression):
        return None
    value = exact(expression)
    if not value.has(Sum, Product, Integral, Limit):
        value = value.doit()
    numbers = value.atoms(Rational)
    if any(max(abs(number.p), number.q).bit_length() > _PRINTED_BITS for number in numbers):
        return None
    return str(value)


def has_value(expression: Basic | MatrixBase) -> bool:
    """Whether it equals itself: false of `0/0` and `1/0`, and of what SymPy cannot evaluate, such as `5 mod 0`.

    True without a look where the evaluation may take for ever: of sums, integrals, limits and immense numbers.
    """
    if expression.has(Sum, Product, Integral, Limit) or is_immense(expression):
        return True
    return expression.doit() not in (sympy.nan, sympy.zoo)


def exact(expression: Basic | MatrixBase) -> Basic | MatrixBase:
    """With decimals as fractions: math-verify would round them to six places, and 1e-8 is not 0."""
    return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})


def number(text: str) -> float | None:
    """Return the value of a real constant; None for everything else."""
    expression = parse_expression(text)
    if not isinstance(expression, sympy.Expr) or not expression.is_number or is_immense(expression):
        return None
    value = sympy.N(expression)
    return float(value) if value.is_real else None


def equal(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """Whether math-verify finds two expressions equal, without the answer leaving more undone than the gold."""
    if is_immense(gold) or is_immense(answer):
        return bool(gold == answer)
    if undone(answer) > undone(gold):
        return False
    gold, answer = exact(gold), exact(answer)
    if {symbol.name for symbol in gold.free_symbols | answer.free_symbols} == {"i"}:
        gold, answer = (side.xreplace(dict.fromkeys(side.free_symbols, sympy.I)) for side in (gold, answer))
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        ratios = [_ratio(gold, answer, point) for point in range(2)]
        if any(ratio is not None and abs(ratio - 1) > 1e-6 for ratio in ratios):
            return False  # math-verify would take seconds to find no way from one to the other
        if None in ratios and not answer.free_symbols and not has_value(answer):
            return False  # a division by zero
    return verify(gold, answer, timeout_seconds=None, raise_on_error=True)


Sides = tuple[Basic | MatrixBase | None, Basic | MatrixBase | None]


def same_relation(gold: Sides, answer: Sides, ordered: bool) -> bool:
    """Whether the sides' differences are the same up to a constant factor (`ordered`: above 0), at three points."""
    sides = [side for side in (*gold, *answer) if isinstance(side, sympy.Expr)]
    if len(sides) < 4 or any(map(is_immense, sides)) or sum(map(undone, sides[2:])) > sum(map(undone, sides[:2])):
        return False
    differences = [exact(sides[0]) - exact(sides[1]), exact(sides[2]) - exact(sides[3])]
    ratios: list[complex] = []
    for point in range(3):
        ratio = _ratio(differences[0], differences[1], point)
        if ratio is None:
            return differences[0] == differences[1]
        ratios.append(ratio)
    is_constant = all(abs(ratio - ratios[0]) <= 1e-9 * abs(ratios[0]) for ratio in ratios)
    return ratios[0] != 0 and is_constant and not (ordered and ratios[0].real < 0)


def _ratio(gold: sympy.Expr, answer: sympy.Expr, point: int) -> complex | None:
    """Their ratio where every symbol has a value of its own (integers for i to n); None where there is none."""
    values: list[sympy.Expr] = []
    for expression in (gold, answer):
        functions = {node: sympy.Symbol(str(node), real=True) for node in expression.atoms(AppliedUndef)}
        expression = expression.xreplace(functions)
        value = sympy.N(expression.xreplace({symbol: _at(symbol.name, point) for symbol in expression.free_symbols}))
        if not (value.is_number and value.is_finite):
            return None
        values.append(value)
    if values[1].is_zero:
        return None if values[0].is_zero else complex("inf")
    return complex(sympy.N(values[0] / values[1]))  # divided as SymPy's numbers: 1/2004! is 0 to a complex


def _at(name: str, point: int) -> Rational:
    random = Random(f"{name} {point}")
    return Rational(random.randint(3, 11)) if name in tuple("ijkmn") else Rational(random.randint(50, 400), 101)


def within(gold: Basic | MatrixBase, answer: Basic | MatrixBase, relative: float, absolute: float) -> bool:
    """Whether two constants differ by no more than the tolerance."""
    if not all(isinstance(value, sympy.Expr) and value.is_number for value in (gold, answer)):
        return False
    if is_immense(gold) or is_immense(answer):
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
