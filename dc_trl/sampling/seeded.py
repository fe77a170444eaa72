"""Engines of an evaluation: they sample many completions, each with its own seed, and return them as they finish."""

import hashlib
import queue
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from ..serving.background import all_of, in_event_loop
from ..serving.client import require_loaded
from ..serving.connection import Connection, Patience
from ..serving.errors import ServerError, ServerRefusedError
from ..settings.neutral_sampling import SERVER_DEFAULTS
from .engine_names import Sampling
from .replica import Replica, end_tokens


class Request(NamedTuple):
    """One completion to be sampled."""

    prompt_ids: list[int]
    seed: int


def sample_seed(seed: int, problem: str, number: int) -> int:
    """Return the seed of one sample of a problem, from 0 to 2³¹ − 1."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{problem}/{number}".encode()).digest()[:4]) >> 1


class Completion(NamedTuple):
    """Text without special tokens, its length in tokens, and whether it ended at the limit."""

    text: str
    tokens: int
    truncated: bool


class ReplicaEngine:
    """The in-process replica as an engine, which samples `batch_size` completions at a time.

    Raises:
        ValueError: neither the policy nor the tokenizer has an end token.
    """

    def __init__(self, replica: Replica, tokenizer: PreTrainedTokenizerBase, batch_size: int = 64):
        self._replica = replica
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._ends = end_tokens(replica.model, tokenizer)
        self.max_length: int = replica.model.config.get_text_config().max_position_embeddings

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Sample a completion for each request; the completions of one batch finish together.

        Yields:
            (position of the request, completion), in the order in which they finish.
        """
        for start in range(0, len(requests), self._batch_size):
            batch = requests[start : start + self._batch_size]
            limits = [min(sampling.max_tokens, self.max_length - len(request.prompt_ids)) for request in batch]
            config = GenerationConfig(
                max_new_tokens=max(limits),
                do_sample=False,
                pad_token_id=self._ends[0],  # which no attention reads
                eos_token_id=self._ends,
            )
            noise: list[LogitsProcessor] = []
            if sampling.temperature > 0:
                warpers = [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1.0 else []
                seeds = [request.seed for request in batch]
                noise = [TemperatureLogitsWarper(sampling.temperature), *warpers, _GumbelNoise(seeds)]
            completions, _ = self._replica.generate(
                [request.prompt_ids for request in batch], config, sampling.temperature or 1.0, noise
            )
            for row, (ids, limit) in enumerate(zip(completions, limits, strict=True)):
                kept = ids[:limit]
                ended = kept[-1] in self._ends
                # vLLM, too, drops the end token, whether it is a special one or not.
                text = self._tokenizer.decode(kept[:-1] if ended else kept, skip_special_tokens=True)
                yield start + row, Completion(text, len(kept), not ended)


class _GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise, with a seed for each row, so that the largest score is a sample from the softmax.

    A completion thus depends on its own seed, and not on the batch that it is part of.
    """

    def __init__(self, seeds: list[int]):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [torch.empty(scores.shape[1]).exponential_(generator=generator) for generator in self._generators]
        return scores - torch.stack(rows).log().to(scores.device)


class Disclosed(NamedTuple):
    """What a vLLM server says of itself; None if it is not set, or needs the development endpoints."""

    name: str  # name of the model for clients
    root: str  # directory or Hub id that the server was started with
    max_length: int  # largest length of a prompt with its completion, in tokens
    vllm: str  # version of vLLM
    kv_cache_dtype: str | None = None
    weight_version: str | None = None  # "default" until other weights are loaded
    revision: str | None = None  # revision of a Hub model
    quantization: str | None = None

    @classmethod
    def of(cls, connection: Connection, adapter: bool = False) -> "Disclosed":
        """Ask a server, first for what its public endpoints say; with `adapter`, of the last one that it has loaded.

        Raises:
            ServerError: it does not answer, or not as vLLM does.
        """
        with connection.reading("/v1/models, /version, /weight_info or /server_info"):
            cards, version = connection.get("/v1/models")["data"], connection.get("/version")["version"]
            # The base comes first, and alone has a length.
            card = next((card for card in reversed(cards) if adapter and card.get("parent")), cards[0])
            found = cls(str(card["id"]), str(card["root"]), int(cards[0]["max_model_len"]), str(version))
            if cache := re.search(r'cache_config_info\{.*?cache_dtype="([^"]*)"', connection.text("/metrics")):
                found = found._replace(kv_cache_dtype=cache[1])
            with suppress(ServerRefusedError):
                found = found._replace(weight_version=connection.get("/weight_info")["weight_version"])
                info = connection.get("/server_info", params={"config_format": "json"})["vllm_config"]["model_config"]
                found = found._replace(revision=info["revision"], quantization=info["quantization"])
        return found


class ServerEngine:
    """A vLLM server as an engine: as soon as one completion is done, the next request is sent.

    Each completion is a request of its own, so that a completion that is done is kept even if others fail. The samples
    of one prompt follow each other and share it in the server's prefix cache. The API key of the server, if it needs
    one, is read from the environment variable `VLLM_API_KEY`.

    Args:
        url: address of the server, for example "http://127.0.0.1:8000".
        concurrency: number of requests in flight; vLLM itself runs up to its --max-num-seqs of them at a time.
        max_retries: number of further tries after the connection broke or the server failed.
        vocabulary: bound below which all token ids of the model are; None if it is unknown.

    Raises:
        ServerError: no server answers at the URL, it needs a key, or it is loading weights.
    """

    def __init__(self, url: str, *, concurrency: int = 512, max_retries: int = 3, vocabulary: int | None = None):
        # A completion may wait in the server for hours.
        self._connection = Connection(url, Patience(request_timeout=14400.0, max_retries=max_retries))
        self._concurrency = concurrency
        self.disclosed = Disclosed.of(self._connection)
        require_loaded(self.disclosed.weight_version, self._connection.url)
        self.model, self.max_length = self.disclosed.name, self.disclosed.max_length
        self._vocabulary = vocabulary

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Sample a completion for each request.

        Yields:
            (position of the request, completion), in the order in which they finish.

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
        (choice,) = await connection.apersist(lambda: connection.complete(body, self._vocabulary))
        if self.disclosed.weight_version is not None:
            # After each completion, because it is stored at once and has to be from these weights.
            held = await connection.apersist(lambda: connection.arequest("GET", "/weight_info"))
            if (version := held.get("weight_version")) != self.disclosed.weight_version:
                raise ServerError(
                    f"vLLM at {connection.url} did not keep its weights: it began with "
                    f"{self.disclosed.weight_version!r} and has {version!r}. The weights changed while it sampled: "
                    "load the first ones again to continue with what is stored, or choose another output directory."
                )
        return Completion(choice["text"], len(choice["token_ids"]), choice["finish_reason"] == "length")


Engine = ReplicaEngine | ServerEngine
