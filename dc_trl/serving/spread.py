"""How the prompts of a batch are spread over several servers: by what they are expected to take, and by load."""

import heapq
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from statistics import fmean


def spread(costs: Sequence[float], loads: Sequence[float], rooms: Sequence[int]) -> list[int | None]:
    """Which server each prompt goes to: the longest first, each to the server that has least to do.

    This is list scheduling by longest processing time (Graham, 1969). With equal loads, and room for all, the fullest
    server gets at most 4/3 − 1/(3m) of what the best possible division over m servers gives its fullest one. The same
    input has the same result.

    Args:
        costs: tokens that each prompt is expected to take, at least 0.
        loads: tokens that each server still has to do, at least 0.
        rooms: how many more prompts each server takes.

    Returns:
        For each prompt the index of its server, or None where it has to wait for room.
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
    """How many tokens a prompt and its completions are expected to take.

    A completion is expected to be as long as those of the same prompt were when it was last sampled, for a new prompt
    as long as those of the last batch, and before the first batch as long as it may become.
    """

    def __init__(self) -> None:
        self._of_prompt: dict[bytes, float] = {}
        self._of_last_batch: float | None = None

    def cost(self, prompt: Sequence[int], completions: int, longest: int) -> float:
        """Tokens of a prompt and of so many completions, each of at most `longest` tokens."""
        latest = longest if self._of_last_batch is None else self._of_last_batch
        return len(prompt) + completions * min(longest, self._of_prompt.get(_key(prompt), latest))

    def learn(self, prompts: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]) -> None:
        """Takes note of how long the completions of each prompt of a batch became, in tokens."""
        self._of_prompt.update((_key(prompt), fmean(of)) for prompt, of in zip(prompts, lengths, strict=True))
        self._of_last_batch = fmean(length for of in lengths for length in of)


def _key(prompt: Sequence[int]) -> bytes:
    return blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
