"""Checks that a vLLM server samples the trained model and accepts its weights as they are sent."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from ..quantization.schemes import FP8_CACHE, quantizes_cache
from .connection import is_local
from .errors import ServerError


CPU_EXTENSION = "dc_trl.serving.cpu_reload.CPUReloadExtension"
ROUTES_OPTION = "--enable-return-routed-experts"
# Patterns of the names in vLLM of the layers that hold a scheme's weights.
_LAYERS = {
    "bf16": None,
    **dict.fromkeys(("fp8", "fp8_block"), r"(?<!W8A16)Fp8"),
    "fp8_w8a16": "W8A16Fp8",
    "int8": "Int8",
    **dict.fromkeys(("int4", "int4_g32"), "WNA16"),
    **dict.fromkeys(("nvfp4", "nvfp4a16"), "W4A4Fp4"),
    "mxfp8": "Mxfp8",
}
# An argument of the engine without which a mixture of experts on a GPU would not survive new weights. In vLLM 0.26 to
# 0.33 a reload builds the experts' kernel anew, while CUDA graphs go on reading the old one's tensors (vLLM's issue
# 41670). Triton's has none of its own; NVFP4 has no such kernel. Until vLLM keeps them: docs/supported.md.
_RELOADABLE: dict[str, dict[str, Any]] = {
    "fp8": {"moe_backend": "triton"},
    "fp8_block": {"moe_backend": "triton"},
    "nvfp4": {"enforce_eager": True},
    "nvfp4a16": {"enforce_eager": True},
}

# Values of --kv-cache-dtype whose numbers are known here. "auto" and "bfloat16" keep the model's.
PLAIN_CACHES, _FP8_CACHES = ("auto", "bfloat16"), ("fp8", "fp8_e4m3")


def check_server(
    info: dict[str, Any],
    layers: str,
    *,
    scheme: str | None,
    config: PretrainedConfig,
    max_length: int,
    weight_sync: str,
    logprobs: int = 0,
    routing_replay: bool = False,
    lora_rank: int = 0,
) -> None:
    """Refuse a server that would not sample the trained model.

    Args:
        info: `vllm_config` of the server's `/server_info`.
        layers: text of the engine's layers, from its `get_model_inspection`.
        scheme: deployment scheme of the training run; None to accept the server's format.
        config: configuration of the trained model.
        max_length: number of tokens of prompt and completion together that the server must accept.
        weight_sync: "nccl", "checkpoint", or "none" if no weights are sent.
        logprobs: number of most probable tokens whose log-probabilities are requested.
        routing_replay: whether completions must include the experts with which they were sampled.
        lora_rank: rank of the adapter that is loaded beside the base; 0 for none.

    Raises:
        ServerError: the server is refused; the message names the reason and the option of `vllm serve` to change.
    """
    model, kinds, text = info["model_config"], layer_kinds(layers), config.get_text_config()
    cache, in_fp8 = info["cache_config"]["cache_dtype"], quantizes_cache(scheme or "")
    if model["logprobs_mode"] != "processed_logprobs":
        raise ServerError(
            f"the server runs with --logprobs-mode {model['logprobs_mode']}, whose log-probabilities ignore the "
            "temperature: start it with --logprobs-mode processed_logprobs."
        )
    if -1 < model["max_logprobs"] < logprobs:
        raise ServerError(
            f"the server names at most {model['max_logprobs']} tokens, and {logprobs} are asked for: start it with "
            "--max-logprobs -1, or lower top_k, or score_centering_top_k where nothing truncates."
        )
    if model["max_model_len"] < max_length:
        raise ServerError(
            f"the server takes {model['max_model_len']} tokens, and training needs {max_length} for prompt and "
            f"completion: start it with --max-model-len {max_length} or more, or lower max_completion_length."
        )
    # Other versions of vLLM do not have this entry.
    if routing_replay and not info.get("aux_output_config", {}).get("enable_return_routed_experts"):
        raise ServerError(
            f"the server does not return the experts that routing_replay=True replays: start it with {ROUTES_OPTION}, "
            "which vLLM supports only on GPUs."
        )
    largest = (info.get("lora_config") or {}).get("max_lora_rank", 0)
    if lora_rank > largest:
        raise ServerError(
            f"the server takes adapters up to rank {largest}, and lora_deployment='adapter' loads one of rank "
            f"{lora_rank}: start it with --enable-lora and a higher --max-lora-rank, or set lora_deployment='merged'."
        )
    # An adapter is known to the API process that loads it. Other versions of vLLM do not have this entry.
    if lora_rank and (processes := info["parallel_config"].get("_api_process_count", 1)) > 1:
        raise ServerError(
            f"the server answers by {processes} processes, of which one would know the adapter of lora_deployment="
            "'adapter': start it with --api-server-count 1, or set lora_deployment='merged'."
        )
    embedding = re.search(r"embedding_dim=(\d+), org_vocab_size=(\d+)", layers)
    trained = (text.hidden_size, text.vocab_size)
    if embedding is not None and (served := tuple(map(int, embedding.groups()))) != trained:
        raise ServerError(
            f"the server's model has {served[0]} channels and a vocabulary of {served[1]}, the trained one "
            f"{trained[0]} and {trained[1]}: serve the model that is trained, with its tokenizer and added tokens."
        )
    if weight_sync == "nccl" and model["quantization"] == "compressed-tensors":
        raise ServerError(
            "the server runs a quantized checkpoint, which cannot take the BF16 weights of weight_sync='nccl': set "
            "weight_sync='checkpoint', or serve the BF16 model with --quantization fp8_per_channel."
        )
    if weight_sync == "checkpoint" and kinds and model["quantization"] != "compressed-tensors":
        raise ServerError(
            f"the server quantizes by itself (--quantization {model['quantization']}), and would not run the "
            "checkpoint of weight_sync='checkpoint' as it is: use dc-trl serve --scheme, or set weight_sync='nccl'."
        )
    if scheme is not None and cache not in (_FP8_CACHES if in_fp8 else PLAIN_CACHES):
        raise ServerError(
            f"the server runs with --kv-cache-dtype {cache}, and training is for deployment_scheme={scheme!r}: start "
            f"it with --kv-cache-dtype {'fp8' if in_fp8 else 'auto'}, or set the scheme with or without {FP8_CACHE!r}."
        )
    known = (scheme or "bf16").removesuffix(FP8_CACHE) in schemes_of(kinds)
    if not known and (scheme is not None or weight_sync == "checkpoint"):
        raise ServerError(
            f"the server's layers are {', '.join(kinds) or 'not quantized'}, and training is for deployment_scheme="
            f"{scheme!r}: start it with dc-trl serve --scheme {scheme or 'bf16'}, or set the scheme that it has."
        )
    needs = next(filter(None, (reloadable(each, config) for each in schemes_of(kinds))), {})
    if needs and weight_sync != "none" and not (is_cpu(info) or model["enforce_eager"]):
        backend = info["kernel_config"]["moe_backend"]
        if backend != needs.get("moe_backend"):
            raise ServerError(
                f"the server runs a mixture of experts with --moe-backend {backend} and CUDA graphs, which read freed "
                f"memory after the first new weights (vLLM's issue 41670): start it with {' '.join(as_options(needs))}"
                ", as dc-trl serve does."
            )
    extension = info["parallel_config"]["worker_extension_cls"]
    if weight_sync == "checkpoint" and is_cpu(info) and extension != CPU_EXTENSION:
        raise ServerError(
            f"the server runs on a CPU with --worker-extension-cls {extension!r}, and vLLM's own reload leaves old "
            f"weights in its CPU kernels: start it with --worker-extension-cls {CPU_EXTENSION}."
        )


def reloadable(scheme: str, config: PretrainedConfig) -> dict[str, Any]:
    """Return arguments of vLLM's engine on a GPU without which a mixture of experts would not survive new weights."""
    mixture = "num_experts_per_tok" in config.get_text_config().to_dict()
    return _RELOADABLE.get(scheme.removesuffix(FP8_CACHE), {}) if mixture else {}


def as_options(arguments: dict[str, Any]) -> list[str]:
    """Return arguments of the engine, texts or True, as options of `vllm serve`."""
    named = {f"--{name.replace('_', '-')}": value for name, value in arguments.items()}
    return [word for name, value in named.items() for word in ([name] if value is True else [name, value])]


def layer_kinds(layers: str) -> list[str]:
    """Return the kinds of quantization of vLLM's linear layers from the text of the engine's layers."""
    return sorted(set(re.findall(r"Linear\(quant=(\w+)", layers)))


def schemes_of(kinds: list[str], cache: str = "auto") -> list[str]:
    """Return the possible schemes of a server from `layer_kinds` and --kv-cache-dtype; vLLM shows no block sizes."""
    return [
        f"{scheme}{FP8_CACHE}" if cache in _FP8_CACHES else scheme
        for scheme, expected in _LAYERS.items()
        if (any(re.search(expected, kind) for kind in kinds) if expected else not kinds)
    ]


def is_cpu(info: dict[str, Any]) -> bool:
    """Return whether a server runs on a CPU, from `vllm_config` of its `/server_info`."""
    return info["device_config"]["device"].startswith("cpu")


def require_shared_directory(weight_sync_dir: str | None, urls: Sequence[str]) -> None:
    """Refuse servers on other machines if checkpoints go through the shared memory of this one."""
    away = [url for url in urls if not is_local(url)]
    if weight_sync_dir is None and away:
        stream = ", or weight_sync='nccl'" if len(urls) == 1 else ""
        raise ServerError(
            f"weight_sync_dir=None: the server at {' and '.join(away)} is on another machine, which does not see this "
            f"one's shared memory. Set weight_sync_dir to a directory that both see{stream}."
        )
