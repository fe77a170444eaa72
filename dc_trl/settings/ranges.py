"""The numbers and the words that a setting may be. Everything else is refused before anything starts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args


@dataclass(frozen=True)
class Range:
    """Numbers from `least`, or above `above`, to `most`; by default without a bound."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    whole: bool = False  # allow whole numbers alone
    infinite: bool = False  # allow +∞ too

    def allows(self, value: Any) -> bool:
        """Return whether the value is a number of this range."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number: Any = value
        finite = self.infinite or number < math.inf
        return finite and self.above < number and self.least <= number <= self.most  # which NaN is not

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number" if self.infinite else "a finite number"
        bounds = {"at least": self.least, "above": self.above, "at most": self.most}
        return ", ".join([kind, *(f"{word} {bound}" for word, bound in bounds.items() if abs(bound) < math.inf)])


COUNT = Range(least=1, whole=True)
WHOLE = Range(least=0, whole=True)
FINITE = Range()
AT_LEAST_0 = Range(least=0)
ABOVE_0 = Range(above=0)
SHARE = Range(above=0, most=1)
UNIT = Range(least=0, most=1)
PORT = Range(least=1, most=65535, whole=True)
SEED = Range(least=0, most=2**32 - 1, whole=True)


def require_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a setting whose value is none of the choices, a `Literal` or the values themselves."""
    options = get_args(choices) or tuple(choices)
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, options))}.")


def require_number(name: str, value: Any, allowed: Range) -> None:
    """Refuse a setting that is no number of its range."""
    if not allowed.allows(value):
        raise ValueError(f"{name}={value!r} is invalid: use {allowed}.")


def require_numbers(settings: Any, allowed: Mapping[str, Range]) -> None:
    """Refuse attributes of an object that are out of their ranges, which are given by name; None is passed over."""
    for name, range_ in allowed.items():
        if (value := getattr(settings, name)) is not None:
            require_number(name, value, range_)
