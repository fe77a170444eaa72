"""`drop_zero_std_groups`: prompts whose completions all got the same reward enter neither loss nor δ̄."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..grading.totals import zero_std_groups
from ..sampled_tokens import loss_mask
from ..settings.contradictions import MEAN_OVER_COMPLETIONS
from .part import Part


class DroppedGroups(Part):
    """Masks the completions of such prompts in training (arXiv 2602.01826).

    A mean over completions is one over the others, by a weight of the terms that are such means: of the policy's
    through its advantages, of KL's through beta. Entropy bonus and auxiliary loss have other means.
    """

    _kept: Tensor  # which completions of all processes belong to other prompts

    def rewards(self, rewards):
        generations = self.trainer.num_generations
        if self.trainer.model.training:
            self._kept = ~torch.stack([zero_std_groups(row, generations) for row in rewards]).all(0)

    def batch(self, batch):
        trainer = self.trainer
        if not trainer.model.training:
            return
        kept, accelerator = self._kept, trainer.accelerator
        local = kept.view(accelerator.num_processes, -1)[accelerator.process_index]
        for name in {"completion_mask", "tool_mask"} & batch.keys():
            batch[name] = batch[name] * local.unsqueeze(1)
        batch["num_items_in_batch"] = accelerator.gather(loss_mask(batch).sum()).sum()
        # A mean over completions counts the dropped ones as zeros, so the others get a larger weight.
        over_completions = trainer.loss_type in MEAN_OVER_COMPLETIONS
        batch["kept_weight"] = kept.any() * (len(kept) / kept.sum().clamp(min=1) if over_completions else 1.0)

    def scored(self, scores, inputs, *tokens):
        if "kept_weight" in inputs:
            inputs["advantages"] = inputs["advantages"] * inputs["kept_weight"]
        return scores

    def loss(self, compute, inputs):
        trainer = self.trainer
        if "kept_weight" not in inputs:
            return compute(inputs)
        weight = inputs["kept_weight"].item()
        beta, trainer.beta = trainer.beta, trainer.beta * weight
        try:
            loss = compute(inputs)
        finally:
            trainer.beta = beta
        if weight > 0:
            return loss
        # Of a batch whose completions are all dropped TRL logs the entropy 0, and nothing is learned from it.
        trainer._metrics[trainer.mode]["entropy"][-1] = math.nan
        return loss * 0.0
