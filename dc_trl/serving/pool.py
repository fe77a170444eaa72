"""Several vLLM servers that hold the same weights, with the interface of one."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, TypeVar

from .background import in_coroutine, in_thread
from .client import RolloutClient, ServerClient, Weights
from .connection import Deadline, Patience, persist, wait_until_one_is_up
from .errors import ServerError, ServerUnavailableError
from .pooled_server import Fits, PooledServer
from .shared_batch import SLOW, SharedBatch


T = TypeVar("T")

_SLOW_LOAD_SECONDS = 30.0  # allowance beyond SLOW times the loading time of the first server


class ServerPool(RolloutClient):
    """Client of several vLLM servers that sample one policy and hold the same version of its weights.

    Each prompt of a rollout is a separate request for all of its completions, and has its own seed, so that every
    server, and every new try, samples the same completions. A server that takes prompts holds the present
    version of the weights before and after each of them.

    A server that fails is lost: its prompts go to the others, and it is asked again before each rollout and
    synchronization. It takes prompts again once it is up, fits and has loaded the present weights. Prompts of a
    server that is much slower than the others are also sent to them (`SharedBatch`). Only if all servers are lost
    are rollouts and synchronizations tried again, and they fail as with a single server.

    Args:
        urls: addresses of the servers, "http://127.0.0.1:8000"; at least two.
        fits: function that raises a `ServerError` if a server does not fit the run.
        start_timeout: seconds to wait until all servers are up.
        patience: time limits and number of tries of requests.
        deadline: deadline of the first requests.
        report: function that takes a line about what is happening.

    Attributes:
        servers: the servers, in the order of `urls`.
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
        deadline: Deadline,
        report: Callable[[str], None] = print,
    ):
        super().__init__()
        self._patience, self._report = patience, report

        def meet(url: str) -> PooledServer:
            client = ServerClient(
                url, start_timeout=start_timeout, patience=patience, deadline=deadline, report=report
            )
            with client.connection.task(deadline):
                server = PooledServer(client, fits)
            client.connection.patience = patience._replace(max_retries=0)  # from now on, other servers can take over
            return server

        self.servers = meet_all(urls, meet)
        self.model = self.servers[0].client.model
        self.base_url = " and ".join(server.url for server in self.servers)  # for messages

    # --- weights ----------------------------------------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Load weights from one checkpoint into all servers at once; later rollouts use these weights.

        Raises:
            ServerError: no server has loaded them, or one that never loaded a checkpoint of this run has not.
        """
        self.weights = weights
        deadline = Deadline(self._patience.time_limit)
        self._persist(lambda first: self._prepare_servers(deadline), deadline)

    def _prepare_servers(self, deadline: Deadline) -> list[PooledServer]:
        """Return the servers that hold the weights of the rollouts; each has just been asked."""
        begin = time.monotonic()
        asked: dict[str, Future[None]] = {}
        for server in self.servers:
            # A server that is still busy with earlier weights is not asked for others.
            if server.task is None or server.task.done():
                asked[server.url] = server.task = in_thread(partial(server.prepare, self.weights, deadline))
        self._wait_for(asked.values(), begin, deadline)
        waited = time.monotonic() - begin
        failures: dict[str, BaseException | None] = {}
        for server in self.servers:
            task = asked.get(server.url)
            if task is not None and task.done():
                error = task.exception()
            else:
                error = ServerUnavailableError(f"vLLM at {server.url} has not loaded the weights after {waited:.0f} s")
            if error is not None:
                failures[server.url] = error
                self.lose(server, error)
            elif server.lost is not None:
                server.lost = None
                self._report(f"vLLM at {server.url} is back, and takes prompts again")
        ready = [server for server in self.servers if server.lost is None]
        if not ready:
            raise_failures(failures)
        self._require_shared_folder(ready)
        return ready

    @staticmethod
    def _wait_for(tasks: Collection[Future[None]], begin: float, deadline: Deadline) -> None:
        """Wait until all tasks are done; once one has succeeded, not much longer than it took."""
        left = set(tasks)
        while left and not any(task.done() and task.exception() is None for task in tasks):
            timeout = deadline.left if deadline.left < math.inf else None
            done, left = wait(left, timeout=timeout, return_when=FIRST_COMPLETED)
            if not done:
                return
        took = time.monotonic() - begin
        wait(left, timeout=min(deadline.left, (SLOW - 1) * took + _SLOW_LOAD_SECONDS))

    def _require_shared_folder(self, ready: list[PooledServer]) -> None:
        """Refuse servers that have never loaded a checkpoint if others have loaded this one."""
        if self.weights is None or self.weights.checkpoint is None:
            return
        never_loaded = [server for server in self.servers if not server.has_loaded]
        if never_loaded:
            reasons = "; ".join(str(server.lost) for server in never_loaded)
            raise ServerUnavailableError(
                f"{' and '.join(server.url for server in never_loaded)} did not load the weights from "
                f"{self.weights.checkpoint}, which {' and '.join(server.url for server in ready)} did: every server "
                "of vllm_server_base_urls has to see that directory under this path. Set weight_sync_dir to one that "
                f"all of them see, or take the servers out of the list. ({reasons})"
            )

    def lose(self, server: PooledServer, error: BaseException) -> None:
        """Give a server no more prompts until it holds the weights again."""
        why = str(error)
        # A server that stays away is not reported again; one that came back and does not fit is.
        if server.lost is None or not (isinstance(error, ServerUnavailableError) or why == server.lost):
            self._report(f"vLLM at {server.url} gets no prompts until it holds the weights again: {why}")
        server.lost = why

    def _persist(self, action: Callable[[bool], Any], deadline: Deadline) -> Any:
        connections = [server.client.connection for server in self.servers]
        up = partial(wait_until_one_is_up, connections, interval=1.0, report=self._report)
        return persist(action, self._patience, deadline, up, self._report)

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Generate as TRL's `VLLMClient.generate` does.

        Raises:
            ServerError: the servers refused, or all of them failed in all tries, or an answer cannot be used for a
                rollout of these weights.
        """
        output = super().generate(*args, **kwargs)
        return output if self.weights is None else self._require_log_probs(output)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Return the answer of all servers together to the request that TRL writes for all prompts."""
        return self._take_choices(self._complete(kwargs["json"]))

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        requests = self.seeds.requests(body)
        self.seeds.forget()
        batch = SharedBatch(requests, body["n"], self.weights, lose=self.lose, report=self._report)
        deadline = Deadline(self._patience.time_limit)

        def go_on(first: bool) -> None:
            in_coroutine(batch.run(self._prepare_servers(deadline), deadline))

        self._persist(go_on, deadline)
        return [choice for answer in batch.answers if answer is not None for choice in answer["choices"]]

    def image_features(self, *args: Any, **kwargs: Any) -> list[dict[str, Any] | None]:
        """Refuse images, which only a single server can read.

        Raises:
            ServerError: always.
        """
        raise ServerError(
            "vllm_server_base_urls supports only prompts of text, and these have images: use vllm_server_base_url "
            "with one server (which may run on several GPUs, --data-parallel-size)."
        )


def meet_all(urls: Sequence[str], meet: Callable[[str], T]) -> list[T]:
    """Return what a function returns for each server. All servers are met at once.

    Raises:
        ServerError: a server was not met; the message names all of them.
    """
    meetings = {url: in_thread(partial(meet, url)) for url in urls}
    wait(meetings.values())
    raise_failures({url: meeting.exception() for url, meeting in meetings.items()})
    return [meeting.result() for meeting in meetings.values()]


def raise_failures(failures: dict[str, BaseException | None]) -> None:
    """Raise the failures of servers as one error, which is worth another try if each of them is.

    Args:
        failures: errors by address; None for a server that did not fail.
    """
    errors = {url: error for url, error in failures.items() if error is not None}
    for error in errors.values():
        if not isinstance(error, ServerError):
            raise error
    if errors:
        kinds = [isinstance(error, ServerUnavailableError) for error in errors.values()]
        lines = [str(e) if url in str(e) else f"vLLM at {url}: {e}" for url, e in errors.items()]
        raise (ServerUnavailableError if all(kinds) else ServerError)("; ".join(lines))
