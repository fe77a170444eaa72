"""What one engine's log-probabilities say against the model's: distributions, weights, errors over prompts, and ε.

Throughout, a = log π_train and b = log π_inf of the same sampled tokens, d = a − b. Completions of one prompt are not
independent, so every interval comes from a bootstrap that draws whole prompts, and every standard error is clustered
by prompt.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..constraint.lagrangian import tolerance_deviations
from ..constraint.settings import Reduction
from ..constraint.statistics import combine_sums, mismatch_from_sums, mismatch_sums
from ..records.estimators import Difference, Estimate, bootstrap_p_value
from ..sampled_tokens import LOG_RATIO_BOUND
from .contexts import token_contexts
from .result import GRID, HISTOGRAM_EDGES, Bin, EngineMismatch, Growth, Tolerance, Weights
from .rollouts import EngineSample, sampled_logps
from .settings import CalibrationSettings
from .tokens import Array, Integers, Ratio, ScoredTokens


PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
WEIGHT_PERCENTILES = (1.0, 5.0, 50.0, 95.0, 99.0)
RESAMPLES = 1000  # of the prompts, for every interval
BATCHES = 2000  # generation batches that the rule for ε sees
FEW_PROMPTS = 32  # with fewer, the interval of a bootstrap is too narrow
_POSITION_BINS = 32
_PROBABILITY_BINS = 20
_WORST = 20  # tokens, each of another prompt
_TRAJECTORIES = 512  # padded at a time, which bounds memory
_SAME_WEIGHTS = 0.9  # correlation of probabilities below which the engine hardly runs the model's weights


def measure_engine(
    sample: EngineSample,
    train: Sequence[Tensor],
    prompts: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    settings: CalibrationSettings,
    longest: int = 0,
) -> EngineMismatch:
    """Everything about one engine.

    Args:
        sample: what it sampled, with log π_inf.
        train: log π_train of each rollout's tokens, shape (tokens,).
        prompts, tokenizer: token ids, and the model's tokenizer, for the context of the worst tokens.
        settings: of the calibration.
        longest: tokens of the longest completion of all engines that this one is compared with.

    Raises:
        ValueError: fewer than two prompts have a token with both log-probabilities.
    """
    rollouts, seed = sample.rollouts, settings.seed
    tokens = ScoredTokens.of(rollouts, train, len(prompts), settings.measure)
    ratios = _ratios(tokens, settings.reduction)
    numerators, denominators = ratios["discrepancy"]
    _require_spread(sample.engine, denominators)
    lengths = [len(rollout.ids) for rollout in rollouts]
    longest = max(longest, *lengths)
    d = tokens.train - tokens.infer
    worst = _worst_of_prompts(tokens)
    result = EngineMismatch(
        engine=sample.engine,
        precision=sample.precision,
        prompts=len(prompts),
        completions=len(rollouts),
        tokens=len(d),
        unscored=sum(lengths) - len(d),
        empty=lengths.count(0),
        truncated=sum(rollout.truncated for rollout in rollouts),
        estimates={name: ratio_estimate(*ratio, seed) for name, ratio in ratios.items()},
        percentiles=_percentiles(tokens.delta, PERCENTILES),
        maximum=float(tokens.delta.max()),
        histogram=_histogram(tokens.delta),
        by_position=_bins(tokens, tokens.position.astype(float), _position_edges(longest)),
        by_probability=_bins(tokens, np.exp(tokens.infer), np.linspace(0, 1, _PROBABILITY_BINS + 1)),
        joint=_joint(np.exp(tokens.infer), np.exp(tokens.train)),
        worst=token_contexts(worst, tokens, prompts, rollouts, tokenizer),
        metrics=_metrics(train, sampled_logps(rollouts)),
        train_perplexity=math.exp(-tokens.train.mean()),
        infer_perplexity=math.exp(-tokens.infer.mean()),
        sequence_weights=_weights(np.exp(_bounded(tokens.trajectory_sums(d)))),
        geometric_weights=_weights(np.exp(-tokens.trajectory_means(-d))),
        growth=_growth(tokens, longest),
        tolerance=batch_tolerance(numerators, denominators, settings.batch_prompts, seed),
        per_prompt=np.stack([numerators, denominators], axis=1).tolist(),
        notes=[],
    )
    return result._replace(notes=_notes(result, settings.batch_prompts))


def _ratios(tokens: ScoredTokens, reduction: Reduction) -> dict[str, Ratio]:
    """What the estimates are means of, by name; the batch discrepancy δ̄ is `discrepancy`."""
    d, gap = tokens.train - tokens.infer, tokens.trajectory_means(tokens.infer - tokens.train)
    return {
        "discrepancy": batch_discrepancy(tokens, reduction),
        "delta": tokens.mean_of_tokens(tokens.delta),
        "kl": tokens.mean_of_tokens(-d),
        "k3_kl": tokens.mean_of_tokens(np.expm1(d) - d),
        "log_ppl_diff": tokens.mean_of_trajectories(gap),
        "log_ppl_abs_diff": tokens.mean_of_trajectories(np.abs(gap)),
    }


def batch_discrepancy(tokens: ScoredTokens, reduction: Reduction) -> Ratio:
    """δ̄, by prompt."""
    if reduction == "sequence":
        return tokens.mean_of_trajectories(tokens.trajectory_means(tokens.delta))
    return tokens.mean_of_tokens(tokens.delta)


def _worst_of_prompts(tokens: ScoredTokens) -> Integers:
    """Places of the tokens with the largest δ, at most one of each prompt, the largest first."""
    order = np.argsort(-tokens.delta, kind="stable")
    # Samples of a prompt are alike: without this, one place in one prompt would fill the list.
    _, first = np.unique(tokens.prompt[order], return_index=True)
    return order[np.sort(first)[:_WORST]]


def _require_spread(engine: str, denominators: Array) -> None:
    there = int((denominators > 0).sum())
    if there < 2:
        raise ValueError(
            f"engine={engine!r}: {there} of {len(denominators)} prompts have completions with log-probabilities from "
            "both sides, and a spread needs at least two: use more prompts or samples."
        )


def batch_tolerance(numerators: Array, denominators: Array, batch_prompts: int, seed: int = 0) -> Tolerance:
    """ε by the rule of `proposed_tolerance`, from batches drawn from the prompts with replacement.

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
    # The same places in every draw: what differs between two draws is their prompts alone.
    resampled = (batches @ numerators[draws].T) / (batches @ denominators[draws].T)
    # Drawn with replacement, prompts scatter as their variance over P, not over P − 1, says.
    deviations = tolerance_deviations(size - 1, size / batch_prompts) * math.sqrt(size / (size - 1))
    low, high = np.quantile(resampled.mean(0) + deviations * resampled.std(0, ddof=1), [0.025, 0.975])
    mean, spread = float(observed.mean()), float(observed.std(ddof=1))
    return Tolerance(mean + deviations * spread, float(low), float(high), mean, spread)


def compare_engines(first: EngineMismatch, second: EngineMismatch, seed: int = 0) -> Difference:
    """δ̄ of the second engine minus that of the first, on the same prompts.

    The p-value is two-sided, for "there is no difference", by the paired bootstrap of
    `dc_trl.records.estimators.paired_difference`; None where all prompts differ by the same.

    Raises:
        ValueError: they were not measured on the same number of prompts.
    """
    if first.prompts != second.prompts:
        raise ValueError(f"engines were measured on {first.prompts} and {second.prompts} prompts: use the same ones.")
    values, draws, residuals, there = [], [], [], np.zeros(first.prompts, dtype=bool)
    for engine in (first, second):
        numerators, denominators = np.array(engine.per_prompt).T
        there |= denominators > 0
        value, drawn = _resampled_ratio(numerators, denominators, seed)
        values.append(value)
        draws.append(drawn)
        residuals.append((numerators - value * denominators) / denominators.sum())
    value, differences = values[1] - values[0], draws[1] - draws[0]
    differences = differences[np.isfinite(differences)]  # a resample may hold no prompt with scored tokens
    low, high = np.quantile(differences, [0.025, 0.975])
    error = _clustered_error(residuals[1] - residuals[0])
    p_value = bootstrap_p_value(value, error, differences, [int(there.sum())])
    return Difference(value, error, float(low), float(high), p_value, first.prompts)


def _clustered_error(residuals: Array) -> float:
    """Standard error of a sum of independent residuals, one for each prompt."""
    return math.sqrt(len(residuals) / (len(residuals) - 1) * float((residuals**2).sum()))


def _resampled_ratio(numerators: Array, denominators: Array, seed: int) -> tuple[float, Array]:
    """Σ numerators / Σ denominators, and the same of resampled prompts."""
    size = len(numerators)
    counts = np.random.default_rng(seed).multinomial(size, [1 / size] * size, RESAMPLES).astype(float)
    with np.errstate(invalid="ignore"):
        return float(numerators.sum() / denominators.sum()), (counts @ numerators) / (counts @ denominators)


def ratio_estimate(numerators: Array, denominators: Array, seed: int) -> Estimate:
    """Σ numerators / Σ denominators, each of shape (prompts,), with its errors.

    Two estimates with one seed draw the same prompts.
    """
    value, draws = _resampled_ratio(numerators, denominators, seed)
    low, high = np.nanquantile(draws, [0.025, 0.975])
    error = _clustered_error((numerators - value * denominators) / denominators.sum())
    return Estimate(value, error, float(low), float(high), len(numerators))


def _metrics(train: Sequence[Tensor], infer: Sequence[Tensor]) -> dict[str, float]:
    """`mismatch_metrics` of all trajectories."""
    parts = []
    for start in range(0, len(train), _TRAJECTORIES):
        chosen = slice(start, start + _TRAJECTORIES)
        a, b = (pad_sequence([values.double() for values in logps[chosen]], True) for logps in (train, infer))
        mask = pad_sequence([torch.ones(len(values)) for values in train[chosen]], True)
        parts.append({name: value.item() for name, value in mismatch_sums(a, b, mask).items()})
    return mismatch_from_sums(combine_sums(parts))


def _histogram(delta: Array) -> list[int]:
    edges = np.array(HISTOGRAM_EDGES)
    return np.histogram(np.clip(delta, edges[0], edges[-1]), edges)[0].tolist()


def _joint(infer: Array, train: Array) -> list[list[int]]:
    """[cell of π_inf, cell of π_train, tokens] for each cell of the grid that holds some."""
    cells = [np.minimum((values * GRID).astype(int), GRID - 1) for values in (infer, train)]
    pairs, tokens = np.unique(np.stack(cells), axis=1, return_counts=True)
    return np.vstack([pairs, tokens]).T.tolist()


def _position_edges(longest: int) -> Array:
    width = math.ceil(longest / _POSITION_BINS)
    return np.arange(0, longest + width, width, dtype=float)


def _bins(tokens: ScoredTokens, x: Array, edges: Array) -> list[Bin]:
    """Mean δ between neighbouring edges of x, which has shape (tokens,); the last edge is included."""
    cells = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
    shape = (tokens.prompts, len(edges) - 1)
    flat = tokens.prompt * shape[1] + cells
    sums = np.bincount(flat, tokens.delta, math.prod(shape)).reshape(shape)
    counts = np.bincount(flat, minlength=math.prod(shape)).reshape(shape)
    bins = []
    for cell, (low, high) in enumerate(itertools.pairwise(edges)):
        count = int(counts[:, cell].sum())
        mean = sums[:, cell].sum() / count if count else math.nan
        # Prompts without a token in the bin say nothing about its spread.
        there = counts[:, cell] > 0
        residuals = (sums[there, cell] - mean * counts[there, cell]) / max(count, 1)
        error = _clustered_error(residuals) if len(residuals) > 1 else math.nan
        bins.append(Bin(float(low), float(high), count, float(mean), error))
    return bins


def _percentiles(values: Array, percentiles: Sequence[float]) -> dict[str, float]:
    return {f"{p:g}": float(v) for p, v in zip(percentiles, np.percentile(values, percentiles), strict=True)}


def _effective(weights: Array) -> float:
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def _weights(weights: Array) -> Weights:
    percentiles = _percentiles(weights, WEIGHT_PERCENTILES)
    return Weights(float(weights.mean()), percentiles, float(weights.max()), _effective(weights))


def _bounded(log_weights: Array) -> Array:
    return np.clip(log_weights, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _growth(tokens: ScoredTokens, longest: int) -> list[Growth]:
    """Weights of the first 1, 2, 4, … tokens, and of all."""
    d = tokens.train - tokens.infer
    rows = []
    for length in [*(2**power for power in range((longest - 1).bit_length())), longest]:
        logs = _bounded(tokens.trajectory_sums(np.where(tokens.position < length, d, 0.0)))
        weights = np.exp(logs)
        low, high = map(float, np.percentile(weights, [5, 95]))
        rows.append(Growth(length, float(weights.mean()), float(logs.std()), low, high, _effective(weights)))
    return rows


def _notes(result: EngineMismatch, batch_prompts: int) -> list[str]:
    notes = []
    if result.prompts < FEW_PROMPTS:
        notes.append(
            f"{result.prompts} prompts are few: the 95 % intervals are too narrow; use {FEW_PROMPTS} or more."
        )
    if result.prompts < batch_prompts:
        notes.append(
            f"A generation batch of {batch_prompts} prompts is larger than the sample of {result.prompts}: its spread "
            "is that of prompts drawn again and again."
        )
    if result.unscored:
        share = result.unscored / (result.tokens + result.unscored)
        notes.append(
            f"{result.unscored} tokens ({share:.2%}) have no log-probability from both sides and count nowhere."
        )
    if result.metrics["probs_pearson"] < _SAME_WEIGHTS:
        notes.append(
            f"The probabilities of both sides correlate by {result.metrics['probs_pearson']:.2f} only: does "
            f"{result.engine} run the weights of this model?"
        )
    return notes
