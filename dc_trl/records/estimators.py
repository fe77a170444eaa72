"""Estimates from several sampled answers to each of many problems: avg@k, pass@k, maj@k, errors and differences.

Problems are the independent units: the samples of one problem share its difficulty. So standard errors are those of
the mean over problems (clustered by problem), and the bootstrap draws whole problems.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


RESAMPLES = 10_000
_WILSON = 1.959964**2  # square of the 97.5 % point of the normal distribution
_MARGIN = 1e-12  # sums in another order round differently by less than this


@dataclass(frozen=True)
class Estimate:
    """A mean over problems: its standard error (None for a single problem), 95 % interval, number of problems.

    The interval is the bootstrap's, or Wilson's: see `macro_estimate`.
    """

    value: float
    standard_error: float | None
    low: float
    high: float
    problems: int


@dataclass(frozen=True)
class Difference(Estimate):
    """The second of two means minus the first; `p_value` is two-sided, for "there is no difference".

    The p-value is None where chance cannot be estimated: see `paired_difference`.
    """

    p_value: float | None


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k samples is right, estimated without bias from more samples.

    Equation 1 of "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374).

    Args:
        samples, correct: samples of the problem, at least k, and how many of them are right.
        k: samples that count, at least 1.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return the probability that the answer with most votes is right.

    Args:
        answers: canonical answer of each sample; a sample with None does not vote.
        correct: whether each is right.

    Returns:
        0 or 1, or between where several answers share the most votes, among which the draw is fair; 0 without votes.
    """
    winners = statistics.multimode(answer for answer in answers if answer is not None)
    verdicts = [right for answer, right in zip(answers, correct, strict=True) if answer in winners]
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean over at least one problem of a value for each, with its errors."""
    return macro_estimate([values])


def noise_of(values: Sequence[float]) -> float:
    """Return the standard deviation of a single one of successive values, at least two, which a trend hardly moves."""
    differences = [abs(second - first) for first, second in pairwise(values[-101:])]
    # The median of |difference| of two normal values is 0.6745 · √2 standard deviations. It says nothing where most
    # values are equal, as rewards that are mostly 0; the mean of squares is right for any independent values.
    median = statistics.median(differences) / (0.6745 * math.sqrt(2))
    return median or math.sqrt(statistics.fmean(each * each for each in differences) / 2)


def recent_mean(values: Sequence[float]) -> dict[str, Any] | None:
    """Return mean and range of the last ten values, which depend on each other; None where there is none."""
    last = values[-10:]
    return {"value": sum(last) / len(last), "range": [min(last), max(last)], "logs": len(last)} if last else None


def macro_estimate(benchmarks: Sequence[Sequence[float]]) -> Estimate:
    """Return the unweighted mean over benchmarks of the means over their problems: the papers' "Avg." column.

    Where each benchmark has only zeros or only ones, resampled problems do not scatter, which is no sign of certainty.
    The interval is then Wilson's (1927) of that share, averaged over the benchmarks: for 0 of 16 it is 0 to 0.19.

    Args:
        benchmarks: for each benchmark one value for each problem; the bootstrap draws problems within each.

    Raises:
        ValueError: there is no benchmark, or one without problems.
    """
    estimate = _bootstrap(benchmarks)[0]
    if all({*values} in ({0.0}, {1.0}) for values in benchmarks):
        weights = [len(values) / (len(values) + _WILSON) for values in benchmarks]
        low = statistics.fmean(values[0] * weight for values, weight in zip(benchmarks, weights, strict=True))
        return replace(estimate, low=low, high=low + statistics.fmean(1 - weight for weight in weights))
    return estimate


def paired_difference(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Difference:
    """Return second minus first on the same problems; for several benchmarks the mean of their differences.

    The p-value is that of the paired bootstrap: how often the mean of resampled problems lies at least as far from the
    observed difference as that lies from zero. A single problem has none, nor have problems that all differ alike.

    Args:
        first, second: for each benchmark one value for each problem, in the same order.

    Raises:
        ValueError: the problems do not match.
    """
    if [len(values) for values in first] != [len(values) for values in second]:
        raise ValueError("The two evaluations have different numbers of problems: compare them on the same ones.")
    differences = [[b - a for a, b in zip(*values, strict=True)] for values in zip(first, second, strict=True)]
    estimate, means = _bootstrap(differences)
    p_value = _p_value(estimate, means, map(len, differences))
    return Difference(**vars(estimate), p_value=p_value)


def _p_value(difference: Estimate, means: NDArray[np.float64], sizes: Iterable[int]) -> float | None:
    """Return how often a resample is as far from the difference as that is from 0; `sizes` counts the problems.

    A resample of n problems holds the same one n times with probability n⁻ⁿ. With n problems, p is never
    below twice that. It is 1 where no problem differs, and None where all problems differ by the same: resamples do
    not scatter then, which is no sign of certainty.
    """
    if difference.standard_error is None:
        return None
    if difference.standard_error <= _MARGIN:
        return 1.0 if abs(difference.value) <= _MARGIN else None
    # The observed sample is one of the possible ones.
    # NaN, which is not known to be nearer, counts as one.
    extreme = 1 + int((~(np.abs(means - difference.value) < abs(difference.value) - _MARGIN)).sum())
    return max(extreme / (len(means) + 1), 2 * math.prod(float(size) ** -size for size in sizes))


def _bootstrap(strata: Sequence[Sequence[float]]) -> tuple[Estimate, NDArray[np.float64]]:
    """Return the mean of the strata's means with its errors, and the same mean of resampled problems."""
    if not strata or not all(strata):
        raise ValueError("An estimate needs at least one problem of each benchmark.")
    rng = np.random.default_rng(0)  # the same estimates for the same values
    arrays = [np.asarray(values, dtype=np.float64) for values in strata]
    value = float(np.mean([values.mean() for values in arrays]))
    error = None
    if all(len(values) > 1 for values in arrays):
        error = math.sqrt(sum(values.var(ddof=1) / len(values) for values in arrays)) / len(arrays)
    means = np.zeros(RESAMPLES)
    for values in arrays:
        means += values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1) / len(arrays)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(value, error, float(low), float(high), sum(map(len, strata))), means
