"""The distribution over the vocabulary at the tokens of a forward pass, tile by tile.

TRL's forward returns the log-probability of the sampled token alone. The hidden states below the output head, which
every forward computes, give the others without a second forward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from .policy import scaled_logits


# Number of logits of a policy that are held at a time: 256 MiB in float32.
_TILE = 2**26
_Padded = Callable[[Tensor], Tensor]


class Head(NamedTuple):
    """Tensors from which the logits of a forward pass are computed."""

    hidden: Tensor  # (batch, length, channels)
    weight: Tensor  # (vocabulary, channels)
    bias: Tensor | None

    def tiles(self, width: int) -> list[Tensor]:
        """Return the hidden states that predict the last `width` tokens of each row: tiles of shape (n, channels)."""
        return list(self.hidden[:, -width - 1 : -1].flatten(0, 1).split(max(1, _TILE // self.weight.shape[0])))


class HeadRecorder:
    """Keeps the `Head` of a model's latest forward pass with a gradient, or of the latest one of all.

    Args:
        model: transformers causal language model, not sharded, without an adapter on its output head.
        temperature: divisor of the logits.
        padded: converts hidden states of the backbone to padded rows, where the backbone reads packed ones
            (`padding_free`).
        with_gradient: whether forward passes without a gradient, as those of the split, are passed over.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        padded: _Padded | None = None,
        with_gradient: bool = True,
    ):
        self._model, self._temperature, self._padded = model, temperature, padded
        self._with_gradient = with_gradient
        self._head: Head | None = None
        model.base_model.register_forward_hook(self._record)

    def _record(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._with_gradient and not torch.is_grad_enabled():
            return
        # The hook runs within the forward of the whole model, when the head holds the weights that it computes with.
        head = self._model.get_output_embeddings()
        hidden = output.last_hidden_state
        self._head = Head(hidden if self._padded is None else self._padded(hidden), head.weight, head.bias)

    def take(self) -> Head:
        """Return the head of that forward pass, once."""
        head, self._head = self._head, None
        assert head is not None
        return head

    def log_softmax(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the log-probabilities of the vocabulary, shape (n, vocabulary), nats, float32 or wider."""
        logits = functional.linear(hidden.to(weight.dtype), weight, bias)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        return (scaled_logits(logits, self._model.config.get_text_config()) / self._temperature).log_softmax(-1)
