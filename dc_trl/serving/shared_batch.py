"""One batch of prompts that several servers complete together, even if some of them fail."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from .answers import require_rollout
from .client import Weights
from .connection import Deadline
from .errors import ServerUnavailableError
from .pooled_server import PooledServer


SLOW = 2.0  # a server is slow after this many times the time of half of the servers
_SLOW_SECONDS = 10.0  # and at least this many seconds later, since a batch may take only a moment


class SharedBatch:
    """Requests, one for each prompt, and the servers' answers to them.

    Each prompt goes to the server with the fewest of them, and no server gets more than it runs at once. If a server
    fails, its prompts go to the others. A server is slow once it takes more than twice as long as half of the servers
    took for all of their prompts, and 10 seconds longer. Its prompts are then also given to idle servers, and the
    first answer counts. Each prompt has one seed, so both answers are the same, and neither rule prefers short
    completions.

    Args:
        requests: bodies for /v1/completions, each with one prompt and a seed.
        completions: number of completions that each request asks for.
        weights: weights that a server must hold before and after each answer; None to accept any.
        lose: function that marks a failed server as lost.
        report: function that takes a line about what is happening.

    Attributes:
        answers: answer to each request; None until it arrives.
    """

    def __init__(
        self,
        requests: Sequence[dict[str, Any]],
        completions: int,
        weights: Weights | None,
        *,
        lose: Callable[[PooledServer, BaseException], None],
        report: Callable[[str], None],
    ):
        self.answers: list[dict[str, Any] | None] = [None] * len(requests)
        self._requests, self._completions = requests, completions
        self._weights, self._lose, self._report = weights, lose, report

    async def run(self, servers: Sequence[PooledServer], deadline: Deadline) -> None:
        """Make the servers complete the prompts without an answer.

        Raises:
            ServerUnavailableError: all servers were lost, or the deadline has passed; earlier answers are kept.
            ServerError: a server refused a prompt.
        """
        shares = [_Share(server) for server in servers]
        try:
            await self._run(shares, deadline)
        finally:
            for share in shares:
                share.drop()
            await asyncio.gather(*(task for share in shares for task in share.dropped), return_exceptions=True)

    async def _run(self, shares: list["_Share"], deadline: Deadline) -> None:
        clock = asyncio.get_running_loop().time
        begin = clock()
        while None in self.answers:
            living = [share for share in shares if share.server.lost is None]
            if not living:
                raise ServerUnavailableError("; ".join(str(share.server.lost) for share in shares))
            self._assign([share for share in living if not share.slow] or living)
            slow_at = begin + _slow_time(living, begin)
            timeout = min(deadline.left, max(0.0, slow_at - clock()))
            tasks = {task: share for share in living for task in share.tasks}
            done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._take_result(task, tasks[task], shares)
                tasks[task].finished = clock()
            if deadline.left == 0 and None in self.answers:
                urls = ", ".join(share.server.url for share in living if share.tasks)
                raise ServerUnavailableError(f"vLLM at {urls} did not answer all prompts in time")
            if not done and clock() >= slow_at:
                self._share_slow_prompts(living)

    def _assign(self, shares: list["_Share"]) -> None:
        """Assign the prompts that no server works on."""
        assigned = {prompt for share in shares for prompt in share.prompts}
        for prompt, answer in enumerate(self.answers):
            # One prompt more than it runs waits at each server for the next place.
            free = [share for share in shares if len(share.tasks) <= share.server.sequences // self._completions]
            if answer is None and prompt not in assigned and free:
                share = min(free, key=lambda share: len(share.tasks))
                share.tasks[asyncio.create_task(self._answer(share, prompt))] = prompt

    async def _answer(self, share: "_Share", prompt: int) -> dict[str, Any]:
        client = share.server.client
        body = self._requests[prompt] | {"model": client.model}
        answer = await client.connection.arequest("POST", "/v1/completions", json=body)
        answer["choices"] = require_rollout(body, answer, share.server.url, client.bounds)
        if self._weights is not None:
            held = await client.connection.arequest("GET", "/weight_info")
            with client.connection.reading("/weight_info"):
                client.require_version(held["weight_version"], self._weights)
        return answer

    def _take_result(self, task: asyncio.Task[dict[str, Any]], share: "_Share", shares: list["_Share"]) -> None:
        """Take the result of a request, or mark its server as lost."""
        prompt = share.tasks.pop(task, None)
        if prompt is None or task.cancelled():
            return
        error = task.exception()
        if isinstance(error, ServerUnavailableError):
            self._lose(share.server, error)
            share.drop()
        elif error is not None:
            raise error
        elif self.answers[prompt] is None:
            self.answers[prompt] = task.result()
            share.server.answered += 1
            for other in shares:  # they may work on the same prompt
                other.drop(prompt)

    def _share_slow_prompts(self, living: list["_Share"]) -> None:
        """Give the prompts of slow servers to the other servers too."""
        for share in living:
            if share.tasks and not share.slow:
                share.slow = True
                self._report(
                    f"vLLM at {share.server.url} is slow: {len(share.tasks)} of its prompts go to the others too"
                )


class _Share:
    """The part of a batch that one server works on."""

    def __init__(self, server: PooledServer):
        self.server = server
        self.tasks: dict[asyncio.Task[dict[str, Any]], int] = {}  # running requests with their prompts
        self.dropped: list[asyncio.Task[dict[str, Any]]] = []  # cancelled requests
        self.finished: float | None = None  # time of its last answer
        self.slow = False

    @property
    def prompts(self) -> list[int]:
        return list(self.tasks.values())

    def drop(self, prompt: int | None = None) -> None:
        """Cancel all requests, or those of one prompt, which makes the server end them too."""
        for task in [task for task, of in self.tasks.items() if prompt in (None, of)]:
            task.cancel()
            del self.tasks[task]
            self.dropped.append(task)


def _slow_time(living: Sequence[_Share], begin: float) -> float:
    """Return the time after which a busy server is slow; infinite if it is unknown, or all are slow already."""
    working = [share for share in living if share.tasks]
    took = sorted(share.finished - begin for share in living if not share.tasks and share.finished is not None)
    half = math.ceil((len(working) + len(took)) / 2)
    if not working or all(share.slow for share in working) or len(took) < half:
        return math.inf
    return max(SLOW * took[half - 1], took[half - 1] + _SLOW_SECONDS)
