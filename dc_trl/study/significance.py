"""Whether a difference is more than noise: Student's t over seeds, and Holm's correction for many comparisons."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


try:
    from scipy.stats import ttest_1samp
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
