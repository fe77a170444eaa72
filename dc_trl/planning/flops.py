"""Floating-point operations, two for a multiplication with its addition; the formulas are those of docs/planning.md.

Elementwise operations, norms and the embedding's look-up are left out.
"""

from typing import NamedTuple

from .architecture import Architecture
from .lengths import Moments


class Flops(NamedTuple):
    """Of the matrices that every token meets, of attention's scores and sums, and of the output head."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head


def sequence_moments(prompt: float, completion: Moments) -> Moments:
    """E[S] and E[S²] of sequences S = prompt + completion, with prompts of one length."""
    return Moments(prompt + completion.first, prompt**2 + 2 * prompt * completion.first + completion.second)


def forward_flops(model: Architecture, sequence: Moments, scored: float, causal: bool = True) -> Flops:
    """Of one forward over one sequence.

    Args:
        model: sizes.
        sequence: tokens of the sequence and their square, or their means over sequences.
        scored: tokens that the output head is computed for.
        causal: attention skips what a token does not see, as fused kernels do; scores of all pairs otherwise.
    """
    pairs = sequence.second / 2 if causal else sequence.second
    attention = 0.0
    for window in model.windows:
        seen = pairs if window is None else min(pairs, sequence.first * window)
        attention += 4 * model.query_width * seen
    return Flops(2 * model.active_linear * sequence.first, attention, 2 * model.head_parameters * scored)


def training_flops(
    model: Architecture,
    sequence: Moments,
    scored: float,
    *,
    checkpointing: bool,
    fused_head: bool = True,
    causal: bool = True,
) -> Flops:
    """Of forward and backward over one sequence.

    Args:
        model, sequence, scored, causal: see `forward_flops`.
        checkpointing: layers are computed again in backward.
        fused_head: TRL's output head in tiles, which computes its logits again in backward.
    """
    forward = forward_flops(model, sequence, scored, causal)
    layers, head = 4 if checkpointing else 3, 4 if fused_head else 3
    return Flops(layers * forward.linear, layers * forward.attention, head * forward.head)


def generation_flops(model: Architecture, prompt: float, completion: Moments, generations: int) -> Flops:
    """Of sampling one completion with a cache, and its share of a prompt that is read once for all of a group."""
    whole = forward_flops(model, sequence_moments(prompt, completion), completion.first)
    read = forward_flops(model, Moments(prompt, prompt**2), 0.0)
    saved = 1 - 1 / generations
    return Flops(whole.linear - saved * read.linear, whole.attention - saved * read.attention, whole.head)
