"""docs/migration.md: TRL's weights and ours by both trainers, and verl's rules by hand."""

import math
import random
import re
from itertools import pairwise

import pytest
import torch
import yaml
from trl import GRPOConfig, GRPOTrainer

from dc_trl import DCGRPOConfig
from dc_trl.constraint.corrections import correction_of
from dc_trl.sampled_tokens import SampledTokens

from .helpers import (
    ROOT,
    SMALL_RUN,
    Rollouts,
    distinct_characters,
    make_model,
    make_prompts,
    make_tokenizer,
)
from .test_corrections import train_in_trl


PAGE = (ROOT / "docs" / "migration.md").read_text()
BLOCKS = [
    (origin, yaml.safe_load(text)) for origin, text in re.findall(r"^```yaml\n# (\w+)\n(.*?)^```", PAGE, re.M | re.S)
]
PAIRS = [
    (before, after) for (origin, before), (then, after) in pairwise(BLOCKS) if (origin, then) == ("TRL", "dc_trl")
]
assert len(PAIRS) == 4


def rows(heading):
    """The cells of the tables of a section, with | in a cell left out, and without the heads."""
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#+ |\Z)", PAGE, re.M | re.S)[1]
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    heads = {index for index, cells in enumerate(table) if set("".join(cells)) <= set("- ")}
    return [cells for index, cells in enumerate(table) if index not in heads and index + 1 not in heads]


def near_the_model(call, completions, logprobs):
    """Most tokens about as rare to the engine as to the random model, some much rarer, and one without a number."""
    rng = random.Random(7)
    for row in logprobs:
        row[:] = [-rng.uniform(4.0, 9.0) for _ in row]
    logprobs[0][0] = math.nan


def weights_of_trl(tmp_path, seen, fields, edit):
    """What TRL's own code makes of random rollouts: its ratios, log-probabilities and masks."""
    own = {"output_dir": str(tmp_path), "per_device_train_batch_size": 16, "max_steps": 1, "use_vllm": False}
    config = GRPOConfig(**SMALL_RUN | fields | own)  # no engine has to be there
    bounds = {name: getattr(config, f"vllm_importance_sampling_{name}") for name in ("mode", "clip_max", "clip_min")}
    data = {"train_dataset": make_prompts(), "processing_class": make_tokenizer()}
    rollouts = Rollouts(longest=7, edit=edit)
    train_in_trl(GRPOTrainer(make_model(), distinct_characters, config, rollout_func=rollouts, **data), **bounds)
    (inputs,) = seen
    return inputs


def correction(tmp_path, **fields):
    return correction_of(DCGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **fields))


def weights_of_ours(tmp_path, inputs, **fields):
    train, infer = inputs["old_per_token_logps"], inputs["sampling_per_token_logps"]
    return correction(tmp_path, **fields)(
        SampledTokens.of(train, infer, inputs["completion_mask"], inputs["advantages"])
    )


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_each_pair_gives_every_token_the_same_weight(tmp_path, seen_by_the_loss, before, after):
    inputs = weights_of_trl(tmp_path, seen_by_the_loss, before, near_the_model)
    mask = inputs["completion_mask"].bool()
    theirs = inputs["importance_sampling_ratio"].expand_as(mask)[mask]
    ours = weights_of_ours(tmp_path, inputs, **after)[mask]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    # The bounds are met by some and not by others.
    assert 0.02 < (ours == ours.max()).float().mean() < 1 or (ours == 0).any()
    assert ours.unique().numel() > 3


def test_no_number_and_minus_infinity(tmp_path, seen_by_the_loss):
    """NaN is a ratio of 1 on both sides; −∞ is a ratio of infinity in TRL, cut to its bound, and of 1 here."""

    def unscored(call, completions, logprobs):
        near_the_model(call, completions, logprobs)
        logprobs[1][0] = -math.inf

    fields = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    inputs = weights_of_trl(tmp_path, seen_by_the_loss, fields, unscored)
    ours = weights_of_ours(tmp_path, inputs, constraint="none", rollout_correction="token_truncate")
    theirs = inputs["importance_sampling_ratio"]
    infer, mask = inputs["sampling_per_token_logps"], inputs["completion_mask"].bool()
    (nan_row, nan_at), (infinite_row, infinite_at) = (
        kind.logical_and(mask).nonzero()[0].tolist() for kind in (infer.isnan(), infer.isinf())
    )
    assert ours[nan_row, nan_at] == theirs[nan_row, nan_at] == 1
    assert theirs[infinite_row, infinite_at] == 2
    assert ours[infinite_row, infinite_at] == 1


# --- verl's rules, by hand


@pytest.mark.parametrize("level", ["token", "seq"])
def test_a_preset_of_two_is_the_product_of_verls_weight_and_mask(tmp_path, level):
    """verl multiplies the truncated weights (threshold 2) with a mask by the geometric mean (0.999 to 1.001)."""
    (cell,) = (cells[1] for cells in rows("Presets") if f"decoupled_geo_rs_{level}_tis" in cells[0])
    value = re.search("rollout_correction: ([^`]+)`", cell)[1]
    ratios = [[1.0, 1.0], [4.0, 0.25], [1.0005, 1.0005], [1.002, 1.002], [2.5, 2.5]]
    expected = []
    for row in ratios:
        product = math.prod(row)
        kept = 0.999 <= math.sqrt(product) <= 1.001
        expected.append([kept * min(ratio if level == "token" else product, 2.0) for ratio in row])
    train = torch.tensor(ratios, dtype=torch.float64).log()
    tokens = SampledTokens(train, torch.zeros_like(train), torch.ones_like(train).bool(), torch.ones(len(ratios)))
    torch.testing.assert_close(
        correction(tmp_path, use_vllm=True, rollout_correction=value)(tokens),
        torch.tensor(expected, dtype=torch.float64),
    )
