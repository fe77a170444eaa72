"""The policy as it is deployed, kept at every save and at the end of training."""

from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..quantization.schemes import require_served_scheme
from ..records.runs import DEPLOYMENT_FOLDER
from ..trainer import DCGRPOTrainer
from .collapse import CollapseAlarmCallback


class DeploymentCheckpointCallback(TrainerCallback):
    """Keeps the policy as it is deployed: what `vllm serve` takes, in the scheme that the run samples in.

    At each save it goes to `deployment` within the checkpoint, at the end of training to `deployment` in the output
    directory. It is the checkpoint that a server is synchronized with (`weight_sync="checkpoint"`), byte for byte;
    with frozen weights, the same tensors in other files.

    Args:
        alarm (`CollapseAlarmCallback`, *optional*): when it stopped the run, there is no policy to deploy at its end.

    Raises:
        ValueError: no engine serves `deployment_scheme`.
    """

    def __init__(self, trainer: DCGRPOTrainer, alarm: CollapseAlarmCallback | None = None):
        require_served_scheme(trainer.args.deployment_scheme or "bf16")
        self._trainer = trainer
        self._alarm = alarm

    def on_save(self, args, state, control, **kwargs):
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._trainer.save_deployment(checkpoint / DEPLOYMENT_FOLDER)

    def on_train_end(self, args, state, control, **kwargs):
        if self._alarm is None or self._alarm.stopped is None:
            self._trainer.save_deployment(Path(args.output_dir, DEPLOYMENT_FOLDER))
