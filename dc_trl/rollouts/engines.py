"""Names of engines on the command lines of calibration and evaluation."""

import re
from typing import Literal, NamedTuple

from ..quantization.schemes import RESEARCH_BITS, SCHEMES


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
