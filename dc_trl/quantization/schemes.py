"""Deployment schemes by name, as compressed-tensors quantization schemes, and the layers that they quantize.

A name means the same number format in the in-process replica that samples and in the checkpoint that is served.
lm_head, embeddings, norms and the routers of experts stay unquantized in every scheme, as in vLLM.

The names need no torch: a help has them at once, and the doctor has to speak where torch cannot be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme
    from torch import Tensor, nn
    from transformers import PreTrainedModel

# Name → (compressed-tensors preset, group size that replaces the preset's).
_PRESETS: dict[str, tuple[str, int | None]] = {
    "bf16": ("UNQUANTIZED", None),
    "fp8": ("FP8_DYNAMIC", None),  # E4M3 W8A8: a scale per output channel, activations per token, dynamic
    # The same weights without activations: what vLLM makes of an "fp8" checkpoint on a GPU before Ada and Hopper.
    "fp8_w8a16": ("FP8_DYNAMIC", None),
    "fp8_block": ("FP8_BLOCK", None),  # E4M3 W8A8: a scale per 128×128 block, activations per token and 128 channels
    "int8": ("W8A8", None),  # W8A8: a scale per output channel, activations per token, dynamic
    "int4": ("W4A16", None),  # W4A16: symmetric, groups of 128, or of 32 where a width is no multiple of 128
    "int4_g32": ("W4A16", 32),
    "nvfp4": ("NVFP4", None),  # E2M1 W4A4: an E4M3 scale per 16 channels, which for activations is dynamic
    "nvfp4a16": ("NVFP4A16", None),
    "mxfp8": ("MXFP8", None),  # E4M3 W8A8: a power of two as scale per 32 channels, which for activations is dynamic
}
SCHEMES = tuple(_PRESETS)
# Behind a scheme's name: the KV cache is in FP8 (E4M3, with a scale of 1), as with --kv-cache-dtype fp8 of vLLM.
FP8_CACHE = "+fp8_kv"
# All names of schemes that engines serve.
SERVED_SCHEMES = (*SCHEMES, *(f"{name}{FP8_CACHE}" for name in SCHEMES))
# Name → bits of formats that no engine serves, for the in-process replica alone: symmetric weights in groups of 32.
RESEARCH_BITS = {"int3": 3, "int2": 2}
# Names of the linear layers in a block with experts that choose between the experts or weigh them.
_ROUTERS = ("gate", "router", "shared_expert_gate")


def require_scheme(name: str) -> None:
    """Raise ValueError unless ``name`` is a deployment scheme."""
    if name not in SERVED_SCHEMES and str(name).removesuffix(FP8_CACHE) not in RESEARCH_BITS:
        raise ValueError(
            f"deployment_scheme={name!r} is unknown: choose one of {', '.join(map(repr, SCHEMES))}, or for the "
            f"replica alone {' or '.join(map(repr, RESEARCH_BITS))}; append {FP8_CACHE!r} for an FP8 KV cache."
        )


def require_served_scheme(name: str) -> None:
    """Raise ValueError unless ``name`` is a scheme of checkpoints that engines serve."""
    require_scheme(name)
    if name not in SERVED_SCHEMES:
        raise ValueError(
            f"deployment_scheme={name!r} is for the in-process replica alone, and no engine serves a checkpoint of "
            f"it: use one of {', '.join(map(repr, SCHEMES))}, or use_vllm=False and push_to_hub=False."
        )


def quantizes_cache(name: str) -> bool:
    """Return whether the KV cache of a scheme is in FP8."""
    return name.endswith(FP8_CACHE)


def quantized_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers that a scheme quantizes, by name: all but the output head and routers of experts."""
    from torch import nn

    ignored = {model.get_output_embeddings()}
    for name in fused_experts(model):
        block = model.get_submodule(name.rpartition(".")[0])
        ignored |= {module for key, child in block.named_children() if key in _ROUTERS for module in child.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module not in ignored
    }


def fused_experts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that hold the weights of all experts of a layer in three-dimensional parameters, by name.

    transformers has no Linear layers for experts, but ``gate_up_proj``, shape (experts, 2 × intermediate, hidden), and
    ``down_proj``, shape (experts, hidden, intermediate). Checkpoints and engines store each matrix by itself.
    """
    from torch import nn

    return {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, nn.Conv1d) and any(weight.ndim == 3 for weight in module.parameters(recurse=False))
    }


def quantized_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights that a scheme quantizes, by name: those of `quantized_linears` and of `fused_experts`."""
    weights: dict[str, Tensor] = {f"{name}.weight": linear.weight for name, linear in quantized_linears(model).items()}
    for name, experts in fused_experts(model).items():
        weights |= {f"{name}.{key}": weight for key, weight in experts.named_parameters(recurse=False)}
    return weights


def named_scheme(name: str) -> QuantizationScheme:
    """Return the compressed-tensors scheme called ``name``, as it is for models that its groups divide."""
    from compressed_tensors.quantization import preset_name_to_scheme

    require_scheme(name)
    plain = name.removesuffix(FP8_CACHE)
    preset, group_size = _PRESETS.get(plain, ("W4A16", 32))
    scheme = preset_name_to_scheme(preset, targets=["Linear"])
    if plain == "fp8_w8a16":
        scheme.input_activations = None
    if plain in RESEARCH_BITS:
        scheme.weights.num_bits = RESEARCH_BITS[plain]
    if group_size is not None:
        scheme.weights.group_size = group_size
    return scheme


def resolve_scheme(name: str, model: PreTrainedModel) -> QuantizationScheme:
    """Return the compressed-tensors scheme called ``name``, for the Linear layers and experts of ``model``.

    It has the ``format`` of its checkpoints, if engines serve them; ``bf16`` has neither ``weights`` nor ``format``.
    The format of the KV cache is not part of it; see `quantizes_cache`.

    Raises:
        ValueError: the name is unknown, the scheme's groups do not divide the width of a layer, experts have an
            unknown layout and would stay unquantized, or all layers would.
    """
    from compressed_tensors.compressors.format import infer_module_format
    from torch import nn
    from transformers.utils import logging

    scheme = named_scheme(name)
    name = name.removesuffix(FP8_CACHE)
    if scheme.weights is None:
        return scheme
    if name == "fp8_w8a16" and fused_experts(model):
        raise ValueError("deployment_scheme='fp8_w8a16': vLLM loads no mixture of experts in it: use 'fp8'.")
    for layer, experts in fused_experts(model).items():
        _require_known_layout(name, layer, experts)
    if not quantized_weights(model):
        raise ValueError(
            f"deployment_scheme={name!r} finds nothing to quantize in {type(model).__name__}, whose decoder has no "
            "Linear layers, as that of GPT-2: use 'bf16'."
        )
    widths = {key.removesuffix(".weight"): weight.shape[-1] for key, weight in quantized_weights(model).items()}
    if name == "int4" and (odd := [layer for layer, width in widths.items() if width % 128]):
        scheme.weights.group_size = 32
        logging.get_logger(__name__).warning_once(
            f"deployment_scheme='int4' is in groups of 32 here, as 'int4_g32' is: the {widths[odd[0]]} inputs of "
            f"layer {odd[0]!r} are no multiple of 128."
        )
    for args in filter(None, (scheme.weights, scheme.input_activations)):
        for layer, width in widths.items():
            if args.group_size and width % args.group_size:
                raise ValueError(
                    f"deployment_scheme={name!r} quantizes in groups of {args.group_size}, which do not divide the "
                    f"{width} inputs of layer {layer!r}: use 'fp8' or 'int8', which have no groups."
                )
    if name not in RESEARCH_BITS:
        scheme.format = infer_module_format(nn.Linear, scheme)
    return scheme


def _require_known_layout(scheme: str, layer: str, experts: nn.Module) -> None:
    weights = dict(experts.named_parameters(recurse=False))
    if weights.keys() == {"gate_up_proj", "down_proj"}:
        rows, columns = weights["down_proj"].shape[1:]
        # transformers' implementations of experts compute the input of down_proj in `_apply_gate`.
        if weights["gate_up_proj"].shape[1:] == (2 * columns, rows) and hasattr(experts, "_apply_gate"):
            return
    raise ValueError(
        f"deployment_scheme={scheme!r} cannot quantize {layer!r}: {type(experts).__name__} has another layout than "
        "gate_up_proj and down_proj as in Qwen3-MoE. Use deployment_scheme='bf16'."
    )
