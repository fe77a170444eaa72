"""A router and the vLLM servers behind it, with the interface of one server."""

import re
from collections.abc import Sequence
from functools import partial

from .background import all_of
from .client import Fits, RolloutClient, ServerClient, Weights
from .connection import Connection
from .errors import ServerError, ServerRefusedError
from .pool import at_once


class RoutedServers(RolloutClient):
    """Client of several vLLM servers behind a router, which deals the prompts among them.

    The router gets the prompts, and the servers get everything else. Nobody knows which server answered, so all of
    them hold the present version of the weights before a rollout and after it. Otherwise its completions are discarded
    and sampled again, with the same seeds. A server that fails is waited for like a single server, although the router
    may do without it: once it is up again, the router would send it prompts before it has the weights. A `ServerError`
    says that the router is not up, or has more servers than these; `fits` is that of `ServerPool`.
    """

    all_needed = True

    def __init__(self, router: str, servers: Sequence[ServerClient], fits: Fits):
        first = servers[0]
        connection = Connection(router, first.patience, first.report)
        super().__init__(servers, [connection, *(server.connection for server in servers)])
        self.base_url, self.model, self.vocabulary, self._fits = connection.url, first.model, first.vocabulary, fits
        self.persist(lambda _: require_listed(connection, len(servers)))

    def hold(self, weights: Weights | None, reload: bool) -> None:
        """Make all servers hold weights; before another try each has to fit again, as it may have been restarted."""

        def prepare(server: ServerClient) -> None:
            if reload:
                self._fits(server)
            server.hold(weights, reload)

        require_listed(self.connection, len(self.servers))
        at_once({server.base_url: partial(prepare, server) for server in self.servers})
        self.model = self.servers[0].model

    async def require_kept(self, weights: Weights | None) -> None:
        await all_of(server.require_kept(weights) for server in self.servers)


def require_listed(connection: Connection, number: int) -> None:
    """Raise a `ServerError` if a vllm-router has more servers than get weights. Other routers do not name theirs."""
    try:
        workers = connection.get("/list_workers").get("urls", [])
    except ServerRefusedError:
        return
    # They may have other addresses there than here. With data parallelism "@" and a rank follow.
    behind = len({re.sub(r"@\d+$", "", worker) for worker in workers})
    if behind > number:
        raise ServerError(
            f"{connection.url} is a router with {behind} servers, and {number} would get weights: keep its address in "
            "vllm_server_base_url, and list those of all servers in vllm_server_base_urls."
        )
