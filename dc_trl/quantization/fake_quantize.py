"""Round trips of weights and activations through a scheme's number format, as the deployed policy computes."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
    fake_quantize,
    quantize,
)
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range, maybe_pad_tensor_for_block_quant
from torch import Tensor, nn


# NVFP4 multiplies the scales of its blocks by a scale of the whole tensor before it rounds them to E4M3. Ours are
# constants: vLLM takes one scale for all layers that it fuses (q, k, v; gate, up), and a calibrated scale of the
# activations would grow stale in training. With powers of two, every number that is read back is a bfloat16 number, so
# that all engines compute with the same factors. E4M3 keeps its precision for blocks whose largest magnitude is from
# 0.0015 to 42 (weights), and from 0.19 to 5376 (activations).
WEIGHT_GLOBAL_SCALE, INPUT_GLOBAL_SCALE = 2.0**6, 2.0**-1


@torch.no_grad()
def weight_qparams(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return scales and zero points of a weight, from its largest magnitudes, as compressed-tensors stores them.

    Args:
        weight: shape (out_features, in_features), floating point.
        args: quantization of weights by channel, group or block.

    Returns:
        Two tensors of shape (out_features, 1) by channel, (out_features, groups) by group, or (blocks of rows, blocks
        of columns) by block. Scales are float32; those of groups are numbers of the type that engines keep them in:
        bfloat16, powers of two (MXFP8), or E4M3, times `WEIGHT_GLOBAL_SCALE` (NVFP4).
    """
    weight = weight.float()
    if args.strategy == QuantizationStrategy.CHANNEL:
        blocks = weight.unsqueeze(1)
    elif args.group_size is not None:
        blocks = weight.unflatten(-1, (-1, args.group_size))
    elif args.strategy == QuantizationStrategy.BLOCK:
        height, width = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
        blocks = padded.unflatten(-1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(-2)
    else:
        raise NotImplementedError(f"weights quantized by {args.strategy}")
    global_scale = weight.new_tensor(WEIGHT_GLOBAL_SCALE) if _is_nvfp4(args) else None
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale)
    if args.strategy == QuantizationStrategy.GROUP:
        scale = scale.to(torch.bfloat16).float()
    return scale, zero_point


def _is_nvfp4(args: QuantizationArgs) -> bool:
    return args.strategy == QuantizationStrategy.TENSOR_GROUP


@torch.no_grad()
def fake_quantize_weight(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """Return a weight after its round trip, in float32 and the same shape; see `weight_qparams`.

    Args:
        weight: shape (out_features, in_features), or (experts, out_features, in_features); floating point.
        args: quantization of weights by channel, group or block.
    """
    # The experts' matrices are stacked into one. No block of rows extends from one expert into the next:
    # `resolve_scheme` ensures that blocks divide both dimensions, since each is the width of one of the matrices.
    rows = weight.float().flatten(0, -2)
    if _is_nvfp4(args):
        numbers, scale = weight_numbers(rows, args)
        return numbers.unflatten(-1, (-1, args.group_size)).mul_(scale.unsqueeze(-1)).view(weight.shape)
    return fake_quantize(rows, *weight_qparams(rows, args), args).view(weight.shape)


@torch.no_grad()
def weight_numbers(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return the numbers of a weight that is quantized by output channel or in NVFP4, and the scales to multiply with.

    Args:
        weight: shape (out_features, in_features), floating point.
        args: quantization of weights by channel, or that of NVFP4.

    Returns:
        Two float32 tensors: (out_features, in_features), and (out_features,) or in NVFP4 (out_features, groups).
    """
    scale, zero_point = weight_qparams(weight, args)
    if _is_nvfp4(args):  # compressed-tensors would compile its rounding at the first call, which takes a minute
        scale = scale / WEIGHT_GLOBAL_SCALE
        groups = weight.float().unflatten(-1, (-1, args.group_size))
        return round_to_float4(groups / scale.unsqueeze(-1)).flatten(-2), scale
    return quantize(weight.float(), scale, zero_point, args), scale.flatten()


@torch.no_grad()
def compressed_weight(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Return the codes and scales that represent a weight in a checkpoint, by the names of compressed-tensors.

    Args:
        weight: shape (out_features, in_features), floating point.
        scheme: quantization scheme with the ``format`` of its checkpoints.
    """
    scale, zero_point = weight_qparams(weight, scheme.weights)
    if _is_nvfp4(scheme.weights):
        numbers, _ = weight_numbers(weight, scheme.weights)
        magnitudes = numbers.new_tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # with the codes 0 to 7
        codes = torch.bucketize(numbers.abs(), magnitudes).to(torch.uint8) | (weight < 0).to(torch.uint8) << 3
        parts = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale.to(torch.float8_e4m3fn)}
        parts["weight_global_scale"] = scale.new_tensor([WEIGHT_GLOBAL_SCALE])
        if scheme.input_activations is not None:
            parts["input_global_scale"] = scale.new_tensor([INPUT_GLOBAL_SCALE])
        return parts
    parameters = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero_point}
    return BaseCompressor.get_value_from_registry(scheme.format.value).compress(parameters, scheme)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *sources: Tensor) -> Tensor:
        ctx.dtypes = [source.dtype for source in sources]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.dtypes, ctx.needs_input_grad[1:], strict=True)
        return None, *(gradients[0].to(dtype) if needed else None for dtype, needed in wanted)


def straight_through(value: Tensor, *sources: Tensor) -> Tensor:
    """Return a value whose gradient goes to each source unchanged, as if it were their sum (arXiv 1308.3432).

    Args:
        value: tensor of any floating dtype; no gradient flows to it.
        sources: tensors of the same shape and any floating dtype; each gets its gradient in its own dtype.
    """
    return _StraightThrough.apply(value, *sources) if torch.is_grad_enabled() else value


class ActivationQuantizer:
    """Quantizes the input of a layer with dynamic scales, with the arithmetic of vLLM's kernels.

    Decoding one token calls this for every layer, so its speed matters for a rollout. compressed-tensors'
    `compute_dynamic_scales_and_zp` and `fake_quantize` take three times as long. By token, they also round otherwise
    than the engines, which multiply by the inverse of the scale, and give the largest magnitude of INT8 the code 127.

    As a forward pre-hook it makes a layer read the round trip of its input.

    Args:
        args: dynamic quantization of activations by token, or by token and group of channels.
    """

    def __init__(self, args: QuantizationArgs):
        self.by_token = args.group_size is None
        self._group_size = args.group_size
        self._scale_dtype = args.scale_dtype
        is_float = args.type == QuantizationType.FLOAT
        self._is_nvfp4 = _is_nvfp4(args)
        self._round = (round_to_float4 if self._is_nvfp4 else round_to_float8) if is_float else Tensor.round_
        self._largest = calculate_range(args, "cpu")[1].item()
        # The least scale of an FP8 token is that of vLLM. Elsewhere zeros only have to stay zeros.
        smallest = is_float and self.by_token
        self._least_scale = 1 / (self._largest * 512) if smallest else torch.finfo(torch.float32).tiny
        # Layers that read the same tensor (q, k and v; gate and up) follow one another, and quantize it once.
        self._last: tuple[Any, Any, Any] = (lambda: None, None, None)  # reference to it, function and result

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.fake_quantize(inputs[0]), *inputs[1:]

    @torch.no_grad()
    def shared(self, function: Callable[[Tensor], Any], activations: Tensor) -> Any:
        """Return the result of a function, computed once for layers that read the same tensor in succession."""
        last, of_function, result = self._last
        if last() is not activations or of_function != function:
            result = function(activations)
            self._last = weakref.ref(activations), function, result
        return result

    def fake_quantize(self, activations: Tensor) -> Tensor:
        """Return activations of shape (..., channels) after the round trip of each token, in the same shape and dtype.

        Gradients pass the round trip unchanged, see `straight_through`.
        """
        return straight_through(self.shared(self._round_trip, activations), activations)

    def _round_trip(self, activations: Tensor) -> Tensor:
        numbers, scale = self.quantize(activations)
        return numbers.mul_(scale).to(activations.dtype).view_as(activations)

    def numbers(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `quantize`, with bfloat16 numbers where they are kept for a gradient or on a GPU."""
        numbers, scale = self.quantize(activations)
        kept = activations.requires_grad or activations.is_cuda
        return (numbers.to(torch.bfloat16) if kept else numbers), scale

    def quantize(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the format and the scales to multiply them with, for each token by itself.

        Args:
            activations: shape (..., channels), floating point.

        Returns:
            Two float32 tensors of shapes (..., channels) and (..., 1), or (..., groups, channels of a group) and
            (..., groups, 1).
        """
        value = activations.float()  # for scales in float32, as in the engines' kernels
        if self._group_size is not None:
            value = value.unflatten(-1, (-1, self._group_size))
        scale = self._scale(value.abs().amax(-1, keepdim=True))
        scaled = value * scale.reciprocal() if self.by_token or self._is_nvfp4 else value / scale
        return self._round(scaled), scale

    def _scale(self, largest: Tensor) -> Tensor:
        if self._is_nvfp4:  # with the multiplications of vLLM's kernels; blocks whose scale rounds to 0 become zeros
            scale = round_to_float8((largest * (1 / self._largest) * INPUT_GLOBAL_SCALE).clamp_(max=448.0))
            return scale.masked_fill_(scale == 0, 1.0).div_(INPUT_GLOBAL_SCALE)
        scale = (largest / self._largest).clamp_(min=self._least_scale)
        if self._scale_dtype == torch.uint8:  # the next power of two (MXFP8), with which no number saturates
            scale = scale.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)
        return scale


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activations: Tensor, numbers: Tensor, token_scale: Tensor, weight: Tensor, scale: Tensor, bias: Any
    ) -> Tensor:
        ctx.save_for_backward(numbers, token_scale, weight, scale)
        if weight.device.type == "cuda":
            rows = numbers.flatten(0, -2)
            sums = torch.mm(rows, weight.t(), out_dtype=torch.float32).unflatten(0, numbers.shape[:-1])
        else:
            # Exact. In float32, few rows may be summed in another order than many, and decoding differ from training.
            sums = nn.functional.linear(numbers.double(), weight.double()).float()
        product = sums * token_scale * scale
        return (product if bias is None else product + bias).to(activations.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        numbers, token_scale, weight, scale = ctx.saved_tensors
        of_activations, _, _, of_weight, _, of_bias = ctx.needs_input_grad
        (gradient,) = gradients
        rows, by_activations, by_weight = gradient.flatten(0, -2), None, None
        if of_activations:
            by_activations = gradient @ (weight * scale[:, None]).to(gradient.dtype)
        if of_weight:
            by_weight = rows.t() @ (numbers * token_scale).to(gradient.dtype).flatten(0, -2)
        return by_activations, None, None, by_weight, None, rows.sum(0) if of_bias else None


def multiply_numbers(linear: Any, quantizer: ActivationQuantizer, active: Callable[[], bool] = lambda: True) -> None:
    """Make a linear layer multiply quantized numbers and scale the sums, as engines do, while ``active()``.

    With x̂ and Ŵ the numbers, y = (x̂ · Ŵᵀ) × scale of the token × scale of the channel + bias, all in float32 (a CPU's
    sums in float64), and then in the dtype of x. Scaling the factors first would round each of them to bfloat16, and
    the next layers' activations would round to other numbers. The gradient is that of the product of scaled factors.

    Args:
        linear: layer whose weight holds numbers of the format, in float32 or in bfloat16, which holds those of FP8 and
            INT8 exactly and which GPUs multiply with sums in float32; its ``weight_scale`` is the scale of each output
            channel, shape (out_features,), float32.
        quantizer: quantizer of its input, by token.
        active: returns whether the layer computes in this way now.
    """
    own = linear.forward

    @functools.wraps(own)
    def product(activations: Tensor) -> Tensor:
        if not active():
            return own(activations)
        numbers = quantizer.shared(quantizer.numbers, activations)
        return _QuantizedProduct.apply(activations, *numbers, linear.weight, linear.weight_scale, linear.bias)

    linear.forward = product


def quantize_gated(experts: Any, quantizer: ActivationQuantizer, active: Callable[[], bool] = lambda: True) -> None:
    """Make fused experts quantize the input of their down_proj while ``active()``.

    transformers' `_apply_gate` computes it within their forward pass, where no hook can reach it.
    """
    gate = experts._apply_gate
    experts._apply_gate = lambda both: quantizer.fake_quantize(gate(both)) if active() else gate(both)


def round_to_float8(values: Tensor) -> Tensor:
    """Round float32 values within ±448 to E4M3 numbers, ties to even, in place, much faster than PyTorch's casts."""
    return _round_to_float(values, bits=3, least=2.0**-6)


def round_to_float4(values: Tensor) -> Tensor:
    """Round float32 values to E2M1 numbers (0, 0.5, 1, 1.5, 2, 3, 4, 6), ties to even, in place; larger ones to ±6."""
    return _round_to_float(values.clamp_(-6.0, 6.0), bits=1, least=1.0)


def _round_to_float(values: Tensor, bits: int, least: float) -> Tensor:
    """Round float32 values to floating-point numbers with fewer bits, ties to even, in place.

    The format keeps ``bits`` bits after the leading one, so next to ``v`` its numbers are 2^(e - bits) apart, where
    2^e is the power of two below |v|, at ``least`` the format's smallest normal number. After 1.5 × 2^23 times that
    distance is added, float32 has no bit below it; subtracting it again is exact.
    """
    power = values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_(min=least)
    shift = 1.5 * 2.0 ** (23 - bits)
    return values.add_(power, alpha=shift).sub_(power, alpha=shift)
