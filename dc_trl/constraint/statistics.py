"""Statistics of the mismatch over micro-batches and processes, which are added as sums before any mean is taken.

A mean of means would weigh a short micro-batch like a long one. The sums are in float64. The symbols are those of
`dc_trl.sampled_tokens`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ..sampled_tokens import LOG_RATIO_BOUND, SampledTokens, scored_tokens, trajectory_mean
from ..settings.ranges import require_choice
from .discrepancy import token_discrepancy
from .lagrangian import LagrangeMultiplier
from .ratios import ratio_counts, ratio_quantiles
from .settings import Measure, Reduction


Value = TypeVar("Value", Tensor, float)


class BatchStatistics:
    """Statistics of a generation batch, or of an evaluation: `add` its micro-batches, then `reduce` all processes.

    Args:
        reduction: how the batch discrepancy δ̄ is averaged, see `discrepancy_sums`.
        measure: measure of δ, see `token_discrepancy`.
    """

    def __init__(self, reduction: Reduction = "sequence", measure: Measure = "prob_diff"):
        require_choice("batch_reduction", reduction, Reduction)
        self._reduction: Reduction = reduction
        self._measure: Measure = measure
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, tokens: SampledTokens, penalty: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add a micro-batch.

        Args:
            tokens: sampled tokens of the micro-batch.
            penalty: what λ multiplied, shape (B, T), 0 at unscored tokens; None without a constraint.
            weights: weights of a correction, shape (B, T); None without one. Tokens with a weight of 0 do not count in
                δ̄.
        """
        train_logps, infer_logps, scored, _ = tokens
        delta = token_discrepancy(train_logps, infer_logps, self._measure)
        kept = scored if weights is None else scored & (weights > 0)
        sums = mismatch_sums(train_logps, infer_logps, scored) | discrepancy_sums(delta, kept, self._reduction)
        dtype = sums["tokens"].dtype
        if penalty is not None:
            penalty = penalty.where(kept, 0.0)
            sums["penalty"] = penalty.sum(dtype=dtype)
            sums["penalized"] = (penalty != 0).sum().to(dtype)
        if weights is not None:
            sums |= {f"all_{name}": value for name, value in discrepancy_sums(delta, scored, self._reduction).items()}
            sums["masked"] = sums["tokens"] - kept.sum()
            sums["weights"] = weights.where(scored, 0.0).sum(dtype=dtype)
            sums["ratios"] = ratio_counts(tokens.log_ratio, scored, dtype)
        self._sums = combine_sums([self._sums, sums])

    def reduce(self, gather: Callable[[Tensor], Tensor]) -> "MismatchReport | None":
        """Return a report of what all processes added since the last call; None where this process added nothing.

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
        ratios = sums.pop("ratios", None)
        return MismatchReport({name: value.item() for name, value in sums.items()}, ratios)

    def clear(self) -> None:
        """Discard what was added."""
        self._sums = {}


class MismatchReport:
    """Means over the tokens that `BatchStatistics` has added.

    Args:
        sums: results of `mismatch_sums` and `discrepancy_sums`; also "penalty" and "penalized" where there is a
            constraint, and the sums of a correction where there is one.
        ratios: sum of `ratio_counts`; None without a correction.
    """

    def __init__(self, sums: Mapping[str, float], ratios: Tensor | None = None):
        self._sums = sums
        self._ratios = ratios

    @property
    def tokens(self) -> int:
        """Number of scored tokens. If it is 0, nothing below is defined."""
        return int(self._sums["tokens"])

    @property
    def mean_discrepancy(self) -> float | None:
        """The batch discrepancy δ̄ (arXiv 2606.08779, eq. 11); None where a correction has masked every token."""
        count = self._sums["discrepancy_count"]
        return self._sums["discrepancy_sum"] / count if count else None

    @property
    def penalizes(self) -> bool:
        """Whether advantages were penalised, so that `mean_penalty` and `penalized_fraction` are defined."""
        return "penalty" in self._sums

    def mean_penalty(self, multiplier: float) -> float:
        """Return the mean over scored tokens of λ times the penalty."""
        return multiplier * self._sums["penalty"] / self._sums["tokens"]

    @property
    def penalized_fraction(self) -> float:
        """Share of the scored tokens whose advantage the constraint moves."""
        return self._sums["penalized"] / self._sums["tokens"]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of `mismatch_metrics`, and δ̄ as "mean".

        With a correction there is also "mean_all", which is δ̄ with the masked tokens included.
        """
        metrics, mean = mismatch_from_sums(self._sums), self.mean_discrepancy
        if mean is not None:
            metrics["mean"] = mean
        if self._ratios is not None:
            metrics["mean_all"] = self._sums["all_discrepancy_sum"] / self._sums["all_discrepancy_count"]
        return metrics

    def correction_metrics(self) -> dict[str, float]:
        """Return the masked fraction, the mean weight and the quantiles of the ratio; {} without a correction."""
        if self._ratios is None:
            return {}
        tokens = self._sums["tokens"]
        shares = {"masked_fraction": self._sums["masked"] / tokens, "weight_mean": self._sums["weights"] / tokens}
        return shares | {f"ratio_{name}": ratio for name, ratio in ratio_quantiles(self._ratios).items()}


def batch_metrics(report: MismatchReport, multiplier: LagrangeMultiplier | None) -> dict[str, float]:
    """Return the metrics of a batch, by the names of docs/metrics.md.

    Args:
        report: report of a batch with scored tokens.
        multiplier: λ that the batch was penalised with; None where the discrepancy is only measured.
    """
    metrics = {f"discrepancy/{name}": value for name, value in report.metrics().items()}
    metrics |= {f"correction/{name}": value for name, value in report.correction_metrics().items()}
    if multiplier is None:
        return metrics
    mean, tolerance = report.mean_discrepancy, multiplier.tolerance
    metrics["lagrangian/lambda"] = multiplier.value
    if tolerance is not None:
        metrics["lagrangian/tolerance"] = tolerance
        if mean is not None:
            metrics["lagrangian/violation"] = mean - tolerance
    if report.penalizes:
        metrics["lagrangian/penalty_mean"] = report.mean_penalty(multiplier.value)
        metrics["lagrangian/penalized_fraction"] = report.penalized_fraction
    return metrics


def _accumulator(tensor: Tensor) -> torch.dtype:
    # Apple's MPS has no float64.
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def discrepancy_sums(delta: Tensor, scored: Tensor, reduction: Reduction = "sequence") -> dict[str, Tensor]:
    """Return numerator and denominator of the batch discrepancy δ̄ (arXiv 2606.08779, eq. 11).

    Args:
        delta: δ of each token, shape (B, T).
        scored: which tokens count, boolean, shape (B, T).
        reduction: ``"sequence"``: mean over trajectories of their token means; ``"token"``: mean over all tokens.

    Returns:
        "discrepancy_sum" and "discrepancy_count", scalars. A trajectory without a scored token counts nowhere.
    """
    require_choice("batch_reduction", reduction, Reduction)
    delta = delta.to(_accumulator(delta))
    if reduction == "sequence":
        total, count = trajectory_mean(delta, scored).sum(), scored.any(-1).sum()
    else:
        total, count = delta.where(scored, 0.0).sum(), scored.sum()
    return {"discrepancy_sum": total, "discrepancy_count": count.to(total.dtype)}


def mismatch_sums(train_logps: Tensor, infer_logps: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the sums from which `mismatch_from_sums` computes metrics; the arguments are those of `mismatch_metrics`.

    Returns:
        Scalars by name. All combine by addition, except those whose name ends in ``_max`` (see `combine_sums`).
    """
    scored = scored_tokens(mask, train_logps, infer_logps)
    dtype = _accumulator(train_logps)
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


def combine_sums(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Return the sums of several micro-batches or processes added up; of names in ``_max``, return the largest."""
    combined: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            if name not in combined:
                combined[name] = value
            elif name.endswith("_max"):
                combined[name] = _larger(combined[name], value)
            else:
                combined[name] = combined[name] + value
    return combined


def _larger(first: Value, second: Value) -> Value:
    # Python's max compares on the host, which would wait for the device.
    return torch.maximum(first, second) if isinstance(first, Tensor) else max(first, second)


def mismatch_from_sums(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of `mismatch_metrics` from the sums of `mismatch_sums`; NaN where a metric is undefined."""
    n, trajectories = sums["tokens"], sums["trajectories"]
    if n == 0:
        return dict.fromkeys(METRICS, math.nan)

    def covariance(xy: str, x: str, y: str) -> float:
        return sums[xy] / n - sums[x] / n * sums[y] / n

    variance_p, variance_q = covariance("p2", "p", "p"), covariance("q2", "q", "q")
    # A smaller variance is the rounding error of the subtraction.
    spread = min(variance_p, variance_q) > 1e-14
    gap_variance = (sums["gap2"] - sums["gap"] ** 2 / n) / (n - 1) if n > 1 else math.nan
    values = (
        sums["kl"] / n,
        sums["k3"] / n,
        sums["log_ppl"] / trajectories,
        sums["log_ppl_abs"] / trajectories,
        sums["ppl_ratio"] / trajectories,
        sums["chi2_token"] / n - 1,
        sums["chi2_seq"] / trajectories - 1,
        sums["gap"] / n,
        sums["gap_max"],
        math.sqrt(max(gap_variance, 0.0)) if n > 1 else math.nan,
        covariance("pq", "p", "q") / math.sqrt(variance_p * variance_q) if spread else math.nan,
        sums["weight"] ** 2 / (n * sums["weight2"]),
    )
    return dict(zip(METRICS, values, strict=True))


METRICS = (
    "kl",
    "k3_kl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "chi2_token",
    "chi2_seq",
    "probs_diff_mean",
    "probs_diff_max",
    "probs_diff_std",
    "probs_pearson",
    "ess",
)


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
