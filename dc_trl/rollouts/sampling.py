"""Many completions from a deployed policy, each with a seed of its own, handed over as they finish."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import aiohttp
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from ..serving.server import ServerError, ServerUnavailableError, authorization, key_wanted
from .end_tokens import end_tokens, pad_token
from .replica import Replica


class Sampling(NamedTuple):
    """How completions are drawn: temperature 0 is greedy; top_p 1 truncates nothing."""

    max_tokens: int = 32768
    temperature: float = 0.7
    top_p: float = 1.0


class Request(NamedTuple):
    """One completion to be sampled."""

    prompt_ids: list[int]
    seed: int


class Completion(NamedTuple):
    """Text without special tokens, its length in tokens, and whether the limit cut it off."""

    text: str
    tokens: int
    truncated: bool


class Engine(Protocol):
    """Something that samples completions."""

    @property
    def max_length(self) -> int:
        """Longest prompt and completion together, in tokens."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Samples a completion for each request.

        Yields:
            (position of the request, completion), in the order in which they finish.
        """


class Disclosed(NamedTuple):
    """What a vLLM server says of its weights; None is what it says only with its development endpoints, or not set."""

    name: str  # that clients use
    root: str  # directory or Hub id that it was started with
    weight_version: str | None  # "default" since it was started, until others are loaded
    revision: str | None  # of a Hub model
    quantization: str | None


class _RefusedError(ServerError):
    """An answer that says no (HTTP 4xx)."""


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
        ServerError: no server answers there, or it asks for a key.
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
        self.url = url.rstrip("/")
        self._concurrency = concurrency
        self._timeout = aiohttp.ClientTimeout(total=request_timeout, sock_connect=10)
        self._request_timeout = request_timeout
        self._server_timeout = server_timeout
        self._max_retries = max_retries
        self._headers = authorization()
        self.disclosed, self.max_length = asyncio.run(self._disclose(retries=0))
        self.model = self.disclosed.name

    async def _disclose(self, retries: int) -> tuple["Disclosed", int]:
        async with self._session() as session:
            card = (await self._call(session, "GET", "/v1/models", retries))["data"][0]
            versions, info = {}, {}
            with suppress(_RefusedError):  # without its development endpoints, a server does not say
                versions = await self._call(session, "GET", "/weight_info", retries)
                info = await self._call(session, "GET", "/server_info?config_format=json", retries)
        config = info["vllm_config"]["model_config"] if info else {}
        return Disclosed(
            card["id"],
            card["root"],
            versions.get("weight_version"),
            config.get("revision"),
            config.get("quantization"),
        ), card["max_model_len"]

    def _session(self) -> aiohttp.ClientSession:
        # A connection for each request: a busy server closes those that are kept alive under requests on their way.
        return aiohttp.ClientSession(
            headers=self._headers, timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample`.

        Raises:
            ServerError: the server refused a request, failed for good, or was given other weights meanwhile.
        """
        # The event loop has a thread of its own, so that the server never waits for whoever reads the completions.
        done: queue.SimpleQueue[tuple[int, Completion] | BaseException | None] = queue.SimpleQueue()
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._sample_all(requests, sampling, done))

        def run() -> None:
            try:
                loop.run_until_complete(task)
            except BaseException as error:  # raised where the completions are read
                done.put(error)
            else:
                done.put(None)
            finally:
                loop.close()

        thread = threading.Thread(target=run, name="dc_trl-sampling", daemon=True)
        thread.start()
        try:
            while (item := done.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            if thread.is_alive():
                loop.call_soon_threadsafe(task.cancel)
            thread.join()
        if (now := asyncio.run(self._disclose(self._max_retries))[0]) != self.disclosed:
            raise ServerError(
                f"vLLM at {self.url} did not keep its weights: it began with {self.disclosed} and has {now}. What it "
                "sampled is of both, and not to be used."
            )

    async def _sample_all(self, requests: Sequence[Request], sampling: Sampling, done: queue.SimpleQueue) -> None:
        pending = iter(enumerate(requests))

        async def work(session: aiohttp.ClientSession) -> None:
            for position, request in pending:
                done.put((position, await self._complete(session, request, sampling)))

        async with self._session() as session:
            workers = [asyncio.create_task(work(session)) for _ in range(min(self._concurrency, len(requests)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _complete(self, session: aiohttp.ClientSession, request: Request, sampling: Sampling) -> Completion:
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": min(sampling.max_tokens, self.max_length - len(request.prompt_ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # Whatever is left out comes from the model's generation_config, which for Qwen3 truncates to 20 tokens.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request.seed,
        }
        answer = await self._call(session, "POST", "/v1/completions", self._max_retries, json=body)
        (choice,) = answer["choices"]
        tokens = answer["usage"]["completion_tokens"]
        return Completion(choice["text"], tokens, choice["finish_reason"] == "length")

    async def _call(self, session: aiohttp.ClientSession, method: str, path: str, retries: int, **kwargs) -> dict:
        failure = ""
        for attempt in range(retries + 1):
            if attempt > 0:
                await self._until_up(session)
            try:
                async with session.request(method, f"{self.url}{path}", **kwargs) as response:
                    if response.status == 200:
                        return await response.json()
                    text = (await response.text())[:500]
            except TimeoutError:
                failure = f"vLLM at {self.url} did not answer {path} within {self._request_timeout:g} s"
                continue
            except aiohttp.ClientError as error:
                failure = f"no connection to vLLM at {self.url} ({type(error).__name__} during {path})"
                continue
            if response.status == 401:
                raise key_wanted(self.url)
            failure = f"vLLM at {self.url} refused {path} (HTTP {response.status}): {text}"
            if response.status < 500:
                raise _RefusedError(failure)
        raise ServerUnavailableError(f"{failure} (tried {retries + 1} times)")

    async def _until_up(self, session: aiohttp.ClientSession) -> None:
        """Waits until the server is up, or has been away for too long, which the next request finds out."""
        end = time.monotonic() + self._server_timeout
        while time.monotonic() < end:
            await asyncio.sleep(1.0)
            try:
                async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                    if response.status == 200:
                        return
            except (TimeoutError, aiohttp.ClientError):
                continue


class ReplicaEngine:
    """The in-process replica, in batches.

    Args:
        replica: of the policy, in its scheme.
        tokenizer: of the policy.
        batch_size: completions at a time.

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
        """See `Engine.sample`. Completions of one batch finish together."""
        for start in range(0, len(requests), self._batch_size):
            batch = requests[start : start + self._batch_size]
            limits = [min(sampling.max_tokens, self.max_length - len(request.prompt_ids)) for request in batch]
            config = GenerationConfig(
                max_new_tokens=max(limits),
                do_sample=False,
                pad_token_id=pad_token(self._tokenizer, self._ends),
                eos_token_id=self._ends,
            )
            noise = [] if sampling.temperature == 0 else _sampler([request.seed for request in batch], sampling)
            completions, _ = self._replica.generate(
                [request.prompt_ids for request in batch], config, sampling.temperature or 1.0, noise
            )
            for row, (ids, limit) in enumerate(zip(completions, limits, strict=True)):
                kept = ids[:limit]
                ended = kept[-1] in self._ends
                # Without the end token, be it a special one or not, as vLLM.
                text = self._tokenizer.decode(kept[:-1] if ended else kept, skip_special_tokens=True)
                yield start + row, Completion(text, len(kept), not ended)


def _sampler(seeds: list[int], sampling: Sampling) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return [*warpers, _GumbelNoise(seeds)]


class _GumbelNoise(LogitsProcessor):
    """Makes the largest score a draw from the softmax of the scores: the Gumbel-max trick, each row with its seed.

    So a completion depends on its own seed and not on the batch that it is part of.
    """

    def __init__(self, seeds: list[int]):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [torch.empty(scores.shape[1]).exponential_(generator=generator) for generator in self._generators]
        return scores - torch.stack(rows).log().to(scores.device)
