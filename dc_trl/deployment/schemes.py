"""Deployment schemes by name, as compressed-tensors quantization schemes.

One name means one number format wherever it is used: the in-process replica that samples, and the checkpoint that is
served. lm_head, embeddings and norms stay unquantized in every scheme, as vLLM keeps them.
"""

from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from torch import nn
from transformers import PreTrainedModel


# Name → (compressed-tensors preset, group size that replaces the preset's).
_PRESETS: dict[str, tuple[str, int | None]] = {
    "bf16": ("UNQUANTIZED", None),
    "fp8": ("FP8_DYNAMIC", None),  # E4M3 W8A8: a scale per output channel, activations per token, dynamic
    "fp8_block": ("FP8_BLOCK", None),  # E4M3 W8A8: a scale per 128×128 block, activations per token and 128 channels
    "int8": ("W8A8", None),  # W8A8: a scale per output channel, activations per token, dynamic
    "int4": ("W4A16", None),  # W4A16: symmetric, groups of 128, or of 32 where a width is no multiple of 128
    "int4_g32": ("W4A16", 32),
}
SCHEMES = tuple(_PRESETS)


def require_scheme(name: str) -> None:
    """Raises ValueError unless ``name`` is a deployment scheme."""
    if name not in _PRESETS:
        raise ValueError(f"deployment_scheme={name!r} is unknown: choose one of {', '.join(map(repr, SCHEMES))}.")


def quantized_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Linear layers that a scheme quantizes, by name: all but the output head."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def resolve_scheme(name: str, model: PreTrainedModel) -> QuantizationScheme:
    """Quantization scheme ``name`` for the layers of ``model``.

    Args:
        name: one of `SCHEMES`.
        model: a transformers causal language model.

    Returns:
        The compressed-tensors scheme of its Linear layers; without ``weights`` for ``bf16``.

    Raises:
        ValueError: unknown name, or layers whose width the scheme's groups do not divide.
    """
    require_scheme(name)
    preset, group_size = _PRESETS[name]
    scheme = preset_name_to_scheme(preset, targets=["Linear"])
    if scheme.weights is None:
        return scheme
    widths = {layer: linear.in_features for layer, linear in quantized_linears(model).items()}
    if name == "int4" and any(width % 128 for width in widths.values()):
        group_size = 32
    if group_size is not None:
        scheme.weights.group_size = group_size
    for args in (scheme.weights, scheme.input_activations):
        if args is None or not args.group_size:
            continue
        for layer, width in widths.items():
            if width % args.group_size:
                raise ValueError(
                    f"deployment_scheme={name!r} quantizes in groups of {args.group_size}, which do not divide the "
                    f"{width} inputs of layer {layer!r}: use 'fp8' or 'int8', which have no groups."
                )
    return scheme
