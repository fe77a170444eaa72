"""Micro-batches of an epoch that are known before their turn."""

from collections.abc import Iterator
from itertools import islice
from typing import Any


class LookAhead:
    """Hands out the micro-batches of an iterator, and reads some further, which follow the ones handed out.

    It looks no further than the iterator goes: another iterator is another epoch, and begins anew.

    Args:
        distance: how many micro-batches are read beyond those that are handed out, at least 1.
    """

    def __init__(self, distance: int):
        self._distance = distance
        self._iterator: Iterator[Any] | None = None
        self._known: list[Any] = []  # those that were handed out last, and those that follow
        self._handed_out = 0

    def take(self, iterator: Iterator[Any], count: int) -> list[Any]:
        """The next `count` micro-batches of the iterator, fewer where it ends."""
        if iterator is not self._iterator:
            self._iterator, self._known, self._handed_out = iterator, [], 0
        del self._known[: self._handed_out]
        self._known += islice(iterator, max(0, count + self._distance - len(self._known)))
        taken = self._known[:count]
        self._handed_out = len(taken)
        return taken

    def __getitem__(self, index: int) -> Any | None:
        """A micro-batch, counted from the first of those handed out last; None where the iterator ended before it.

        `index` may be at most `distance` beyond them.
        """
        return self._known[index] if index < len(self._known) else None
