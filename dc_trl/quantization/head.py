"""What a causal language model computes from the hidden states of its backbone.

Models scale hidden states or logits, cap logits, add biases, or have layers between backbone and head. None of this is
written again here: a model's own forward runs, with stand-ins for its backbone and, where TRL computes it, its head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .policy import gathered


class _Output(BaseModelOutput):
    """Hidden states. What else a model's forward passes on from its backbone, such as a cache, is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in the place of a backbone, or of the decoder in one as OPT calls it, and returns a known output."""

    def __init__(self, backbone: nn.Module, output: _Output):
        super().__init__()
        vars(self).update(backbone=backbone, output=output)  # not as a child

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.backbone, name)
        return _Given(found, self.output) if isinstance(found, PreTrainedModel) else found

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return self.output


class FusedHead(nn.Module):
    """The product of an output head as TRL's fused head computes it within the present forward.

    It keeps the weights of this forward, because sharded or deployed ones are taken back when it ends.

    Args:
        head: output head of the model.
        hidden: hidden states, whose dtype the product has without autocast.
        in_float32: whether the product is in float32 (`cast_lm_head_to_fp32`).
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, head: Any, hidden: Tensor, in_float32: bool = False):
        super().__init__()
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        dtype = torch.float32 if in_float32 else dtype
        self.weight = gathered(head.weight).to(dtype)
        self.bias = None if head.bias is None else gathered(head.bias).to(dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        product = functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        return product.to(torch.promote_types(product.dtype, torch.float32))


@contextmanager
def given(model: PreTrainedModel, hidden: Tensor, head: nn.Module | None = None) -> Iterator[None]:
    """Let forwards of a model within the context take hidden states as the output of its backbone.

    Args:
        model: causal language model, without the PEFT model around it.
        hidden: shape (rows, positions, channels).
        head: module in the place of the model's output head; None leaves that.
    """
    backbone = model.base_model
    stand_ins: dict[nn.Module, nn.Module] = {backbone: _Given(backbone, _Output(last_hidden_state=hidden))}
    if head is not None:
        stand_ins[model.get_output_embeddings()] = head
    own = {name: module for name, module in model.named_modules() if module in stand_ins}
    for name, module in own.items():
        model.set_submodule(name, stand_ins[module])
    try:
        yield
    finally:
        for name, module in own.items():
            model.set_submodule(name, module)


def logits_of(model: PreTrainedModel, hidden: Tensor, head: nn.Module | None = None) -> Tensor:
    """Return the logits that a model's own forward computes from hidden states, shape (n, vocabulary).

    Args:
        model: causal language model, without the PEFT model around it.
        hidden: what its backbone returns at some positions, shape (n, channels).
        head: see `given`; with a `FusedHead` what follows the head is computed in float32, as in TRL.
    """
    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    with given(model, hidden.unsqueeze(0), head), torch.autocast(hidden.device.type, enabled=False):
        return type(model).forward(model, input_ids=ids, use_cache=False).logits[0]
