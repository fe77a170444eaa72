"""The figures of the study: how a sweep's variants learn, and where runs end by the mismatch that they had."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from comparisons import Mean, mean_over_seeds
from lines import PRIMARY, WINDOWS, Line
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from scipy.optimize import isotonic_regression
from sweeps import Variant, as_number, by_value
from tables import SweepLines, control_of, controls_of

from dc_trl.records.figures import INK, MUTED, PANEL_WIDTH, label_end, new_figure, save_figure


# Neighbours differ in lightness too, and every pair for readers who see no red or no green.
SERIES = ("#1f3b5c", "#c8553d", "#e0a458", "#2a9d8f", "#a23b87", "#6f8fd8", "#6b6b6b")
# Solid, dashed, dotted, dash-dotted, long dashes, dash-dot-dotted: what tells lines apart in grey print.
LineStyle = Literal["-"] | tuple[float, tuple[float, ...]]
LINE_STYLES: tuple[LineStyle, ...] = (
    "-",
    (0, (4, 1.5)),
    (0, (1, 1)),
    (0, (5, 1.2, 1, 1.2)),
    (0, (9, 2)),
    (0, (4, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

ACCURACY = "greedy reward as deployed, %"
GAIN = "points above GRPO in step"
MISMATCH = "k3 at the end of the run, nats"
LEAST = 1e-6  # a mismatch below it is drawn there, on an axis that has no 0
LEGEND_ROW = 0.2  # inches
HEIGHT = 3.1  # inches, of a panel without its legend
TITLE = 110  # letters of a line of the title
MOST_LINES = 7  # that a reader tells apart; of more variants only the ends are drawn


class Style(NamedTuple):
    """How one series is drawn: in colour and, for grey print, by line and marker."""

    colour: str
    line: LineStyle
    marker: str


def series_style(index: int) -> Style:
    """Return the style of the series of this number, from 0 on.

    Colours repeat after 7 series, pairs of colour and line after 42, pairs of colour and marker after 56.
    """
    return Style(SERIES[index % len(SERIES)], LINE_STYLES[index % len(LINE_STYLES)], MARKERS[index % len(MARKERS)])


def draw_sweep(found: SweepLines, steps: int, path: Path) -> None:
    """Draw how the variants of a sweep learn, or where they end, if they are many or two numbers tell them apart.

    If a third field does too, there is a panel for each of its values.

    Args:
        found: a sweep with its lines.
        steps: of each run, for the axis.
        path: of the PNG.
    """
    numbers, others = found.sweep.axes
    if len(numbers) == 2 and not others:
        _draw_grid(found, *numbers, path)
    elif len(numbers) == 2 and len(others) == 1:
        _draw_panels(found, *numbers, *others, path)
    elif len(found.sweep.variants) > MOST_LINES:
        _draw_ends(found, path)
    else:
        _draw_learning(found, steps, path)


def draw_mismatch(lines: Sequence[Line], path: Path) -> None:
    """Draw what every run gains or loses against its control, over the mismatch (k3) at its end; by `kind_of`.

    A run's control is the mean over seeds of GRPO in step in the same setting, see `controls_of`. A run without one is
    not drawn, and a mismatch below 1e-6 is drawn at 1e-6.
    """
    controls = controls_of(lines)
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        mismatch, reached, control = line.end("k3"), line.last(PRIMARY), control_of(line, controls)
        if mismatch is not None and reached is not None and control:
            gain = 100 * (reached - fmean(control.values()))
            points.setdefault(kind_of(line), []).append((max(mismatch, LEAST), gain))
    height = HEIGHT + LEGEND_ROW * math.ceil(len(points) / 4)
    figure, (axes,) = new_figure(1, 1, width=2 * PANEL_WIDTH, height=height)
    for index, (kind, pairs) in enumerate(sorted(points.items())):
        colour, _, marker = series_style(index)
        axes.plot(*zip(*pairs, strict=True), marker, color=colour, markersize=4.5, alpha=0.8, label=kind)
    axes.axhline(0, color=MUTED, linewidth=0.8, zorder=0)
    axes.set_xlabel(MISMATCH)
    axes.set_ylabel(GAIN)
    _title(figure, "The same k3 costs one method 25 points and another none")
    if points:
        axes.set_xscale("log")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path)


def kind_of(line: Line) -> str:
    """Return what acts on a run's mismatch: a form of the constraint, a correction, a switch, or nothing (GRPO)."""
    cell = line.cell
    if cell.get("constraint", "none") != "none":
        signed = cell.get("constraint_form") in ("log_ratio", "quadratic")
        return "signed forms" if signed else "the paper's and other forms"
    if (correction := cell.get("rollout_correction", "none")) != "none":
        return "PPO's clip" if correction == "ppo_clip" else "truncations and masks"
    switches = cell.keys() & {"train_through_quantization", "routing_replay", "length_decay"}
    return "alignment, replay, length decay" if any(cell[name] for name in switches) else "GRPO"


def _draw_learning(found: SweepLines, steps: int, path: Path) -> None:
    """Training reward over steps, and greedy accuracy at the evaluations: means and standard errors over seeds."""
    figure, (left, right) = _two_panels()
    ends: dict[str, tuple[float, str]] = {}
    for index, variant in enumerate(found.sweep.variants):
        lines = list(found.lines[variant].values())
        if not lines:
            continue
        _draw_rewards(left, [each.curves["reward"] for each in lines if "reward" in each.curves], steps, index)
        at = sorted(set.intersection(*(set(each.evaluations.get(PRIMARY, {})) for each in lines)))
        means = [mean_over_seeds([each.evaluations[PRIMARY][step] for each in lines]) for step in at]
        ends[variant.name] = _draw_means(right, at, means, index)
    left.set_ylabel("training reward, sampled")
    right.set_ylabel(ACCURACY)
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.set_ylim(bottom=0)
    _finish(figure, found, right, ends, path)


def _draw_ends(found: SweepLines, path: Path) -> None:
    """Greedy accuracy of each variant at the end, the best at the top: means and standard errors over seeds."""
    means = {v.name: mean_over_seeds(list(at.values())) for v in found.sweep.variants if (at := found.accuracy(v))}
    figure, (axes,) = new_figure(width=2 * PANEL_WIDTH, height=1.0 + 0.24 * max(1, len(means)))
    ranked = sorted(means, key=lambda name: means[name].value)
    for place, name in enumerate(ranked):
        mean, reference = means[name], name == found.sweep.reference.name
        error = 100 * (mean.standard_error or 0.0)
        axes.errorbar(100 * mean.value, place, xerr=error, fmt="o", capsize=3, color=SERIES[reference])
    axes.set_yticks(range(len(ranked)), ranked)
    axes.set_xlim(left=0)
    axes.set_xlabel(ACCURACY)
    _finish(figure, found, axes, {}, path)


def _draw_rewards(axes: Axes, curves: Sequence[Sequence[float | None]], steps: int, index: int) -> None:
    """Mean of curves with its standard error as a band, in the style of the series with this number."""
    colour, line, _ = series_style(index)
    windows = [[value for value in values if value is not None] for values in zip(*curves, strict=True)]
    centres = [(window + 0.5) * steps / WINDOWS for window, values in enumerate(windows) if values]
    means = [mean_over_seeds(values) for values in windows if values]
    low, high = ([mean.value + sign * (mean.standard_error or 0.0) for mean in means] for sign in (-1, 1))
    axes.plot(centres, [mean.value for mean in means], color=colour, linestyle=line, linewidth=1.6)
    axes.fill_between(centres, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_grid(found: SweepLines, of_series: str, of_axis: str, path: Path) -> None:
    """Greedy accuracy over one field, a series for each value of the other; and, in the same series, points above GRPO
    in step over the mismatch at the end: means and standard errors over seeds."""
    figure, (left, right) = _two_panels()
    labels = _draw_series(left, found, found.sweep.variants, of_series, of_axis)
    mismatches: list[float] = []
    for index, of_value in enumerate(by_value(found.sweep.variants, of_series).values()):
        for variant in of_value:
            test = found.against_control(variant)
            ends = [end for line in found.lines[variant].values() if (end := line.end("k3")) is not None]
            if test is not None and ends:
                mismatches.append(max(fmean(ends), LEAST))
                _draw_means(right, mismatches[-1:], [Mean(test.value, test.standard_error)], index)
    right.set_xlabel(MISMATCH)
    right.set_ylabel(GAIN)
    right.axhline(0, color=MUTED, linewidth=0.8, zorder=0)
    right.set_xscale("log")
    right.xaxis.set_minor_formatter(NullFormatter())
    if mismatches:  # whole decades, whose numbers have room
        low, high = (math.floor(math.log10(end)) for end in (min(mismatches), max(mismatches)))
        right.set_xlim(10.0**low, 10.0 ** (high + 1))
    _finish(figure, found, left, labels, path)


def _draw_panels(found: SweepLines, of_series: str, of_axis: str, of_panel: str, path: Path) -> None:
    """Greedy accuracy over one field, a series for each value of a second, a panel for each of a third."""
    panels = by_value(found.sweep.variants, of_panel)
    figure, all_axes = new_figure(1, len(panels), width=2 * PANEL_WIDTH, height=HEIGHT)
    labels: dict[str, tuple[float, str]] = {}
    for axes, (value, variants) in zip(all_axes, panels.items(), strict=True):
        labels = _draw_series(axes, found, variants, of_series, of_axis)
        axes.set_title(value)
        if before := [line.evaluations[PRIMARY][0] for each in variants for line in found.lines[each].values()]:
            axes.axhline(100 * fmean(before), color=MUTED, linewidth=0.8, zorder=0)
    highest = max(axes.get_ylim()[1] for axes in all_axes)
    for axes in all_axes:
        axes.set_ylim(0, highest)
        axes.label_outer()
    _finish(figure, found, all_axes[-1], labels, path)


def _draw_series(
    axes: Axes, found: SweepLines, variants: Sequence[Variant], of_series: str, of_axis: str
) -> dict[str, tuple[float, str]]:
    """Greedy accuracy of variants over one field, a series for each value of another: means and standard errors.

    Returns:
        The last mean of each series, in percent, and its colour, by its label.
    """
    labels: dict[str, tuple[float, str]] = {}
    for index, (value, of_value) in enumerate(by_value(variants, of_series).items()):
        ended = {variant: list(reached.values()) for variant in of_value if (reached := found.accuracy(variant))}
        if ended:
            places = [_place(variant, of_axis) for variant in ended]
            means = [mean_over_seeds(reached) for reached in ended.values()]
            labels[f"{of_series} {value}"] = _draw_means(axes, places, means, index)
    places = sorted({_place(variant, of_axis) for variant in variants})
    if places[-1] > 5 * places[0] > 0:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(of_axis)
    axes.set_ylabel(ACCURACY)
    axes.set_ylim(bottom=0)
    return labels


def _place(variant: Variant, field: str) -> float:
    """Where a variant stands on one of its sweep's `axes`."""
    number = as_number(variant.fields[field])
    assert number is not None
    return number


def _draw_means(axes: Axes, x: Sequence[float], means: Sequence[Mean], index: int) -> tuple[float, str]:
    """Means of shares, in percent, with their errors, in the style of the series with this number.

    Returns:
        The last mean, in percent, and the series' colour.
    """
    colour, line, marker = series_style(index)
    values = [100 * mean.value for mean in means]
    errors = [100 * (mean.standard_error or 0.0) for mean in means]
    axes.errorbar(x, values, errors, marker=marker, markersize=4.5, capsize=3, color=colour, linestyle=line)
    return values[-1], colour


def _two_panels() -> tuple[Figure, list[Axes]]:
    return new_figure(1, 2, width=2 * PANEL_WIDTH, height=HEIGHT)


def _finish(figure: Figure, found: SweepLines, axes: Axes, ends: Mapping[str, tuple[float, str]], path: Path) -> None:
    """Write the names of lines at their ends on `axes`, apart from each other, and the sweep's message above all."""
    ranked = sorted(ends, key=lambda name: ends[name][0])
    low, high = axes.get_ylim()
    apart = 0.065 * (high - low)  # a line of text
    # The places nearest to the ends that are this far apart (least squares).
    steps = [rank * apart for rank in range(len(ranked))]
    flat = (
        isotonic_regression([ends[name][0] - step for name, step in zip(ranked, steps, strict=True)]).x
        if ranked
        else []
    )
    for name, place, step in zip(ranked, flat, steps, strict=True):
        label_end(axes, place + step, name, ends[name][1])
    if found.sweep.message:
        _title(figure, found.sweep.message)
    save_figure(figure, path)


def _title(figure: Figure, message: str) -> None:
    figure.suptitle(textwrap.fill(message, TITLE), x=0.01, ha="left", fontsize=11, color=INK)
