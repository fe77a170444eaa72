"""Sample many completions from a deployed policy, each with its own seed, and return them as they finish."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from ..quantization.schemes import RESEARCH_BITS, SCHEMES
from .replica import Replica, end_tokens, pad_token


# Help text of options that take engines.
ENGINE_HELP = (
    f"one or more of: {', '.join(SCHEMES)} (starts a vLLM server), replica:SCHEME (in this process), "
    "http://… (a running vLLM server)"
)


class EngineSpec(NamedTuple):
    """An engine by name: `fp8` (starts a vLLM server), `replica:fp8` (in this process), or the URL of a server."""

    name: str
    kind: Literal["vllm", "replica", "url"]
    scheme: str | None  # None for a URL, whose server has its own

    @classmethod
    def parse(cls, word: str) -> "EngineSpec":
        """Return the engine that a word names.

        Raises:
            ValueError: the word does not name an engine.
        """
        if re.match(r"https?://[^/]", word):
            return cls(word.rstrip("/"), "url", None)
        scheme = word.removeprefix("replica:")
        in_process = scheme != word
        if scheme not in SCHEMES and not (in_process and scheme in RESEARCH_BITS):
            raise ValueError(
                f"engine={word!r} is unknown: use a scheme ({', '.join(SCHEMES)}) for a vLLM server that is started, "
                "replica:SCHEME for a replica in this process, or the URL of a running vLLM server."
            )
        return cls(word, "replica" if in_process else "vllm", scheme)


class Sampling(NamedTuple):
    """Settings of sampling; a temperature of 0 is greedy, and a top_p of 1 truncates nothing."""

    max_tokens: int = 32768
    temperature: float = 0.7
    top_p: float = 1.0


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


class Engine(Protocol):
    """An engine that samples completions."""

    @property
    def max_length(self) -> int:
        """Largest length of a prompt with its completion, in tokens."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Sample a completion for each request.

        Yields:
            (position of the request, completion), in the order in which they finish.
        """


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
        """Sample as `Engine.sample` does; the completions of one batch finish together."""
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
                # vLLM, too, drops the end token, whether it is a special one or not.
                text = self._tokenizer.decode(kept[:-1] if ended else kept, skip_special_tokens=True)
                yield start + row, Completion(text, len(kept), not ended)


def _sampler(seeds: list[int], sampling: Sampling) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return [*warpers, _GumbelNoise(seeds)]


class _GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise, with a seed for each row, so that the largest score is a sample from the softmax.

    A completion thus depends on its own seed, and not on the batch that it is part of.
    """

    def __init__(self, seeds: list[int]):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [torch.empty(scores.shape[1]).exponential_(generator=generator) for generator in self._generators]
        return scores - torch.stack(rows).log().to(scores.device)
