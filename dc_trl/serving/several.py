"""Several vLLM servers that hold the same weights, also behind a router, with the interface of one."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

from .background import all_of, in_coroutine, in_thread
from .client import ASKED, RolloutClient, ServerClient, Weights
from .connection import MAX_CONCURRENT, Connection
from .errors import ServerError, ServerRefusedError, ServerUnavailableError


T = TypeVar("T")


class ServerPool(RolloutClient):
    """Client of several vLLM servers that sample one policy and hold the same version of its weights.

    Each prompt of a rollout is a separate request for all of its completions, and has its own seed, so that every
    server, and every new try, samples the same completions. The servers get equally many prompts, and hold the present
    version of the weights before and after each of them.

    A server that fails is lost: its prompts go to the others, and it is asked again before each rollout and
    synchronization. It takes prompts again once it is up, fits and has loaded the present weights. Only if all servers
    are lost are rollouts and synchronizations tried again, and they fail as with a single server.
    """

    def __init__(self, servers: Sequence[ServerClient]):
        super().__init__(servers, [server.connection for server in servers])
        self.model = servers[0].model
        self.base_url = " and ".join(server.base_url for server in servers)  # for messages

    def hold(self, weights: Weights | None, reload: bool) -> None:
        """Make the servers hold weights; those that fail are lost, and it fails if all of them do."""

        def prepare(server: ServerClient) -> ServerError | None:
            try:
                if (reason := server.connection.why_down()) is not None:
                    raise ServerUnavailableError(f"vLLM at {server.base_url} is not up ({reason})")
                # A lost server may have loaded weights without an answer.
                server.hold(weights, reload=server.lost is not None)
            except ServerError as error:
                self._lose(server, error)
                return error
            if server.lost is not None:
                server.lost = None
                self.report(f"vLLM at {server.base_url} is back, and takes prompts again")
            return None

        failures = at_once({server.base_url: partial(prepare, server) for server in self.servers})
        if None not in failures:
            raise_failures(dict(zip([server.base_url for server in self.servers], failures, strict=True)))

    def _lose(self, server: ServerClient, error: BaseException) -> None:
        """Give a server no more prompts until it holds the weights again."""
        if str(error) != server.lost:  # a server that stays away is not reported again
            self.report(f"vLLM at {server.base_url} gets no prompts until it holds the weights again: {error}")
        server.lost = str(error)

    def _complete(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        answers: list[list[dict[str, Any]]] = [[] for _ in requests]
        room = asyncio.Semaphore(MAX_CONCURRENT)

        async def ask(server: ServerClient, number: int) -> None:
            try:
                async with room:
                    request = requests[number] | {"model": server.model}
                    choices = await server.connection.complete(request, server.vocabulary)
                    await server.require_kept(self.weights)
                answers[number] = choices
                server.answered += 1
            except ServerUnavailableError as error:
                self._lose(server, error)

        while left := [number for number, answer in enumerate(answers) if not answer]:
            living = [server for server in self.servers if server.lost is None]
            if not living:
                raise ServerUnavailableError("; ".join(str(server.lost) for server in self.servers))
            in_coroutine(all_of(map(ask, cycle(living), left)))
        return [choice for choices in answers for choice in choices]


def meet_servers(urls: Sequence[str], **options: Any) -> list[ServerClient]:
    """Return clients of servers, in the order of their addresses, once all of them are up and fit.

    The options are those of `ServerClient`.

    Raises:
        ServerError: a server is not up in time, or does not fit; the message names all of them.
    """
    return at_once({url: partial(ServerClient, url, **options) for url in urls})


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


class RoutedServers(RolloutClient):
    """Client of several vLLM servers behind a router, which deals the prompts among them.

    The router gets the prompts, and the servers get everything else. Nobody knows which server answered, so all of
    them hold the present version of the weights before a rollout and after it. Otherwise its completions are discarded
    and sampled again, with the same seeds. A server that fails is waited for like a single server, although the router
    may do without it: once it is up again, the router would send it prompts before it has the weights. A `ServerError`
    says that the router is not up, or has more servers than these.
    """

    all_needed = True

    def __init__(self, router: str, servers: Sequence[ServerClient]):
        first = servers[0]
        connection = Connection(router, first.patience, first.report)
        super().__init__(servers, [connection, *(server.connection for server in servers)])
        self.base_url, self.model, self.vocabulary = connection.url, first.model, first.vocabulary
        self._named = self.persist(lambda _: require_listed(connection, len(servers)))

    def hold(self, weights: Weights | None, reload: bool) -> None:
        require_listed(self.connection, len(self.servers))
        at_once({server.base_url: partial(server.hold, weights, reload) for server in self.servers})
        self.model = self.servers[0].model

    async def require_kept(self, weights: Weights | None) -> None:
        """Also ask the router for the weights behind it, as it may have servers that are not in the list."""
        if weights is None:
            return
        ask = partial(self.connection.arequest, "GET", "/weight_info")
        seen = set[str]()
        try:
            answers = await all_of(ask(headers=each) for each in self.seeds.headers(ASKED * len(self.servers)))
            with self.connection.reading("/weight_info"):
                seen = {str(answer["weight_version"]) for answer in answers}
        except ServerRefusedError as error:
            if not self._named:
                raise ServerError(
                    f"{self.base_url} is a router that does not say which servers it has, nor the weights that they "
                    "hold: let it pass GET /weight_info to its servers, or set vllm_server_base_url=None."
                ) from error
        await all_of(server.require_kept(weights) for server in self.servers)  # the last word of those in the list
        if other := seen - {weights.version}:
            raise ServerError(
                f"{self.base_url} is a router that has servers with weights {min(other)!r}, and those in "
                f"vllm_server_base_urls hold {weights.version!r}: list all of its servers there."
            )


def require_listed(connection: Connection, number: int) -> bool:
    """Return whether a router names its servers, as vllm-router does; a `ServerError` says that it has too many."""
    try:
        workers = connection.get("/list_workers").get("urls", [])
    except ServerRefusedError:
        return False
    # They may have other addresses there than here. With data parallelism "@" and a rank follow.
    behind = len({re.sub(r"@\d+$", "", worker) for worker in workers})
    if behind > number:
        raise ServerError(
            f"{connection.url} is a router with {behind} servers, and {number} would get weights: keep its address in "
            "vllm_server_base_url, and list those of all servers in vllm_server_base_urls."
        )
    return behind > 0
