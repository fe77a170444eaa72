"""What one engine's log-probabilities say against the model's: means and percentiles, errors over prompts, and ε.

Throughout, a = log π_train and b = log π_inf of the same sampled tokens, and d = a − b. Completions of one prompt are
not independent, so every interval comes from a bootstrap that draws whole prompts, and every standard error is
clustered by prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..constraint.discrepancy import token_discrepancy
from ..constraint.settings import Measure, Reduction
from ..constraint.tolerance import tolerance_deviations
from ..records.estimators import Estimate
from .result import GRID, EngineMismatch, Tolerance
from .rollouts import EngineSample, Rollout, sampled_logps
from .settings import CalibrationSettings


Array = NDArray[np.float64]
Integers = NDArray[np.int_]
Ratio = tuple[Array, Array]  # numerator and denominator of a mean for each prompt, both of shape (prompts,)

RESAMPLES = 1000  # of the prompts, for every interval
BATCHES = 2000  # generation batches that the rule for ε draws
_PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
_FEW_PROMPTS = 32  # with fewer, the interval of a bootstrap is too narrow
_SAME_WEIGHTS = 0.9  # correlation of probabilities below which the engine hardly runs the model's weights


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens with finite log-probabilities from both sides, one after another: arrays of shape (tokens,)."""

    train: Array  # log π_train, nats
    infer: Array  # log π_inf, nats
    delta: Array  # discrepancy δ
    trajectory: Integers  # number of the rollout that the token belongs to
    prompt_of: Integers  # number of each rollout's prompt, shape (rollouts,)
    prompts: int  # number of prompts

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        train: Sequence[Tensor],
        infer: Sequence[Tensor],
        prompts: int,
        measure: Measure,
    ) -> "ScoredTokens":
        """Collect the tokens of rollouts, with both log-probabilities of each rollout's tokens, shape (tokens,)."""
        a, b = (torch.cat([logps.double() for logps in each]) for each in (train, infer))
        trajectory = np.repeat(np.arange(len(rollouts)), [len(rollout.ids) for rollout in rollouts])
        scored = a.isfinite() & b.isfinite()
        a, b, kept = a[scored], b[scored], scored.numpy()
        delta = token_discrepancy(a, b, measure)
        prompt_of = np.array([rollout.prompt for rollout in rollouts])
        return cls(a.numpy(), b.numpy(), delta.numpy(), trajectory[kept], prompt_of, prompts)

    def mean_of_tokens(self, values: Array) -> Ratio:
        """Return by prompt the sum of the tokens' values, and their number."""
        return self._by_prompt(values, self.prompt_of[self.trajectory])

    def mean_of_trajectories(self, values: Array) -> Ratio:
        """Return by prompt the sum over rollouts of |mean of their tokens' values|, and the number of rollouts.

        Rollouts without a scored token do not count.
        """
        counts = np.bincount(self.trajectory, minlength=len(self.prompt_of))
        alive = counts > 0
        means = np.bincount(self.trajectory, values, len(counts))[alive] / counts[alive]
        return self._by_prompt(np.abs(means), self.prompt_of[alive])

    def batch_discrepancy(self, reduction: Reduction) -> Ratio:
        """Return δ̄ by prompt."""
        mean = self.mean_of_trajectories if reduction == "sequence" else self.mean_of_tokens
        return mean(self.delta)

    def _by_prompt(self, values: Array, prompt: Integers) -> Ratio:
        sums = np.bincount(prompt, values, self.prompts).astype(float)
        return sums, np.bincount(prompt, minlength=self.prompts).astype(float)


def measure_engine(
    sample: EngineSample, train: Sequence[Tensor], prompts: int, settings: CalibrationSettings
) -> EngineMismatch:
    """Measure everything about one engine; `train` is log π_train of each rollout's tokens, shape (tokens,).

    Raises:
        ValueError: fewer than two prompts have a token with both log-probabilities.
    """
    rollouts, seed = sample.rollouts, settings.seed
    infer = sampled_logps(rollouts)
    tokens = ScoredTokens.of(rollouts, train, infer, prompts, settings.measure)
    d = tokens.train - tokens.infer
    ratios = {
        "discrepancy": tokens.batch_discrepancy(settings.reduction),
        "k3_kl": tokens.mean_of_tokens(np.expm1(d) - d),
    }
    numerators, denominators = ratios["discrepancy"]
    if (there := int((denominators > 0).sum())) < 2:
        raise ValueError(
            f"engine={sample.engine!r}: {there} of {prompts} prompts have completions with log-probabilities from "
            "both sides, and a spread needs at least two: use more prompts or samples."
        )
    lengths = [len(rollout.ids) for rollout in rollouts]
    with np.errstate(invalid="ignore", divide="ignore"):  # of equal probabilities there is none
        pearson = float(np.corrcoef(np.exp(tokens.train), np.exp(tokens.infer))[0, 1])
    result = EngineMismatch(
        engine=sample.engine,
        precision=sample.precision,
        prompts=prompts,
        completions=len(rollouts),
        tokens=len(d),
        unscored=sum(lengths) - len(d),
        empty=lengths.count(0),
        truncated=sum(rollout.truncated for rollout in rollouts),
        estimates={name: ratio_estimate(*ratio, seed) for name, ratio in ratios.items()},
        percentiles={f"{p:g}": float(np.percentile(tokens.delta, p)) for p in _PERCENTILES},
        joint=_joint(np.exp(tokens.infer), np.exp(tokens.train)),
        pearson=pearson,
        tolerance=batch_tolerance(numerators, denominators, settings.batch_prompts, seed),
        notes=[],
    )
    return result._replace(notes=_notes(result, settings.batch_prompts))


def batch_tolerance(numerators: Array, denominators: Array, batch_prompts: int, seed: int = 0) -> Tolerance:
    """Return ε by the rule of `proposed_tolerance`, from batches drawn from the prompts with replacement.

    A batch's δ̄ is the sum of its prompts' numerators over that of their denominators. However many batches are drawn,
    P prompts make P / `batch_prompts` independent ones, and their spread has P − 1 degrees of freedom: with these ε
    promises what that rule does. The interval is that of a bootstrap: the prompts are drawn anew, and the whole rule
    is applied to each draw.

    Args:
        numerators, denominators: of δ̄ for each prompt, shape (P,); prompts with a denominator of 0 are left out.
        batch_prompts: prompts of a batch.
        seed: of the draws.
    """
    kept = denominators > 0
    numerators, denominators = numerators[kept], denominators[kept]
    size = len(numerators)
    rng = np.random.default_rng(seed)
    batches = rng.multinomial(batch_prompts, [1 / size] * size, BATCHES).astype(float)
    observed = (batches @ numerators) / (batches @ denominators)
    draws = rng.integers(size, size=(RESAMPLES, size))
    # Every draw uses the same batches of places, so that two draws differ by their prompts alone.
    resampled = (batches @ numerators[draws].T) / (batches @ denominators[draws].T)
    # The batches scatter by the variance over P, not over P − 1, because they are drawn with replacement.
    deviations = tolerance_deviations(size - 1, size / batch_prompts) * math.sqrt(size / (size - 1))
    low, high = np.quantile(resampled.mean(0) + deviations * resampled.std(0, ddof=1), [0.025, 0.975])
    mean, spread = float(observed.mean()), float(observed.std(ddof=1))
    return Tolerance(mean + deviations * spread, float(low), float(high), mean, spread)


def ratio_estimate(numerators: Array, denominators: Array, seed: int) -> Estimate:
    """Return Σ numerators / Σ denominators, each of shape (prompts,), with its errors.

    Two estimates with one seed draw the same prompts.
    """
    size = len(numerators)
    counts = np.random.default_rng(seed).multinomial(size, [1 / size] * size, RESAMPLES).astype(float)
    value = float(numerators.sum() / denominators.sum())
    with np.errstate(invalid="ignore"):  # a resample may hold no prompt with scored tokens
        low, high = np.nanquantile((counts @ numerators) / (counts @ denominators), [0.025, 0.975])
    residuals = (numerators - value * denominators) / denominators.sum()
    error = math.sqrt(size / (size - 1) * float((residuals**2).sum()))
    return Estimate(value, error, float(low), float(high), size)


def _joint(infer: Array, train: Array) -> list[list[int]]:
    """Return [cell of π_inf, cell of π_train, tokens] for each cell of the grid that holds tokens."""
    cells = [np.minimum((values * GRID).astype(int), GRID - 1) for values in (infer, train)]
    pairs, tokens = np.unique(np.stack(cells), axis=1, return_counts=True)
    return np.vstack([pairs, tokens]).T.tolist()


def _notes(result: EngineMismatch, batch_prompts: int) -> list[str]:
    notes = []
    if result.prompts < (least := max(_FEW_PROMPTS, batch_prompts)):
        notes.append(f"{result.prompts} prompts are few: the 95 % intervals are too narrow; use {least} or more.")
    if result.unscored:
        share = result.unscored / (result.tokens + result.unscored)
        notes.append(f"{result.unscored} tokens ({share:.2%}) lack a log-probability and do not count.")
    if result.pearson < _SAME_WEIGHTS:
        notes.append(
            f"The probabilities of both sides correlate by {result.pearson:.2f} only: does {result.engine} run the "
            "weights of this model?"
        )
    return notes
