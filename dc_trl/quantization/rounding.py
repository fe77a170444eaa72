"""Rounds a model of transformers to bfloat16 where vLLM rounds it, and nowhere else.

transformers rounds after each operation. vLLM fuses two of them, in its CPU engine and in its compiled GPU engine:

- A norm reads the sum of the residual stream and a layer's output before the sum is rounded
  (vllm/ir/ops/layernorm.py, `fused_add_rms_norm`).
- Rotary embeddings are rounded once, not after each product and the sum (csrc/pos_encoding_kernels.cu).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel


# What a decoder layer consists of in the families of Llama and Qwen. Others (Gemma, OLMo) add norms or move them.
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def round_as_vllm(model: PreTrainedModel, active: Callable[[], bool] = lambda: True) -> list["Residual"]:
    """Makes a model round as vLLM does, from its next forward pass on.

    Norms follow where the decoder layers are those of Llama and Qwen; other models keep transformers' rounding there.
    Rotary embeddings follow where they are a sum of two products, as in nearly all models.

    Args:
        model: causal language model with its weights.
        active: whether it is to round so in the present forward pass.

    Returns:
        Its residual streams. Gradient checkpointing, which runs a layer by itself, has to bring back their `state`.
    """
    residuals = []
    for name, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and all(
            dict(layer.named_children()).keys() == _LAYER for layer in layers
        ):
            residuals += _fuse_norms(model.get_submodule(name.rpartition(".")[0]), layers, active)
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(partial(_unrounded, active))
    return residuals


class Residual:
    """The residual stream within one forward pass.

    Attributes:
        state: what the last norm read, and what was added to it since; None before there is any.
    """

    def __init__(self) -> None:
        self.state: tuple[Tensor | None, Tensor | None] = (None, None)

    def begin(self, *_: Any) -> None:
        """Hook before the first layer: whatever an interrupted forward pass left here is not ours."""
        self.state = (None, None)

    def add(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hook after attention and MLP."""
        self.state = (self.state[0], output[0] if isinstance(output, tuple) else output)

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """RMS norm of the sum that ``hidden`` is once it is rounded; shape (..., channels) and dtype of ``hidden``."""
        before, added = self.state
        exact = hidden.float() if before is None or added is None else before.float() + added
        self.state = (hidden, None)
        return rms_norm(exact, norm.weight, norm.variance_epsilon)


def rms_norm(value: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight · value / √(mean(value²) + ε), rounded before and after the product with the weight, as vLLM does it.

    Args:
        value: shape (..., channels), float32.
        weight: shape (channels,); its dtype is that of the result.
        epsilon: added to the mean square.
    """
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * value.to(weight.dtype)


def _fuse_norms(decoder: nn.Module, layers: Any, active: Callable[[], bool]) -> list[Residual]:
    norms: list[Any] = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms += [module for name, module in decoder.named_children() if name == "norm"]
    norms = [copy for norm in norms for copy in _copies(norm)]
    if not all(map(_is_rms_norm, norms)):
        return []
    residual = Residual()
    layers[0].register_forward_pre_hook(residual.begin)
    for layer in layers:
        layer.self_attn.register_forward_hook(residual.add)
        layer.mlp.register_forward_hook(residual.add)
    for norm in norms:
        _follow(norm, residual, active)
    return [residual]


def _copies(norm: Any) -> list[Any]:
    """A norm, and what PEFT trains in its place."""
    if isinstance(norm, ModulesToSaveWrapper):
        return [norm.original_module, *norm.modules_to_save.values()]
    return [norm]


def _follow(norm: Any, residual: Residual, active: Callable[[], bool]) -> None:
    own = norm.forward
    norm.forward = lambda hidden: residual.norm(norm, hidden) if active() else own(hidden)


def _is_rms_norm(norm: Any) -> bool:
    """Whether a norm computes `rms_norm`: by its result, because each family has a class of its own."""
    if dict(norm.named_parameters()).keys() != {"weight"} or "variance_epsilon" not in vars(norm):
        return False
    value = torch.linspace(-3, 7, norm.weight.numel(), device=norm.weight.device).to(norm.weight.dtype)
    with torch.no_grad():
        return torch.equal(norm(value), rms_norm(value.float(), norm.weight, norm.variance_epsilon))


class _Unrounded(Tensor):
    """Cosines or sines whose products with bfloat16 are float32 and are rounded once they are added up."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result.as_subclass(Tensor).to(torch.bfloat16) if func in _SUMS else result


_SUMS = {Tensor.add, Tensor.sub}


def _unrounded(active: Callable[[], bool], module: nn.Module, inputs: Any, output: Any) -> Any:
    """Hook of a rotary embedding, which has rounded its cosines and sines."""
    if not active() or any(value.dtype != torch.bfloat16 for value in output):
        return output
    return tuple(value.float().as_subclass(_Unrounded) for value in output)
