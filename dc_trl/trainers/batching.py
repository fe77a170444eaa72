"""Length-aware batches in TRL's hooks: within an optimizer step, completions of similar length share a forward.

TRL pads a generation batch to its longest completion, shuffles it and splits it into the slices of its buffer. Then
the rows of the slices that share an optimizer step are regrouped, in each process by itself, and cut to the longest
row of their own forward. The step's loss and gradient are sums over its completions, so they do not change.
`mean_of_micro_batch` names the losses that are not such sums; their slices keep their rows and are only cut.
The pure functions are in `dc_trl.rollouts.batching`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..rollouts.batching import Forward, Length, join, lengths_of, micro_batches, take, trimmed
from ..rollouts.truncation import Choices
from ..sampled_tokens import loss_mask
from ..settings.contradictions import mean_of_micro_batch
from ..trl_hooks import HookedTrainer, Scores


# TRL's scores, and where the kept tokens are measured alone, the log-probabilities among them, (rows, T), detached.
Scored: TypeAlias = tuple[Scores, Tensor | None]
# Key of a regrouped slice: the weights of its means over tokens.
_WEIGHTS = "token_weights"
# Means over the tokens of a forward that TRL and this package log and average over the forwards of a step. The number
# selects the weight that makes this the mean over the step's tokens: tokens of the loss (0) or with prompts (1).
_TOKEN_MEANS = {
    **dict.fromkeys(("entropy", "kl", "cispo_clip_ratio", "discrepancy/drift_tv", "discrepancy/drift_l2"), 0),
    **dict.fromkeys(("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"), 0),
    **dict.fromkeys(("routing/replayed_fraction", "routing/flipped_fraction"), 1),
}


class LengthAwareBatches:
    """Forms the micro-batches of a trainer so that its forwards read little padding.

    Args:
        trainer: trainer with `length_aware_batches` set.
    """

    def __init__(self, trainer: HookedTrainer):
        self._trainer = trainer
        self._multiple = trainer.pad_to_multiple_of
        self._regroups = mean_of_micro_batch(trainer.args) is None and not trainer.aux_loss_enabled

    # --- the generation batch ---------------------------------------------------------------------------------------

    def of(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the slices of a new generation batch, regrouped by length and without needless padding."""
        if not self._regroups:
            return [self.trimmed(slice_) for slice_ in slices]
        args = self._trainer.args
        # Optimizer steps and generation batches both begin at multiples of this many slices, so these share a step.
        part = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        return [new for first in range(0, len(slices), part) for new in self._regrouped(slices[first : first + part])]

    def trimmed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch without the columns in which all of its rows have padding."""
        return trimmed(batch, self._multiple)

    def _regrouped(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of slices that share an optimizer step, sorted by length, in the same number of slices."""
        rank = self._trainer.accelerator.process_index
        batch = join(slices)
        share = len(batch["prompt_ids"])
        forwards = [
            [row - rank * share for row in forward[rank]] for forward in self._plan(batch, share // len(slices))
        ]
        weights = self._weights(batch, forwards)
        return [
            self.trimmed(take(batch, rows)) | {_WEIGHTS: each} for rows, each in zip(forwards, weights, strict=True)
        ]

    def _weights(self, batch: dict[str, Any], forwards: list[list[int]]) -> list[list[float]]:
        """Return the weights of each forward's means: its share of all tokens, over an equal share."""
        of_loss = loss_mask(batch).sum(1)
        read = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
        of_rows = torch.stack([of_loss, read], dim=1)
        tokens = torch.stack([of_rows[rows].sum(0) for rows in forwards])
        tokens = self._trainer.accelerator.gather(tokens.unsqueeze(0)).sum(0).float()
        return (tokens * len(forwards) / tokens.sum(0).clamp(min=1)).tolist()

    def _plan(self, batch: dict[str, Any], rows: int) -> list[Forward]:
        """Return the forwards of the rows of all processes."""
        lengths = lengths_of(batch, self._multiple)
        images = torch.tensor(batch.get("num_images") or [0] * len(lengths), device=lengths.device)
        table = torch.cat([lengths, images.unsqueeze(1)], dim=1)
        if self._trainer.accelerator.num_processes > 1:
            table = self._trainer.accelerator.gather(table)
        seeing = table[:, 2] > 0
        return micro_batches(
            [Length(*each) for each in table[:, :2].tolist()],
            rows,
            self._trainer.accelerator.num_processes,
            # Sorted by length, rows without images would share a forward, which vision models cannot compute.
            in_order=bool(seeing.any() and not seeing.all()),
        )

    def weigh_means(self, inputs: dict[str, Any], before: dict[str, int]) -> None:
        """Weigh what the loss of a slice has logged by its tokens, so that TRL's mean is one over the step's.

        `before` has the number of values of each metric before that loss: TRL logs no KL of a slice dropped whole.
        """
        metrics = self._trainer.metrics_since_log("train")
        if _WEIGHTS in inputs:
            by_sequence = self._trainer.importance_sampling_level == "sequence" and inputs["advantages"].ndim == 1
            for name in _TOKEN_MEANS.keys() & metrics.keys():
                of_trajectories = by_sequence and (name.startswith("clip_ratio/") or name == "cispo_clip_ratio")
                if not of_trajectories and len(metrics[name]) > before.get(name, 0):
                    metrics[name][-1] *= inputs[_WEIGHTS][_TOKEN_MEANS[name]]

    # --- forwards of a whole generation batch: old and reference log-probabilities ----------------------------------

    def score(
        self,
        forward: Callable[..., Scored],
        choices: Choices,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int,
        options: dict[str, Any],
    ) -> Scored:
        """Return what `forward` returns for all rows, from several forwards of rows of similar length.

        Args:
            forward: returns `Scored` of the other arguments, for some of the rows.
            choices: choices of the engine for all rows; for the other arguments see `HookedTrainer.score_tokens`.
        """
        whole = {name: value for name, value in options.items() if isinstance(value, Tensor | list)}
        for part, columns in {"prompt": slice(-logits_to_keep), "completion": slice(-logits_to_keep, None)}.items():
            whole |= {f"{part}_ids": input_ids[:, columns], f"{part}_mask": attention_mask[:, columns]}
        whole |= choices.in_batch()
        options = {name: value for name, value in options.items() if name not in whole}
        rank = self._trainer.accelerator.process_index
        found: list[Tensor | None] = []
        losses: list[Tensor] = []
        for rows_of_forward in self._plan(whole, batch_size):
            rows = [row - rank * len(input_ids) for row in rows_of_forward[rank]]
            inputs = self.trimmed(take(whole, rows))
            own = Choices.of(inputs)
            for name in own.in_batch():
                del inputs[name]
            width = inputs["completion_ids"].shape[1]
            ids, mask = (
                torch.cat([inputs.pop(f"prompt_{kind}"), inputs.pop(f"completion_{kind}")], dim=1)
                for kind in ("ids", "mask")
            )
            (logps, entropies, loss), among = forward(own, ids, mask, width, **inputs, **options)
            scores = (logps, entropies, among)
            if not found:  # 0 where a forward has padding
                shape = len(input_ids), logits_to_keep
                found = [None if score is None else score.new_zeros(shape) for score in scores]
            for table, score in zip(found, scores, strict=True):
                if table is not None and score is not None:
                    table[rows, :width] = score
            losses += [] if loss is None else [loss]
        all_logps, all_entropies, all_among = found
        assert all_logps is not None
        return (all_logps, all_entropies, torch.stack(losses).mean() if losses else None), all_among
