"""Writes the deployable checkpoint of a run, and never over that of another run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import set_aside
from ..quantization.policy import unwrapped
from ..quantization.tensors import require_merged_form
from ..records.runs import DEPLOYMENT_FOLDER, TRAINER_STATE_FILE
from ..settings.paths import serve_line
from .sampling import SamplingTrainer


# Imported only where a policy is exported: compressed-tensors and its dependencies take 0.15 s.
if TYPE_CHECKING:
    from ..quantization.checkpoint import CheckpointWriter

logger = get_logger(__name__)


class Exporter:
    """Exports the policy of a trainer.

    Args:
        trainer: trainer of the run.
    """

    def __init__(self, trainer: SamplingTrainer):
        self._trainer = trainer
        self._writer: CheckpointWriter | None = None
        # Deployments that may be replaced, because this trainer wrote them or resumes the run that did.
        self._replaceable: set[Path] = set()

    def begin_training(self, checkpoint: str | None) -> None:
        """Begin a training that resumes from a checkpoint, or from none."""
        folder = deployment_in(self._trainer.args.output_dir)
        self._replaceable.discard(folder)
        if checkpoint is not None and Path(checkpoint).resolve().parent == folder.parent:
            self._replaceable.add(folder)

    def require_exportable(self) -> None:
        """Refuse, before the first step, to train a policy that cannot be exported after the last one.

        Raises:
            ValueError: it cannot.
        """
        try:
            require_merged_form(unwrapped(self._trainer.accelerator, self._trainer.model))
            self._open_writer()
        except ValueError as error:
            raise ValueError(f"{error} Or set export_run=False to train without an export.") from error

    def export(self, folder: Path, save: Callable[[Path], None]) -> None:
        """Write the deployable checkpoint by `save`, and rename another run's folder. Every process must call it."""
        with self._trainer.parts_clock.part("saving"):
            if self._trainer.accelerator.is_main_process:
                folder.parent.mkdir(parents=True, exist_ok=True)
                if folder not in self._replaceable:
                    for kept in set_aside([folder]).values():
                        logger.warning(f"{folder} belongs to another run and is kept as {kept.name}.")
            save(folder)
            self._replaceable.add(folder)
            logger.info(f"The policy is exported: {serve_line(folder)}")

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write the deployable checkpoint, see `RunTrainer.save_deployment`. Every process must call it."""
        tensors = self._trainer.deployed_tensors()
        if self._trainer.accelerator.is_main_process:
            self._open_writer().write(tensors, directory)
        for _ in tensors:
            pass  # takes part in gathering

    def is_of_step(self, step: int) -> bool:
        """Return whether the deployment belongs to a step: older ones were written before its checkpoint."""
        output_dir = self._trainer.args.output_dir
        exported = Path(output_dir, DEPLOYMENT_FOLDER, "config.json")
        saved = Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}", TRAINER_STATE_FILE)
        return exported.is_file() and saved.is_file() and exported.stat().st_mtime >= saved.stat().st_mtime

    def _open_writer(self) -> CheckpointWriter:
        if self._writer is None:
            from ..quantization.checkpoint import CheckpointWriter

            trainer = self._trainer
            scheme = trainer.args.deployment_scheme or "bf16"
            policy = unwrapped(trainer.accelerator, trainer.model)
            self._writer = CheckpointWriter(policy, scheme, trainer.processing_class)
        return self._writer


def deployment_in(directory: str | os.PathLike[str]) -> Path:
    """Return the folder of the deployable checkpoint in an output directory."""
    return Path(directory).resolve() / DEPLOYMENT_FOLDER
