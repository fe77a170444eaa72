"""The collapse alarm of a trainer."""

from functools import partial

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..config import DCGRPOConfig
from ..resuming.checkpoints import numbered_folders
from ..trainer import DCGRPOTrainer
from .collapse_monitor import Alarm, CollapseMonitor


logger = logging.get_logger(__name__)


class CollapseAlarmCallback(TrainerCallback):
    """Warns when a run collapses: `trainer.add_callback(CollapseAlarmCallback(trainer))`.

    Reads what the trainer logs, ours or any of TRL's that samples, through a [`CollapseMonitor`], which defines the
    signals. Each signal warns once per run, a resumed one included, with its numbers and what to try, and is logged as
    `collapse/<signal>` at its step, in a row of its own. Use `logging_steps=1`: windows count logs.

    With `stop=True`, an alarm also ends training, and names the newest checkpoint from before the trouble; let
    `save_total_limit` keep so many that it is there. `no_signal` does not stop a run, since it harms no weights.

    Args:
        stop (`bool`, defaults to `False`): whether an alarm ends training.
        window (`int`, defaults to 10): logs of the running median, at least 3.

    Attributes:
        alarms (`list[Alarm]`): what rang since training began, or was resumed.
        stopped (`Alarm` or `None`): the alarm that ended training.
        last_good (`str` or `None`): with `stop=True` and an alarm, the checkpoint to go back to; main process only.

    Raises:
        ValueError: a threshold is out of its range, or the trainer logs nothing; the message names the setting.
    """

    def __init__(self, trainer: Trainer, stop: bool = False, window: int = 10):
        args = trainer.args
        if args.logging_strategy == "no":
            raise ValueError(
                "logging_strategy='no' hides what the collapse alarm reads: set logging_strategy='steps', or "
                "collapse_alarm=off."
            )
        adapted = isinstance(args, DCGRPOConfig) and args.constraint == "lagrangian"
        adapted = adapted and args.lambda_lr > 0 and args.lambda_max > args.lambda_min
        lambda_max = args.lambda_max if adapted else None
        self._new_monitor = partial(CollapseMonitor, window, args.max_grad_norm, lambda_max, args.fp16)
        self._monitor = self._new_monitor()
        self._announced: set[str] = set()
        self._stop = stop
        self._trainer = trainer
        self.alarms: list[Alarm] = []
        self.stopped: Alarm | None = None
        self.last_good: str | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._monitor = self._new_monitor()
        self.alarms, self.stopped, self.last_good = [], None, None
        # The log history is part of every checkpoint, so it holds all that was seen and said before.
        self._announced = {
            name.removeprefix("collapse/") for row in state.log_history for name in row if name.startswith("collapse/")
        }
        past = [alarm for row in state.log_history for alarm in self._monitor.update(row["step"], row)]
        self._ring(past, state, control)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._ring(self._monitor.update(state.global_step, logs or {}), state, control)

    def _ring(self, alarms: list[Alarm], state: TrainerState, control) -> None:
        # Every process reads the same logs, so all of them ring, and stop, at the same step.
        for alarm in (alarm for alarm in alarms if alarm.signal not in self._announced):
            self._announced.add(alarm.signal)
            self.alarms.append(alarm)
            message = str(alarm)
            if self._stop and alarm.signal != "no_signal":
                control.should_training_stop = True
                self.stopped = self.stopped or alarm
                if isinstance(self._trainer, DCGRPOTrainer):
                    self._trainer.exports_at_end = False  # nobody should serve what has collapsed
                if state.is_world_process_zero:
                    saved = numbered_folders(self._trainer.args.output_dir, PREFIX_CHECKPOINT_DIR)
                    good = [step for step in saved if step < alarm.sound_until]
                    way_back = "no checkpoint from before the trouble is there to go back to."
                    if good:
                        self.last_good = str(saved[max(good)])
                        way_back = f"go back with resume_from_checkpoint={self.last_good!r}."
                    message += f" Training stops; {way_back}"
            if state.is_world_process_zero:
                logger.warning(message)
            # TRL's log() would also write the metrics of the present step, which are not complete yet.
            Trainer.log(self._trainer, {f"collapse/{alarm.signal}": alarm.value})
