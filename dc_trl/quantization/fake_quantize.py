"""Round trips through a scheme's number format: the weights and activations that the deployed policy computes with."""

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType, fake_quantize
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
    return _StraightThrough.apply(value, *sources)


class ActivationQuantizer:
    """Forward pre-hook that fake-quantizes the input of a layer with scales found on the spot, as engines do.

    Bit for bit the result of compressed-tensors' `compute_dynamic_scales_and_zp` and `fake_quantize`, which take three
    times as long. Decoding one token calls this for every layer, so it decides what a rollout costs.

    Args:
        args: dynamic quantization of activations by token, or by token and group of channels.
    """

    def __init__(self, args: QuantizationArgs):
        self._group_size = args.group_size
        low, high = calculate_range(args, "cpu")
        self._low, self._high = low.item(), high.item()
        self._is_float8 = args.type == QuantizationType.FLOAT
        # Layers that read the same activations (q, k and v; gate and up) follow one another: quantize once for all.
        self._input: Tensor | None = None
        self._output: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if inputs[0] is not self._input or self._output is None:
            self._input = inputs[0]
            self._output = self.fake_quantize(inputs[0])
        return (self._output, *inputs[1:])

    def fake_quantize(self, activations: Tensor) -> Tensor:
        """Activations of shape (..., channels) after their round trip, each token by itself; same shape and dtype.

        Gradients pass the round trip unchanged, see `straight_through`.
        """
        if torch.is_grad_enabled() and activations.requires_grad:
            with torch.no_grad():
                value = self._round_trip(activations)
            return straight_through(value, activations)
        return self._round_trip(activations)

    def _round_trip(self, activations: Tensor) -> Tensor:
        value = activations.float()  # scales in float32, as in the engines' kernels
        if self._group_size is not None:
            value = value.unflatten(-1, (-1, self._group_size))
        scale = value.abs().amax(-1, keepdim=True) / ((self._high - self._low) / 2)
        scaled = value / scale.clamp_(min=torch.finfo(torch.float32).tiny)  # zeros stay zeros
        rounded = round_to_float8(scaled) if self._is_float8 else scaled.clamp_(self._low, self._high).round_()
        return rounded.mul_(scale).to(activations.dtype).view_as(activations)

    def reset(self) -> None:
        """Frees the activations that are kept for the next layer."""
        self._input = self._output = None


def quantize_activations(model: PreTrainedModel, args: QuantizationArgs) -> ActivationQuantizer:
    """Makes every layer that a scheme quantizes read fake-quantized activations, from the next forward pass on.

    Returns the quantizer of all layers, to be `reset` after a forward pass; `resolve_scheme` has to accept the model.
    """
    quantizer = ActivationQuantizer(args)
    for linear in quantized_linears(model).values():
        linear.register_forward_pre_hook(quantizer)
    experts = fused_experts(model)
    if experts:
        model.set_experts_implementation("grouped_mm")  # which calls `_apply_gate`; "eager" does not
    for module in experts.values():
        module.register_forward_pre_hook(quantizer)
        _quantize_gated(module, quantizer)
    return quantizer


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
