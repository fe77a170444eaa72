"""`SampledTokens`: the tokens of a micro-batch with their log-probabilities under both engines.

This value goes from the trainer's hook through the form of the constraint, the correction and the statistics. With p
and p_s the trainer's own forward with the present weights and with those that sampled, and q the engine, it splits

    log p − log q = (log p − log p_s) + (log p_s − log q)

into the *lag*, what the weights did since they sampled, and the *engine*: number format, kernels, rounding. The lag
needs no model of the engine, and is 0 where the present weights have sampled. AReaL's decoupled objective (arXiv
2505.24298) divides the ratio to the sampler too, at a policy between the two.

Throughout, ``B`` is the number of trajectories and ``T`` the padded completion length. A token is *scored* when it
enters the loss and both log-probabilities are finite; all other values, padding and NaN included, are ignored.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


# exp(2 · 20) is far from overflow. The bound is verl's, so that its χ² values can be compared with ours.
LOG_RATIO_BOUND = 20.0


class SampledTokens(NamedTuple):
    """Sampled tokens under both engines.

    Args:
        train_logps: log π_train(y_t) after temperature, shape (B, T), nats, floating point. In the trainers it has no
            gradient; the functions here detach it.
        infer_logps: log π_inf(y_t) of the same tokens after temperature, shape (B, T), nats.
        scored: which tokens count, boolean, shape (B, T).
        advantages: Â of each trajectory, shape (B,), or of each token, shape (B, T).
        lagged_logps: log p_s(y_t), by the trainer's own forward with the weights that sampled, shape (B, T), nats,
            without a gradient; None where the discrepancy is not split.
        age: number of optimizer steps from the weights that sampled to the trainer's, at least 0; of each trajectory,
            shape (B,), or of the whole micro-batch.
        metrics: values of the tokens, each of shape (B, T), whose mean over the scored tokens of a generation batch is
            logged by their name. A form or correction of your own may leave some: `tokens.metrics["mine"] = values`.
    """

    train_logps: Tensor
    infer_logps: Tensor
    scored: Tensor
    advantages: Tensor
    lagged_logps: Tensor | None = None
    age: Tensor | int = 0
    metrics: dict[str, Tensor] | MappingProxyType[str, Tensor] = MappingProxyType({})

    @classmethod
    def of(
        cls,
        train_logps: Tensor,
        infer_logps: Tensor,
        mask: Tensor,
        advantages: Tensor,
        lagged_logps: Tensor | None = None,
    ) -> SampledTokens:
        """Return the tokens with `scored` from a mask of shape (B, T), nonzero at the tokens that enter the loss."""
        known = [logps for logps in (train_logps, infer_logps, lagged_logps) if logps is not None]
        return cls(train_logps, infer_logps, scored_tokens(mask, *known), advantages, lagged_logps, metrics={})

    @classmethod
    def of_batch(cls, batch: dict[str, Any], train_logps: Tensor, age: int, split: bool) -> SampledTokens:
        """Return the tokens of a batch of TRL's trainer, which the parts of a run may have added columns to.

        Args:
            batch: with `sampling_per_token_logps`, or `kept_logps` where the engines are compared among kept tokens,
                and, where the weights that sampled lag, `lagged_logps` or `lag` (see `parts.lag`).
            train_logps: log π_train before the first optimizer step on the batch, shape (B, T), nats.
            age: of the whole batch.
            split: whether the discrepancy is split; without a lag, the weights that sampled are those that train.
        """
        logps = train_logps.detach()  # a gradient would go through a user's form or correction into the loss
        lagged = None
        if split:
            lagged = logps - batch["lag"] if "lag" in batch else batch.get("lagged_logps", logps)
        infer_logps = batch.get("kept_logps", batch["sampling_per_token_logps"])
        return cls.of(logps, infer_logps, loss_mask(batch), batch["advantages"], lagged)._replace(age=age)

    def of_part(self, part: Literal["all", "lag", "engine"]) -> SampledTokens:
        """Return the tokens with the two log-probabilities between which a part of the discrepancy lies.

        They are log p and log p_s for ``"lag"``, log p_s and log q for ``"engine"``, log p and log q for ``"all"``.
        """
        if part == "all":
            return self
        assert self.lagged_logps is not None  # settings that name a part split the discrepancy
        if part == "lag":
            return self._replace(infer_logps=self.lagged_logps)
        return self._replace(train_logps=self.lagged_logps)

    def penalised(self, penalty: Tensor, multiplier: float) -> SampledTokens:
        """Return the tokens with Ã = Â − λ·penalty (arXiv 2606.08779, eq. 8), both of shape (B, T)."""
        return self._replace(advantages=self.token_advantages - multiplier * penalty)

    @property
    def token_advantages(self) -> Tensor:
        """Advantages that broadcast over the tokens, shape (B, 1) or (B, T)."""
        return self.advantages.unsqueeze(1) if self.advantages.dim() == 1 else self.advantages

    @property
    def detached_logps(self) -> tuple[Tensor, Tensor]:
        """log π_train and log π_inf without gradients; see `detached`."""
        return detached(self.train_logps, self.infer_logps)

    @property
    def log_ratio(self) -> Tensor:
        """log π_train − log π_inf of each token, shape (B, T), nats, at least float32, detached; 0 where not scored.

        The ratio of a token that is not scored is unknown; it counts as 1, as in TRL.
        """
        train, infer = self.detached_logps
        return (train - infer).where(self.scored, 0.0)


def detached(train_logps: Tensor, infer_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Return both without gradients, in float32, or in float64 if one of them is float64.

    16-bit log-probabilities would be spaced more widely than the discrepancies that are measured.
    """
    dtype = torch.promote_types(torch.promote_types(train_logps.dtype, infer_logps.dtype), torch.float32)
    return train_logps.detach().to(dtype), infer_logps.detach().to(dtype)


def bounded_log_ratio(train_logps: Tensor, infer_logps: Tensor) -> Tensor:
    """Return log π_train/π_inf, clamped to ±20."""
    return (train_logps - infer_logps).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """Return the mask (B, T) of the completion tokens that enter TRL's loss, without those that a tool has written."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def scored_tokens(mask: Tensor, *values: Tensor) -> Tensor:
    """Return which tokens are inside a mask and finite in all ``values``: boolean, shape of ``mask``."""
    scored = mask.bool()
    for value in values:
        scored = scored & value.isfinite()
    return scored


def trajectory_mean(values: Tensor, scored: Tensor) -> Tensor:
    """Return the mean of ``values`` (B, T) over each trajectory's scored tokens, shape (B,); 0 where it has none."""
    return values.where(scored, 0.0).sum(-1) / scored.sum(-1).clamp(min=1)
