"""Which checkpoint a run goes on from, and what is said of the others."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from dc_trl import DeploymentCheckpointCallback, HistoryCallback, LengthDecayCallback
from dc_trl.resuming.checkpoints import checkpoint_defect, resumable_checkpoint, write_manifest
from dc_trl.resuming.interruption import RunInterrupted, StopSignals
from dc_trl.serving.errors import ServerError

from . import helpers
from .helpers import Rollouts, logged, make_prompts


def make_trainer(output_dir, peft=None, rollouts=None, **options):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, **options}
    return helpers.make_trainer(output_dir, peft_config=peft, rollout_func=rollouts or Rollouts(), **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint between two optimizer steps of one generation batch, so that rollouts are part of it."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = make_trainer(folder, steps_per_generation=2, gradient_accumulation_steps=1)
    trainer.add_callback(DeploymentCheckpointCallback(trainer))
    trainer.train()
    return folder / "checkpoint-1"


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run" / "checkpoint-1")


def copy_as(checkpoint, step):
    """The checkpoint under the name of another step."""
    return shutil.copytree(checkpoint, checkpoint.with_name(f"checkpoint-{step}"))


def test_a_manifest_lists_every_file_and_tells_one_that_is_cut_short(checkpoint):
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert set(listed) == {name for name in files if not name.startswith(("deployment/", "manifest.json"))}
    (checkpoint / "notes.txt").write_text("the user's")
    (checkpoint / "deployment" / "model.safetensors").write_bytes(b"")
    assert checkpoint_defect(checkpoint) is None
    for name in listed:
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(whole[:-1])
        assert name in checkpoint_defect(checkpoint)
        (checkpoint / name).unlink()
        assert name in checkpoint_defect(checkpoint)
        (checkpoint / name).write_bytes(whole)
    (checkpoint / "manifest.json").unlink()
    assert checkpoint_defect(checkpoint) == "holds no manifest.json: its save was cut short"
    (checkpoint / "dc_grpo_state.json").unlink()  # of another trainer
    assert checkpoint_defect(checkpoint) is None


def test_the_newest_whole_checkpoint_is_taken_and_the_others_named(checkpoint, caplog):
    run = checkpoint.parent
    assert resumable_checkpoint(None, run) is resumable_checkpoint(False, run) is resumable_checkpoint("false", run)
    for step in (2, 3, 10):
        copy_as(checkpoint, step)
    (run / "checkpoint-3" / "optimizer.pt").unlink()
    (run / "checkpoint-10" / "trainer_state.json").unlink()
    (run / "checkpoint-99").mkdir()
    (run / "checkpoint-100").write_text("a file")
    (run / "checkpoint-best").mkdir()
    for wanted in (True, "True"):
        caplog.clear()
        assert resumable_checkpoint(wanted, run) == str(run / "checkpoint-2")
        (message,) = (text for record in caplog.records if "Going on" in (text := record.getMessage()))
        for words in (
            "checkpoint-99 holds no trainer_state.json",
            "checkpoint-10 holds no",
            "checkpoint-3 holds no opt",
        ):
            assert words in message
        assert "checkpoint-1 " not in message

    for step in (1, 2):
        (run / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"holds no whole checkpoint: checkpoint-99 .*checkpoint-1 holds model\.saf"):
        resumable_checkpoint(True, run)
    with pytest.raises(ValueError, match=r"checkpoint-3' holds no optimizer\.pt \(save_only_model=true"):
        resumable_checkpoint(run / "checkpoint-3", run)
    with pytest.raises(ValueError, match=r"nowhere' is no directory\. Give another checkpoint, or true"):
        resumable_checkpoint(str(run / "nowhere"), run)


def test_the_trainer_takes_the_newest_whole_one_and_refuses_the_rest(checkpoint):
    run = checkpoint.parent
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 3}
    trainer = make_trainer(run, **options)
    trainer.train(resume_from_checkpoint=True)
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3]
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-2' holds no optimizer\.pt"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    # A folder that another run has left is replaced, not mixed with.
    (run / "checkpoint-2" / "rng_state_7.pth").write_bytes(b"")
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert checkpoint_defect(run / "checkpoint-2") is None
    assert not (run / "checkpoint-2" / "rng_state_7.pth").exists()


def test_checkpoints_of_adapters_and_in_shards_are_whole(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    make_trainer(tmp_path / "adapter", adapter).train()
    folder = tmp_path / "adapter" / "checkpoint-1"
    assert checkpoint_defect(folder) is None
    trainer = make_trainer(tmp_path / "adapter", adapter, max_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert len(logged(trainer, "loss")) == 2
    (folder / "adapter_model.safetensors").unlink()
    assert "holds no weights" in checkpoint_defect(folder)

    trainer = make_trainer(tmp_path / "shards")
    trainer.train()
    folder = tmp_path / "shards" / "checkpoint-1"
    (folder / "model.safetensors").unlink()
    trainer.model.save_pretrained(folder, max_shard_size="20KB")
    write_manifest(folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert checkpoint_defect(folder) is None
    shards[1].unlink()
    assert checkpoint_defect(folder) == f"holds no {shards[1].name}, which its manifest.json lists"


def test_a_checkpoint_of_weights_only_is_not_resumed(tmp_path):
    make_trainer(tmp_path, save_only_model=True).train()
    with pytest.raises(ValueError, match=r"holds no optimizer\.pt \(save_only_model=true .*model_name_or_path"):
        make_trainer(tmp_path, save_only_model=True, max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "kept", [["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "scheduler.pt"], ["latest"]]
)
def test_weights_and_optimizer_may_have_the_names_of_fsdp_or_deepspeed(checkpoint, kept):
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "manifest.json", "dc_grpo_state.json"):
        (checkpoint / name).unlink()
    assert checkpoint_defect(checkpoint).startswith("holds no weights")
    for name in kept:
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).touch() if name != "scheduler.pt" else torch.save({}, checkpoint / name)
    assert checkpoint_defect(checkpoint) is None


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


class LostInEvaluation(TrainerCallback):
    """What a benchmark meets that asks a server which is gone."""

    def on_evaluate(self, args, state, control, **kwargs):
        raise ServerError("the server is gone.")


@pytest.mark.parametrize("lost", ["before the first log", "in a benchmark"])
def test_a_lost_server_leaves_a_checkpoint(tmp_path, lost):
    step = 0 if lost == "before the first log" else 1
    trainer = evaluated(make_trainer(tmp_path, rollouts=LostServer(5 if step else 0), save_steps=500, max_steps=2))
    trainer.add_callback(HistoryCallback())
    if step:
        trainer.add_callback(LostInEvaluation())
    with pytest.raises(ServerError, match=rf"^the server is gone\. The run is saved: .*checkpoint-{step}' once"):
        trainer.train()
    assert os.listdir(tmp_path).count("history.jsonl") == step
    resumed = evaluated(make_trainer(tmp_path, max_steps=2))
    resumed.train(resume_from_checkpoint=True)
    assert [row["step"] for row in resumed.state.log_history if "loss" in row] == [1, 2]
    # The evaluation that the loss of the server cut short was logged, but callbacks have not seen its end: again.
    assert [row["step"] for row in resumed.state.log_history if "eval_loss" in row] == ([1, 1, 2] if step else [1, 2])
    assert not resumed.args.eval_on_start


def evaluated(trainer):
    """The trainer with an evaluation after each step."""
    trainer.eval_dataset = make_prompts(4)
    trainer.args.eval_strategy, trainer.args.eval_steps, trainer.args.do_eval = "steps", 1, True
    return trainer


class Signal(TrainerCallback):
    """Sends this process a signal at an event after step 2, and waits until it has come."""

    def __init__(self, event, signals):
        self._signals = signals
        setattr(self, event, self._send)

    def _send(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self._signals._signum:
                time.sleep(0.001)


@pytest.mark.parametrize(("event", "step"), [("on_step_begin", 3), ("on_prediction_step", 2), ("on_evaluate", 3)])
def test_an_evaluation_that_a_signal_left_is_the_first_thing_of_the_run_that_goes_on(tmp_path, event, step):
    with StopSignals() as signals:
        trainer = evaluated(make_trainer(tmp_path, max_steps=4, save_steps=500))
        trainer.add_callback(Signal(event, signals))
        trainer.add_callback(signals)
        with pytest.raises(RunInterrupted, match=rf"The run is saved: .*checkpoint-{step}'"):
            trainer.train()
    assert trainer.state.global_step == step
    steps = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    assert steps == list(range(1, step))
    resumed = evaluated(make_trainer(tmp_path, max_steps=4))
    resumed.train(resume_from_checkpoint=True)
    assert [row["step"] for row in resumed.state.log_history if "eval_loss" in row] == [1, 2, 3, 4]


def test_a_disk_too_full_for_the_last_checkpoint_is_said_so(tmp_path, small_disk):
    trainer = make_trainer(small_disk / "run", rollouts=LostServer(1), save_steps=500, max_steps=2)
    (small_disk / "filler").write_bytes(bytes((1 << 20) - (40 << 10)))
    with pytest.raises(ServerError, match=r"^the server is gone\. The run could not be saved \(.*resume_from_check"):
        trainer.train()
    with pytest.raises(ValueError, match=r"holds no whole checkpoint: checkpoint-1 "):
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


def test_length_decay_may_begin_on_resuming(tmp_path, first_step):
    def decay(trainer):
        trainer.add_callback(LengthDecayCallback(trainer, decay_period=3))

    trainer = go_on(tmp_path, first_step, decay, constraint="none", learning_rate=2e-3)
    assert logged(trainer, "learning_rate")[-1] == pytest.approx(2e-3)
    schedule = trainer.lr_scheduler
    assert (schedule.last_epoch, schedule.get_lr()) == (2, [pytest.approx(1e-3)] * 2)  # the third step is halved


def test_lambda_of_another_constraint_is_not_taken_over(tmp_path, first_step):
    trainer = go_on(tmp_path, first_step, constraint="static", constraint_form="log_ratio", lambda_init=0.5)
    assert logged(trainer, "lagrangian/lambda")[-1] == 0.5
