r"""What is no plain number: read by math-verify, and compared as numbers at three points, or else by math-verify."""

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from random import Random

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Integral, Limit, MatrixBase, Mul, Pow, Product, Rational, Sum
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
        r"(?<![A-Za-z\\])pi(?![A-Za-z])": r"\\pi ",
        r"(?<![A-Za-z\\])E\s*_": r"\\Upsilon_",
        r"\\hbar(?![A-Za-z])": r"\\Xi ",
        r"\\odot(?![A-Za-z])": "o",
        r"\\[gG]amma(?![A-Za-z])(?!\s*\()": r"\\varsigma ",  # `\gamma^2-1` would be the function's pole at -1
        r"\\(?:text|mathrm)\s*\{\s*([A-Za-z])\s*\}": r" \1 ",
    }.items()
]
_WORDS = r"(?<![_^])\\text\s*\{[^{}]*[A-Za-z]{2}[^{}]*\}"


# A derivative of a symbol would be evaluated to 0: `m v' + b v = f` would equal `b v = f`.
_BRACED = r"(?:[^{}]|\{[^{}]*\})*\}"
_DERIVATIVE = re.compile(rf"\\frac\s*\{{\s*d[^A-Za-z\\]*(?:\^[^A-Za-z]*)?\s*\\?[A-Za-z]{_BRACED}\s*\{{\s*d{_BRACED}")


@lru_cache(maxsize=256)
def parse_expression(text: str) -> Basic | MatrixBase | None:
    """Return the unevaluated expression; None if math-verify cannot read it."""
    text = _DERIVATIVE.sub(lambda match: f"\\Psi_{{{re.sub(r'[^A-Za-z0-9]', '', match[0][5:])}}}", text)
    for pattern, replacement in _NAMES:
        text = pattern.sub(replacement, text)
    if len(split(text, _WORDS)) > 1:  # `0\text{ is wrong}` would be a product
        return None
    parsed = parse(f"${text}$", extraction_config=[_CONFIG], fallback_mode="no_fallback", parsing_timeout=None)
    return parsed[0] if parsed and not isinstance(parsed[0], str) else None


def equal(gold: Basic | MatrixBase, answer: Basic | MatrixBase) -> bool:
    """Whether two expressions are equal, and the answer leaves no more undone than the gold."""
    if undone(answer) > undone(gold):
        return False
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        if gold.is_number and answer.is_number and (difference := gold.doit() - answer.doit()).is_Rational:
            return difference == 0
        # Sooner than math-verify, which rounds to six places, and takes seconds to find no way from one to the other.
        ratios = _ratios(gold, answer)
        if ratios is not None:
            return all(abs(ratio - 1) <= 1e-12 for ratio in ratios)
    return verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True)


def _ratios(gold: Basic, answer: Basic) -> list[complex] | None:
    """Their ratios at three points, where every symbol has a value of its own; None where there are none."""
    ratios: list[complex] = []
    for point in range(3):
        values = []
        for expression in (gold, answer):
            functions = {node: sympy.Symbol(str(node)) for node in expression.atoms(AppliedUndef)}
            expression = expression.xreplace(functions)
            place = {symbol: _at(symbol.name, point) for symbol in expression.free_symbols}
            value = sympy.N(expression.xreplace(place))
            if not (value.is_number and value.is_finite):
                return None
            values.append(complex(value))
        ratios.append(values[0] / values[1] if values[1] else 1 if values[0] == 0 else complex("inf"))
    return ratios


def _at(name: str, point: int) -> Basic:
    """Return a number for a symbol: i, or a small integer for those that mostly count something."""
    random = Random(f"{name.lower()} {point}")
    if name == "i":
        return sympy.I
    return Rational(random.randint(3, 11)) if name in tuple("jkmn") else Rational(random.randint(50, 400), 101)


def within(gold: Basic | MatrixBase, answer: Basic | MatrixBase, relative: float, absolute: float) -> bool:
    """Whether two constants, or those of two lists in ascending order, differ by no more than the tolerance."""
    golds, answers = (
        sorted(side.args, key=sympy.default_sort_key) if isinstance(side, (sympy.FiniteSet, sympy.Tuple)) else [side]
        for side in (gold, answer)
    )
    if not (relative or absolute) or len(golds) != len(answers):
        return False
    if not all(isinstance(value, sympy.Expr) and value.is_number for value in golds + answers):
        return False
    return all(
        abs(sympy.N(one - other)) <= max(absolute, relative * abs(sympy.N(one)))
        for one, other in zip(golds, answers, strict=True)
    )


def undone(expression: Basic | MatrixBase) -> int:
    r"""How often arithmetic is left to do: `40+6`, `2x+3x`, `3\cdot4`, `2^{10}`, `\sqrt{144}`, `10!`, `\int x dx`."""
    return sum(map(_is_undone, sympy.preorder_traversal(expression)))


def _is_undone(node: Basic) -> bool:
    if isinstance(node, (Sum, Product, Integral, Limit, CombinatorialFunction)):
        return True
    if isinstance(node, Add):
        return len(Add.make_args(Add(*_flat(node)))) < len(list(_flat(node)))
    if isinstance(node, Mul):
        factors = [factor for factor in _flat(node) if factor.is_Number]
        return sum(abs(factor) != 1 for factor in factors) > 1
    if isinstance(node, Pow) and node.base.is_Rational and node.exp.is_Rational and node.exp != -1:
        return bool(Pow(node.base, node.exp).is_Rational)
    return False


def _flat(node: Basic) -> Iterator[Basic]:
    """Terms of a sum, or factors of a product, also of those within it."""
    for part in node.args:
        yield from _flat(part) if isinstance(part, node.func) else (part,)
