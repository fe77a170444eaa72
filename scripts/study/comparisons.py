"""Means over seeds, and whether a difference is more than noise: t-tests, sign flips, and Holm's correction."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import permutation_test, ttest_1samp, ttest_ind_from_stats
from scipy.stats import t as student_t


SIGNIFICANCE = 0.05  # corrected p-values below it are called a difference


class Mean(NamedTuple):
    """A mean over seeds with its standard error, None for a single seed."""

    value: float
    standard_error: float | None


class Difference(NamedTuple):
    """A mean difference with its standard error, and the p-value of "there is no difference".

    Both are None where there are too few seeds. Without spread `p_value` is 1 where the difference is 0, else None.
    """

    value: float
    standard_error: float | None
    p_value: float | None


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Return the mean of at least one value, and s/√n with s the standard deviation over n − 1."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Mean(statistics.fmean(values), error)


def paired_t_test(differences: Sequence[float]) -> Difference:
    """Test the mean of at least one difference by Student's two-sided t-test with n − 1 degrees of freedom."""
    n = len(differences)
    mean = float(np.mean(differences))
    if n < 2:
        return Difference(mean, None, None)
    error = float(np.std(differences, ddof=1)) / math.sqrt(n)
    if error == 0:  # t is 0/0 or infinite
        return Difference(mean, error, 1.0 if mean == 0 else None)
    return Difference(mean, error, float(ttest_1samp(differences, 0.0).pvalue))


def sign_flip_p_value(differences: Sequence[float]) -> float | None:
    """Test the mean of differences by all 2ⁿ choices of their signs: exact, two-sided, at least 2 / 2ⁿ.

    It assumes that without an effect each difference is as likely as its opposite, and no normal distribution. None
    for a single difference.
    """
    if len(differences) < 2:
        return None
    flips = permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=math.inf)
    return float(flips.pvalue)


def confidence_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of differences by Student's t; None for a single one."""
    value, error, _ = paired_t_test(differences)
    if error is None:
        return None
    reach = float(student_t.ppf(0.975, len(differences) - 1)) * error
    return value - reach, value + reach


def unpaired_t_test(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Test the mean of `first` less that of `second`, each of at least one value, by Welch's two-sided t-test."""
    difference = float(np.mean(first) - np.mean(second))
    if min(len(first), len(second)) < 2:
        return Difference(difference, None, None)
    samples = [(float(np.mean(values)), float(np.std(values, ddof=1)), len(values)) for values in (first, second)]
    error = math.sqrt(sum(deviation**2 / n for _, deviation, n in samples))
    if error == 0:
        return Difference(difference, error, 1.0 if difference == 0 else None)
    test = ttest_ind_from_stats(*samples[0], *samples[1], equal_var=False)
    return Difference(difference, error, float(test.pvalue))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p-values for their number, so that all that are below α are wrong together with probability ≤ α.

    Holm's step-down method (Scandinavian Journal of Statistics 6, 1979). None stays None and does not count.
    """
    ranked = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(ranked):
        highest = max(highest, min(1.0, p * (len(ranked) - rank)))
        corrected[index] = highest
    return corrected
