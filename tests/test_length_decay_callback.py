"""The length-decay learning rate within trainers: ours, TRL's, and resumed."""

from pathlib import Path

import pytest
from PIL import Image
from transformers import TrainerCallback
from trl import GRPOTrainer

from dc_trl import DCGRPOTrainer, HistoryCallback, LengthDecayCallback
from dc_trl.records.runs import read_history

from . import helpers
from .helpers import (
    logged,
    make_model,
    make_prompts,
    refuses,
    steps_of,
)


class Lengths(TrainerCallback):
    """Plays the response lengths of a real run: a tiny model's own do not surge."""

    def __init__(self, curve):
        self._curve = curve

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "completions/mean_length" in logs:
            for lengths in (logs, state.log_history[-1]):
                lengths["completions/mean_length"] = self._curve[state.global_step - 1]


SURGE_AT_16 = [10.0] * 15 + [35.0] * 45  # period 29 (1.8 × 16 = 28.8)


def ranked(completions, **kwargs):
    """A reward that differs within every group, so that no step is without a gradient."""
    return [float(rank) for rank in range(len(completions))]


def make_trainer(output_dir, kind=DCGRPOTrainer, curve=None, model=None, **options):
    callbacks = [HistoryCallback()] if curve is None else [Lengths(curve), HistoryCallback()]
    # One epoch: in a second one TRL shuffles differently after a resume.
    options = {"max_steps": 4, "max_completion_length": 2, "train_dataset": make_prompts(64)} | options
    options |= {"deployment_scheme": "bf16", "callbacks": callbacks}
    return helpers.make_trainer(output_dir, model or make_model(16), ranked, kind, **options)


def decays(rows):
    """(step, metric, value) of every row of the length decay's own."""
    prefix = "length_decay/"
    return [
        (row["step"], name.removeprefix(prefix), value)
        for row in rows
        for name, value in sorted(row.items(), reverse=True)
        if name.startswith(prefix)
    ]


@pytest.mark.parametrize("kind", [DCGRPOTrainer, GRPOTrainer])
def test_any_trainer_trains_at_the_fixed_schedule(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind, max_steps=9)
    trainer.add_callback(LengthDecayCallback(trainer, decay_period=2))
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx(
        [0.01] + [0.005] * 2 + [0.0025] * 2 + [0.00125] * 2 + [1e-3] * 2
    )
    assert trainer.lr_scheduler.last_epoch == 9
    assert decays(trainer.state.log_history) == decays(read_history(tmp_path / "history.jsonl")) == [(0, "period", 2)]
    # The other rows keep all that TRL logs.
    assert len(logged(trainer, "reward")) == len(logged(trainer, "completions/mean_length")) == 9
    assert steps_of(trainer.state.log_history) == steps_of(trainer.state.log_history, "reward")


def surging(output_dir, resume_from=None):
    trainer = make_trainer(output_dir, curve=SURGE_AT_16, max_steps=32, save_steps=10)
    trainer.add_callback(LengthDecayCallback(trainer))
    trainer.train(resume_from)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return surging(tmp_path_factory.mktemp("whole"))


def test_the_surge_is_found_logged_and_drawn(whole):
    assert decays(whole.state.log_history) == [(20, "surge_step", 16), (20, "period", 29)]
    assert logged(whole, "learning_rate") == pytest.approx([0.01] * 28 + [0.005] * 4)
    with Image.open(Path(whole.args.output_dir, "run.png")) as figure:
        assert figure.height == 5 * 300  # two panels more than without length decay


@pytest.mark.parametrize("cut", [20, *(pytest.param(cut, marks=pytest.mark.long) for cut in (10, 30))])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, whole, cut):
    """Before the surge, when it is just found and not logged yet, and after a halving."""
    resumed = surging(tmp_path, f"{whole.args.output_dir}/checkpoint-{cut}")
    assert decays(resumed.state.log_history) == decays(whole.state.log_history)
    for name in ("learning_rate", "loss", "grad_norm"):
        assert logged(resumed, name) == logged(whole, name)
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"warmup_steps": 10}, ["warmup_steps=10", "warmup_steps=0"]),
        ({"logging_strategy": "no"}, ["logging_strategy='no'", "decay_period"]),
    ],
)
def test_settings_that_contradict_the_schedule_are_refused(tmp_path, overrides, words):
    trainer = make_trainer(tmp_path, **overrides)
    with refuses(ValueError, *words):
        LengthDecayCallback(trainer)


def test_a_run_and_its_schedule_start_at_the_same_step(tmp_path):
    trainer = make_trainer(tmp_path, save_steps=2, save_only_model=True)
    trainer.add_callback(LengthDecayCallback(trainer, decay_period=2))
    trainer.train()
    with refuses(ValueError, "at step 0 ", "at step 4:", "save_only_model=False"):
        trainer.train()
    # The refused training has set the checkpoints aside. TRL resumes without a scheduler; ours refuses before that.
    for kind, words in (
        (GRPOTrainer, ["at step 2 ", "at step 0:", "save_only_model=False"]),
        (DCGRPOTrainer, ["checkpoint-2'", "save_only_model=true", "model_name_or_path"]),
    ):
        trainer = make_trainer(tmp_path, kind)
        trainer.add_callback(LengthDecayCallback(trainer, decay_period=2))
        with refuses(ValueError, *words):
            trainer.train(resume_from_checkpoint=str(tmp_path / "earlier-checkpoint-2"))
