"""Bytes of the deployed policy: its checkpoint in each scheme, its weights and its cache on a device that serves."""

import math

from ..quantization.schemes import require_served_scheme
from .architecture import Architecture


def checkpoint_bytes(model: Architecture, scheme: str) -> int:
    """Bytes of the tensors in the checkpoint that `quantization.checkpoint.CheckpointWriter` writes.

    Its files have names of tensors and JSON files beside them, some kilobytes for each layer.

    Args:
        model: sizes.
        scheme: one that engines serve.

    Raises:
        ValueError: no such scheme.
    """
    require_served_scheme(scheme)
    quantized = sum(rows * columns * number for rows, columns, number in model.quantized)
    rest = 2 * (model.parameters - quantized)
    return rest + sum(
        number * _matrix_bytes(scheme, rows, columns, model) for rows, columns, number in model.quantized
    )


def _matrix_bytes(scheme: str, rows: int, columns: int, model: Architecture) -> int:
    """Bytes of a matrix as compressed-tensors stores it: codes and scales, and of packed ones the shape."""
    if scheme == "bf16":
        return 2 * rows * columns
    if scheme in ("fp8", "int8"):
        return rows * columns + 4 * rows  # a float32 scale for each row
    if scheme == "fp8_block":
        return rows * columns + 4 * math.ceil(rows / 128) * math.ceil(columns / 128)
    narrow = scheme == "int4_g32" or any(each % 128 for _, each, _ in model.quantized)
    group = 32 if narrow else 128
    return rows * math.ceil(columns / 8) * 4 + 4 * rows * (columns // group) + 16


def cache_bytes(model: Architecture, tensor_parallel: int = 1) -> float:
    """Bytes of the KV cache in BF16 for one token of one sequence, on one device.

    Tensor parallelism divides the key-value heads, and repeats them once it has more devices than heads.
    """
    heads = math.ceil(model.kv_heads / tensor_parallel)
    return 2 * model.layers * heads * model.head_dim * 2


def cached_tokens(model: Architecture, length: float) -> float:
    """Tokens of a sequence that a layer holds, averaged over layers: a window keeps its own alone."""
    return sum(length if window is None else min(length, window) for window in model.windows) / model.layers
