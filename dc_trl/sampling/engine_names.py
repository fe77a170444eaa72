"""The engines of a calibration or an evaluation by name, and how they sample. No import here takes seconds."""

import re
from typing import Literal, NamedTuple

from ..quantization.schemes import FP8_CACHE, RESEARCH_BITS, SCHEMES, SERVED_SCHEMES
from ..secrets import require_open_address


# Help text of options that take engines.
ENGINE_HELP = (
    f"one or more of: {', '.join(SCHEMES)} (starts a vLLM server), each also with {FP8_CACHE}; "
    "replica:SCHEME (in this process), http://… (a running vLLM server)"
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
            return cls(require_open_address(word, "engine").rstrip("/"), "url", None)
        scheme = word.removeprefix("replica:")
        in_process = scheme != word
        if scheme not in SERVED_SCHEMES and not (in_process and scheme.removesuffix(FP8_CACHE) in RESEARCH_BITS):
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
