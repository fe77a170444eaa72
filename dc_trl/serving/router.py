"""A router and the vLLM servers behind it, with the interface of one server."""

import uuid
from collections.abc import Sequence
from typing import Any

from .background import all_of, in_coroutine
from .connection import Connection, wait_until_up
from .errors import ServerError, ServerRefusedError, ServerUnavailableError
from .pool import PooledServer, ServerPool


class Sessions:
    """Names of conversations, by which a router keeps the turns of each on the server that has them in its cache."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, ...], str] = {}  # first prompts of the conversations that were last asked for

    def of(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return the session of each prompt: that of the longest first prompt with which it begins, or a new one."""
        lengths = sorted({len(first) for first in self._begun}, reverse=True)
        begun: dict[tuple[int, ...], str] = {}
        names = []
        for prompt in map(tuple, prompts):
            starts = (prompt[:length] for length in lengths)
            first = next((start for start in starts if start in self._begun), prompt)
            names.append(begun.setdefault(first, self._begun.get(first) or uuid.uuid4().hex))
        self._begun = begun
        return names


class RoutedServers(ServerPool):
    """Client of several vLLM servers behind a router, which deals the prompts among them.

    The router gets the prompts, and the servers get everything else. Nobody knows which server answered, so all of
    them hold the present version of the weights before a rollout and after it. Otherwise its completions are discarded
    and sampled again, with the same seeds. A server that fails is waited for like a single server, although the router
    may do without it: once it is up again, the router would send it prompts before it has the weights.

    Args:
        router: address of the router, "http://127.0.0.1:8000".
        urls: addresses of all servers behind it.
        **kwargs: see `ServerPool`.

    Raises:
        ServerError: router or server is not up, or does not fit; or they do not serve one model by one name.
    """

    all_needed = True

    def __init__(self, router: str, urls: Sequence[str], **kwargs: Any):
        super().__init__(urls, **kwargs)
        self.router = Connection(router, self._patience, self._report)
        self.connections = [self.router, *self.connections]
        self._sessions = Sessions()
        wait_until_up([self.router], kwargs["start_timeout"], self._report)
        names = sorted({server.client.model for server in self.servers})
        if len(names) > 1:
            raise ServerError(
                f"the servers behind the router at {router} call their model {' and '.join(names)}, and a request "
                "names one: start them with the same --served-model-name."
            )
        self._require_listed()

    def _require_listed(self) -> None:
        """Refuse servers behind the router that get no weights, if it names its servers as vllm-router does."""
        try:
            workers = self.router.get("/list_workers")["urls"]
        except ServerRefusedError:
            return
        # Their addresses may be others than those from here. With data parallelism "@" and a rank follow.
        number = len({worker.rpartition("@")[0] or worker for worker in workers})
        if number > len(self.servers):
            raise ServerError(
                f"the router at {self.router.url} has {number} servers, and {len(self.servers)} get weights: list all "
                "of them in vllm_server_base_urls."
            )

    def lose(self, server: PooledServer, error: BaseException) -> None:
        server.lost = str(error)  # the next try reports it

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Return the router's answer to the request that TRL writes for all prompts."""
        requests = self.seeds.requests(kwargs["json"])
        self.seeds.forget()
        sessions = self._sessions.of(kwargs["json"]["prompt"])

        def sample() -> list[dict[str, Any]]:
            try:
                self.prepare_servers()
                self._require_listed()
                client = self.servers[0].client
                named = [request | {"model": client.model} for request in requests]
                choices = self.router.complete_all(named, client.vocabulary, sessions)
                in_coroutine(all_of(server.require_kept(self.weights) for server in self.servers))
            except ServerUnavailableError as error:
                # Nobody knows which server failed, so all of them are checked and loaded again before another try.
                for server in self.servers:
                    self.lose(server, error)
                raise
            return choices

        return self._take_choices(self.persist(sample))
