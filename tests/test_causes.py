"""The split of a discrepancy: Shapley values by brute force, causes that are known because the test put them there."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from dc_trl.calibration import calibrate
from dc_trl.calibration import causes as causes_module
from dc_trl.calibration.causes import Case, recommend, split_discrepancy, subsets
from dc_trl.calibration.result import CalibrationSettings, Split
from dc_trl.calibration.rollouts import sample_rollouts
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.records.estimators import Estimate
from dc_trl.sampling.engine_names import EngineSpec
from dc_trl.serving.fit import schemes_of

from .helpers import (
    assert_same_tensors,
    floor_and_format,
    make_model,
    make_tall_model,
    refuses,
    tiny_model,
)
from .test_calibration import script


QUIET = {"progress": False, "report": lambda line: None}


def diagnosis_of(model, tokenizer, engine, prompts=None, **settings):
    prompts = prompts or arithmetic_dataset(12, 0, "train")["prompt"][:]
    options = {"samples": 2, "max_tokens": 24, "batch_prompts": 4, **QUIET} | settings
    found = calibrate(model, tokenizer, [engine], prompts, **options).engines[0]
    assert found.diagnosis is not None, found.notes
    split = found.diagnosis.split
    assert split.whole == found.estimates["discrepancy"]
    total = sum(share.value for share in split.shares.values()) + split.unexplained.value
    assert total == pytest.approx(split.whole.value, rel=1e-12)
    return found.diagnosis


# --- the mathematics -------------------------------------------------------------------------------------------------


def by_permutations(values, causes, cause):
    """Mean over all orders of what removing a cause takes away when its turn comes."""
    taken = []
    for order in itertools.permutations(causes):
        before = frozenset(order[: order.index(cause)])
        taken.append(values[before] - values[before | {cause}])
    return math.fsum(taken) / len(taken)


@given(st.integers(1, 5), st.data())
def test_shares_are_means_over_all_orders_and_add_up(count, data):
    causes = list("abcde"[:count])
    values = {removed: data.draw(st.floats(0, 1)) for removed in subsets(causes)}
    ratios = {removed: (np.array([value, 2 * value]), np.array([1.0, 2.0])) for removed, value in values.items()}
    floor = (np.array([0.1, 0.4]), np.array([1.0, 2.0]))
    split = split_discrepancy(ratios, floor, causes, seed=0)
    assert split.floor.value == pytest.approx(0.5 / 3)
    for cause in causes:
        assert split.shares[cause].value == pytest.approx(by_permutations(values, causes, cause), abs=1e-12)
    total = sum(share.value for share in split.shares.values()) + split.unexplained.value
    assert total == pytest.approx(values[frozenset()], abs=1e-12)
    assert split.unexplained.value == pytest.approx(values[frozenset(causes)], abs=1e-12)


def test_intervals_hold_the_true_shares():
    """150 samples of 60 prompts with skewed discrepancies, whose mean shares are known."""
    causes, rng, held = ["a", "b"], np.random.default_rng(0), 0
    sizes = {"": 1.0, "a": 0.7, "b": 0.6, "ab": 0.1}
    truth = by_permutations({frozenset(key): size for key, size in sizes.items()}, causes, "a")
    for seed in range(150):
        own = {frozenset(key): size * rng.gamma(4, 0.25, 60) for key, size in sizes.items()}
        ratios = {key: (value, np.ones(60)) for key, value in own.items()}
        split = split_discrepancy(ratios, ratios[frozenset()], causes, seed)
        held += split.shares["a"].low <= truth <= split.shares["a"].high
    assert 0.88 <= held / 150 <= 0.99


# --- known causes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "dtype", "causes"),
    [
        ("fp8", torch.bfloat16, ["weights", "activations", "precision"]),
        ("int4", torch.float32, ["weights", "precision"]),
        ("bf16", torch.bfloat16, ["precision"]),
    ],
)
def test_the_replicas_discrepancy_is_explained(tokenizer, scheme, dtype, causes):
    found = diagnosis_of(tiny_model(dtype), tokenizer, f"replica:{scheme}")
    split = found.split
    assert list(split.shares) == causes
    assert found.scheme == scheme
    assert split.unexplained.value <= 1e-5 < 1e-4 < split.whole.value
    assert split.floor.value < 2e-4, "two layers amplify little"
    if scheme == "int4":
        assert max(split.shares, key=lambda cause: split.shares[cause].value) == "weights"
        assert split.shares["weights"].low > split.shares["precision"].high


def test_another_order_is_that_of_perturbed_sums(monkeypatch):
    """Sums that are known, and of which a tenth of a percent is moved: they are rounded otherwise equally often."""
    monkeypatch.setattr(causes_module, "_DISORDER", 1e-3)
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(400_000, generator=generator).double()
    rounded = sums.bfloat16()
    moved = (sums * (1 + 1e-3 * torch.randn(sums.shape, generator=generator))).bfloat16()
    other = causes_module.in_another_order(rounded, generator)
    changed, expected = ((each != rounded).float().mean().item() for each in (other, moved))
    assert 0.1 < expected < 0.2
    assert changed == pytest.approx(expected, rel=0.03)
    steps = (other.double() - rounded.double())[other != rounded] / rounded.double().abs()[other != rounded]
    assert 2**-9 < steps.abs().min() <= steps.abs().max() <= 2**-7, "to the next number"
    assert abs(steps.sign().mean()) < 0.02


def test_depth_raises_the_floor():
    ids = torch.randint(2, 50_000, (4, 64), generator=torch.Generator().manual_seed(1))
    flat = make_model(128, vocab_size=50_000).bfloat16()
    low, _ = floor_and_format(flat, ids, "fp8", seeds=3)
    high, of_the_format = floor_and_format(make_tall_model().bfloat16(), ids, "fp8", seeds=3)
    assert 0 < 10 * low < high < of_the_format


def test_depth_raises_the_floor_of_the_lag(tokenizer):
    """In bfloat16 compute alone, and for the tiny model by what another copy's forwards give at two near weights."""
    options = {"samples": 2, "max_tokens": 12, "batch_prompts": 4, **QUIET}
    prompts = arithmetic_dataset(8, 0, "train")["prompt"][:]

    def floor_of(model, **settings):
        before = copy.deepcopy(model.state_dict())
        engine = calibrate(model, tokenizer, ["replica:bf16"], prompts, **options, **settings).engines[0]
        assert_same_tensors(model.state_dict(), before)
        return engine.estimates["lag_floor"].value

    shallow = floor_of(tiny_model(), bf16=True)
    assert 1e-8 < shallow < 1e-4
    assert floor_of(make_tall_model(), bf16=True) > 100 * shallow
    assert floor_of(tiny_model(), bf16=False) < 0.01 * shallow
    model = tiny_model(torch.bfloat16)
    (unsplit,) = calibrate(model, tokenizer, ["replica:bf16"], prompts, split=False, **options).engines
    assert "lag_floor" not in unsplit.estimates


def test_merging_an_adapter_is_a_cause(tokenizer):
    policy = get_peft_model(make_model(32).bfloat16(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    before = copy.deepcopy(policy.state_dict())
    found = diagnosis_of(policy, tokenizer, "replica:bf16", [f"{n}+{n}=" for n in range(12)])
    assert list(found.split.shares) == ["precision", "adapter"]
    # The weights are bfloat16, so that nothing but merging rounds them.
    assert found.split.shares["adapter"].low > 0
    assert found.split.unexplained.value <= 1e-5
    assert_same_tensors(policy.state_dict(), before)


def test_the_policy_is_left_as_it_was(tokenizer):
    model = make_model(32)
    tokens = torch.tensor([[20, 30, 40, 50]])
    before = model(tokens).logits
    diagnosis_of(model, tokenizer, "replica:fp8", [f"{n}+{n}=" for n in range(4)], max_tokens=8)
    assert torch.equal(model(tokens).logits, before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == make_model(32).config._attn_implementation


# --- what cannot be, and what is said --------------------------------------------------------------------------------


def estimate(value):
    return Estimate(value, 0.0, value, value, 8)


@pytest.mark.parametrize(
    ("shares", "unexplained", "least", "setting", "limit"),
    [
        ({"weights": 5e-3, "activations": 4e-3, "precision": 1e-3}, 0.0, 1e-4, "train_through_quantization: true", ""),
        ({"weights": 9e-3, "precision": 1e-3}, 1e-5, 4e-3, "set train_through_quantization: true", "keeps 0.004"),
        ({"weights": 9e-3, "precision": 1e-3}, 1e-5, 6e-3, "train as usual", "keeps 0.006"),
        ({"weights": 1e-3}, 9e-3, 1e-4, "constraint: none", "check first"),
        ({"weights": 1e-3}, 9e-3, 7e-3, "constraint: none", "only equal kernels"),
    ],
)
def test_advice_follows_the_largest_cause(shares, unexplained, least, setting, limit):
    whole = estimate(sum(shares.values()) + unexplained)
    parts = {name: estimate(value) for name, value in shares.items()}
    split = Split(whole, parts, estimate(unexplained), estimate(least))
    (first, *others) = recommend(split, estimate(0.02))
    assert setting in first
    assert limit in first
    assert ("check first" in first) == (limit == "check first")
    assert not others
    # docs/which_one.md: nothing helps below 0.005.
    for small in (3.8e-4, 4.9e-3):
        (only,) = recommend(split, estimate(small))
        assert only.startswith("Nothing is needed")
    (only,) = recommend(split, estimate(5.1e-3))
    assert setting in only


def test_what_is_not_known_is_not_taken_for_small():
    known, unknown = estimate(1e-5), estimate(math.nan)
    for whole, share, floor, kl in ((unknown, known, known, known), (known, known, unknown, estimate(0.02))):
        (only,) = recommend(Split(whole, {"weights": share}, known, floor), replace(kl, high=math.nan))
        assert "not known" in only


def test_script_splits_unless_it_is_told_not_to(tmp_path, capsys):
    small = {"prompts": 4, "max_tokens": 12}
    (engine,) = script(tmp_path, "replica:fp8", **small)
    shown = capsys.readouterr().out
    assert "where δ̄ comes from" in shown
    assert all(cause in shown for cause in (*engine.diagnosis.split.shares, "unexplained"))
    below = shown.partition("δ̄, the sum")[2]  # the floor is no share
    assert f"{engine.diagnosis.split.floor.value:.2e}" in below
    assert "CONCLUSION, replica:fp8: " in below
    (engine,) = script(tmp_path, "replica:fp8", "--overwrite", "--no_split", **small)
    assert engine.diagnosis is None


def test_of_several_schemes_the_nearest_is_taken(tokenizer):
    """As of a server whose layers are FP8 in one of two ways: by channel or by block."""
    expected = {
        "CompressedTensorsW8A8Fp8": ["fp8", "fp8_block"],
        "CompressedTensorsW8A16Fp8": ["fp8_w8a16"],  # an "fp8" checkpoint on an older GPU
        "Fp8PerChannelLinearMethod": ["fp8", "fp8_block"],  # vLLM's own --quantization
        "CompressedTensorsW4A4Fp4": ["nvfp4", "nvfp4a16"],
        "CompressedTensorsW8A8Mxfp8": ["mxfp8"],
    }
    assert {name: schemes_of([name]) for name in expected} == expected
    assert schemes_of([]) == ["bf16"]
    policy, prompts = make_model(128), [[20, 30, 40], [50, 60], [70], [80]]
    settings = CalibrationSettings(samples=4, max_tokens=12, **QUIET)
    for scheme in ("fp8", "fp8_block"):
        sample = sample_rollouts(EngineSpec.parse(f"replica:{scheme}"), policy, tokenizer, prompts, settings)
        unsure = sample._replace(engine="http://host:1", schemes=["fp8", "fp8_block"])
        assert Case(unsure, policy, prompts, settings).scheme() == scheme
    # Widths of 32 are in no blocks of 128.
    assert Case(unsure, make_model(32), prompts, settings).scheme() == "fp8"
    with refuses(ValueError, "engine='http://host:1'", "split=False"):
        Case(unsure._replace(schemes=[]), policy, prompts, settings).scheme()
