"""The Lagrange multiplier that prices discrepancy beyond its tolerance."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, Self

from ..settings.ranges import AT_LEAST_0, COUNT
from .settings import ConstraintSettings


# Generation batches that `tolerance="auto"` observes: ten give the standard deviation to about a quarter.
AUTO_BATCHES = 10
# Probability that δ̄ of a healthy batch stays below ε: one in forty exceeds it by chance.
TOLERANCE_PROBABILITY = 0.975


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % point of Student's t with `freedom` ≥ 1 degrees of freedom.

    It follows Abramowitz and Stegun, 26.7.3–4.
    """
    odd = freedom % 2
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi * freedom) / 2
    # Above 0 the distribution function is concave, so Newton's steps from the normal quantile rise to t from below.
    t = statistics.NormalDist().inv_cdf(TOLERANCE_PROBABILITY)
    while True:
        angle = math.atan(t / math.sqrt(freedom))
        cosine = math.cos(angle)
        term, total = cosine if odd else 1.0, 0.0
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= (power + 1) / (power + 2) * cosine**2
        within = math.sin(angle) * total  # P(|T| ≤ t)
        if odd:
            within = 2 / math.pi * (angle + within)
        density = math.exp(log_scale - (freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = (TOLERANCE_PROBABILITY - (1 + within) / 2) / density
        t += step
        if step < 1e-12 * t:
            return t


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
    n − 1: for n = 10 the product of both factors is 2.37, for many batches 1.96. The rule is ours; the papers state
    values only.

    δ̄ of a further healthy batch is above ε with a probability of 2.5 %, one in forty. λ falls back after such a
    batch, while a lasting rise moves λ at once. The probability is exact for independent, normally distributed δ̄, as
    a mean over the n batches that ε was computed from: the ε of a single run may be exceeded more or less often. A δ̄
    that is skewed to the right exceeds ε more often: 3.3 %, 4.1 % or 6.4 % where it is log-normal with n = 10 and the
    standard deviation of its logarithm is 0.1, 0.2 or 0.6 (400,000 simulations of each).

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
        ValueError: a value is out of its range; the message names it.
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
        fixed = None if tolerance == "auto" else tolerance
        numbers = {"lr": lr, "minimum": minimum, "maximum": maximum} | ({} if fixed is None else {"tolerance": fixed})
        for name, value in numbers.items():
            if not AT_LEAST_0.allows(value):
                raise ValueError(f"{name}={value!r} is invalid: use a finite number that is at least 0.")
        if minimum > maximum:
            raise ValueError(f"minimum={minimum!r} is above maximum={maximum!r}: lower one or raise the other.")
        if not minimum <= init <= maximum:
            raise ValueError(f"init={init!r} lies outside [{minimum!r}, {maximum!r}]: choose one within the bounds.")
        if not COUNT.allows(window):
            raise ValueError(f"window={window!r} is invalid: use a whole number of iterations, at least 1.")
        self.lr = lr
        self.tolerance = fixed
        self.minimum = minimum
        self.maximum = maximum
        self._value = float(init)
        self._recent: deque[float] = deque(maxlen=window)
        # δ̄ of the iterations that ε is computed from; None where ε is given.
        self._observed: list[float] | None = [] if fixed is None else None

    @classmethod
    def of(cls, settings: ConstraintSettings) -> Self:
        """Return a new multiplier at `lambda_init`, where it stays unless it is updated (`constraint="static"`)."""
        return cls(
            init=settings.lambda_init,
            lr=settings.lambda_lr,
            tolerance=settings.discrepancy_tolerance,
            minimum=settings.lambda_min,
            maximum=settings.lambda_max,
            window=settings.dual_window,
        )

    @property
    def value(self) -> float:
        """The present λ."""
        return self._value

    def update(self, mean_discrepancy: float) -> float:
        """Take one step of dual ascent from the mean discrepancy δ̄_k of an iteration, and return the new λ.

        Raises:
            ValueError: ``mean_discrepancy`` is negative or not finite. An iteration without a scored token has no mean
                discrepancy: do not update after it.
        """
        if not math.isfinite(mean_discrepancy) or mean_discrepancy < 0:
            raise ValueError(
                f"mean_discrepancy={mean_discrepancy!r} is no discrepancy: pass a finite mean that is at least 0, and "
                "skip the update after an iteration without a scored token."
            )
        if self.tolerance is None:
            assert self._observed is not None
            self._observed.append(float(mean_discrepancy))
            if len(self._observed) == AUTO_BATCHES:
                self.tolerance = proposed_tolerance(self._observed)
            return self._value
        self._recent.append(float(mean_discrepancy))
        violation = math.fsum(self._recent) / len(self._recent) - self.tolerance
        self._value = min(max(self._value + self.lr * violation, self.minimum), self.maximum)
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """Return λ, the window's discrepancies and those that ε is computed from, as JSON-compatible values.

        The settings are not part of the state; they are passed to the constructor.
        """
        return {"value": self._value, "recent": list(self._recent), "observed": self._observed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. λ is projected onto the present bounds, and the window keeps its latest."""
        value = float(state_dict["value"])
        if not math.isfinite(value):
            raise ValueError(f"state_dict['value']={value!r} is not finite: the state is corrupt.")
        self._value = min(max(value, self.minimum), self.maximum)
        self._recent = deque(map(float, state_dict["recent"]), maxlen=self._recent.maxlen)
        if self._observed is not None:
            self._observed = list(state_dict["observed"] or [])
            self.tolerance = proposed_tolerance(self._observed) if len(self._observed) == AUTO_BATCHES else None
