"""The policy as it is deployed, kept in every checkpoint."""

from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..quantization.schemes import require_served_scheme
from ..records.runs import DEPLOYMENT_FOLDER
from ..trainer import DCGRPOTrainer


class DeploymentCheckpointCallback(TrainerCallback):
    """Keeps the policy as it is deployed in every checkpoint, as `deployment/`: what `vllm serve` takes.

    It is in `deployment_scheme`, or else bf16, and costs the disk of a whole model each time. At the end of training
    the policy goes to `deployment/` in the output directory too, where the trainer does not export it by itself
    (`export_run`). It is the checkpoint that a server is synchronized with (`weight_sync="checkpoint"`), byte for
    byte; with frozen weights, the same tensors in other files.

    Raises:
        ValueError: no engine serves `deployment_scheme`.
    """

    def __init__(self, trainer: DCGRPOTrainer):
        require_served_scheme(trainer.args.deployment_scheme or "bf16")
        self._trainer = trainer

    def on_save(self, args, state, control, **kwargs):
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._trainer.save_deployment(checkpoint / DEPLOYMENT_FOLDER)

    def on_train_end(self, args, state, control, **kwargs):
        if not args.exports_deployment:
            self._trainer.save_deployment(Path(args.output_dir, DEPLOYMENT_FOLDER))
