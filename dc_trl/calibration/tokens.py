"""The tokens that an engine sampled and both sides gave a probability, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..constraint.discrepancy import token_discrepancy
from ..constraint.settings import Measure
from .rollouts import Rollout, sampled_logps


Array = NDArray[np.float64]
Integers = NDArray[np.int_]
Ratio = tuple[Array, Array]  # numerator and denominator of a mean, for each prompt; shape (prompts,)


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens with finite log-probabilities from both sides, one after another: arrays of shape (tokens,)."""

    train: Array  # log π_train, nats
    infer: Array  # log π_inf, nats
    delta: Array  # discrepancy δ
    trajectory: Integers  # number of the rollout that the token belongs to
    position: Integers  # in its completion, from 0; tokens without log-probabilities count too
    prompt_of: Integers  # number of each rollout's prompt, shape (rollouts,)
    prompts: int  # how many there are

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], train: Sequence[Tensor], prompts: int, measure: Measure
    ) -> "ScoredTokens":
        """The tokens of rollouts; `train` is log π_train of each rollout's tokens, shape (tokens,)."""
        a = torch.cat([logps.double() for logps in train])
        b = torch.cat(sampled_logps(rollouts))
        lengths = np.array([len(rollout.ids) for rollout in rollouts])
        trajectory = np.repeat(np.arange(len(rollouts)), lengths)
        position = np.arange(len(a)) - np.repeat(lengths.cumsum() - lengths, lengths)
        scored = a.isfinite() & b.isfinite()
        a, b, kept = a[scored], b[scored], scored.numpy()
        delta = token_discrepancy(a, b, measure)
        prompt_of = np.array([rollout.prompt for rollout in rollouts])
        return cls(a.numpy(), b.numpy(), delta.numpy(), trajectory[kept], position[kept], prompt_of, prompts)

    @cached_property
    def prompt(self) -> Integers:
        """Number of each token's prompt."""
        return self.prompt_of[self.trajectory]

    @cached_property
    def counts(self) -> Integers:
        """Tokens of each rollout, shape (rollouts,)."""
        return np.bincount(self.trajectory, minlength=len(self.prompt_of))

    @cached_property
    def alive(self) -> NDArray[np.bool_]:
        """Whether a rollout has a token here, shape (rollouts,)."""
        return self.counts > 0

    def trajectory_sums(self, values: Array) -> Array:
        """Sum over the tokens of each rollout that has some, shape (alive,)."""
        return np.bincount(self.trajectory, values, len(self.prompt_of)).astype(float)[self.alive]

    def trajectory_means(self, values: Array) -> Array:
        """Mean over the tokens of each rollout that has some, shape (alive,)."""
        return self.trajectory_sums(values) / self.counts[self.alive]

    def mean_of_tokens(self, values: Array) -> Ratio:
        """By prompt the sum of the tokens' values, and how many they are."""
        return self._by_prompt(values, self.prompt)

    def mean_of_trajectories(self, values: Array) -> Ratio:
        """By prompt the sum of its rollouts' values, shape (alive,), and how many they are."""
        return self._by_prompt(values, self.prompt_of[self.alive])

    def _by_prompt(self, values: Array, prompt: Integers) -> Ratio:
        sums = np.bincount(prompt, values, self.prompts).astype(float)
        return sums, np.bincount(prompt, minlength=self.prompts).astype(float)
