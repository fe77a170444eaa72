"""A discrepancy split into causes that can be switched off one at a time: Shapley values over all sets of switches.

With v(S) the discrepancy δ̄ that is left when the causes S are removed, the share of cause i among n is

    φ_i = Σ_{S ∌ i} |S|! (n − |S| − 1)! / n! · (v(S) − v(S ∪ {i}))

which is the mean, over all orders of removing the causes one after another, of what removing i takes away (Shapley,
"A Value for n-Person Games", 1953). δ is an absolute difference and does not add up, so that what a cause takes away
depends on what is gone before; the mean over all orders prefers none. The shares and what no cause explains, v(N), add
up to v(∅) = δ̄ by construction.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import TypeAlias

import numpy as np

from .mismatch import ratio_estimate
from .result import Split
from .tokens import Array, Ratio


Causes: TypeAlias = frozenset[str]


def subsets(causes: Sequence[str]) -> Iterator[Causes]:
    """All sets of causes, the empty one first."""
    for size in range(len(causes) + 1):
        yield from map(frozenset, combinations(causes, size))


def shapley_weights(causes: Sequence[str], cause: str) -> dict[Causes, float]:
    """What each v(S) counts in φ of a cause."""
    weights = {}
    for others in subsets([name for name in causes if name != cause]):
        weight = 1 / (len(causes) * comb(len(causes) - 1, len(others)))
        weights[others], weights[others | {cause}] = weight, -weight
    return weights


def split_discrepancy(left: Mapping[Causes, Ratio], causes: Sequence[str], seed: int) -> Split:
    """δ̄ by its causes, with errors.

    φ is linear in v, so that it is a ratio of sums over prompts as δ̄ is. All estimates draw the same prompts, and the
    shares add up in every draw.

    Args:
        left: v(S) for each set of causes, by prompt; all with the same denominators.
        causes: at least one.
        seed: of the bootstrap.
    """
    denominators = left[frozenset()][1]
    shares = {}
    for cause in causes:
        weights = shapley_weights(causes, cause)
        numerators: Array = np.sum([weight * left[removed][0] for removed, weight in weights.items()], axis=0)
        shares[cause] = ratio_estimate(numerators, denominators, seed)
    estimates = {removed: ratio_estimate(*left[removed], seed) for removed in subsets(causes)}
    return Split(
        whole=estimates[frozenset()],
        shares=shares,
        unexplained=estimates[frozenset(causes)],
        left={" + ".join(filter(removed.__contains__, causes)): value for removed, value in estimates.items()},
    )
