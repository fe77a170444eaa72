"""Round a transformers model to bfloat16 where vLLM rounds it, and nowhere else.

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

from .fake_quantize import straight_through


# Modules of a decoder layer in the families of Llama and Qwen. Others (Gemma, OLMo) add norms or move them.
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_NO_SCALES = {"hidden_size", "layer_idx", "sliding_window"}  # numbers of a layer that scale nothing


def round_as_vllm(model: PreTrainedModel, active: Callable[[], bool] = lambda: True) -> list[Callable[[], None]]:
    """Make a model round as vLLM does, from its next forward pass on.

    Norms are changed where the decoder layers are those of Llama and Qwen; other models keep transformers' rounding.
    Rotary embeddings are changed where they are a sum of two products, as in nearly all models.

    Args:
        model: causal language model with its weights.
        active: returns whether the model rounds in this way now.

    Returns:
        Functions that free what a forward pass keeps for its gradient.
    """
    ends = []
    for name, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and all(map(_adds_plainly, layers)):
            ends += _fuse_norms(model.get_submodule(name.rpartition(".")[0]), layers, active)
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(partial(_with_late_rounding, active))
    return ends


def _adds_plainly(layer: nn.Module) -> bool:
    # Granite, MiniMax and others scale the residual stream or what is added to it, by numbers or own parameters.
    numbers = [name for name, value in vars(layer).items() if type(value) in (int, float) and name not in _NO_SCALES]
    return dict(layer.named_children()).keys() == _LAYER and not numbers and not [*layer.parameters(recurse=False)]


class _Residual:
    """The sums of the residual stream that norms read, before rounding, within one forward pass.

    The norm at the entry of a layer finds its sum by the memory address of the rounded one, because gradient
    checkpointing computes a layer again by itself. For that, two activations of each layer stay until `begin`.
    """

    def __init__(self) -> None:
        self._before: Tensor | None = None  # input of the last norm
        self._added: Tensor | None = None  # output of attention or MLP since then
        # Layer → address of the rounded sum at its entry, and the two terms.
        self._entries: dict[int, tuple[int, Tensor | None, Tensor | None]] = {}

    def begin(self, output: Any = None) -> None:
        """Discard the values of an earlier forward pass, before a new one or when its gradient is known."""
        self._entries.clear()
        self._before = self._added = None

    def add(self, output: Any) -> None:
        """Record the output of attention or MLP."""
        self._added = (output[0] if isinstance(output, tuple) else output).detach()

    def leave(self, number: int, output: Any) -> None:
        """Record the sum that a layer passes to the next one."""
        if not torch.is_grad_enabled():  # no layer will be computed again
            self._entries.clear()
        hidden = output[0] if isinstance(output, tuple) else output
        self._entries[number + 1] = (hidden.data_ptr(), self._before, self._added)

    def exact(self, number: int | None, hidden: Tensor) -> Tensor:
        """Return the unrounded sum of ``hidden``, float32, at the entry of a layer or, with None, within one."""
        if number is not None:
            address, self._before, self._added = self._entries.get(number, (0, None, None))
            if address != hidden.data_ptr():
                self._before = None
        before, added = self._before, self._added
        self._before, self._added = hidden.detach(), None
        exact = hidden.float()
        if before is None or added is None:
            return exact
        # Its gradient goes to the rounded sum: FSDP2 gathers a layer's weights only when the gradient of the layer's
        # own output has arrived.
        return straight_through(before.float() + added, exact)


def _fuse_norms(decoder: nn.Module, layers: Any, active: Callable[[], bool]) -> list[Callable[[], None]]:
    entries = [layer.input_layernorm for layer in layers]
    entries += [module for name, module in decoder.named_children() if name == "norm"]
    inner = [layer.post_attention_layernorm for layer in layers]
    if not all(_is_rms_norm(copy) for norm in (*entries, *inner) for copy in _copies(norm)):
        return []
    residual = _Residual()

    def when_active(step: Callable[[Any], None]) -> Callable[..., None]:
        return lambda module, inputs, output=None: step(output) if active() else None

    decoder.register_forward_pre_hook(when_active(residual.begin))
    for number, layer in enumerate(layers):
        layer.self_attn.register_forward_hook(when_active(residual.add))
        layer.mlp.register_forward_hook(when_active(residual.add))
        layer.register_forward_hook(when_active(partial(residual.leave, number)))
    for place, norm in [*enumerate(entries), *((None, norm) for norm in inner)]:
        for copy in _copies(norm):
            copy.forward = partial(_norm, copy, copy.forward, partial(residual.exact, place), active)
    return [residual.begin]


def _copies(norm: Any) -> list[Any]:  # the norm and the copies of it that PEFT trains
    if isinstance(norm, ModulesToSaveWrapper):
        return [norm.original_module, *norm.modules_to_save.values()]
    return [norm]


def _norm(norm: Any, own: Callable, exact: Callable, active: Callable[[], bool], hidden: Tensor) -> Tensor:
    """Return weight · value / √(mean(value²) + ε), rounded before and after the product with the weight, as in vLLM.

    Args:
        norm: RMSNorm, in whose dtype the result is.
        own: its own forward, for when ``active()`` is false.
        exact: function of ``hidden`` that returns the value, float32.
        active: returns whether the norm rounds in this way now.
        hidden: shape (..., channels).
    """
    if not active():
        return own(hidden)
    value = exact(hidden)
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * value.to(norm.weight.dtype)


def _is_rms_norm(norm: Any) -> bool:
    return dict(norm.named_parameters()).keys() == {"weight"} and "variance_epsilon" in vars(norm)


class _LateRounded(Tensor):
    """Cosines or sines whose products with bfloat16 tensors stay float32 until the products are added up."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result.as_subclass(Tensor).to(torch.bfloat16) if func in _SUMS else result


_SUMS = {Tensor.add, Tensor.sub}


def _with_late_rounding(active: Callable[[], bool], module: nn.Module, inputs: Any, output: Any) -> Any:
    """Make products with the cosines and sines of a rotary embedding round late (a forward hook)."""
    if not active() or any(value.dtype != torch.bfloat16 for value in output):
        return output
    return tuple(value.float().as_subclass(_LateRounded) for value in output)
