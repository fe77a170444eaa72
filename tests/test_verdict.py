"""A run that ends has not learned for that: what is said after its first generation batch, and at its end."""

import math
import random
import statistics

import pytest

from dc_trl.callbacks.before_and_after import BeforeAndAfter
from dc_trl.command.finish import summarize
from dc_trl.constraint.settings import ConstraintSettings
from dc_trl.constraint.thresholds import drift_warning
from dc_trl.records.estimators import paired_difference
from dc_trl.records.page import write_report
from dc_trl.records.runs import Run
from dc_trl.records.tables import verdict
from dc_trl.records.verdict import first_batch, verdict_of

from .helpers import Rollouts, distinct_characters, make_trainer


def zero_reward(completions, **kwargs):
    return [0.0] * len(completions)


def run_of(rewards, k3=0.001, settings=None, **others):
    rows = [
        {"step": step, "reward": reward, "frac_reward_zero_std": 0.0, "completions/clipped_ratio": 0.0}
        | ({} if k3 is None else {"discrepancy/k3_kl": k3})
        | others
        for step, reward in enumerate(rewards, start=1)
    ]
    return Run("run", [*rows, {"step": len(rewards), "train_runtime": 1.0}], settings or {})


# --- at the end ---------------------------------------------------------------------------------------------------


def noisy(first, last, steps=40, spread=0.05):
    rng = random.Random(0)
    return [first + (last - first) * step / (steps - 1) + rng.gauss(0, spread) for step in range(steps)]


@pytest.mark.parametrize(
    ("rewards", "says", "worth_serving"),
    [
        (noisy(0.2, 0.8), "The run learned", True),
        (noisy(0.8, 0.2), "The run lost reward", False),
        (noisy(0.5, 0.5), "not shown to have learned", True),
        ([0.2, 0.9], "too few steps", True),
        ([math.nan] * 5, "no completion earned a reward", False),
    ],
)
def test_learning_by_the_first_and_the_last_rewards(rewards, says, worth_serving):
    lines, serve = verdict_of(run_of(rewards))
    assert says in lines[0]
    assert serve == worth_serving
    if not math.isnan(rewards[0]):
        ends = max(1, min(10, len(rewards) // 2))
        for mean in (statistics.fmean(rewards[:ends]), statistics.fmean(rewards[-ends:])):
            assert f"{mean:.3g}" in lines[0]


def test_what_keeps_a_run_from_learning_is_said():
    lines, serve = verdict_of(run_of([0.0] * 20, frac_reward_zero_std=1.0))
    assert ("Nothing was learned" in lines[0], serve) == (True, False)
    assert "max_completion_length" not in " ".join(lines)
    lines, _ = verdict_of(run_of(noisy(0.2, 0.8), **{"completions/clipped_ratio": 0.75}))
    assert "75%" in lines[1]
    assert "max_completion_length" in lines[1]
    assert verdict_of(Run("run", [{"step": 0, "train_runtime": 1.0}])) == (
        ["No optimizer step was made: nothing was trained."],
        False,
    )


def test_a_policy_that_its_rate_has_destroyed_is_neither_well_nor_to_be_served():
    """The quickstart at ten times its rate: what is cut off, and a small mismatch, are not what is to be repaired."""
    rewards = [0.36, 0.06, 0.0, 0.0, 0.008, 0.0, 0.008] + [0.0] * 22
    run = run_of(rewards, **{"learning_rate": 1e-3, "completions/clipped_ratio": 0.9})
    for step, row in enumerate(run.history[:-1]):
        row["entropy"] = 0.1 + 0.03 * step
    ((line,), serve) = verdict_of(run)
    assert not serve
    assert all(words in line for words in ("learning_rate", "0.001", "reward from 0.36 to 0", "entropy from 0.1"))
    assert "weight_sync_steps" not in line
    for row in run.history[:-1]:
        row |= {"sync/age": 7.0, "lagrangian/penalty_mean": 0.2}
    ((line,), _) = verdict_of(Run("run", run.history, run.settings))
    assert line.index("weight_sync_steps") < line.index("lambda_max") < line.index("learning_rate")
    assert "up to 7)" in line
    # A prompt that is solved by chance in the first batch; without rewards the gradient is that of the KL term alone.
    rare = run_of([0.02] + [0.0] * 20)
    for step, row in enumerate(rare.history[:-1]):
        row |= {"entropy": 0.1, "grad_norm": 0.3 if step == 0 else 0.001, "kl": 1e-4 * step}
    assert "learning_rate" not in verdict_of(rare).lines[0]
    # Gradients that are not finite any more.
    broken = run_of(noisy(0.2, 0.8))
    for row in broken.history[-5:-1]:
        row["grad_norm"] = math.nan
    lines, serve = verdict_of(broken)
    assert ("not finite" in lines[0], serve) == (True, False)


@pytest.mark.parametrize("k3", [math.nan, math.inf])
def test_a_mismatch_that_is_not_a_number_is_not_said_to_be_small(k3):
    run = run_of([0.5] * 20)
    for row in run.history[-9:-1]:
        row["discrepancy/k3_kl"] = k3
    assert "change nothing" not in verdict_of(run).lines[-1]
    lagging = run_of([0.5] * 20, 0.1, **{"sync/age": 4.0, "discrepancy/lag_k3_kl": k3})
    assert "above 0.01" in verdict_of(lagging).lines[1]
    assert drift_warning(ConstraintSettings(), {"discrepancy/k3_kl": k3, "discrepancy/lag_k3_kl": k3}, 1)


def test_a_difference_that_is_not_a_number_is_not_shown():
    nan = [[math.nan, 1.0, 0.0, 1.0]]
    found = paired_difference(nan, [[1.0, 1.0, 1.0, 0.0]])
    assert verdict(found) == "not shown to differ"


@pytest.mark.parametrize(
    ("k3", "others", "says"),
    [  # the bounds of docs/which_one.md
        (0.0049, {}, "below 0.005"),
        (0.0051, {}, "above 0.005"),
        (0.3, {"sync/age": 1, "discrepancy/lag_k3_kl": 0.0019}, "below 0.002"),  # whatever a deep model has in step
        (0.3, {"sync/age": 1, "discrepancy/lag_k3_kl": 0.0021}, "above 0.002"),
        (0.3, {"sync/age": 1, "discrepancy/lag_k3_kl": 0.0101}, "above 0.01"),
        (0.3, {"sync/age": 1}, "discrepancy_split=True"),
        (None, {}, "not measured"),
    ],
)
def test_the_mismatch_is_read_by_the_bounds_of_the_study(k3, others, says):
    assert says in verdict_of(run_of([0.5] * 4, k3, **others)).lines[1]


@pytest.mark.parametrize(
    ("of_lag", "says"), [(0.0, "together. Set"), (0.006, "lag adds 0.0062, above 0.002"), (0.2, "above 0.01")]
)
def test_batches_in_step_tell_the_engines_part_of_a_run_that_lags(of_lag, says):
    """A deep model in FP8, with new weights every four steps: k3 is 0.05 by its engine alone."""
    rng = random.Random(0)
    run = run_of([0.5] * 40, 0.0)
    for step, row in enumerate(run.history[:-1]):
        row |= {"sync/age": step % 4, "discrepancy/k3_kl": 0.05 + rng.gauss(0, 0.001) + of_lag * (step % 4 > 0)}
    _, lag, engine = verdict_of(run).lines
    assert says in lag
    assert (" 0.05 in step. " in lag) == (of_lag > 0)
    assert "The engine's part is k3 0.05 nats, above 0.005" in engine


def test_the_lag_is_read_from_batches_that_lag():
    """Every fourth batch is in step, with a lag of exactly 0."""
    rows = [
        {"step": step, "reward": 0.5, "discrepancy/k3_kl": 0.1, "sync/age": step % 4, "discrepancy/lag_k3_kl": k3}
        for step, k3 in enumerate([0.0, 0.003, 0.004, 0.005] * 5)
    ]
    assert "k3 0.004 nats" in verdict_of(Run("run", rows)).lines[1]
    for row in rows:
        row["discrepancy/lag_k3_kl"] = 0.0
    assert "k3 0 nats" in verdict_of(Run("run", rows)).lines[1]


@pytest.mark.parametrize("zero", [False, True])
def test_a_run_ends_with_its_verdict_and_its_report_begins_with_it(tmp_path, capsys, zero):
    reward = zero_reward if zero else distinct_characters
    trainer = make_trainer(tmp_path / "run", reward=reward, deployment_scheme="fp8", export_run=True, max_steps=4)
    trainer.add_callback(BeforeAndAfter(trainer))
    trainer.train()
    printed = capsys.readouterr().out.splitlines()
    (first,) = [line for line in printed if line.startswith(("Nothing was learned", "There are too few steps"))]
    assert first.startswith("Nothing") == zero
    summarize(trainer)
    assert any(line.startswith("Serve it") for line in capsys.readouterr().out.splitlines()) != zero
    page = write_report(tmp_path / "run", tmp_path / "page.html")
    text = page.read_text()
    assert 0 < text.index("Verdict") < text.index(first[:20]) < text.index("What came out")


# --- after the first generation batch -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "clipped", "says"),
    [
        ([[0.0, 1.0, 0.0, 0.0]], 0.0, []),
        ([[0.0, 0.0, 1.0, 1.0]], 0.0, ["one reward"]),
        ([[0.0] * 4], 0.0, ["the reward 0,"]),
        ([[0.0] * 4], 1.0, ["100%", "max_completion_length=8", "reward 0,"]),
        ([[math.nan] * 4], 0.0, ["all returned None"]),
        ([[1.0, math.nan, math.nan, 1.0]], 0.0, ["the reward 1,"]),
        # Normalised one by one, functions whose sum does not spread teach all the same.
        ([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]], 0.0, []),
        ([[0.0, 0.0, 1.0, 1.0], [2.0] * 4], 0.0, ["one reward"]),
    ],
)
def test_the_first_batch_by_hand(columns, clipped, says):
    warning = first_batch(columns, 2, clipped, 8)
    assert (warning is None) == (not says)
    assert all(words in warning for words in says)
    assert warning is None or "\n" not in warning


@pytest.mark.parametrize(("reward", "says"), [(distinct_characters, None), (zero_reward, "the reward 0,")])
def test_a_run_is_warned_after_its_first_batch_and_once(tmp_path, caplog, reward, says):
    trainer = make_trainer(tmp_path, reward=reward, rollout_func=Rollouts(), max_steps=2)
    for _ in range(2):  # a second training looks again
        caplog.clear()
        trainer.train()
        warned = [record.message for record in caplog.records if "first generation batch" in record.message]
        assert len(warned) == (says is not None)
        assert all(says in message for message in warned)
