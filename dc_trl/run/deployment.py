"""Writes the policy as it is deployed, for `vllm serve`: at the end of a run, and in every checkpoint on request."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import set_aside
from ..processes import raised_together
from ..quantization.checkpoint import CheckpointWriter
from ..quantization.policy import base_model, unwrapped
from ..quantization.schemes import require_served_scheme
from ..quantization.tensors import deployed_tensors, policy_tensors, require_merged_form
from ..records.estimators import recent_mean
from ..records.runs import DEPLOYMENT_FOLDER
from ..settings.paths import serve_line


logger = get_logger(__name__)


class Deployment:
    """The deployed form of a trainer's policy: in `deployment_scheme` or bf16, merged or with its adapter beside it.

    Args:
        trainer: trainer of the policy.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def save(self, directory: str | os.PathLike[str]) -> None:
        """See `DCGRPOTrainer.save_deployment`."""
        trainer = self._trainer
        beside = self._policy if trainer.args.lora_deployment == "adapter" else None
        if beside is None:
            gathered_by_trl = trainer.vllm_generation._iter_named_params if trainer.use_vllm else None
            tensors = deployed_tensors(trainer.accelerator, trainer.model, gathered_by_trl)
        else:
            tensors = policy_tensors(beside, adapters=False)
        with raised_together(OSError):
            try:
                if trainer.accelerator.is_main_process:
                    folder = Path(directory).absolute()  # a link in its place is not followed
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    if not (folder / "config.json").is_file():
                        for kept in set_aside([folder]).values():
                            logger.warning(f"{folder} holds no deployed checkpoint and is kept as {kept.name}.")
                    self._writer.write(tensors, folder, self._facts(), beside)
            finally:
                for _ in tensors:
                    pass  # takes part in gathering

    def export(self, directory: str | os.PathLike[str]) -> None:
        """Save into the folder of a run, and say how to serve it."""
        folder = Path(directory).resolve() / DEPLOYMENT_FOLDER
        with self._trainer.clock.part("saving"):
            self.save(folder)
        logger.info(f"The policy is exported: {serve_line(folder)}")

    def require_exportable(self) -> None:
        """Raise a ValueError before the first step if the policy cannot be exported after the last one."""
        try:
            require_merged_form(self._policy)
            _ = self._writer
        except ValueError as error:
            raise ValueError(f"{error} Or set export_run=False to train without an export.") from error

    @property
    def _policy(self) -> Any:
        return unwrapped(self._trainer.accelerator, self._trainer.model)

    @cached_property
    def _writer(self) -> CheckpointWriter:
        trainer = self._trainer
        return CheckpointWriter(self._policy, trainer.args.deployment_scheme or "bf16", trainer.processing_class)

    def _facts(self) -> dict[str, Any]:
        """Return what the contract of a deployed checkpoint says of the run; None for what was not measured."""
        trainer = self._trainer
        history = trainer.checkpoints.policy_run
        return {
            "base_model": trainer.args.hub_base_model_id or base_model(self._policy).config.name_or_path or None,
            **dict(zip(("engine", "engine_version", "kv_cache_dtype"), trainer.sampler.identity, strict=True)),
            "step": trainer.checkpoints.policy_step,
            "discrepancy": recent_mean(history.series("discrepancy/mean").values),
            "k3_kl": recent_mean(history.series("discrepancy/k3_kl").values),
        }


class DeploymentCheckpointCallback(TrainerCallback):
    """Keeps the policy as it is deployed in every checkpoint, as `deployment/`: what `vllm serve` takes.

    It is in `deployment_scheme`, or else bf16, and costs the disk of a whole model each time. At the end of training
    the policy goes to `deployment/` in the output directory too, where the trainer does not export it by itself
    (`export_run`). It is the checkpoint that a server is synchronized with (`weight_sync="checkpoint"`), byte for
    byte; with frozen weights, the same tensors in other files.

    Args:
        trainer ([`DCGRPOTrainer`]): trainer whose policy is kept.

    Raises:
        ValueError: no engine serves `deployment_scheme`.
    """

    def __init__(self, trainer: Any):
        require_served_scheme(trainer.args.deployment_scheme or "bf16")
        self._trainer = trainer

    def on_save(self, args, state, control, **kwargs):
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._trainer.save_deployment(checkpoint / DEPLOYMENT_FOLDER)

    def on_train_end(self, args, state, control, **kwargs):
        if not args.exports_deployment:
            self._trainer.save_deployment(Path(args.output_dir, DEPLOYMENT_FOLDER))
