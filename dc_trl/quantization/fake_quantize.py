"""Round trips through a scheme's number format: the weights and activations that the deployed policy computes with."""

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
    fake_quantize,
    quantize,
)
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range, maybe_pad_tensor_for_block_quant
from torch import Tensor, nn
from transformers import PreTrainedModel

from .schemes import fused_experts, quantized_linears


@torch.no_grad()
def weight_qparams(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Scales and zero points of a weight, from its largest magnitudes, as compressed-tensors stores them.

    Args:
        weight: shape (out_features, in_features), floating point.
        args: quantization of weights by channel, group or block.

    Returns:
        Two tensors of shape (out_features, 1) by channel, (out_features, groups) by group, or (blocks of rows, blocks
        of columns) by block. Scales are float32 numbers; of weight-only formats they are bfloat16 numbers, because
        that is what vLLM's kernels keep.
    """
    weight = weight.float()
    if args.strategy == QuantizationStrategy.CHANNEL:
        blocks = weight.unsqueeze(1)
    elif args.strategy == QuantizationStrategy.GROUP:
        blocks = weight.unflatten(-1, (-1, args.group_size))
    elif args.strategy == QuantizationStrategy.BLOCK:
        height, width = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
        blocks = padded.unflatten(-1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(-2)
    else:
        raise NotImplementedError(f"weights quantized by {args.strategy}")
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    if args.strategy == QuantizationStrategy.GROUP:
        scale = scale.to(torch.bfloat16).float()
    return scale, zero_point


@torch.no_grad()
def fake_quantize_weight(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """A weight after its round trip, in float32 and the same shape; see `weight_qparams`.

    Args:
        weight: shape (out_features, in_features), or (experts, out_features, in_features); floating point.
        args: quantization of weights by channel, group or block.
    """
    # The experts' matrices are stacked into one. No block of rows crosses from one expert into the next:
    # `resolve_scheme` makes sure that blocks divide both dimensions, since each is the width of one of the matrices.
    rows = weight.float().flatten(0, -2)
    return fake_quantize(rows, *weight_qparams(rows, args), args).view(weight.shape)


@torch.no_grad()
def weight_numbers(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """A weight that is quantized by output channel, as numbers of the format, and their scales.

    Args:
        weight: shape (out_features, in_features), floating point.
        args: quantization of weights by channel.

    Returns:
        Two float32 tensors of shapes (out_features, in_features) and (out_features,).
    """
    scale, zero_point = weight_qparams(weight, args)
    return quantize(weight.float(), scale, zero_point, args), scale.flatten()


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
    """A value whose gradient is that of each of its sources, as if it were their sum (arXiv 1308.3432).

    Args:
        value: any floating dtype; no gradient flows to it.
        sources: of the same shape, any floating dtype, in which their gradients arrive.
    """
    return _StraightThrough.apply(value, *sources) if torch.is_grad_enabled() else value


class ActivationQuantizer:
    """Quantizes the input of a layer with scales found on the spot, with the arithmetic of vLLM's kernels.

    Decoding one token calls this for every layer, so it decides what a rollout costs. compressed-tensors'
    `compute_dynamic_scales_and_zp` and `fake_quantize` take three times as long. By token, they also round otherwise
    than the engines, which multiply by the inverse of the scale, and give the largest magnitude of INT8 the code 127.

    As a forward pre-hook it makes a layer read the round trip of its input.

    Args:
        args: dynamic quantization of activations by token, or by token and group of channels.
    """

    def __init__(self, args: QuantizationArgs):
        self._group_size = args.group_size
        self._is_float8 = args.type == QuantizationType.FLOAT
        self._largest = calculate_range(args, "cpu")[1].item()
        # vLLM's least scale of an FP8 token. Elsewhere zeros only have to stay zeros.
        by_token = self._is_float8 and self._group_size is None
        self._least_scale = 1 / (self._largest * 512) if by_token else torch.finfo(torch.float32).tiny
        # Layers that read the same activations (q, k and v; gate and up) follow one another: quantize once for all.
        self._input: Tensor | None = None
        self._result: tuple[Tensor, ...] = ()

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if inputs[0] is not self._input:
            self._input, self._result = inputs[0], (self.fake_quantize(inputs[0]),)
        return (*self._result, *inputs[1:])

    def fake_quantize(self, activations: Tensor) -> Tensor:
        """Activations of shape (..., channels) after their round trip, each token by itself; same shape and dtype.

        Gradients pass the round trip unchanged, see `straight_through`.
        """
        with torch.no_grad():
            numbers, scale = self.quantize(activations)
            value = numbers.mul_(scale).to(activations.dtype).view_as(activations)
        return straight_through(value, activations)

    def shared(self, activations: Tensor) -> tuple[Tensor, ...]:
        """`quantize`, once for layers that read the same tensor one after the other."""
        if activations is not self._input:
            self._input, self._result = activations, self.quantize(activations)
        return self._result

    def quantize(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the format, and the scales to multiply them with; each token by itself.

        Args:
            activations: shape (..., channels), floating point.

        Returns:
            Two float32 tensors: shapes (..., channels) and (..., 1), or (..., groups, channels of a group) and
            (..., groups, 1).
        """
        value = activations.float()  # scales in float32, as in the engines' kernels
        if self._group_size is not None:
            value = value.unflatten(-1, (-1, self._group_size))
        scale = (value.abs().amax(-1, keepdim=True) / self._largest).clamp_(min=self._least_scale)
        scaled = value * scale.reciprocal() if self._group_size is None else value / scale
        return (round_to_float8(scaled) if self._is_float8 else scaled.round_()), scale

    def reset(self) -> None:
        """Frees the activations that are kept for the next layer."""
        self._input, self._result = None, ()


def scaled_product(
    numbers: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Product of quantized activations and weights as engines compute it: scales go to the sums, not to the factors.

    y = (numbers · weightᵀ) × scale × weight_scale + bias, all in float32. Scaling the factors first would round
    each of them to bfloat16, which tips the next layers' activations into other numbers of the format.

    Args:
        numbers: numbers of the format, shape (..., in_features), float32.
        scale: of each token, shape (..., 1), float32.
        weight: numbers of the format, shape (out_features, in_features). In bfloat16, which holds FP8's and INT8's
            numbers exactly, a GPU multiplies and sums up in float32; float32 elsewhere.
        weight_scale: of each output channel, shape (out_features,), float32.
        bias: shape (out_features,), or None.

    Returns:
        Shape (..., out_features), float32.
    """
    if weight.dtype == torch.bfloat16:
        rows = numbers.to(torch.bfloat16).flatten(0, -2)
        sums = torch.mm(rows, weight.t(), out_dtype=torch.float32).unflatten(0, numbers.shape[:-1])
    else:
        sums = nn.functional.linear(numbers, weight)
    product = sums * scale * weight_scale
    return product if bias is None else product + bias


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        activations: Tensor,
        numbers: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(numbers, scale, weight, weight_scale)
        if weight.device.type == "cuda":
            product = scaled_product(numbers, scale, weight, weight_scale, bias)
        else:
            product = scaled_product(numbers.float(), scale, weight.float(), weight_scale, bias)
        return product.to(activations.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        numbers, scale, weight, weight_scale = ctx.saved_tensors
        of_activations, _, _, of_weight, _, of_bias = ctx.needs_input_grad
        (gradient,) = gradients
        rows = gradient.flatten(0, -2)
        return (
            gradient @ (weight * weight_scale[:, None]).to(gradient.dtype) if of_activations else None,
            None,
            None,
            rows.t() @ (numbers * scale).to(gradient.dtype).flatten(0, -2) if of_weight else None,
            None,
            rows.sum(0) if of_bias else None,
        )


def quantized_product(
    activations: Tensor, numbers: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """`scaled_product` with the gradient of the product of the scaled factors, straight-through.

    Args:
        activations: what was quantized, shape (..., in_features); they get its gradient.
        numbers, scale: what it was quantized to; the numbers in bfloat16, which holds them exactly.
        weight: numbers of the format in bfloat16, shape (out_features, in_features). Its gradient is that of the
            scaled weight, for `straight_through`.
        weight_scale, bias: see `scaled_product`.

    Returns:
        Shape (..., out_features), dtype of ``activations``.
    """
    return _QuantizedProduct.apply(activations, numbers, scale, weight, weight_scale, bias)


class QuantizedLinear(nn.Linear):
    """Linear layer whose weights and activations are both numbers of a format; see `scaled_product`.

    Args:
        linear: whose shape, device and bias it takes over. Its weights come with `quantize_weight`.
        quantizer: of its input, by token.
    """

    weight_scale: Tensor

    def __init__(self, linear: nn.Linear, quantizer: ActivationQuantizer):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        device = linear.weight.device
        # bfloat16 would do for the numbers, but only GPUs have a product of it with sums in float32.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.weight = nn.Parameter(torch.empty_like(linear.weight, dtype=dtype), requires_grad=False)
        self.register_buffer("weight_scale", torch.empty(linear.out_features, dtype=torch.float32, device=device))
        self.bias = linear.bias
        self._quantizer = quantizer

    @torch.no_grad()
    def quantize_weight(self, weight: Tensor, args: QuantizationArgs) -> None:
        """Takes a weight over, quantized by output channel.

        Args:
            weight: shape (out_features, in_features), floating point.
            args: quantization of weights by channel.
        """
        numbers, scale = weight_numbers(weight, args)
        self.weight.copy_(numbers)
        self.weight_scale.copy_(scale)

    def forward(self, input: Tensor) -> Tensor:
        """Output of shape (..., out_features), in the dtype of the input, shape (..., in_features)."""
        numbers, scale = self._quantizer.shared(input)
        return scaled_product(numbers, scale, self.weight, self.weight_scale, self.bias).to(input.dtype)


def quantize_activations(model: PreTrainedModel, args: QuantizationArgs) -> ActivationQuantizer:
    """Makes every layer that a scheme quantizes read quantized activations, from the next forward pass on.

    By token, Linear layers become `QuantizedLinear`, whose weights have to be given. By group, and in experts, the
    factors of a product are fake-quantized.

    Returns the quantizer of all layers, to be `reset` after a forward pass; `resolve_scheme` has to accept the model.
    """
    quantizer = ActivationQuantizer(args)
    for name, linear in quantized_linears(model).items():
        if args.group_size is None:
            model.set_submodule(name, QuantizedLinear(linear, quantizer))
        else:
            linear.register_forward_pre_hook(quantizer)
    experts = fused_experts(model)
    if experts:
        model.set_experts_implementation("grouped_mm")  # which calls `_apply_gate`; "eager" does not
    for module in experts.values():
        module.register_forward_pre_hook(_quantize_first(quantizer))
        _quantize_gated(module, quantizer)
    return quantizer


def _quantize_first(quantizer: ActivationQuantizer) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda module, inputs: (quantizer.fake_quantize(inputs[0]), *inputs[1:])


def _quantize_gated(experts: Any, quantizer: ActivationQuantizer) -> None:
    """Has fused experts quantize what their down_proj reads.

    It is computed within their forward pass, out of reach of hooks; transformers' own `_apply_gate` computes it.
    """
    gate = experts._apply_gate
    experts._apply_gate = lambda gate_and_up: quantizer.fake_quantize(gate(gate_and_up))


def round_to_float8(values: Tensor) -> Tensor:
    """Rounds float32 values within ±448 to E4M3 numbers, ties to even, in place: much faster than PyTorch's casts.

    E4M3 keeps three bits after the leading one, so next to ``v`` its numbers are 2^(e-3) apart, where 2^e is the power
    of two below |v| and e ≥ -6. Adding 1.5 × 2^23 times that distance leaves float32 no bit below it; subtracting it
    again is exact.
    """
    power = values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_(min=2.0**-6)
    return values.add_(power, alpha=1.5 * 2.0**20).sub_(power, alpha=1.5 * 2.0**20)
