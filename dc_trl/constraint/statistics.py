"""Statistics of a generation batch over its micro-batches and processes, and the metrics that follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..sampled_tokens import SampledTokens
from ..settings.ranges import require_choice
from .discrepancy import discrepancy_sums, token_discrepancy
from .mismatch import combine_sums, mismatch_from_sums, mismatch_sums
from .ratios import ratio_counts, ratio_quantiles
from .settings import Measure, Reduction


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .lagrangian import LagrangeMultiplier


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

    def reduce(self, gather: Callable[[Tensor], Tensor]) -> MismatchReport | None:
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


class MismatchReport(NamedTuple):
    """Sums over the tokens that `BatchStatistics` has added, of all processes; `batch_metrics` makes metrics of them.

    Args:
        sums: results of `mismatch_sums` and `discrepancy_sums`; also "penalty" and "penalized" where there is a
            constraint, and the sums of a correction where there is one.
        ratios: sum of `ratio_counts`; None without a correction.
    """

    sums: Mapping[str, float]
    ratios: Tensor | None

    @property
    def tokens(self) -> int:
        """Number of scored tokens. If it is 0, there are no metrics."""
        return int(self.sums["tokens"])

    @property
    def mean_discrepancy(self) -> float | None:
        """The batch discrepancy δ̄ (arXiv 2606.08779, eq. 11); None where a correction has masked every token."""
        count = self.sums["discrepancy_count"]
        return self.sums["discrepancy_sum"] / count if count else None


def batch_metrics(report: MismatchReport, multiplier: LagrangeMultiplier | None) -> dict[str, float]:
    """Return the metrics of a batch, by the names of docs/metrics.md.

    Args:
        report: report of a batch with scored tokens.
        multiplier: λ that the batch was penalised with; None where the discrepancy is only measured.
    """
    sums, mean = report.sums, report.mean_discrepancy
    metrics = {f"discrepancy/{name}": value for name, value in mismatch_from_sums(sums).items()}
    if mean is not None:
        metrics["discrepancy/mean"] = mean
    if report.ratios is not None:
        metrics["discrepancy/mean_all"] = sums["all_discrepancy_sum"] / sums["all_discrepancy_count"]
        metrics["correction/masked_fraction"] = sums["masked"] / sums["tokens"]
        metrics["correction/weight_mean"] = sums["weights"] / sums["tokens"]
        metrics |= {f"correction/ratio_{name}": ratio for name, ratio in ratio_quantiles(report.ratios).items()}
    if multiplier is None:
        return metrics
    metrics["lagrangian/lambda"] = multiplier.value
    if multiplier.tolerance is not None:
        metrics["lagrangian/tolerance"] = multiplier.tolerance
        if mean is not None:
            metrics["lagrangian/violation"] = mean - multiplier.tolerance
    if "penalty" in sums:
        metrics["lagrangian/penalty_mean"] = multiplier.value * sums["penalty"] / sums["tokens"]
        metrics["lagrangian/penalized_fraction"] = sums["penalized"] / sums["tokens"]
    return metrics
