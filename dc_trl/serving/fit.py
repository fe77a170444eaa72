"""Whether a vLLM server serves us: samples what is trained, and takes its weights as they are sent."""

import re
from collections.abc import Iterator
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


class _Pair(NamedTuple):
    """A server, and what it is wanted for; see `check_server`."""

    info: dict[str, Any]
    layers: str
    scheme: str | None
    config: PretrainedConfig
    max_length: int
    weight_sync: str


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
    pair = _Pair(info, layers, scheme, config, max_length, weight_sync)
    for rules in (_sampling, _model, _format, _reload):
        for misfit in rules(pair):
            raise ServerError(misfit)


def _sampling(pair: _Pair) -> Iterator[str]:
    model = pair.info["model_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        yield (
            f"the server runs with --logprobs-mode {model['logprobs_mode']}, whose log-probabilities leave out the "
            "temperature: start it with --logprobs-mode processed_logprobs."
        )
    if model["max_model_len"] < pair.max_length:
        yield (
            f"the server takes {model['max_model_len']} tokens, and training needs {pair.max_length} for prompt and "
            f"completion: start it with --max-model-len {pair.max_length} or more, or lower max_completion_length."
        )


def _model(pair: _Pair) -> Iterator[str]:
    text = pair.config.get_text_config()
    embedding = re.search(r"embedding_dim=(\d+), org_vocab_size=(\d+)", pair.layers)
    if embedding is not None:
        served, trained = tuple(map(int, embedding.groups())), (text.hidden_size, text.vocab_size)
        if served != trained:
            yield (
                f"the server's model has {served[0]} channels and a vocabulary of {served[1]}, the trained one "
                f"{trained[0]} and {trained[1]}: serve the model that is trained (vllm serve MODEL), with the same "
                "tokenizer and its added tokens."
            )
    # The last line of the list of layers has its highest number: "(27): ..." or "(0-27): 28 x ...".
    listed = re.search(r"^( *)\(layers\): ModuleList.*\n(?:\1 .*\n)+", pair.layers, re.MULTILINE)
    if listed is not None:
        numbers = re.findall(rf"^{listed[1]}  \((?:\d+-)?(\d+)\): ", listed[0], re.MULTILINE)
        count = max(map(int, numbers)) + 1
        if count != text.num_hidden_layers:
            yield (
                f"the server's model has {count} layers, the trained one {text.num_hidden_layers}: serve the model "
                "that is trained (vllm serve MODEL)."
            )


def _format(pair: _Pair) -> Iterator[str]:
    method = pair.info["model_config"]["quantization"]
    kinds = layer_kinds(pair.layers)
    if pair.weight_sync == "nccl" and method == "compressed-tensors":
        yield (
            "the server runs a quantized checkpoint (--quantization compressed-tensors), which cannot take the BF16 "
            "weights of weight_sync='nccl': set weight_sync='checkpoint', or serve the BF16 model with --quantization "
            "fp8_per_channel."
        )
    if pair.weight_sync == "checkpoint" and kinds and method != "compressed-tensors":
        yield (
            f"the server quantizes by itself (--quantization {method}), so that what samples is not the checkpoint "
            "that weight_sync='checkpoint' writes: leave --quantization out and serve a checkpoint in the scheme "
            "(scripts/serve.py --scheme), or set weight_sync='nccl'."
        )
    scheme = pair.scheme or "bf16"
    expected = _LAYERS_OF_SCHEME[scheme]
    fits = any(expected in kind for kind in kinds) if expected else not kinds
    if not fits and (pair.scheme is not None or pair.weight_sync == "checkpoint"):
        yield (
            f"the server's layers are {', '.join(kinds) or 'not quantized'}, and deployment_scheme={pair.scheme!r} is "
            f"trained for: start it with scripts/serve.py --scheme {scheme}, or set deployment_scheme to what it "
            "serves."
        )


def _reload(pair: _Pair) -> Iterator[str]:
    extension = pair.info["parallel_config"]["worker_extension_cls"]
    if pair.weight_sync == "checkpoint" and is_cpu(pair.info) and extension != CPU_EXTENSION:
        yield (
            f"the server runs on a CPU with --worker-extension-cls {extension!r}, and vLLM's own reload leaves old "
            f"weights in its CPU kernels: start it with --worker-extension-cls {CPU_EXTENSION}."
        )


def layer_kinds(layers: str) -> list[str]:
    """How vLLM's linear layers are quantized, from the text of the engine's layers; empty where they are not."""
    return sorted(set(re.findall(r"Linear\(quant=(\w+)", layers)))


def is_cpu(info: dict[str, Any]) -> bool:
    """Whether a server runs on a CPU, from `vllm_config` of its `/server_info`."""
    return info["device_config"]["device"].startswith("cpu")
