"""A router and the vLLM servers behind it, with the interface of one server."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from .background import all_of
from .client import Fits, RolloutClient, ServerClient, Sessions, Weights
from .connection import Connection, Patience, persist
from .errors import ServerError, ServerRefusedError
from .pool import at_once, meet_servers


T = TypeVar("T")


class RoutedServers(ServerClient):
    """Client of several vLLM servers behind a router, which deals the prompts among them.

    The router gets the prompts, and the servers get everything else. Nobody knows which server answered, so all of
    them hold the present version of the weights before a rollout and after it. Otherwise its completions are discarded
    and sampled again, with the same seeds. A server that fails is waited for like a single server, although the router
    may do without it: once it is up again, the router would send it prompts before it has the weights.

    Args:
        router: address of the router, "http://127.0.0.1:8000".
        urls: addresses of all servers behind it.
        fits: function that raises a `ServerError` if a server does not fit the run.
        start_timeout: seconds to wait until each of them is up.
        patience: time limits and number of tries of requests.
        report: function that takes a line about what is happening.

    Attributes:
        connection: connection to the router.
        servers: clients of the servers, in the order of `urls`.

    Raises:
        ServerError: router or server is not up, or does not fit.
    """

    def __init__(
        self,
        router: str,
        urls: Sequence[str],
        fits: Fits,
        start_timeout: float,
        patience: Patience,
        report: Callable[[str], None] = print,
    ):
        RolloutClient.__init__(self)  # a router is not met like a server
        self._fits, self._report, self._sessions = fits, report, Sessions()
        self.connection = Connection(router, patience, report)
        self.base_url = self.connection.url
        self.servers = meet_servers(urls, fits, start_timeout, patience, report)
        self.model, self.vocabulary = self.servers[0].model, self.servers[0].vocabulary
        self.persist(lambda first: require_listed(self.connection, len(urls)))

    def persist(self, action: Callable[[bool], T]) -> T:
        connections = [self.connection, *(server.connection for server in self.servers)]
        return persist(connections, action, self.connection.patience, self._report, all_needed=True)

    def hold(self, weights: Weights, reload: bool) -> None:
        """Load weights into all servers; before another try (`reload`), each has to fit again, as it may be new."""

        def prepare(server: ServerClient) -> None:
            if reload:
                self._fits(server)
            server.hold(weights, reload)

        require_listed(self.connection, len(self.servers))
        at_once({server.base_url: partial(prepare, server) for server in self.servers})
        self.model = self.servers[0].model

    async def require_kept(self, weights: Weights) -> None:
        await all_of(server.require_kept(weights) for server in self.servers)


def require_listed(connection: Connection, number: int) -> None:
    """Refuse a vllm-router if it has more servers than get weights. Other routers do not name theirs.

    Raises:
        ServerError: some of the servers would sample with other weights.
    """
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
