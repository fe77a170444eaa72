"""Look ahead at the next micro-batches of an epoch."""

from collections.abc import Iterator
from itertools import islice
from typing import Any


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
