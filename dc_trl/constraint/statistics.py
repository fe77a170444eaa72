"""Statistics of a generation batch over its micro-batches and processes, and the metrics that follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from ..sampled_tokens import SampledTokens
from ..settings.ranges import require_choice
from .discrepancy import discrepancy_sums, token_discrepancy
from .mismatch import combine_sums, mismatch_from_sums, mismatch_sums
from .settings import ConstraintSettings, Measure, Reduction, Target


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .lagrangian import LagrangeMultiplier


# Metrics of a part of the discrepancy, beside its mean: `discrepancy/lag_k3_kl` and so on.
PART_METRICS = ("k3_kl", "ess")
PARTS = ("format", "lag")


class BatchStatistics:
    """Statistics of a generation batch, or of an evaluation: `add` its micro-batches, then `reduce` all processes.

    Args:
        reduction: how the batch discrepancy δ̄ is averaged, see `discrepancy_sums`.
        measure: measure of δ, see `token_discrepancy`.
        target: part of the discrepancy that moves λ.
    """

    def __init__(
        self,
        reduction: Reduction = "sequence",
        measure: Measure = "prob_diff",
        target: Target = "all",
    ):
        require_choice("batch_reduction", reduction, Reduction)
        self._reduction: Reduction = reduction
        self._measure: Measure = measure
        self._target: Target = target
        self._sums: dict[str, Tensor] = {}

    @classmethod
    def of(cls, settings: ConstraintSettings) -> Self:
        """Return empty statistics of a run with these settings."""
        return cls(settings.batch_reduction, settings.discrepancy_measure, settings.constraint_target)

    @torch.no_grad()
    def add(self, tokens: SampledTokens, penalty: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add a micro-batch.

        Args:
            tokens: sampled tokens of the micro-batch.
            penalty: what λ multiplied, shape (B, T), 0 at unscored tokens; None without a constraint.
            weights: weights of a correction, shape (B, T); None without one. Tokens with a weight of 0 do not count in
                δ̄.
        """
        train_logps, infer_logps, scored, deployed_logps = *tokens[:3], tokens.deployed_logps
        delta = token_discrepancy(train_logps, infer_logps, self._measure)
        kept = scored if weights is None else scored & (weights > 0)
        sums = mismatch_sums(train_logps, infer_logps, scored) | discrepancy_sums(delta, kept, self._reduction)
        if deployed_logps is not None:
            engines = {"format": (train_logps, deployed_logps), "lag": (deployed_logps, infer_logps)}
            for part, (first, second) in engines.items():
                delta_of_part = token_discrepancy(first, second, self._measure)
                found = mismatch_sums(first, second, scored) | discrepancy_sums(delta_of_part, kept, self._reduction)
                sums |= {f"{part}_{name}": value for name, value in found.items()}
        dtype = sums["tokens"].dtype
        if penalty is not None:
            penalty = penalty.where(kept, 0.0)
            sums["penalty"] = penalty.sum(dtype=dtype)
            sums["penalized"] = (penalty != 0).sum().to(dtype)
        if weights is not None:
            sums |= {f"all_{name}": value for name, value in discrepancy_sums(delta, scored, self._reduction).items()}
            sums["masked"] = sums["tokens"] - kept.sum()
            sums["weights"] = weights.where(scored, 0.0).sum(dtype=dtype)
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
        return MismatchReport({name: value.item() for name, value in sums.items()}, self._target)

    def clear(self) -> None:
        """Discard what was added."""
        self._sums = {}


class MismatchReport(NamedTuple):
    """Sums over the tokens that `BatchStatistics` has added, of all processes; `batch_metrics` makes metrics of them.

    Args:
        sums: results of `mismatch_sums` and `discrepancy_sums`; also "penalty" and "penalized" where there is a
            constraint, and the sums of a correction where there is one.
        target: part of the discrepancy that λ is moved by.
    """

    sums: Mapping[str, float]
    target: Target = "all"

    @property
    def tokens(self) -> int:
        """Number of scored tokens. If it is 0, there are no metrics."""
        return int(self.sums["tokens"])

    @property
    def mean_discrepancy(self) -> float | None:
        """The batch discrepancy δ̄ (arXiv 2606.08779, eq. 11); None where a correction has masked every token."""
        return self._mean("")

    @property
    def constrained_discrepancy(self) -> float | None:
        """The mean that λ is moved by: δ̄, or with `constraint_target="lag"` the mean of its part; None as above."""
        return self._mean("lag_" if self.target == "lag" else "")

    @property
    def parts(self) -> dict[str, float]:
        """Metrics of the parts of the discrepancy, by part and name; empty where it is not split."""
        metrics: dict[str, float] = {}
        for part in PARTS:
            prefix = f"{part}_"
            sums = {name.removeprefix(prefix): v for name, v in self.sums.items() if name.startswith(prefix)}
            if not sums:
                continue
            if (mean := self._mean(prefix)) is not None:
                metrics[f"{prefix}mean"] = mean
            found = mismatch_from_sums(sums)
            metrics |= {f"{prefix}{name}": found[name] for name in PART_METRICS}
        return metrics

    def _mean(self, prefix: str) -> float | None:
        count = self.sums[f"{prefix}discrepancy_count"]
        return self.sums[f"{prefix}discrepancy_sum"] / count if count else None


def batch_metrics(
    report: MismatchReport, multiplier: LagrangeMultiplier | None, truncated: bool = False
) -> dict[str, float]:
    """Return the metrics of a batch, by the names of docs/metrics.md.

    Args:
        report: report of a batch with scored tokens.
        multiplier: λ that the batch was penalised with; None where the discrepancy is only measured.
        truncated: whether the discrepancy contains what truncated sampling has cut off. Then no metric is called
            `discrepancy/...`, so that nothing takes it for the mismatch of the engines.
    """
    group = "discrepancy_truncated" if truncated else "discrepancy"
    sums, mean = report.sums, report.mean_discrepancy
    metrics = {f"{group}/{name}": value for name, value in mismatch_from_sums(sums).items()}
    if mean is not None:
        metrics[f"{group}/mean"] = mean
    metrics |= {f"{group}/{name}": value for name, value in report.parts.items()}
    if "weights" in sums:
        metrics[f"{group}/mean_all"] = sums["all_discrepancy_sum"] / sums["all_discrepancy_count"]
        metrics["correction/masked_fraction"] = sums["masked"] / sums["tokens"]
        metrics["correction/weight_mean"] = sums["weights"] / sums["tokens"]
    if multiplier is None:
        return metrics
    metrics["lagrangian/lambda"] = multiplier.value
    if multiplier.tolerance is not None:
        metrics["lagrangian/tolerance"] = multiplier.tolerance
        if (constrained := report.constrained_discrepancy) is not None:
            metrics["lagrangian/violation"] = constrained - multiplier.tolerance
    if "penalty" in sums:
        metrics["lagrangian/penalty_mean"] = multiplier.value * sums["penalty"] / sums["tokens"]
        metrics["lagrangian/penalized_fraction"] = sums["penalized"] / sums["tokens"]
    return metrics
