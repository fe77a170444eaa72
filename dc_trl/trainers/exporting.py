"""Writes a run's deployment and history beside TRL's files, without callbacks of the user; see `export_run`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from accelerate.logging import get_logger
from transformers import TrainerCallback

from ..config import DCGRPOConfig
from ..files import set_aside
from ..quantization.policy import unwrapped
from ..quantization.tensors import require_merged_form
from ..records.runs import DEPLOYMENT_FOLDER
from ..resuming.checkpoints import on_main_process
from ..settings.paths import serve_line
from .batching import LengthAwareTrainer
from .history import LambdaLoggingCallback


logger = get_logger(__name__)

# The callbacks that transformers accepts: instances, or classes that it instantiates.
Callback: TypeAlias = TrainerCallback | type[TrainerCallback]


class ExportingTrainer(LengthAwareTrainer):
    """A trainer that exports the trained policy if `export_run` and `deployment_scheme` are set.

    Attributes:
        exports_at_end (`bool`): whether the present training exports the policy when it ends; `train` sets it each
            time. A callback that stops a run whose result should not be served clears it.
    """

    def __init__(
        self, model, reward_funcs, args: DCGRPOConfig, *, callbacks: Sequence[Callback] | None = None, **kwargs
    ):
        # Set before TRL's constructor, which adds callbacks.
        self.exports_at_end = args.exports_deployment
        self._own_history: LambdaLoggingCallback | None = None
        # Deployments that may be replaced, because this trainer wrote them or resumes the run that did.
        self._replaceable: set[Path] = set()
        callbacks = list(callbacks or ())
        if args.keeps_history and not any(map(_keeps_history, callbacks)):
            self._own_history = LambdaLoggingCallback()
            callbacks.insert(0, self._own_history)  # a user's callback finds the files of the same event written
        super().__init__(model, reward_funcs, args, callbacks=callbacks, **kwargs)

    def add_callback(self, callback):
        """Add a callback; a `LambdaLoggingCallback` replaces the trainer's own."""
        if self._own_history is not None and _keeps_history(callback):
            self.remove_callback(LambdaLoggingCallback)
            self._own_history = None
        super().add_callback(callback)

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        self.exports_at_end = self.args.exports_deployment
        folder = _deployment_in(self.args.output_dir)
        self._replaceable.discard(folder)
        if resume_from_checkpoint is not None and Path(resume_from_checkpoint).resolve().parent == folder.parent:
            self._replaceable.add(folder)
        if self.exports_at_end:
            on_main_process(self._require_exportable)
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        if self.exports_at_end:
            self._export(folder)
        return output

    def save_model(self, output_dir=None, _internal_call=False):
        """Save the model as [`~transformers.Trainer.save_model`] does, and the deployable checkpoint beside it.

        The checkpoint is written to `deployment/` in the same directory if `export_run` and a served
        `deployment_scheme` are set. A folder of that name that this trainer did not write is kept as `deployment.1/`
        and so on. transformers' own calls for each `checkpoint-N` export nothing, because each would cost the disk
        space of a whole model; `DeploymentCheckpointCallback` exports them on request.

        Args:
            output_dir (`str`, *optional*): directory to write to, by default the `output_dir` of the configuration.

        Raises:
            OSError: the file system refused; the previous contents are unharmed.
        """
        folder = _deployment_in(self.args.output_dir if output_dir is None else output_dir)
        if self.args.exports_deployment and not _internal_call and not self._is_pushed(folder):
            self._export(folder)
        super().save_model(output_dir, _internal_call)

    def _is_pushed(self, folder: Path) -> bool:
        """Return whether a user's call of `save_model` pushes this deployment, in which case the push writes it."""
        args = self.args
        return args.push_to_hub and args.hub_deployment != "none" and folder == _deployment_in(args.output_dir)

    def _require_exportable(self) -> None:
        """Refuse, before the first step, to train a policy that cannot be exported after the last one."""
        try:
            require_merged_form(unwrapped(self.accelerator, self.model))
            self._open_deployment_writer()
        except ValueError as error:
            raise ValueError(f"{error} Or set export_run=False to train without an export.") from error

    def _export(self, folder: Path) -> None:
        """Write the deployable checkpoint, and rename another run's folder. Every process must call it."""
        if self.accelerator.is_main_process:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder not in self._replaceable:
                for kept in set_aside([folder]).values():
                    logger.warning(f"{folder} belongs to another run and is kept as {kept.name}.")
        self.save_deployment(folder)
        self._replaceable.add(folder)
        logger.info(f"The policy is exported: {serve_line(folder)}")


def _deployment_in(directory: str | os.PathLike[str]) -> Path:
    return Path(directory).resolve() / DEPLOYMENT_FOLDER


def _keeps_history(callback: Any) -> bool:
    kind = callback if isinstance(callback, type) else type(callback)
    return issubclass(kind, LambdaLoggingCallback)
