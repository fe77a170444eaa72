"""Score centering: the score of a sampled token minus its mean under the sampler (arXiv 2609.20807).

At a prefix, tokens are samples of q, and the score s = ∇ log p of the policy has the mean E_q[s], which is 0 only
where p = q. So E_q[A·s] = E_q[A]·E_q[s] + Cov_q(A, s), and the first term drifts whatever the rewards are. The centred
score s − E_q[s] leaves the covariance alone. With weights w of a correction the mean of w·s is taken away,
E_q[w·s] = ∇ Σ_v sg(w(v)·q(v)) log p(v).

Where only the sampler's most probable tokens H are known, the tail is taken for ρ·p(v), with
ρ = (1 − Σ_H q) / (1 − Σ_H p). As Σ_v p(v)·∇ log p(v) = 0, that is the paper's sum over H alone,
Σ_H sg(m(v) − α·p(v)) log p(v), with m = q and α = ρ or, with weights, m = w·q and α = ρ·w of the tail. Under truncated
sampling both distributions are those among the tokens that the sampler kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..quantization.head import FusedHead, logits_of
from ..quantization.policy import base_model
from ..sampled_tokens import SampledTokens, loss_mask
from ..sampling.replica import Replica
from .kept_tokens import Named, TileTokens, among, tiled, tiles_of
from .part import Part


_LEAST_TAIL = 1e-6  # of 1 − Σ_H p


class Centre(NamedTuple):
    """What the distributions at each token of a micro-batch say.

    Args:
        score: Σ_v sg(w(v)·q(v)) log p(v), shape (B, T), nats, whose gradient is the mean of the weighted score.
        drift: of q − p, the drift E_q[s] in the logits: ½ Σ_v |q(v) − p(v)| and the Euclidean norm, shape (B, T, 2).
    """

    score: Tensor
    drift: Tensor


class ScoreCentering:
    """Computes the mean score under the sampler: over the whole vocabulary, or its most probable tokens and a tail.

    It computes the policy's logits once more, tile by tile, and again in the backward pass. With a replica it also
    costs one more forward pass of the sampler, and its logits.

    Args:
        policy: transformers causal language model, or a PEFT model around one; not sharded.
        sampler: replica with the weights that sampled; None where vLLM has named its most probable tokens.
        temperature: temperature of both.
        correction: weights of tokens as in `dc_trl.constraint.corrections`, each by its own probabilities; None
            without one.
        top_k: number of the replica's most probable tokens that are read, at least 1; None for all of them.
        in_float32: whether the policy's output head runs in float32 (`cast_lm_head_to_fp32`).
    """

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        sampler: Replica | None,
        temperature: float = 1.0,
        correction: Callable[[SampledTokens], Tensor] | None = None,
        top_k: int | None = None,
        in_float32: bool = False,
    ):
        self._policy = base_model(policy)
        self._sampler = sampler
        self._temperature = temperature
        self._correction = correction
        self._top_k = top_k
        self._in_float32 = in_float32
        self._forward: tuple[Tensor, FusedHead] | None = None  # hidden states and head of the latest with a gradient
        self._policy.base_model.register_forward_hook(self._record)

    def _record(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # forward passes without one, as those of the split, are passed over
            # Within the forward of the whole model the head holds the weights that it computes with, under autocast.
            hidden = output.last_hidden_state
            self._forward = hidden, FusedHead(self._policy.get_output_embeddings(), hidden, self._in_float32)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        width: int,
        advantages: Tensor,
        kept: Named | None = None,
        named: Named | None = None,
    ) -> Centre:
        """Return the mean score at each completion token of the policy's latest forward with a gradient.

        Args:
            input_ids, attention_mask: prompts and completions of that forward, shape (B, P + T).
            width: T.
            advantages: Â of each trajectory, shape (B,), or of each token, (B, T); some corrections go by its sign.
            kept, named: the tokens that truncated sampling kept, and those that vLLM named.
        """
        assert self._forward is not None
        (states, head), self._forward = self._forward, None
        hidden = tiles_of(states, width, len(head.weight))
        size, count = len(hidden[0]), len(hidden)
        whole = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        samplers: Sequence[Tensor | None] = [None] * count
        if self._sampler is not None:
            samplers = tiles_of(self._sampler.read(input_ids, attention_mask), width, len(head.weight))
        tiles = zip(
            hidden,
            whole.expand(len(input_ids), width).flatten().split(size),
            samplers,
            tiled(named, width, size, count),
            tiled(kept, width, size, count),
            strict=True,
        )
        columns = [checkpoint(self._centre, head, *tile, use_reentrant=False) for tile in tiles]
        return Centre(*(torch.cat(parts).unflatten(0, (-1, width)) for parts in zip(*columns, strict=True)))

    def _centre(
        self,
        head: FusedHead,
        hidden: Tensor,
        advantages: Tensor,
        of_sampler: Tensor | None,
        named: TileTokens | None,
        kept: TileTokens | None,
    ) -> tuple[Tensor, Tensor]:
        log_p = self._log_softmax(logits_of(self._policy, hidden, head))
        support = None if kept is None else kept.support(log_p)
        log_p = among(support, log_p)
        with torch.no_grad():
            if of_sampler is not None:
                assert self._sampler is not None
                log_q = among(support, self._log_softmax(logits_of(self._sampler.model, of_sampler)))
                if self._top_k is not None:
                    logps, ids = log_q.topk(min(self._top_k, log_q.shape[-1]))
                    rows = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
                    named = TileTokens(rows, ids.flatten(), logps.flatten())
            if named is not None:
                log_q = _with_tail(log_p, named)
            mean = q = log_q.exp()
            if self._correction is not None:
                # Each position is a trajectory here, and each word of the vocabulary one of its tokens.
                # Those outside of the support, and of an empty tail, are not finite, and do not count.
                every = torch.ones_like(q, dtype=torch.bool)
                mean = q * self._correction(SampledTokens.of(log_p, log_q, every, advantages))
            gap = q - log_p.exp()
            drift = torch.stack([gap.abs().sum(-1) / 2, gap.norm(dim=-1)], -1)
        return (mean * (log_p if support is None else log_p.where(support, 0.0))).sum(-1), drift

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """Return log-probabilities in nats, float32 or wider, after the temperature."""
        return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature).log_softmax(-1)


def _with_tail(log_p: Tensor, named: TileTokens) -> Tensor:
    """Return log q of the vocabulary, shape (n, vocabulary): `named` as they are, and log ρ + log p for the tail."""
    assert named.logps is not None
    at, logps = (named.rows, named.ids), named.logps.to(log_p.dtype)
    zeros = log_p.new_zeros(len(log_p))
    mass_q, mass_p = (zeros.index_add(0, named.rows, values.exp()) for values in (logps, log_p[at]))
    ratio = (1 - mass_q).clamp(min=0) / (1 - mass_p).clamp(min=_LEAST_TAIL)
    return (log_p + ratio.log().unsqueeze(-1)).index_put(at, logps)


class CentredScore(Part):
    """Gives log π_train of the loss the centred score as its gradient; the values stay.

    A loss that multiplies the gradient w·s of a token by its advantage then has w·s − E_q[w·s] in its place, with its
    own clip and mean. The weights w of a correction are here, and not in the advantages, because the mean is taken
    away from tokens of weight 0 too.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        trainer.constraint.weighs_score = True
        replica, correction = trainer.sampler.replica, trainer.constraint.correction
        top_k, in_float32 = trainer.args.score_centering_top_k, trainer.args.cast_lm_head_to_fp32
        self._centering = ScoreCentering(
            trainer.model, replica, trainer.temperature, correction, top_k, in_float32=in_float32
        )

    def rollout(self, rollout):
        trainer = self.trainer
        if trainer.sampler.replica is None and rollout.logprobs is not None:
            rollout.columns |= Named.most_probable(rollout.logprobs, trainer.accelerator.device).columns("named")

    def scored(self, scores, inputs, input_ids, attention_mask, logits_to_keep):
        logps, *others = scores
        if not logps.requires_grad:
            return scores
        trainer = self.trainer
        with trainer.clock.part("constraint"):
            kept, named = (Named.of(inputs, kind) for kind in ("kept", "named"))
            centre = self._centering(input_ids, attention_mask, logits_to_keep, inputs["advantages"], kept, named)
            scored = loss_mask(inputs).bool()
            sums = torch.cat([centre.drift[scored].sum(0), scored.sum().unsqueeze(0)]).unsqueeze(0)
            variation, norm, count = trainer.accelerator.gather(sums).sum(0).tolist()
            trainer.add_metric("discrepancy/drift_tv", variation / max(count, 1))
            trainer.add_metric("discrepancy/drift_l2", norm / max(count, 1))
            weights = inputs.get("correction_weights")
            score = logps if weights is None else weights.to(logps.dtype) * logps
            centred = score - centre.score
        return (logps.detach() + (centred - centred.detach()), *others)
