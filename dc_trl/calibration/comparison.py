"""What one engine's log-probabilities say against the model's: means and percentiles, errors over prompts, and ε.

Throughout, a = log π_train and b = log π_inf of the same sampled tokens, and d = a − b. Completions of one prompt are
not independent, so intervals come from a bootstrap over prompts, and standard errors are clustered by prompt.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..constraint.discrepancy import token_discrepancy
from ..constraint.lagrangian import tolerance_deviations
from ..constraint.settings import Measure, Reduction
from ..records.estimators import Estimate
from .result import CalibrationSettings, EngineMismatch, Tolerance
from .rollouts import EngineSample, Rollout, sampled_logps


Array = NDArray[np.float64]
Integers = NDArray[np.int_]
Ratio = tuple[Array, Array]  # numerator and denominator of a mean for each prompt, both of shape (prompts,)

RESAMPLES = 1000  # of the prompts, for every interval
BATCHES = 2000  # generation batches that the rule for ε draws
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_FEW_PROMPTS = 32  # with fewer, the interval of a bootstrap is too narrow
_SAME_WEIGHTS = 0.9  # correlation of probabilities below which the engine hardly runs the model's weights


class ScoredTokens:
    """All sampled tokens one after another, with log-probabilities of both sides.

    Args:
        rollouts: completions; each has a token at least.
        train, infer: log π_train and log π_inf of each rollout's tokens, nats, shape (tokens,).
        prompts: number of prompts.
        measure: measure of the discrepancy δ.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        train: Sequence[Tensor],
        infer: Sequence[Tensor],
        prompts: int,
        measure: Measure,
    ):
        a, b = (torch.cat([logps.double() for logps in each]) for each in (train, infer))
        self.train, self.infer, self.delta = a.numpy(), b.numpy(), token_discrepancy(a, b, measure).numpy()
        self._lengths = np.array([len(rollout.ids) for rollout in rollouts])
        self._prompt_of = np.array([rollout.prompt for rollout in rollouts])
        self._prompts = prompts

    def mean_of_tokens(self, values: Array) -> Ratio:
        """Return by prompt the sum of the tokens' values, and their number."""
        return self._by_prompt(values, np.repeat(self._prompt_of, self._lengths))

    def k3(self) -> Ratio:
        """Return by prompt the sum of e^d − d − 1, d = log π_train − log π_inf, of its tokens, and their number."""
        d = self.train - self.infer
        return self.mean_of_tokens(np.expm1(d) - d)

    def batch_discrepancy(self, reduction: Reduction) -> Ratio:
        """Return δ̄ by prompt: the mean of the tokens' δ, or that of the rollouts' |mean δ|."""
        if reduction == "token":
            return self.mean_of_tokens(self.delta)
        rollout_of = np.repeat(np.arange(len(self._lengths)), self._lengths)
        means = np.bincount(rollout_of, self.delta, len(self._lengths)) / self._lengths
        return self._by_prompt(np.abs(means), self._prompt_of)

    def _by_prompt(self, values: Array, prompt: Integers) -> Ratio:
        sums = np.bincount(prompt, values, self._prompts).astype(float)
        return sums, np.bincount(prompt, minlength=self._prompts).astype(float)


def measure_engine(
    sample: EngineSample, train: Sequence[Tensor], prompts: int, settings: CalibrationSettings
) -> EngineMismatch:
    """Measure everything about one engine; `train` is log π_train of each rollout's tokens, shape (tokens,)."""
    rollouts, seed = sample.rollouts, settings.seed
    tokens = ScoredTokens(rollouts, train, sampled_logps(rollouts), prompts, settings.measure)
    delta = tokens.batch_discrepancy(settings.reduction)
    ratios = {"discrepancy": delta, "k3_kl": tokens.k3()}
    probabilities = np.exp(tokens.train), np.exp(tokens.infer)
    constant = any(np.ptp(each) == 0 for each in probabilities)  # which NaN is not
    pearson = None if constant else float(np.corrcoef(*probabilities)[0, 1])
    notes = []
    if prompts < (least := max(_FEW_PROMPTS, settings.batch_prompts)):
        notes.append(f"{prompts} prompts are few: the 95 % intervals are too narrow; use {least} or more.")
    cut = min((len(rollout.ids) for rollout in rollouts if rollout.truncated), default=settings.max_tokens)
    if cut < settings.max_tokens:
        notes.append(
            f"Completions were cut off at {cut} tokens, and not at max_tokens={settings.max_tokens}, for which the "
            "context of the engine or of the model has no room: longer ones have another δ̄."
        )
    if pearson is not None and not pearson >= _SAME_WEIGHTS:
        notes.append(
            f"The probabilities of both sides correlate by {pearson:.2f} only: does {sample.engine} run the weights "
            "of this model?"
        )
    return EngineMismatch(
        engine=sample.engine,
        precision=sample.precision,
        prompts=prompts,
        completions=len(rollouts),
        tokens=len(tokens.delta),
        truncated=sum(rollout.truncated for rollout in rollouts),
        estimates={name: ratio_estimate(*ratio, seed) for name, ratio in ratios.items()},
        percentiles={f"{p:g}": float(np.percentile(tokens.delta, p)) for p in _PERCENTILES},
        pearson=pearson,
        tolerance=batch_tolerance(*delta, settings.batch_prompts, seed),
        notes=notes,
    )


def batch_tolerance(numerators: Array, denominators: Array, batch_prompts: int, seed: int = 0) -> Tolerance:
    """Return ε by the rule of `proposed_tolerance`, from batches drawn from the prompts with replacement.

    A batch's δ̄ is the sum of its prompts' numerators over that of their denominators. However many batches are drawn,
    P prompts make P / `batch_prompts` independent ones, and their spread has P − 1 degrees of freedom: with these ε
    promises what that rule does. The interval is that of a bootstrap, which applies the whole rule to each draw.

    Args:
        numerators, denominators: of δ̄ for each prompt, shape (P,).
        batch_prompts: prompts of a batch.
        seed: of the draws.
    """
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
    low, high = np.quantile((counts @ numerators) / (counts @ denominators), [0.025, 0.975])
    residuals = (numerators - value * denominators) / denominators.sum()
    error = math.sqrt(size / (size - 1) * float((residuals**2).sum()))
    return Estimate(value, error, float(low), float(high), size)
