"""The callbacks of a training run, chosen by its configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from transformers import PrinterCallback, ProgressCallback

from ..callbacks.collapse import CollapseAlarmCallback
from ..callbacks.deployment import DeploymentCheckpointCallback
from ..callbacks.length_decay import LengthDecayCallback
from ..callbacks.logging import ConstraintProgressCallback
from ..settings.contradictions import require_effect
from ..settings.fields import require_fields, setting
from ..settings.ranges import COUNT
from ..trainer import DCGRPOTrainer


@dataclass
class WatchArguments:
    """Learning rate and alarm, which follow what the run shows."""

    length_decay: bool = setting(
        False,
        "Halve the learning rate again and again once the responses have surged, down to a tenth (arXiv 2602.01826), "
        "in place of lr_scheduler_type. See docs/learning_rate.md.",
    )
    length_decay_period: Annotated[int | None, COUNT] = setting(
        None, "Optimizer steps between two halvings. If it is not set, 1.8 times the step of the surge."
    )
    collapse_alarm: Literal["off", "warn", "stop"] = setting(
        "warn",
        "What happens when reward, entropy, gradient norm, mismatch or λ show a collapse: "
        '"off" does nothing, "warn" warns once, and "stop" warns and ends the run, which keeps the last good '
        "checkpoint. See docs/collapse.md.",
    )

    def __post_init__(self):
        require_fields(self)
        require_effect(self)


def add_callbacks(trainer: DCGRPOTrainer, watch: WatchArguments) -> CollapseAlarmCallback | None:
    """Add callbacks that watch the run, write its deployment checkpoints and show its progress; return the alarm."""
    if watch.length_decay:
        trainer.add_callback(LengthDecayCallback(trainer, watch.length_decay_period))
    alarm = None
    if watch.collapse_alarm != "off":
        alarm = CollapseAlarmCallback(trainer, stop=watch.collapse_alarm == "stop")
        trainer.add_callback(alarm)
    if trainer.args.exports_deployment:
        trainer.add_callback(DeploymentCheckpointCallback(trainer))
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(ConstraintProgressCallback())
    return alarm
