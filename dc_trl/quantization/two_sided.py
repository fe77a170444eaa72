"""Divergence of a policy from its quantized self, with the gradient through both.

θ are the weights and θ + Δ = Q(θ) their round trip through a scheme's number format, with Δ held fixed. The divergence
of π_{θ+Δ} from π_θ has a gradient through both policies: through θ, and straight-through, through Q(θ).
"""

from collections.abc import Callable
from typing import Literal

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from .deployed_forward import DeployedForward
from .head import HeadRecorder
from .policy import base_model


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
        self._deployed = deployed
        self._kind = kind
        self._recorder: HeadRecorder | None = None
        if kind == "kl":
            model = base_model(policy)
            if isinstance(model.get_output_embeddings(), BaseTunerLayer):
                raise ValueError(
                    "constraint_form='two_sided_kl' reads the output head, which peft_config adapts: leave the head "
                    "out of target_modules, or use constraint_form='two_sided_l1'."
                )
            self._recorder = HeadRecorder(model, temperature, padded)

    def __call__(self, train_logps: Tensor, forward: Callable[[], Tensor]) -> Tensor:
        """Return the divergence at each token.

        Args:
            train_logps: log π_θ of the sampled tokens from the policy's latest forward with a gradient, shape (B, T).
            forward: computes `train_logps` again.

        Returns:
            Shape (B, T), float32 or wider, with a gradient.
        """
        policy_head = None if self._recorder is None else self._recorder.take()
        with self._deployed.active():
            deployed_logps = forward()
        if self._recorder is None or policy_head is None:
            return (deployed_logps.exp() - train_logps.exp()).abs()
        deployed_head = self._recorder.take()
        tiles = zip(*(head.tiles(train_logps.shape[1]) for head in (policy_head, deployed_head)), strict=True)
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
        assert self._recorder is not None
        train_logps = self._recorder.log_softmax(hidden, weight, bias)
        deployed_logps = self._recorder.log_softmax(deployed_hidden, deployed_weight, deployed_bias)
        return (deployed_logps.exp() * (deployed_logps - train_logps)).sum(-1)
