"""Statistics of a generation batch over its micro-batches and processes, and the metrics that follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..sampled_tokens import SampledTokens
from .discrepancy import discrepancy_sums, token_discrepancy
from .mismatch import combine_sums, mismatch_from_sums, mismatch_sums
from .settings import ConstraintSettings, Part


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .lagrangian import LagrangeMultiplier


PARTS: tuple[Part, ...] = ("lag", "engine")


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
        self._sums = combine_sums([self._sums, sums])

    def _sums_of(self, tokens: SampledTokens, kept: Tensor) -> dict[str, Tensor]:
        return mismatch_sums(*tokens[:3]) | self._mean_sums_of(tokens, kept)

    def _mean_sums_of(self, tokens: SampledTokens, kept: Tensor) -> dict[str, Tensor]:
        delta = token_discrepancy(tokens.train_logps, tokens.infer_logps, self._settings.discrepancy_measure)
        return discrepancy_sums(delta, kept, self._settings.batch_reduction)

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
        return MismatchReport({name: value.item() for name, value in sums.items()}, self._settings.constraint_target)

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
    target: Part = "all"

    @property
    def tokens(self) -> int:
        """Number of scored tokens. If it is 0, there are no metrics."""
        return int(self.sums["tokens"])

    @property
    def mean_discrepancy(self) -> float | None:
        """The batch discrepancy δ̄ (arXiv 2606.08779, eq. 11); None where a correction has masked every token."""
        return self.mean_of("")

    @property
    def constrained_discrepancy(self) -> float | None:
        """The mean that λ is moved by: δ̄, or with `constraint_target="lag"` the mean of its part; None as above."""
        return self.mean_of("lag_" if self.target == "lag" else "")

    def mean_of(self, prefix: str) -> float | None:
        """Return the mean of a part of the discrepancy by the prefix of its sums, such as "lag_" or "all_"."""
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
    for prefix in (
        name.removesuffix("k3") for name in sums if name.endswith("_k3")
    ):  # of the parts, where it is split
        of_part = {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
        if not of_part["tokens"]:
            continue  # no token of the batch has this age
        if (mean := report.mean_of(prefix)) is not None:
            metrics[f"{group}/{prefix}mean"] = mean
        found = mismatch_from_sums(of_part)
        metrics |= {f"{group}/{prefix}{name}": found[name] for name in ("k3_kl", "ess")}
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


def zero_std_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Return which completions belong to a prompt whose completions all have the same reward.

    Args:
        rewards: shape (N,), those of the completions of each prompt, one prompt after the other; NaN where no reward
            function could score a completion, which then counts nowhere.
        num_generations: number of completions of a prompt.

    Returns:
        Boolean, shape (N,); true also where fewer than two of the completions have a reward.
    """
    groups = rewards.view(-1, num_generations)
    highest = groups.nan_to_num(nan=-torch.inf).amax(-1)
    lowest = groups.nan_to_num(nan=torch.inf).amin(-1)
    return (highest <= lowest).repeat_interleave(num_generations)
