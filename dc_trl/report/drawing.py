"""How runs are drawn into axes: one in full detail, several over one another."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from ..records.runs import Run, Series, is_number
from ..records.time_parts import OTHER, PARTS, PREFIX
from .figures import ACCENT, MUTED, SERIES, Style, draw_curve, moving_average, series_style


_SHARED = "black"  # what belongs to all runs


class Line(NamedTuple):
    """A run, and how it is drawn."""

    run: Run
    style: Style


def _note(axes: Axes, text: str, colour: str = ACCENT) -> None:
    axes.set_title(text, loc="right", fontsize=8, color=colour)


def _band(axes: Axes, run: Run, low: Callable[[Mapping], Any], high: Callable[[Mapping], Any]) -> None:
    rows = [(row["step"], low(row), high(row)) for row in run.history]
    steps, lows, highs = ([row[i] for row in rows if is_number(row[1]) and is_number(row[2])] for i in range(3))
    axes.fill_between(steps, lows, highs, color=MUTED, alpha=0.18, linewidth=0)


def draw_curves(axes: Axes, lines: Sequence[Line], metric: str, from_zero: bool = False, log: bool = False) -> None:
    """A curve for each run. `log` takes a logarithmic axis where some values are far above the usual ones."""
    drawn: list[float] = []
    for run, style in lines:
        steps, values = run.series(metric)
        draw_curve(axes, steps, values, style if len(lines) > 1 or style != series_style(0) else None)
        drawn += values
    sizes = [abs(value) for value in drawn if value]
    if log and sizes and max(sizes) > 100 * statistics.median(sizes):
        # Few values are far from the others: both are to be seen.
        if min(drawn) > 0:
            axes.set_yscale("log")
        else:
            axes.set_yscale("symlog", linthresh=statistics.median(sizes))
    elif from_zero:
        axes.set_ylim(bottom=0)


def _greedy(run: Run) -> Series:
    points = [(step, found["greedy"]) for step, found in run.evaluations() if is_number(found.get("greedy"))]
    return Series([step for step, _ in points], [value for _, value in points])


def accuracy(run: Run) -> Series:
    """What `draw_accuracy` draws of a run: greedy rewards if it measured them, else sampled ones."""
    greedy = _greedy(run)
    return greedy if greedy.steps else run.series("eval_reward")


def draw_accuracy(axes: Axes, lines: Sequence[Line]) -> None:
    """Held-out rewards: of greedy answers with standard errors, and of sampled ones, hollow."""
    for run, (colour, line, marker) in lines:
        sampled = run.series("eval_reward")
        axes.plot(*sampled, color=colour, linestyle=line, linewidth=0.8, marker=marker, markersize=3.5, mfc="white")
        errors = [found.get("greedy_se") or 0.0 for _, found in run.evaluations() if is_number(found.get("greedy"))]
        _errorbars(axes, _greedy(run), errors, Style(colour, line, marker))


def draw_benchmark(axes: Axes, lines: Sequence[Line], metric: str) -> None:
    """A benchmark's metric with its standard errors."""
    for run, style in lines:
        series = run.series(metric)
        errors = run.series(f"{metric}_se").by_step()  # a single problem has none
        _errorbars(axes, series, [errors.get(step, 0.0) for step in series.steps], style)


def _errorbars(axes: Axes, series: Series, errors: list[float], style: Style) -> None:
    if series.steps:
        colour, line, marker = style
        axes.errorbar(
            *series, errors, color=colour, linestyle=line, linewidth=1.6, marker=marker, markersize=5, capsize=3
        )


def draw_discrepancy(axes: Axes, lines: Sequence[Line]) -> None:
    """Batch discrepancies, and tolerances dashed."""
    draw_curves(axes, lines, "discrepancy/mean", from_zero=True, log=True)
    alone = len(lines) == 1
    shared = {value for run, _ in lines for value in run.tolerance().values}
    for run, style in lines:
        steps, values = run.tolerance()
        if not steps:
            continue
        colour = ACCENT if alone else _SHARED if len(shared) == 1 else style.colour
        if len(set(values)) == 1 and steps[0] <= run.series("discrepancy/mean").steps[0]:
            axes.axhline(values[0], color=colour, linestyle="--", linewidth=1.2)
        else:
            # An automatic tolerance is known after some batches only.
            axes.step(steps, values, where="post", color=colour, linestyle="--", linewidth=1.2)
    if alone and shared:
        _note(axes, f"– –  tolerance ε = {lines[0].run.tolerance().values[-1]:.4g}")
    elif len(shared) == 1:
        _note(axes, f"– –  tolerance ε = {shared.pop():.4g}", _SHARED)
    elif shared:
        _note(axes, "– –  each run's tolerance ε", _SHARED)


def draw_multiplier(axes: Axes, lines: Sequence[Line]) -> None:
    """λ, which holds from one step to the next, and its bounds where it comes near them."""
    for run, (colour, line, _) in lines:
        axes.step(*run.series("lagrangian/lambda"), where="post", color=colour, linestyle=line, linewidth=1.5)
    low, high = axes.get_ylim()
    bounds = {run.bounds for run, _ in lines}
    if len(bounds) == 1 and (only := bounds.pop()) is not None:
        for bound in only:
            if low <= bound <= high:
                axes.axhline(bound, color=_SHARED, linestyle="--", linewidth=1.2)
        _note(axes, f"bounds {only[0]:g} and {only[1]:g}", _SHARED)


def draw_length(axes: Axes, lines: Sequence[Line]) -> None:
    """Response lengths and their surges, of a single run with the shortest and the longest response."""
    if len(lines) == 1:
        low, high = (f"completions/{which}_length" for which in ("min", "max"))
        _band(axes, lines[0].run, lambda row: row.get(low), lambda row: row.get(high))
    draw_curves(axes, lines, "completions/mean_length", from_zero=True)
    _mark_surges(axes, lines)
    if len(lines) == 1:
        surge, period = (lines[0].run.last(f"length_decay/{name}") for name in ("surge_step", "period"))
        found = [f"surge at step {surge}"] if surge is not None else []
        found += [f"halved every {period} steps"] if period is not None else []
        _note(axes, ", ".join(found))


def _mark_surges(axes: Axes, lines: Sequence[Line]) -> None:
    for run, style in lines:
        surge = run.last("length_decay/surge_step")
        if surge is not None:
            colour = ACCENT if len(lines) == 1 else style.colour
            axes.axvline(surge, color=colour, linestyle="--", linewidth=1.2)


def draw_learning_rate(axes: Axes, lines: Sequence[Line]) -> None:
    """Learning rates, and halvings of the length decay."""
    for run, (colour, line, _) in lines:
        # A step's rate holds from the end of the step before.
        axes.step(*run.series("learning_rate"), where="pre", color=colour, linestyle=line, linewidth=1.5)
        for step in run.series("length_decay/halvings").steps:
            axes.axvline(step, color=MUTED if len(lines) == 1 else colour, linestyle=":", linewidth=1.2)
    _mark_surges(axes, lines)
    axes.set_ylim(bottom=0)


def draw_clipping(axes: Axes, lines: Sequence[Line]) -> None:
    """Clipped fractions, of a single run with their parts below and above the clip range."""
    if len(lines) == 1:
        for index, (side, label) in enumerate({"low": "below the range", "high": "above it"}.items(), start=1):
            colour, line, _ = series_style(index)
            steps, values = lines[0].run.series(f"clip_ratio/{side}_mean")
            axes.plot(steps, moving_average(values), color=colour, linestyle=line, linewidth=1, label=label)
    draw_curves(axes, lines, "clip_ratio/region_mean", from_zero=True)
    if len(lines) == 1:
        axes.legend(frameon=False, fontsize=8)


def draw_time_shares(axes: Axes, lines: Sequence[Line]) -> None:
    """Shares of the parts of a single run's time, one on the other."""
    ((run, _),) = lines
    steps, shares = time_shares(run)
    # From the step of the log before to its own; the first one as long as the second.
    edges = [steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1), *steps]
    below = [0.0] * len(edges)
    for index, (label, of_steps) in enumerate(shares.items()):
        above = [low + height for low, height in zip(below, [of_steps[0], *of_steps], strict=True)]
        colour, _, _ = series_style(index)
        alpha = 0.85 if index < len(SERIES) else 0.4  # colours come back
        axes.fill_between(edges, below, above, step="pre", color=colour, linewidth=0, label=label, alpha=alpha)
        below = above
    axes.set_ylim(0, 1.45)  # the legend stands above
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(frameon=False, fontsize=7.5, loc="upper left", ncols=3, columnspacing=1, handlelength=1)


def named_share(run: Run) -> Series:
    """Share of the time that went to named parts: all but `other`."""
    steps, shares = time_shares(run, least=0.0)
    other = shares.get(PARTS[OTHER], [0.0] * len(steps))
    return Series(steps, [1 - share for share in other])


def time_shares(run: Run, least: float = 0.01) -> tuple[list[int], dict[str, list[float]]]:
    """Shares of each part in the time since the log before.

    Args:
        run: with a history that has timed parts.
        least: parts with a smaller share of the whole run are added up as one.

    Returns:
        Optimizer steps, and by label the part's share at each; the shares of a step add up to 1.
    """
    by_part: dict[str, dict[int, float]] = {}
    for part in PARTS:
        steps, seconds = run.series(f"{PREFIX}{part}")
        for step, spent in zip(steps, seconds, strict=True):  # a step may have several logs
            of_part = by_part.setdefault(part, {})
            of_part[step] = of_part.get(step, 0.0) + spent
    totals = dict.fromkeys(sorted({step for of_part in by_part.values() for step in of_part}), 0.0)
    for of_part in by_part.values():
        for step, spent in of_part.items():
            totals[step] += spent
    shares: dict[str, list[float]] = {}
    small = [0.0] * len(totals)
    for part, of_part in by_part.items():
        heights = [of_part.get(step, 0.0) / total for step, total in totals.items()]
        if sum(of_part.values()) < least * sum(totals.values()):
            small = [low + height for low, height in zip(small, heights, strict=True)]
        else:
            shares[PARTS[part]] = heights
    if any(small):
        shares["smaller parts"] = small
    return list(totals), shares
