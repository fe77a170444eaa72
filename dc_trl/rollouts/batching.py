"""Length-aware batches: which completions share a forward, and how much padding it reads.

Rows are completions with their prompts, as TRL pads them: prompts on the left, completions on the right. A forward of
rows reads (longest prompt + longest completion) tokens of each of them. Here rows are grouped by length within one
optimizer step, and cut to the longest of their own forward. Nothing here knows a trainer or another process.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid


class Length(NamedTuple):
    """Tokens of a row that a forward has to read."""

    prompt: int
    completion: int


# A forward: of each process the rows that it reads.
Forward = list[list[int]]

# By its name a tensor is along the prompt, along the prompt and the completion, or along none of them; every other one
# whose second dimension is as long as the completions is along these, those of subclasses included.
_ALONG_PROMPT = ("prompt_ids", "prompt_mask")
_ALONG_BOTH = ("token_type_ids", "mm_token_type_ids", "routed_experts")
_ALONG_NONE = (
    *("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "image_position_ids"),
    *("kept_ids", "kept_counts"),  # of their own widths, see `Kept`
)


def segments(slices: int, passes: int, accumulated: int, offset: int = 0) -> list[range]:
    """Slices of a generation batch that share an optimizer step in every pass over it.

    Args:
        slices: TRL's `steps_per_generation`.
        passes: `num_iterations`.
        accumulated: `gradient_accumulation_steps`.
        offset: micro-batches of the present optimizer step that came before this generation batch.

    Returns:
        Consecutive ranges of slices. An epoch's last step may be shorter; it ends with its generation batch.
    """
    cuts = {step % slices for step in range(slices * passes) if (offset + step) % accumulated == 0}
    bounds = [*sorted(cuts | {0}), slices]
    return [range(begin, end) for begin, end in pairwise(bounds)]


# --- which rows share a forward -------------------------------------------------------------------------------------


def micro_batches(
    lengths: Sequence[Length],
    processes: int = 1,
    *,
    rows: int | None = None,
    budget: int | None = None,
    exchange: bool = True,
    least: int = 1,
    in_order: bool = False,
) -> list[Forward]:
    """Groups rows by length, the longest first: a batch that does not fit into memory shows so at once.

    Every process has as many forwards as the others, and each forward as many rows in every process: TRL gathers a
    number for each row. Within a forward the processes' chunks are neighbours in length, and the largest goes to the
    process that has read the fewest tokens so far.

    Args:
        lengths: of the rows of all processes, one process after the other, as many of each.
        processes: how many there are.
        rows: of a forward in each process; `None` with a budget.
        budget: tokens of a forward with its padding; a row that is longer is alone. `None` with `rows`.
        exchange: whether rows may go to another process.
        least: forwards at least; those of the most rows are halved.
        in_order: rows stay in the order of each process, and none is exchanged.

    Returns:
        The forwards; every row is in one of them. Of two orders, by all tokens or by those of the completion, the one
        with the fewest tokens read, and the fewest forwards. Rows of a forward are in the order in which they came, so
        that a step of one forward has the bits that it has without grouping.
    """
    share = len(lengths) // processes
    lanes = [range(len(lengths))] if exchange else [range(i * share, (i + 1) * share) for i in range(processes)]
    orders: tuple[Callable[[int], Any], ...] = (lambda row: sum(lengths[row]), lambda row: lengths[row][::-1])
    if in_order:
        orders = (lambda row: 0,)
    plans = []
    for order in orders:
        sorted_lanes = [sorted(lane, key=order, reverse=True) for lane in lanes]
        plan = _cut(lengths, sorted_lanes, processes // len(lanes), share, rows, budget)
        while len(plan) < least:
            plan = _halve_largest(plan)
        plans.append(plan)
    plan = min(plans, key=lambda plan: (read_tokens(lengths, plan), len(plan)))
    if exchange:
        plan = _balanced(lengths, plan)
    return [[sorted(rows) for rows in forward] for forward in plan]


def forward_tokens(lengths: Sequence[Length], rows: Sequence[int]) -> int:
    """Tokens that a forward of these rows reads, padding included."""
    return len(rows) * (max(lengths[row].prompt for row in rows) + max(lengths[row].completion for row in rows))


def read_tokens(lengths: Sequence[Length], plan: Iterable[Forward]) -> int:
    """Tokens that all forwards of all processes read, padding included."""
    return sum(forward_tokens(lengths, rows) for forward in plan for rows in forward)


def _cut(
    lengths: Sequence[Length],
    lanes: list[list[int]],
    chunks: int,  # of each lane in a forward
    share: int,
    rows: int | None,
    budget: int | None,
) -> list[Forward]:
    plan, start = [], 0

    def forward(count: int) -> Forward:
        begins = [start * chunks + chunk * count for chunk in range(chunks)]
        return [lane[begin : begin + count] for lane in lanes for begin in begins]

    while start < share:
        count = min(rows or 1, share - start)
        if budget is not None:
            while start + count < share and max(forward_tokens(lengths, one) for one in forward(count + 1)) <= budget:
                count += 1
        plan.append(forward(count))
        start += count
    return plan


def _halve_largest(plan: list[Forward]) -> list[Forward]:
    at = max(range(len(plan)), key=lambda index: len(plan[index][0]))
    middle = (len(plan[at][0]) + 1) // 2
    halves = [[rows[:middle] for rows in plan[at]], [rows[middle:] for rows in plan[at]]]
    return [*plan[:at], *halves, *plan[at + 1 :]]


def _balanced(lengths: Sequence[Length], plan: list[Forward]) -> list[Forward]:
    loads = [0] * len(plan[0])
    balanced = []
    for forward in plan:
        by_size = sorted(forward, key=lambda rows: forward_tokens(lengths, rows), reverse=True)
        by_load = sorted(range(len(loads)), key=loads.__getitem__)
        chunks: Forward = [[] for _ in loads]
        for process, rows in zip(by_load, by_size, strict=True):
            chunks[process] = rows
            loads[process] += forward_tokens(lengths, rows)
        balanced.append(chunks)
    return balanced


def runs(count: int, slices: int) -> list[range]:
    """So many forwards over so many slices, one after the other, as evenly as it goes; at least as many forwards."""
    bounds = [count * index // slices for index in range(slices + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


# --- rows of a batch ------------------------------------------------------------------------------------------------


def lengths_of(batch: dict[str, Any], multiple: int | None = None) -> Tensor:
    """Tokens of each row that a forward has to read: int64, shape (rows, 2), of prompt and completion, at least 1.

    A completion that is masked whole (truncated, or of a dropped group) enters nothing: it counts as 1.

    Args:
        batch: with the masks `prompt_mask`, shape (rows, P), and `completion_mask`, shape (rows, T).
        multiple: TRL's `pad_to_multiple_of`, to which lengths are rounded up.
    """
    prompt, completion = batch["prompt_mask"] != 0, batch["completion_mask"] != 0
    before_end = torch.arange(prompt.shape[1], 0, -1, device=prompt.device)
    from_start = torch.arange(1, completion.shape[1] + 1, device=completion.device)
    lengths = torch.stack([(prompt * before_end).amax(1), (completion * from_start).amax(1)], dim=1).clamp(min=1)
    return lengths if multiple is None else (lengths + multiple - 1) // multiple * multiple


def along(name: str, value: Any, prompt: int, completion: int) -> str | None:
    """What the second dimension of a tensor is: "prompt", "completion" or "both"; None: neither.

    Args:
        name, value: of an entry of a batch.
        prompt, completion: padded widths of the batch, P and T.
    """
    if name in _ALONG_PROMPT:
        return "prompt"
    if name in _ALONG_BOTH:
        return "both"
    if name in _ALONG_NONE or not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != completion:
        return None
    return "completion"


def trimmed(batch: dict[str, Any], multiple: int | None = None) -> dict[str, Any]:
    """A batch without the columns that are padding in all of its rows; its tensors are copies where they are cut."""
    width, length = batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]
    prompt, completion = lengths_of(batch, multiple).amax(0).tolist()
    columns = {
        "prompt": slice(width - prompt, width),
        "completion": slice(0, completion),
        "both": slice(width - prompt, width + completion),
    }
    cut = {
        name: value if (kind := along(name, value, width, length)) is None else value[:, columns[kind]].contiguous()
        for name, value in batch.items()
    }
    return cut | _trimmed_kept(cut, completion)


def _trimmed_kept(batch: dict[str, Any], completion: int) -> dict[str, Tensor]:
    if "kept_ids" not in batch:
        return {}
    counts = batch["kept_counts"][:, :completion].contiguous()
    # A masked completion is cut within its tokens: the kept ones of what is left are the first.
    kept = counts.sum(1)
    ids = batch["kept_ids"][:, : int(kept.max())]
    beyond = torch.arange(ids.shape[1], device=ids.device) >= kept.unsqueeze(1)
    return {"kept_counts": counts, "kept_ids": ids.masked_fill(beyond, -1)}


def take(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Rows of a batch, in this order, with their images; numbers of the whole batch stay."""
    index = torch.tensor(rows)

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.ndim == 0 else value[index.to(value.device)]
        return [value[row] for row in rows]

    parts = {name: taken(value) for name, value in split_pixel_values_by_grid(batch).items()}
    return unsplit_pixel_values_by_grid(parts)


def join(slices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One batch of the slices of a generation batch, which are padded alike."""
    first = slices[0]
    return {
        name: (value if value.ndim == 0 else torch.cat([each[name] for each in slices]))
        if isinstance(value, Tensor)
        else [row for each in slices for row in each[name]]
        for name, value in first.items()
    }
