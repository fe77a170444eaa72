"""The callbacks of a training run, chosen by its configuration."""

from dataclasses import dataclass
from typing import Literal

from transformers import PrinterCallback, ProgressCallback

from ..callbacks.collapse import CollapseAlarmCallback
from ..callbacks.deployment import DeploymentCheckpointCallback
from ..callbacks.length_decay import LengthDecayCallback
from ..callbacks.logging import ConstraintProgressCallback
from ..settings.described import described
from ..settings.ranges import COUNT, SHARE, require_numbers
from ..trainer import DCGRPOTrainer


@described
@dataclass
class WatchArguments:
    """Learning rate and alarm, which follow what the run shows.

    Args:
        length_decay (`bool`, defaults to `False`):
            Halve the learning rate again and again once the responses have surged (arXiv 2602.01826), in place of
            lr_scheduler_type. See docs/learning_rate.md.
        length_decay_period (`int`, *optional*):
            Optimizer steps between two halvings; by default 1.8 times the step of the surge.
        length_decay_floor (`float`, defaults to `0.1`):
            Lowest learning rate, as a fraction of learning_rate.
        collapse_alarm (`str`, defaults to `"warn"`):
            What happens when reward, entropy, gradient norm, mismatch or lambda show a collapse: nothing (`"off"`),
            one warning (`"warn"`), or a warning and the end of the run, which keeps the last good checkpoint
            (`"stop"`). See docs/collapse.md.
    """

    length_decay: bool = False
    length_decay_period: int | None = None
    length_decay_floor: float = 0.1
    collapse_alarm: Literal["off", "warn", "stop"] = "warn"

    def __post_init__(self):
        require_numbers(self, {"length_decay_period": COUNT, "length_decay_floor": SHARE})
        if not self.length_decay:
            for name, default in {"length_decay_period": None, "length_decay_floor": 0.1}.items():
                value = getattr(self, name)
                if value != default:
                    raise ValueError(
                        f"{name}={value!r} has no effect without length_decay=true: set it, or leave it out."
                    )


def add_callbacks(trainer: DCGRPOTrainer, watch: WatchArguments) -> CollapseAlarmCallback | None:
    """Add callbacks that watch the run, write its deployment checkpoints and show its progress; return the alarm."""
    if watch.length_decay:
        trainer.add_callback(LengthDecayCallback(trainer, watch.length_decay_period, watch.length_decay_floor))
    alarm = None
    if watch.collapse_alarm != "off":
        alarm = CollapseAlarmCallback(trainer, stop=watch.collapse_alarm == "stop")
        trainer.add_callback(alarm)
    if trainer.args.exports_deployment:
        trainer.add_callback(DeploymentCheckpointCallback(trainer, alarm))
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(ConstraintProgressCallback())
    return alarm
