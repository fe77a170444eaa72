"""Score centering: the score of a sampled token minus its mean under the sampler (arXiv 2609.20807).

At a prefix, tokens are samples of q, and the score s = ∇ log p of the policy has the mean E_q[s], which is 0 only
where p = q. So E_q[A·s] = E_q[A]·E_q[s] + Cov_q(A, s), and the first term drifts whatever the rewards are. The centred
score s − E_q[s] leaves the covariance alone. With weights w of a correction the mean of w·s is taken away,
E_q[w·s] = ∇ Σ_v sg(w(v)·q(v)) log p(v).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..quantization.head import HeadRecorder
from ..quantization.policy import base_model
from ..sampled_tokens import SampledTokens
from .replica import Replica


class Centre(NamedTuple):
    """What the distributions at each token of a micro-batch say.

    Args:
        score: Σ_v sg(w(v)·q(v)) log p(v), shape (B, T), nats, whose gradient is the mean of the weighted score.
        drift: q − p is the drift E_q[s] in the logits; this is its total variation ½ Σ_v |q(v) − p(v)| and its
            Euclidean norm, shape (B, T, 2), at least 0.
    """

    score: Tensor
    drift: Tensor


class ScoreCentering:
    """Computes the mean score under the sampler, exactly: over the whole vocabulary.

    It costs one more forward pass of the sampler, and the logits of both once more, tile by tile, and again in the
    backward pass.

    Args:
        policy: transformers causal language model, or a PEFT model around one; not sharded.
        sampler: replica that sampled, with the weights that sampled.
        temperature: temperature of both.
        correction: weights of tokens as in `dc_trl.constraint.corrections`, each by its own probabilities; None
            without one.
        padded: converts hidden states of the policy to padded rows, where it reads packed ones (`padding_free`).

    Raises:
        ValueError: an adapter is on the output head.
    """

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        sampler: Replica,
        temperature: float = 1.0,
        correction: Callable[[SampledTokens], Tensor] | None = None,
        padded: Callable[[Tensor], Tensor] | None = None,
    ):
        model = base_model(policy)
        if isinstance(model.get_output_embeddings(), BaseTunerLayer):
            raise ValueError(
                "score_centering=True reads the output head, which peft_config adapts: leave the head out of "
                "target_modules, or set score_centering=False."
            )
        self._sampler = sampler
        self._correction = correction
        self._of_policy = HeadRecorder(model, temperature, padded)
        self._of_sampler = HeadRecorder(sampler.model, temperature, with_gradient=False)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, width: int, advantages: Tensor) -> Centre:
        """Return the mean score at each completion token of the policy's latest forward with a gradient.

        Args:
            input_ids, attention_mask: prompts and completions of that forward, shape (B, P + T).
            width: T.
            advantages: Â of each trajectory, shape (B,), or of each token, (B, T); some corrections go by its sign.
        """
        policy_head = self._of_policy.take()
        self._sampler.read(input_ids, attention_mask)
        sampler_head = self._of_sampler.take()
        whole = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        of_tokens = whole.expand(len(input_ids), width).flatten()
        hidden = policy_head.tiles(width)
        tiles = zip(hidden, sampler_head.tiles(width), of_tokens.split(len(hidden[0])), strict=True)
        heads = (*policy_head[1:], *sampler_head[1:])
        columns = [checkpoint(self._centre, *tile, *heads, use_reentrant=False) for tile in tiles]
        score, drift = (torch.cat(parts).unflatten(0, (-1, width)) for parts in zip(*columns, strict=True))
        return Centre(score, drift.detach())

    def _centre(
        self,
        hidden: Tensor,
        sampler_hidden: Tensor,
        advantages: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sampler_weight: Tensor,
        sampler_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        log_p = self._of_policy.log_softmax(hidden, weight, bias)
        with torch.no_grad():
            log_q = self._of_sampler.log_softmax(sampler_hidden, sampler_weight, sampler_bias)
            q = log_q.exp()
            mean = q
            if self._correction is not None:
                # Each position is a trajectory here, and each word of the vocabulary one of its tokens.
                every = torch.ones_like(q, dtype=torch.bool)
                mean = q * self._correction(SampledTokens(log_p, log_q, every, advantages))
            gap = q - log_p.exp()
            drift = torch.stack([gap.abs().sum(-1) / 2, gap.norm(dim=-1)], -1)
        return (mean * log_p).sum(-1), drift
