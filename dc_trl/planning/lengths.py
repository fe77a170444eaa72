"""How long completions are, and what a batch of them computes: order statistics of a log-normal distribution."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from ..settings.ranges import ABOVE_0, AT_LEAST_0, COUNT, require_number


# How far completions are padded: to the longest of the generation batch (TRL 1.16), of each micro-batch, or of a
# micro-batch of similar lengths.
Batching = Literal["generation_batch", "micro_batch", "by_length"]
BATCHINGS: tuple[Batching, ...] = ("generation_batch", "micro_batch", "by_length")
_GRID = 1024  # points at which order statistics are integrated


class Moments(NamedTuple):
    """Means over completions of the length and of its square, in tokens and tokens²."""

    first: float
    second: float


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths of completions, cut off at a largest one.

    X = min(exp(μ + σZ), cap) with Z normal and μ = ln(mean) − σ²/2, so that `mean` is that before the cut.

    Args:
        mean: tokens.
        sigma: standard deviation of the logarithm, ≥ 0; 0 is one length for all.
        cap: the longest, tokens.

    Raises:
        ValueError: a number out of its range.
    """

    mean: float
    sigma: float
    cap: int

    def __post_init__(self) -> None:
        require_number("mean_length", self.mean, ABOVE_0)
        require_number("length_sigma", self.sigma, AT_LEAST_0)
        require_number("max_completion_length", self.cap, COUNT)

    @cached_property
    def survival(self) -> np.ndarray:
        """P(X ≥ t + ½) for t = 0 … cap − 1: the share of completions that is still being sampled after t tokens."""
        return self._survival(np.arange(self.cap) + 0.5)

    def _survival(self, t: np.ndarray) -> np.ndarray:
        if self.sigma == 0:
            return (t < self.mean).astype(float)
        z = (np.log(t) - math.log(self.mean) + self.sigma**2 / 2) / self.sigma
        return 0.5 * np.vectorize(math.erfc)(z / math.sqrt(2))

    @cached_property
    def moments(self) -> Moments:
        """E[X] and E[X²], by E[X^p] = ∫ p t^(p−1) P(X > t) dt."""
        return self._moments_of(self.survival, 1.0)

    def largest_of(self, count: int) -> Moments:
        """E[M] and E[M²] of the longest M of so many completions: P(M > t) = 1 − (1 − P(X > t))^count."""
        return self._moments_of(1 - (1 - self.survival) ** count, 1.0)

    def computed(self, batching: Batching, generation: int, step: int, micro: int) -> Moments:
        """What is computed for each completion, padding included: the means over completions of padded lengths.

        Args:
            batching: how far completions are padded.
            generation: completions of a generation batch.
            step: completions of an optimizer step.
            micro: completions of a micro-batch on one device.
        """
        if batching == "generation_batch":
            return self.largest_of(generation)
        if batching == "micro_batch":
            return self.largest_of(micro)
        return self._sorted(step, micro)

    def _sorted(self, step: int, micro: int) -> Moments:
        """Of micro-batches that are cut from the completions of a step in order of length.

        The longest of a micro-batch is the k-th smallest of the step, k = micro, 2·micro, …, and
        P(X₍ₖ₎ > t) = P(Binomial(step, P(X ≤ t)) < k).
        """
        width = self.cap / min(_GRID, self.cap)
        shorter = 1 - self._survival((np.arange(min(_GRID, self.cap)) + 0.5) * width)
        at_least_k_above = _binomial_cdf(step, shorter)  # row j: P(at most j of them are shorter)
        ends = [min(k, step) for k in range(micro, step + micro, micro)]
        sizes = np.diff([0, *ends])
        mean = sum(size * at_least_k_above[k - 1] for k, size in zip(ends, sizes, strict=True)) / step
        return self._moments_of(mean, width)

    @staticmethod
    def _moments_of(survival: np.ndarray, width: float) -> Moments:
        t = (np.arange(len(survival)) + 0.5) * width
        return Moments(float(survival.sum() * width), float((2 * t * survival).sum() * width))


def _binomial_cdf(n: int, p: np.ndarray) -> np.ndarray:
    """P(Binomial(n, p) ≤ j), rows j = 0 … n."""
    j = np.arange(n + 1)[:, None]
    logs = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    choose = (logs[n] - logs - logs[::-1])[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        # 0 · log 0 is 0 here: what cannot happen zero times has happened.
        first = np.where(j == 0, 0.0, j * np.log(p))
        second = np.where(j == n, 0.0, (n - j) * np.log1p(-p))
    return np.minimum(np.exp(choose + first + second).cumsum(0), 1.0)
