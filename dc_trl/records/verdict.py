"""The verdict on a run in a few sentences: after its first generation batch, and at its end.

A run that has ended need not have learned anything. These sentences are in the warning after the first batch, above
the table of `dc-trl train`, and at the head of a report.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..constraint.thresholds import reading_in_step, reading_of_lag
from ..version import DOCS
from .estimators import noise_of
from .runs import Run


WINDOW = 10  # logged steps at each end of a run that are compared; in a short run, half of its steps
_ENOUGH = 3  # logged steps at each end that are enough to distinguish a trend from noise
_MOSTLY = 0.5  # share of cut-off completions above which this is the first thing to repair
_LARGE_PENALTY = 0.1  # mean of a token; docs/collapsed.md
_LOST = 0.5  # share of the reward of the first log
# Metric → factor, up or down, by which no healthy run of ours has left its first log while it lost its reward. The
# gradient falls to 0 by rewards alone, where few prompts are ever solved, and TRL's `kl` begins at 0 in every run.
_MOVES = {"entropy": 2.0, "completions/mean_length": 1.5, "discrepancy/mean": 3.0}
_NO_SPREAD = 0.99  # share of prompts whose completions all earned the same reward
NOT_MEASURED = (
    "the rollouts carry no log-probabilities. Set deployment_scheme='bf16', or the format that you will serve, to "
    "sample from an in-process replica that has them, or use_vllm=True."
)
COUNTS_TRUNCATION = (
    "discrepancy_truncated/... contain what settings of generation do to the sampled distribution (top_p, top_k or "
    f"min_p, of which top_k has to be among them, or a penalty). Leave them out; see {DOCS}/concepts.md."
)


def first_batch(columns: Sequence[Sequence[float]], generations: int, clipped: float, longest: int) -> str | None:
    """Say what keeps a run from learning from its first generation batch, and the remedy; None where nothing does.

    Args:
        columns: rewards that are normalised together, NaN where there is none: one list of the completions' totals, or
            one list for each reward function where these are normalised separately.
        generations: number of completions of a prompt, which follow one another.
        clipped: share of the completions that were cut off, in [0, 1].
        longest: `max_completion_length`, tokens.
    """
    found = []
    if clipped >= _MOSTLY:
        found.append(
            f"{clipped:.0%} of the completions were cut off at max_completion_length={longest}: raise it, ask for "
            "shorter answers, or check that the model ends its answers by the tokenizer's eos_token."
        )
    starts = range(0, len(columns[0]), generations)
    groups = [column[start : start + generations] for column in columns for start in starts]
    rewards = [value for column in columns for value in column if not math.isnan(value)]
    if not rewards:
        found.append(
            "No reward function gave any completion a reward, all returned None: check what they read, the columns of "
            "the data set and the form of the answers."
        )
    elif all(len({value for value in group if not math.isnan(value)}) <= 1 for group in groups):
        what = f"the reward {rewards[0]:g}" if len(set(rewards)) == 1 else "one reward"
        found.append(
            f"All completions of each prompt earned {what}, so every advantage is 0: look at a few completions and at "
            "the reward function, and take prompts of another difficulty, more num_generations or a finer reward."
        )
    return f"The first generation batch teaches nothing, or little. {' '.join(found)}" if found else None


def destroyed(run: Run) -> str | None:
    """Say that training has destroyed the policy, as a learning rate that is too high does; None where it has not.

    The first log is of the policy as it began. Its reward is lost within the next ones and for good, beyond noise, and
    another level has left its place; or gradients are not finite any more.
    """
    norms = run.columns.get("grad_norm", ((), [0.0]))[1]
    remedy = _way_out(run)
    if not any(map(math.isfinite, norms[-_ENOUGH:])):
        return f"The gradient is not finite at the end, and nothing more is learned. Perhaps {remedy}."
    rewards = run.series("reward").values
    if len(rewards) <= _ENOUGH:
        return None
    last = {name: run.series(name).values[-WINDOW:] for name in ("reward", *_MOVES)}
    lost = rewards[0] - max(statistics.median(rewards[1 : WINDOW + 1]), statistics.median(last["reward"]))
    if not lost > max(_LOST * abs(rewards[0]), 4 * noise_of(rewards)):
        return None
    ends = {name: (run.series(name).values[0], statistics.median(of)) for name, of in last.items() if of}
    moved = [name for name, factor in _MOVES.items() if name in ends and not _within(*ends[name], factor)]
    if not moved:
        return None
    changes = ", ".join(f"{name} from {ends[name][0]:.3g} to {ends[name][1]:.3g}" for name in ("reward", *moved))
    return f"The policy was destroyed: since the first log {changes}. Perhaps {remedy}."


def _way_out(run: Run) -> str:
    """Return what may have destroyed the policy, and what to set; a rate that is too high is the commonest cause."""
    rate, age = run.last("learning_rate"), max(run.series("sync/age").values, default=0)
    penalty = max(run.series("lagrangian/penalty_mean").values, default=0)
    others = []
    if age > 0:
        others.append(f"the sampler's weights lag (sync/age up to {age:g}): set weight_sync_steps=1, or recipe='lag'")
    if penalty > _LARGE_PENALTY:
        others.append(f"the constraint took {penalty:.2g} from a token's advantage: set a lower lambda_max")
    others.append(
        f"learning_rate{'' if rate is None else f' (last {rate:.3g})'} is too high: begin again with a third of it, "
        "from the model or from a checkpoint of before"
    )
    return f"{'. Or '.join(others)}. {DOCS}/collapsed.md has the other causes"


def _within(first: float, last: float, factor: float) -> bool:
    return first / factor <= last <= first * factor


class Verdict(NamedTuple):
    """Verdict on a run."""

    lines: list[str]  # sentences, the most important first
    worth_serving: bool  # whether its policy may be better than the one that it began with, as far as is known


def verdict_of(run: Run) -> Verdict:
    """Say whether a run learned, what kept it from learning, and what its mismatch means.

    Learning compares the mean reward of the last logged steps with that of the first; a difference within twice its
    standard error counts as noise. The mismatch is read from the medians of k3 in the last steps.
    """
    if run.steps == 0:
        return Verdict(["No optimizer step was made: nothing was trained."], False)
    if (ruin := destroyed(run)) is not None:
        return Verdict([ruin], False)
    learning, worth_serving = _learning(run)
    lines = [learning]
    clipped = statistics.fmean(run.series("completions/clipped_ratio").values[-WINDOW:] or [0.0])
    # In a run that lost its reward, answers that became too long are a symptom.
    at_first = statistics.fmean(run.series("completions/clipped_ratio").values[:WINDOW] or [0.0])
    if clipped >= _MOSTLY and (worth_serving or at_first >= _MOSTLY):
        lines.append(f"{clipped:.0%} of the last completions were cut off at max_completion_length: raise it.")
    return Verdict([*lines, *_mismatch(run)], worth_serving)


def _mismatch(run: Run) -> list[str]:
    """Say what the mismatch of a run is, what it means for its model, and what to do.

    Batches that the present weights sampled have the engine's part alone. What the others have beside it is the lag's,
    which `discrepancy_split` measures by itself.
    """
    lagged, in_step = (_last_known(run, "discrepancy/k3_kl", lags) for lags in (True, False))
    if not lagged and not in_step:
        truncated = run.series("discrepancy_truncated/k3_kl").values
        return [f"The mismatch was not measured: {COUNTS_TRUNCATION if truncated else NOT_MEASURED}"]
    measured = f"The mismatch was measured: k3 {statistics.median(lagged or in_step):.2g} nats"
    engine = statistics.median(_last_known(run, "discrepancy/engine_k3_kl") or in_step or [math.nan])
    if not lagged:
        return [f"{measured}, {reading_in_step(engine)}."]
    if of_lag := _last_known(run, "discrepancy/lag_k3_kl", lags=True):
        lag = statistics.median(of_lag)
        measured = f"The mismatch was measured: k3 {lag:.2g} nats by the lag of the sampler's weights"
        found = f"{measured}, {reading_of_lag(lag)}."
    elif min(len(lagged), len(in_step)) < _ENOUGH or (math.inf not in lagged and _within_noise(in_step, lagged)):
        found = (
            f"{measured} by number format and lag together. Set discrepancy_split=True: what the weights did since "
            "they sampled says whether the lag harms."
        )
    else:
        added = statistics.median(lagged) - engine
        found = (
            f"{measured} with weights that lag, and {engine:.2g} in step. The lag adds {added:.2g}, "
            f"{reading_of_lag(added)}."
        )
    if math.isnan(engine):
        return [found]
    return [found, f"The engine's part is k3 {engine:.2g} nats, {reading_in_step(engine)}."]


def _last_known(run: Run, metric: str, lags: bool | None = None) -> list[float]:
    """Return the last values of a metric; what is no number is not known to be low, and counts as ∞.

    Args:
        run, metric: the run, and the name of its metric.
        lags: takes only batches whose weights lagged, or only those in step.
    """
    ages = run.series("sync/age").by_step()
    values = [
        math.inf if math.isnan(value) else value
        for step, value in zip(*run.columns.get(metric, ((), ())), strict=True)
        if lags is None or (ages.get(step, 0) > 0) == lags
    ]
    return values[-WINDOW:]


def _within_noise(first: Sequence[float], last: Sequence[float]) -> bool:
    """Return whether two means differ by at most twice the standard error of their difference."""
    variance = sum(statistics.variance(values) / len(values) for values in (first, last))
    return abs(statistics.fmean(last) - statistics.fmean(first)) <= 2 * math.sqrt(variance)


def _learning(run: Run) -> tuple[str, bool]:
    """Say in a sentence whether a run learned, and return whether its policy is worth serving."""
    values = run.series("reward").values
    if not values:
        return "Nothing was learned: no completion earned a reward, all functions returned None.", False
    steps = max(1, min(WINDOW, len(values) // 2))
    ends = values[:steps], values[-steps:]
    first, last = map(statistics.fmean, ends)
    spread = run.series("frac_reward_zero_std").values
    if spread and min(spread) >= _NO_SPREAD:
        of = f"the same reward, on average {last:.3g} in the last steps"
        return f"Nothing was learned from the reward: all completions of each prompt earned {of}.", False
    both = f"the mean training reward was {first:.3g} at first and {last:.3g} at the end"
    if steps < _ENOUGH:
        return f"There are too few steps to tell whether the run learned: {both}.", True
    both = f"{both} ({steps} logged steps each)"
    if _within_noise(*ends):
        return f"The run is not shown to have learned: {both}, which is within the noise.", True
    return f"The run {'learned' if last > first else 'lost reward'}: {both}.", last > first
