"""The baselines of docs/papers.md: each does what its equation says."""

import re
from contextlib import ExitStack

import pytest
import torch

from dc_trl import DCGRPOTrainer
from dc_trl.command.arguments import RunArguments
from dc_trl.command.build import build_trainer

from .helpers import (
    ROOT,
    TINY_MODEL,
    as_words,
    logged,
    make_prompts,
)
from .vllm_server import requires_vllm


TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "papers.md")
    .read_text()
    .partition("## Baselines")[2]
    .partition("\n## ")[0]
    .splitlines()
    if line.startswith("| ")
][1:]
METHODS = {name: dict(line.split(": ", 1) for line in re.findall(r"`([^`]+)`", lines)) for name, lines, _ in TABLE}


def parsed(fields, *options):
    config = str(ROOT / "configs" / "quickstart_vllm_fp8.yaml")
    return RunArguments.parse(["--config", config, *as_words(fields), *options])


def lengths(completions, **kwargs):
    return [float(len(completion) % 3) for completion in completions]


@requires_vllm
@pytest.mark.parametrize(
    "method",
    [
        "GRPO + token-level TIS",
        "GRPO + token-level MIS",
        "GRPO + sequence-level TIS",
        "GRPO + sequence-level MIS",
        "DC-GRPO + TIS",
    ],
)
def test_importance_sampling_against_a_vllm_server(tmp_path, fp8_server, seen_by_the_loss, method):
    """Ratios by hand from the two engines' log-probabilities, on what a real FP8 server sampled."""
    # A bound that some ratios pass.
    fields = METHODS[method] | {"vllm_importance_sampling_clip_max": "1.001", "vllm_server_base_url": fp8_server.url}
    small = "--max_steps 1 --per_device_train_batch_size 16 --max_completion_length 24 --save_strategy no"
    *_, args, _ = parsed(fields, "--output_dir", str(tmp_path), *small.split(), "--disable_tqdm", "true")
    trainer = DCGRPOTrainer(str(TINY_MODEL), lengths, args, train_dataset=make_prompts())
    trainer.train()
    (inputs,) = seen_by_the_loss
    mask = inputs["completion_mask"].bool()
    log_ratio = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]).where(mask, 0.0)
    ratio = log_ratio.sum(-1, keepdim=True).exp() if "sequence" in method else log_ratio.exp()
    expected = ratio.where(ratio <= 1.001, 0.0) if "MIS" in method else ratio.clamp(max=1.001)
    found = inputs["importance_sampling_ratio"]
    torch.testing.assert_close(found.expand_as(mask)[mask], expected.expand_as(mask)[mask])
    assert (expected != ratio).any()
    # DC-GRPO's penalty stands beside it: per token, where GRPO's advantages are one for each completion.
    assert (inputs["advantages"].dim() == 2) == (method == "DC-GRPO + TIS")
    assert logged(trainer, "discrepancy/mean")[0] > 0


def test_length_decay_in_one_switch(tmp_path):
    options = f"--output_dir {tmp_path} --max_steps 3 --per_device_train_batch_size 8 --eval_size 0".split()
    command = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--disable_tqdm", "true", *options]
    command += ["--length_decay", "true", "--length_decay_period", "2", "--max_completion_length", "8"]
    parts = RunArguments.parse([*command, "--save_strategy", "no"])
    with ExitStack() as stack:
        trainer, _ = build_trainer(parts, stack)
        trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([1e-4, 0.5e-4, 0.5e-4])
