"""The checkpoints of a run: complete ones, the one that is saved when training ends early, and resuming from them."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from ..files import read_object, replace_folder_link, write_json
from ..records.clock import OTHER
from ..records.runs import Run
from .manifest import STATE_FILE, checkpoints, step_of, way_back, write_manifest
from .soundness import Soundness


ROLLOUTS_FILE = "rollouts_rank{rank}.safetensors"  # of a checkpoint: the generation batch that is in use

logger = get_logger(__name__)


class Checkpoints(TrainerCallback):
    """Saves a trainer's run, also after a step has failed, and resumes it.

    Args:
        trainer: trainer of the run.

    Attributes:
        soundness (`Soundness`): keeps what is saved finite.
        sound_until (`int` or `None`): step until which a watcher, such as the collapse alarm, has found nothing wrong;
            0 if no step is known to be well, and None if nobody watches. The newest checkpoint from before it stays,
            and so does the oldest of the others, which takes its place once it is known to be well.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.sound_until: int | None = None
        self.begin_training()
        trainer.add_callback(self)

    def begin_training(self) -> None:
        """Forget an earlier training."""
        self.soundness = Soundness(self._trainer)
        self._began = False  # whether the present training has begun, and perhaps loaded a checkpoint
        self._saved_at: int | None = None  # step of the last checkpoint that it saved or resumed from
        self._best: int | None = None  # step of the best checkpoint, once its weights are loaded at the end
        # Position, rollouts, state of the algorithm and random numbers at the end of the last step; None before it.
        self._ended: tuple[int, Any, dict[str, Any], tuple] | None = None
        self._moving_since: int | None = None  # the step from which the optimizer is changing the weights

    @property
    def policy_step(self) -> int:
        """Optimizer step of the present weights, which `load_best_model_at_end` brings back to an earlier one."""
        return self._trainer.state.global_step if self._best is None else self._best

    @property
    def policy_run(self) -> Run:
        """The run as it was logged until the step of the present weights."""
        return Run("", [row for row in self._trainer.state.log_history if row["step"] <= self.policy_step])

    def best_is_loaded(self) -> None:
        """Note that the trainer has the weights of its best checkpoint."""
        self._best = step_of(self._trainer.state.best_model_checkpoint)

    # --- a step that failed -----------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Keep what the next step will change before it has ended; weights and optimizer change only at its end."""
        trainer = self._trainer
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        numbers = random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda
        self._ended = trainer._step, trainer._buffered_inputs, copy.deepcopy(self._state()), numbers
        self._moving_since = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = True

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._moving_since = state.global_step

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._trainer.clock.switch(OTHER)  # the optimizer steps in transformers' own loop

    def save_after_failure(self, together: bool) -> str:
        """Save the last step that ended, if that is possible, and return how to resume.

        Args:
            together: whether all processes have failed at the same point.
        """
        trainer, step = self._trainer, self._trainer.state.global_step
        if not self._began:
            return "Nothing was trained. If a checkpoint cannot be loaded, resume from another one."
        if self._moving_since is not None and step > self._moving_since:
            self.end_step()  # the failure came after the optimizer
        if self._moving_since is not None:
            return _not_saved("the optimizer was moving the weights")
        if self._ended is None or self._saved_at == step or not self.soundness.may_save:
            return self.way_back()
        if trainer.accelerator.num_processes > 1 and not together:
            return _not_saved("one of several processes cannot save alone")
        trainer._step, trainer._buffered_inputs, state, (python, numpy, cpu, cuda) = self._ended
        self._load_state(state | {"seconds": {}})
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        try:
            trainer._save_checkpoint(trainer.model, trial=None)
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        except (ArithmeticError, OSError, RuntimeError, SafetensorError) as error:  # the last three may be a full disk
            return _not_saved(str(error))
        # If a process ended before the others, the launcher would end them, perhaps while they write.
        trainer.accelerator.wait_for_everyone()
        return self.way_back()

    def way_back(self) -> str:
        """Return how to go on from the newest checkpoint."""
        return way_back(self._trainer.args.output_dir, self._trainer.state.global_step)

    def _state(self) -> dict[str, Any]:
        """Return the state with which a run resumes beside weights and optimizer, as JSON values."""
        trainer = self._trainer
        parts = {type(part).__name__: state for part in trainer.parts if (state := part.state_dict())}
        return {"seconds": trainer.clock.seconds(), "parts": parts}

    def _load_state(self, state: dict[str, Any]) -> None:
        """Restore what `_state` returned; the trainer has its position within the generation batch already."""
        trainer, parts = self._trainer, state.get("parts", {})
        trainer.clock.carry(state["seconds"])
        if "lagrange_multiplier" in state:  # of an earlier checkpoint
            parts = {"TwoEngines": state} | parts
        for part in trainer.parts:
            if (of_part := parts.get(type(part).__name__)) is not None:
                part.load_state_dict(of_part)

    # --- saving -----------------------------------------------------------------------------------------------------

    def write(self, write: Callable[[], None], folder: str) -> None:
        """Write the checkpoint of the present step.

        Args:
            write: writes what TRL and transformers save, pushes it, and rotates.
            folder: directory of the checkpoint.
        """
        trainer, args = self._trainer, self._trainer.args
        self.soundness.require_finite()
        # Our files come first, because transformers finally marks the checkpoint as complete, pushes it, and rotates.
        self._empty(folder)
        # Between two optimizer steps of one generation batch, the remaining batch belongs to the run's state.
        done = trainer._step % trainer.micro_batches_per_generation
        if done > 0:
            save_rollouts(trainer._buffered_inputs, self._rollouts_in(folder))
        sampling = trainer.sampler.save(folder)
        if args.should_save:
            of_run = {
                **self._state(),
                **sampling,
                "micro_batches_done": done,
                "micro_batches_per_iteration": trainer.micro_batches_per_generation,
                "num_processes": trainer.accelerator.num_processes,
            }
            write_json(Path(folder, STATE_FILE), of_run)
        # No old checkpoint is removed before the new one is completely on the disk.
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            write()
            if not args.push_to_hub:
                self.make_whole(folder)
        finally:
            args.save_total_limit = limit
        self._saved_at = trainer.state.global_step
        if args.should_save and limit:
            self._remove_oldest(checkpoints(Path(folder).parent), limit)

    def _remove_oldest(self, found: dict[int, Path], limit: int) -> None:
        """Remove the oldest checkpoints beyond a limit, but not the newest, the best and the last good one."""
        best = self._trainer.state.best_model_checkpoint
        spared = {max(found), *(step for step, each in found.items() if best and each == Path(best))}
        if (sound := self.sound_until) is not None:
            good, unknown = [step for step in found if step < sound], [step for step in found if step >= sound]
            spared |= {*good[:1], *unknown[-1:]}
        for step in sorted(found.keys() - spared)[: max(0, len(found) - limit)]:
            shutil.rmtree(found[step], ignore_errors=True)

    def make_whole(self, folder: str) -> None:
        """Write the file that marks a checkpoint as complete, once every process has written its files."""
        self._trainer.accelerator.wait_for_everyone()
        if self._trainer.args.should_save:
            write_manifest(Path(folder))

    def _empty(self, folder: str) -> None:
        """Make the empty folder of a checkpoint that is about to be saved."""
        replace_folder_link(Path(folder))
        if self._trainer.args.should_save and os.path.isdir(folder):
            # It is from an interrupted save of this step, whose files must never be mixed with new ones.
            shutil.rmtree(folder)
        self._trainer.accelerator.wait_for_everyone()
        os.makedirs(folder, exist_ok=True)

    def _rollouts_in(self, folder: str) -> str:
        return os.path.join(folder, ROLLOUTS_FILE.format(rank=self._trainer.accelerator.process_index))

    # --- resuming ---------------------------------------------------------------------------------------------------

    def load(self, checkpoint: str) -> None:
        """Continue from what `write` has written beside TRL's files."""
        trainer = self._trainer
        if trainer.args.sync_ref_model and trainer.ref_model is not None:
            logger.warning("sync_ref_model=True: a checkpoint has no reference model, and it begins anew.")
        if os.path.realpath(checkpoint) == os.path.realpath(trainer.checkpoint_folder()):
            self._saved_at = trainer.state.global_step
        path = Path(checkpoint, STATE_FILE)
        if not path.exists():
            logger.warning(
                f"{checkpoint} holds no {STATE_FILE} (DCGRPOTrainer did not save it): lambda starts at "
                f"lambda_init={trainer.args.lambda_init}."
            )
            return
        state = read_object(path)
        done = state["micro_batches_done"]
        as_before = (state["micro_batches_per_iteration"], state["num_processes"]) == (
            trainer.micro_batches_per_generation,
            trainer.accelerator.num_processes,
        )
        slices = None
        if done > 0 and as_before:
            slices = load_rollouts(self._rollouts_in(checkpoint), trainer.accelerator.device)
            if slices is not None:
                trainer._buffered_inputs, trainer._step = slices, done
        self._load_state(state)
        trainer.sampler.load(checkpoint, state)
        if done > 0 and slices is None:
            logger.warning(
                f"{checkpoint} was saved within a generation batch by a run with other steps_per_generation, "
                "num_iterations or number of processes: the rest of that batch is discarded, "
                "and a new one generated."
            )


def save_rollouts(slices: list[dict[str, Any]], path: str) -> None:
    """Write the slices of a generation batch, with tensors and JSON-compatible values, as a safetensors file."""
    tensors: dict[str, Tensor] = {}
    values: list[dict[str, Any]] = [{} for _ in slices]
    for index, inputs in enumerate(slices):
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                # Slices are views into one batch, which safetensors cannot store.
                tensors[f"{index}.{name}"] = value.cpu().clone().contiguous()
            else:
                values[index][name] = value
    save_file(tensors, path, metadata={"values": json.dumps(values)})


def load_rollouts(path: str, device: torch.device) -> list[dict[str, Any]]:
    """Return the slices that `save_rollouts` wrote, on a device."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        slices = json.loads(file.metadata()["values"])
        for key in file.keys():  # noqa: SIM118 (not a dict)
            index, name = key.split(".", 1)
            slices[int(index)][name] = file.get_tensor(key)
    return slices


def _not_saved(why: str) -> str:
    return f"The run could not be saved ({why}): go on from an earlier checkpoint, with resume_from_checkpoint=true"
