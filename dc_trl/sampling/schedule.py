"""Which weights sample a generation batch, and which prompts the next ones have."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass
class SyncSchedule:
    """Keeps which weights sample in training, as the number of optimizer steps that made them.

    Args:
        every: number of optimizer steps after which newer weights are due, at least 1.
        step: optimizer steps of the weights that sample; None before the first sync, and where newer ones are due.
        syncs: number of times that newer weights were sent.
    """

    every: int
    step: int | None = None
    syncs: int = 0

    def due(self, step: int) -> bool:
        """Return whether newer weights are due at an optimizer step; they stay due until the sync."""
        return self.step is None or step - self.step >= self.every

    def lags(self, step: int) -> bool:
        """Return whether a batch at an optimizer step is sampled with older weights than those of this step."""
        return step != self.step and not self.due(step)

    def synced(self, step: int) -> None:
        """Record that the weights of an optimizer step sample from now on."""
        self.syncs += step != self.step
        self.step = step

    def age(self, step: int) -> int:
        """Return the age of the weights that sample at an optimizer step, in optimizer steps."""
        assert self.step is not None
        return step - self.step


class LookAhead:
    """Returns the micro-batches of an iterator, and reads some of those that follow in advance.

    It never looks beyond the end of the iterator; another iterator is another epoch and begins anew.

    Args:
        distance: number of micro-batches that are read beyond those that were returned, at least 1.
    """

    def __init__(self, distance: int):
        self._distance = distance
        self._iterator: Iterator[Any] | None = None
        self._known: list[Any] = []  # micro-batches that were returned last, and those that follow
        self._returned = 0  # number of those that were returned last

    def take(self, iterator: Iterator[Any], count: int) -> list[Any]:
        """Return the next `count` micro-batches of the iterator, or fewer at its end."""
        if iterator is not self._iterator:
            self._iterator, self._known, self._returned = iterator, [], 0
        del self._known[: self._returned]
        self._known += islice(iterator, max(0, count + self._distance - len(self._known)))
        taken = self._known[:count]
        self._returned = len(taken)
        return taken

    def __getitem__(self, index: int) -> Any | None:
        """Return a micro-batch, counted from the first one returned last; None where the iterator ended before it.

        `index` may be at most `distance` beyond those that were returned last.
        """
        return self._known[index] if index < len(self._known) else None
