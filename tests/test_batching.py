"""How rows are grouped, cut and joined, against brute force."""

import itertools
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dc_trl.parts.length_aware_batches import Length, micro_batches, read_tokens, take, trimmed


lengths = st.lists(st.builds(Length, st.integers(1, 40), st.integers(1, 200)), min_size=1, max_size=24)


# --- forwards


@given(
    lengths=lengths,
    processes=st.sampled_from([1, 2, 3]),
    rows=st.integers(1, 5),
)
def test_every_row_is_read_once_in_forwards_of_so_many_rows(lengths, processes, rows):
    lengths = lengths * processes
    share = len(lengths) // processes
    plan = micro_batches(lengths, rows, processes)
    assert sorted(row for forward in plan for chunk in forward for row in chunk) == list(range(len(lengths)))
    for forward in plan:
        assert len(forward) == processes
        assert len({len(chunk) for chunk in forward}) == 1
        assert all(row // share == rank for rank, chunk in enumerate(forward) for row in chunk)
    sizes = [len(forward[0]) for forward in plan]
    assert sizes == [rows] * (share // rows) + [share % rows] * (share % rows > 0)


@settings(max_examples=25)
@given(completions=st.lists(st.integers(1, 60), min_size=6, max_size=6))
def test_no_grouping_reads_fewer_tokens_of_prompts_that_are_alike(completions):
    """All ways to put six rows into three forwards of two."""
    lengths = [Length(5, completion) for completion in completions]
    found = read_tokens(lengths, micro_batches(lengths, 2))
    orders = itertools.permutations(range(6))
    best = min(read_tokens(lengths, [[list(order[at : at + 2])] for at in (0, 2, 4)]) for order in orders)
    assert found == best


def test_the_longest_rows_come_first():
    """So that a batch that exceeds memory fails at once."""
    lengths = [Length(1, length) for length in (3, 9, 1, 5, 7)]
    assert micro_batches(lengths, 2) == [[[1, 4]], [[0, 3]], [[2]]]


# --- rows


def batch_of(lengths, prompt_width, width):
    """A batch whose every token and companion is a number of its own."""
    rows = len(lengths)
    numbers = torch.arange(rows * width).view(rows, width) + 1
    prompt_mask = torch.tensor([[0] * (prompt_width - each.prompt) + [1] * each.prompt for each in lengths])
    completion_mask = torch.tensor([[1] * each.completion + [0] * (width - each.completion) for each in lengths])
    return {
        "prompt_ids": (torch.arange(rows * prompt_width).view(rows, -1) + 1) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": numbers * completion_mask,
        "completion_mask": completion_mask,
        "tool_mask": torch.ones(rows, width, dtype=torch.long),
        "advantages": torch.arange(rows).float(),
        "old_per_token_logps": -numbers.float(),
        "importance_sampling_ratio": torch.arange(rows).float().unsqueeze(1),
        "routed_experts": torch.arange(rows * (prompt_width + width) * 6, dtype=torch.int16).view(rows, -1, 2, 3),
        "num_items_in_batch": completion_mask.sum(),
    }


@given(
    lengths=st.lists(st.builds(Length, st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=6),
    multiple=st.sampled_from([None, 4]),
    seed=st.integers(0, 100),
)
def test_rows_lose_nothing_but_padding(lengths, multiple, seed):
    batch = batch_of(lengths, prompt_width=8, width=12)
    rows = random.Random(seed).sample(range(len(lengths)), max(1, len(lengths) // 2))
    part = trimmed(take(batch, rows), multiple)
    up = (lambda value: value) if multiple is None else (lambda value: -(-value // multiple) * multiple)
    prompt, width = (max(up(lengths[row][side]) for row in rows) for side in (0, 1))
    width = max(width, 2)  # of one column TRL would think that it has a value for each trajectory
    assert part["prompt_ids"].shape == (len(rows), prompt)
    for name in ("completion_ids", "tool_mask", "old_per_token_logps"):
        assert torch.equal(part[name], batch[name][rows][:, :width])
    assert torch.equal(part["prompt_ids"], batch["prompt_ids"][rows][:, 8 - prompt :])
    assert part["prompt_ids"].sum() == batch["prompt_ids"][rows].sum()
    assert part["completion_ids"].sum() == batch["completion_ids"][rows].sum()
    assert torch.equal(part["routed_experts"], batch["routed_experts"][rows][:, 8 - prompt : 8 + width])
    for name in ("advantages", "importance_sampling_ratio"):
        assert torch.equal(part[name], batch[name][rows])
    assert part["num_items_in_batch"] is batch["num_items_in_batch"]


def test_kept_tokens_are_cut_with_their_positions():
    """Row 1 is masked: of its four kept tokens the first three belong to the positions that are left."""
    batch = batch_of([Length(1, 1), Length(1, 3)], prompt_width=1, width=4)
    batch["completion_mask"][1] = 0
    batch["kept_counts"] = torch.tensor([[1, 0, 0], [2, 1, 1]], dtype=torch.int32)
    batch["kept_ids"] = torch.tensor([[9, -1, -1, -1], [5, 6, 7, 8]], dtype=torch.int32)
    batch["named_counts"] = torch.tensor([[2, 0, 0], [2, 1, 1]], dtype=torch.int32)
    batch["named_ids"] = torch.tensor([[8, 7, -1, -1], [6, 5, 4, 3]], dtype=torch.int32)
    batch["named_logps"] = torch.tensor([[-1.0, -2.0, 0.0, 0.0], [-3.0, -4.0, -5.0, -6.0]])
    part = trimmed(batch)
    assert part["kept_counts"].tolist() == [[1, 0], [2, 1]]
    assert part["kept_ids"].tolist() == [[9, -1, -1], [5, 6, 7]]
    assert part["named_ids"].tolist() == [[8, 7, -1], [6, 5, 4]]
    assert part["named_logps"].tolist() == [[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]


def test_images_go_with_their_rows():
    """As Qwen-VL has them: two images in row 0, none in row 1, one in row 2, of 4, 2 and 6 patches."""
    batch = batch_of([Length(3, 2)] * 3, prompt_width=3, width=2) | {
        "pixel_values": torch.arange(12.0).view(12, 1),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 1, 2], [1, 2, 3]]),
        "num_images": [2, 0, 1],
    }
    part = take(batch, [2, 1, 0])
    assert part["num_images"] == [1, 0, 2]
    assert part["pixel_values"].flatten().tolist() == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
    assert part["image_grid_thw"].tolist() == [[1, 2, 3], [1, 2, 2], [1, 1, 2]]
    assert take(batch, [1])["pixel_values"].shape == (0, 1)


def test_rows_that_must_stay_in_order_do():
    lengths = [Length(1, length) for length in (3, 9, 1, 5, 2, 8)]
    assert micro_batches(lengths, 2, 2, in_order=True) == [[[0, 1], [3, 4]], [[2], [5]]]
