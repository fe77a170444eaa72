"""The figure of a sweep: where each variant ends, and how it gets there."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation

from ..records.runs import Run
from ..report.figures import (
    INK,
    MUTED,
    PANEL_WIDTH,
    moving_average,
    new_figure,
    save_figure,
    say_empty,
    scale_x,
    series_style,
)
from .plan import as_number, show
from .results import Mean, Results, mean_over_seeds


FIGURE_FILE = "ablation.png"
_WINDOW = 9  # steps of the moving average
_BESIDE = 7  # points that the seeds stand to the left of their mean


def draw_sweep(results: Results, output: Path) -> list[Path]:
    """Draws accuracy and reward, discrepancy, and λ of each variant into `ablation.png`.

    On the left the last values, every seed as a circle and mean ± standard error beside it, on a numeric axis where
    one number tells the variants apart; on the right mean ± standard error over the steps, averaged over nine steps
    but for λ. Where variants differ in the measure of discrepancy, mean |Δp| stands for δ̄.

    Returns:
        The file; nothing if no run has ended.
    """
    if not any(results.runs.values()):
        return []
    figure, axes = new_figure(3, 2, width=2 * PANEL_WIDTH, height=2.7)
    if results.one_measure:
        ends = {"accuracy": "greedy accuracy", "held_out_discrepancy": "δ̄ held out", "lambda": "final λ"}
        curves = {"reward": "mean reward", "discrepancy/mean": "δ̄ in training", "lagrangian/lambda": "λ"}
    else:
        gap = "discrepancy/probs_diff_mean"
        ends = {"accuracy": "greedy accuracy", f"eval_{gap}": "mean |Δp| held out", "lambda": "final λ"}
        curves = {"reward": "mean reward", gap: "mean |Δp| in training", "lagrangian/lambda": "λ"}
    for panel, (name, label) in zip(axes[::2], ends.items(), strict=True):
        _draw_ends(panel, results, name)
        _place_variants(panel, results, named=panel is axes[-2])
        panel.set_ylabel(label)
    for panel, (name, label) in zip(axes[1::2], curves.items(), strict=True):
        _draw_curves(panel, results, name, window=1 if name == "lagrangian/lambda" else _WINDOW)
        panel.set_ylabel(label)
    axes[-2].set_xlabel(results.sweep.axis or "")
    axes[-1].set_xlabel("optimizer step")
    figure.align_ylabels()
    handles = []
    for index, variant in enumerate(results.sweep.variants):
        colour, line, marker = series_style(index)
        handles += axes[0].plot([], [], color=colour, linestyle=line, marker=marker, label=variant.name)
    figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9, handlelength=4)
    path = output / FIGURE_FILE
    save_figure(figure, path)
    return [path]


def _places(results: Results) -> list[float]:
    axis, variants = results.sweep.axis, results.sweep.variants
    numbers = [as_number(variant.fields[axis]) for variant in variants] if axis else range(len(variants))
    return [float(number or 0) for number in numbers]


def _place_variants(axes: Axes, results: Results, named: bool) -> None:
    """Scales the x axis, with a tick for each variant; only the lowest panel of a column names them."""
    places, axis, variants = _places(results), results.sweep.axis, results.sweep.variants
    if axis is None:
        names = [variant.name for variant in variants]
        axes.set_xlim(-0.5, len(places) - 0.5)
    else:
        names = [show(variant.fields[axis]) for variant in variants]
        scale_x(axes, places)
    axes.set_xticks(places, names if named else [""] * len(places), fontsize=8)
    if len("".join(names)) > 40:
        for label in axes.get_xticklabels():
            label.set(rotation=20, horizontalalignment="right", rotation_mode="anchor")
    axes.set_xticks([], minor=True)


def _draw_ends(axes: Axes, results: Results, name: str) -> None:
    """Circles for the seeds, and mean ± standard error, of each variant."""
    beside = axes.transData + ScaledTranslation(-_BESIDE / 72, 0, axes.figure.dpi_scale_trans)
    for index, (variant, place) in enumerate(zip(results.sweep.variants, _places(results), strict=True)):
        colour, _, marker = series_style(index)
        values = list(results.values(variant, name).values())
        if values:
            mean = mean_over_seeds(values)
            seeds = [place] * len(values)
            axes.plot(seeds, values, "o", color=MUTED, fillstyle="none", markersize=4, transform=beside)
            axes.plot(seeds, values, linestyle="")  # unseen: the limits leave out what another transform moves
            axes.errorbar(place, mean.value, mean.standard_error, color=colour, marker=marker, capsize=4)
    if not axes.lines:
        say_empty(axes, "not measured")


def _draw_curves(axes: Axes, results: Results, name: str, window: int) -> None:
    """Mean over seeds with its standard error as a band, of each variant; near δ̄, the tolerances ε."""
    tolerances: dict[float, str] = {}
    highest = 0.0
    for index, variant in enumerate(results.sweep.variants):
        colour, line, _ = series_style(index)
        runs = list(results.runs[variant].values())
        steps, means = mean_curve(runs, name, window)
        if not steps:
            continue
        low = [mean.value - (mean.standard_error or 0) for mean in means]
        high = [mean.value + (mean.standard_error or 0) for mean in means]
        highest = max(highest, *high)
        axes.plot(steps, [mean.value for mean in means], color=colour, linestyle=line, linewidth=1.5)
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        if name == "discrepancy/mean":
            for tolerance in runs[0].tolerance().values[-1:]:
                tolerances[tolerance] = INK if tolerance in tolerances else colour
    # A tolerance far above would press the curves into a line.
    near = {tolerance: colour for tolerance, colour in tolerances.items() if tolerance <= 1.5 * highest}
    for tolerance, colour in near.items():
        axes.axhline(tolerance, color=colour, linestyle=":", linewidth=1.2)
    if near:
        axes.set_title("dotted: ε", loc="right", fontsize=8, color=INK)
    if not axes.lines:
        say_empty(axes, "not measured")


def mean_curve(runs: list[Run], name: str, window: int) -> tuple[list[int], list[Mean]]:
    """Mean over runs of a history's values, each smoothed first, at the steps that all runs have."""
    curves = [curve for run in runs if (curve := run.series(name).by_step())]
    if not curves:
        return [], []
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    smooth = [moving_average([curve[step] for step in steps], window) for curve in curves]
    return steps, [mean_over_seeds(values) for values in zip(*smooth, strict=True)]
