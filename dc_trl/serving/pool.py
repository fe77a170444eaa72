"""Several vLLM servers that hold the same weights, with the interface of one."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

import numpy as np
from trl.generation.vllm_client import VLLMClient

from .background import in_coroutine, in_thread
from .client import ServerClient, Weights, require_log_probs, require_routes, routes_of
from .connection import Deadline, Patience, persist, wait_until_one_is_up
from .errors import ServerError, ServerUnavailableError
from .pooled_server import Fits, PooledServer
from .seeds import RolloutSeeds
from .shared_batch import SLOW, SharedBatch
from .spread import ExpectedLengths


_SLOW_LOAD_SECONDS = 30.0  # that a server may take to load weights beyond SLOW times what the first one took


class ServerPool(VLLMClient):
    """Client of several vLLM servers that sample one policy, each of which holds the same version of its weights.

    Each prompt of a rollout is a request of its own, for all its completions. The prompts are spread over the servers
    by the tokens that they are expected to take (`spread`, `ExpectedLengths`), and each has a seed of its own: it is
    sampled alike wherever it goes, and wherever it goes again. Whatever takes prompts has the present version of the
    weights before and after each of them.

    A server that fails is lost: its prompts go to the others, and it is looked for again before each rollout and
    synchronization; once it is up, fits and has loaded the present weights, it takes prompts again. Prompts of a
    server that is much slower than the others go to these too (`SharedBatch`). Only where all servers are lost are
    rollouts and synchronizations tried again as with one server, and fail as with one server.

    Args:
        urls: addresses of the servers, "http://127.0.0.1:8000"; at least two.
        fits: raises a `ServerError` where a server does not serve us.
        start_timeout: seconds to wait for all servers to be up.
        patience: how long and how often the servers are asked.
        deadline: of the first requests.
        report: takes a line about what is happening.

    Attributes:
        servers: the servers, in the order of `urls`.
        weights, routed_experts, seeds: see `ServerClient`.

    Raises:
        ServerError: a server is not up within `start_timeout`, or does not fit; the message names all of them.
    """

    # TRL's constructor connects to one server; what this class takes from it is how requests are written and read.
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
        self._patience, self._report = patience, report
        self.weights: Weights | None = None
        self.routed_experts: list[np.ndarray | None] = []
        self._lengths = ExpectedLengths()
        self.seeds = RolloutSeeds()

        def meet(url: str) -> PooledServer:
            client = ServerClient(
                url, start_timeout=start_timeout, patience=patience, deadline=deadline, report=report
            )
            with client.connection.task(deadline):
                server = PooledServer(client, fits)
            client.connection.patience = patience._replace(max_retries=0)  # from now on others are there
            return server

        meetings = {url: in_thread(partial(meet, url)) for url in urls}
        wait(meetings.values())
        _raise_failures({url: meeting.exception() for url, meeting in meetings.items()})
        self.servers = [meeting.result() for meeting in meetings.values()]
        self.model = self.servers[0].client.model
        self.base_url = " and ".join(server.url for server in self.servers)  # for messages

    # --- weights ----------------------------------------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Brings weights from one checkpoint to all servers at once; rollouts are theirs from now on.

        Raises:
            ServerError: no server has taken them, or one that has never taken a checkpoint of this run has not.
        """
        self.weights = weights
        deadline = Deadline(self._patience.time_limit)
        self._persist(lambda first: self._ready(deadline), deadline)

    def _ready(self, deadline: Deadline) -> list[PooledServer]:
        """The servers that hold the weights of the rollouts, each of which has been asked just now.

        Raises:
            ServerError: there are none; or one does not see the checkpoint.
        """
        begin = time.monotonic()
        asked = []
        for server in self.servers:
            # One that is still busy with earlier weights is not asked for others meanwhile.
            if server.task is None or server.task.done():
                server.task = in_thread(partial(server.prepare, self.weights, deadline))
                asked.append(server)
        self._wait_for([server.task for server in asked if server.task is not None], begin, deadline)
        failures: dict[str, BaseException | None] = {}
        for server in self.servers:
            task = server.task
            assert task is not None
            if server not in asked or not task.done():
                waited = time.monotonic() - begin
                error: BaseException | None = ServerUnavailableError(
                    f"vLLM at {server.url} has not taken the weights after {waited:.0f} s"
                )
            else:
                error = task.exception()
            if error is None:
                self._take_up(server)
                continue
            failures[server.url] = error
            self.lose(server, error)
        ready = [server for server in self.servers if server.lost is None]
        if not ready:
            _raise_failures(failures)
        self._require_shared_folder(ready)
        return ready

    @staticmethod
    def _wait_for(tasks: list[Future[None]], begin: float, deadline: Deadline) -> None:
        """Waits until all are done; once one has succeeded, not much longer than that one took."""
        left = set(tasks)
        while left and not any(task.done() and task.exception() is None for task in tasks):
            done, left = wait(left, timeout=_finite(deadline.left), return_when=FIRST_COMPLETED)
            if not done:
                return
        took = time.monotonic() - begin
        wait(left, timeout=min(deadline.left, (SLOW - 1) * took + _SLOW_LOAD_SECONDS))

    def _require_shared_folder(self, ready: list[PooledServer]) -> None:
        """Refuses a server that has never loaded a checkpoint, where others have loaded this one.

        Raises:
            ServerUnavailableError: names those servers and the directory.
        """
        if self.weights is None or self.weights.checkpoint is None:
            return
        blind = [server for server in self.servers if not server.has_loaded]
        if blind:
            reasons = "; ".join(str(server.lost) for server in blind)
            raise ServerUnavailableError(
                f"{' and '.join(server.url for server in blind)} did not load the weights from "
                f"{self.weights.checkpoint}, which {' and '.join(server.url for server in ready)} did: every server "
                "of vllm_server_base_urls has to see that directory under this path. Set weight_sync_dir to one that "
                f"all of them see, or take the servers out of the list. ({reasons})"
            )

    def _take_up(self, server: PooledServer) -> None:
        if server.lost is not None:
            server.lost = None
            self._report(f"vLLM at {server.url} is back, and takes prompts again")

    def lose(self, server: PooledServer, error: BaseException) -> None:
        """Gives a server no more prompts until it has the weights again."""
        why = str(error)
        # One that stays away is not reported again; one that came back and does not fit is.
        if server.lost is None or not (isinstance(error, ServerUnavailableError) or why == server.lost):
            self._report(f"vLLM at {server.url} is given no prompts until it has the weights again: {why}")
        server.lost = why

    def _persist(self, action: Callable[[bool], Any], deadline: Deadline) -> Any:
        connections = [server.client.connection for server in self.servers]
        up = partial(wait_until_one_is_up, connections, interval=1.0, report=self._report)
        return persist(action, self._patience, deadline, up, self._report)

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See TRL's `VLLMClient.generate`.

        Raises:
            ServerError: the servers refused, or all of them failed for good; or they did not give what a rollout of
                their weights needs.
        """
        output = super().generate(*args, **kwargs)
        if self.weights is not None:
            require_log_probs(output["logprobs"], self.base_url)
        return output

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """The request that TRL writes for all prompts, answered by all servers together."""
        choices = self._complete(kwargs["json"])
        self.routed_experts = routes_of(choices)
        return {"choices": choices}

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        prompts, n, longest = body["prompt"], body["n"], body["max_tokens"]
        requests = self.seeds.requests(body)
        self.seeds.forget()
        costs = [self._lengths.cost(prompt, n, longest) for prompt in prompts]
        batch = SharedBatch(requests, costs, n, self.weights, lose=self.lose, report=self._report)
        deadline = Deadline(self._patience.time_limit)

        def go_on(first: bool) -> None:
            in_coroutine(batch.run(self._ready(deadline), deadline))

        self._persist(go_on, deadline)
        answers = [answer["choices"] for answer in batch.answers if answer is not None]
        self._lengths.learn(prompts, [[len(choice["token_ids"]) for choice in answer] for answer in answers])
        return [choice for answer in answers for choice in answer]

    def image_features(self, *args: Any, **kwargs: Any) -> list[dict[str, Any] | None]:
        """Images are read by one server alone.

        Raises:
            ServerError: always.
        """
        raise ServerError(
            "vllm_server_base_urls is for prompts of text, and these have images: use vllm_server_base_url with one "
            "server (which may run on several GPUs, --data-parallel-size)."
        )

    def require_routes(self) -> None:
        """See the function of this name, of the last completions."""
        require_routes(self.routed_experts, self.base_url)


def _finite(seconds: float) -> float | None:
    """As `concurrent.futures` takes it: None for no limit."""
    return None if seconds == math.inf else seconds


def _raise_failures(failures: dict[str, BaseException | None]) -> None:
    """Raises what servers failed with as one error, which is worth another try where all of them are.

    Args:
        failures: by address; None where a server did not fail.
    """
    errors = {url: error for url, error in failures.items() if error is not None}
    for error in errors.values():
        if not isinstance(error, ServerError):
            raise error
    if errors:
        kinds = [isinstance(error, ServerUnavailableError) for error in errors.values()]
        lines = [str(e) if url in str(e) else f"vLLM at {url}: {e}" for url, e in errors.items()]
        raise (ServerUnavailableError if all(kinds) else ServerError)("; ".join(lines))
