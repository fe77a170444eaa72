"""`scripts/benchmark.py lengths`: the responses it replays, and what it counts, against counting by hand."""

import json
import statistics
import sys

import pytest

from dc_trl.data.arithmetic import arithmetic_dataset
from tests.helpers import load_script, make_tokenizer, succeed


@pytest.fixture
def script():
    load_script("benchmark")
    return sys.modules["benchmarks.lengths"]


def test_lengths_are_log_normal(script):
    for sigma in (0.4, 0.6, 0.8):
        found = script.response_lengths(4000, sigma, 4)
        assert max(found) <= 2048
        assert statistics.mean(found) == pytest.approx(625, rel=0.05)
        uncut = [script.math.log(length) for length in script.response_lengths(4000, sigma, 4) if length < 2048]
        assert statistics.stdev(uncut) == pytest.approx(sigma, rel=0.1)
    assert script.response_lengths(8, 0.4, 64) == script.response_lengths(8, 0.4, 64)


@pytest.mark.long
def test_it_counts_what_each_trainer_computes(script, tmp_path):
    output = tmp_path / "lengths.jsonl"
    command = [sys.executable, "scripts/benchmark.py", "lengths", "--output", str(output)]
    command += ["--responses", "16", "--micro_batches", "4", "--sigmas", "0.6", "--repetitions", "2", "--threads", "1"]
    succeed(command)
    rows = {row["arm"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert list(rows) == list(script.ARMS)
    assert output.with_suffix(".png").stat().st_size > 10_000
    for row in rows.values():
        assert len(row["training"]) == len(row["memory"]) == 2
        assert all(0 < training <= step for training, step in zip(row["training"], row["step"], strict=True))
        assert min(row["memory"]) > 0
    # Two prompts, of which each has eight responses; TRL's data loader takes them in its own order.
    lengths = script.response_lengths(16, 0.6, 64)
    template = {"add_generation_prompt": True, "return_dict": True}
    rendered = make_tokenizer().apply_chat_template(list(arithmetic_dataset(16, 0, "train")["prompt"]), **template)
    prompts = sorted({len(ids) for ids in rendered["input_ids"]})
    padded = [
        16 * (longest + max(lengths)) / (8 * (longest + other) + sum(lengths))
        for longest in prompts
        for other in prompts
        if other <= longest
    ]
    for arm in ("TRL", "ours, neither"):
        (computed,) = set(rows[arm]["computed_per_real"])
        assert any(computed == pytest.approx(each) for each in padded)
    assert 1.0 <= rows["length-aware"]["computed_per_real"][0] < rows["TRL"]["computed_per_real"][0] / 1.5
