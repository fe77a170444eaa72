"""The discrepancy split into the number format's part and the lag's, and remedies that act on the lag alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dc_trl.constraint.settings import ConstraintSettings
from dc_trl.constraint.statistics import BatchStatistics, batch_metrics
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.sampled_tokens import SampledTokens

from .helpers import TINY_MODEL, completion_logps, distinct_characters, logged, make_trainer


def of_conversations(completions, **kwargs):
    return distinct_characters([completion[0]["content"] for completion in completions])


def train(tmp_path, **options):
    options = {
        "reward": of_conversations,
        "train_dataset": arithmetic_dataset(96, 0, "train"),
        "deployment_scheme": "int3",
        "per_device_train_batch_size": 16,
        "max_completion_length": 24,
        "learning_rate": 1e-3,
        "weight_sync_steps": 3,
        "max_steps": 4,
        "constraint": "none",
    } | options
    trainer = make_trainer(tmp_path, AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32), **options)
    trainer.train()
    return trainer


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


# --- the sums


@given(st.lists(st.tuples(*[st.floats(-6, 0)] * 3, st.booleans()), min_size=1, max_size=12), st.integers(0, 12))
def test_the_parts_are_measured_as_the_whole_is(rows, cut):
    """Each part by the formulas of the whole, from two micro-batches, over the tokens that count."""
    train, deployed, infer = (torch.tensor([[row[i] for row in rows]], dtype=torch.float64) for i in range(3))
    scored = torch.tensor([[row[3] for row in rows]])
    statistics = BatchStatistics(ConstraintSettings(batch_reduction="token"))
    for part in (slice(0, cut), slice(cut, None)):
        tokens = (train[:, part], infer[:, part], scored[:, part], torch.zeros(1), deployed[:, part])
        statistics.add(SampledTokens(*tokens))
    report = statistics.reduce(lambda tensor: tensor)
    if not scored.any():
        assert report.tokens == 0
        return
    metrics = batch_metrics(report, None)
    for part, first, second in (("format", train, deployed), ("lag", deployed, infer)):
        d = (first - second)[scored]
        assert metrics[f"discrepancy/{part}_k3_kl"] == pytest.approx((d.exp() - d - 1).mean().item(), abs=1e-12)
        gap = (first.exp() - second.exp())[scored].abs().mean().item()
        assert metrics[f"discrepancy/{part}_mean"] == pytest.approx(gap, abs=1e-12)
        assert metrics[f"discrepancy/{part}_ess"] == pytest.approx(
            (d.exp().mean() ** 2 / d.exp().square().mean()).item(), abs=1e-9
        )


# --- in training


@pytest.mark.parametrize("steps_per_generation", [1, 2], ids=["in the loss", "as sampled"])
def test_splitting_leaves_the_training_as_it_is(tmp_path, steps_per_generation):
    """Where TRL scores a batch within the loss, and where it scores it as it is sampled."""
    options = {"steps_per_generation": steps_per_generation, "gradient_accumulation_steps": 1}
    plain = train(tmp_path / "plain", **options)
    split = train(tmp_path / "split", discrepancy_split=True, **options)
    assert torch.equal(weights(plain), weights(split))
    assert logged(plain, "discrepancy/mean") == logged(split, "discrepancy/mean")
    assert not any("format_" in name for entry in plain.state.log_history for name in entry)
    assert min(logged(split, "discrepancy/format_k3_kl")) > 1e-4
    lag = logged(split, "discrepancy/lag_k3_kl")
    assert lag[0] < 1e-5  # the replica samples with the weights that train
    assert max(lag[1:]) > 1e-4  # and then with older ones


def test_the_parts_are_those_of_a_forward_of_its_own(tmp_path):
    """Of the first batch, from a second copy of the model and the tokens that the trainer counted."""
    counted = []

    class Statistics(BatchStatistics):
        def add(self, tokens, penalty=None, weights=None):
            counted.append(tokens)
            super().add(tokens, penalty, weights)

    trainer = make_trainer(
        tmp_path,
        AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32),
        reward=of_conversations,
        train_dataset=arithmetic_dataset(96, 0, "train"),
        deployment_scheme="fp8",
        discrepancy_split=True,
        max_steps=1,
        constraint="none",
        length_aware_batches=False,
    )
    trainer._statistics["train"] = Statistics(trainer.args)
    batches = []
    policy_loss = trainer.policy_loss
    trainer.policy_loss = lambda model, inputs: (batches.append(inputs), policy_loss(model, inputs))[1]
    trainer.train()
    (tokens,), (batch,) = counted, batches

    copy = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    with DeployedForward(copy, "fp8").active():
        logps = completion_logps(copy, batch)
    torch.testing.assert_close(tokens.deployed_logps[tokens.scored], logps[tokens.scored], rtol=0, atol=1e-5)


REMEDIES = {
    "form": {"constraint": "static", "constraint_form": "log_ratio", "lambda_init": 0.5, "lambda_max": 1.0},
    "correction": {"rollout_correction": "ppo_clip"},
    "multiplier": {"constraint": "lagrangian", "constraint_form": "log_ratio", "discrepancy_tolerance": 1e-4},
}


@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("steps_per_generation", [1, 2], ids=["in the loss", "as sampled"])
def test_in_a_policy_that_trains_as_deployed_both_targets_are_one(tmp_path, remedy, steps_per_generation):
    options = REMEDIES[remedy] | {"steps_per_generation": steps_per_generation, "gradient_accumulation_steps": 1}
    target = "rollout_correction_target" if remedy == "correction" else "constraint_target"
    trained = [
        train(tmp_path / value, train_through_quantization=True, **{target: value}, **options)
        for value in ("all", "lag")
    ]
    assert torch.equal(weights(trained[0]), weights(trained[1]))
    assert logged(trained[0], "lagrangian/lambda") == logged(trained[1], "lagrangian/lambda")
    assert set(logged(trained[1], "discrepancy/format_mean")) == {0.0}
    assert logged(trained[1], "discrepancy/lag_mean") == logged(trained[1], "discrepancy/mean")


def test_a_sampler_in_step_is_not_pulled_at(tmp_path):
    """In a coarse format in step nothing lags: a pull at the lag leaves GRPO's weights, one at everything does not."""
    options = REMEDIES["form"] | {"weight_sync_steps": 1}
    grpo = train(tmp_path / "grpo", weight_sync_steps=1, max_steps=2)
    lag = train(tmp_path / "lag", constraint_target="lag", max_steps=2, **options)
    everything = train(tmp_path / "all", max_steps=2, **options)
    moved = (weights(everything) - weights(grpo)).norm()
    assert (weights(lag) - weights(grpo)).norm() < 0.1 * moved
    assert max(logged(lag, "discrepancy/mean")) > 100 * max(logged(lag, "discrepancy/lag_mean"))


def test_dual_ascent_follows_the_part_that_is_constrained(tmp_path):
    tolerance = 1e-3
    options = REMEDIES["multiplier"] | {"discrepancy_tolerance": tolerance, "lambda_lr": 2.0}
    trainer = train(tmp_path, constraint_target="lag", **options)
    expected = trainer.args.lambda_init
    for value, mean, violation in zip(
        *(logged(trainer, name) for name in ("lagrangian/lambda", "discrepancy/lag_mean", "lagrangian/violation")),
        strict=True,
    ):
        assert value == pytest.approx(expected)
        assert violation == pytest.approx(mean - tolerance)
        expected = min(max(expected + 2.0 * (mean - tolerance), 0.0), 1.0)
    assert trainer.lagrange_multiplier.value == pytest.approx(expected)
