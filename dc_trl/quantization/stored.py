"""The tensors that represent a weight in a checkpoint, planned from its shape and computed piece by piece."""

from collections.abc import Iterator

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from torch import Tensor

from .fake_quantize import weight_qparams
from .float8 import Float8Encoder
from .tensor_file import Spec


# Numbers of a piece: enough to make the overhead of an operation negligible, and few enough for a cache.
_NUMBERS = 1 << 20


class StoredWeights:
    """Converts weights into the tensors of a checkpoint.

    On a CPU it converts some rows at a time, in buffers that it reuses. On another device a weight is quantized there,
    and only the result is copied to the CPU.

    Args:
        scheme: quantization scheme; without `weights`, nothing is quantized.
    """

    def __init__(self, scheme: QuantizationScheme):
        self._scheme = scheme
        self._encoder = Float8Encoder()
        self._rounded = torch.empty(0, dtype=torch.bfloat16)

    def plain(self, tensor: Tensor) -> Spec:
        """Return how an unquantized tensor is stored: floating point in bfloat16, other dtypes as they are."""
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        return Spec(dtype, tuple(tensor.shape))

    def quantized(self, shape: torch.Size) -> dict[str, Spec]:
        """Return the scales and codes that represent a quantized weight of shape (out_features, in_features)."""
        args = self._scheme.weights
        rows, columns = shape
        scales = (rows, 1)
        if args.strategy == QuantizationStrategy.GROUP:
            scales = (rows, columns // args.group_size)
        elif args.strategy == QuantizationStrategy.BLOCK:
            height, width = args.block_structure
            scales = (-(-rows // height), -(-columns // width))
        if self._scheme.format.value != "pack-quantized":
            codes = {"weight": Spec(args.pytorch_dtype(), (rows, columns))}
        else:
            codes_per_int = 32 // args.num_bits
            packed = Spec(torch.int32, (rows, -(-columns // codes_per_int)))
            codes = {"weight_packed": packed, "weight_shape": Spec(torch.int64, (2,))}
        return {"weight_scale": Spec(torch.float32, scales)} | codes

    def round(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the pieces of a tensor that is not quantized, on the CPU; each is overwritten by the next."""
        if not tensor.is_floating_point() or tensor.dtype == torch.bfloat16 or tensor.device.type != "cpu":
            yield tensor.to(self.plain(tensor).dtype).contiguous().cpu()
            return
        if not len(self._rounded):
            self._rounded = torch.empty(_NUMBERS, dtype=torch.bfloat16)
        for part in tensor.reshape(-1).split(_NUMBERS):
            yield self._rounded[: len(part)].copy_(part)

    def quantize(self, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the pieces of the tensors that represent a quantized weight, on the CPU.

        Args:
            weight: shape (out_features, in_features), floating point.

        Yields:
            Name of the tensor, see `quantized`, and its next piece, which is overwritten by the following one.
        """
        if weight.device.type != "cpu":
            yield from ((name, value.contiguous().cpu()) for name, value in self._compressed(weight).items())
            return
        block = _float8_block(self._scheme.weights, weight.shape)
        if block is None:
            yield from self._by_rows(weight)
            return
        scales = []
        for rows in self._encoder.parts(weight, block[0]):
            encoded = self._encoder.encode(rows, block)
            if encoded is None:
                codes, scale = (self._compressed(rows)[name] for name in ("weight", "weight_scale"))
            else:
                codes, scale = encoded
            yield "weight", codes
            scales.append(scale)
        yield "weight_scale", torch.cat(scales)

    def _by_rows(self, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        height = self._scheme.weights.block_structure[0] if self._scheme.weights.block_structure else 1
        for rows in weight.split(max(1, _NUMBERS // (weight.shape[1] * height)) * height):
            for name, value in self._compressed(rows).items():
                if name != "weight_shape":  # this one is the shape of the rows
                    yield name, value.contiguous()
        if "weight_shape" in self.quantized(weight.shape):
            yield "weight_shape", torch.tensor(weight.shape)

    def _compressed(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors that represent a weight as compressed-tensors computes them."""
        scale, zero_point = weight_qparams(weight, self._scheme.weights)
        parameters = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero_point}
        compressor = BaseCompressor.get_value_from_registry(self._scheme.format.value)
        return compressor.compress(parameters, self._scheme)


def _float8_block(args: QuantizationArgs, shape: torch.Size) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None if the format is not E4M3 or blocks exceed the shape."""
    if args.pytorch_dtype() != torch.float8_e4m3fn:
        return None
    if args.strategy == QuantizationStrategy.CHANNEL:
        return 1, shape[1]
    height, width = args.block_structure
    return None if shape[0] % height or shape[1] % width else (height, width)
