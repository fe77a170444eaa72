"""Where the time of a run goes: a clock that is in one part of the work at a time.

So the parts are disjoint, and their sum is the time that the clock ran. A part within another interrupts it: weights
that are brought to the engine while a batch is sampled count as `sync` and not as `generation` too.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ..records.time_parts import EVALUATION, OTHER


class PartsClock:
    """Seconds of each part of the work, as the thread that started the clock spends them.

    It stands still until `start`. Evaluation counts as one, whatever it does within.

    Args:
        now: seconds of a clock that never goes back.

    Attributes:
        beside: seconds that other threads spent in each part while the clock ran, which are no part of its time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._seconds: dict[str, float] = defaultdict(float)
        self._reported: dict[str, float] = {}
        self._part: str | None = None  # None: the clock stands still
        self._since = 0.0
        self._thread = 0
        self.beside: dict[str, float] = defaultdict(float)

    @property
    def present(self) -> str | None:
        """The part that the time goes to; None while the clock stands still."""
        return self._part

    def start(self) -> None:
        """Forgets what it has counted, and begins with `other`."""
        for counted in (self._seconds, self._reported, self.beside):
            counted.clear()
        self._thread, self._part, self._since = threading.get_ident(), OTHER, self._now()

    def stop(self) -> None:
        """Stands still."""
        self._charge()
        self._part = None

    def carry(self, earlier: Mapping[str, float]) -> None:
        """Adds the seconds of each part of an earlier session of the same run, which `lap` has told already."""
        for part, seconds in earlier.items():
            self._seconds[part] += seconds
            self._reported[part] = self._reported.get(part, 0.0) + seconds

    def switch(self, part: str) -> None:
        """Has the time go to this part until another switch; without effect where the clock stands still."""
        if self._part is not None:
            self._charge()
            self._part = part

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time within goes to this part, and afterwards to the one before."""
        before = self._part
        if before is None or before == EVALUATION:
            yield
        elif threading.get_ident() != self._thread:
            start = self._now()
            try:
                yield
            finally:
                self.beside[name] += self._now() - start
        else:
            self.switch(name)
            try:
                yield
            finally:
                self.switch(before)

    def seconds(self) -> dict[str, float]:
        """Seconds of each part up to now, those of earlier sessions included."""
        self._charge()
        return dict(self._seconds)

    def lap(self) -> dict[str, float]:
        """Seconds of each part since the last call, or since the start; only parts that had some."""
        total = self.seconds()
        since = {part: seconds - self._reported.get(part, 0.0) for part, seconds in total.items()}
        self._reported = total
        return {part: seconds for part, seconds in since.items() if seconds > 0}

    def _charge(self) -> None:
        if self._part is not None:
            now = self._now()
            self._seconds[self._part] += now - self._since
            self._since = now
