"""The collapse alarm of a trainer, and the checkpoint from before the trouble."""

import os
import shutil
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..config import DCGRPOConfig
from ..resuming.checkpoints import TRAINER_STATE_FILE, numbered_folders
from ..trainer import DCGRPOTrainer
from .collapse_monitor import Alarm, CollapseMonitor


LAST_GOOD = "last-good"

logger = logging.get_logger(__name__)


class CollapseAlarmCallback(TrainerCallback):
    """Warns when a run collapses: `trainer.add_callback(CollapseAlarmCallback(trainer))`.

    Reads what the trainer logs, ours or any of TRL's that samples, through a [`CollapseMonitor`], which defines the
    signals. Each signal warns once per run, a resumed one included, with its numbers, what it usually means and what
    to try, and is logged as `collapse/<signal>` at its step, in a row of its own. Use `logging_steps=1`: windows
    count logs.

    With `stop=True`, an alarm also ends training, and the newest checkpoint from before the trouble is kept, whatever
    `save_total_limit` says: the newest checkpoint that is known to be good is also there as `last-good-<step>` in the
    output directory, as hard links. That costs disk only once the original is rotated away, and at most one more
    checkpoint. It resumes like any other; a run that ends without an alarm removes it. `no_signal` does not stop a
    run, since it harms no weights.

    Args:
        stop (`bool`, defaults to `False`): whether an alarm ends training.
        thresholds: of the [`CollapseMonitor`], by name: `window`, `reward_drop`, `grad_norm_rise`, `mismatch_rise`,
            `mismatch_fall`, `entropy_fall`, `entropy_rise`.

    Attributes:
        alarms (`list[Alarm]`): what rang since training began, or was resumed.
        stopped (`Alarm` or `None`): the alarm that ended training.
        last_good (`str` or `None`): with `stop=True` and an alarm, the checkpoint to go back to; main process only.

    Raises:
        ValueError: a threshold is out of its range, or a setting of the trainer rules the alarm out; the message names
            it.
    """

    def __init__(self, trainer: Trainer, stop: bool = False, **thresholds: Any):
        args = trainer.args
        if args.logging_strategy == "no":
            raise ValueError(
                "logging_strategy='no' hides what the collapse alarm reads: set logging_strategy='steps', or "
                "collapse_alarm=off."
            )
        adapted = isinstance(args, DCGRPOConfig) and args.constraint == "lagrangian"
        if adapted and args.lambda_lr > 0 and args.lambda_max > args.lambda_min:
            thresholds["lambda_max"] = args.lambda_max
        self._settings = thresholds | {"max_grad_norm": args.max_grad_norm, "fp16": args.fp16}
        self._monitor = CollapseMonitor(**self._settings)
        self._announced: set[str] = set()
        self._stop = stop
        self._trainer = trainer
        self._last_good = _LastGoodCheckpoint(args.output_dir)
        self.alarms: list[Alarm] = []
        self.stopped: Alarm | None = None
        self.last_good: str | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self._stop:
            self._require_kept(args, state)
            if args.should_save:
                self._last_good.open(state.global_step)
        self._monitor = CollapseMonitor(**self._settings)
        self.alarms, self.stopped, self.last_good = [], None, None
        # The log history is part of every checkpoint, so it holds all that was seen and said before.
        self._announced = {
            name.removeprefix("collapse/") for row in state.log_history for name in row if name.startswith("collapse/")
        }
        past = [alarm for row in state.log_history for alarm in self._monitor.update(row["step"], row)]
        self._ring(past, state, control)

    def on_log(self, args, state, control, logs=None, **kwargs):
        alarms = self._monitor.update(state.global_step, logs or {})
        if self._stop and args.should_save:
            self._last_good.keep(self._monitor.sound_until)
        self._ring(alarms, state, control)

    def on_save(self, args, state, control, **kwargs):
        self._last_good.saved.add(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if self._stop and args.should_save and not self._announced:
            self._last_good.remove()

    def _ring(self, alarms: list[Alarm], state: TrainerState, control) -> None:
        # Every process reads the same logs, so all of them ring, and stop, at the same step.
        for alarm in alarms:
            if alarm.signal in self._announced:
                continue
            self._announced.add(alarm.signal)
            self.alarms.append(alarm)
            message = str(alarm)
            if self._stop and alarm.signal != "no_signal":
                control.should_training_stop = True
                self.stopped = self.stopped or alarm
                if isinstance(self._trainer, DCGRPOTrainer):
                    self._trainer.exports_at_end = False  # nobody should serve what has collapsed
                if state.is_world_process_zero:
                    message += f" {self._way_back(alarm)}"
            if state.is_world_process_zero:
                logger.warning(message)
            # TRL's log() would also write the metrics of the present step, which are not complete yet.
            Trainer.log(self._trainer, {f"collapse/{alarm.signal}": alarm.value})

    def _way_back(self, alarm: Alarm) -> str:
        # Another signal may have been in doubt for longer.
        self.last_good = self._last_good.newest(min(alarm.sound_until, self._monitor.sound_until))
        if self.last_good is None:
            return "Training stops; no checkpoint from before the trouble is there to go back to."
        return f"Training stops; go back with resume_from_checkpoint={self.last_good!r}."

    def _require_kept(self, args, state: TrainerState) -> None:
        window = self._monitor.window
        limit = args.save_total_limit
        if args.save_strategy != "steps" or not limit or args.logging_strategy != "steps":
            return
        if limit * state.save_steps < window * state.logging_steps:
            raise ValueError(
                f"save_total_limit={limit} with save_steps={state.save_steps} deletes a checkpoint before {window} "
                f"logs (logging_steps={state.logging_steps}) have shown that it is good: set save_total_limit to at "
                f"least {-(-window * state.logging_steps // state.save_steps)}, or raise save_steps."
            )


class _LastGoodCheckpoint:
    """The newest checkpoint that is known to be good, out of reach of the trainer's rotation."""

    def __init__(self, output_dir: str):
        self._folder = Path(output_dir)
        self._partial = self._folder / f"{LAST_GOOD}.partial"
        self._step = 0  # step of the checkpoint that is kept; 0 where none is
        # Other checkpoints belong to a run that was left for an earlier checkpoint, perhaps because it collapsed.
        self._resumed_at = 0
        self.saved: set[int] = set()  # by this run

    def open(self, global_step: int) -> None:
        """Adopts what an interrupted run has kept; a ValueError where a new run would replace it."""
        if self._partial.exists():
            shutil.rmtree(self._partial)
        kept = sorted(self._folder.glob(f"{LAST_GOOD}-*"))
        if kept and global_step == 0:
            raise ValueError(
                f"output_dir={str(self._folder)!r} holds {kept[-1].name} of another run: resume that run, or choose "
                "another output_dir."
            )
        self._resumed_at, self.saved = global_step, set()
        self._step = max(self._found(LAST_GOOD), default=0)

    def keep(self, sound_until: int) -> None:
        """Keeps the newest checkpoint of weights from before `sound_until`, when it is newer than the kept one."""
        good = {step: path for step, path in self._found(PREFIX_CHECKPOINT_DIR).items() if step < sound_until}
        step = max(good, default=0)
        if step <= self._step:
            return
        earlier = list(self._folder.glob(f"{LAST_GOOD}-*"))
        try:
            shutil.copytree(good[step], self._partial, copy_function=_link_or_copy)
        except OSError as error:
            # A full disk must not end the run that this protects.
            shutil.rmtree(self._partial, ignore_errors=True)
            logger.warning(f"{good[step]} cannot be kept from rotation: {error}.")
            return
        destination = self._folder / f"{LAST_GOOD}-{step}"
        if destination.exists():
            shutil.rmtree(destination)  # it belongs to a run that was left for an earlier checkpoint
        self._partial.rename(destination)
        for path in earlier:
            if path != destination:
                shutil.rmtree(path)
        self._step = step

    def newest(self, sound_until: int) -> str | None:
        """The newest checkpoint of weights from before `sound_until`, the kept one included."""
        found = self._found(PREFIX_CHECKPOINT_DIR) | self._found(LAST_GOOD)
        good = [step for step in found if step < sound_until]
        return str(found[max(good)]) if good else None

    def remove(self) -> None:
        for path in self._folder.glob(f"{LAST_GOOD}-*"):
            shutil.rmtree(path)

    def _found(self, prefix: str) -> dict[int, Path]:
        """Whole checkpoints of this run, by step."""
        return {
            step: path
            for step, path in numbered_folders(self._folder, prefix).items()
            if (path / TRAINER_STATE_FILE).is_file() and (step <= self._resumed_at or step in self.saved)
        }


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination)
