"""Completions from a vLLM server that is kept full."""

import asyncio
import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import httpx

from ..serving.background import in_event_loop
from ..serving.client import require_loaded
from ..serving.connection import Connection, Patience
from ..serving.errors import ServerError, ServerRefusedError
from .neutral_sampling import SERVER_DEFAULTS
from .sampling import Completion, Request, Sampling


class Disclosed(NamedTuple):
    """What a vLLM server says of its weights; None is what it says only with its development endpoints, or not set."""

    name: str  # that clients use
    root: str  # directory or Hub id that it was started with
    weight_version: str | None  # "default" since it was started, until others are loaded
    revision: str | None  # of a Hub model
    quantization: str | None


class ServerEngine:
    """A vLLM server, kept full: as soon as one completion is done, the next request is on its way.

    A completion is a request of its own, so that it is kept when it is done, whatever becomes of the others; the
    samples of one prompt follow each other and share it in the server's prefix cache. The key that the server may ask
    for is read from the environment variable `VLLM_API_KEY`.

    Args:
        url: address of the server, "http://127.0.0.1:8000".
        concurrency: requests in flight; vLLM itself runs up to its --max-num-seqs of them at a time.
        request_timeout: seconds that one completion may take, the time that it waits in the server included.
        server_timeout: seconds to wait for a server that went away to be up again.
        max_retries: tries after the first, where the connection broke or the server failed.

    Attributes:
        model: the name that the server goes by.
        max_length: longest prompt and completion together, in tokens.
        disclosed: what the server says of the weights that it holds.

    Raises:
        ServerError: no server answers there, or it asks for a key, or its weights are being loaded.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 512,
        request_timeout: float = 14400.0,
        server_timeout: float = 240.0,
        max_retries: int = 3,
    ):
        patience = Patience(request_timeout, server_timeout, max_retries)
        self._connection = Connection(url, patience)
        self._concurrency = concurrency
        first_try = patience._replace(max_retries=0)
        self.disclosed, self.max_length = self._connection.persist(self._disclose, first_try)
        require_loaded(self.disclosed.weight_version, self._connection.url)
        self.model = self.disclosed.name

    def _disclose(self, first: bool) -> tuple[Disclosed, int]:
        card = self._connection.get("/v1/models")["data"][0]
        versions, config = {}, {}
        with suppress(ServerRefusedError):  # without its development endpoints, a server does not say
            versions = self._connection.get("/weight_info")
            info = self._connection.get("/server_info", params={"config_format": "json"})
            config = info["vllm_config"]["model_config"]
        weights = versions.get("weight_version"), config.get("revision"), config.get("quantization")
        return Disclosed(card["id"], card["root"], *weights), card["max_model_len"]

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample`.

        Raises:
            ServerError: the server refused a request, failed for good, or was given other weights meanwhile.
        """
        # The event loop has a thread of its own, so that the server never waits for whoever reads the completions.
        done: queue.SimpleQueue[tuple[int, Completion] | None] = queue.SimpleQueue()
        with in_event_loop(self._sample_all(requests, sampling, done)) as sampled:
            sampled.add_done_callback(lambda _: done.put(None))
            while (item := done.get()) is not None:
                yield item
            sampled.result()  # raises what ended it
        self._require_kept(self._connection.persist(self._disclose)[0])

    def _require_kept(self, now: Disclosed) -> None:
        """Refuses what was sampled before the server has said this of its weights.

        Raises:
            ServerError: it began with others.
        """
        if now != self.disclosed:
            raise ServerError(
                f"vLLM at {self._connection.url} did not keep its weights: it began with {self.disclosed} and has "
                f"{now}. The weights changed while it sampled. What is stored is of the first ones: have it hold "
                "these again to go on, or choose another output directory."
            )

    async def _sample_all(self, requests: Sequence[Request], sampling: Sampling, done: queue.SimpleQueue) -> None:
        pending = iter(enumerate(requests))

        async def work(http: httpx.AsyncClient) -> None:
            for position, request in pending:
                done.put((position, await self._complete(http, request, sampling)))

        async with self._connection.asynchronous() as http:
            workers = [asyncio.create_task(work(http)) for _ in range(min(self._concurrency, len(requests)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _complete(self, http: httpx.AsyncClient, request: Request, sampling: Sampling) -> Completion:
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": min(sampling.max_tokens, self.max_length - len(request.prompt_ids)),
            "temperature": sampling.temperature,
            "seed": request.seed,
            **SERVER_DEFAULTS,
            "top_p": sampling.top_p,
        }
        connection = self._connection
        answer = await connection.apersist(
            http, lambda: connection.arequest(http, "POST", "/v1/completions", json=body)
        )
        if self.disclosed.weight_version is not None:
            # After each of them: what is handed over is stored at once, and has to be of these weights.
            held = await connection.apersist(http, lambda: connection.arequest(http, "GET", "/weight_info"))
            self._require_kept(self.disclosed._replace(weight_version=held["weight_version"]))
        (choice,) = answer["choices"]
        return Completion(choice["text"], answer["usage"]["completion_tokens"], choice["finish_reason"] == "length")
