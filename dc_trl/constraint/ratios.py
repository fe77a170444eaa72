"""The distribution of the ratio r = π_train/π_inf over many tokens, as counts that can be added.

A quantile of a batch is not the mean of the quantiles of its parts. So micro-batches and processes count their tokens
in the same bins of log r, and the quantiles are read from the sum. The bins are even in asinh(log r / 1e-6): near
r = 1 they are 1e-8 wide, and elsewhere a hundredth of |log r|.
"""

import math
from itertools import accumulate

import torch
from torch import Tensor

from ..sampled_tokens import LOG_RATIO_BOUND


_SMALLEST = 1e-6  # in nats; smaller differences of float32 log-probabilities are rounding errors
_PER_UNIT = 100
_MIDDLE = round(_PER_UNIT * math.asinh(LOG_RATIO_BOUND / _SMALLEST))  # the bin of r = 1
BINS = 2 * _MIDDLE + 1

# Name of a metric → share of the tokens whose ratio is at or below it.
SHARES = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


def ratio_counts(log_ratio: Tensor, scored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the number of scored tokens in each bin of their ratio.

    Args:
        log_ratio: log r, shape (B, T), nats, finite; it is clamped to ±20.
        scored: which tokens count, boolean, shape (B, T).
        dtype: dtype of the counts, which must hold every count exactly.

    Returns:
        Shape (BINS,).
    """
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    bins = (_PER_UNIT * torch.asinh(bounded / _SMALLEST)).round().long() + _MIDDLE
    counts = torch.zeros(BINS, dtype=dtype, device=log_ratio.device)
    return counts.scatter_add_(0, bins.flatten(), scored.flatten().to(dtype))


def ratio_quantiles(counts: Tensor) -> dict[str, float]:
    """Return the quantiles at `SHARES`: the smallest ratio that at least this share of the tokens does not exceed.

    Args:
        counts: sum of `ratio_counts`, with at least one token.

    Returns:
        Name → r, whose logarithm is exact to 0.5 %, or to 1e-8 if that is more.
    """
    cumulative = list(accumulate(counts.tolist()))
    quantiles = {}
    for name, share in SHARES.items():
        rank = max(math.ceil(share * cumulative[-1]), 1)
        index = next(index for index, count in enumerate(cumulative) if count >= rank)
        quantiles[name] = math.exp(_SMALLEST * math.sinh((index - _MIDDLE) / _PER_UNIT))
    return quantiles
