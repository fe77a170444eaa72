"""Detects online that a run collapses, from nothing but the metrics that a trainer logs, and warns of it.

The rules and every threshold are ours; docs/metrics.md has the evidence for them.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.utils import logging

from ..config import DCGRPOConfig
from ..records.estimators import noise_of
from ..records.runs import ENDED, Run
from ..records.verdict import destroyed
from ..run.manifest import checkpoints
from ..settings.fields import Range, require_number
from ..trainer import DCGRPOTrainer
from ..version import DOCS


logger = logging.get_logger(__name__)

# Numbers below it lose digits, and a share of one can be 0. They count as none.
_SMALLEST = sys.float_info.min

# docs/metrics.md says what each of them means, and what to try first.
SIGNALS = ("reward", "grad_norm", "mismatch", "lambda", "no_signal")


class Alarm(NamedTuple):
    """A signal that rang; levels are in the metric's units."""

    signal: str  # one of `SIGNALS`
    metric: str  # name of the logged metric
    step: int  # optimizer step of the log at which it rang
    value: float  # the metric's level there (running median; for counted signals the last value)
    reference: float  # the level that it is compared with
    threshold: float  # the level beyond which it counts as trouble
    # Step of the log until which nothing was wrong: a checkpoint from before it is good. 0 if none is known to be.
    sound_until: int

    def __str__(self) -> str:
        well = f"all was well until step {self.sound_until}" if self.sound_until else "no step is known to be well"
        return (
            f"Collapse alarm at step {self.step}, {self.signal}: {self.metric} is {self.value:.4g} (reference "
            f"{self.reference:.4g}, alarm at {self.threshold:.4g}); {well}. {DOCS}/metrics.md says what to try."
        )


# Reference, threshold, and how far the running median has gone from the one (0) to the other (1).
_Judgement = tuple[float, float, float]
# Of the values that a metric has had, and of the running medians since there were enough of them.
_Rule = Callable[[list[float], list[float]], _Judgement]


class _Detector:
    """Rings when `rule` has found the running median of `window` logs beyond its threshold in `length` logs in a row.

    It is in doubt from half-way to the threshold on; after 10 windows there, that level is the run's normal one.
    """

    def __init__(self, signal: str, metric: str, rule: _Rule, window: int, length: int):
        self.signal, self.metric = signal, metric
        self._rule, self._window, self._length = rule, window, length
        self._steps: list[int] = []
        self._values: list[float] = []
        self._medians: list[float] = []
        self.sound_until = self.beyond = self._half_way = 0
        self.judged = False  # whether there were logs enough

    def unknown(self, step: int) -> Alarm | None:
        """Take a log whose value is not finite: not known to be within the threshold."""
        self.beyond += 1
        if self.beyond != self._length:
            return None
        return Alarm(self.signal, self.metric, step, math.nan, math.nan, math.nan, self.sound_until)

    def update(self, step: int, value: float) -> Alarm | None:
        self._steps.append(step)
        self._values.append(value)
        if len(self._values) < self._window:
            return None
        self.judged = True
        median = statistics.median(self._values[-self._window :])
        self._medians.append(median)
        reference, threshold, severity = self._rule(self._values, self._medians)
        self._half_way = 0 if severity < 0.5 else self._half_way + 1
        self.beyond = 0 if severity < 1 else self.beyond + 1
        if not self.beyond and not 0 < self._half_way <= 10 * self._window:
            self.sound_until = self._steps[-self._window]
        if self.beyond != self._length:
            return None
        return Alarm(self.signal, self.metric, step, median, reference, threshold, self.sound_until)


def _reward_drop(window: int) -> _Rule:
    """Judge the running median by its best, in units of the gain or level, and of the noise of a single log.

    The best is one that held for a window, as the drop has to. The first log, that of the policy as it began, counts
    too: a rate that is too high ruins it within the window.
    """
    held: list[float] = []

    def judge(values: list[float], medians: list[float]) -> _Judgement:
        held.append(min(medians[-window:]))
        noise, found = noise_of(values), list[_Judgement]()
        for best, margin in ((max(held), CollapseMonitor.NOISE), (values[0], CollapseMonitor.NOISE_OF_THE_FIRST)):
            drop = max(CollapseMonitor.REWARD_SHARE * max(best - medians[0], abs(best)), margin * noise)
            found.append((best, best - drop, (best - medians[-1]) / drop if drop > 0 else 0.0))
        return max(found, key=lambda judgement: judgement[2])

    return judge


def _mismatch_rise(window: int, values: list[float], medians: list[float]) -> _Judgement:
    """Judge the running median by the run's own level.

    The level is the first median, or that of all logs before the last window where that is lower: an early level out
    of the ordinary, or a long drift, does not hide a rise.
    """
    # Zeros (no measurement) say nothing about a level.
    if medians[-1] < _SMALLEST:
        return 0.0, 0.0, 0.0
    level = next(median for median in medians if median >= _SMALLEST)
    past = [value for value in values[:-window] if value >= _SMALLEST]
    if len(past) >= window:
        level = min(level, statistics.median(past))
    rise = math.log(medians[-1] / level) / math.log(CollapseMonitor.MISMATCH_RISE)
    return level, CollapseMonitor.MISMATCH_RISE * level, rise


def _reaches(limit: float) -> _Rule:
    """Judge the last value: a mean of several steps is rounded, and NaN is not known to be below the limit."""
    return lambda values, medians: (limit, limit, float(not values[-1] < limit * (1 - 1e-9)))


class CollapseMonitor:
    """Watches the logged metrics of a run for a collapse; each signal rings once.

    A *log* is one call of :meth:`update`. The rules (docs/metrics.md) look at the running median of the last
    ``window`` logs, and must hold in ``window`` successive logs: spikes of fewer than ``window`` / 2 logs do not ring,
    and a lasting change is known about 1.5 windows after it. A log in which a metric is missing or None does not count
    for that metric; one in which it is not finite counts as beyond its threshold. To continue a run, pass its logs
    again.

    Args:
        window: logs of the running median, at least 3.
        lambda_max: the run's upper bound of λ > 0; None: λ is not adapted, and not watched.
        fp16: whether the run trains in float16 with a loss scale, whose search overflows now and then.

    Raises:
        ValueError: `window` is out of its range.
    """

    REWARD_SHARE = 0.3  # of the reward's gain or level
    NOISE, NOISE_OF_THE_FIRST = 2.0, 4.0  # standard deviations of the reward of a single log
    MISMATCH_RISE = 5.0  # a factor of its own level
    NO_SPREAD = 0.99  # share of the groups
    MISMATCH = ("discrepancy/mean", "sampling/sampling_logp_difference/mean")  # ours, and that of TRL's trainers

    def __init__(self, window: int = 10, lambda_max: float | None = None, fp16: bool = False):
        require_number("window", window, Range(least=3, whole=True))
        self._rung: set[str] = set()
        pinned = _reaches(math.inf if lambda_max is None else lambda_max)
        self._levels = [
            _Detector("reward", "reward", _reward_drop(window), window, window),
            *(_Detector("mismatch", name, partial(_mismatch_rise, window), window, window) for name in self.MISMATCH),
        ]
        self._overflow = _Detector("grad_norm", "grad_norm", _reaches(math.inf), 1, window if fp16 else 1)
        self._detectors = [
            *self._levels,
            _Detector("lambda", "lagrangian/lambda", pinned, 1, 2 * window),
            _Detector("no_signal", "frac_reward_zero_std", _reaches(self.NO_SPREAD), 1, 2 * window),
            self._overflow,
        ]

    @property
    def sound_until(self) -> int:
        """Step of the log until which all levels were well; 0 if none is known to be."""
        return min((each.sound_until for each in self._levels if each.judged), default=0)

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Take the metrics that the trainer logged at an optimizer step; return the signals that ring.

        Metrics that are of no interest are ignored.
        """
        alarms = []
        for detector in self._detectors:
            if metrics.get(detector.metric) is None:
                continue
            value = float(metrics[detector.metric])
            known = math.isfinite(value) or detector is self._overflow
            alarm = detector.update(step, value) if known else detector.unknown(step)
            if alarm is not None and alarm.signal not in self._rung:
                self._rung.add(alarm.signal)
                alarms.append(alarm)
        # All was well only as long as no other metric was in trouble.
        troubled = {each.metric: each.sound_until for each in self._levels if each.beyond and each.judged}
        return [
            alarm._replace(sound_until=min([alarm.sound_until, *(troubled | {alarm.metric: step}).values()]))
            for alarm in alarms
        ]


class CollapseAlarmCallback(TrainerCallback):
    """Warns when a run collapses: `trainer.add_callback(CollapseAlarmCallback(trainer))`.

    Reads what the trainer logs, ours or any of TRL's that samples, through a [`CollapseMonitor`], which defines the
    signals. Each signal warns once per run, a resumed one included, with its numbers and what to try, and is logged as
    `collapse/<signal>` at its step, in a row of its own. Use `logging_steps=1`: windows count logs.

    With `stop=True`, an alarm also ends training, and names the newest checkpoint from before the trouble. Our trainer
    keeps that one whatever `save_total_limit` says, and the next one, which may become it. `no_signal` does not stop a
    run, since it harms no weights.

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
        self._new_monitor = partial(CollapseMonitor, window, lambda_max, args.fp16)
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
        if self._stop and isinstance(self._trainer, DCGRPOTrainer):
            self._trainer.checkpoints.sound_until = self._monitor.sound_until

    def _ring(self, alarms: list[Alarm], state: TrainerState, control) -> None:
        # Every process reads the same logs, so all of them ring, and stop, at the same step.
        for alarm in (alarm for alarm in alarms if alarm.signal not in self._announced):
            self._announced.add(alarm.signal)
            self.alarms.append(alarm)
            message = " ".join(filter(None, [str(alarm), destroyed(Run("", state.log_history))]))
            ends = {}
            if self._stop and alarm.signal != "no_signal":
                control.should_training_stop = True
                self.stopped = self.stopped or alarm
                ends = {f"{ENDED}collapse_alarm/{alarm.signal}": 1.0}
                if isinstance(self._trainer, DCGRPOTrainer):
                    self._trainer.exports_at_end = False  # nobody should serve what has collapsed
                if state.is_world_process_zero:
                    saved = checkpoints(self._trainer.args.output_dir)
                    good = (str(folder) for step, folder in saved.items() if step < alarm.sound_until)
                    self.last_good = next(good, self.last_good)
                    way_back = f"go back with resume_from_checkpoint={self.last_good!r}" if self.last_good else None
                    message += f" Training stops; {way_back or 'no checkpoint is from before the trouble'}."
            if state.is_world_process_zero:
                logger.warning(message)
            # TRL's log() would also write the metrics of the present step, which are not complete yet.
            Trainer.log(self._trainer, {f"collapse/{alarm.signal}": alarm.value} | ends)
