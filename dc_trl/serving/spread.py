"""Assignment of the prompts of a batch to several servers by expected cost and by load."""

import heapq
from collections.abc import Sequence
from statistics import fmean


def spread(costs: Sequence[float], loads: Sequence[float], rooms: Sequence[int]) -> list[int | None]:
    """Return the server of each prompt: the longest prompts are assigned first, each to the least loaded server.

    This is list scheduling by longest processing time (Graham, 1969). With equal loads and enough room, the fullest
    server gets at most 4/3 − 1/(3m) times the load of the fullest server in the best possible assignment to m servers.
    The result is deterministic.

    Args:
        costs: expected number of tokens of each prompt, at least 0.
        loads: number of tokens that each server still has to process, at least 0.
        rooms: number of additional prompts that each server can take.

    Returns:
        The index of each prompt's server, or None if the prompt must wait for room.
    """
    left = list(rooms)
    servers = [(load, server) for server, load in enumerate(loads) if left[server] > 0]
    heapq.heapify(servers)
    chosen: list[int | None] = [None] * len(costs)
    for prompt in sorted(range(len(costs)), key=lambda prompt: (-costs[prompt], prompt)):
        if not servers:
            break
        load, server = heapq.heappop(servers)
        chosen[prompt] = server
        left[server] -= 1
        if left[server] > 0:
            heapq.heappush(servers, (load + costs[prompt], server))
    return chosen


class ExpectedLengths:
    """Expected numbers of tokens of prompts and their completions.

    The expected length of a completion is the mean length of the last completions of its prompt; for a new prompt,
    that of the last batch; before the first batch, the largest possible length.
    """

    def __init__(self) -> None:
        self._prompt_lengths: dict[int, float] = {}  # by a hash of the prompt
        self._last_mean_length: float | None = None

    def cost(self, prompt: Sequence[int], completions: int, longest: int) -> float:
        """Return the expected tokens of a prompt and its completions, each of which has at most `longest` tokens."""
        latest = longest if self._last_mean_length is None else self._last_mean_length
        return len(prompt) + completions * min(longest, self._prompt_lengths.get(hash(tuple(prompt)), latest))

    def learn(self, prompts: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]) -> None:
        """Record the lengths of the completions of each prompt of a batch, in tokens."""
        for prompt, of in zip(prompts, lengths, strict=True):
            self._prompt_lengths[hash(tuple(prompt))] = fmean(of)
        self._last_mean_length = fmean(length for of in lengths for length in of)
