"""How a training ends: finished already, begun anew, or by an error of whoever takes part in it."""

import math
import os
import shutil
import subprocess

import pytest
import torch
from peft import LoraConfig
from transformers.trainer_utils import TrainOutput

from dc_trl.records.runs import read_run
from dc_trl.run.manifest import checkpoint_defect, checkpoints
from dc_trl.run.soundness import DivergedError

from . import helpers
from .helpers import (
    MISALIGNED,
    ROOT,
    TWO_PROCESSES,
    TWO_SHARDED,
    On,
    assert_same_run,
    assert_same_weights,
    distinct_characters,
    make_prompts,
    read_rows,
    refuses,
    steps_of,
    succeed,
    tensors_in,
)


def make_trainer(folder, reward=None, prompts=16, evaluated=False, **options):
    options = {"deployment_scheme": "bf16", "save_steps": 500, **options}
    if evaluated:
        options |= {"eval_steps": 1, "eval_dataset": make_prompts(4)}
    return helpers.make_trainer(folder, None, reward, train_dataset=make_prompts(prompts), **options)


# --- a run that is finished -----------------------------------------------------------------------------------------

EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "prompts": 2}


def test_a_finished_run_is_not_trained_any_further(tmp_path):
    first = make_trainer(tmp_path, export_run=True, **EPOCHS)
    first.train()
    done = first.state.global_step
    checkpoint = tmp_path / f"checkpoint-{done}"
    left = {path: path.stat() for path in checkpoint.rglob("*")}
    for wanted in (True, "auto"):
        again = make_trainer(tmp_path, export_run=True, **EPOCHS)
        output = again.train(resume_from_checkpoint=wanted)
        assert isinstance(output, TrainOutput)
        assert output.global_step == again.state.global_step == done
        assert_same_weights(again.model, first.model)
        for path, stat in left.items():
            assert (path.stat().st_mtime_ns, path.stat().st_ino) == (stat.st_mtime_ns, stat.st_ino)
    assert list(checkpoints(tmp_path)) == [done]
    assert set(steps_of(read_rows(tmp_path / "history.jsonl"), "train_runtime")) == {done}
    again = make_trainer(tmp_path, export_run=True, **EPOCHS | {"max_steps": done + 2})
    again.train(resume_from_checkpoint=True)
    assert steps_of(again.state.log_history) == list(range(1, done + 3))


def test_what_the_end_of_a_finished_run_lacks_is_made(tmp_path):
    weights = tmp_path / "deployment" / "model.safetensors"
    make_trainer(tmp_path, max_steps=2, export_run=True).train()
    deployed = weights.read_bytes()
    shutil.rmtree(tmp_path / "deployment")
    make_trainer(tmp_path, max_steps=2, export_run=True).train(resume_from_checkpoint=True)
    assert weights.read_bytes() == deployed
    # A deployment of an earlier end is not the one of this one.
    longer = make_trainer(tmp_path, max_steps=3, export_run=True)
    longer.deployment.export = lambda folder: None  # as if killed before
    longer.train(resume_from_checkpoint=True)
    make_trainer(tmp_path, max_steps=3, export_run=True).train(resume_from_checkpoint=True)
    assert weights.read_bytes() != deployed


# --- an error ends the training -------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


def breaking(event, step):
    """A callback that raises an error at an event, when so many steps have ended."""

    def fail(state, **kwargs):
        if state.global_step == step:
            raise BrokenError("broken by the test")

    return On(event, fail)


def test_what_ended_a_run_is_not_its_end_once_it_has_gone_on(tmp_path):
    options = {"max_steps": 2, "export_run": True}
    with pytest.raises(BrokenError):
        make_trainer(tmp_path, callbacks=[breaking("on_train_end", 2)], **options).train()
    assert read_run(tmp_path).ended_by == "BrokenError"
    make_trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    run = read_run(tmp_path)
    assert (run.ended_by, run.finished) == (None, True)


class BrokenReward:
    __name__ = "reward"

    def __init__(self, call):
        self._left = call

    def __call__(self, completions, **kwargs):
        self._left -= 1
        if self._left == 0:
            raise BrokenError("broken by the test")
        return distinct_characters(completions)


ACCUMULATED = {"steps_per_generation": 1, "gradient_accumulation_steps": 2}
# What breaks, how many steps have ended by then, and how batches are made.
BREAKS = {
    "the reward of the second micro-batch": (BrokenReward(6), 2, ACCUMULATED),
    "a part of a batch and of an accumulation": (
        breaking("on_substep_end", 1),
        1,
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    ),
    "the first of two batches, whose δ̄ is measured again": (
        breaking("on_substep_end", 1),
        1,
        ACCUMULATED | {"discrepancy_tolerance": "auto"},
    ),
    "the second one": (breaking("on_pre_optimizer_step", 3), 3, MISALIGNED),
    "an epoch": (breaking("on_epoch_begin", 4), 4, {"prompts": 4}),
}


@pytest.mark.parametrize("what", BREAKS)
def test_an_error_loses_no_step_that_had_ended(tmp_path, what):
    breaks, done, options = BREAKS[what]
    options = {"max_steps": 6, "constraint": "lagrangian"} | options
    broken = make_trainer(tmp_path / "run", breaks if isinstance(breaks, BrokenReward) else None, **options)
    if isinstance(breaks, On):
        broken.callback_handler.callbacks.insert(0, breaks)
    with pytest.raises((BrokenError, KeyboardInterrupt)) as raised:
        broken.train()
    checkpoint = tmp_path / "run" / f"checkpoint-{done}"
    assert checkpoint_defect(checkpoint) is None
    (note,) = raised.value.__notes__
    assert f"resume_from_checkpoint='{checkpoint}'" in note

    resumed = make_trainer(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    whole = make_trainer(tmp_path / "whole", **options)  # which seeds the random numbers
    whole.train()
    assert resumed.lagrange_multiplier.state_dict() == whole.lagrange_multiplier.state_dict()
    assert_same_run(resumed, whole, after=done)


def test_weights_that_the_optimizer_was_moving_are_not_saved(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3, save_steps=1)
    trainer.create_optimizer()
    step = trainer.optimizer.step

    def half(*args, **kwargs):
        if trainer.state.global_step == 1:
            next(iter(trainer.model.parameters())).data.add_(1)
            raise BrokenError("in the middle of the weights")
        return step(*args, **kwargs)

    trainer.optimizer.step = half
    with pytest.raises(BrokenError) as raised:
        trainer.train()
    (note,) = raised.value.__notes__
    assert "optimizer was moving" in note
    assert "resume_from_checkpoint=true" in note
    assert list(checkpoints(tmp_path)) == [1]


# --- records that cannot be written ---------------------------------------------------------------------------------


def test_what_only_records_does_not_end_what_trains(tmp_path):
    def spoil_records(state, **kwargs):
        history, figure = tmp_path / "history.jsonl", tmp_path / "run.png"
        if state.global_step == 1:
            history.write_text(history.read_text() + '\n{"loss": 1.0}\n')
            figure.unlink(missing_ok=True)
            figure.mkdir()
        elif state.global_step == 2:
            history.rename(tmp_path / "moved")
            history.mkdir()

    trainer = make_trainer(tmp_path, max_steps=3, save_steps=1, export_run=True)
    trainer.add_callback(On("on_step_begin", spoil_records))
    trainer.train()
    assert list(checkpoints(tmp_path)) == [3, 2, 1]
    (tmp_path / "history.jsonl").rmdir()
    (tmp_path / "moved").rename(tmp_path / "history.jsonl")
    make_trainer(tmp_path, max_steps=3, export_run=True).train(str(tmp_path / "checkpoint-2"))
    assert steps_of(read_rows(tmp_path / "history.jsonl")) == [1, 2, 3]


def test_a_figure_is_drawn_at_the_end_and_seldom_before(tmp_path, monkeypatch):
    from dc_trl.records import figures as panels

    drawn, plot = [], panels.plot_run
    monkeypatch.setattr(panels, "plot_run", lambda rows, *more: (drawn.append(len(rows)), plot(rows, *more)))
    make_trainer(tmp_path, max_steps=6, save_steps=1, export_run=True).train()
    assert len(drawn) == 2


# --- numbers that are not finite ------------------------------------------------------------------------------------


def spoil(trainer, steps, value):
    """Multiply the gradients of the last process by a number, at these steps."""
    backward, accelerator = trainer.accelerator.backward, trainer.accelerator

    def spoiled(loss, **kwargs):
        here = trainer.state.global_step + 1 in steps and accelerator.process_index == accelerator.num_processes - 1
        backward(loss * value if here else loss, **kwargs)

    accelerator.backward = spoiled
    return trainer


def saved_weights(folder):
    return {step: tensors_in(path) for step, path in checkpoints(folder).items()}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_not_saved(tmp_path, value, adapter):
    peft = LoraConfig(r=2, target_modules=["q_proj"]) if adapter else None
    options = {"save_steps": 1, "save_total_limit": 1, "max_steps": 3, "peft_config": peft, "weight_decay": 0.1}
    trainer, moments, left = spoil(make_trainer(tmp_path, **options), [2], value), [], []

    def look(state, optimizer, **kwargs):
        moments.append([entry["exp_avg"].clone() for entry in optimizer.state.values()])
        left.append(saved_weights(tmp_path))

    trainer.add_callback(On("on_step_begin", look))
    trainer.train()
    assert [list(each) for each in left] == [[], [1], [1]]
    assert list(checkpoints(tmp_path)) == [3]
    assert all(map(torch.equal, moments[1], moments[2]))
    final = saved_weights(tmp_path)[3]
    assert all(value.isfinite().all() for value in final.values())
    assert any(not torch.equal(value, left[2][1][name]) for name, value in final.items())  # step 3 was made


def test_gradients_that_stay_so_end_the_run_at_the_last_good_checkpoint(tmp_path):
    trainer = spoil(make_trainer(tmp_path, save_steps=1, save_total_limit=1, max_steps=20), range(3, 20), math.nan)
    with refuses(DivergedError, "grad_norm=nan at step 7", "learning_rate=0.01", "checkpoint-2'"):
        trainer.train()
    assert list(checkpoints(tmp_path)) == [2]
    assert checkpoint_defect(tmp_path / "checkpoint-2") is None


def test_weights_that_an_optimizer_step_ruins_are_neither_saved_nor_deployed(tmp_path):
    """A rate that bfloat16 cannot hold, with a gradient norm that is finite."""
    options = {"save_steps": 1, "save_total_limit": 1, "max_steps": 2, "export_run": True}
    trainer = make_trainer(tmp_path, **options)

    def ruin(state, model, **kwargs):
        if state.global_step:
            next(model.parameters()).data.fill_(math.inf)

    trainer.add_callback(On("on_optimizer_step", ruin))
    with refuses(DivergedError, "after step 2", "learning_rate=0.01", "checkpoint-1'"):
        trainer.train()
    assert list(checkpoints(tmp_path)) == [1]
    assert not (tmp_path / "deployment").exists()


def test_a_loss_scale_that_is_searched_may_overflow(tmp_path):
    trainer = spoil(make_trainer(tmp_path, save_steps=1, max_steps=9), range(2, 9), math.inf)
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = True, "fp16"
    trainer.train()
    assert scaler.get_scale() == 4.0 / 2**7
    assert list(checkpoints(tmp_path)) == list(range(9, 0, -1))


WORKER = """
import sys, time
from tests.test_ends import BrokenError, BrokenReward, make_trainer
folder = sys.argv[1]
trainer = make_trainer(folder, prompts=16, max_steps=4, save_steps=2)
rank = trainer.accelerator.process_index
if rank == 1:
    trainer.reward_funcs[0] = BrokenReward(4)
trainer.train()
"""


@pytest.mark.long
def test_of_two_processes_one_that_fails_alone_does_not_wait_for_good(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [*TWO_PROCESSES, str(tmp_path / "worker.py"), str(tmp_path / "run")]
    options = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=280, **options)  # less than ddp_timeout, for which the other would wait
    assert done.returncode != 0
    assert "BrokenError" in done.stderr
    whole = [path.name for path in checkpoints(tmp_path / "run").values() if checkpoint_defect(path) is None]
    assert whole == ["checkpoint-2"]
    assert "several processes" in done.stderr


SPOILED = """
import sys, time
from tests.test_ends import make_trainer, spoil
folder = sys.argv[1]
trainer = spoil(make_trainer(folder, max_steps=3, save_steps=1, save_total_limit=1), [2], float("nan"))
trainer.train()
time.sleep(1)  # see scripts/train.py: gloo's thread lets go of the last gather
trainer.accelerator.end_training()
"""


@pytest.mark.long
@pytest.mark.parametrize("launcher", [TWO_PROCESSES, TWO_SHARDED], ids=["DDP", "FSDP2"])
def test_two_processes_leave_out_the_same_step(tmp_path, launcher):
    (tmp_path / "worker.py").write_text(SPOILED)
    command = [*launcher, str(tmp_path / "worker.py"), str(tmp_path / "run")]
    done = succeed(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=280)
    assert done.stderr.count("leaves this step out") == 1
    (weights,) = saved_weights(tmp_path / "run").values()
    assert all(value.isfinite().all() for value in weights.values())
