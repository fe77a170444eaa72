"""The Lagrange multiplier that prices discrepancy beyond its tolerance, and the rule that finds the tolerance."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, Self

from ..settings.fields import FINITE, Range, require_number
from .settings import ConstraintSettings


# Generation batches that `tolerance="auto"` observes: ten give the standard deviation to about a quarter.
AUTO_BATCHES = 10
# Probability that δ̄ of a healthy batch exceeds ε by chance: one in forty.
_EXCEEDED = 0.025


class LagrangeMultiplier:
    """Multiplier λ of the discrepancy constraint δ̄ ≤ ε, moved by projected dual ascent (arXiv 2606.08779, eqs. 9–11).

    After iteration k, λ_{k+1} = Π_[λ_min, λ_max]( λ_k + η_λ (δ̄_k − ε) ), where δ̄_k is the mean discrepancy of the
    iteration, or of the last ``window`` iterations (the paper's dynamic buffer).

    Args:
        init: λ_0, within [minimum, maximum].
        lr: step size η_λ ≥ 0 of the dual ascent, in units of λ per unit of discrepancy.
        tolerance: ε ≥ 0, the mean discrepancy up to which the policy explores freely. With ``"auto"``, λ stays
            unchanged for the first ten iterations, and `proposed_tolerance` of their δ̄ is ε from then on.
        minimum: λ_min ≥ 0.
        maximum: λ_max ≥ λ_min. The paper's penalty only pushes sampled tokens down, which can itself raise the
            discrepancy, so an unbounded λ can run away.
        window: number of iterations that δ̄ is averaged over, ≥ 1.

    Attributes:
        tolerance (`float` or `None`): ε; `None` until ``"auto"`` has found it.

    Raises:
        ValueError: λ_0 or its bounds are out of their ranges.
    """

    def __init__(
        self,
        init: float = 0.1,
        lr: float = 1.0,
        tolerance: float | Literal["auto"] = 0.0037,
        minimum: float = 0.0,
        maximum: float = 1.0,
        window: int = 1,
    ):
        if not 0 <= minimum <= init <= maximum:
            raise ValueError(f"{init=}, {minimum=}, {maximum=}: choose 0 ≤ minimum ≤ init ≤ maximum.")
        self.lr = lr
        self.tolerance = None if tolerance == "auto" else tolerance
        self.minimum = minimum
        self.maximum = maximum
        self._of: list[str] | None = None  # what λ multiplies and what moves it, where a run's settings say so
        self._value = float(init)
        self._recent: deque[float] = deque(maxlen=window)
        # δ̄ of the iterations that ε is computed from; None where ε is given.
        self._observed: list[float] | None = [] if tolerance == "auto" else None

    @classmethod
    def of(cls, settings: ConstraintSettings) -> Self:
        """Return a new multiplier at `lambda_init`, where it stays unless it is updated (`constraint="static"`)."""
        multiplier = cls(
            init=settings.lambda_init,
            lr=settings.lambda_lr,
            tolerance=settings.discrepancy_tolerance,
            minimum=settings.lambda_min,
            maximum=settings.lambda_max,
            window=settings.dual_window,
        )
        names = ("constraint", "constraint_form", "discrepancy_measure", "constraint_target")
        multiplier._of = [getattr(settings, name) for name in names]
        return multiplier

    @property
    def value(self) -> float:
        """The present λ."""
        return self._value

    def update(self, mean_discrepancy: float) -> float:
        """Take one step of dual ascent from the mean discrepancy δ̄_k of an iteration, and return the new λ.

        Raises:
            ValueError: ``mean_discrepancy`` is not finite.
        """
        if not math.isfinite(mean_discrepancy):
            raise ValueError(f"mean_discrepancy={mean_discrepancy!r} is not finite: skip the update of such a batch.")
        if self.tolerance is None:
            assert self._observed is not None
            self._observed.append(float(mean_discrepancy))
            if len(self._observed) == AUTO_BATCHES:
                self.tolerance = proposed_tolerance(self._observed)
            return self._value
        self._recent.append(float(mean_discrepancy))
        violation = math.fsum(self._recent) / len(self._recent) - self.tolerance
        self._value = self._projected(self._value + self.lr * violation)
        return self._value

    def _projected(self, value: float) -> float:
        return min(max(value, self.minimum), self.maximum)

    def state_dict(self) -> dict[str, Any]:
        """Return λ with its bound, the window's discrepancies and those that ε is computed from, as JSON values."""
        found = {"value": self._value, "maximum": self.maximum, "of": self._of}
        return found | {"recent": list(self._recent), "observed": self._observed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. λ is projected onto the present bounds, and the window keeps its latest.

        A λ that was found for another constraint, or that nothing moves, says nothing about the present one: it stays.

        Raises:
            ValueError: λ was above the bound that it had, or below 0, or a discrepancy is no such number.
        """
        # An earlier release has not saved the bound: the largest default is 8.
        allowed = Range(least=0, most=state_dict.get("maximum", max(self.maximum, 8.0)))
        require_number("lagrange_multiplier of the checkpoint", state_dict["value"], allowed)
        for seen in [*state_dict["recent"], *(state_dict["observed"] or [])]:
            require_number("discrepancy of the checkpoint", seen, FINITE)
        if self._of is not None and (self._of[0] != "lagrangian" or state_dict.get("of", self._of) != self._of):
            return
        self._value = self._projected(float(state_dict["value"]))
        self._recent = deque(map(float, state_dict["recent"]), maxlen=self._recent.maxlen)
        if self._observed is not None:
            self._observed = list(state_dict["observed"] or [])
            self.tolerance = proposed_tolerance(self._observed) if len(self._observed) == AUTO_BATCHES else None


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % point of Student's t with `freedom` ≥ 1 degrees of freedom."""
    from mpmath import betainc, findroot  # of SymPy; a quarter of a second

    def excess(t: float) -> float:
        return betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) / 2 - _EXCEEDED

    return float(findroot(excess, (1.9, 13.0), solver="anderson"))


def tolerance_deviations(freedom: int, batches: float) -> float:
    """Return t·√(1 + 1/n), the standard deviations between the mean of δ̄ and ε: a one-sided 97.5 % prediction bound.

    Args:
        freedom: degrees of freedom of the standard deviation, at least 1.
        batches: number n of independent batches behind the mean, above 0.
    """
    return student_quantile(freedom) * math.sqrt(1 + 1 / batches)


def proposed_tolerance(batch_discrepancies: Sequence[float]) -> float:
    """Return ε from the discrepancies of healthy batches: the mean of δ̄ plus t·√(1 + 1/n) standard deviations.

    t is the 97.5 % point of Student's t with n − 1 degrees of freedom, and the standard deviation has the divisor
    n − 1: for n = 10 the product of both factors is 2.37, for many batches 1.96. The rule is ours.

    δ̄ of a further healthy batch is above ε with a probability of 2.5 %, one in forty, as a mean over what the n
    batches might have been. That is exact for independent, normally distributed δ̄; a δ̄ that is skewed to the right
    exceeds ε more often (4.1 % where it is log-normal with n = 10 and a deviation of its logarithm of 0.2).

    Args:
        batch_discrepancies: δ̄ of n independent generation batches, in units of the measure, n ≥ 2. They must have the
            size that the run uses, because the spread falls with the number of prompts in a batch.

    Raises:
        ValueError: there are fewer than two batches.
    """
    n = len(batch_discrepancies)
    if n < 2:
        raise ValueError(f"{n} batch(es) have no standard deviation: measure at least two.")
    spread = statistics.stdev(batch_discrepancies)
    return statistics.fmean(batch_discrepancies) + tolerance_deviations(n - 1, n) * spread
