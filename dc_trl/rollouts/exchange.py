"""Exchange rows of a batch between processes."""

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional

from .batching import along, take


# Padding values of TRL and this package; all other tensors are padded with 0. A mask covers padding tokens.
_PADDING = {"tool_mask": 1, "importance_sampling_ratio": 1, "kept_ids": -1, "routed_experts": -1}


def exchanged(
    batch: dict[str, Tensor], wanted: Sequence[Sequence[int]], accelerator: Accelerator
) -> dict[str, Tensor]:
    """Return the rows that this process wants. Every process has to call it.

    Args:
        batch: tensors of this process, padded to its longest row, without images. All processes have the same number
            of rows.
        wanted: for every process, the rows that it wants, numbered one process after the other; each row once.
        accelerator: accelerator of the run.

    Returns:
        The rows that this process wants, in this order, padded to the longest row of all processes.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    share = len(batch["prompt_ids"])
    batch = _padded_alike(batch, accelerator)
    outgoing = [[row - rank * share for row in rows if row // share == rank] for rows in wanted]
    incoming = [[row for row in wanted[rank] if row // share == process] for process in range(processes)]
    sent = take({name: value for name, value in batch.items() if value.ndim > 0}, [*chain(*outgoing)])
    index_of = {row: index for index, row in enumerate(chain(*incoming))}
    received = {name: _all_to_all(sent[name], incoming, outgoing) for name in sorted(sent)}
    return batch | take(received, [index_of[row] for row in wanted[rank]])


def _all_to_all(sent: Tensor, incoming: list[list[int]], outgoing: list[list[int]]) -> Tensor:
    # Rows are sent as bytes, which every backend supports.
    rows = sent.contiguous().view(torch.uint8).reshape(len(sent), -1)
    received = rows.new_empty(sum(map(len, incoming)), rows.shape[1])
    dist.all_to_all_single(received, rows, list(map(len, incoming)), list(map(len, outgoing)))
    return received.view(sent.dtype).reshape(-1, *sent.shape[1:])


def _padded_alike(batch: dict[str, Tensor], accelerator: Accelerator) -> dict[str, Tensor]:
    """Return the batch padded to the widths of the widest process, with a tool mask if any process has one."""
    prompt, completion = batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]
    kept = batch["kept_ids"].shape[1] if "kept_ids" in batch else 0
    own = [prompt, completion, kept, int("tool_mask" in batch)]
    widths = accelerator.gather(torch.tensor([own], device=accelerator.device)).amax(0).tolist()
    if widths[3] and "tool_mask" not in batch:
        batch = batch | {"tool_mask": torch.ones_like(batch["completion_ids"])}
    left, right = widths[0] - prompt, widths[1] - completion
    sides = {"prompt": (left, 0), "completion": (0, right), "both": (left, right), None: (0, 0)}
    padded = {}
    for name, value in batch.items():
        side = sides[along(name, value, prompt, completion)]
        if name == "kept_ids":
            side = (0, widths[2] - kept)
        elif name == "kept_counts":
            side = (0, widths[1] - value.shape[1])
        dimensions = (0, 0) * (value.ndim - 2) + side
        padded[name] = functional.pad(value, dimensions, value=_PADDING.get(name, 0)) if any(side) else value
    return padded
