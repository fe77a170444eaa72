"""Several vLLM servers that hold the same weights, with the interface of one."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

from .background import all_of, in_coroutine, in_thread
from .client import RolloutClient, ServerClient, Weights
from .connection import MAX_CONCURRENT, Deadline, Patience, persist
from .errors import ServerError, ServerUnavailableError


T = TypeVar("T")
Fits = Callable[[ServerClient], None]  # raises a ServerError if a server does not fit the run


class PooledServer:
    """One of several servers and its state."""

    def __init__(self, client: ServerClient, fits: Fits):
        self.client = client
        self.url = client.connection.url
        self._fits = fits
        fits(client)
        self.lost: str | None = None  # why it gets no prompts
        self.answered = 0  # number of prompts

    def prepare(self, weights: Weights | None) -> None:
        """Make the server hold the weights, in one try; a lost server must be up again, and fit."""
        if (reason := self.client.connection.why_down()) is not None:
            raise ServerUnavailableError(f"vLLM at {self.url} is not up ({reason})")
        if self.lost is not None:  # it may have been restarted with other options
            self._fits(self.client)
        if weights is not None:
            # A lost server may have loaded weights without an answer.
            self.client.hold(weights, reload=self.lost is not None)

    async def require_kept(self, weights: Weights | None) -> None:
        """Raise a `ServerUnavailableError` if the server no longer holds the weights; None accepts any."""
        if weights is not None:
            self.client.require_version(await self.client.aweight_version(), weights)


class ServerPool(RolloutClient):
    """Client of several vLLM servers that sample one policy and hold the same version of its weights.

    Each prompt of a rollout is a separate request for all of its completions, and has its own seed, so that every
    server, and every new try, samples the same completions. The servers get equally many prompts, and hold the present
    version of the weights before and after each of them.

    A server that fails is lost: its prompts go to the others, and it is asked again before each rollout and
    synchronization. It takes prompts again once it is up, fits and has loaded the present weights. Only if all servers
    are lost are rollouts and synchronizations tried again, and they fail as with a single server.

    Args:
        urls: addresses of the servers, "http://127.0.0.1:8000"; at least two.
        fits: function that raises a `ServerError` if a server does not fit the run.
        start_timeout: seconds to wait until all servers are up.
        patience: time limits and number of tries of requests.
        report: function that takes a line about what is happening.

    Attributes:
        servers: the servers, in the order of `urls`.
        connections: connections to everything that is asked.
        weights, routed_experts, seeds: see `RolloutClient`.

    Raises:
        ServerError: a server is not up within `start_timeout`, or does not fit; the message names all of them.
    """

    all_needed = False  # whether every server has to be up, and not only one of them

    def __init__(
        self,
        urls: Sequence[str],
        *,
        fits: Fits,
        start_timeout: float,
        patience: Patience,
        report: Callable[[str], None] = print,
    ):
        super().__init__()
        self._patience, self._report = patience, report

        def meet(url: str) -> PooledServer:
            client = ServerClient(url, start_timeout=start_timeout, patience=patience, report=report)
            server = PooledServer(client, fits)
            client.connection.patience = patience._replace(max_retries=0)  # from now on, other servers can take over
            return server

        self.servers = meet_all(urls, meet)
        self.connections = [server.client.connection for server in self.servers]
        self.model = self.servers[0].client.model
        self.base_url = " and ".join(server.url for server in self.servers)  # for messages

    # --- weights ----------------------------------------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Load weights from one checkpoint into all servers at once; later rollouts use these weights.

        Raises:
            ServerError: no server has loaded them.
        """
        self.weights = weights
        self.persist(self.prepare_servers)

    def prepare_servers(self) -> list[PooledServer]:
        """Return the servers that hold the weights of the rollouts; each has just been asked.

        Raises:
            ServerError: fewer servers than needed hold them.
        """
        tasks = {server: in_thread(partial(server.prepare, self.weights)) for server in self.servers}
        wait(tasks.values())
        failures: dict[str, BaseException | None] = {}
        for server, task in tasks.items():
            failures[server.url] = error = task.exception()
            if error is not None:
                self.lose(server, error)
            elif server.lost is not None:
                server.lost = None
                self._report(f"vLLM at {server.url} is back, and takes prompts again")
        ready = [server for server in self.servers if server.lost is None]
        if not ready or (self.all_needed and len(ready) < len(self.servers)):
            raise_failures(failures)
        return ready

    def lose(self, server: PooledServer, error: BaseException) -> None:
        """Give a server no more prompts until it holds the weights again."""
        if str(error) != server.lost:  # a server that stays away is not reported again
            self._report(f"vLLM at {server.url} gets no prompts until it holds the weights again: {error}")
        server.lost = str(error)

    def persist(self, action: Callable[[], T]) -> T:
        """Return the result of an action on the servers, which may be tried again; see `connection.persist`."""
        deadline = Deadline(self._patience.time_limit)
        with ExitStack() as stack:
            for connection in self.connections:
                stack.enter_context(connection.task(deadline))
            again = (self._patience, deadline, self._report, self.all_needed)
            return persist(self.connections, lambda first: action(), *again)

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Return the answer of all servers together to the request that TRL writes for all prompts."""
        requests = self.seeds.requests(kwargs["json"])
        self.seeds.forget()
        answers: list[list[dict[str, Any]] | None] = [None] * len(requests)
        room = asyncio.Semaphore(MAX_CONCURRENT)

        async def ask(server: PooledServer, number: int) -> None:
            client = server.client
            try:
                async with room:
                    request = requests[number] | {"model": client.model}
                    choices = await client.connection.complete(request, client.vocabulary)
                    await server.require_kept(self.weights)
                answers[number] = choices
                server.answered += 1
            except ServerUnavailableError as error:
                self.lose(server, error)

        def go_on() -> None:
            ready = self.prepare_servers()
            while left := [number for number, answer in enumerate(answers) if answer is None]:
                living = [server for server in ready if server.lost is None]
                if not living:
                    raise ServerUnavailableError("; ".join(str(server.lost) for server in ready))
                in_coroutine(all_of(map(ask, cycle(living), left)))

        self.persist(go_on)
        return self._take_choices([choice for choices in answers if choices is not None for choice in choices])


def meet_all(urls: Sequence[str], meet: Callable[[str], T]) -> list[T]:
    """Return what a function returns for each server, all at once; a `ServerError` names all that were not met."""
    meetings = {url: in_thread(partial(meet, url)) for url in urls}
    wait(meetings.values())
    raise_failures({url: meeting.exception() for url, meeting in meetings.items()})
    return [meeting.result() for meeting in meetings.values()]


def raise_failures(failures: dict[str, BaseException | None]) -> None:
    """Raise the failures of servers, by address, as one error, which is worth another try if each of them is."""
    errors = {url: error for url, error in failures.items() if error is not None}
    for error in errors.values():
        if not isinstance(error, ServerError):
            raise error
    if errors:
        kinds = [isinstance(error, ServerUnavailableError) for error in errors.values()]
        lines = [str(e) if url in str(e) else f"vLLM at {url}: {e}" for url, e in errors.items()]
        raise (ServerUnavailableError if all(kinds) else ServerError)("; ".join(lines))
