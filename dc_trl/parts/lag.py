"""What the weights did since they sampled: log-probabilities by the weights of a sampler that lags."""

from __future__ import annotations

from typing import Any

import torch

from ..settings.contradictions import steps_within_batch
from .aligned_forward import PLAIN
from .part import Part


class Lag(Part):
    """Scores each generation batch of training whose weights lag once more, with the weights that sampled it.

    The policy's weights and those that sampled change places once for a generation batch. The forwards read what the
    one that scores the batch reads, so that equal weights give equal numbers. A slice gets the column `lagged_logps`,
    log p_s, shape (B, T), nats, or with `train_through_quantization` `lag`, log p − log p_s, both by the policy's
    forward without quantization: by the quantized forward, rounding would bury what the weights did.
    """

    def batch(self, batch):
        trainer, args = self.trainer, self.trainer.args
        if trainer.model.training and self._scored_when_sampled:
            self._measure([batch], args.per_device_train_batch_size)

    def slices(self, slices):
        if self.trainer.model.training and not self._scored_when_sampled:
            self._measure(slices, None)
        return slices

    @property
    def _scored_when_sampled(self) -> bool:
        """Whether TRL scores a generation batch as it is sampled (`old_per_token_logps`)."""
        args = self.trainer.args
        return steps_within_batch(args) or (self.trainer.use_vllm and args.vllm_importance_sampling_correction)

    @torch.no_grad()
    def _measure(self, slices: list[dict[str, Any]], rows: int | None) -> None:
        """Add the column to slices of a batch; `rows` of them in a forward, all by default."""
        trainer = self.trainer
        if trainer.sampler.age == 0:
            return
        plain = {PLAIN: True} if trainer.args.train_through_quantization else {}
        with trainer.sampler.sampling_weights():
            lagged = [trainer.score(slice_ | plain, rows) for slice_ in slices]
        for slice_, logps in zip(slices, lagged, strict=True):
            if plain:
                slice_["lag"] = trainer.score(slice_ | plain, rows) - logps
            else:
                slice_["lagged_logps"] = logps
