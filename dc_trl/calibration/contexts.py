"""Tokens with the text around them, on one line, for a reader."""

from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from .result import TokenContext
from .rollouts import Rollout
from .tokens import ScoredTokens


def token_contexts(
    chosen: Iterable[int],
    tokens: ScoredTokens,
    prompts: Sequence[list[int]],
    rollouts: Sequence[Rollout],
    tokenizer: PreTrainedTokenizerBase,
) -> list[TokenContext]:
    """Tokens in their context.

    Args:
        chosen: places in the arrays of `tokens`.
        tokens, prompts, rollouts: where they stand; the samples of each prompt in a row.
        tokenizer: of the model.
    """
    first = {rollout.prompt: index for index, rollout in reversed(list(enumerate(rollouts)))}
    p, q = np.exp(tokens.train), np.exp(tokens.infer)
    contexts = []
    for index in chosen:
        number, place = int(tokens.trajectory[index]), int(tokens.position[index])
        rollout = rollouts[number]
        before = [*prompts[rollout.prompt], *rollout.ids[:place]][-40:]
        contexts.append(
            TokenContext(
                prompt=rollout.prompt,
                sample=number - first[rollout.prompt],
                position=place,
                token=visible_token(tokenizer, rollout.ids[place]),
                before=visible(tokenizer.decode(before))[-48:],
                after=visible(tokenizer.decode(rollout.ids[place + 1 : place + 25]))[:24],
                train=float(p[index]),
                infer=float(q[index]),
                delta=float(tokens.delta[index]),
            )
        )
    return contexts


def visible(text: str) -> str:
    """Text on one line: line ends and tabs as ↵ and ⇥, other characters that do not print as escapes."""
    signs = {"\n": "↵", "\t": "⇥"}
    return "".join(signs.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)


def visible_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token's text with its spaces as ␣; where it is a part of a character, its name in the vocabulary."""
    text = tokenizer.decode([token])
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return str(tokenizer.convert_ids_to_tokens(token))
    return visible(text).replace(" ", "␣")
