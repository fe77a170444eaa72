"""The collapse detectors on synthetic curves, and the alarm in trainers that collapse on purpose."""

import logging
import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from trl import RLOOConfig, RLOOTrainer

from dc_trl import DCGRPOTrainer, HistoryCallback
from dc_trl.callbacks.collapse import CollapseAlarmCallback, CollapseMonitor
from dc_trl.records.page import facts_table
from dc_trl.records.runs import read_history, read_run
from dc_trl.run.manifest import checkpoints

from .collapse_curves import alarms_in, collapse, healthy_run
from .helpers import SMALL_RUN, logged, make_config, make_model, make_prompts, make_tokenizer


def rung(rows, **options):
    """(signal, step, value, threshold, sound until) of every alarm, with windows of 5."""
    alarms = alarms_in(rows, **{"window": 5} | options)
    return [(a.signal, a.step, pytest.approx(a.value), pytest.approx(a.threshold), a.sound_until) for a in alarms]


def curve(metric, values):
    return [{metric: value} for value in values]


def jumped(metric, before, after):
    return rung(curve(metric, [before] * 20 + [after] * 20))


# --- rules by hand, with windows of 5: the median turns at the 3rd log of a jump, the alarm rings 4 logs later ------


def test_reward_by_hand():
    # First level 0.2, best 0.8: alarm at 0.8 - 0.3 * 0.8 = 0.56, without noise.
    rows = curve("reward", [0.2] * 5 + [0.8] * 15 + [0.57] * 20)
    assert rung(rows) == []
    rows = curve("reward", [0.2] * 5 + [0.8] * 15 + [0.39] * 20)
    # Half-way is passed at step 23, whose window begins at 19; so the log of step 18 is the last that was well.
    assert rung(rows) == [("reward", 27, 0.39, 0.56, 18)]
    # The doubt begins half-way, at 0.68, also where the threshold is passed ten logs later.
    rows[20:20] = curve("reward", [0.67] * 10)
    assert rung(rows) == [("reward", 37, 0.39, 0.56, 18)]


def test_a_best_reward_has_to_hold_for_a_window():
    for held, expected in ((4, []), (5, ["reward"])):  # so long is the median 0.8, too
        rows = curve("reward", [0.2] * 5 + [0.8] * held + [0.5] * 20)
        assert [alarm[0] for alarm in rung(rows)] == expected


def test_a_noisy_reward_by_hand():
    noisy = [0.55, 0.45] * 10
    two_sigma = 2 * 0.1 / (0.6745 * math.sqrt(2))  # of differences of 0.1; it is more than 0.3 · 0.55
    assert rung(curve("reward", noisy + [0.36, 0.35] * 4)) == []
    assert rung(curve("reward", noisy + [0.33, 0.32] * 4)) == [("reward", 27, 0.33, 0.55 - two_sigma, 18)]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_norm_that_is_not_finite(value):
    rows = curve("grad_norm", [0.2] * 3 + [value] + [0.2] * 3)
    assert [(a.signal, a.step, a.sound_until) for a in alarms_in(rows, window=5)] == [("grad_norm", 4, 3)]
    # A loss scale that is searched overflows now and then.
    assert alarms_in(rows, window=5, fp16=True) == []
    assert [a.step for a in alarms_in(curve("grad_norm", [0.2] * 3 + [value] * 9), window=5, fp16=True)] == [8]


def test_mismatch_by_hand():
    for metric in CollapseMonitor.MISMATCH:
        assert jumped(metric, 1e-3, 4.9e-3) == []
        assert jumped(metric, 1e-3, 5.1e-3) == [("mismatch", 27, 5.1e-3, 5e-3, 18)]
        assert jumped(metric, 1e-3, 0.9e-4) == []  # a policy that becomes sure has less of it
        # The usual level counts when it is below the early one: 8.0 at first, 0.2 for long.
        alarms = rung(curve(metric, [8.0] * 5 + [0.2] * 40 + [1.1] * 20))
        assert [alarm[:2] for alarm in alarms] == [("mismatch", 52)]
        # A signal rings once, whatever follows.
        assert len(rung(curve(metric, ([0.2] * 15 + [9.0] * 20) * 3 + [math.nan] * 9))) == 1


def test_streaks_by_hand():
    pinned = curve("lagrangian/lambda", [0.5] * 3 + [1.0] * 9 + [0.9] + [1.0] * 10)
    assert rung(pinned) == [("lambda", 23, 1.0, 1.0, 13)]
    assert rung(pinned, lambda_max=2.0) == rung(pinned, lambda_max=None) == []
    unanimous = curve("frac_reward_zero_std", [0.5] * 3 + [1.0] * 9 + [0.9] + [0.995] * 10)
    assert rung(unanimous) == [("no_signal", 23, 0.995, 0.99, 13)]


@pytest.mark.parametrize("metric", ["reward", "discrepancy/mean"])
@given(st.data())
def test_spikes_shorter_than_half_a_window_do_not_ring(metric, data):
    values = [0.5] * 60
    # The first log of the reward is that of the policy as it began, and counts by itself.
    start = data.draw(st.integers(1 if metric == "reward" else 0, 50))
    for index in range(start, start + data.draw(st.integers(1, 4))):
        values[index] = data.draw(st.floats(0, 1e6))
    assert alarms_in(curve(metric, values)) == []


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=60))
@example([0.0, 1.0, 5e-324])  # a tenth of it is 0
def test_missing_values_do_not_count(values):
    def signals(rows):
        return [(a.signal, a.value, a.reference, a.threshold) for a in alarms_in(rows, window=3)]

    present = [value for value in values if value is not None]
    for metric in ("reward", "discrepancy/mean"):
        assert signals(curve(metric, values)) == signals(curve(metric, present))


@pytest.mark.parametrize("metric", ["reward", "discrepancy/mean"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_known_counts_as_trouble(metric, value):
    assert alarms_in(curve(metric, [0.5] * 9 + [value] * 4 + [0.5] * 9), window=5) == []
    assert [a.step for a in alarms_in(curve(metric, [0.5] * 9 + [value] * 9), window=5)][:1] == [14]


def test_a_policy_that_is_ruined_within_the_window_has_no_step_that_was_well():
    """The rewards of the quickstart at ten times its rate; the mismatch rises later, from a level of its own."""
    rewards = [0.36, 0.06, 0.0, 0.0, 0.008, 0.0, 0.008] + [0.0] * 33
    rows = [{"reward": reward, "discrepancy/mean": 0.001 + 0.002 * step} for step, reward in enumerate(rewards)]
    alarms = {alarm.signal: alarm for alarm in alarms_in(rows)}
    assert (alarms["reward"].step, alarms["reward"].reference) == (19, 0.36)
    assert [alarm.sound_until for alarm in alarms.values()] == [0] * len(alarms)
    assert "mismatch" in alarms
    assert not any("all was well" in str(alarm) for alarm in alarms.values())


@pytest.mark.parametrize("signal", ["reward", "mismatch"])
@pytest.mark.parametrize("length", [1, 20])
def test_a_collapse_is_found_and_its_onset_with_it(signal, length):
    for seed in range(4):
        if signal == "reward" and mean_reward(seed) < 0.3:
            continue  # a reward that never left its noise cannot fall from it
        alarms = {a.signal: a for a in alarms_in(collapse(healthy_run(seed, 300), signal, 200, length, seed))}
        assert 205 <= alarms[signal].step <= 260
        assert 180 <= alarms[signal].sound_until < 200 + length


def mean_reward(seed):
    rewards = [row["reward"] for row in healthy_run(seed, 200) if row["reward"] is not None]
    return sum(value for value in rewards if not math.isnan(value)) / len(rewards)


def test_a_rare_success_is_no_level_to_fall_from():
    """Of the 64 completions of a step 0.4 % are right, in all steps alike: most logs have no reward at all."""
    rng, rung = random.Random(0), 0
    for _ in range(40):
        rewards = [sum(rng.random() < 0.004 for _ in range(64)) / 64 for _ in range(100)]
        rung += bool(alarms_in(curve("reward", rewards)))
    assert rung <= 3


def test_healthy_runs_hardly_ever_ring():
    # docs/metrics.md: 65 of 1,000. A reward near 0 wanders by more than a third of itself.
    healthy = [seed for seed in range(16) if mean_reward(seed) >= 0.3]
    assert len(healthy) > 8
    assert sum(bool(alarms_in(healthy_run(seed))) for seed in healthy) <= 1


# --- in trainers -----------------------------------------------------------------------------------------------------

WINDOW = 3


def failing_after(step):
    """A reward that differs within each group and falls after so many batches."""
    calls = 0

    def reward(completions, **kwargs):
        nonlocal calls
        calls += 1
        level = 0.5 if calls <= step else 0.0
        return [level + 0.01 * rank for rank in range(len(completions))]

    return reward


def make_trainer(output_dir, kind=DCGRPOTrainer, reward=None, **overrides):
    options = {"max_steps": 16, "max_completion_length": 2, "learning_rate": 1e-5, **overrides}
    if kind is DCGRPOTrainer:
        config = make_config(output_dir, **{"deployment_scheme": "bf16"} | options)
    else:
        config = RLOOConfig(str(output_dir), **SMALL_RUN | {"beta": 0.0} | options)
    return kind(
        model=make_model(16),
        reward_funcs=reward or failing_after(8),
        args=config,
        train_dataset=make_prompts(64),
        processing_class=make_tokenizer(),
        callbacks=[HistoryCallback()],
    )


def add_alarm(trainer, **options):
    callback = CollapseAlarmCallback(trainer, **{"window": WINDOW} | options)
    trainer.add_callback(callback)
    return callback


def marks(rows):
    return [(row["step"], name) for row in rows for name in row if name.startswith("collapse/")]


@pytest.mark.parametrize("kind", [DCGRPOTrainer, RLOOTrainer])
def test_any_trainer_warns_once_and_goes_on(tmp_path, kind, caplog):
    trainer = make_trainer(tmp_path, kind)
    callback = add_alarm(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    # Rewards fall from step 9 on; the median of 3 logs follows at 10, and must stay there for 3.
    assert marks(trainer.state.log_history) == [(12, "collapse/reward")]
    assert marks(read_history(tmp_path / "history.jsonl")) == [(12, "collapse/reward")]
    assert trainer.state.global_step == 16
    assert callback.stopped is None
    assert [record.levelname for record in caplog.records if "Collapse alarm" in record.message] == ["WARNING"]
    # The trainer's own rows keep all that it logs.
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 16
    assert all("reward" in row and "completions/mean_length" in row for row in rows)


def test_a_multiplier_at_its_bound(tmp_path):
    trainer = make_trainer(tmp_path, reward=failing_after(99), discrepancy_tolerance=0.0, lambda_lr=1e6, max_steps=12)
    callback = add_alarm(trainer)
    trainer.train()
    assert logged(trainer, "lagrangian/lambda")[:3] == [0.1, 1.0, 1.0]
    assert [(alarm.signal, alarm.step) for alarm in callback.alarms] == [("lambda", 7)]  # 6 logs at 1


@pytest.mark.parametrize(
    "fixed",
    [
        {"lambda_lr": 0.0, "lambda_max": 1.0},
        {"lambda_lr": 1e6, "lambda_min": 1.0, "lambda_max": 1.0},
        {"lambda_max": 1.0, "constraint": "static"},
    ],
)
def test_a_multiplier_that_cannot_move_is_at_no_bound(tmp_path, fixed):
    options = {"reward": failing_after(99), "discrepancy_tolerance": 0.0, "lambda_init": 1.0, "max_steps": 8}
    trainer = make_trainer(tmp_path, **options | fixed)
    callback = add_alarm(trainer)
    trainer.train()
    assert logged(trainer, "lagrangian/lambda") == [1.0] * 8
    assert callback.alarms == []


def test_a_stop_names_the_last_good_checkpoint(tmp_path, caplog):
    options = {"save_steps": 3, "max_steps": 20, "save_total_limit": 1, "export_run": True}
    trainer = make_trainer(tmp_path, **options)
    callback = add_alarm(trainer, stop=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 12
    assert callback.stopped is callback.alarms[0]
    assert callback.stopped.sound_until == 7
    # Step 9 was sampled by the weights after step 8. 6 is the newest checkpoint from before the trouble.
    assert callback.last_good == str(tmp_path / "checkpoint-6")
    assert f"resume_from_checkpoint={callback.last_good!r}" in caplog.text
    assert [*checkpoints(tmp_path)] == [12, 9, 6]  # of 9 nothing is known yet
    assert (tmp_path / "run.png").is_file()
    assert not (tmp_path / "deployment").exists()
    state = dict(facts_table(read_run(tmp_path)).rows)["state"]
    assert state == "ended by collapse_alarm/reward"
    assert marks(trainer.state.log_history) == [(12, "collapse/reward")]

    again = make_trainer(tmp_path, reward=failing_after(99), **options)
    alarm = add_alarm(again, stop=True)
    again.train(resume_from_checkpoint=callback.last_good)
    assert (again.state.global_step, alarm.stopped) == (20, None)
    # Its own λ and optimizer go on, as from the checkpoint itself: the first 6 rows are the first run's.
    assert logged(again, "lagrangian/lambda")[:6] == logged(trainer, "lagrangian/lambda")[:6]


def test_a_good_checkpoint_stays_that_is_known_to_be_good_late(tmp_path):
    """With one checkpoint a step and one to keep: that a step was well is known two steps later."""
    trainer = make_trainer(tmp_path, save_steps=1, save_total_limit=1)
    callback = add_alarm(trainer, stop=True)
    trainer.train()
    assert callback.stopped.sound_until == 7
    assert callback.last_good == str(tmp_path / "checkpoint-5")
    assert len(checkpoints(tmp_path)) == 3


@pytest.mark.long
def test_a_resumed_run_does_not_warn_again(tmp_path):
    """Also when the checkpoint is from the very step of the alarm."""
    options = {"save_steps": 4, "max_steps": 20}
    whole = make_trainer(tmp_path, **options)
    add_alarm(whole)
    whole.train()
    assert marks(whole.state.log_history) == [(12, "collapse/reward")]
    for step, expected in ((8, [12]), (12, []), (16, [])):
        resumed = make_trainer(tmp_path, reward=failing_after(8 - step), **options)
        callback = add_alarm(resumed, stop=True)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert [alarm.step for alarm in callback.alarms] == expected
        assert marks(resumed.state.log_history) == [(12, "collapse/reward")]
        assert resumed.state.global_step == (12 if expected else 20)
