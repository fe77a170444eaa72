"""How an engine is named on a command line, by a user of calibration or of evaluation."""

import re
from typing import Literal, NamedTuple

from ..quantization.schemes import RESEARCH_BITS, SCHEMES


# What `--help` says of an option that takes engines.
ENGINE_HELP = (
    f"one or more of: {', '.join(SCHEMES)} (starts a vLLM server), replica:SCHEME (in this process), "
    "http://… (a running vLLM server)"
)


class EngineSpec(NamedTuple):
    """An engine in a word: `fp8` (a vLLM server to be started), `replica:fp8` (in this process), or a server's URL."""

    name: str
    kind: Literal["vllm", "replica", "url"]
    scheme: str | None  # None: whatever the server at the URL runs

    @classmethod
    def parse(cls, word: str) -> "EngineSpec":
        """The engine that a word means.

        Raises:
            ValueError: it means none.
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
