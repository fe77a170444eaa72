"""Divergence of a policy from its quantized self, with the gradient through both.

θ are the weights and θ + Δ = Q(θ) their round trip through a scheme's number format, with Δ held fixed. The divergence
of π_{θ+Δ} from π_θ has a gradient through both policies: through θ, and straight-through, through Q(θ).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from .deployed_forward import DeployedForward
from .policy import base_model, scaled_logits


# Number of logits of each policy that are held at a time: 256 MiB in float32.
_TILE = 2**26


class _Head(NamedTuple):
    """Tensors from which the logits of a forward pass are computed."""

    hidden: Tensor  # (batch, length, channels)
    weight: Tensor  # (vocabulary, channels)
    bias: Tensor | None


class TwoSidedDivergence:
    """Divergence of a policy from its quantized self at the tokens of a forward pass.

    It costs one more forward pass with its backward pass. ``"kl"`` also computes the logits of both policies once
    more, tile by tile, and again in the backward pass.

    Args:
        policy: transformers causal language model, or a PEFT model around one; not sharded.
        deployed: deployed forward of the policy, inactive.
        kind: ``"kl"``: KL(π_{θ+Δ} ‖ π_θ) over the vocabulary, in nats. ``"l1"``: |π_{θ+Δ} − π_θ| of the sampled
            token.
        temperature: temperature of both policies.
        padded: converts hidden states of the backbone to padded rows, where the backbone reads packed ones
            (`padding_free`).

    Raises:
        ValueError: an adapter is on the output head, with ``kind="kl"``.
    """

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        deployed: DeployedForward,
        kind: Literal["kl", "l1"],
        temperature: float = 1.0,
        padded: Callable[[Tensor], Tensor] | None = None,
    ):
        self._padded = padded
        self._deployed = deployed
        self._kind = kind
        self._temperature = temperature
        self._model = base_model(policy)
        self._head: _Head | None = None
        if kind == "kl":
            if isinstance(self._model.get_output_embeddings(), BaseTunerLayer):
                raise ValueError(
                    "constraint_form='two_sided_kl' reads the output head, which peft_config adapts: leave the head "
                    "out of target_modules, or use constraint_form='two_sided_l1'."
                )
            self._model.base_model.register_forward_hook(self._record_head)

    def _record_head(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # The hook runs within the forward of the whole model, when the head holds the weights that it computes with.
        head = self._model.get_output_embeddings()
        hidden = output.last_hidden_state
        self._head = _Head(hidden if self._padded is None else self._padded(hidden), head.weight, head.bias)

    def __call__(self, train_logps: Tensor, forward: Callable[[], Tensor]) -> Tensor:
        """Return the divergence at each token.

        Args:
            train_logps: log π_θ of the sampled tokens from the policy's latest forward, shape (B, T), with a gradient.
            forward: computes `train_logps` again.

        Returns:
            Shape (B, T), float32 or wider, with a gradient.
        """
        policy_head = self._head
        with self._deployed.active():
            deployed_logps = forward()
        deployed_head, self._head = self._head, None
        if self._kind == "l1":
            return (deployed_logps.exp() - train_logps.exp()).abs()
        assert policy_head is not None
        assert deployed_head is not None
        width = train_logps.shape[1]
        hidden = [head.hidden[:, -width - 1 : -1].flatten(0, 1) for head in (policy_head, deployed_head)]
        size = max(1, _TILE // policy_head.weight.shape[0])
        tiles = zip(*(each.split(size) for each in hidden), strict=True)
        divergences = [
            checkpoint(self._kl, *tile, *policy_head[1:], *deployed_head[1:], use_reentrant=False) for tile in tiles
        ]
        return torch.cat(divergences).view(train_logps.shape)

    def _kl(
        self,
        hidden: Tensor,
        deployed_hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deployed_weight: Tensor,
        deployed_bias: Tensor | None,
    ) -> Tensor:
        train_logps = self._log_softmax(hidden, weight, bias)
        deployed_logps = self._log_softmax(deployed_hidden, deployed_weight, deployed_bias)
        return (deployed_logps.exp() * (deployed_logps - train_logps)).sum(-1)

    def _log_softmax(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = functional.linear(hidden.to(weight.dtype), weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (scaled_logits(logits, self._model.config.get_text_config()) / self._temperature).log_softmax(-1)
