"""Measures the parts of a run's time with a clock that is in one part of the work at a time.

The parts are therefore disjoint, and their sum is the time that the clock ran. A part within another one interrupts
it: weights that are loaded into the engine while a batch is sampled count as `sync` and not as `generation`.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


EVALUATION, OTHER = "evaluation", "other"
# Part → label for readers, in the order of a step.
PARTS = {
    "generation": "generation",
    "waiting": "waiting for rollouts",
    "sync": "weight sync",
    "reward": "reward",
    "logps": "old and reference log-probs",
    "loss": "loss, forward and backward",
    "constraint": "constraint and correction",
    "optimizer": "optimizer",
    "metrics": "metrics and logs",
    EVALUATION: "evaluation",
    "saving": "checkpoints",
    OTHER: "other, idle",
}
PREFIX = "time/"  # of the metrics, which are seconds of a part since the last log


class PartsClock:
    """Seconds that the thread which started the clock spends in each part of the work.

    The clock runs from `start` to `stop`. Evaluation is one part, with everything that happens within it.

    Args:
        now: function that returns the seconds of a monotonic clock.

    Attributes:
        present: the part that the time counts for; None while the clock is stopped.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._seconds: dict[str, float] = defaultdict(float)
        self._reported: dict[str, float] = {}
        self.present: str | None = None
        self._since = 0.0
        self._thread = 0

    def start(self) -> None:
        """Reset all times, and start the clock with the part `other`."""
        self._seconds.clear()
        self._reported.clear()
        self._thread, self.present, self._since = threading.get_ident(), OTHER, self._now()

    def stop(self) -> None:
        """Stop the clock."""
        self.switch(OTHER)
        self.present = None

    def carry(self, earlier: Mapping[str, float]) -> None:
        """Add the seconds of each part of an earlier session of the same run, which `lap` has already returned."""
        for part, seconds in earlier.items():
            self._seconds[part] += seconds
            self._reported[part] = self._reported.get(part, 0.0) + seconds

    def switch(self, part: str) -> None:
        """Count the time for this part until the next switch; a stopped clock stays stopped."""
        if self.present is not None:
            now = self._now()
            self._seconds[self.present] += now - self._since
            self.present, self._since = part, now

    @contextmanager
    def part(self, name: str, within: str | None = None) -> Iterator[None]:
        """Count the time of the block for this part, and the time after it for the previous part.

        A block that another thread runs, beside the present part, does not count, nor one within another part than
        `within`, if that is given.
        """
        before = self.present
        elsewhere = threading.get_ident() != self._thread or within not in (None, before)
        if before is None or before == EVALUATION or elsewhere:
            yield
        else:
            self.switch(name)
            try:
                yield
            finally:
                self.switch(before)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part up to now, with those of earlier sessions."""
        if self.present is not None:
            self.switch(self.present)
        return dict(self._seconds)

    def lap(self) -> dict[str, float]:
        """Return the positive seconds of each part since the last call, or since the start."""
        total = self.seconds()
        since = {part: seconds - self._reported.get(part, 0.0) for part, seconds in total.items()}
        self._reported = total
        return {part: seconds for part, seconds in since.items() if seconds > 0}
