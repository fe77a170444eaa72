"""Log-probabilities of sampled tokens, with the tokens that an engine named at their positions.

TRL splits and joins the log-probabilities of completions as lists of floats, which keep these types. Those of kept
tokens are what a `rollout_func` returns under truncated sampling; see `dc_trl.parts.kept_tokens`.
"""

import math
from typing import Self

import torch
from torch import Tensor


# vLLM's server writes this for minus infinity.
_NEVER = -9999.0


class NamedLogProb(float):
    """Log-probability of a sampled token, in nats, with tokens that the engine named at its position.

    TRL splits and joins completions as lists of floats, which keep this type.

    Attributes:
        tokens: ids of the named tokens, int32 of shape (n,); with or without the sampled one.
        logps: log-probabilities of `tokens` under the engine, nats, float32 of shape (n,); None if unknown.
    """

    tokens: Tensor
    logps: Tensor | None

    def __new__(cls, value: float, tokens: Tensor, logps: Tensor | None = None) -> Self:
        self = super().__new__(cls, value)
        self.tokens, self.logps = tokens, logps
        return self


class KeptLogProb(NamedLogProb):
    """Log-probability of a sampled token among the tokens that the engine kept.

    `tokens` are all of these, with the sampled one, and `logps` are among them too.

    Attributes:
        reported: log-probability that the engine itself reports, in nats, where it is another number: of the whole
            vocabulary, or before `named_by_vllm`.
    """

    reported: float

    def __new__(cls, value: float, tokens: Tensor, reported: float | None = None, logps: Tensor | None = None) -> Self:
        self = super().__new__(cls, value, tokens, logps)
        self.reported = value if reported is None else reported
        return self


def named_by_vllm(
    completion_ids: list[list[int]],
    logprobs: list[list[list[float | None]]],
    token_ids: list[list[list[int]]],
    most: int,
    truncated: bool,
) -> list[list[list[float]]]:
    """Return log-probabilities of sampled tokens with the most probable tokens that vLLM returned.

    With `logprobs=k`, vLLM returns the k most probable tokens, and the sampled one. Under truncated sampling these are
    the tokens that it kept: in its `processed_logprobs`, those that top-p or min-p dropped are minus infinity, and
    where several tokens share the k-th place, it keeps all of them and returns k and the sampled one. The
    log-probabilities are then taken among the returned ones: the same conditional probability in both engines.

    Args:
        completion_ids: sampled tokens of each completion.
        logprobs, token_ids: log-probabilities at each position of each completion, in nats, from the most probable
            token on, and their tokens; None is NaN.
        most: k.
        truncated: whether top-p, top-k or min-p truncate sampling.

    Returns:
        One `KeptLogProb` for each token of each completion or, without truncation, one `NamedLogProb` (NaN without
        tokens where vLLM has NaN), nested as TRL nests the log-probability of the sampled token alone.
    """
    return [
        [[_named_by_vllm(most, truncated, *token)] for token in zip(*completion, strict=True)]
        for completion in zip(completion_ids, logprobs, token_ids, strict=True)
    ]


def _named_by_vllm(
    most: int, truncated: bool, sampled: int, logprobs: list[float | None], token_ids: list[int]
) -> float:
    values = [value for value in logprobs if value is not None]
    if len(values) < len(logprobs):
        return math.nan
    tokens, at = torch.tensor(token_ids, dtype=torch.int32), token_ids.index(sampled)
    if not truncated:
        # Which tokens are named must not depend on the one that was sampled: that one is named if it is among the k.
        # Where it is not, it comes beside them, and with the log-probability of the k-th, before that.
        named = [place for place in range(len(values)) if place != at or len(values) <= most]
        return NamedLogProb(values[at], tokens[named], torch.tensor(values)[named])
    logps = torch.tensor(values, dtype=torch.float64)
    among = logps.masked_fill(logps <= _NEVER, -torch.inf).log_softmax(0)
    kept = among > -torch.inf
    return KeptLogProb(among[at].item(), tokens[kept], values[at], among[kept].float())
