"""What makes a run one that can be stopped: an output directory of its own, whole checkpoints, a last save."""

import json
import math
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import IterableDataset
from peft import PeftModel
from safetensors import SafetensorError
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import lock_output, read_object, write_text
from ..quantization.policy import unwrapped
from ..resuming.checkpoints import (
    ROLLOUTS_FILE,
    STATE_FILE,
    TRAINER_STATE_FILE,
    on_main_process,
    resumable_checkpoint,
)
from ..resuming.interruption import BEGIN_AGAIN, RunInterrupted, resume_command, stop_if_asked
from ..rollouts.buffer import load_rollouts, save_rollouts
from ..rollouts.sync_schedule import SyncSchedule
from ..serving.errors import ServerError
from .exporting import ExportingTrainer


# Several processes on a CPU: transformers loads the optimizer to accelerate's "cpu:0", which torch.load does not know.
torch.serialization.register_package(
    11, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


logger = get_logger(__name__)


class ResumableTrainer(ExportingTrainer):
    """A trainer that locks its output directory, resumes from whole checkpoints, and saves before it is stopped."""

    _train_sampler: Sampler  # of the present training, where its data set is no stream
    _saved_at: int | None = None  # step of the last checkpoint that the present training saved or resumed from
    _evaluating = False  # what a checkpoint says of an evaluation that was cut short

    # --- training, and how it ends ----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Trains as [`~transformers.Trainer.train`] does; called again, as in a new trainer with the present weights.

        λ starts at `lambda_init` again, or where the checkpoint of `resume_from_checkpoint` left it; `True` is the
        newest one in `output_dir` that is whole. The directory is locked meanwhile. When the vLLM server is lost, the
        run is saved before the error is raised. An evaluation that a signal or a lost server has cut short is made
        again, whole, by the run that goes on.

        Raises:
            ValueError: the checkpoint is not whole, another process trains into `output_dir`, or it cannot be written.
            ServerError: the server cannot do what training needs; the message says how to go on.
            RunInterrupted: a signal has ended the run, with a checkpoint if a step had ended; only where `StopSignals`
                is among the callbacks, as in `dc-trl train`.
        """
        if self._step > 0:  # this object has trained before
            self._start_again()
        output_dir, eval_on_start = self.args.output_dir, self.args.eval_on_start
        self._saved_at, self._evaluating = None, False
        with ExitStack() as stack:

            def open_output() -> str | None:
                stack.enter_context(lock_output(output_dir))
                return resumable_checkpoint(resume_from_checkpoint, output_dir, self.args.save_on_each_node)

            checkpoint = on_main_process(open_output)
            try:
                return super().train(checkpoint, *args, **kwargs)
            except ServerError as error:
                raise ServerError(f"{error} {self._save_before_stopping()} when the server is up again.") from error
            except RunInterrupted as stop:
                if self.state.global_step == 0 and self._saved_at is None:
                    raise RunInterrupted(stop.signum, BEGIN_AGAIN) from stop
                way_back = f"{self._save_before_stopping()}, or {resume_command(output_dir)}."
                raise RunInterrupted(stop.signum, way_back) from stop
            finally:
                self.args.eval_on_start = eval_on_start  # of the next training; see _load_optimizer_and_scheduler

    def evaluate(self, *args, **kwargs):
        self._evaluating = True
        stop_if_asked(self)  # before the first batch, which may take minutes
        metrics = super().evaluate(*args, **kwargs)
        self._evaluating = False
        return metrics

    def _start_again(self) -> None:
        """Forgets what an earlier training of this object has left, save the weights."""
        self._step, self._buffered_inputs, self._accumulated = 0, None, 0
        self._metrics["train"].clear()
        # The engine holds the weights of another training's step.
        self._schedule, self._held = SyncSchedule(self.args.weight_sync_steps), None
        self._drop_ahead()

    def _save_before_stopping(self) -> str:
        """Saves what the run has reached, all processes together; says where, and how to go on."""
        failure = None
        if self._saved_at != self.state.global_step:  # a folder of that name may be of a run that was left
            try:
                self._save_checkpoint(self.model, trial=None)
                self.callback_handler.on_save(self.args, self.state, self.control)
            except (OSError, SafetensorError, RuntimeError) as error:  # how the writers report a full disk
                failure = str(error)
        # A process that ends before the others has the launcher end them, perhaps while they write.
        failures = gather_object([failure])
        if any(failures):
            return (
                f"The run could not be saved ({next(filter(None, failures))}): go on from an earlier checkpoint, with "
                "resume_from_checkpoint=true"
            )
        return f"The run is saved: go on with resume_from_checkpoint={self._checkpoint_folder(trial=None)!r}"

    # --- where the run stands in its generation batch ---------------------------------------------------------------

    def _completed_passes(self) -> int:
        """Passes over the present generation batch that are behind us; below `num_iterations`."""
        return self._step % self._micro_batches_per_iteration // self.args.steps_per_generation

    def _iteration_state(self) -> dict[str, Any]:
        """What a subclass has to go on with, as JSON values."""
        return {}

    def _load_iteration_state(self, state: dict[str, Any], within_batch: bool) -> None:
        """Takes up what `_iteration_state` gave; `within_batch` says whether the generation batch goes on too."""

    # --- where it stands in its data --------------------------------------------------------------------------------

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
            # transformers takes an epoch of a stream to be max_steps long, and a run that has been through the stream
            # would go on from its begin. The epoch that it saves counts each pass, and steps in it by max_steps.
            saved = read_object(Path(resume_from_checkpoint, TRAINER_STATE_FILE))
            epochs = max(0, math.ceil(saved["epoch"]) - 1)
            if not self.args.ignore_data_skip:
                steps = round((saved["epoch"] - epochs) * saved["max_steps"])
                batches = steps * self.args.gradient_accumulation_steps
        elif resume_from_checkpoint is not None:
            for _ in range(epochs):  # TRL's sampler draws the order of an epoch from where the last one has left it
                next(iter(self._train_sampler), None)
        return epochs, batches

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _checkpoint_folder(self, trial) -> str:
        return os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _new_checkpoint_folder(self, trial) -> str:
        """The folder of the checkpoint that is about to be saved, with nothing in it."""
        folder = self._checkpoint_folder(trial)
        if self.args.should_save and os.path.isdir(folder):
            # Of a run that was left, or of a save that was cut short: a mixture with it must never count as whole.
            shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
        os.makedirs(folder, exist_ok=True)
        return folder

    def _save_checkpoint(self, model, trial):
        # First, since transformers ends with what makes a checkpoint count as whole, pushes it, and rotates.
        folder = self._new_checkpoint_folder(trial)
        # Between two optimizer steps of one generation batch the rest of the batch is part of the run's state.
        done = self._step % self._micro_batches_per_iteration
        if done > 0:
            rollouts = os.path.join(folder, ROLLOUTS_FILE.format(rank=self.accelerator.process_index))
            save_rollouts(self._buffered_inputs, rollouts)
        weight_sync = self._save_weights(folder)
        ahead = self._save_ahead(folder)
        if self.args.should_save:
            state = self._iteration_state() | {
                "evaluating": self._evaluating,
                "weight_sync": weight_sync,
                "rollout_ahead": ahead,
                "micro_batches_done": done,
                "micro_batches_per_iteration": self._micro_batches_per_iteration,
                "num_processes": self.accelerator.num_processes,
            }
            write_text(Path(folder, STATE_FILE), json.dumps(state, indent=2))
        super()._save_checkpoint(model, trial)
        self._saved_at = self.state.global_step

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        policy = unwrapped(self.accelerator, self.model if model is None else model)
        if self.is_fsdp_enabled or isinstance(policy, PeftModel) or "router_logits" not in policy.can_record_outputs:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if isinstance(policy, PeftModel) and len(policy.peft_config) > 1:
                # Where there is a reference adapter too, transformers loads the adapters in folders of their own
                # alone, and the one that is trained lies in none.
                policy.load_adapter(resume_from_checkpoint, policy.active_adapter, is_trainable=True)
            return
        # transformers saves the experts of a layer one by one, looks here for their name in memory, and goes on with
        # those of the initial model (its issue 48805, open with 5.17). from_pretrained reads what was saved.
        saved = type(policy).from_pretrained(resume_from_checkpoint, dtype="auto")
        policy.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result):
        # What is tied to another parameter is saved once, under that one's name: it is not missing.
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
                f"{checkpoint} holds no {STATE_FILE} (it was not saved by DCGRPOTrainer): lambda starts at "
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
        if state.get("evaluating") and self.eval_dataset is not None:  # the key is absent in older checkpoints
            self.args.eval_on_start = True  # which transformers reads next
        if "weight_sync" in state:  # saved since there is one
            self._load_weights(checkpoint, state["weight_sync"])
        if state.get("rollout_ahead") is not None:  # likewise
            self._load_ahead(checkpoint, state["rollout_ahead"])
        if within_batch:
            rollouts = os.path.join(checkpoint, ROLLOUTS_FILE.format(rank=self.accelerator.process_index))
            self._buffered_inputs = load_rollouts(rollouts, self.accelerator.device)
            self._step = done
        elif done > 0:
            logger.warning(
                f"{checkpoint} was saved within a generation batch by a run with other steps_per_generation, "
                "num_iterations or number of processes: the rest of that batch is dropped and a new one generated."
            )
