"""Statistics of a generation batch over its micro-batches and processes, and the metrics that follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..sampled_tokens import SampledTokens
from .discrepancy import discrepancy_sums, token_discrepancy
from .mismatch import Sums, combine_sums, mismatch_from_sums, mismatch_sums
from .settings import ConstraintSettings, Part


if TYPE_CHECKING:
    from collections.abc import Callable

    from .lagrangian import LagrangeMultiplier


PARTS: tuple[Part, ...] = ("lag", "engine")
_OWN = "own/"  # prefix of the sums of metrics that a function of the user's own has left


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
            sums[f"{_OWN}{name}"] = values.detach().where(scored, 0.0).sum(dtype=dtype)
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
    for prefix in [
        name.removesuffix("k3") for name in sums if name.endswith("_k3")
    ]:  # of its parts, where it is split
        of_part = {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
        if not of_part["tokens"]:
            continue  # no token of the batch has this age
        if (mean := mean_discrepancy(of_part)) is not None:
            metrics[f"{group}/{prefix}mean"] = mean
        found = mismatch_from_sums(of_part)
        metrics |= {f"{group}/{prefix}{name}": found[name] for name in ("k3_kl", "ess")}
    for name in [name for name in sums if name.startswith(_OWN)]:
        metrics[name.removeprefix(_OWN)] = sums[name] / tokens
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
