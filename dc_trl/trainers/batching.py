"""Length-aware batches in TRL's hooks: within an optimizer step, completions of similar length share a forward.

TRL pads a generation batch to its longest completion, shuffles it and splits it into the slices of its buffer. Then
the rows of the slices that share an optimizer step are regrouped and cut to the longest row of their own forward. With
several processes the rows are distributed so that all processes read the same number of tokens. The step's loss and
gradient are sums over its completions, so they do not change. `dc_trl.settings.micro_batches` lists the losses that
are not such sums; their slices keep their rows and are only cut. The pure functions are in `dc_trl.rollouts.batching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.logging import get_logger
from torch import Tensor

from ..config import DCGRPOConfig
from ..rollouts.batching import Forward, Length, join, lengths_of, micro_batches, runs, segments, take, trimmed
from ..rollouts.exchange import exchanged
from ..rollouts.truncation import Kept
from ..settings.micro_batches import MEAN_OVER_COMPLETIONS, mean_of_micro_batch
from .routing import RoutingTrainer


logger = get_logger(__name__)

# Keys of a regrouped slice: the number of rows of each of its forwards, and the weights of each forward's metrics and,
# last, of its loss.
_ROWS, _WEIGHTS = "forward_rows", "forward_weights"
# Means over the tokens of a forward that TRL and this package log and average over the forwards of a step. The number
# selects the weight that makes this the mean over the step's tokens: tokens of the loss (0) or with prompts (1).
_TOKEN_MEANS = {
    **dict.fromkeys(("entropy", "kl", "cispo_clip_ratio", "vespo/phi_seq_mean"), 0),
    **dict.fromkeys(("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"), 0),
    **dict.fromkeys(("routing/replayed_fraction", "routing/flipped_fraction"), 1),
}

# Log-probabilities and entropies, both of shape (rows, T), and the auxiliary loss, as TRL's hook returns them.
Scores = tuple[Tensor, Tensor | None, Tensor | None]


class LengthAwareTrainer(RoutingTrainer):
    """A trainer whose forwards read little padding if `length_aware_batches` is set, as it is by default.

    Raises:
        ValueError: `max_tokens_per_micro_batch` is not possible with this model or launch.
    """

    # Defined by TRL
    _step: int  # number of micro-batches on which this object has trained
    _buffered_inputs: Any  # the generation batch in slices, or None

    _accumulated = 0  # micro-batches since the last optimizer step

    def __init__(self, model, reward_funcs, args: DCGRPOConfig, *positional, **kwargs):
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        fixed = mean_of_micro_batch(args)
        if fixed is None and self.aux_loss_enabled:
            fixed = f"router_aux_loss_coef={self.router_aux_loss_coef!r}"
        self._regroups = args.length_aware_batches and fixed is None
        if args.length_aware_batches and fixed is not None:
            logger.info(f"{fixed} is a mean over the micro-batch: completions are not grouped by length.")
        if args.max_tokens_per_micro_batch is None:
            return
        budget = f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch}"
        if fixed is not None:
            raise ValueError(
                f"{budget} groups completions by length, and {fixed} is a mean over the micro-batch: leave "
                "max_tokens_per_micro_batch out, or set router_aux_loss_coef=0.0."
            )
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError(
                f"{budget} makes several backward passes in one micro-step, which DeepSpeed counts: leave it out, or "
                "launch with FSDP2 or DDP."
            )

    # --- the generation batch ---------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.args.length_aware_batches:
            return inputs
        if not self.model.training:
            return trimmed(inputs, self.pad_to_multiple_of)
        if self._buffered_inputs is not before:
            self._buffered_inputs = self._length_aware(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _length_aware(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        padded = sum(slice_["prompt_ids"].numel() + slice_["completion_ids"].numel() for slice_ in slices)
        if self._regroups:
            steps, accumulation = self.args.steps_per_generation, self.args.gradient_accumulation_steps
            parts = segments(steps, self.num_iterations, accumulation, self._accumulated % accumulation)
            slices = [new for part in parts for new in self._regrouped(slices[part.start : part.stop])]
        else:
            slices = [trimmed(slice_, self.pad_to_multiple_of) for slice_ in slices]
        self._log_padding(slices, padded)
        return slices

    def _regrouped(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of slices that share an optimizer step, sorted by length, in the same number of slices."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        batch = join(slices)
        share = len(batch["prompt_ids"])
        plan, exchange = self._plan(batch, share // len(slices), least=len(slices), exchange=processes > 1)
        wanted = [[row for forward in plan for row in forward[process]] for process in range(processes)]
        if exchange:
            batch, order = exchanged(batch, wanted, self.accelerator), list(range(share))
        else:
            order = [row - rank * share for row in wanted[rank]]
        sizes = [len(forward[rank]) for forward in plan]
        ends = list(accumulate(sizes))
        masks = {name: value for name, value in batch.items() if name.endswith("_mask")}
        weights = self._weights(take(masks, order), sizes, share // len(slices))
        regrouped = []
        for run in runs(len(plan), len(slices)):
            rows = order[ends[run.start] - sizes[run.start] : ends[run.stop - 1]]
            of_forwards = {_ROWS: sizes[run.start : run.stop], _WEIGHTS: weights[run.start : run.stop]}
            regrouped.append(trimmed(take(batch, rows), self.pad_to_multiple_of) | of_forwards)
        return regrouped

    def _weights(self, batch: dict[str, Any], sizes: list[int], rows: int) -> list[list[float]]:
        """Return the weights of each forward's metrics (its share of all tokens over an equal share) and of its loss.

        A loss that is a mean over completions divides by those of a forward, whereas TRL's divides by `rows`.
        """
        completion = batch["completion_mask"]
        of_loss = (completion * batch["tool_mask"] if "tool_mask" in batch else completion).sum(1)
        read = batch["prompt_mask"].sum(1) + completion.sum(1)
        tokens = torch.stack([each.sum(0) for each in torch.stack([of_loss, read], dim=1).split(sizes)])
        tokens = self.accelerator.gather(tokens.unsqueeze(0)).sum(0).float()
        shares = tokens * len(sizes) / tokens.sum(0).clamp(min=1)
        over_completions = self.loss_type in MEAN_OVER_COMPLETIONS
        return [
            [*share, size / rows if over_completions else 1.0]
            for share, size in zip(shares.tolist(), sizes, strict=True)
        ]

    def _plan(self, batch: dict[str, Any], rows: int, least: int, exchange: bool) -> tuple[list[Forward], bool]:
        """Return the forwards of the rows of all processes, and whether rows are exchanged (not with images)."""
        table = self._rows_table(batch)
        if self.accelerator.num_processes > 1:
            table = self.accelerator.gather(table)
        seeing = table[:, 2] > 0
        exchange = exchange and not seeing.any().item()
        budget = self.args.max_tokens_per_micro_batch if self.model.training else None
        plan = micro_batches(
            [Length(*each) for each in table[:, :2].tolist()],
            self.accelerator.num_processes,
            rows=rows if budget is None else None,
            budget=budget,
            exchange=exchange,
            least=least,
            # Sorted by length, rows without images would share a forward, which vision models cannot compute.
            in_order=bool(seeing.any() and not seeing.all()),
        )
        return plan, exchange

    def _rows_table(self, batch: dict[str, Any]) -> Tensor:
        """Return the tokens of each row's prompt and completion, and its number of images: int64, shape (rows, 3)."""
        lengths = lengths_of(batch, self.pad_to_multiple_of)
        images = torch.tensor(batch.get("num_images", [0] * len(lengths)), device=lengths.device)
        return torch.cat([lengths, images.unsqueeze(1)], dim=1)

    def _log_padding(self, slices: list[dict[str, Any]], padded: int) -> None:
        read = 0
        for slice_ in slices:
            lengths = lengths_of(slice_, self.pad_to_multiple_of)
            read += sum(len(rows) * int(rows.amax(0).sum()) for rows in lengths.split(slice_.get(_ROWS, len(lengths))))
        real = sum(slice_["prompt_mask"].sum() + slice_["completion_mask"].sum() for slice_ in slices)
        if self.padding_free is not None:
            read = int(real)
        counts = torch.tensor([[read, padded, int(real)]], device=self.accelerator.device)
        read, padded, real = self.accelerator.gather(counts).sum(0).tolist()
        self._metrics["train"]["batching/computed_per_real_token"].append(read / max(real, 1))
        self._metrics["train"]["batching/padded_per_real_token"].append(padded / max(real, 1))

    # --- several forwards in a slice --------------------------------------------------------------------------------

    def _forwards(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the inputs of each forward of a slice."""
        batch = {name: value for name, value in inputs.items() if name not in (_ROWS, _WEIGHTS)}
        sizes = inputs.get(_ROWS, [len(batch["prompt_ids"])])
        if len(sizes) == 1:
            return [batch]
        forwards = []
        for end, rows in zip(accumulate(sizes), sizes, strict=True):
            forwards.append(trimmed(take(batch, range(end - rows, end)), self.pad_to_multiple_of))
        return forwards

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if _ROWS not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        *others, last = zip(self._forwards(inputs), inputs[_WEIGHTS], strict=True)
        total = torch.zeros((), device=self.accelerator.device)
        for forward in others:
            with self.accelerator.no_sync(model):
                loss = self._weighted_loss(model, *forward)
                self.accelerator.backward(loss)
            total = total + loss.detach()
        return self._weighted_loss(model, *last) + total

    def _weighted_loss(self, model, inputs: dict[str, Any], weights: list[float]) -> Tensor:
        loss = super().compute_loss(model, inputs)
        metrics = self._metrics["train"]
        for name in _TOKEN_MEANS.keys() & metrics.keys():
            metrics[name][-1] *= weights[_TOKEN_MEANS[name]]
        return loss * weights[-1]

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._accumulated = 0 if self.accelerator.sync_gradients else self._accumulated + 1
        return loss

    # --- forwards of a whole generation batch: old and reference log-probabilities ----------------------------------

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        score = super()._get_per_token_logps_and_entropies
        if batch_size is None or not self.args.length_aware_batches:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
        whole = self._rows_to_score(input_ids, attention_mask, logits_to_keep, kwargs)
        options = {name: value for name, value in kwargs.items() if name not in whole}
        kept, routes = self._kept, self._routes
        first = self.accelerator.process_index * len(input_ids)
        scores = []
        try:
            plan, _ = self._plan(whole, batch_size, least=1, exchange=False)
            for forward in plan:
                rows = [row - first for row in forward[self.accelerator.process_index]]
                part = trimmed(take(whole, rows), self.pad_to_multiple_of)
                scores.append((rows, self._score_rows(score, model, part, options)))
        finally:
            self._kept, self._routes = kept, routes
        return _assembled(scores, len(input_ids), logits_to_keep)

    def _rows_to_score(self, input_ids, attention_mask, logits_to_keep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all inputs of a forward for these rows, under the names of a generation batch."""
        batch = {name: value for name, value in kwargs.items() if isinstance(value, Tensor | list)}
        for part, columns in {"prompt": slice(-logits_to_keep), "completion": slice(-logits_to_keep, None)}.items():
            batch |= {f"{part}_ids": input_ids[:, columns], f"{part}_mask": attention_mask[:, columns]}
        if self._kept is not None:
            batch |= {"kept_ids": self._kept.ids, "kept_counts": self._kept.counts}
        if self._routes is not None:
            batch["routed_experts"] = self._routes
        return batch

    def _score_rows(self, score, model, batch: dict[str, Any], options: dict[str, Any]):
        self._kept = Kept(batch.pop("kept_ids"), batch.pop("kept_counts")) if "kept_ids" in batch else None
        self._routes = batch.pop("routed_experts", None)
        width = batch["completion_ids"].shape[1]
        ids, mask = (
            torch.cat([batch.pop(f"prompt_{kind}"), batch.pop(f"completion_{kind}")], dim=1)
            for kind in ("ids", "mask")
        )
        return score(model, ids, mask, width, **batch, **options)


def _assembled(scores: list[tuple[list[int], Scores]], rows: int, width: int) -> Scores:
    """Combine TRL's log-probabilities, entropies and auxiliary losses of several forwards.

    Args:
        scores: the rows of each forward, and the result of TRL's hook for them.
        rows, width: shape of the result, which is 0 where a forward has padding.
    """
    logps, entropies, losses = zip(*(outputs for _, outputs in scores), strict=True)

    def whole(parts: Sequence[Tensor]) -> Tensor:
        table = parts[0].new_zeros(rows, width)
        for (own, _), part in zip(scores, parts, strict=True):
            table[own, : part.shape[1]] = part
        return table

    return (
        whole(logps),
        None if entropies[0] is None else whole(entropies),
        None if losses[0] is None else torch.stack(losses).mean(),
    )
