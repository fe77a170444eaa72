"""What makes a run one that can be stopped: an output directory of its own, whole checkpoints, a last save."""

import os
import shutil
from contextlib import ExitStack

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .deployed_trainer import DeployedPolicyTrainer
from .files import lock_output
from .resuming.checkpoints import on_main_process, resumable_checkpoint
from .resuming.interruption import RunInterrupted
from .serving.errors import ServerError


# Several processes on a CPU: transformers loads the optimizer to accelerate's "cpu:0", which torch.load does not know.
torch.serialization.register_package(
    11, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


class ResumableTrainer(DeployedPolicyTrainer):
    """A trainer that locks its output directory, resumes from whole checkpoints, and saves before it is stopped."""

    _saved_at: int | None = None  # step of the last checkpoint that the present training saved or resumed from

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        output_dir = self.args.output_dir
        self._saved_at = None
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
                raise RunInterrupted(stop.signum, f"{self._save_before_stopping()}.") from stop

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
                "resume_from_checkpoint=true,"
            )
        return f"The run is saved: go on with resume_from_checkpoint={self._checkpoint_folder(trial=None)!r}"

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
        super()._save_checkpoint(model, trial)
        self._saved_at = self.state.global_step

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if os.path.realpath(checkpoint) == os.path.realpath(self._checkpoint_folder(trial=None)):
            self._saved_at = self.state.global_step
