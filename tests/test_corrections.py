"""Corrections of the rollouts: by hand, by their properties, and against TRL's own in TRL's own loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOTrainer

from dc_trl.constraint.constraint import Constraint
from dc_trl.constraint.corrections import (
    CORRECTIONS,
    ONE_SIDED_BOUND,
    correction_of,
    token_mask,
    tv_mask,
)
from dc_trl.constraint.lagrangian import LagrangeMultiplier
from dc_trl.constraint.metrics import BatchStatistics, batch_metrics, mean_discrepancy
from dc_trl.constraint.settings import ConstraintSettings
from dc_trl.sampled_tokens import SampledTokens

from .helpers import (
    ALIGNED,
    MISALIGNED,
    Rollouts,
    logged,
    make_config,
    make_model,
    make_trainer,
    sums_of_two,
)


MODES = sorted(CORRECTIONS)


def matrix(rows):
    """Of numbers in a text, with | between its rows."""
    return torch.tensor([[float(number) for number in row.split()] for row in rows.split("|")])


# Ratios 4, 0.25, 1.25 and 3 (not scored); 1.8, 0.9 and two tokens that are not scored.
TRAIN = matrix("0.8 0.1 0.5 0.9 | 0.54 0.45 0.3 0.3").log()
INFER = matrix("0.2 0.4 0.4 0.3 | 0.3 0.50 nan 0.1").log()
SCORED = matrix("1 1 1 0 | 1 1 0 0").bool()
ADVANTAGES = torch.tensor([1.0, -1.0])
TOKENS = SampledTokens(TRAIN, INFER, SCORED, ADVANTAGES)


@pytest.mark.parametrize(
    ("name", "bounds", "expected"),
    [
        ("token_truncate", {}, "2 0.25 1.25 1 | 1.8 0.9 1 1"),
        ("token_truncate", {"lower": 0.5, "upper": 3}, "3 0.5 1.25 1 | 1.8 0.9 1 1"),
        ("token_mask", {}, "0 0.25 1.25 1 | 1.8 0.9 1 1"),
        ("token_mask", {"lower": 0.5, "upper": math.inf}, "4 0 1.25 1 | 1.8 0.9 1 1"),
        # The products are 4 · 0.25 · 1.25 = 1.25 and 1.8 · 0.9 = 1.62.
        ("sequence_truncate", {"upper": 1.5}, "1.25 1.25 1.25 1.25 | 1.5 1.5 1.5 1.5"),
        ("sequence_mask", {"upper": 1.5}, "1.25 1.25 1.25 1.25 | 0 0 0 0"),
        ("sequence_mask", {}, "1.25 1.25 1.25 1.25 | 1.62 1.62 1.62 1.62"),
        # Their roots: 1.25^(1/3) = 1.077 and 1.62^(1/2) = 1.273.
        ("geometric_mask", {}, "0 0 0 0 | 0 0 0 0"),
        ("geometric_mask", {"lower": 0.9, "upper": 1.1}, "1 1 1 1 | 0 0 0 0"),
        ("icepop", {}, "4 0 1.25 1 | 1.8 0.9 1 1"),
        # Differences 0.6, −0.3, 0.1 with Â > 0, and 0.24, −0.05 with Â < 0.
        ("tv_mask", {}, "0 0.25 1.25 1 | 1.8 0.9 1 1"),
        ("tv_mask", {"upper": 0.04}, "0 0.25 0 1 | 1.8 0 1 1"),
        # Â > 0 masks what is above, Â < 0 what is below.
        ("ppo_clip", {}, "0 0.25 0 1 | 1.8 0.9 1 1"),
        ("ppo_clip", {"lower": 0.95, "upper": 1.3}, "0 0.25 1.25 1 | 1.8 0 1 1"),
    ],
)
def test_weights_by_hand(name, bounds, expected):
    weights = CORRECTIONS[name](TOKENS, **bounds)
    torch.testing.assert_close(weights, matrix(expected), atol=1e-6, rtol=1e-5)


def test_a_token_goes_by_its_own_advantage():
    """As the form of the constraint leaves it; without one, nothing pushes the token."""
    advantages = torch.tensor([[-1.0, -1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
    weights = tv_mask(TOKENS._replace(advantages=advantages), upper=0.04)
    torch.testing.assert_close(weights, matrix("4 0 0 1 | 1.8 0.9 1 1"))


log_probabilities = st.floats(-30, 0)
tokens = st.lists(
    st.tuples(log_probabilities, log_probabilities | st.just(math.nan), st.booleans()), min_size=1, max_size=6
)


@given(tokens, st.sampled_from(MODES), st.floats(-2, 2), st.floats(0, 1), st.floats(1, 4))
def test_weights_stay_in_their_bounds(rows, mode, advantage, lower, upper):
    train, infer, wanted = (torch.tensor([column]) for column in zip(*rows, strict=True))
    train.requires_grad_()
    scored = wanted & infer.isfinite()
    bounds = {"upper": lower} if mode == "tv_mask" else {"lower": lower, "upper": upper}
    sampled = SampledTokens(train, infer, scored, torch.tensor([advantage]))
    weights = CORRECTIONS[mode](sampled, **bounds)
    assert weights.shape == train.shape
    assert not weights.requires_grad
    assert weights.isfinite().all()
    one_sided = mode in ("tv_mask", "ppo_clip")
    highest = ONE_SIDED_BOUND if one_sided else upper
    lowest = 0.0 if one_sided else lower
    within = (weights >= lowest - 1e-6) & (weights <= highest + 1e-6)
    assert (within | (weights == 0)).all()
    if mode.endswith("truncate"):
        assert (weights[scored] >= math.exp(-20) * 0.999).all()  # nothing is masked
    other = sampled._replace(train_logps=train.where(scored, -1.0), infer_logps=infer.where(scored, -9.0))
    elsewhere = CORRECTIONS[mode](other, **bounds)
    torch.testing.assert_close(weights, elsewhere, atol=0, rtol=0)  # what stands at other positions has no part


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # Each trajectory's geometric mean, 1.077 and 1.273, keeps the first one.
        ("token_truncate, geometric_mask(0.9, 1.1)", "2 0.25 1.25 1 | 0 0 0 0"),
        (["token_truncate(0.5, 3)", "geometric_mask(0.9, 1.5)"], "3 0.5 1.25 1 | 1.8 0.9 1 1"),
        (["token_truncate(0, 1.5)", "icepop", "tv_mask(0.04)"], "0 0 0 1 | 1.5 0 1 1"),
        # The weights are the first one's: r counts once.
        (["icepop", "ppo_clip(0.95, 1.3)"], "0 0 1.25 1 | 1.8 0 1 1"),
    ],
)
def test_several_corrections_by_hand(tmp_path, value, expected):
    made = correction_of(make_config(tmp_path, constraint="none", deployment_scheme="fp8", rollout_correction=value))
    torch.testing.assert_close(made(TOKENS), matrix(expected), atol=1e-6, rtol=1e-5)


def test_a_correction_goes_by_the_penalised_advantages():
    """Â − δ is −0.25, 0.05, 0.25 and −1.24, −1.05: the ratio of 4 is pushed down, so that PPO does not clip it."""
    settings = ConstraintSettings(constraint="static", lambda_init=1.0, rollout_correction="ppo_clip")
    constrained = Constraint(settings).apply(TOKENS._replace(advantages=torch.tensor([0.35, -1.0])))
    torch.testing.assert_close(constrained.weights, torch.tensor([[4, 0.25, 0, 1], [1.8, 0.9, 1, 1]]))
    expected = torch.tensor([[4 * -0.25, 0.25 * 0.05, 0.0, 0.35], [1.8 * -1.24, 0.9 * -1.05, -1.0, -1.0]])
    torch.testing.assert_close(constrained.columns["advantages"], expected)


# --- statistics


def test_masked_tokens_leave_the_batch_discrepancy_and_the_penalty():
    delta = (TRAIN.exp() - INFER.exp()).abs()  # 0.6, 0.3, 0.1; 0.24, 0.05
    penalty = delta.where(SCORED, 0.0) * torch.tensor([[1.0], [-1.0]])  # a signed form's may be negative
    weights = token_mask(TOKENS)  # masks the first token
    reductions = ("sequence", "sequence", "token")
    ranks = [BatchStatistics(ConstraintSettings(batch_reduction=reduction)) for reduction in reductions]
    for row, statistics in enumerate(ranks[:2]):
        rows = slice(row, row + 1)
        part = SampledTokens(*(values[rows] for values in TOKENS[:4]))
        statistics.add(part, penalty[rows], weights[rows])
    ranks[2].add(TOKENS, penalty, weights)
    sums = sums_of_two(ranks[:2])
    assert ranks[0].reduce(lambda local: local) is None  # it was all taken
    assert sums["tokens"] == 5
    assert mean_discrepancy(sums) == pytest.approx((0.4 / 2 + 0.29 / 2) / 2)
    metrics = batch_metrics(sums, LagrangeMultiplier(init=0.5))
    assert metrics["discrepancy/mean_all"] == pytest.approx((1.0 / 3 + 0.29 / 2) / 2)
    assert metrics["discrepancy/probs_diff_max"] == pytest.approx(0.6)  # of all scored tokens
    assert metrics["lagrangian/penalty_mean"] == pytest.approx(0.5 * (0.4 - 0.29) / 5)
    assert metrics["lagrangian/penalized_fraction"] == pytest.approx(4 / 5)
    expected = {"masked_fraction": 1 / 5, "weight_mean": (0.25 + 1.25 + 1.8 + 0.9) / 5}
    found = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("correction/")}
    assert found == pytest.approx(expected)
    by_token = ranks[2].reduce(lambda local: local)
    assert mean_discrepancy(by_token) == pytest.approx(0.69 / 4)
    assert batch_metrics(by_token)["discrepancy/mean_all"] == pytest.approx(1.29 / 5)


# --- against TRL's own


def on_both_sides(call, completions, logprobs):
    """Some tokens are rarer to the engine than to the random model, others less rare, and one it could not score."""
    for row in logprobs:
        row[:] = [value - 3.0 for value in row]
    logprobs[0][0] = math.nan


def train_in_trl(trainer, **bounds):
    """Trains TRL's trainer with its own importance sampling, on rollouts that it takes for vLLM's."""
    trainer.use_vllm, trainer._last_loaded_step = True, 0  # no engine has to be there: its weights are in place
    trainer.vllm_importance_sampling_correction = True
    for name, value in bounds.items():  # TRL writes those of its configuration to the trainer
        setattr(trainer, f"vllm_importance_sampling_{name}", value)
    trainer.train()


@pytest.mark.parametrize(
    ("loss_type", "mode", "steps"),
    # With LUSPO's ratio of a trajectory weights of tokens are refused.
    [
        ("grpo", "token_truncate", ALIGNED),
        ("dapo", "sequence_mask", MISALIGNED),
        ("cispo", "sequence_truncate", ALIGNED),
        ("luspo", "sequence_truncate", MISALIGNED),
        ("dr_grpo", "token_mask", MISALIGNED),
    ],
)
def test_loss_and_gradients_are_those_of_trls_own_correction(tmp_path, loss_type, mode, steps):
    lower, upper = (0.2, 3.0) if mode.startswith("token") else (0.02, 20.0)
    shared = {
        "constraint": "none",
        "max_steps": 2 if steps is MISALIGNED else 1,
        "learning_rate": 0.1,
        "optim": "sgd",  # a step is the gradient
        "max_grad_norm": 0.0,
        "loss_type": loss_type,
        "epsilon": 0.24,
        "epsilon_high": 5.0 if loss_type == "cispo" else None,
        "beta": 0.0,
        "importance_sampling_level": "sequence" if loss_type == "luspo" else "token",
        **steps,
    }
    ours_alone = {"rollout_correction": mode, "rollout_correction_max": upper, "rollout_correction_min": lower}
    ours = make_trainer(tmp_path, rollout_func=Rollouts(longest=2, edit=on_both_sides), **shared, **ours_alone)
    ours.train()
    rollouts = Rollouts(longest=2, edit=on_both_sides)
    theirs = make_trainer(tmp_path, kind=GRPOTrainer, rollout_func=rollouts, **shared)
    train_in_trl(theirs, mode=mode, clip_max=upper, clip_min=lower)
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-4, abs=1e-6)
    start = make_model()
    for name, parameter in ours.model.named_parameters():
        before, after = start.get_parameter(name), theirs.model.get_parameter(name)
        torch.testing.assert_close(parameter - before, after - before, rtol=1e-3, atol=1e-6)
    assert any(value > 0 for value in logged(theirs, "grad_norm"))
    assert (sum(logged(ours, "correction/masked_fraction")) > 0) == mode.endswith("mask")


# --- in training


def test_a_batch_that_is_masked_whole_teaches_nothing_and_leaves_lambda(tmp_path, caplog):
    def unlike(call, completions, logprobs):
        for row in logprobs:
            row[:] = [-1e-3] * len(row)  # the engine was sure of all that the trainer finds rare

    options = {"max_steps": 2, "rollout_correction": "geometric_mask"}
    trainer = make_trainer(tmp_path, rollout_func=Rollouts(edit=unlike), **options)
    trainer.train()
    assert logged(trainer, "lagrangian/lambda") == [0.1, 0.1]
    assert logged(trainer, "correction/masked_fraction") == [1, 1]
    assert not logged(trainer, "discrepancy/mean")
    assert all(mean > 0.5 for mean in logged(trainer, "discrepancy/mean_all"))
    assert logged(trainer, "grad_norm") == [0, 0]
    assert "masks all tokens" in caplog.text
