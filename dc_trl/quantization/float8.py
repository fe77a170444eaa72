"""Quantize weights to E4M3 on a CPU, with the same bits as compressed-tensors in a fraction of its time."""

import torch
from torch import Tensor


# Numbers that a thread processes at a time: few enough for its cache, and enough to keep the operations few.
_NUMBERS = 1 << 18
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


def encode_float8(values: Tensor, sums: Tensor, powers: Tensor, codes: Tensor) -> Tensor:
    """Round values to E4M3, ties to even, and return the bytes of ``values.to(torch.float8_e4m3fn)``.

    PyTorch's cast on a CPU takes the values one by one; these are nine operations on whole vectors. E4M3 keeps three
    bits after the leading one, so next to ``v`` its numbers are 2^(e-3) apart, where 2^e is the power of two below |v|
    and e ≥ -6. The sum |v| + (2^20 + 7)·2^e is rounded to float32, whose numbers are 2^(e-3) apart there, so that its
    last byte is 56 + |v| / 2^(e-3), rounded. The byte of the E4M3 number is this byte plus 8·(e + 127), modulo 256.
    Subnormal numbers (e = -6) and a rounding up to the next power of two need no case of their own.

    Args:
        values: float32, contiguous, at most 464 in magnitude (the nearest number is then at most 448). They are
            overwritten.
        sums, powers: int32 buffers of the same shape, which are overwritten.
        codes: uint8 buffer of the same shape for the result.

    Returns:
        ``codes``.
    """
    bits = values.view(torch.int32)
    torch.bitwise_and(bits, 0x7F800000, out=powers)
    power = powers.view(torch.float32).clamp_(min=2.0**-6)
    torch.abs(values, out=sums.view(torch.float32)).add_(power, alpha=2.0**20 + 7)
    sums.add_(powers.bitwise_right_shift_(20)).add_(bits.bitwise_right_shift_(31), alpha=128)  # the sign is bit 7
    return codes.copy_(sums)


class Float8Encoder:
    """Quantizes weights by output channel or by block, some rows at a time, in buffers that it reuses."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int32)
        self._codes = torch.empty(0, dtype=torch.uint8)

    def parts(self, weight: Tensor, height: int) -> tuple[Tensor, ...]:
        """Split a weight of shape (out_features, in_features) by rows, into parts of whole blocks of this height."""
        numbers_of_block = weight.shape[1] * height
        return weight.split(max(1, torch.get_num_threads() * _NUMBERS // numbers_of_block) * height)

    def encode(self, rows: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        """Return codes and scales of some rows of a weight.

        A scale is the largest magnitude of its block over 448, as in compressed-tensors.

        Args:
            rows: shape (rows, in_features), any floating dtype, on the CPU.
            block: number of rows and columns that share a scale and divide the shape; (1, in_features) is by channel.

        Returns:
            Codes, uint8 of shape (rows, in_features), overwritten by the next call, and scales, float32 of shape (rows
            of blocks, columns of blocks). None if a scale is not finite or subnormal: the rows then hold NaN or
            infinity, or a block whose largest magnitude is below 6e-36, and compressed-tensors has to quantize them.
        """
        count, (height, width) = rows.numel(), block
        if count > len(self._codes):
            self._memory = torch.empty(3 * count, dtype=torch.int32)
            self._codes = torch.empty(count, dtype=torch.uint8)
        numbers, sums, powers = (each[:count] for each in self._memory.view(3, -1))
        values = numbers.view(torch.float32)
        values.view(rows.shape).copy_(rows)
        blocks = values.view(-1, height, rows.shape[1] // width, width)
        scale = torch.maximum(blocks.amax((1, 3)), blocks.amin((1, 3)).neg_()).div_(_LARGEST)
        # A block of zeros gets float32's epsilon as its scale, as in compressed-tensors.
        scale.masked_fill_(scale == 0, torch.finfo(torch.float32).eps)
        if not ((scale >= _SMALLEST_NORMAL) & (scale < torch.inf)).all():
            return None
        # compressed-tensors adds a zero point of 0, which turns −0 into 0.
        blocks.div_(scale[:, None, :, None]).add_(0.0)
        return encode_float8(values, sums, powers, self._codes[:count]).view(rows.shape), scale
