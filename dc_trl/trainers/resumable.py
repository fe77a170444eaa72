"""Makes a run resumable: it locks its output directory, writes complete checkpoints, and saves before it stops."""

import copy
import json
import math
import os
import random
import shutil
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import IterableDataset
from peft import PeftModel
from safetensors import SafetensorError
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ..files import lock_output, read_object, replace_folder_link, write_text, written_beside
from ..quantization.policy import unwrapped
from ..records.runs import DEPLOYMENT_FOLDER
from ..resuming.checkpoints import (
    ROLLOUTS_FILE,
    STATE_FILE,
    TRAINER_STATE_FILE,
    on_main_process,
    resumable_checkpoint,
)
from ..resuming.interruption import BEGIN_AGAIN, RunInterrupted, resume_command, stop_if_asked
from ..resuming.manifest import write_manifest
from ..rollouts.buffer import load_rollouts, save_rollouts
from ..rollouts.sync_schedule import SyncSchedule
from ..serving.errors import ServerError
from .exporting import ExportingTrainer


# Several processes on a CPU: transformers loads the optimizer to accelerate's "cpu:0", unknown to torch.load.
torch.serialization.register_package(
    11, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


logger = get_logger(__name__)


# How long a process that fails waits for the others to fail too; it cannot save without them.
_OTHERS_FAIL_WITHIN = timedelta(seconds=20)


class WholeStep(NamedTuple):
    """The state between two optimizer steps, kept so that it can be saved after the next step has begun and failed.

    Weights and optimizer are not part of it, because only the optimizer changes them.
    """

    step: int  # number of optimizer steps that have ended
    micro_batches: int  # TRL's count of micro-batches
    rollouts: Any  # the slices of the generation batch in use
    random: dict[str, Any]
    iteration: dict[str, Any]  # result of `_iteration_state`
    sampling: dict[str, Any]  # result of `_sampling_state`
    counted: dict[str, Any]  # counters in transformers' state
    flops: float


class ResumableTrainer(ExportingTrainer):
    """A trainer that locks its output directory, resumes from complete checkpoints, and saves before it is stopped."""

    _train_sampler: Sampler  # sampler of the present training, unless its data set is a stream
    _saved_at: int | None = None  # step of the last checkpoint that the present training saved or resumed from
    _left_in: str | None = None  # a checkpoint whose evaluation was cut short and is repeated
    _made_again: dict[str, Any] | None = None  # random state after that evaluation, until the next step ends
    _evaluating = False  # recorded in checkpoints, to repeat an evaluation that was cut short
    _whole: WholeStep | None = None  # the last step that has ended in the present training
    _moving_from: int | None = None  # the step from which the optimizer is moving the weights
    _resumed_at: int | None = None  # step of the checkpoint from which the present training resumed
    _state_to_save: dict[str, Any] | None = None  # state of the last step that ended, once a later one has failed
    _waiting_limit: int | None = None  # save_total_limit, while a checkpoint is being saved
    _failures: Any = None  # a group of all processes, if there are several

    def __init__(self, model, reward_funcs, args, *positional, **kwargs):
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self.add_callback(_WeightsMove(self))

    # --- training and its end ----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as [`~transformers.Trainer.train`] does; a second call starts again with the present weights.

        λ starts at `lambda_init` again, or from its value in the checkpoint of `resume_from_checkpoint`. `True`
        selects the newest complete checkpoint in `output_dir`; `"auto"` does too, but the run starts from the
        beginning if there is none. A run whose steps are all done is not trained further: its weights are loaded, what
        is still missing at its end (an evaluation, the deployment) is made, and the result is returned.

        The directory is locked during training. If anything ends training early, such as an error of a reward function
        or callback or Ctrl-C, the last step that ended is saved before the error is raised, with a note that says how
        to resume. Nothing is saved while the optimizer is changing the weights, or if one of several processes fails
        alone. A resumed run repeats an evaluation that was cut short from its beginning.

        Raises:
            ValueError: the checkpoint is incomplete, or `output_dir` is in use by another process or not writable.
            ServerError: the server cannot do what training needs; the message says how to resume.
            RunInterrupted: a signal ended the run, with a checkpoint if a step had ended; only if `StopSignals` is
                among the callbacks, as in `dc-trl train`.
        """
        if self._step > 0:  # this object has trained before
            self._start_again()
        output_dir, eval_on_start = self.args.output_dir, self.args.eval_on_start
        self._saved_at, self._evaluating, self._resumed_at = None, False, None
        self._whole = self._moving_from = self._state_to_save = None
        self._left_in = self._made_again = None
        with ExitStack() as stack:

            def open_output() -> str | None:
                stack.enter_context(lock_output(output_dir))
                return resumable_checkpoint(
                    resume_from_checkpoint, output_dir, self.args.save_on_each_node, self.args.checkpoint_hashes
                )

            checkpoint = on_main_process(open_output)
            if checkpoint is not None:
                self._resumed_at = read_object(Path(checkpoint, TRAINER_STATE_FILE))["global_step"]
            if self.accelerator.num_processes > 1:
                # Separate from the group of the gradients, in which others may be waiting for a failed process.
                self._failures = self._failures or dist.new_group(backend="gloo", timeout=_OTHERS_FAIL_WITHIN)
            try:
                return self._train_or_stop(checkpoint, *args, **kwargs)
            except ServerError as error:
                raise ServerError(f"{error} {self._save_before_stopping()} {error.when}.") from error
            except RunInterrupted as stop:
                if self.state.global_step == 0 and self._saved_at is None:
                    raise RunInterrupted(stop.signum, BEGIN_AGAIN) from stop
                way_back = f"{self._save_before_stopping()}, or {resume_command(output_dir)}."
                raise RunInterrupted(stop.signum, way_back) from stop
            except BaseException as error:
                if self._whole is not None or self._moving_from is not None:
                    error.add_note(f"{self._save_after_failure()}, or {resume_command(output_dir)}.")
                raise
            finally:
                self.args.eval_on_start = eval_on_start  # for the next training; see _load_optimizer_and_scheduler

    def _train_or_stop(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        except ServerError:
            stop_if_asked(self)  # a signal may have ended the request, and all processes reach this line
            raise

    def evaluate(self, *args, **kwargs):
        self._evaluating = True
        stop_if_asked(self)  # before the first batch, which may take minutes
        if self._left_in is not None:
            super()._load_rng_state(self._left_in)
        metrics = super().evaluate(*args, **kwargs)
        self._evaluating = False
        if self._left_in is not None:
            self._left_in, self._made_again = None, _random_state()
        return metrics

    @property
    def resumed_at_end(self) -> bool:
        """Whether the present training resumed a run whose steps were all done."""
        return self._resumed_at is not None and self._resumed_at >= self.state.max_steps

    def set_initial_training_values(self, args, dataloader):
        epochs, steps_per_epoch, *others, steps = super().set_initial_training_values(args, dataloader)
        if self._resumed_at is None:
            return (epochs, steps_per_epoch, *others, steps)
        if self._resumed_at < steps:
            return (epochs, steps_per_epoch, *others, steps)
        logger.warning(
            f"All {steps} steps of this run are done (step {self._resumed_at} of resume_from_checkpoint): nothing is "
            "trained. For more steps raise max_steps or num_train_epochs."
        )
        if self.exports_at_end:
            self.exports_at_end = not on_main_process(self._is_exported)
        return (0, steps_per_epoch, *others, steps)  # otherwise transformers would make one step of the last epoch

    def _is_exported(self) -> bool:
        """Return whether the deployment belongs to the last step: older ones were written before its checkpoint."""
        exported = Path(self.args.output_dir, DEPLOYMENT_FOLDER, "config.json")
        saved = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self._resumed_at}", TRAINER_STATE_FILE)
        return exported.is_file() and saved.is_file() and exported.stat().st_mtime >= saved.stat().st_mtime

    def _load_rng_state(self, checkpoint):
        if self._made_again is None:
            super()._load_rng_state(checkpoint)
        else:  # transformers calls this again before the first step, which follows the evaluation
            _set_random_state(self._made_again)
            self._made_again = None

    def _start_again(self) -> None:
        """Reset everything that an earlier training of this object left, except the weights."""
        self._step, self._buffered_inputs, self._accumulated = 0, None, 0
        self._metrics["train"].clear()
        # The engine holds weights of another training.
        self._schedule, self._held = SyncSchedule(self.args.weight_sync_steps), None
        self._drop_ahead()

    def _save_before_stopping(self) -> str:
        """Save the last step that ended, in all processes together, and return where it is and how to resume."""
        self._return_to_whole_step()
        failure = None
        if self._saved_at != self.state.global_step:  # an existing folder of that name may belong to an abandoned run
            try:
                self._save_checkpoint(self.model, trial=None)
                self.callback_handler.on_save(self.args, self.state, self.control)
            except Exception as error:  # such as a full disk; the error that ends the run must be raised
                failure = f"{type(error).__name__}: {error}" if self._saved_at != self.state.global_step else None
                logger.warning(f"Saving the run failed: {type(error).__name__}: {error}")
        # If a process ended before the others, the launcher would end them, perhaps while they write.
        failures = gather_object([failure])
        if any(failures):
            return _not_saved(next(filter(None, failures)))
        return f"The run is saved: go on with resume_from_checkpoint={self._checkpoint_folder(trial=None)!r}"

    def _save_after_failure(self) -> str:
        """Save the last step that ended if that is possible, and return how to resume. Any process may fail alone."""
        if self.accelerator.num_processes > 1 and not self._all_have_failed():
            return _not_saved("another process had not failed, and one alone cannot save")
        torn = self._moving_from is not None and self._moving_from == self.state.global_step
        stands = gather_object([(torn, self.state.global_step)])
        if len(set(stands)) > 1 or torn:
            return _not_saved("the optimizer was moving the weights")
        return self._save_before_stopping()

    def _all_have_failed(self) -> bool:
        """Wait for the other processes at most `_OTHERS_FAIL_WITHIN`, without delaying those that still train."""
        try:
            dist.monitored_barrier(self._failures, timeout=_OTHERS_FAIL_WITHIN)
        except RuntimeError:
            return False
        return True

    # --- the last step that ended -----------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        # DeepSpeed changes the weights at the end of the last micro-batch's backward pass, without an event.
        if self.is_deepspeed_enabled and self.model.training and self.accelerator.sync_gradients:
            self._moving_from = self.state.global_step
        return inputs

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self._end_step()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._end_step()  # sampling in between has changed the random state

    def _end_step(self) -> None:
        """Store the state that the next step will change before it has ended."""
        # transformers updates these counters during a step.
        counted = {name: getattr(self.state, name) for name in ("epoch", "num_input_tokens_seen", "total_flos")}
        in_use = self._step % self._micro_batches_per_iteration > 0
        self._whole = WholeStep(
            step=self.state.global_step,
            micro_batches=self._step,
            rollouts=self._buffered_inputs if in_use else None,
            random=_random_state(),
            iteration=copy.deepcopy(self._iteration_state()),
            sampling=self._sampling_state(),
            counted=counted,
            flops=self.current_flos,
        )
        self._moving_from = None

    def _return_to_whole_step(self) -> None:
        """Restore the state from before an unfinished step, whose gradients are lost."""
        if self._moving_from is not None and self.state.global_step > self._moving_from:
            self._end_step()  # a callback failed after the optimizer
        whole = self._whole
        if whole is None:
            return
        self._step, self._buffered_inputs, self.current_flos = whole.micro_batches, whole.rollouts, whole.flops
        for name, value in whole.counted.items():
            setattr(self.state, name, value)
        _set_random_state(whole.random)
        self._state_to_save = whole.iteration
        self._return_to_sampling_state(whole.sampling)

    # --- position in the generation batch ----------------------------------------------------------------------------

    def _completed_passes(self) -> int:
        """Return the number of completed passes over the present generation batch, below `num_iterations`."""
        return self._step % self._micro_batches_per_iteration // self.args.steps_per_generation

    def _iteration_state(self) -> dict[str, Any]:
        """Return the state with which a subclass resumes, as JSON values."""
        return {}

    def _load_iteration_state(self, state: dict[str, Any], within_batch: bool) -> None:
        """Restore the state of `_iteration_state`; `within_batch` says whether the generation batch is resumed too."""

    # --- position in the data set ------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None and isinstance(self.train_dataset, IterableDataset):
            # transformers assumes that an epoch of a stream has max_steps steps, so a run that has read the whole
            # stream would resume from its beginning. The saved epoch is the number of passes plus the share of
            # max_steps in the last one.
            saved = read_object(Path(resume_from_checkpoint, TRAINER_STATE_FILE))
            epochs = max(0, math.ceil(saved["epoch"]) - 1)
            if not self.args.ignore_data_skip:
                steps = round((saved["epoch"] - epochs) * saved["max_steps"])
                batches = steps * self.args.gradient_accumulation_steps
        elif resume_from_checkpoint is not None:
            for _ in range(epochs):  # TRL's sampler draws each epoch's order after the last one's
                next(iter(self._train_sampler), None)
        return epochs, batches

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _checkpoint_folder(self, trial) -> str:
        return os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _new_checkpoint_folder(self, trial) -> str:
        """Return the empty folder of the checkpoint that is about to be saved."""
        folder = self._checkpoint_folder(trial)
        replace_folder_link(Path(folder))
        if self.args.should_save and os.path.isdir(folder):
            # It is from an abandoned run or an interrupted save, whose files must never be mixed with new ones.
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        os.makedirs(folder, exist_ok=True)
        return folder

    def _save_checkpoint(self, model, trial):
        # This comes first, because transformers finally marks the checkpoint as complete, pushes it, and rotates.
        folder = self._new_checkpoint_folder(trial)
        # Between two optimizer steps of one generation batch, the remaining batch belongs to the run's state.
        done = self._step % self._micro_batches_per_iteration
        if done > 0:
            rollouts = os.path.join(folder, ROLLOUTS_FILE.format(rank=self.accelerator.process_index))
            save_rollouts(self._buffered_inputs, rollouts)
        weight_sync = self._save_weights(folder)
        ahead = self._save_ahead(folder)
        if self.args.should_save:
            state = (self._iteration_state() if self._state_to_save is None else self._state_to_save) | {
                "manifest": True,
                "evaluating": self._evaluating,
                "weight_sync": weight_sync,
                "rollout_ahead": ahead,
                "micro_batches_done": done,
                "micro_batches_per_iteration": self._micro_batches_per_iteration,
                "num_processes": self.accelerator.num_processes,
            }
            write_text(Path(folder, STATE_FILE), json.dumps(state, indent=2))
        # No old checkpoint is removed before the new one is completely on the disk.
        limit = self._waiting_limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            super()._save_checkpoint(model, trial)
            if not self.args.push_to_hub:
                self._make_whole(folder)
        except (RuntimeError, SafetensorError) as error:
            # Both messages come from a full disk.
            if isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error):
                raise OSError(f"{folder} cannot be written ({error}): free some space.") from error
            raise
        finally:
            self.args.save_total_limit, self._waiting_limit = limit, None
        self._saved_at = self.state.global_step
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(self._get_output_dir(trial=trial), limit, best, use_mtime=True)

    def _push_from_checkpoint(self, checkpoint_folder):
        self._make_whole(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)

    def _make_whole(self, folder: str) -> None:
        """Write the file that marks a checkpoint as complete, once every process has written its files."""
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(Path(folder), self.args.checkpoint_hashes)

    def _save(self, output_dir=None, state_dict=None):
        waiting = self.args.save_total_limit
        # The arguments are pickled with the model, and must hold the user's value.
        self.args.save_total_limit = waiting if self._waiting_limit is None else self._waiting_limit
        try:
            with written_beside(Path(self.args.output_dir if output_dir is None else output_dir)) as folder:
                super()._save(str(folder), state_dict)
        finally:
            self.args.save_total_limit = waiting

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        policy = unwrapped(self.accelerator, self.model if model is None else model)
        if self.is_fsdp_enabled or isinstance(policy, PeftModel) or "router_logits" not in policy.can_record_outputs:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if isinstance(policy, PeftModel) and len(policy.peft_config) > 1:
                # With a reference adapter, transformers loads only the adapters in separate folders, and the trained
                # adapter is not in one.
                policy.load_adapter(resume_from_checkpoint, policy.active_adapter, is_trainable=True)
            return
        # transformers saves the experts of a layer separately, looks here for their name in memory, and continues with
        # those of the initial model (its issue 48805, open with 5.17). from_pretrained reads the saved ones.
        saved = type(policy).from_pretrained(resume_from_checkpoint, dtype="auto")
        policy.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result):
        # A parameter that is tied to another one is saved under the other's name, so it is not missing.
        tied = self.model.all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if os.path.realpath(checkpoint) == os.path.realpath(self._checkpoint_folder(trial=None)):
            self._saved_at = self.state.global_step
        path = Path(checkpoint, STATE_FILE)
        if not path.exists():
            logger.warning(
                f"{checkpoint} holds no {STATE_FILE} (DCGRPOTrainer did not save it): lambda starts at "
                f"lambda_init={self.args.lambda_init}."
            )
            return
        state = read_object(path)
        done = state["micro_batches_done"]
        as_before = (state["micro_batches_per_iteration"], state["num_processes"]) == (
            self._micro_batches_per_iteration,
            self.accelerator.num_processes,
        )
        within_batch = done > 0 and as_before
        self._load_iteration_state(state, within_batch)
        if state.get("evaluating") and self.eval_dataset is not None:  # older checkpoints do not have the key
            self.args.eval_on_start = True  # transformers reads it next
            self._left_in = checkpoint
        if "weight_sync" in state:  # absent in older checkpoints
            self._load_weights(checkpoint, state["weight_sync"])
        if state.get("rollout_ahead") is not None:  # also absent in older checkpoints
            self._load_ahead(checkpoint, state["rollout_ahead"])
        if within_batch:
            rollouts = os.path.join(checkpoint, ROLLOUTS_FILE.format(rank=self.accelerator.process_index))
            self._buffered_inputs = load_rollouts(rollouts, self.accelerator.device)
            self._step = done
        elif done > 0:
            logger.warning(
                f"{checkpoint} was saved within a generation batch by a run with other steps_per_generation, "
                "num_iterations or number of processes: the rest of that batch is discarded, and a new one generated."
            )


class _WeightsMove(TrainerCallback):
    """Tells a trainer that its optimizer is about to change the weights."""

    def __init__(self, trainer: ResumableTrainer):
        self._trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._trainer._moving_from = state.global_step


def _not_saved(why: str) -> str:
    return f"The run could not be saved ({why}): go on from an earlier checkpoint, with resume_from_checkpoint=true"


def _random_state() -> dict[str, Any]:
    """Return the states of all random number generators that a checkpoint contains."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
