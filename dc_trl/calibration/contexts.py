"""Tokens with the text around them, on one line, for a reader."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from .result import TokenContext
from .rollouts import Rollout


Array = NDArray[np.float64]


def token_contexts(
    chosen: NDArray[np.int_],
    trajectory: NDArray[np.int_],
    position: NDArray[np.int_],
    p: Array,
    q: Array,
    delta: Array,
    prompts: Sequence[list[int]],
    rollouts: Sequence[Rollout],
    tokenizer: PreTrainedTokenizerBase,
) -> list[TokenContext]:
    first = {rollout.prompt: index for index, rollout in reversed(list(enumerate(rollouts)))}
    contexts = []
    for index in chosen:
        number, place = int(trajectory[index]), int(position[index])
        rollout = rollouts[number]
        before = [*prompts[rollout.prompt], *rollout.ids[:place]][-40:]
        contexts.append(
            TokenContext(
                rollout.prompt,
                number - first[rollout.prompt],
                place,
                visible_token(tokenizer, rollout.ids[place]),
                visible(tokenizer.decode(before))[-48:],
                visible(tokenizer.decode(rollout.ids[place + 1 : place + 25]))[:24],
                float(p[index]),
                float(q[index]),
                float(delta[index]),
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
