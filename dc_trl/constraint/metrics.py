"""Metrics of the mismatch between two engines, and the statistics of a generation batch that they follow from.

A mean of means would weigh a short micro-batch like a long one: metrics are computed from sums over tokens, in
float64, which micro-batches and processes add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..sampled_tokens import LOG_RATIO_BOUND, SampledTokens, scored_tokens, trajectory_mean
from .discrepancy import accumulator, discrepancy_sums, token_discrepancy
from .settings import ConstraintSettings, Part


if TYPE_CHECKING:
    from .lagrangian import LagrangeMultiplier

Value = TypeVar("Value", Tensor, float)
Sums = Mapping[str, float]

PARTS: tuple[Part, ...] = ("lag", "engine")
_OWN = "/own"  # ends the sums of metrics that a function of the user's own has left, whatever their names end in


def mismatch_metrics(train_logps: Tensor, infer_logps: Tensor, mask: Tensor) -> dict[str, float]:
    """Return metrics of the mismatch between two engines on the same tokens, under verl's names for comparison.

    With a = log π_train, b = log π_inf, d = a − b, ⟨·⟩ the mean over scored tokens, x̄_i a trajectory's token mean and
    E_i the mean over trajectories that have a scored token:

    ==================== ====================================== ============================================
    ``kl``               ⟨b − a⟩                                KL(π_inf ‖ π_train), k1 estimator, nats
    ``k3_kl``            ⟨e^d − d − 1⟩                          the same, k3 estimator, ≥ 0
    ``log_ppl_diff``     E_i(b̄_i − ā_i)                         log ppl_train − log ppl_inf
    ``log_ppl_abs_diff`` E_i|b̄_i − ā_i|                         the same, without cancelling, as in verl
    ``ppl_ratio``        E_i exp(b̄_i − ā_i)                     ppl_train / ppl_inf
    ``chi2_token``       ⟨e^{2d}⟩ − 1                           χ² of tokens, d clamped to ±20
    ``chi2_seq``         E_i exp(2 Σ_t d) − 1                   χ² of trajectories, Σ_t d clamped to ±20
    ``probs_diff_mean``  ⟨|e^a − e^b|⟩                          also ``_max`` and ``_std`` (unbiased)
    ``probs_pearson``    corr(e^a, e^b)                         NaN when one of the two is constant
    ``ess``              1/⟨(w/⟨w⟩)²⟩, w = e^d                  effective sample size, as a fraction in (0, 1]
    ==================== ====================================== ============================================

    Equation 7 of arXiv 2602.01826, its mismatch indicator, sums log-probabilities over the T_i tokens of a trajectory.
    So it has T_i |b̄_i − ā_i|, which grows with the length; ``log_ppl_abs_diff`` does not.

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


class BatchStatistics:
    """Statistics of a generation batch, or of an evaluation: `add` its micro-batches, then `reduce` all processes.

    Args:
        settings: settings of the run: the measure of δ, how δ̄ is averaged, and which part of it moves λ.
        ages: number of ages, from 0 on, by which the lag's part is also measured, where one batch has several.
    """

    def __init__(self, settings: ConstraintSettings, ages: int = 0):
        self._settings = settings
        self._ages = range(ages)
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, tokens: SampledTokens, penalty: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add a micro-batch.

        Args:
            tokens: sampled tokens of the micro-batch.
            penalty: what λ multiplied, shape (B, T), 0 at unscored tokens; None without a constraint.
            weights: of a correction, shape (B, T); None without one. Tokens of the weight 0 do not count in δ̄.
        """
        scored = tokens.scored
        kept = scored if weights is None else scored & (weights > 0)
        sums = self._sums_of(tokens, kept)
        if tokens.lagged_logps is not None:
            parts: dict[str, SampledTokens] = {part: tokens.of_part(part) for part in PARTS}
            for age in self._ages:
                assert isinstance(tokens.age, Tensor)
                of_age = scored & (tokens.age == age).unsqueeze(1)
                parts[f"lag_age{age}"] = parts["lag"]._replace(scored=of_age)
            for name, part in parts.items():
                found = self._sums_of(part, kept & part.scored)
                sums |= {f"{name}_{key}": value for key, value in found.items()}
        dtype = sums["tokens"].dtype
        if penalty is not None:
            penalty = penalty.where(kept, 0.0)
            sums["penalty"] = penalty.sum(dtype=dtype)
            sums["penalized"] = (penalty != 0).sum().to(dtype)
        if weights is not None:
            sums |= {f"all_{name}": value for name, value in self._mean_sums_of(tokens, scored).items()}
            sums["masked"] = sums["tokens"] - kept.sum()
            sums["weights"] = weights.where(scored, 0.0).sum(dtype=dtype)
        for name, values in tokens.metrics.items():
            sums[f"{name}{_OWN}"] = values.detach().where(scored, 0.0).sum(dtype=dtype)
        self._sums = combine_sums([self._sums, sums])

    def _sums_of(self, tokens: SampledTokens, kept: Tensor) -> dict[str, Tensor]:
        return mismatch_sums(*tokens[:3]) | self._mean_sums_of(tokens, kept)

    def _mean_sums_of(self, tokens: SampledTokens, kept: Tensor) -> dict[str, Tensor]:
        delta = token_discrepancy(tokens.train_logps, tokens.infer_logps, self._settings.discrepancy_measure)
        return discrepancy_sums(delta, kept, self._settings.batch_reduction)

    def reduce(self, gather: Callable[[Tensor], Tensor]) -> Sums | None:
        """Return the sums over what all processes added since the last call; None where this process added nothing.

        Every process has to call it.

        Args:
            gather: concatenates tensors of shape (1, n) of all processes into (processes, n), as accelerate's does.
        """
        local, self._sums = self._sums, {}
        if not local:
            return None
        sizes = [value.numel() for value in local.values()]
        ranks = gather(torch.cat([value.reshape(-1) for value in local.values()]).unsqueeze(0)).cpu()
        sums = combine_sums(dict(zip(local, values.split(sizes), strict=True)) for values in ranks)
        return {name: value.item() for name, value in sums.items()}

    def clear(self) -> None:
        """Discard what was added."""
        self._sums = {}


def mean_discrepancy(sums: Sums, part: Part = "all") -> float | None:
    """Return δ̄ (arXiv 2606.08779, eq. 11) of a batch, or a part of it; None where a correction masked every token."""
    prefix = "" if part == "all" else f"{part}_"
    count = sums[f"{prefix}discrepancy_count"]
    return sums[f"{prefix}discrepancy_sum"] / count if count else None


def batch_metrics(
    sums: Sums, multiplier: LagrangeMultiplier | None = None, target: Part = "all", truncated: bool = False
) -> dict[str, float]:
    """Return the metrics of a batch, by the names of docs/metrics.md.

    Args:
        sums: of `BatchStatistics.reduce`, of a batch with scored tokens.
        multiplier: λ that the batch was penalised with; None where the discrepancy is only measured.
        target: part of the discrepancy that moves λ.
        truncated: whether the discrepancy contains what truncated sampling has cut off. Then no metric is called
            `discrepancy/...`, so that nothing takes it for the mismatch of the engines.
    """
    group = "discrepancy_truncated" if truncated else "discrepancy"
    tokens, metrics = sums["tokens"], {f"{group}/{name}": value for name, value in mismatch_from_sums(sums).items()}
    if (mean := mean_discrepancy(sums)) is not None:
        metrics[f"{group}/mean"] = mean
    # The prefixes of its parts, where it is split.
    for prefix in [name.removesuffix("k3") for name in sums if name.endswith("_k3")]:
        of_part = {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
        if not of_part["tokens"]:
            continue  # no token of the batch has this age
        if (mean := mean_discrepancy(of_part)) is not None:
            metrics[f"{group}/{prefix}mean"] = mean
        found = mismatch_from_sums(of_part)
        metrics |= {f"{group}/{prefix}{name}": found[name] for name in ("k3_kl", "ess")}
    for name in [name for name in sums if name.endswith(_OWN)]:
        metrics[name.removesuffix(_OWN)] = sums[name] / tokens
    if "weights" in sums:
        metrics[f"{group}/mean_all"] = sums["all_discrepancy_sum"] / sums["all_discrepancy_count"]
        metrics["correction/masked_fraction"] = sums["masked"] / tokens
        metrics["correction/weight_mean"] = sums["weights"] / tokens
    if multiplier is None:
        return metrics
    metrics["lagrangian/lambda"] = multiplier.value
    if multiplier.tolerance is not None:
        metrics["lagrangian/tolerance"] = multiplier.tolerance
        if (constrained := mean_discrepancy(sums, target)) is not None:
            metrics["lagrangian/violation"] = constrained - multiplier.tolerance
    if "penalty" in sums:
        metrics["lagrangian/penalty_mean"] = multiplier.value * sums["penalty"] / tokens
        metrics["lagrangian/penalized_fraction"] = sums["penalized"] / tokens
    return metrics
