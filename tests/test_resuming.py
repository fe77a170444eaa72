"""Which checkpoint a run goes on from, and what is said of the others."""

import json
import math
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dc_trl import DeploymentCheckpointCallback, HistoryCallback, LengthDecayCallback
from dc_trl.run.interruption import RunInterrupted, StopSignals
from dc_trl.run.manifest import checkpoint_defect, resumable_checkpoint, write_manifest
from dc_trl.run.resuming import load_saved_weights
from dc_trl.serving.errors import ServerError

from . import helpers
from .helpers import (
    MISALIGNED,
    ByStep,
    On,
    Rollouts,
    assert_same_run,
    assert_same_tensors,
    logged,
    make_experts,
    make_model,
    make_prompts,
    read_json,
    refuses,
    steps_of,
)


def make_trainer(output_dir, peft=None, rollouts=None, **options):
    options = {"save_steps": 1, "max_steps": 1, **options}
    return helpers.make_trainer(output_dir, peft_config=peft, rollout_func=rollouts or Rollouts(), **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint between two optimizer steps of one generation batch, so that rollouts are part of it."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = make_trainer(folder, **MISALIGNED)
    trainer.add_callback(DeploymentCheckpointCallback(trainer))
    trainer.train()
    return folder / "checkpoint-1"


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run" / "checkpoint-1")


def test_a_manifest_lists_every_file_and_tells_one_that_is_cut_short(checkpoint):
    listed = read_json(checkpoint / "manifest.json")["files"]
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert set(listed) == {name for name in files if not name.startswith(("deployment/", "manifest.json"))}
    (checkpoint / "notes.txt").write_text("the user's")
    (checkpoint / "deployment" / "model.safetensors").write_bytes(b"")
    assert checkpoint_defect(checkpoint) is None
    for name in listed:
        whole = (checkpoint / name).read_bytes()
        tipped = whole[:-1] + bytes([whole[-1] ^ 1])  # a bit
        for damaged in (whole[:-1], whole + b" ", tipped):
            (checkpoint / name).write_bytes(damaged)
            assert name in checkpoint_defect(checkpoint)
        assert checkpoint_defect(checkpoint, contents=False) is None or name == "trainer_state.json"
        (checkpoint / name).unlink()
        assert name in checkpoint_defect(checkpoint)
        (checkpoint / name).write_bytes(whole)
    (checkpoint / "manifest.json").unlink()
    assert checkpoint_defect(checkpoint) == "holds no manifest.json: its save was cut short"
    (checkpoint / "dc_grpo_state.json").unlink()  # of another trainer
    assert checkpoint_defect(checkpoint) is None


def test_hashes_are_those_of_xxhash_and_an_older_manifest_has_none(checkpoint):
    path = checkpoint / "manifest.json"
    listed = read_json(path)
    for name, entry in listed["files"].items():
        assert entry.pop("xxh3") == xxhash.xxh3_128((checkpoint / name).read_bytes()).hexdigest()
    path.write_text(json.dumps(listed))
    assert checkpoint_defect(checkpoint) is None


def test_lambda_goes_on_from_an_earlier_checkpoint_which_has_it_at_the_top(checkpoint):
    fields = MISALIGNED | {"max_steps": 4, "lambda_lr": 0.5}
    earlier = shutil.copytree(checkpoint.parent, checkpoint.parent.with_name("earlier")) / checkpoint.name
    state = read_json(earlier / "dc_grpo_state.json")
    state |= state["parts"].pop("TwoEngines")
    assert state["batch_discrepancy"] > 0  # the checkpoint is within a generation batch
    (earlier / "dc_grpo_state.json").write_text(json.dumps(state))
    write_manifest(earlier)
    runs = []
    for folder in (checkpoint, earlier):
        runs.append(make_trainer(folder.parent, **fields))
        runs[-1].train(resume_from_checkpoint=str(folder))
    assert logged(runs[1], "lagrangian/lambda") == logged(runs[0], "lagrangian/lambda")
    assert runs[1].lagrange_multiplier.state_dict() == runs[0].lagrange_multiplier.state_dict()
    assert runs[1].lagrange_multiplier.value != 0.1


@pytest.mark.parametrize("text", ["{}", '{"files": []}', '{"files": {"optimizer.pt": 3}}', "[]", "{"])
def test_a_manifest_that_lists_nothing_is_a_defect(checkpoint, text):
    (checkpoint / "manifest.json").write_text(text)
    assert "manifest.json" in checkpoint_defect(checkpoint)


@pytest.fixture
def of_another_trainer(checkpoint):
    for name in ("manifest.json", "dc_grpo_state.json"):
        (checkpoint / name).unlink()
    return checkpoint


@pytest.mark.timeout(100)
@pytest.mark.parametrize("step", [10**30, -1, 0.5, "1", None, math.nan])
def test_a_step_that_no_run_can_have_come_to_is_a_defect(of_another_trainer, step):
    path = of_another_trainer / "trainer_state.json"
    state = read_json(path)
    for last in ({}, {"max_steps": step}):
        path.write_text(json.dumps(state | {"global_step": step} | last))
        assert f"global_step={step!r}" in checkpoint_defect(of_another_trainer)


def test_what_cannot_be_loaded_is_not_said_to_be_saved(of_another_trainer):
    checkpoint = of_another_trainer
    (checkpoint / "optimizer.pt").write_bytes(b"damaged")
    with pytest.raises(Exception) as error:  # noqa: PT011 (PyTorch's own)
        make_trainer(checkpoint.parent, max_steps=2).train(resume_from_checkpoint=True)
    (note,) = error.value.__notes__
    assert "another" in note
    assert "nothing is lost" not in note


def test_the_newest_whole_checkpoint_is_taken_and_the_others_named(checkpoint, caplog):
    run = checkpoint.parent
    assert resumable_checkpoint(None, run) is resumable_checkpoint(False, run) is resumable_checkpoint("false", run)
    for step in (2, 3, 10):
        shutil.copytree(checkpoint, run / f"checkpoint-{step}")
    (run / "checkpoint-3" / "optimizer.pt").unlink()
    (run / "checkpoint-10" / "trainer_state.json").unlink()
    (run / "checkpoint-99").mkdir()
    (run / "checkpoint-100").write_text("a file")
    (run / "checkpoint-best").mkdir()
    assert resumable_checkpoint("True", run) == str(run / "checkpoint-2")
    (message,) = (text for text in caplog.messages if "Resuming from" in text)
    for words in ("checkpoint-99 holds no trainer_state", "checkpoint-10 ", "checkpoint-3 holds no optimizer.pt"):
        assert words in message
    assert "checkpoint-1 " not in message

    for step in (1, 2):
        (run / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"short")
    with refuses(ValueError, "no whole checkpoint", "checkpoint-99 ", "checkpoint-1 holds model.saf"):
        resumable_checkpoint(True, run)
    with refuses(ValueError, "nowhere'", "another checkpoint, or true"):
        resumable_checkpoint(str(run / "nowhere"), run)


def test_the_trainer_takes_the_newest_whole_one_and_keeps_apart_what_another_run_left(checkpoint):
    run = checkpoint.parent
    options = {"max_steps": 3} | MISALIGNED
    trainer = make_trainer(run, **options)
    trainer.train(resume_from_checkpoint=True)
    assert steps_of(trainer.state.log_history) == [1, 2, 3]
    (run / "checkpoint-2" / "mark").touch()
    make_trainer(run, **options | {"max_steps": 2}).train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert (run / "earlier-checkpoint-2" / "mark").exists()
    assert [step for step in range(1, 5) if (run / f"checkpoint-{step}").exists()] == [1, 2]
    # What a run from the beginning leaves is its own, so that it is what the next one resumes.
    make_trainer(run, **options | {"max_steps": 1}).train()
    assert (run / "earlier-checkpoint-2.1" / "mark").exists()
    assert resumable_checkpoint(True, run) == str(run / "checkpoint-1")
    # From a checkpoint elsewhere, it goes on in a directory of its own.
    (run / "earlier-checkpoint-3").rename(elsewhere := run.with_name("checkpoint-3"))
    make_trainer(run, **options | {"max_steps": 4}).train(resume_from_checkpoint=str(elsewhere))
    assert [step for step in range(1, 5) if (run / f"checkpoint-{step}").exists()] == [4]


# What a checkpoint within a generation batch has of the rest of it.
WITHIN = {
    "rows of several lengths": {"rollout_func": ByStep(longest=30), "max_completion_length": 32},
    "what a correction made": {"rollout_func": ByStep(), "rollout_correction": "token_mask", "lambda_lr": 0.5},
    "kept tokens": {"deployment_scheme": "bf16", "top_k": 6},
    "routes": {"deployment_scheme": "fp8", "routing_replay": True, "model": make_experts},
    "an adapter": {"rollout_func": ByStep(), "peft_config": LoraConfig(r=2, target_modules=["q_proj"])},
}


@pytest.mark.parametrize("fields", WITHIN.values(), ids=WITHIN)
def test_a_run_resumed_within_a_generation_batch_is_the_uninterrupted_one(tmp_path, fields):
    fields = MISALIGNED | {"num_iterations": 2, "max_steps": 5, "save_steps": 1} | fields
    whole, resumed = (
        helpers.make_trainer(tmp_path, **fields | {"model": fields.get("model", make_model)()}) for _ in range(2)
    )
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_run(resumed, whole, after=1)


def test_the_settings_of_a_run_that_goes_on_are_recorded_and_the_old_ones_kept(tmp_path):
    make_trainer(tmp_path, export_run=True).train()
    before = (tmp_path / "settings.json").read_text()
    make_trainer(tmp_path, export_run=True).train(resume_from_checkpoint=True)
    other = {"max_steps": 2, "learning_rate": 2e-5}
    make_trainer(tmp_path, export_run=True, **other).train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.glob("settings.*.json")] == ["settings.1.json"]
    assert (tmp_path / "settings.1.json").read_text() == before
    assert read_json(tmp_path / "settings.json") == json.loads(before) | other


def test_a_reference_model_that_follows_the_policy_is_said_to_begin_anew(tmp_path, caplog):
    options = {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 1, "model": str(helpers.TINY_MODEL)}
    make_trainer(tmp_path, **options).train()
    assert "reference model" not in caplog.text
    make_trainer(tmp_path, max_steps=2, **options).train(resume_from_checkpoint=True)
    assert "a checkpoint has no reference model" in caplog.text


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_5_vl"])
def test_weights_are_found_whose_names_on_the_disk_differ(tmp_path, kind):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
    if kind == "deepseek_v3":
        config = AutoConfig.for_model(kind, **small, **helpers.DEEPSEEK, first_k_dense_replace=1)
        make = partial(AutoModelForCausalLM.from_config, config)
    else:
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        seen = {"hidden_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16}
        config = AutoConfig.for_model(kind, text_config={**small, "rope_scaling": rope}, vision_config=seen)
        make = partial(AutoModelForImageTextToText.from_config, config)
    saved, other = make(), make()
    saved.save_pretrained(tmp_path)
    saved = type(saved).from_pretrained(tmp_path, dtype="auto")
    loaded = type(saved).from_pretrained(tmp_path, dtype="auto")
    loaded.load_state_dict(other.state_dict())
    plain = SimpleNamespace(is_fsdp_enabled=False, is_deepspeed_enabled=False)
    assert load_saved_weights(plain, loaded, str(tmp_path))
    assert_same_tensors(loaded.state_dict(), saved.state_dict())


def test_a_checkpoint_of_weights_only_is_not_resumed(tmp_path):
    make_trainer(tmp_path, save_only_model=True).train()
    with refuses(ValueError, "optimizer", "save_only_model=true", "model_name_or_path"):
        make_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)


class LostServer:
    """An engine that is there for some rollouts."""

    __name__ = "lost_server"

    def __init__(self, rollouts):
        self._left, self._engine = rollouts, Rollouts()

    def __call__(self, prompts, trainer):
        self._left -= 1
        if self._left < 0:
            raise ServerError("the server is gone.")
        return self._engine(prompts, trainer)


@pytest.mark.parametrize("step", [0, 1])
def test_a_lost_server_leaves_a_checkpoint_of_the_last_step(tmp_path, step):
    trainer = make_trainer(tmp_path, rollouts=LostServer(step), save_steps=500, max_steps=2)
    trainer.add_callback(HistoryCallback())
    way_back = r"The run is saved: .*trainer\.train\(.*checkpoint-1'\)" if step else "No step had ended"
    with pytest.raises(ServerError, match=rf"^the server is gone\. {way_back}"):
        trainer.train()
    resumed = make_trainer(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint="auto")
    assert steps_of(resumed.state.log_history) == [1, 2]


EVALUATED = {"eval_steps": 1, "eval_dataset": make_prompts(4)}


@pytest.mark.parametrize("event", ["on_step_begin", "on_prediction_step"])
def test_a_signal_ends_a_run_after_its_next_step_and_evaluation(tmp_path, event):

    def send(state, **kwargs):
        """A signal after step 2, which has come."""
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while not signals._signum:
                time.sleep(0.001)

    with StopSignals() as signals:
        trainer = make_trainer(tmp_path, max_steps=4, save_steps=500, **EVALUATED)
        trainer.add_callback(On(event, send))
        trainer.add_callback(signals)
        with pytest.raises(RunInterrupted, match=r"The run is saved: .*checkpoint-3'"):
            trainer.train()
    assert trainer.state.global_step == 3
    assert steps_of(trainer.state.log_history, "eval_loss") == [1, 2, 3]
    resumed = make_trainer(tmp_path, max_steps=4, **EVALUATED)
    resumed.train(resume_from_checkpoint=True)
    assert steps_of(resumed.state.log_history, "eval_loss") == [1, 2, 3, 4]


def test_a_disk_too_full_for_the_last_checkpoint_is_said_so(small_disk):
    trainer = make_trainer(small_disk / "run", rollouts=LostServer(1), save_steps=500, max_steps=2)
    (small_disk / "filler").write_bytes(bytes((1 << 20) - (40 << 10)))
    with pytest.raises(ServerError, match=r"^the server is gone\. The run could not be saved \(.*resume_from_check"):
        trainer.train()
    with refuses(ValueError, "no whole checkpoint", "checkpoint-1 "):
        make_trainer(small_disk / "run").train(resume_from_checkpoint=True)


_removals: list = []
sys.addaudithook(lambda event, args: [watch(args[0]) for watch in _removals] if event == "shutil.rmtree" else None)


def test_an_old_checkpoint_goes_when_the_new_one_is_whole(tmp_path):
    removed = []

    def watch(path):
        path = Path(path)
        if path.parent == tmp_path and path.name.startswith("checkpoint-"):
            newer = tmp_path / f"checkpoint-{int(path.name.rpartition('-')[2]) + 1}"
            removed.append((path.name, checkpoint_defect(newer), (newer / "manifest.json").is_file()))

    _removals.append(watch)
    try:
        make_trainer(tmp_path, max_steps=3, save_total_limit=1).train()
    finally:
        _removals.remove(watch)
    assert removed == [("checkpoint-1", None, True), ("checkpoint-2", None, True)]


# --- a run that goes on with other settings --------------------------------------------------------------------------


def go_on(folder, checkpoint, prepare=lambda trainer: None, **options):
    trainer = make_trainer(folder, rollouts=Rollouts(), max_steps=2, **options)
    prepare(trainer)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    make_trainer(folder, constraint="none").train()
    return folder / "checkpoint-1"


def test_a_lower_learning_rate_takes_effect_on_resuming(tmp_path, first_step):
    before = helpers.tensors_in(first_step)
    moved = []
    for rate in (1e-2, 1e-3):
        trainer = go_on(tmp_path / f"{rate}", first_step, constraint="none", learning_rate=rate)
        assert logged(trainer, "learning_rate")[-1] == pytest.approx(rate)
        after = dict(trainer.model.named_parameters())
        moved.append(torch.cat([(after[name].detach() - tensor).flatten() for name, tensor in before.items()]))
    # The moments are those of the checkpoint, so Adam's update is proportional to the rate.
    torch.testing.assert_close(moved[1], 0.1 * moved[0], atol=1e-6, rtol=1e-3)


def rates_of(trainer):
    """What each step will be made with, of every group of parameters."""
    rates = []

    def look(state, optimizer, **kwargs):
        rates.extend(group["lr"] for group in optimizer.param_groups)

    trainer.add_callback(On("on_pre_optimizer_step", look))
    return rates


def test_a_lower_rate_goes_on_where_its_schedule_stands(tmp_path):
    """A linear one of four steps, of which the last three are resumed."""
    linear = {"constraint": "none", "lr_scheduler_type": "linear", "max_steps": 4}
    make_trainer(tmp_path, learning_rate=4e-2, **linear).train()
    lower = make_trainer(tmp_path, learning_rate=4e-3, **linear)
    rates = rates_of(lower)
    lower.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert rates == pytest.approx([3e-3, 3e-3, 2e-3, 2e-3, 1e-3, 1e-3])


def test_a_rate_that_goes_by_plateaus_is_resumed(tmp_path):
    plateau = {"constraint": "none", "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "reward"}
    plateau |= EVALUATED | {"num_generations_eval": 1}
    make_trainer(tmp_path / "first", **plateau).train()
    trainer = go_on(tmp_path / "second", tmp_path / "first" / "checkpoint-1", **plateau)
    assert trainer.state.global_step == 2


def test_length_decay_may_begin_on_resuming(tmp_path, first_step):
    rates = []

    def decay(trainer):
        trainer.add_callback(LengthDecayCallback(trainer, decay_period=3))
        rates.append(rates_of(trainer))

    trainer = go_on(tmp_path, first_step, decay, constraint="none", learning_rate=2e-3)
    assert logged(trainer, "learning_rate")[-1] == pytest.approx(2e-3)
    assert rates == [pytest.approx([2e-3] * 2)]  # what the step was made with
    schedule = trainer.lr_scheduler
    assert (schedule.last_epoch, schedule.get_lr()) == (2, [pytest.approx(1e-3)] * 2)  # the third step is halved


def test_lambda_of_another_constraint_is_not_taken_over(tmp_path, first_step):
    trainer = go_on(tmp_path, first_step, constraint="static", constraint_form="log_ratio", lambda_init=0.5)
    assert logged(trainer, "lagrangian/lambda")[-1] == 0.5
