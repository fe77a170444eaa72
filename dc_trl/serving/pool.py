"""Several vLLM servers that hold the same weights, with the interface of one."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

from .background import all_of, in_coroutine, in_thread
from .client import Fits, RolloutClient, ServerClient, Weights
from .connection import MAX_CONCURRENT, Patience, persist
from .errors import ServerError, ServerUnavailableError


T = TypeVar("T")


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
        servers: clients of the servers, in the order of `urls`.
        weights, routed_experts, seeds: see `RolloutClient`.

    Raises:
        ServerError: a server is not up within `start_timeout`, or does not fit; the message names all of them.
    """

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
        self._fits, self._patience, self._report = fits, patience, report
        self.servers = meet_servers(urls, fits, start_timeout, patience, report)
        self.model = self.servers[0].model
        self.base_url = " and ".join(server.base_url for server in self.servers)  # for messages

    # --- weights ----------------------------------------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Load weights from one checkpoint into all servers at once; later rollouts use these weights.

        Raises:
            ServerError: no server has loaded them.
        """
        self.weights = weights
        self._persist(self._prepare_servers)

    def _prepare(self, server: ServerClient) -> None:
        """Make a server hold the weights, in one try; a lost server must be up again, and fit."""
        if (reason := server.connection.why_down()) is not None:
            raise ServerUnavailableError(f"vLLM at {server.base_url} is not up ({reason})")
        if server.lost is not None:  # it may have been restarted with other options
            self._fits(server)
        if self.weights is not None:
            # A lost server may have loaded weights without an answer.
            server.hold(self.weights, reload=server.lost is not None)

    def _prepare_servers(self) -> list[ServerClient]:
        """Return the servers that hold the weights of the rollouts; each has just been asked."""
        tasks = {server: in_thread(partial(self._prepare, server)) for server in self.servers}
        wait(tasks.values())
        failures: dict[str, BaseException | None] = {}
        for server, task in tasks.items():
            failures[server.base_url] = error = task.exception()
            if error is not None:
                self.lose(server, error)
            elif server.lost is not None:
                server.lost = None
                self._report(f"vLLM at {server.base_url} is back, and takes prompts again")
        ready = [server for server in self.servers if server.lost is None]
        if not ready:
            raise_failures(failures)
        return ready

    def lose(self, server: ServerClient, error: BaseException) -> None:
        """Give a server no more prompts until it holds the weights again."""
        if str(error) != server.lost:  # a server that stays away is not reported again
            self._report(f"vLLM at {server.base_url} gets no prompts until it holds the weights again: {error}")
        server.lost = str(error)

    def _persist(self, action: Callable[[], Any]) -> None:
        connections = [server.connection for server in self.servers]
        persist(connections, lambda first: action(), self._patience, self._report)

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Return the answer of all servers together to the request that TRL writes for all prompts."""
        requests = self.seeds.requests(kwargs["json"])
        self.seeds.forget()
        answers: list[list[dict[str, Any]] | None] = [None] * len(requests)
        room = asyncio.Semaphore(MAX_CONCURRENT)

        async def ask(server: ServerClient, number: int) -> None:
            try:
                async with room:
                    request = requests[number] | {"model": server.model}
                    choices = await server.connection.complete(request, server.vocabulary)
                    if self.weights is not None:
                        await server.require_kept(self.weights)
                answers[number] = choices
                server.answered += 1
            except ServerUnavailableError as error:
                self.lose(server, error)

        def go_on() -> None:
            ready = self._prepare_servers()
            while left := [number for number, answer in enumerate(answers) if answer is None]:
                living = [server for server in ready if server.lost is None]
                if not living:
                    raise ServerUnavailableError("; ".join(str(server.lost) for server in ready))
                in_coroutine(all_of(map(ask, cycle(living), left)))

        self._persist(go_on)
        return self._take_choices([choice for choices in answers if choices is not None for choice in choices])


def meet_servers(
    urls: Sequence[str], fits: Fits, start_timeout: float, patience: Patience, report: Callable[[str], None]
) -> list[ServerClient]:
    """Return clients of servers that are up and fit, which leave it to their caller to try again."""

    def meet(url: str) -> ServerClient:
        client = ServerClient(url, start_timeout=start_timeout, patience=patience, report=report)
        fits(client)
        client.connection.patience = patience._replace(max_retries=0)
        return client

    return at_once({url: partial(meet, url) for url in urls})


def at_once(actions: Mapping[str, Callable[[], T]]) -> list[T]:
    """Return what functions return for servers, by address, all at once; a `ServerError` names all that failed."""
    tasks = {url: in_thread(action) for url, action in actions.items()}
    wait(tasks.values())
    raise_failures({url: task.exception() for url, task in tasks.items()})
    return [task.result() for task in tasks.values()]


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
