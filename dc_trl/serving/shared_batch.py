"""One batch of prompts that several servers complete together, whatever becomes of one of them."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx

from .answers import require_rollout
from .client import Weights
from .connection import Deadline
from .errors import ServerUnavailableError
from .pooled_server import PooledServer
from .spread import spread


SLOW = 2.0  # times what half of the servers took is slow
_SLOW_SECONDS = 10.0  # and at least so many seconds more: a batch may be done in a moment


class SharedBatch:
    """Requests, one for each prompt, and what servers have answered to them.

    Prompts are given to the servers by `spread`, no more at a time than a server runs at once. Where a server fails,
    its prompts are given to the others. A server is slow once it takes more than twice as long, and 10 seconds
    longer, than half of the servers took for all of theirs; its prompts are then given to servers that have nothing
    left to do as well, and whatever answers first counts. A prompt has one seed, so that both say the same: neither
    rule prefers short completions.

    Args:
        requests: bodies for /v1/completions, each of one prompt, with a seed.
        costs: tokens that each is expected to take.
        completions: how many are asked for by each request.
        weights: that a server has to hold before and after each of its answers; None for whatever it holds.
        lose: is told of a server that fails, and has it lost.
        report: takes a line about what is happening.

    Attributes:
        answers: what was answered to each request; None where nothing is yet.
    """

    def __init__(
        self,
        requests: Sequence[dict[str, Any]],
        costs: Sequence[float],
        completions: int,
        weights: Weights | None,
        *,
        lose: Callable[[PooledServer, BaseException], None],
        report: Callable[[str], None],
    ):
        self.answers: list[dict[str, Any] | None] = [None] * len(requests)
        self._requests, self._costs, self._completions = requests, costs, completions
        self._weights, self._lose, self._report = weights, lose, report

    async def run(self, servers: Sequence[PooledServer], deadline: Deadline) -> None:
        """Has the servers complete what is not answered yet.

        Raises:
            ServerUnavailableError: all of them were lost, or the deadline has passed; answers until then are kept.
            ServerError: a server refused a prompt.
        """
        async with AsyncExitStack() as stack:
            shares = [
                _Share(server, await stack.enter_async_context(server.client.connection.asynchronous()))
                for server in servers
            ]
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
            self._give([share for share in living if not share.slow] or living)
            slow_at = begin + _slow_after(living, begin)
            timeout = min(deadline.left, max(0.0, slow_at - clock()))
            tasks = {task: share for share in living for task in share.tasks}
            done, _ = await asyncio.wait(
                tasks, timeout=timeout if timeout < math.inf else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                self._take(task, tasks[task], shares)
                tasks[task].finished = clock()
            if deadline.left == 0 and None in self.answers:
                urls = ", ".join(share.server.url for share in living if share.tasks)
                raise ServerUnavailableError(f"vLLM at {urls} did not answer all prompts in time")
            if not done and clock() >= slow_at:
                self._relieve(living)

    def _give(self, shares: list["_Share"]) -> None:
        """Gives prompts that nobody works on to the servers."""
        in_work = {prompt for share in shares for prompt in share.prompts}
        waiting = [prompt for prompt in self._open() if prompt not in in_work]
        chosen = spread(
            [self._costs[prompt] for prompt in waiting],
            [sum(self._costs[prompt] for prompt in share.prompts) for share in shares],
            [share.server.sequences // self._completions + 1 - len(share.tasks) for share in shares],
        )
        for prompt, number in zip(waiting, chosen, strict=True):
            if number is not None:
                share = shares[number]
                share.tasks[asyncio.create_task(self._answer(share, prompt))] = prompt

    def _open(self) -> Iterator[int]:
        return (prompt for prompt, answer in enumerate(self.answers) if answer is None)

    async def _answer(self, share: "_Share", prompt: int) -> dict[str, Any]:
        client, http = share.server.client, share.http
        body = self._requests[prompt] | {"model": client.model}
        answer = await client.connection.arequest(http, "POST", "/v1/completions", json=body)
        answer["choices"] = require_rollout(body, answer, share.server.url, client.bounds)
        if self._weights is not None:
            held = await client.connection.arequest(http, "GET", "/weight_info")
            with client.connection.reading("/weight_info"):
                client.require_version(held["weight_version"], self._weights)
        return answer

    def _take(self, task: asyncio.Task[dict[str, Any]], share: "_Share", shares: list["_Share"]) -> None:
        """Takes the result of a request, which may be that its server is lost."""
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
            for other in shares:  # that may have been given the same prompt
                other.drop(prompt)

    def _relieve(self, living: list["_Share"]) -> None:
        """Has what slow servers work on given to the others too."""
        for share in living:
            if share.tasks and not share.slow:
                share.slow = True
                self._report(
                    f"vLLM at {share.server.url} is slow: {len(share.tasks)} of its prompts go to the others too"
                )


class _Share:
    """What one server does of a batch."""

    def __init__(self, server: PooledServer, http: httpx.AsyncClient):
        self.server = server
        self.http = http
        self.tasks: dict[asyncio.Task[dict[str, Any]], int] = {}  # that run, and their prompts
        self.dropped: list[asyncio.Task[dict[str, Any]]] = []  # that were ended
        self.finished: float | None = None  # when it answered last
        self.slow = False

    @property
    def prompts(self) -> list[int]:
        return list(self.tasks.values())

    def drop(self, prompt: int | None = None) -> None:
        """Ends requests, all of them or that of a prompt, which the server ends too."""
        for task in [task for task, of in self.tasks.items() if prompt in (None, of)]:
            task.cancel()
            del self.tasks[task]
            self.dropped.append(task)


def _slow_after(living: Sequence[_Share], begin: float) -> float:
    """Seconds after which a server that still works is slow; infinite where that cannot be said, or was."""
    working = [share for share in living if share.tasks]
    took = sorted(share.finished - begin for share in living if not share.tasks and share.finished is not None)
    half = math.ceil((len(working) + len(took)) / 2)
    if not working or all(share.slow for share in working) or len(took) < half:
        return math.inf
    return max(SLOW * took[half - 1], took[half - 1] + _SLOW_SECONDS)
