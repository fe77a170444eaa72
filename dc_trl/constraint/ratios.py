"""The distribution of the ratio r = π_train/π_inf over many tokens, as counts that add up.

A quantile of a batch is no mean of the quantiles of its parts. So micro-batches and processes count their tokens in
the same bins of log r, and the quantiles are read from the sum. The bins are even in asinh(log r / 1e-6): near 1 they
are 1e-8 wide, and elsewhere a hundredth of |log r|.
"""

import math
from itertools import accumulate

import torch
from torch import Tensor

from ..sampled_tokens import LOG_RATIO_BOUND


_SMALLEST = 1e-6  # in nats; below it, float32 log-probabilities are rounding
_PER_UNIT = 100
_MIDDLE = round(_PER_UNIT * math.asinh(LOG_RATIO_BOUND / _SMALLEST))  # the bin of r = 1
BINS = 2 * _MIDDLE + 1

# Share of the tokens whose ratio is at or below the metric of this name.
SHARES = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}


def ratio_counts(log_ratio: Tensor, scored: Tensor, dtype: torch.dtype) -> Tensor:
    """Counts the scored tokens by their ratio.

    Args:
        log_ratio: log r, shape (B, T), nats, finite; beyond ±20 it counts as ±20.
        scored: boolean, shape (B, T).
        dtype: of the counts, which must hold every count exactly.

    Returns:
        Shape (BINS,).
    """
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    bins = (_PER_UNIT * torch.asinh(bounded / _SMALLEST)).round().long() + _MIDDLE
    counts = torch.zeros(BINS, dtype=dtype, device=log_ratio.device)
    return counts.scatter_add_(0, bins.flatten(), scored.flatten().to(dtype))


def ratio_quantiles(counts: Tensor) -> dict[str, float]:
    """The ratio at each of `SHARES`: that of the first token, in order, with at least this share at or below it.

    Args:
        counts: sum of `ratio_counts`, with at least one token.

    Returns:
        Name → r, whose logarithm is exact to 0.5 %, or to 1e-8 if that is more.
    """
    reached = list(accumulate(counts.tolist()))
    quantiles = {}
    for name, share in SHARES.items():
        rank = max(math.ceil(share * reached[-1]), 1)
        found = next(place for place, count in enumerate(reached) if count >= rank)
        quantiles[name] = math.exp(_SMALLEST * math.sinh((found - _MIDDLE) / _PER_UNIT))
    return quantiles
