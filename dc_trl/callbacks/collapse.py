"""Detects online that a run collapses, from nothing but the metrics that a trainer logs, and warns of it.

The rules and every threshold are ours; docs/collapse.md has the evidence for them.
"""

import math
import statistics
import sys
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..config import DCGRPOConfig
from ..resuming.checkpoints import numbered_folders
from ..settings.ranges import Range, require_number
from ..trainer import DCGRPOTrainer


logger = logging.get_logger(__name__)

# Numbers below it lose digits, and a share of one can be 0. They count as none.
_SMALLEST = sys.float_info.min

# docs/collapse.md says what each of them means, and what to try first.
SIGNALS = ("reward", "grad_norm", "mismatch", "entropy_low", "entropy_high", "lambda", "no_signal")


class Alarm(NamedTuple):
    """A signal that rang.

    Attributes:
        signal: one of :data:`SIGNALS`.
        metric: name of the logged metric.
        step: optimizer step of the log at which it rang.
        value: the metric's level there (running median; for counted signals the last value).
        reference: the level that it is compared with, in the metric's units.
        threshold: the level beyond which it counts as trouble.
        sound_until: step of the log until which nothing was wrong: a checkpoint from before it is good.
    """

    signal: str
    metric: str
    step: int
    value: float
    reference: float
    threshold: float
    sound_until: int

    def __str__(self) -> str:
        return (
            f"Collapse alarm at step {self.step}, {self.signal}: {self.metric} is {self.value:.4g} (reference "
            f"{self.reference:.4g}, alarm at {self.threshold:.4g}); all was well until step {self.sound_until}. "
            "docs/collapse.md says what to try."
        )


_Levels = tuple[float, float, float]  # of an alarm: value, reference, threshold


class _MedianDetector:
    """Rings when the running median of `window` logs has been beyond a threshold in `length` successive logs.

    It is in doubt from half-way to the threshold on; after 10 windows there, that level is the run's normal one.

    Attributes:
        sound_until: step of the log until which all was well.
    """

    def __init__(self, window: int, length: int | None = None):
        self.sound_until = 0
        self._window = window
        self._length = length or window
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)
        self._beyond = 0
        self._half_way = 0

    def update(self, step: int, value: float) -> _Levels | None:
        """Take the value of a log; return the levels of the alarm when it rings."""
        leaving = self._recent[0][1] if len(self._recent) == self._window else None
        self._recent.append((step, value))
        if len(self._recent) < self._window:
            return None
        levels, severity = self._judge([value for _, value in self._recent], leaving)
        self._half_way = self._half_way + 1 if severity >= 0.5 else 0
        self._beyond = self._beyond + 1 if severity >= 1 else 0
        in_doubt = self._beyond > 0 or 0 < self._half_way <= 10 * self._window
        if not in_doubt:
            self.sound_until = self._recent[0][0]
        return levels if self._beyond == self._length else None

    def _judge(self, values: list[float], leaving: float | None) -> tuple[_Levels, float]:
        """Return the levels, and how far the median has gone: 0 at the reference, 1 at the threshold.

        Args:
            values: of the last `window` logs.
            leaving: the value before them; None in the first window.
        """
        raise NotImplementedError


class _RewardDrop(_MedianDetector):
    """The running median against its best, in units of the gain or level, and of the noise of a single log."""

    SHARE = 0.3  # of the reward's gain or level

    def __init__(self, window: int):
        super().__init__(window)
        self._first: float | None = None
        self._best = -math.inf
        self._differences: deque[float] = deque(maxlen=100)

    def _judge(self, values: list[float], leaving: float | None) -> tuple[_Levels, float]:
        median = statistics.median(values)
        self._first = median if self._first is None else self._first
        self._best = max(self._best, median)
        new = values if leaving is None else values[-2:]
        self._differences.extend(abs(second - first) for first, second in pairwise(new))
        # The median of |difference| of two normal values is 0.6745 · √2 standard deviations; a trend hardly moves it.
        noise = statistics.median(self._differences) / (0.6745 * math.sqrt(2))
        drop = max(self.SHARE * max(self._best - self._first, abs(self._best)), 4 * noise)
        return (median, self._best, self._best - drop), (self._best - median) / drop if drop > 0 else 0.0


class _LevelChange(_MedianDetector):
    """The running median against the run's own level: up for a `factor` above 1, down for one below.

    The level is the median of the first window, or of all logs before the last window where that is further from the
    threshold: an early level that was out of the ordinary, or a long drift, does not hide a change.

    Args:
        bound: the threshold is at least this far, whatever the level.
    """

    def __init__(self, window: int, factor: float, bound: float):
        super().__init__(window)
        self._factor = factor
        self._bound = bound
        self._early: float | None = None
        self._past: list[float] = []  # sorted; zeros (no gradient, no measurement) say nothing about a level

    def _judge(self, values: list[float], leaving: float | None) -> tuple[_Levels, float]:
        if leaving is not None and leaving >= _SMALLEST:
            insort(self._past, leaving)
        median = statistics.median(values)
        if abs(median) < _SMALLEST:
            median = 0.0
        if self._early is None:
            if median <= 0:
                return (median, 0.0, 0.0), 0.0
            self._early = median
        nearest, furthest = (min, max) if self._factor > 1 else (max, min)
        usual = statistics.median(self._past) if len(self._past) >= self._window else self._early
        reference = nearest(self._early, usual)
        threshold = furthest(self._factor * reference, self._bound)
        if median == 0:
            severity = 1.0 if self._factor < 1 else 0.0
        else:
            severity = math.log(median / reference) / math.log(threshold / reference)
        return (median, reference, threshold), severity


class _Streak(_MedianDetector):
    """Rings when a condition, which `limit` stands for, has held in `length` successive logs."""

    def __init__(self, length: int, holds: Callable[[float], bool], limit: float):
        super().__init__(1, length)
        self._holds = holds
        self._limit = limit

    def _judge(self, values: list[float], leaving: float | None) -> tuple[_Levels, float]:
        return (values[0], self._limit, self._limit), float(self._holds(values[0]))


class CollapseMonitor:
    """Watches the logged metrics of a run for a collapse; each signal rings once.

    A *log* is one call of :meth:`update`. The rules, with what they were tried on, are the table of docs/collapse.md.
    They look at the running median of the last ``window`` logs, and must hold in ``window`` successive logs: spikes
    of fewer than ``window`` / 2 logs do not ring, and a lasting change is known about 1.5 windows after it. A log in
    which a metric is missing, None or NaN does not count for that metric.

    Its state is a function of the logs: to continue a run, pass its logs again.

    Args:
        window: logs of the running median, at least 3.
        max_grad_norm: the run's clipping bound ≥ 0; below it a gradient is applied as it is. 0: no clipping.
        lambda_max: the run's upper bound of λ > 0; None: λ is not adapted, and not watched.
        fp16: whether the run trains in float16 with a loss scale, whose search overflows now and then.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    GRAD_NORM_RISE = 10.0  # factors of a metric's own level
    MISMATCH_RISE = 5.0
    ENTROPY_RISE, ENTROPY_FALL = 3.0, 0.1
    ENTROPY_HIGH, ENTROPY_LOW = 1.0, 0.02  # nats per token
    NO_SPREAD = 0.99  # share of the groups
    MISMATCH = ("discrepancy/mean", "sampling/sampling_logp_difference/mean")  # ours, and that of TRL's trainers

    def __init__(
        self,
        window: int = 10,
        max_grad_norm: float = 1.0,
        lambda_max: float | None = None,
        fp16: bool = False,
    ):
        require_number("window", window, Range(least=3, whole=True))
        self._rung: set[str] = set()
        most = math.inf if lambda_max is None else lambda_max
        # A log of several steps holds the mean of λ, which is rounded.
        pinned = _Streak(2 * window, lambda value: value >= most * (1 - 1e-9), most)
        without_spread = _Streak(2 * window, lambda share: share >= self.NO_SPREAD, self.NO_SPREAD)
        overflow = _Streak(window if fp16 else 1, lambda norm: not math.isfinite(norm), math.inf)
        self._detectors: list[tuple[str, str, _MedianDetector]] = [
            ("reward", "reward", _RewardDrop(window)),
            ("grad_norm", "grad_norm", _LevelChange(window, self.GRAD_NORM_RISE, max_grad_norm)),
            *(("mismatch", metric, _LevelChange(window, self.MISMATCH_RISE, 0.0)) for metric in self.MISMATCH),
            ("entropy_low", "entropy", _LevelChange(window, self.ENTROPY_FALL, self.ENTROPY_LOW)),
            ("entropy_high", "entropy", _LevelChange(window, self.ENTROPY_RISE, self.ENTROPY_HIGH)),
            ("grad_norm", "grad_norm", overflow),
            ("lambda", "lagrangian/lambda", pinned),
            ("no_signal", "frac_reward_zero_std", without_spread),
        ]

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Take the metrics that the trainer logged at an optimizer step; return the signals that ring.

        Metrics that are of no interest are ignored.
        """
        alarms = []
        for signal, metric, detector in self._detectors:
            if metrics.get(metric) is None:
                continue
            value = float(metrics[metric])
            if not math.isfinite(value) and not isinstance(detector, _Streak):
                continue  # no level; only a streak may wait for such numbers
            levels = detector.update(step, value)
            if levels is not None and signal not in self._rung:
                self._rung.add(signal)
                alarms.append(Alarm(signal, metric, step, *levels, detector.sound_until))
        return alarms


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
