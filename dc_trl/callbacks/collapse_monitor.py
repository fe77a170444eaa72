"""Detects online that a run collapses, from nothing but the metrics that a trainer logs.

The rules and every default are ours; docs/collapse.md has the evidence for them.
"""

import math
import statistics
import sys
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..settings.ranges import SHARE, Range


# Numbers below it lose digits, and a share of one can be 0. They count as none.
_SMALLEST = sys.float_info.min

# What a signal usually means, and what to try.
ADVICE = {
    "reward": (
        "The policy is losing what it had learned.",
        "go back to the last good checkpoint with a lower learning_rate, or let it decay (length_decay); if the "
        "mismatch rose before, see its advice; if only the prompts became harder, go on.",
    ),
    "grad_norm": (
        "Updates are dominated by a few extreme tokens or by a numerical overflow.",
        "lower learning_rate, lower max_grad_norm; look at discrepancy/probs_diff_max and at the completions for "
        "garbage; with fp16, bf16=true.",
    ),
    "mismatch": (
        "The engine that samples and the policy that trains drift apart, so the gradients belong to another policy.",
        "check that new weights reach the engine (weight_sync, the server's log); a deployment_scheme of higher "
        "precision, or train_through_quantization; where weights lag, a smaller weight_sync_steps, constraint=static "
        "with constraint_form=log_ratio, or rollout_correction=ppo_clip; a lower or decaying learning_rate.",
    ),
    "degenerate": (
        "The policy has lost its reward and the mismatch with it: it answers what every engine is sure of, as a "
        "penalty on each difference asks for when it outweighs the reward.",
        "go back to the last good checkpoint with a lower lambda_max (lambda_init, if it is static), a smaller "
        "weight_sync_steps, or constraint=none.",
    ),
    "entropy_low": (
        "The policy has become deterministic: groups of equal answers, and nothing left to explore.",
        "a higher epsilon_high or temperature, a lower learning_rate, harder prompts.",
    ),
    "entropy_high": (
        "The policy is falling into noise, as it does when its gradients are mostly noise.",
        "go back to the last good checkpoint with a lower learning_rate; check the reward for answers that everyone "
        "or no one gets, and the mismatch; with a static or large lambda, lower lambda_max: a penalty that outweighs "
        "the reward only pushes sampled tokens down.",
    ),
    "lambda": (
        "The discrepancy stays above discrepancy_tolerance whatever the penalty: the constraint cannot be met, and a "
        "large penalty can raise the discrepancy itself.",
        "raise discrepancy_tolerance to the engines' own level, choose a deployment_scheme of higher precision, or "
        "lower lambda_max; a higher lambda_max only if the discrepancy does fall as lambda rises.",
    ),
    "no_signal": (
        "All answers to a prompt earn the same reward, so there is nothing to learn from: everything is solved, or "
        "nothing is.",
        "look at the reward: near its maximum the run is done, else take easier prompts, more num_generations or a "
        "finer reward, and check the reward function and max_completion_length.",
    ),
}


@dataclass(frozen=True)
class Alarm:
    """A signal that rang.

    Attributes:
        signal: one of :data:`ADVICE`.
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
        meaning, remedy = ADVICE[self.signal]
        return (
            f"Collapse alarm at step {self.step}, {self.signal}: {self.metric} is {self.value:.4g} (reference "
            f"{self.reference:.4g}, alarm at {self.threshold:.4g}); all was well until step {self.sound_until}. "
            f"{meaning} Try: {remedy} See docs/collapse.md."
        )


_Levels = tuple[float, float, float]  # of an alarm: value, reference, threshold


class _Detector:
    """Watches one metric.

    Attributes:
        in_doubt: whether something may have been wrong since `sound_until`.
        sound_until: step of the log until which all was well.
    """

    in_doubt = False
    sound_until = 0

    def update(self, step: int, value: float) -> _Levels | None:
        """Takes the value of a log; returns the levels of its alarm when it rings."""
        raise NotImplementedError


class _MedianDetector(_Detector):
    """Rings when the running median has been beyond a threshold in `window` successive logs.

    It is in doubt from half-way to the threshold on; after 10 windows there, that level is the run's normal one.
    """

    def __init__(self, window: int):
        self._window = window
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)
        self._beyond = 0
        self._half_way = 0

    def update(self, step: int, value: float) -> _Levels | None:
        if not math.isfinite(value):
            return None
        leaving = self._recent[0][1] if len(self._recent) == self._window else None
        self._recent.append((step, value))
        self._observe(value, leaving)
        if len(self._recent) < self._window:
            return None
        levels, severity = self._judge(statistics.median(value for _, value in self._recent))
        self._half_way = self._half_way + 1 if severity >= 0.5 else 0
        self._beyond = self._beyond + 1 if severity >= 1 else 0
        self.in_doubt = self._beyond > 0 or 0 < self._half_way <= 10 * self._window
        if not self.in_doubt:
            self.sound_until = self._recent[0][0]
        return levels if self._beyond == self._window else None

    def _observe(self, value: float, leaving: float | None) -> None:
        """Takes the newest value, and the one that leaves the window."""
        raise NotImplementedError

    def _judge(self, median: float) -> tuple[_Levels, float]:
        """The levels, and how far the median has gone: 0 at the reference, 1 at the threshold."""
        raise NotImplementedError


class _RewardDrop(_MedianDetector):
    NOISE = 4.0  # standard deviations of a single log's reward
    DIFFERENCES = 100  # logs that the noise is estimated from

    def __init__(self, window: int, share: float):
        super().__init__(window)
        self._share = share
        self._first: float | None = None
        self._best = -math.inf
        self._last: float | None = None
        self._differences: deque[float] = deque(maxlen=self.DIFFERENCES)
        self.severity = 0.0  # the last one

    def _observe(self, value: float, leaving: float | None) -> None:
        if self._last is not None:
            self._differences.append(abs(value - self._last))
        self._last = value

    def _judge(self, median: float) -> tuple[_Levels, float]:
        if self._first is None:
            self._first = median
        self._best = max(self._best, median)
        # The median of |difference| of two normal values is 0.6745 · √2 standard deviations; a trend hardly moves it.
        noise = statistics.median(self._differences) / (0.6745 * math.sqrt(2))
        drop = max(self._share * max(self._best - self._first, abs(self._best)), self.NOISE * noise)
        self.severity = (self._best - median) / drop if drop > 0 else 0.0
        return (median, self._best, self._best - drop), self.severity


class _LevelChange(_MedianDetector):
    """The running median against the run's own level: up for a `factor` above 1, down for one below.

    The level is the median of the first window, or of all logs before the last window where that is further from the
    threshold: an early level that was out of the ordinary, or a long drift, does not hide a change.
    """

    def __init__(self, window: int, factor: float, bound: float):
        super().__init__(window)
        self._factor = factor
        self._bound = bound
        self._early: float | None = None
        self._past: list[float] = []  # sorted; zeros (no gradient, no measurement) say nothing about a level

    def _observe(self, value: float, leaving: float | None) -> None:
        if leaving is not None and leaving >= _SMALLEST:
            insort(self._past, leaving)

    def _judge(self, median: float) -> tuple[_Levels, float]:
        if abs(median) < _SMALLEST:
            median = 0.0
        if self._early is None and median > 0:
            self._early = median
        if self._early is None:
            return (median, 0.0, 0.0), 0.0
        nearest, furthest = (min, max) if self._factor > 1 else (max, min)
        usual = statistics.median(self._past) if len(self._past) >= self._window else self._early
        reference = nearest(self._early, usual)
        threshold = furthest(self._factor * reference, self._bound)
        if median == 0:
            severity = 1.0 if self._factor < 1 else 0.0
        else:
            severity = math.log(median / reference) / math.log(threshold / reference)
        return (median, reference, threshold), severity


class _FallWithReward(_LevelChange):
    """A fall of the running median while the reward is down too; each of them may fall alone."""

    def __init__(self, window: int, factor: float, reward: _RewardDrop):
        super().__init__(window, factor, math.inf)
        self._reward = reward

    def _judge(self, median: float) -> tuple[_Levels, float]:
        levels, severity = super()._judge(median)
        return levels, min(severity, self._reward.severity)


class _Streak(_Detector):
    """Rings when a condition, which `limit` stands for, has held in `length` successive logs."""

    def __init__(self, length: int, holds: Callable[[float], bool], limit: float):
        self._length = length
        self._holds = holds
        self._limit = limit
        self._count = 0

    def update(self, step: int, value: float) -> _Levels | None:
        self.in_doubt = self._holds(value)
        self._count = self._count + 1 if self.in_doubt else 0
        if not self.in_doubt:
            self.sound_until = step
        return (value, self._limit, self._limit) if self._count == self._length else None


class CollapseMonitor:
    """Watches the logged metrics of a run for a collapse; each signal rings once.

    A *log* is one call of :meth:`update`; m is the running median of a metric over its last ``window`` logs, *best*
    the highest m so far. *level* is the median of the first ``window`` logs, or of all logs before the last
    ``window``: the lower of the two for a rise, the higher for a fall.

    - ``reward`` (reward): best − m ≥ max(``reward_drop`` · max(best − first m, abs(best)), 4 σ). σ is the standard
      deviation of a single log, from the differences of successive ones.
    - ``grad_norm`` (grad_norm): m ≥ max(``grad_norm_rise`` · level, ``max_grad_norm``). At once when it is not finite;
      with ``fp16``, where a loss scale is searched, when that happens in ``window`` successive logs.
    - ``mismatch`` (discrepancy/mean, discrepancy/log_ppl_abs_diff, or TRL's sampling/sampling_logp_difference/mean):
      m ≥ ``mismatch_rise`` · level.
    - ``degenerate`` (discrepancy/mean): m ≤ ``mismatch_fall`` · level, while the reward's m is beyond its own
      threshold.
    - ``entropy_low`` (entropy, nats per token): m ≤ min(``entropy_fall`` · level, 0.02).
    - ``entropy_high`` (entropy): m ≥ max(``entropy_rise`` · level, 1).
    - ``lambda`` (lagrangian/lambda): at ``lambda_max`` in 2 ``window`` successive logs. δ̄ is then above ε on average:
      below it, λ would leave its bound.
    - ``no_signal`` (frac_reward_zero_std): at least 0.99 in 2 ``window`` successive logs.

    The conditions on m must hold in ``window`` successive logs. So spikes of fewer than ``window`` / 2 logs do not
    ring, and a lasting change is known about 1.5 windows after it. A log in which a metric is missing, None or NaN
    does not count for that metric.

    Its state is a function of the logs: to continue a run, pass its logs again.

    Args:
        window: logs of the running median, at least 3.
        reward_drop: share of the reward's gain or level, in (0, 1].
        grad_norm_rise: factor above 1.
        mismatch_rise: factor above 1.
        mismatch_fall: factor in (0, 1).
        entropy_fall: factor in (0, 1).
        entropy_rise: factor above 1.
        max_grad_norm: the run's clipping bound ≥ 0; below it a gradient is applied as it is. 0: no clipping.
        lambda_max: the run's upper bound of λ > 0; None: λ is not adapted, and not watched.
        fp16: whether the run trains in float16 with a loss scale.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    ENTROPY_LOW = 0.02
    ENTROPY_HIGH = 1.0
    NO_SPREAD = 0.99
    MISMATCH = ("discrepancy/mean", "discrepancy/log_ppl_abs_diff", "sampling/sampling_logp_difference/mean")

    def __init__(
        self,
        window: int = 10,
        reward_drop: float = 0.3,
        grad_norm_rise: float = 10.0,
        mismatch_rise: float = 5.0,
        mismatch_fall: float = 0.1,
        entropy_fall: float = 0.1,
        entropy_rise: float = 3.0,
        max_grad_norm: float = 1.0,
        lambda_max: float | None = None,
        fp16: bool = False,
    ):
        if not Range(least=3, whole=True).allows(window):
            raise ValueError(f"window={window!r} is invalid: use a whole number of logs, at least 3.")
        for name, value, allowed, form in (
            ("reward_drop", reward_drop, SHARE, "a share in (0, 1]"),
            ("grad_norm_rise", grad_norm_rise, Range(above=1), "a finite factor above 1"),
            ("mismatch_rise", mismatch_rise, Range(above=1), "a finite factor above 1"),
            ("mismatch_fall", mismatch_fall, Range(above=0, below=1), "a factor above 0 and below 1"),
            ("entropy_fall", entropy_fall, Range(above=0, below=1), "a factor above 0 and below 1"),
            ("entropy_rise", entropy_rise, Range(above=1), "a finite factor above 1"),
        ):
            if not allowed.allows(value):
                raise ValueError(f"{name}={value!r} is invalid: use {form}.")
        self.window = window
        self._steps: deque[int] = deque(maxlen=window)
        self._rung: set[str] = set()
        most = math.inf if lambda_max is None else lambda_max
        # A log of several steps holds the mean of λ, which is rounded.
        pinned = _Streak(2 * window, lambda value: value >= most * (1 - 1e-9), most)
        without_spread = _Streak(2 * window, lambda share: share >= self.NO_SPREAD, self.NO_SPREAD)
        reward = _RewardDrop(window, reward_drop)
        self._detectors: list[tuple[str, str, _Detector]] = [
            ("reward", "reward", reward),
            ("grad_norm", "grad_norm", _LevelChange(window, grad_norm_rise, max_grad_norm)),
            *(("mismatch", metric, _LevelChange(window, mismatch_rise, 0.0)) for metric in self.MISMATCH),
            ("degenerate", self.MISMATCH[0], _FallWithReward(window, mismatch_fall, reward)),
            ("entropy_low", "entropy", _LevelChange(window, entropy_fall, self.ENTROPY_LOW)),
            ("entropy_high", "entropy", _LevelChange(window, entropy_rise, self.ENTROPY_HIGH)),
            ("grad_norm", "grad_norm", _Streak(window if fp16 else 1, lambda norm: not math.isfinite(norm), math.inf)),
            ("lambda", "lagrangian/lambda", pinned),
            ("no_signal", "frac_reward_zero_std", without_spread),
        ]

    @property
    def sound_until(self) -> int:
        """Step of a log until which nothing is known or suspected to be wrong; weights from before it are good.

        It lags ``window`` logs behind, and stands still while a detector is in doubt.
        """
        lagging = self._steps[0] if len(self._steps) == self.window else 0
        return min([lagging, *(each.sound_until for _, _, each in self._detectors if each.in_doubt)])

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Takes the metrics that the trainer logged at an optimizer step; returns the signals that ring.

        Metrics that are of no interest are ignored, and so are logs without any other (evaluations, summaries).
        """
        watched = [each for each in self._detectors if metrics.get(each[1]) is not None]
        if not watched:
            return []
        self._steps.append(step)
        alarms = []
        for signal, metric, detector in watched:
            levels = detector.update(step, float(metrics[metric]))
            if levels is not None and signal not in self._rung:
                self._rung.add(signal)
                alarms.append(Alarm(signal, metric, step, *levels, detector.sound_until))
        return alarms
