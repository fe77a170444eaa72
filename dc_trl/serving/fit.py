"""Whether a vLLM server serves us: samples what is trained, and takes its weights as they are sent."""

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from .errors import ServerError


CPU_EXTENSION = "dc_trl.serving.cpu_reload.CPUReloadExtension"
# What vLLM calls the layers that hold a scheme's weights.
_LAYERS_OF_SCHEME = {
    "bf16": None,
    "fp8": "Fp8",
    "fp8_block": "Fp8",
    "int8": "Int8",
    "int4": "WNA16",
    "int4_g32": "WNA16",
}


class _Served:
    """What a server says of itself: `vllm_config` of its `/server_info`, and the text of its engine's layers."""

    def __init__(self, info: dict[str, Any], layers: str):
        self.info = info
        self.layers = layers
        self.model: dict[str, Any] = info["model_config"]
        self.kinds = layer_kinds(layers)

    @cached_property
    def embedding(self) -> tuple[int, int] | None:
        """Channels and vocabulary, where the layers tell."""
        found = re.search(r"embedding_dim=(\d+), org_vocab_size=(\d+)", self.layers)
        return None if found is None else (int(found[1]), int(found[2]))

    @cached_property
    def depth(self) -> int | None:
        """Number of layers, where they are listed: the last line has the highest, "(27): …" or "(0-27): 28 x …"."""
        listed = re.search(r"^( *)\(layers\): ModuleList.*\n(?:\1 .*\n)+", self.layers, re.MULTILINE)
        if listed is None:
            return None
        numbers = re.findall(rf"^{listed[1]}  \((?:\d+-)?(\d+)\): ", listed[0], re.MULTILINE)
        return max(map(int, numbers)) + 1


class _Wanted(NamedTuple):
    """What training needs; see `check_server`."""

    scheme: str | None
    config: PretrainedConfig
    max_length: int
    weight_sync: str


def _logprobs(served: _Served, wanted: _Wanted) -> str | None:
    mode = served.model["logprobs_mode"]
    if mode == "processed_logprobs":
        return None
    return (
        f"the server runs with --logprobs-mode {mode}, whose log-probabilities leave out the temperature: start it "
        "with --logprobs-mode processed_logprobs."
    )


def _length(served: _Served, wanted: _Wanted) -> str | None:
    taken, needed = served.model["max_model_len"], wanted.max_length
    if taken >= needed:
        return None
    return (
        f"the server takes {taken} tokens, and training needs {needed} for prompt and completion: start it with "
        f"--max-model-len {needed} or more, or lower max_completion_length."
    )


def _embedding(served: _Served, wanted: _Wanted) -> str | None:
    text = wanted.config.get_text_config()
    if served.embedding in (None, (text.hidden_size, text.vocab_size)):
        return None
    channels, vocabulary = served.embedding
    return (
        f"the server's model has {channels} channels and a vocabulary of {vocabulary}, the trained one "
        f"{text.hidden_size} and {text.vocab_size}: serve the model that is trained (vllm serve MODEL), with the same "
        "tokenizer and its added tokens."
    )


def _depth(served: _Served, wanted: _Wanted) -> str | None:
    trained = wanted.config.get_text_config().num_hidden_layers
    if served.depth in (None, trained):
        return None
    return (
        f"the server's model has {served.depth} layers, the trained one {trained}: serve the model that is trained "
        "(vllm serve MODEL)."
    )


def _streamed_into_quantized(served: _Served, wanted: _Wanted) -> str | None:
    if wanted.weight_sync != "nccl" or served.model["quantization"] != "compressed-tensors":
        return None
    return (
        "the server runs a quantized checkpoint (--quantization compressed-tensors), which cannot take the BF16 "
        "weights of weight_sync='nccl': set weight_sync='checkpoint', or serve the BF16 model with --quantization "
        "fp8_per_channel."
    )


def _quantized_by_itself(served: _Served, wanted: _Wanted) -> str | None:
    method = served.model["quantization"]
    if wanted.weight_sync != "checkpoint" or not served.kinds or method == "compressed-tensors":
        return None
    return (
        f"the server quantizes by itself (--quantization {method}), so that what samples is not the checkpoint that "
        "weight_sync='checkpoint' writes: leave --quantization out and serve a checkpoint in the scheme "
        "(scripts/serve.py --scheme), or set weight_sync='nccl'."
    )


def _scheme(served: _Served, wanted: _Wanted) -> str | None:
    if wanted.scheme is None and wanted.weight_sync != "checkpoint":
        return None
    kind = _LAYERS_OF_SCHEME[wanted.scheme or "bf16"]
    if any(kind in name for name in served.kinds) if kind else not served.kinds:
        return None
    return (
        f"the server's layers are {', '.join(served.kinds) or 'not quantized'}, and deployment_scheme="
        f"{wanted.scheme!r} is trained for: start it with scripts/serve.py --scheme {wanted.scheme or 'bf16'}, or set "
        "deployment_scheme to what it serves."
    )


def _cpu_reload(served: _Served, wanted: _Wanted) -> str | None:
    extension = served.info["parallel_config"]["worker_extension_cls"]
    if wanted.weight_sync != "checkpoint" or not is_cpu(served.info) or extension == CPU_EXTENSION:
        return None
    return (
        f"the server runs on a CPU with --worker-extension-cls {extension!r}, and vLLM's own reload leaves old "
        f"weights in its CPU kernels: start it with --worker-extension-cls {CPU_EXTENSION}."
    )


# Each says what is wrong and the option to change, or None. The first that speaks is heard.
_RULES: tuple[Callable[[_Served, _Wanted], str | None], ...] = (
    _logprobs,
    _length,
    _embedding,
    _depth,
    _streamed_into_quantized,
    _quantized_by_itself,
    _scheme,
    _cpu_reload,
)


def check_server(
    info: dict[str, Any],
    layers: str,
    *,
    scheme: str | None,
    config: PretrainedConfig,
    max_length: int,
    weight_sync: str,
) -> None:
    """Refuses a server that would not sample what is trained.

    Args:
        info: `vllm_config` of the server's `/server_info`.
        layers: text of the engine's layers, from its `get_model_inspection`.
        scheme: deployment scheme of the training run; None for whatever format the server keeps.
        config: configuration of the model that is trained.
        max_length: shortest length, of prompt and completion together, that the server has to take, in tokens.
        weight_sync: "nccl", "checkpoint", or "none" where no weights are sent.

    Raises:
        ServerError: names what is wrong and the option of `vllm serve` to change.
    """
    served, wanted = _Served(info, layers), _Wanted(scheme, config, max_length, weight_sync)
    for rule in _RULES:
        if (refusal := rule(served, wanted)) is not None:
            raise ServerError(refusal)


def layer_kinds(layers: str) -> list[str]:
    """How vLLM's linear layers are quantized, from the text of the engine's layers; empty where they are not."""
    return sorted(set(re.findall(r"Linear\(quant=(\w+)", layers)))


def is_cpu(info: dict[str, Any]) -> bool:
    """Whether a server runs on a CPU, from `vllm_config` of its `/server_info`."""
    return info["device_config"]["device"].startswith("cpu")
