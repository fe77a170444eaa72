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
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..constraint.discrepancy import LOG_RATIO_BOUND, token_discrepancy
from ..constraint.lagrangian import tolerance_deviations
from ..constraint.settings import Measure, Reduction
from ..constraint.statistics import combine_sums, mismatch_from_sums, mismatch_sums
from ..records.estimators import Difference, Estimate, bootstrap_p_value
from .contexts import token_contexts
from .result import GRID, HISTOGRAM_EDGES, Bin, EngineMismatch, Growth, Tolerance, Weights
from .rollouts import Rollout


Array = NDArray[np.float64]

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
WEIGHT_PERCENTILES = (1.0, 5.0, 50.0, 95.0, 99.0)
RESAMPLES = 1000  # of the prompts, for every interval
BATCHES = 2000  # generation batches that the rule for ε sees
FEW_PROMPTS = 32  # with fewer, the interval of a bootstrap is too narrow
_POSITION_BINS = 32
_PROBABILITY_BINS = 20
_WORST = 20
_TRAJECTORIES = 512  # padded at a time, which bounds memory
_SAME_WEIGHTS = 0.9  # correlation of probabilities below which the engine hardly runs the model's weights


def measure_engine(
    engine: str,
    precision: str,
    prompts: Sequence[list[int]],
    rollouts: Sequence[Rollout],
    train: Sequence[Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    measure: Measure = "prob_diff",
    reduction: Reduction = "sequence",
    batch_prompts: int = 64,
    longest: int = 0,
    seed: int = 0,
) -> EngineMismatch:
    """Everything about one engine.

    Args:
        engine, precision: names, for the record.
        prompts: token ids.
        rollouts: completions with log π_inf.
        train: log π_train of each rollout's tokens, shape (tokens,).
        tokenizer: of the model, for the context of the worst tokens.
        measure: of δ.
        reduction: of δ to δ̄.
        batch_prompts: prompts of one generation batch of the run.
        longest: tokens of the longest completion of all engines that this one is compared with.
        seed: of the bootstrap.

    Raises:
        ValueError: fewer than two prompts have a token with both log-probabilities.
    """
    infer = [torch.tensor(rollout.logps, dtype=torch.float64) for rollout in rollouts]
    lengths = np.array([len(rollout.ids) for rollout in rollouts])
    b = torch.cat(infer).numpy()
    a = torch.cat([values.double() for values in train]).numpy()
    trajectory = np.repeat(np.arange(len(rollouts)), lengths)
    position = np.arange(len(a)) - np.repeat(lengths.cumsum() - lengths, lengths)
    every = trajectory
    scored = np.isfinite(a) & np.isfinite(b)
    a, b, trajectory, position = a[scored], b[scored], trajectory[scored], position[scored]
    prompt_of = np.array([rollout.prompt for rollout in rollouts])
    prompt = prompt_of[trajectory]
    delta = token_discrepancy(torch.from_numpy(a), torch.from_numpy(b), measure).numpy()
    counts = np.bincount(trajectory, minlength=len(rollouts))
    alive = counts > 0

    def by_trajectory(values: Array) -> Array:
        return np.bincount(trajectory, values, len(rollouts)) / np.maximum(counts, 1)

    def by_prompt(values: Array, clusters: NDArray[np.int_]) -> Array:
        return np.bincount(clusters, values, len(prompts)).astype(float)

    ones, alive_prompts = np.ones_like(a), prompt_of[alive]
    token_counts, trajectory_counts = by_prompt(ones, prompt), by_prompt(np.ones(alive.sum()), alive_prompts)
    gap = by_trajectory(b - a)[alive]
    over_tokens = {"delta": delta, "kl": b - a, "k3_kl": np.expm1(a - b) - (a - b)}
    over_trajectories = {"log_ppl_diff": gap, "log_ppl_abs_diff": np.abs(gap)}
    ratios = {name: (by_prompt(values, prompt), token_counts) for name, values in over_tokens.items()}
    ratios |= {name: (by_prompt(v, alive_prompts), trajectory_counts) for name, v in over_trajectories.items()}
    sequence = (by_prompt(by_trajectory(delta)[alive], alive_prompts), trajectory_counts)
    ratios = {"discrepancy": sequence if reduction == "sequence" else ratios["delta"], **ratios}
    per_prompt = np.stack(ratios["discrepancy"], axis=1)
    if (per_prompt[:, 1] > 0).sum() < 2:
        raise ValueError(
            f"engine={engine!r}: {int((per_prompt[:, 1] > 0).sum())} of {len(prompts)} prompts have completions with "
            "log-probabilities from both sides, and a spread needs at least two: use more prompts or samples."
        )
    metrics = _metrics(train, infer)
    bounded = np.clip(np.bincount(trajectory, a - b, len(rollouts)), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    longest = max(longest, int(lengths.max()))
    width = math.ceil(longest / _POSITION_BINS)
    positions = np.arange(0, longest + width, width, dtype=float)
    q, p = np.exp(b), np.exp(a)
    cells = [np.minimum((values * GRID).astype(int), GRID - 1) for values in (q, p)]
    pairs, tokens = np.unique(np.stack(cells), axis=1, return_counts=True)
    edges = np.array(HISTOGRAM_EDGES)
    result = EngineMismatch(
        engine=engine,
        precision=precision,
        prompts=len(prompts),
        completions=len(rollouts),
        tokens=len(a),
        unscored=len(every) - len(a),
        empty=int((lengths == 0).sum()),
        truncated=sum(rollout.truncated for rollout in rollouts),
        estimates={name: _ratio_estimate(*ratio, seed) for name, ratio in ratios.items()},
        percentiles=_percentiles(delta, PERCENTILES),
        maximum=float(delta.max()),
        histogram=np.histogram(np.clip(delta, edges[0], edges[-1]), edges)[0].tolist(),
        by_position=_bins(position.astype(float), positions, delta, prompt, len(prompts)),
        by_probability=_bins(q, np.linspace(0, 1, _PROBABILITY_BINS + 1), delta, prompt, len(prompts)),
        joint=np.vstack([pairs, tokens]).T.tolist(),
        worst=token_contexts(
            np.argsort(-delta, kind="stable")[:_WORST], trajectory, position, p, q, delta, prompts, rollouts, tokenizer
        ),
        metrics=metrics,
        train_perplexity=math.exp(-a.mean()),
        infer_perplexity=math.exp(-b.mean()),
        sequence_weights=_weights(np.exp(bounded[alive])),
        geometric_weights=_weights(np.exp(-gap)),
        growth=_growth(a - b, trajectory, position, alive, longest),
        tolerance=batch_tolerance(per_prompt[:, 0], per_prompt[:, 1], batch_prompts, seed),
        per_prompt=per_prompt.tolist(),
        notes=[],
    )
    return result._replace(notes=_notes(result, batch_prompts))


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


def _ratio_estimate(numerators: Array, denominators: Array, seed: int) -> Estimate:
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


def _bins(x: Array, edges: Array, delta: Array, prompt: NDArray[np.int_], prompts: int) -> list[Bin]:
    """Mean δ between neighbouring edges of x, the last edge included."""
    cells = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
    shape = (prompts, len(edges) - 1)
    flat = prompt * shape[1] + cells
    sums = np.bincount(flat, delta, math.prod(shape)).reshape(shape)
    counts = np.bincount(flat, minlength=math.prod(shape)).reshape(shape)
    bins = []
    for cell, (low, high) in enumerate(itertools.pairwise(edges)):
        tokens = int(counts[:, cell].sum())
        mean = sums[:, cell].sum() / tokens if tokens else math.nan
        # Prompts without a token in the bin say nothing about its spread.
        there = counts[:, cell] > 0
        residuals = (sums[there, cell] - mean * counts[there, cell]) / max(tokens, 1)
        error = _clustered_error(residuals) if len(residuals) > 1 else math.nan
        bins.append(Bin(float(low), float(high), tokens, float(mean), error))
    return bins


def _percentiles(values: Array, percentiles: Sequence[float]) -> dict[str, float]:
    return {f"{p:g}": float(v) for p, v in zip(percentiles, np.percentile(values, percentiles), strict=True)}


def _effective(weights: Array) -> float:
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def _weights(weights: Array) -> Weights:
    return Weights(
        float(weights.mean()), _percentiles(weights, WEIGHT_PERCENTILES), float(weights.max()), _effective(weights)
    )


def _growth(
    log_ratio: Array, trajectory: NDArray[np.int_], position: NDArray[np.int_], alive: NDArray[np.bool_], longest: int
) -> list[Growth]:
    rows = []
    for tokens in [*(2**power for power in range((longest - 1).bit_length())), longest]:
        within = position < tokens
        sums = np.bincount(trajectory[within], log_ratio[within], len(alive))[alive]
        logs = np.clip(sums, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        weights = np.exp(logs)
        low, high = np.percentile(weights, [5, 95])
        rows.append(
            Growth(tokens, float(weights.mean()), float(logs.std()), float(low), float(high), _effective(weights))
        )
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
