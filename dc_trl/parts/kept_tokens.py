"""Truncated sampling (top-p, top-k, min-p), with the trainer's log-probabilities among the same tokens.

An engine that truncates samples from its distribution renormalised over the tokens that it kept, K. The policy that
acts is then π(y | K) = exp(z_y) / Σ_{v ∈ K} exp(z_v), with z the logits over the temperature. Both engines'
log-probabilities are taken over the same K, so that their discrepancy does not contain the truncation. Where a
constraint or a correction acts on it, the loss has the gradient of log π(y | K) with K fixed; where it is measured
alone, the loss keeps its log-probabilities of the whole vocabulary. DeepSeek-V3.2 calls this "Keep Sampling Mask"
(arXiv 2512.02556, section 3.1), prime-rl "sampling replay", vLLM "sampling distribution replay".
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from trl.trainer.utils import pad

from ..quantization.head import FusedHead, logits_of
from ..quantization.policy import base_model, unwrapped
from ..sampling.named_tokens import KeptLogProb, NamedLogProb
from ..settings.neutral_sampling import TRUNCATIONS, restriction_warning
from .part import Part


logger = get_logger(__name__)

_REMEDY = (
    "set top_k too with a vLLM engine (at most 20 with vllm_mode='colocate'), return KeptLogProb from rollout_func, "
    "or sample without truncation"
)
_TILE = 2**26  # number of logits that are held at a time: 256 MiB in float32
_LogProbs = list[list[float | None]]  # of the tokens of completions, in nats; None is NaN


class Named(NamedTuple):
    """Tokens that the engine named for a batch of completions: those that it kept, or its most probable ones."""

    ids: Tensor  # (batch, width), int32: the named tokens of a completion, position by position, then -1
    counts: Tensor  # (batch, positions), int32: number of named tokens at a position; 0 where nothing was truncated
    logps: Tensor | None = None  # (batch, width), float32, nats: log-probabilities of `ids`, then 0; of the latter

    @classmethod
    def of(cls, batch: Mapping[str, Any], kind: str) -> "Named | None":
        """Return the tokens of a kind, `"kept"` or `"named"`, whose `columns` a batch has; None where it has none."""
        if f"{kind}_ids" not in batch:
            return None
        logps = batch["named_logps"] if kind == "named" else None
        return cls(batch[f"{kind}_ids"], batch[f"{kind}_counts"], logps)

    def columns(self, kind: str) -> dict[str, Tensor]:
        """Return the tokens as columns of a batch."""
        found = {"ids": self.ids, "counts": self.counts, "logps": self.logps}
        return {f"{kind}_{name}": value for name, value in found.items() if value is not None}

    @classmethod
    def kept(cls, logprobs: _LogProbs, device: torch.device) -> "Named | None":
        """Return the kept tokens from the log-probabilities of completions; None where none is a `KeptLogProb`."""
        named = _named(logprobs)
        return None if named is None else cls(*(each.to(device) for each in named))

    @classmethod
    def most_probable(cls, logprobs: _LogProbs, device: torch.device) -> "Named":
        """Return the most probable tokens and their log-probabilities from the log-probabilities of completions.

        Raises:
            ValueError: no log-probability is a `NamedLogProb` with the log-probabilities of its tokens.
        """
        named = _named(logprobs)
        rows = [[value.logps for value in row if isinstance(value, NamedLogProb)] for row in logprobs]
        if named is None or any(logps is None for row in rows for logps in row):
            raise ValueError(
                "score_centering=True reads the sampler's most probable tokens, and the rollouts do not name them: "
                "return logprobs of type dc_trl.sampling.named_tokens.NamedLogProb, with their log-probabilities, "
                "from rollout_func, or set score_centering=False."
            )
        flat = [torch.cat([torch.empty(0), *(logps for logps in row if logps is not None)]) for row in rows]
        return cls(*(each.to(device) for each in (*named, _padded(flat, 0.0))))


def _named(logprobs: _LogProbs) -> tuple[Tensor, Tensor] | None:
    """Return `ids` and `counts` as in `Named`; None where tokens were sampled and none is named."""
    none = torch.empty(0, dtype=torch.int32)
    rows = [[value.tokens if isinstance(value, NamedLogProb) else none for value in row] for row in logprobs]
    counts = _padded([torch.tensor(list(map(len, row)), dtype=torch.int32) for row in rows], 0)
    if not counts.any() and not all(value is None or math.isnan(value) for row in logprobs for value in row):
        return None
    return _padded([torch.cat([none, *row]) for row in rows], -1), counts


class TileTokens(NamedTuple):
    """Tokens of a tile of positions: row in the tile and id, int64, and log-probability in nats, if known, of each."""

    rows: Tensor
    ids: Tensor
    logps: Tensor | None

    def support(self, logits: Tensor) -> Tensor:
        """Return which tokens these are, shape (n, vocabulary) of `logits`: all at a position that names none."""
        support = torch.zeros_like(logits, dtype=torch.bool)
        support[self.rows, self.ids] = True
        return support | ~support.any(-1, keepdim=True)


def among(support: Tensor | None, logits: Tensor) -> Tensor:
    """Return log-probabilities of the vocabulary among the tokens of `support`, minus infinity outside; None: all.

    Args:
        support: which tokens count, bool, shape (n, vocabulary).
        logits: logits or log-probabilities, shape (n, vocabulary); with None they have to be the latter.
    """
    return logits if support is None else logits.masked_fill(~support, -torch.inf).log_softmax(-1)


def tiles_of(hidden: Tensor, width: int, vocabulary: int) -> tuple[Tensor, ...]:
    """Return the hidden states that predict the last `width` tokens of each row, as tiles of shape (n, channels)."""
    return hidden[:, -width - 1 : -1].flatten(0, 1).split(max(1, _TILE // vocabulary))


def tiled(tokens: Named | None, width: int, size: int, count: int) -> list[TileTokens | None]:
    """Return the tokens at the positions of each of `count` tiles of `size` positions of the flattened batch."""
    if tokens is None:
        return [None] * count
    positions, ids = flat(tokens, width)
    sizes = torch.bincount(positions // size, minlength=count).tolist()  # the positions ascend
    logps = [None] * count if tokens.logps is None else tokens.logps[tokens.ids >= 0].split(sizes)
    return list(map(TileTokens, (positions % size).split(sizes), ids.split(sizes), logps))


class KeptHead:
    """Computes log-probabilities among the kept tokens, from the hidden states of TRL's forward passes.

    TRL's fused head returns log-probabilities of the whole vocabulary, and no logits. This context hooks the backbone
    below the head, which every forward calls, also under PEFT, and computes the logits once more, tile by tile, and
    again in the backward pass.

    Args:
        model: the transformers model, without the PEFT model around it.
        kept: kept tokens of the completions that the forward passes will score, in their order.
        completion_ids: sampled tokens, shape (batch, positions).
        temperature: divisor of the logits.
        in_float32: whether the output head runs in float32 (`cast_lm_head_to_fp32`).
        gradient: whether the log-probabilities have the gradient of the forward passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kept: Named,
        completion_ids: Tensor,
        temperature: float,
        in_float32: bool,
        gradient: bool = True,
    ):
        self._model, self._kept, self._completion_ids = model, kept, completion_ids
        self._temperature, self._in_float32 = temperature, in_float32
        self._hook = self._score if gradient else torch.no_grad()(self._score)
        self._scored: list[Tensor] = []

    def __enter__(self) -> "KeptHead":
        self._handle = self._model.base_model.register_forward_hook(self._hook)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def log_probs(self, whole: Tensor) -> Tensor:
        """Return log-probabilities among the kept tokens; where nothing was truncated, those of the whole vocabulary.

        Args:
            whole: TRL's log-probabilities of the same tokens, shape (batch, positions), in nats.

        Returns:
            Log-probabilities in nats, shape of `whole`, float32.
        """
        counts = functional.pad(self._kept.counts, (0, whole.shape[1] - self._kept.counts.shape[1]))
        return torch.where(counts > 0, torch.cat(self._scored), whole)

    def _score(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # The hook runs within the forward of the whole model, when sharded weights are gathered and autocast is on.
        hidden = output.last_hidden_state
        start = sum(map(len, self._scored))
        rows = slice(start, start + len(hidden))
        sampled = self._completion_ids[rows]
        head = FusedHead(self._model.get_output_embeddings(), hidden, self._in_float32)
        tiles = tiles_of(hidden, sampled.shape[1], len(head.weight))
        size = len(tiles[0])
        kept = tiled(Named(self._kept.ids[rows], self._kept.counts[rows]), sampled.shape[1], size, len(tiles))
        scored = [
            checkpoint(self._among, head, *tile, use_reentrant=False)
            for tile in zip(tiles, kept, sampled.flatten().split(size), strict=True)
        ]
        self._scored.append(torch.cat(scored).view(sampled.shape))

    def _among(self, head: FusedHead, hidden: Tensor, kept: TileTokens, sampled: Tensor) -> Tensor:
        """Return the log-probability of each sampled token among the kept ones, shape (n,), in nats."""
        logits = logits_of(self._model, hidden, head) / self._temperature
        return among(kept.support(logits), logits).gather(1, sampled.unsqueeze(1)).squeeze(1)


def _padded(rows: list[Tensor], value: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def flat(kept: Named, width: int) -> tuple[Tensor, Tensor]:
    """Return the positions in the flattened batch (row · width + column) and the ids of all tokens: int64, (all,)."""
    rows, columns = kept.counts.shape
    starts = torch.arange(rows, device=kept.ids.device)[:, None] * width
    positions = starts + torch.arange(columns, device=kept.ids.device)
    return positions.flatten().repeat_interleave(kept.counts.flatten()), kept.ids[kept.ids >= 0].long()


class KeptTokens(Part):
    """Takes the trainer's log-probabilities among the tokens that the engine kept.

    Where a constraint, a correction or score centering acts on the discrepancy, the loss has them too. Elsewhere it is
    TRL's, and the batch gets both engines' log-probabilities among the kept tokens in columns of their own, shape
    (B, T), nats: `kept_logps` of the sampler, `compared_logps` of the policy.

    Raises:
        ValueError: something acts on the discrepancy, and the rollouts do not say which tokens were kept.
    """

    def rollout(self, rollout):
        trainer, logprobs = self.trainer, rollout.logprobs
        if logprobs is None:
            return
        args, device, restrictions = trainer.args, trainer.accelerator.device, trainer.constraint.restrictions
        kept = Named.kept(logprobs, device)
        if kept is None:
            if args.compared_by is not None:
                raise ValueError(
                    "The rollouts were sampled with truncation (top_p, top_k or min_p), and do not say which tokens "
                    "were kept: return logprobs of type dc_trl.sampling.named_tokens.KeptLogProb from rollout_func, "
                    f"set top_p=1.0, top_k=0 and min_p=None, or {args.without_comparison}."
                )
            if not args.truncations.keys() <= restrictions.keys():
                logger.warning(restriction_warning(args.truncations, _REMEDY))
            trainer.constraint.restrictions = restrictions | args.truncations
            return
        trainer.constraint.restrictions = {name: restrictions[name] for name in restrictions.keys() - TRUNCATIONS}
        rollout.columns |= kept.columns("kept")
        if args.compared_by is None:  # the loss is TRL's
            rows = [torch.tensor([math.nan if value is None else value for value in row]) for row in logprobs]
            padded = pad(rows, 0, "right", trainer.pad_to_multiple_of)
            rollout.columns["kept_logps"] = padded.to(device)
            rollout.logprobs = [
                [value.reported if isinstance(value, KeptLogProb) else value for value in row] for row in logprobs
            ]

    def forward(self, score, model, inputs, *tokens, **options):
        kept = Named.of(inputs, "kept")
        if kept is None:
            return score(*tokens, **options)
        trainer = self.trainer
        measured = "kept_logps" in inputs  # and no more: the loss is TRL's
        policy = base_model(unwrapped(trainer.accelerator, model))
        input_ids, _, logits_to_keep, *_ = tokens
        completion_ids, in_float32 = input_ids[:, -logits_to_keep:], trainer.args.cast_lm_head_to_fp32
        with KeptHead(policy, kept, completion_ids, trainer.temperature, in_float32, gradient=not measured) as head:
            scores = score(*tokens, **options)
        if not measured:
            return (head.log_probs(scores[0]), *scores[1:])
        inputs.setdefault("compared_logps", head.log_probs(scores[0].detach()))  # before any reference model's
        return scores

    def batch(self, batch):
        if "old_per_token_logps" not in batch:
            batch.pop("compared_logps", None)  # of the reference model
