"""The rule by which ε follows from the discrepancies of healthy batches (`discrepancy_tolerance="auto"`)."""

import math
import statistics
from collections.abc import Sequence


# Generation batches that `tolerance="auto"` observes: ten give the standard deviation to about a quarter.
AUTO_BATCHES = 10
# Probability that δ̄ of a healthy batch exceeds ε by chance: one in forty.
_EXCEEDED = 0.025


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
