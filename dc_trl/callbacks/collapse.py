"""The collapse alarm of a trainer, which keeps the checkpoint from before the trouble."""

from functools import partial
from pathlib import Path

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..config import DCGRPOConfig
from ..records.runs import TRAINER_STATE_FILE
from ..resuming.checkpoints import numbered_folders
from ..trainer import DCGRPOTrainer
from .collapse_monitor import Alarm, CollapseMonitor


logger = logging.get_logger(__name__)


class CollapseAlarmCallback(TrainerCallback):
    """Warns when a run collapses: `trainer.add_callback(CollapseAlarmCallback(trainer))`.

    Reads what the trainer logs, ours or any of TRL's that samples, through a [`CollapseMonitor`], which defines the
    signals. Each signal warns once per run, a resumed one included, with its numbers and what to try, and is logged as
    `collapse/<signal>` at its step, in a row of its own. Use `logging_steps=1`: windows count logs.

    With `stop=True`, an alarm also ends training, and the newest checkpoint that is known to be good is not deleted by
    `save_total_limit`: it is the state's `best_model_checkpoint`, which transformers keeps. `no_signal` does not stop
    a run, since it harms no weights.

    Args:
        stop (`bool`, defaults to `False`): whether an alarm ends training.
        window (`int`, defaults to 10): logs of the running median, at least 3.
        reward_drop (`float`, defaults to 0.3): share of the reward's gain or level that it may fall, in (0, 1].

    Attributes:
        alarms (`list[Alarm]`): what rang since training began, or was resumed.
        stopped (`Alarm` or `None`): the alarm that ended training.
        last_good (`str` or `None`): with `stop=True` and an alarm, the checkpoint to go back to; main process only.

    Raises:
        ValueError: a threshold is out of its range, or a setting of the trainer rules the alarm out; the message names
            it.
    """

    def __init__(self, trainer: Trainer, stop: bool = False, window: int = 10, reward_drop: float = 0.3):
        args = trainer.args
        if args.logging_strategy == "no":
            raise ValueError(
                "logging_strategy='no' hides what the collapse alarm reads: set logging_strategy='steps', or "
                "collapse_alarm=off."
            )
        if stop and args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True chooses the checkpoint to keep, as does a collapse alarm that stops: set "
                "it to False, or collapse_alarm=warn."
            )
        adapted = isinstance(args, DCGRPOConfig) and args.constraint == "lagrangian"
        adapted = adapted and args.lambda_lr > 0 and args.lambda_max > args.lambda_min
        lambda_max = args.lambda_max if adapted else None
        self._new_monitor = partial(CollapseMonitor, window, reward_drop, args.max_grad_norm, lambda_max, args.fp16)
        self._monitor = self._new_monitor()
        self._announced: set[str] = set()
        self._stop = stop
        self._trainer = trainer
        # Other checkpoints belong to a run that was left for an earlier checkpoint, perhaps because it collapsed.
        self._resumed_at = 0
        self._saved: set[int] = set()
        self.alarms: list[Alarm] = []
        self.stopped: Alarm | None = None
        self.last_good: str | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self._stop:
            self._require_kept(args, state)
        self._resumed_at, self._saved = state.global_step, set()
        self._monitor = self._new_monitor()
        self.alarms, self.stopped, self.last_good = [], None, None
        # The log history is part of every checkpoint, so it holds all that was seen and said before.
        self._announced = {
            name.removeprefix("collapse/") for row in state.log_history for name in row if name.startswith("collapse/")
        }
        past = [alarm for row in state.log_history for alarm in self._monitor.update(row["step"], row)]
        self._ring(past, state, control)

    def on_log(self, args, state, control, logs=None, **kwargs):
        alarms = self._monitor.update(state.global_step, logs or {})
        if self._stop and self.stopped is None:
            # With save_total_limit=1, transformers deletes all but the best checkpoint after the log of the end.
            ended = "train_loss" in (logs or {})
            state.best_model_checkpoint = None if ended else self._newest_good(self._monitor.sound_until)
        self._ring(alarms, state, control)

    def on_save(self, args, state, control, **kwargs):
        self._saved.add(state.global_step)

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
                    # Another signal may have been in doubt for longer.
                    self.last_good = self._newest_good(min(alarm.sound_until, self._monitor.sound_until))
                    state.best_model_checkpoint = self.last_good
                    way_back = "no checkpoint from before the trouble is there to go back to."
                    if self.last_good is not None:
                        way_back = f"go back with resume_from_checkpoint={self.last_good!r}."
                    message += f" Training stops; {way_back}"
            if state.is_world_process_zero:
                logger.warning(message)
            # TRL's log() would also write the metrics of the present step, which are not complete yet.
            Trainer.log(self._trainer, {f"collapse/{alarm.signal}": alarm.value})

    def _newest_good(self, sound_until: int) -> str | None:
        """Return the newest whole checkpoint of this run whose weights are from before `sound_until`."""
        folders = numbered_folders(Path(self._trainer.args.output_dir), PREFIX_CHECKPOINT_DIR)
        good = {
            step: path
            for step, path in folders.items()
            if step < sound_until
            and (step <= self._resumed_at or step in self._saved)
            and (path / TRAINER_STATE_FILE).is_file()
        }
        return str(good[max(good)]) if good else None

    def _require_kept(self, args, state: TrainerState) -> None:
        """Refuse a rotation that deletes a checkpoint before `window` logs have shown that it is good."""
        limit, logs = args.save_total_limit, self._monitor.window * state.logging_steps
        if args.save_strategy != "steps" or not limit or args.logging_strategy != "steps":
            return
        # One of the checkpoints that are left is the good one, and never the newest.
        if max(limit - 1, 1) * state.save_steps < logs:
            raise ValueError(
                f"save_total_limit={limit} with save_steps={state.save_steps} deletes a checkpoint before "
                f"{self._monitor.window} logs (logging_steps={state.logging_steps}) have shown that it is good: set "
                f"save_total_limit to at least {1 - (-logs // state.save_steps)}, or raise save_steps."
            )
