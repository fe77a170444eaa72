"""Length-aware batches: group completions of similar length into forwards, and cut their padding.

Rows are completions with their prompts, as TRL pads them: prompts on the left, completions on the right. A forward of
rows reads (longest prompt + longest completion) tokens of each of them. Here rows are grouped by length within one
optimizer step, and cut to the longest of their own forward. These functions use neither a trainer nor communication.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid


class Length(NamedTuple):
    """Numbers of prompt and completion tokens of a row that a forward has to read."""

    prompt: int
    completion: int


# A forward: for each process, the rows that it reads.
Forward = list[list[int]]

# Names of tensors whose second dimension is along the prompt, along prompt and completion, or along neither. Every
# other tensor whose second dimension has the length of the completions is along these; subclasses may add some.
_ALONG_PROMPT = ("prompt_ids", "prompt_mask")
_ALONG_BOTH = ("token_type_ids", "mm_token_type_ids", "routed_experts")
_ALONG_NONE = (
    *("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "image_position_ids"),
    *("kept_ids", "kept_counts", "named_ids", "named_counts", "named_logps"),  # with widths of their own: `Named`
)


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
    """Return a batch without the columns that are padding in all of its rows; tensors that are cut are copied."""
    width, length = batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]
    prompt, completion = lengths_of(batch, multiple).amax(0).tolist()
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
    return cut | _trimmed_tokens(cut, completion, "kept") | _trimmed_tokens(cut, completion, "named")


def _trimmed_tokens(batch: dict[str, Any], completion: int, kind: str) -> dict[str, Tensor]:
    if f"{kind}_ids" not in batch:
        return {}
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
    """Return rows of a batch, in this order, with their images; scalars of the whole batch stay as they are."""
    index = torch.tensor(rows)

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.ndim == 0 else value[index.to(value.device)]
        return value and [value[row] for row in rows]  # TRL's num_images are None where it has dropped images

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
