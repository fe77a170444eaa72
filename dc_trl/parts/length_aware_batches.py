"""Length-aware batches: within an optimizer step, completions of similar length share a forward.

Rows are completions with their prompts, as TRL pads them: prompts on the left, completions on the right. A forward of
rows reads (longest prompt + longest completion) tokens of each of them. TRL pads a generation batch to its longest
completion, shuffles it and splits it into the slices of its buffer. Then the rows of the slices that share an
optimizer step are regrouped, in each process by itself, and cut to the longest row of their own forward. The step's
loss and gradient are sums over its completions, so they do not change. `mean_of_micro_batch` names the losses that
are not such sums; their slices keep their rows and are only cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ..sampled_tokens import loss_mask
from ..settings.contradictions import mean_of_micro_batch
from .part import Part


# A forward: for each process, the rows that it reads.
Forward: TypeAlias = list[list[int]]

# Names of tensors whose second dimension is along the prompt, along prompt and completion, or along neither. Every
# other tensor whose second dimension has the length of the completions is along these; subclasses may add some.
_ALONG_PROMPT = ("prompt_ids", "prompt_mask")
_ALONG_BOTH = ("token_type_ids", "mm_token_type_ids", "routed_experts")
_ALONG_NONE = (
    *("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "image_position_ids"),
    *("kept_ids", "kept_counts", "named_ids", "named_counts", "named_logps"),  # with widths of their own: `Named`
)
# Column of a regrouped slice: the weights of its means over tokens.
_WEIGHTS = "token_weights"
# Means over the tokens of a forward that TRL and this package log and average over the forwards of a step. The number
# selects the weight that makes this the mean over the step's tokens: tokens of the loss (0) or with prompts (1).
_TOKEN_MEANS = {
    **dict.fromkeys(("entropy", "kl", "cispo_clip_ratio", "discrepancy/drift_tv", "discrepancy/drift_l2"), 0),
    **dict.fromkeys(("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"), 0),
    **dict.fromkeys(("routing/replayed_fraction", "routing/flipped_fraction"), 1),
}


class LengthAwareBatches(Part):
    """Forms the micro-batches of a trainer so that its forwards read little padding."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self._multiple = trainer.pad_to_multiple_of
        self._regroups = mean_of_micro_batch(trainer.args) is None and not trainer.aux_loss_enabled

    # --- the generation batch ---------------------------------------------------------------------------------------

    def slices(self, slices):
        args = self.trainer.args
        # Optimizer steps and generation batches both begin at multiples of this many slices, so these share a step.
        part = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        if part == 1 or not (self._regroups and self.trainer.model.training):
            return [trimmed(slice_, self._multiple) for slice_ in slices]
        return [new for first in range(0, len(slices), part) for new in self._regrouped(slices[first : first + part])]

    def _regrouped(self, slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of slices that share an optimizer step, sorted by length, in the same number of slices."""
        batch = join(slices)
        forwards = self._plan(batch, len(batch["prompt_ids"]) // len(slices))
        return [
            trimmed(take(batch, rows), self._multiple) | {_WEIGHTS: weights}
            for rows, weights in zip(forwards, self._weights(batch, forwards), strict=True)
        ]

    def _weights(self, batch: dict[str, Any], forwards: list[list[int]]) -> list[list[float]]:
        """Return the weights of each forward's means: its share of all tokens, over an equal share."""
        of_loss = loss_mask(batch).sum(1)
        read = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
        of_rows = torch.stack([of_loss, read], dim=1)
        tokens = torch.stack([of_rows[rows].sum(0) for rows in forwards])
        tokens = self.trainer.accelerator.gather(tokens.unsqueeze(0)).sum(0).float()
        return (tokens * len(forwards) / tokens.sum(0).clamp(min=1)).tolist()

    def _plan(self, batch: dict[str, Any], rows: int) -> list[list[int]]:
        """Return the rows of this process in each of the forwards of all processes, of `rows` of its rows each."""
        accelerator = self.trainer.accelerator
        lengths = lengths_of(batch, self._multiple)
        images = torch.tensor(batch.get("num_images") or [0] * len(lengths), device=lengths.device)
        table = torch.cat([lengths, images.unsqueeze(1)], dim=1)
        if accelerator.num_processes > 1:
            table = accelerator.gather(table)
        seeing = table[:, 2] > 0
        forwards = micro_batches(
            [Length(*each) for each in table[:, :2].tolist()],
            rows,
            accelerator.num_processes,
            # Sorted by length, rows without images would share a forward, which vision models cannot compute.
            in_order=bool(seeing.any() and not seeing.all()),
        )
        rank, share = accelerator.process_index, len(lengths)
        return [[row - rank * share for row in forward[rank]] for forward in forwards]

    def loss(self, compute, inputs):
        """Weigh what the loss of a slice logs by its tokens, so that TRL's mean is one over the step's."""
        trainer, metrics = self.trainer, self.trainer._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}  # TRL logs no KL of a slice dropped whole
        loss = compute(inputs)
        if _WEIGHTS in inputs:
            by_sequence = trainer.importance_sampling_level == "sequence" and inputs["advantages"].ndim == 1
            for name in _TOKEN_MEANS.keys() & metrics.keys():
                of_trajectories = by_sequence and (name.startswith("clip_ratio/") or name == "cispo_clip_ratio")
                if not of_trajectories and len(metrics[name]) > before.get(name, 0):
                    metrics[name][-1] *= inputs[_WEIGHTS][_TOKEN_MEANS[name]]
        return loss

    # --- old and reference log-probabilities of a whole generation batch --------------------------------------------

    def forward(self, score, model, inputs, input_ids, attention_mask, logits_to_keep, *, batch_size=None, **options):
        if batch_size is None:
            return score(input_ids, attention_mask, logits_to_keep, **options)
        whole = {name: value for name, value in options.items() if isinstance(value, Tensor | list)}
        of_options = list(whole)
        for part, columns in {"prompt": slice(-logits_to_keep), "completion": slice(-logits_to_keep, None)}.items():
            whole |= {f"{part}_ids": input_ids[:, columns], f"{part}_mask": attention_mask[:, columns]}
        found: dict[str, Tensor] = {}  # 0 where a forward has padding
        losses: list[Tensor] = []
        for rows in self._plan(whole, batch_size):
            own = trimmed(take(inputs | whole, rows), self._multiple)
            known, width = set(own), own["completion_ids"].shape[1]
            of_rows = options | {name: own[name] for name in of_options}
            logps, entropies, loss = self.trainer.score_rows(model, own, **of_rows)
            losses += [] if loss is None else [loss]
            scores = {"logps": logps, "entropies": entropies} | {name: own[name] for name in own.keys() - known}
            for name, score_ in scores.items():
                if score_ is not None:
                    table = found.setdefault(name, score_.new_zeros(len(input_ids), logits_to_keep))
                    table[rows, :width] = score_
        inputs |= {name: table for name, table in found.items() if name not in ("logps", "entropies")}
        return found["logps"], found.get("entropies"), torch.stack(losses).mean() if losses else None


# --- pure functions -------------------------------------------------------------------------------------------------


class Length(NamedTuple):
    """Numbers of prompt and completion tokens of a row that a forward has to read."""

    prompt: int
    completion: int


def micro_batches(
    lengths: Sequence[Length], rows: int, processes: int = 1, *, in_order: bool = False
) -> list[Forward]:
    """Group rows by length into forwards, the longest first, so that a batch that exceeds memory fails at once.

    All processes have the same number of forwards, and a forward has the same number of rows in every process, because
    TRL gathers a number for each row. Rows stay in their process.

    Args:
        lengths: lengths of the rows of all processes, one process after the other, with equally many rows each.
        rows: number of rows of a forward in each process; the last one may have fewer.
        processes: number of processes.
        in_order: whether rows stay in their order.

    Returns:
        The forwards; every row is in one of them. Of two orders, by all tokens or by those of the completion, the
        function chooses the one with the fewest tokens read. The rows of a forward keep their original order, so that
        a step of one forward has the same bits as without grouping.
    """
    share = len(lengths) // processes
    lanes = [range(process * share, (process + 1) * share) for process in range(processes)]
    orders: tuple[Callable[[int], Any], ...] = (lambda row: sum(lengths[row]), lambda row: lengths[row][::-1])
    if in_order:
        orders = (lambda row: 0,)
    plans = []
    for order in orders:
        sorted_lanes = [sorted(lane, key=order, reverse=True) for lane in lanes]
        starts = range(0, share, rows)
        plans.append([[sorted(lane[start : start + rows]) for lane in sorted_lanes] for start in starts])
    return min(plans, key=lambda plan: read_tokens(lengths, plan))


def read_tokens(lengths: Sequence[Length], plan: Iterable[Forward]) -> int:
    """Return the number of tokens that all forwards of all processes read, padding included."""
    return sum(
        len(rows) * sum(map(max, zip(*(lengths[row] for row in rows), strict=True)))
        for forward in plan
        for rows in forward
    )


def lengths_of(batch: dict[str, Any], multiple: int | None = None) -> Tensor:
    """Return the numbers of prompt and completion tokens that a forward has to read: int64, shape (rows, 2), ≥ 1.

    A completion that is masked as a whole (truncated, or in a dropped group) has a length of 1.

    Args:
        batch: batch with the masks `prompt_mask`, shape (rows, P), and `completion_mask`, shape (rows, T).
        multiple: TRL's `pad_to_multiple_of`, to which lengths are rounded up.
    """
    prompt, completion = batch["prompt_mask"] != 0, batch["completion_mask"] != 0
    before_end = torch.arange(prompt.shape[1], 0, -1, device=prompt.device)
    from_start = torch.arange(1, completion.shape[1] + 1, device=completion.device)
    lengths = torch.stack([(prompt * before_end).amax(1), (completion * from_start).amax(1)], dim=1).clamp(min=1)
    return lengths if multiple is None else (lengths + multiple - 1) // multiple * multiple


def trimmed(batch: dict[str, Any], multiple: int | None = None) -> dict[str, Any]:
    """Return a batch without the columns that are padding in all of its rows; tensors that are cut are copied.

    Two columns of the completions stay: TRL's means over tokens would take a single one for values of trajectories,
    and count each row, also of a batch that is masked as a whole.
    """
    width, length = batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]
    prompt, completion = lengths_of(batch, multiple).amax(0).tolist()
    completion = max(completion, 2)
    both = slice(width - prompt, width + completion)
    cut = {}
    for name, value in batch.items():
        if name in _ALONG_PROMPT:
            value = value[:, width - prompt :].contiguous()
        elif name in _ALONG_BOTH:
            value = value[:, both].contiguous()
        elif name not in _ALONG_NONE and isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length:
            value = value[:, :completion].contiguous()
        cut[name] = value
    for kind in ("kept", "named"):
        if f"{kind}_ids" in cut:
            cut |= _trimmed_tokens(cut, completion, kind)
    return cut


def _trimmed_tokens(batch: dict[str, Any], completion: int, kind: str) -> dict[str, Tensor]:
    counts = batch[f"{kind}_counts"][:, :completion].contiguous()
    # A masked completion is cut within its tokens; the kept tokens of the remaining positions are the first ones.
    total = counts.sum(1)
    ids = batch[f"{kind}_ids"][:, : int(total.max())]
    beyond = torch.arange(ids.shape[1], device=ids.device) >= total.unsqueeze(1)
    trimmed = {f"{kind}_counts": counts, f"{kind}_ids": ids.masked_fill(beyond, -1)}
    if kind == "named":  # `kept_logps` has one column for each token of the completions
        trimmed["named_logps"] = batch["named_logps"][:, : ids.shape[1]].masked_fill(beyond, 0.0)
    return trimmed


def take(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return rows of a batch, in this order, with their images; what is of the whole batch stays as it is."""
    index = torch.tensor(rows)

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.ndim == 0 else value[index.to(value.device)]
        return [value[row] for row in rows] if isinstance(value, list) else value

    parts = {name: taken(value) for name, value in split_pixel_values_by_grid(batch).items()}
    return unsplit_pixel_values_by_grid(parts)


def join(slices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the slices of a generation batch, which have the same padded widths, into one batch."""
    first = slices[0]
    return {
        name: (value if value.ndim == 0 else torch.cat([each[name] for each in slices]))
        if isinstance(value, Tensor)
        else value and [row for each in slices for row in each[name]]
        for name, value in first.items()
    }
