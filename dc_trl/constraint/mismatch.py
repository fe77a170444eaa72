"""Metrics of the mismatch between two engines, from sums over tokens that can be added.

A mean of means would weigh a short micro-batch like a long one. The sums are in float64.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ..sampled_tokens import LOG_RATIO_BOUND, scored_tokens, trajectory_mean
from .discrepancy import accumulator


Value = TypeVar("Value", Tensor, float)
Sums = Mapping[str, float]


def mismatch_metrics(train_logps: Tensor, infer_logps: Tensor, mask: Tensor) -> dict[str, float]:
    """Return metrics of the mismatch between two engines on the same tokens, under verl's names for comparison.

    With a = log π_train, b = log π_inf, d = a − b, ⟨·⟩ the mean over scored tokens, x̄_i a trajectory's token mean and
    E_i the mean over trajectories that have a scored token:

    ==================== ====================================== ============================================
    ``kl``               ⟨b − a⟩                                KL(π_inf ‖ π_train), k1 estimator, nats
    ``k3_kl``            ⟨e^d − d − 1⟩                          the same, k3 estimator, ≥ 0
    ``log_ppl_diff``     E_i(b̄_i − ā_i)                         log ppl_train − log ppl_inf
    ``log_ppl_abs_diff`` E_i|b̄_i − ā_i|                         mismatch indicator of arXiv 2602.01826
    ``ppl_ratio``        E_i exp(b̄_i − ā_i)                     ppl_train / ppl_inf
    ``chi2_token``       ⟨e^{2d}⟩ − 1                           χ² of tokens, d clamped to ±20
    ``chi2_seq``         E_i exp(2 Σ_t d) − 1                   χ² of trajectories, Σ_t d clamped to ±20
    ``probs_diff_mean``  ⟨|e^a − e^b|⟩                          also ``_max`` and ``_std`` (unbiased)
    ``probs_pearson``    corr(e^a, e^b)                         NaN when one of the two is constant
    ``ess``              1/⟨(w/⟨w⟩)²⟩, w = e^d                  effective sample size, as a fraction in (0, 1]
    ==================== ====================================== ============================================

    ``log_ppl_abs_diff`` is a mean over trajectories, as verl computes it, and so does not grow with the batch. In that
    paper equation 7 is a sum, which is N times this mean for N trajectories.

    Args:
        train_logps, infer_logps: log π_train and log π_inf of the sampled tokens, shape (B, T), nats.
        mask: nonzero at the tokens that enter the loss, shape (B, T).

    Returns:
        Metric name → value; all values are NaN when no token is scored.
    """
    sums = mismatch_sums(train_logps, infer_logps, mask)
    return mismatch_from_sums({name: value.item() for name, value in sums.items()})


def mismatch_sums(train_logps: Tensor, infer_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the sums from which `mismatch_from_sums` computes metrics; the arguments are those of `mismatch_metrics`.

    Returns:
        Scalars by name. All combine by addition, except those whose name ends in ``_max`` (see `combine_sums`).
    """
    scored = scored_tokens(mask, train_logps, infer_logps)
    dtype = accumulator(train_logps)
    # Unscored tokens are 0 in the log-probabilities, so that nothing below overflows, and in each sum.
    train = train_logps.detach().to(dtype).where(scored, 0.0)
    infer = infer_logps.detach().to(dtype).where(scored, 0.0)
    log_ratio = train - infer
    p, q = train.exp(), infer.exp()
    gap = (p - q).abs()
    weight = log_ratio.exp()
    squared_weight = (2 * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp()

    def over_tokens(value: Tensor) -> Tensor:
        return value.where(scored, 0.0).sum()

    has_tokens = scored.any(-1)
    # log ppl_train − log ppl_inf of a trajectory is the mean of b − a over its tokens.
    log_ppl_gap = trajectory_mean(-log_ratio, scored)
    # The sum is clamped, as in verl: a bound on each token would not bound a long trajectory.
    trajectory_log_ratio = log_ratio.sum(-1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def over_trajectories(value: Tensor) -> Tensor:
        return value.where(has_tokens, 0.0).sum()

    return {
        "tokens": scored.sum().to(dtype),
        "trajectories": has_tokens.sum().to(dtype),
        "kl": over_tokens(-log_ratio),
        "k3": over_tokens(torch.expm1(log_ratio) - log_ratio),
        "weight": over_tokens(weight),
        "weight2": over_tokens(weight.square()),
        "chi2_token": over_tokens(squared_weight),
        "gap": over_tokens(gap),
        "gap2": over_tokens(gap.square()),
        "gap_max": gap.amax() if gap.numel() else gap.sum(),
        "p": over_tokens(p),
        "q": over_tokens(q),
        "p2": over_tokens(p.square()),
        "q2": over_tokens(q.square()),
        "pq": over_tokens(p * q),
        "log_ppl": over_trajectories(log_ppl_gap),
        "log_ppl_abs": over_trajectories(log_ppl_gap.abs()),
        "ppl_ratio": over_trajectories(log_ppl_gap.exp()),
        "chi2_seq": over_trajectories((2 * trajectory_log_ratio).exp()),
    }


def _covariance(sums: Sums, xy: str, x: str, y: str) -> float:
    n = sums["tokens"]
    return sums[xy] / n - sums[x] / n * sums[y] / n


def _pearson(sums: Sums) -> float:
    variance_p, variance_q = _covariance(sums, "p2", "p", "p"), _covariance(sums, "q2", "q", "q")
    if min(variance_p, variance_q) <= 1e-14:  # the rounding error of the subtraction
        return math.nan
    return _covariance(sums, "pq", "p", "q") / math.sqrt(variance_p * variance_q)


def _gap_deviation(sums: Sums) -> float:
    n = sums["tokens"]
    return math.sqrt(max((sums["gap2"] - sums["gap"] ** 2 / n) / (n - 1), 0.0)) if n > 1 else math.nan


# Name → metric of the sums of at least one token.
METRICS: dict[str, Callable[[Sums], float]] = {
    "kl": lambda s: s["kl"] / s["tokens"],
    "k3_kl": lambda s: s["k3"] / s["tokens"],
    "log_ppl_diff": lambda s: s["log_ppl"] / s["trajectories"],
    "log_ppl_abs_diff": lambda s: s["log_ppl_abs"] / s["trajectories"],
    "ppl_ratio": lambda s: s["ppl_ratio"] / s["trajectories"],
    "chi2_token": lambda s: s["chi2_token"] / s["tokens"] - 1,
    "chi2_seq": lambda s: s["chi2_seq"] / s["trajectories"] - 1,
    "probs_diff_mean": lambda s: s["gap"] / s["tokens"],
    "probs_diff_max": lambda s: s["gap_max"],
    "probs_diff_std": _gap_deviation,
    "probs_pearson": _pearson,
    "ess": lambda s: s["weight"] ** 2 / (s["tokens"] * s["weight2"]),
}


def mismatch_from_sums(sums: Sums) -> dict[str, float]:
    """Return the metrics of `mismatch_metrics` from the sums of `mismatch_sums`; NaN where a metric is undefined."""
    return {name: metric(sums) if sums["tokens"] else math.nan for name, metric in METRICS.items()}


def combine_sums(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Return the sums of several micro-batches or processes added up; of names in ``_max``, return the largest."""
    combined: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            if name not in combined:
                combined[name] = value
            elif name.endswith("_max"):
                # Python's max compares on the host, which would wait for the device.
                larger = torch.maximum if isinstance(value, Tensor) else max
                combined[name] = larger(combined[name], value)
            else:
                combined[name] = combined[name] + value
    return combined
