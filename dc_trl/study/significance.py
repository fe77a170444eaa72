"""Whether a difference is more than noise: Student's t over seeds, and Holm's correction for many comparisons."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


try:
    from scipy.stats import ttest_1samp, ttest_ind_from_stats
except ImportError as error:
    raise ImportError("dc_trl.study needs scipy: pip install 'dc_trl[theory]'.") from error


class PairedTest(NamedTuple):
    """A mean difference over seeds with its standard error, and the p-value of "there is no difference".

    Both are None for a single pair. Where no pair differs, `p_value` is 1; where all differ by the same, it is None.
    """

    difference: float
    standard_error: float | None
    p_value: float | None
    pairs: int


def paired_t_test(differences: Sequence[float]) -> PairedTest:
    """Student's two-sided t-test of the mean of at least one difference, n − 1 degrees of freedom."""
    n = len(differences)
    mean = float(np.mean(differences))
    if n < 2:
        return PairedTest(mean, None, None, n)
    error = float(np.std(differences, ddof=1)) / math.sqrt(n)
    if error == 0:  # t is 0 / 0 or infinite
        return PairedTest(mean, error, 1.0 if mean == 0 else None, n)
    return PairedTest(mean, error, float(ttest_1samp(differences, 0.0).pvalue), n)


class UnpairedTest(NamedTuple):
    """A difference of two means with its standard error, and the p-value of "there is no difference".

    Both are None where a mean is of a single value. Where no value differs from another, `p_value` is 1; where the
    values of each mean are alike and the means differ, it is None.
    """

    difference: float
    standard_error: float | None
    p_value: float | None


def unpaired_t_test(first: Sequence[float], second: Sequence[float]) -> UnpairedTest:
    """Welch's two-sided t-test of the mean of `first` less that of `second`, each of at least one value."""
    difference = float(np.mean(first) - np.mean(second))
    if min(len(first), len(second)) < 2:
        return UnpairedTest(difference, None, None)
    samples = [(float(np.mean(values)), float(np.std(values, ddof=1)), len(values)) for values in (first, second)]
    error = math.sqrt(sum(deviation**2 / n for _, deviation, n in samples))
    if error == 0:
        return UnpairedTest(difference, error, 1.0 if difference == 0 else None)
    test = ttest_ind_from_stats(*samples[0], *samples[1], equal_var=False)
    return UnpairedTest(difference, error, float(test.pvalue))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values corrected for their number, so that all that are below α are wrong together with probability ≤ α.

    Holm's step-down method (Scandinavian Journal of Statistics 6, 1979). None stays None and does not count.
    """
    ranked = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(ranked):
        highest = max(highest, min(1.0, p * (len(ranked) - rank)))
        corrected[index] = highest
    return corrected
