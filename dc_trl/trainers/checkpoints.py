"""The checkpoints of a run: complete ones, the one that is saved when training ends early, and resuming from them."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from ..files import read_object, replace_folder_link, write_text
from ..resuming.checkpoints import ROLLOUTS_FILE, STATE_FILE, write_manifest
from ..resuming.interruption import stop_if_asked
from ..rollouts.buffer import load_rollouts, save_rollouts
from .batching import is_regrouped
from .sampling import SamplingTrainer


logger = get_logger(__name__)

# Counters in transformers' state, which it updates during a step.
_COUNTERS = ("epoch", "num_input_tokens_seen", "total_flos")


class Checkpoints(TrainerCallback):
    """Saves a trainer's run, also after a step has failed, and resumes it.

    Args:
        trainer: trainer of the run.

    Attributes:
        saved_at: step of the last checkpoint that the present training saved or resumed from; None if there is none.
    """

    def __init__(self, trainer: SamplingTrainer):
        self._trainer = trainer
        self.begin_training()
        trainer.add_callback(self)

    def begin_training(self) -> None:
        """Forget an earlier training."""
        self._evaluating = False  # recorded in checkpoints, to repeat an evaluation that was cut short
        self.saved_at: int | None = None
        self._left_in: str | None = None  # a checkpoint whose evaluation was cut short and is repeated
        self._made_again: dict[str, Any] | None = None  # random state after that evaluation, until the next step ends
        self._return: Callable[[], None] | None = None  # returns to the last step that has ended
        self._state_to_save: dict[str, Any] | None = None  # its state of the algorithm, once a later step has failed
        self._moving_since: int | None = None  # the step from which the optimizer is changing the weights

    # --- a step that failed -----------------------------------------------------------------------------------------

    @property
    def step_begun(self) -> bool:
        """Whether the present training has changed weights, or has ended a step."""
        return self._return is not None or self._moving_since is not None

    def end_step(self) -> None:
        """Keep what the next step will change before it has ended; weights and optimizer change only at its end."""
        trainer, state = self._trainer, self._trainer.state
        iteration = copy.deepcopy(trainer.iteration_state())
        done, flops, numbers, sampling = (
            trainer.micro_batches_done,
            trainer.current_flos,
            random_state(),
            trainer.sampler.state(),
        )
        rollouts = trainer.generation_batch if done % trainer.micro_batches_per_generation > 0 else None
        counted = {name: getattr(state, name) for name in _COUNTERS}

        def restore() -> None:
            trainer.micro_batches_done, trainer.generation_batch = done, rollouts
            trainer.current_flos = flops
            for name, value in counted.items():
                setattr(state, name, value)
            set_random_state(numbers)
            trainer.sampler.return_to(sampling)
            self._state_to_save = iteration

        self._return, self._moving_since = restore, None

    def weights_move(self) -> None:
        """Note that the weights are changing from now to the end of the step."""
        self._moving_since = self._trainer.state.global_step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.weights_move()

    def save_before_stopping(self) -> str:
        """Save the last step that ended, in all processes together, and return where it is and how to resume."""
        trainer, state = self._trainer, self._trainer.state
        if self._moving_since is not None and state.global_step > self._moving_since:
            self.end_step()  # a callback failed after the optimizer
        if self._return is not None:
            self._return()
        failure = None
        if self.saved_at != state.global_step:  # an existing folder of that name may belong to an abandoned run
            try:
                trainer.save_checkpoint()
                trainer.callback_handler.on_save(trainer.args, state, trainer.control)
            except Exception as error:  # such as a full disk; the error that ends the run must be raised
                failure = f"{type(error).__name__}: {error}" if self.saved_at != state.global_step else None
                logger.warning(f"Saving the run failed: {type(error).__name__}: {error}")
        # If a process ended before the others, the launcher would end them, perhaps while they write.
        failures = gather_object([failure])
        if any(failures):
            return _not_saved(next(filter(None, failures)))
        return f"The run is saved: go on with resume_from_checkpoint={trainer.checkpoint_folder()!r}"

    def save_after_failure(self) -> str:
        """Save the last step that ended if that is possible, and return how to resume."""
        if self._trainer.accelerator.num_processes > 1:
            return _not_saved("one of several processes cannot save alone")
        if self._moving_since is not None and self._moving_since == self._trainer.state.global_step:
            return _not_saved("the optimizer was moving the weights")
        return self.save_before_stopping()

    # --- saving -----------------------------------------------------------------------------------------------------

    def write(self, write: Callable[[], None], folder: str) -> None:
        """Write the checkpoint of the present step.

        Args:
            write: writes what TRL and transformers save, pushes it, and rotates.
            folder: directory of the checkpoint.

        Raises:
            OSError: the disk is full, or the file system refused.
        """
        trainer, args = self._trainer, self._trainer.args
        # Our files come first, because transformers finally marks the checkpoint as complete, pushes it, and rotates.
        self._empty(folder)
        # Between two optimizer steps of one generation batch, the remaining batch belongs to the run's state.
        done = trainer.micro_batches_done % trainer.micro_batches_per_generation
        if done > 0:
            save_rollouts(trainer.generation_batch, self._rollouts_in(folder))
        sampling = trainer.sampler.save(folder)
        if args.should_save:
            state = trainer.iteration_state() if self._state_to_save is None else self._state_to_save
            of_run = {
                "manifest": True,
                "evaluating": self._evaluating,
                **sampling,
                "micro_batches_done": done,
                "micro_batches_per_iteration": trainer.micro_batches_per_generation,
                "num_processes": trainer.accelerator.num_processes,
            }
            write_text(Path(folder, STATE_FILE), json.dumps(state | of_run, indent=2))
        # No old checkpoint is removed before the new one is completely on the disk.
        limit = args.save_total_limit
        args.save_total_limit = None
        try:
            write()
            if not args.push_to_hub:
                self.make_whole(folder)
        except (RuntimeError, SafetensorError) as error:
            # Both messages come from a full disk.
            if isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error):
                raise OSError(f"{folder} cannot be written ({error}): free some space.") from error
            raise
        finally:
            args.save_total_limit = limit
        self.saved_at = trainer.state.global_step
        if args.should_save:
            rotate_checkpoints(str(Path(folder).parent), limit, trainer.state.best_model_checkpoint, use_mtime=True)

    def make_whole(self, folder: str) -> None:
        """Write the file that marks a checkpoint as complete, once every process has written its files."""
        self._trainer.accelerator.wait_for_everyone()
        if self._trainer.args.should_save:
            write_manifest(Path(folder))

    def _empty(self, folder: str) -> None:
        """Make the empty folder of a checkpoint that is about to be saved."""
        replace_folder_link(Path(folder))
        if self._trainer.args.should_save and os.path.isdir(folder):
            # It is from an abandoned run or an interrupted save, whose files must never be mixed with new ones.
            shutil.rmtree(folder)
        self._trainer.accelerator.wait_for_everyone()
        os.makedirs(folder, exist_ok=True)

    def _rollouts_in(self, folder: str) -> str:
        return os.path.join(folder, ROLLOUTS_FILE.format(rank=self._trainer.accelerator.process_index))

    # --- resuming ---------------------------------------------------------------------------------------------------

    def load(self, checkpoint: str) -> None:
        """Continue from what `write` has written beside TRL's files."""
        trainer = self._trainer
        if os.path.realpath(checkpoint) == os.path.realpath(trainer.checkpoint_folder()):
            self.saved_at = trainer.state.global_step
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
            if trainer.batches is None and is_regrouped(slices):
                slices = None
        trainer.load_iteration_state(state, within_batch=slices is not None)
        if state["evaluating"] and trainer.eval_dataset is not None:
            trainer.args.eval_on_start = True  # transformers reads it next
            self._left_in = checkpoint
        trainer.sampler.load(checkpoint, state)
        if slices is not None:
            trainer.generation_batch, trainer.micro_batches_done = slices, done
        elif done > 0:
            logger.warning(
                f"{checkpoint} was saved within a generation batch by a run with other steps_per_generation, "
                "num_iterations, length_aware_batches or number of processes: the rest of that batch is discarded, "
                "and a new one generated."
            )

    def load_random_state(self, checkpoint: str | None, load: Callable[[str | None], None]) -> None:
        """Continue with the random numbers of a checkpoint, or with those after an evaluation that was repeated."""
        if self._made_again is None:
            load(checkpoint)
        else:  # transformers calls this again before the first step, which follows the evaluation
            set_random_state(self._made_again)
            self._made_again = None

    @contextmanager
    def evaluation(self, load: Callable[[str | None], None]) -> Iterator[None]:
        """Note that the block evaluates; an evaluation that is repeated gets the random numbers of its checkpoint."""
        self._evaluating = True
        stop_if_asked(self._trainer)  # before the first batch, which may take minutes
        if self._left_in is not None:
            load(self._left_in)
        yield
        self._evaluating = False  # not after an error: the checkpoint that follows has an evaluation to repeat
        if self._left_in is not None:
            self._left_in, self._made_again = None, random_state()


def _not_saved(why: str) -> str:
    return f"The run could not be saved ({why}): go on from an earlier checkpoint, with resume_from_checkpoint=true"


def random_state() -> dict[str, Any]:
    """Return the states of all random number generators that a checkpoint contains."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Any]) -> None:
    """Continue from the states that `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
