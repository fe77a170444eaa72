"""Sample completions from a vLLM server with many requests in flight."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..serving.answers import require_rollout
from ..serving.background import all_of, in_event_loop
from ..serving.client import require_loaded
from ..serving.connection import Connection, Patience
from ..serving.errors import ServerError, ServerRefusedError
from .neutral_sampling import SERVER_DEFAULTS
from .sampling import Completion, Request, Sampling


class Disclosed(NamedTuple):
    """Information of a vLLM server on its weights; None if it is not set, or needs the development endpoints."""

    name: str  # name of the model for clients
    root: str  # directory or Hub id that the server was started with
    weight_version: str | None  # "default" until other weights are loaded
    revision: str | None  # revision of a Hub model
    quantization: str | None


class ServerEngine:
    """A vLLM server as an engine: as soon as one completion is done, the next request is sent.

    Each completion is a request of its own, so that a completion that is done is kept even if others fail. The samples
    of one prompt follow each other and share it in the server's prefix cache. The API key of the server, if it needs
    one, is read from the environment variable `VLLM_API_KEY`.

    Args:
        url: address of the server, for example "http://127.0.0.1:8000".
        concurrency: number of requests in flight; vLLM itself runs up to its --max-num-seqs of them at a time.
        request_timeout: seconds that one completion may take, including the time that it waits in the server.
        server_timeout: seconds to wait for a lost server to be up again.
        max_retries: number of further tries after the connection broke or the server failed.
        vocabulary: bound below which all token ids of the model are; None if it is unknown.

    Attributes:
        model: name of the model on the server.
        max_length: largest length of a prompt with its completion, in tokens.
        disclosed: information of the server on the weights that it holds.

    Raises:
        ServerError: no server answers at the URL, it needs a key, or it is loading weights.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 512,
        request_timeout: float = 14400.0,
        server_timeout: float = 240.0,
        max_retries: int = 3,
        vocabulary: int | None = None,
    ):
        patience = Patience(request_timeout, server_timeout, max_retries)
        self._connection = Connection(url, patience)
        self._concurrency = concurrency
        self.disclosed, self.max_length = self._disclose(first=True)
        require_loaded(self.disclosed.weight_version, self._connection.url)
        self.model = self.disclosed.name
        self._vocabulary = vocabulary

    def _disclose(self, first: bool) -> tuple[Disclosed, int]:
        models = self._connection.get("/v1/models")
        versions: dict[str, Any] = {}
        info: dict[str, Any] = {"vllm_config": {"model_config": {}}}
        with suppress(ServerRefusedError):  # a server may lack the development endpoints
            versions = self._connection.get("/weight_info")
            info = self._connection.get("/server_info", params={"config_format": "json"})
        with self._connection.reading("/v1/models and /server_info"):
            card, config = models["data"][0], info["vllm_config"]["model_config"]
            weights = versions.get("weight_version"), config.get("revision"), config.get("quantization")
            return Disclosed(str(card["id"]), str(card["root"]), *weights), int(card["max_model_len"])

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Sample as `Engine.sample` does.

        Raises:
            ServerError: the server refused a request, failed permanently, or got other weights meanwhile.
        """
        # The event loop has its own thread, so that the server never waits for the reader of the completions.
        done: queue.SimpleQueue[tuple[int, Completion] | None] = queue.SimpleQueue()
        with in_event_loop(self._sample_all(requests, sampling, done)) as sampled:
            sampled.add_done_callback(lambda _: done.put(None))
            while (item := done.get()) is not None:
                yield item
            sampled.result()  # raises the error that ended sampling
        self._require_same_weights(self._connection.persist(self._disclose)[0])

    def _require_same_weights(self, now: Disclosed) -> None:
        """Refuse a server whose weights are not those that it began with."""
        if now != self.disclosed:
            raise ServerError(
                f"vLLM at {self._connection.url} did not keep its weights: it began with {self.disclosed} and has "
                f"{now}. The weights changed while it sampled. The stored completions are from the first weights: "
                "load these again to continue, or choose another output directory."
            )

    async def _sample_all(self, requests: Sequence[Request], sampling: Sampling, done: queue.SimpleQueue) -> None:
        pending = iter(enumerate(requests))

        async def work() -> None:
            for position, request in pending:
                done.put((position, await self._complete(request, sampling)))

        await all_of(work() for _ in range(min(self._concurrency, len(requests))))

    async def _complete(self, request: Request, sampling: Sampling) -> Completion:
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": min(sampling.max_tokens, self.max_length - len(request.prompt_ids)),
            "temperature": sampling.temperature,
            "seed": request.seed,
            **SERVER_DEFAULTS,
            "top_p": sampling.top_p,
            "return_token_ids": True,  # they identify the prompt of an answer, and give its length
        }
        connection = self._connection

        async def ask() -> list[dict[str, Any]]:
            answer = await connection.arequest("POST", "/v1/completions", json=body)
            return require_rollout(body, answer, connection.url, self._vocabulary)

        (choice,) = await connection.apersist(ask)
        if self.disclosed.weight_version is not None:
            # After each completion, because it is stored at once and has to be from these weights.
            held = await connection.apersist(lambda: connection.arequest("GET", "/weight_info"))
            self._require_same_weights(self.disclosed._replace(weight_version=held.get("weight_version")))
        return Completion(choice["text"], len(choice["token_ids"]), choice["finish_reason"] == "length")
