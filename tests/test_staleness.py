"""Weights that lag: when new ones go to the engine, what an evaluation sees, what a checkpoint keeps."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from dc_trl import DCGRPOTrainer
from dc_trl.constraint.settings import ConstraintSettings
from dc_trl.constraint.thresholds import FAR, drift_warning
from dc_trl.run.manifest import checkpoint_defect
from dc_trl.sampling.replica import Replica

from . import helpers
from .helpers import (
    MISALIGNED,
    On,
    Rollouts,
    assert_same_run,
    corrected_tokens,
    logged,
    make_prompts,
    read_json,
)


SCHEME = "fp8"
EVALUATED = {"eval_steps": 3, "num_generations_eval": 1, "per_device_eval_batch_size": 2}


def make_trainer(output_dir, *callbacks, **options):
    options = {"deployment_scheme": SCHEME, "weight_sync_steps": 4, "max_steps": 10} | options
    return helpers.make_trainer(output_dir, callbacks=list(callbacks), eval_dataset=make_prompts(2), **options)


def weights_of(replica):
    return torch.cat([tensor.detach().double().flatten() for tensor in replica.model.state_dict().values()])


class Weights(TrainerCallback):
    """The policy at each step as a fresh replica would hold it, and what the run's replica sampled with there."""

    trainer: DCGRPOTrainer

    def __init__(self):
        self.present, self.sampled, self.evaluated = {}, {}, {}

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.present[state.global_step] = weights_of(Replica(model, SCHEME))

    def on_step_end(self, args, state, control, **kwargs):
        self.sampled[state.global_step - 1] = weights_of(self.trainer.replica)

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated[state.global_step] = weights_of(self.trainer.replica)

    def sampled_by(self):
        """For each step the one whose weights sampled in it."""
        assert all(not torch.equal(self.present[0], tensor) for step, tensor in self.present.items() if step)
        return [
            next(step for step, present in self.present.items() if torch.equal(sampled, present))
            for sampled in self.sampled.values()
        ]


def watched(output_dir, **options):
    weights = Weights()
    weights.trainer = make_trainer(output_dir, weights, **options)
    weights.trainer.train()
    return weights


# --- the schedule ----------------------------------------------------------------------------------------------------


def test_new_weights_come_every_so_many_steps(tmp_path):
    weights = watched(tmp_path)
    assert weights.sampled_by() == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    trainer = weights.trainer
    assert logged(trainer, "sync/age") == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert logged(trainer, "sync/count") == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    # The lag is in δ: a replica in step differs from the policy by its format alone.
    means = logged(trainer, "discrepancy/mean")
    assert min(means[3], means[7]) > 1.5 * max(means[0], means[4], means[8])


def test_without_a_lag_nothing_is_logged_of_it(tmp_path):
    weights = watched(tmp_path, weight_sync_steps=1, max_steps=3)
    assert weights.sampled_by() == [0, 1, 2]
    assert not [name for row in weights.trainer.state.log_history for name in row if name.startswith("sync/")]
    split = watched(tmp_path, weight_sync_steps=1, max_steps=3, discrepancy_split=True)
    assert logged(split.trainer, "sync/age") == [0, 0, 0]


def test_several_steps_on_a_generation_batch(tmp_path):
    """New weights are due after three steps, and come with the first batch that is sampled from there on."""
    options = MISALIGNED | {"weight_sync_steps": 3, "max_steps": 8}
    weights = watched(tmp_path, **options)
    assert weights.sampled_by() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert logged(weights.trainer, "sync/age") == [0, 2, 0, 2]


def test_a_second_training_begins_with_present_weights(tmp_path):
    weights = watched(tmp_path, max_steps=6)  # the last weights that the first one sends are of step 4
    weights.trainer.train()
    assert weights.sampled_by() == [0, 0, 0, 0, 4, 4]
    assert logged(weights.trainer, "sync/age") == [0, 1, 2, 3, 0, 1]


# --- evaluation and checkpoints --------------------------------------------------------------------------------------


def measure(trainer):
    """Measures the present policy after every step, without a random number."""
    trainer.add_callback(On("on_step_end", lambda state, **_: trainer.deployed_completion_ids([[20, 21, 22]])))


KILLED = {"save_steps": 1, "lambda_lr": 0.5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), **KILLED)
    measure(trainer)
    trainer.train()
    return trainer


def test_an_evaluation_sees_the_present_weights_and_training_goes_on_with_its_own(tmp_path, whole):
    plain = make_trainer(tmp_path / "plain", lambda_lr=KILLED["lambda_lr"])
    plain.train()
    assert_same_run(whole, plain)

    weights = watched(tmp_path / "evaluated", **EVALUATED)
    assert set(weights.evaluated) == {3, 6, 9, 10}
    for step in (3, 6, 9):
        assert torch.equal(weights.evaluated[step], weights.present[step])
    assert weights.sampled_by() == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]


@pytest.mark.parametrize("batches", [{}, MISALIGNED])
def test_the_correction_gets_the_age_of_each_batch(tmp_path, batches):
    """With two steps a batch, the batch is corrected as it is sampled, for both."""
    options = {"constraint": "none", "rollout_correction": "ppo_clip", "max_steps": 6, "save_steps": 1}
    options |= EVALUATED | batches
    whole = make_trainer(tmp_path, **options)
    training = [tokens.age for tokens in corrected_tokens(whole)]
    resumed, checkpoint = make_trainer(tmp_path / "resumed", **options), str(tmp_path / "checkpoint-2")
    rest = [tokens.age for tokens in corrected_tokens(resumed, resume_from_checkpoint=checkpoint)]
    # Two evaluations, after steps 3 and 6, with the present weights.
    assert training == ([0, 2, 0, 0, 0] if batches else [0, 1, 2, 0, 3, 0, 1, 0])
    assert rest == training[1 if batches else 2 :]
    assert_same_run(resumed, whole, after=2)


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.long) for step in (4, 6))])
def test_a_resumed_run_samples_with_the_weights_of_the_one_that_was_killed(tmp_path, whole, step):
    """Bit for bit; also where the engine held the weights of an evaluation when the run was saved."""
    checkpoint = Path(whole.args.output_dir, f"checkpoint-{step}")
    kept = read_json(checkpoint / "dc_grpo_state.json")["weight_sync"]["kept"]
    assert kept == (checkpoint / "sampler").exists()
    assert kept == (step % 4 != 0)  # where new ones are due, the checkpoint's own will do
    resumed = make_trainer(tmp_path, **KILLED)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_run(resumed, whole, after=step)


def test_a_resumed_run_goes_by_its_own_number_of_steps(tmp_path):
    """Weights of three steps ago are too old where new ones are due after two."""
    options = {"save_steps": 3, "max_steps": 3}
    make_trainer(tmp_path, **options).train()
    resumed = make_trainer(tmp_path, weight_sync_steps=2, **options | {"max_steps": 7})
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "sync/age") == [0, 1, 2, 0, 1, 0, 1]


def test_a_checkpoint_without_the_weights_that_sample_is_not_whole(tmp_path):
    make_trainer(tmp_path, save_steps=2, max_steps=2).train()
    checkpoint = tmp_path / "checkpoint-2"
    assert checkpoint_defect(checkpoint) is None
    weights = checkpoint / "sampler" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert checkpoint_defect(checkpoint).startswith(f"holds sampler/model.safetensors with {len(whole) // 2:,} bytes")
    shutil.rmtree(weights.parent)
    assert checkpoint_defect(checkpoint).startswith("holds no sampler/")


# --- the warning far from the sampler --------------------------------------------------------------------------------


def warning_of(form, correction, whole, age, lag=None, engine=None, target="all", **options):
    fields = {"rollout_correction": correction, "rollout_correction_target": target if form is None else "all"}
    if form is not None:
        fields |= {"constraint": "static", "constraint_form": form, "constraint_target": target}
    metrics = {"discrepancy/k3_kl": whole, "discrepancy/lag_k3_kl": lag, "discrepancy/engine_k3_kl": engine}
    known = {name: k3 for name, k3 in metrics.items() if k3 is not None}
    return drift_warning(ConstraintSettings(**fields), known, age, **options)


def test_a_lag_is_judged_by_what_the_weights_did():
    """A deep model's whole k3 is large by rounding, and says nothing of the lag."""
    for correction in ("none", "token_truncate", "icepop"):
        assert warning_of(None, correction, 0.3, 3, lag=0.01, engine=0.3) is None
        message = warning_of(None, correction, 0.3, 3, lag=0.0123, engine=0.3)
        assert message.startswith("constraint='none' with discrepancy/lag_k3_kl=0.0123, above 0.01, ")
        assert "recipe='lag'" in message
        assert warning_of(None, correction, 5.0, 0) is None  # in step nothing lags
        assert "discrepancy/k3_kl=nan" in warning_of(None, correction, math.nan, 3)  # not known to be low
    assert warning_of(None, "none", 0.01, 3) is None
    message = warning_of(None, "none", 0.0123, 3)
    assert message.startswith("constraint='none' with discrepancy/k3_kl=0.0123, above 0.01, ")
    assert "discrepancy_split=True" in message
    # A loss that clips the ratio to the sampler has one of the remedies.
    assert warning_of(None, "none", 0.0123, None, clips=True) is None


@pytest.mark.parametrize(
    ("form", "correction", "named", "bound", "remedy"),
    [
        ("log_ratio", "none", "constraint_form='log_ratio'", 0.003, "constraint_target='lag'"),
        ("quadratic", "ppo_clip", "constraint_form='quadratic'", 0.003, "constraint_target='lag'"),
        (None, "ppo_clip", "rollout_correction='ppo_clip'", 0.001, "rollout_correction_target='lag'"),
    ],
)
def test_a_remedy_that_acts_on_the_number_format_is_warned_of(form, correction, named, bound, remedy):
    """By the engine's part, which is the whole difference in step, and unknown with a lag that nothing splits."""
    assert warning_of(form, correction, 5.0, 3) is None
    assert warning_of(form, correction, 5.0, 3, lag=5.0, engine=bound) is None
    assert warning_of(form, correction, bound, 0) is None
    above = 1.1 * bound
    message = warning_of(form, correction, above, 0)
    assert message.startswith(f"{named} with discrepancy/k3_kl in step={above:.3g}, above {bound:g}, ")
    assert remedy in message
    message = warning_of(form, correction, 5.0, 3, lag=5.0, engine=above)
    assert message.startswith(f"{named} with discrepancy/engine_k3_kl={above:.3g}, above {bound:g}, ")
    assert warning_of(form, correction, 5.0, 3, lag=5.0, engine=5.0, target="lag") is None


def test_the_papers_form_is_judged_by_what_it_acts_on():
    for age in (0, 3, None):
        assert warning_of("injected", "none", 0.01, age) is None
        message = warning_of("injected", "none", 0.0123, age)
        assert message.startswith("constraint_form='injected' with discrepancy/k3_kl=0.0123")
    assert warning_of("injected", "none", 5.0, 3, lag=0.01, engine=5.0, target="lag") is None
    assert warning_of("injected", "none", 5.0, 3, lag=0.0123, engine=5.0, target="lag") is not None


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ({"constraint": "static"}, 1),
        ({"constraint": "none", "rollout_correction": "ppo_clip"}, 1),
        ({"constraint": "none", "rollout_correction": "token_truncate"}, 0),
    ],
)
def test_a_run_is_warned_once(tmp_path, caplog, options, warnings):
    trainer = helpers.make_trainer(tmp_path, rollout_func=Rollouts(), **options)  # random log-probabilities
    trainer.train()
    assert min(logged(trainer, "discrepancy/k3_kl")) > 0.01
    assert sum("with discrepancy/k3_kl" in message for message in caplog.messages) == warnings


@pytest.mark.parametrize(
    ("learning_rate", "remedy", "warned"),
    [(1e-7, {}, None), (1e-2, {}, "lag_k3_kl"), (1e-7, {"rollout_correction": "ppo_clip"}, "k3_kl in step")],
)
def test_a_tall_model_is_judged_by_the_lag_alone(tmp_path, caplog, learning_rate, remedy, warned):
    """Its k3 in step is far above the bounds that hold for two layers."""
    trainer = helpers.make_trainer(
        tmp_path,
        helpers.make_tall_model(),
        lambda completion_ids, **kwargs: [sum(ids) % 7.0 for ids in completion_ids],
        constraint="none",
        discrepancy_split=True,
        deployment_scheme=SCHEME,
        weight_sync_steps=2,
        max_steps=2,
        learning_rate=learning_rate,
        per_device_train_batch_size=8,
        **remedy,
    )
    trainer.train()
    assert logged(trainer, "discrepancy/k3_kl")[0] > 10 * FAR
    found = [text for text in caplog.messages if "which_one.md" in text]
    assert [f"discrepancy/{warned}=" in text for text in found] == [True] * (warned is not None)
