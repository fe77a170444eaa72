"""The figures of a study: how a sweep's variants learn, and where all runs end by the mismatch that they had."""

from collections.abc import Sequence
from pathlib import Path

from ..ablation.results import mean_over_seeds
from ..report.figures import PANEL_WIDTH, new_figure, say_empty, series_style
from .lines import WINDOWS, Line
from .tables import PRIMARY, SweepLines


def draw_sweep(found: SweepLines, steps: int, path: Path) -> None:
    """Training reward over steps, and greedy accuracy at the evaluations: means and standard errors over seeds.

    Args:
        found: a sweep with its lines.
        steps: of each run, for the axis.
        path: of the PNG.
    """
    figure, (left, right) = new_figure(1, 2, width=2 * PANEL_WIDTH, height=3.6)
    for index, variant in enumerate(found.sweep.variants):
        lines = list(found.lines[variant].values())
        if not lines:
            continue
        colour, line, marker = series_style(index)
        centres = [(window + 0.5) * steps / WINDOWS for window in range(WINDOWS)]
        curves = [each.curves["reward"] for each in lines if "reward" in each.curves]
        means = [mean_over_seeds(values) for values in zip(*curves, strict=True)]
        values, errors = [mean.value for mean in means], [mean.standard_error or 0.0 for mean in means]
        left.plot(centres, values, color=colour, linestyle=line, linewidth=1.6)
        low, high = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
        left.fill_between(centres, low, high, color=colour, alpha=0.15, linewidth=0)
        at = sorted(set.intersection(*(set(each.evaluations.get(PRIMARY, {})) for each in lines)))
        means = [mean_over_seeds([each.evaluations[PRIMARY][step] for each in lines]) for step in at]
        right.errorbar(
            at,
            [100 * mean.value for mean in means],
            [100 * (mean.standard_error or 0.0) for mean in means],
            color=colour,
            linestyle=line,
            marker=marker,
            markersize=4.5,
            capsize=3,
            label=variant.name,
        )
    left.set_ylabel("training reward, sampled")
    right.set_ylabel("greedy accuracy as deployed, %")
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.set_ylim(bottom=0)
        if not axes.lines:
            say_empty(axes, "no run has ended")
    handles, names = right.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)


def draw_mismatch(lines: Sequence[Line], path: Path) -> None:
    """Final accuracy of every run over the mismatch (k3) at its end; by what acts on it, see `kind_of`."""
    figure, (axes,) = new_figure(1, 1, width=2 * PANEL_WIDTH, height=3.8)
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        mismatch, reached = line.end("k3"), line.last(PRIMARY)
        if mismatch is not None and reached is not None:
            points.setdefault(kind_of(line), []).append((max(mismatch, 1e-6), 100 * reached))
    for index, (kind, pairs) in enumerate(sorted(points.items())):
        colour, _, marker = series_style(index)
        axes.plot(*zip(*pairs, strict=True), marker, color=colour, markersize=4.5, alpha=0.8, label=kind)
    axes.set_xlabel("mismatch at the end of the run: KL(π_inf ‖ π_train), k3, nats")
    axes.set_ylabel("greedy accuracy as deployed, %")
    axes.set_ylim(bottom=0)
    if points:
        axes.set_xscale("log")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    else:
        say_empty(axes, "no run has ended")
    figure.savefig(path)


def kind_of(line: Line) -> str:
    """What acts on a run's mismatch: a form of the constraint, a correction, the forward, or nothing (GRPO)."""
    cell = line.cell
    kinds = []
    if cell.get("constraint", "none") != "none":
        kinds.append(str(cell.get("constraint_form", "injected")))
    if cell.get("rollout_correction", "none") != "none":
        kinds.append(str(cell["rollout_correction"]))
    if cell.get("train_through_quantization"):
        kinds.append("through quantization")
    return " + ".join(kinds) or "GRPO"
