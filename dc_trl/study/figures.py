"""The figures of a study: how a sweep's variants learn, and where all runs end by the mismatch that they had."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from ..ablation.results import mean_over_seeds
from ..report.figures import MUTED, PANEL_WIDTH, new_figure, say_empty, series_style
from .lines import WINDOWS, Line
from .plan import Cell, cell_name
from .tables import PRIMARY, SweepLines


_SETTING = {
    "model_name_or_path",
    "dataset_name",
    "max_completion_length",
    "learning_rate",
    "temperature",
    "per_device_train_batch_size",
    "use_vllm",
    "vllm_mode",
    "vllm_max_model_length",
    "serve",
}

_SWITCHES = {
    "train_through_quantization": "through quantization",
    "routing_replay": "routing replay",
    "length_decay": "length decay",
}


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
    """What every run gains or loses against its control, over the mismatch (k3) at its end; by `kind_of`.

    A run's control is GRPO in step in the same setting, see `controls_of`. A run without one is not drawn, and a
    mismatch below 1e-6 is drawn at 1e-6.
    """
    figure, (axes,) = new_figure(1, 1, width=2 * PANEL_WIDTH, height=3.8)
    controls = controls_of(lines)
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        mismatch, reached, control = line.end("k3"), line.last(PRIMARY), controls.get(cell_name(setting_of(line)))
        if mismatch is not None and reached is not None and control is not None:
            points.setdefault(kind_of(line), []).append((max(mismatch, 1e-6), 100 * (reached - control)))
    for index, (kind, pairs) in enumerate(sorted(points.items())):
        colour, _, marker = series_style(index)
        axes.plot(*zip(*pairs, strict=True), marker, color=colour, markersize=4.5, alpha=0.8, label=kind)
    axes.axhline(0, color=MUTED, linewidth=0.8, zorder=0)
    axes.set_xlabel("mismatch at the end of the run: KL(π_inf ‖ π_train), k3, nats")
    axes.set_ylabel("points above GRPO in step, greedy")
    if points:
        axes.set_xscale("log")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    else:
        say_empty(axes, "no run has ended")
    figure.savefig(path)


def controls_of(lines: Sequence[Line]) -> dict[str, float]:
    """Mean accuracy over seeds, from 0 to 1, of GRPO in step, by the name of its setting.

    A setting where it ends below the untrained model has no control: GRPO fails there by itself.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        after = line.last(PRIMARY)
        if line.cell == setting_of(line) and after is not None:
            found.setdefault(cell_name(line.cell), []).append((line.evaluations[PRIMARY][0], after))
    means = {name: [fmean(values) for values in zip(*pairs, strict=True)] for name, pairs in found.items()}
    return {name: after for name, (before, after) in means.items() if after >= before}


def setting_of(line: Line) -> Cell:
    """What a run has in common with its control: model, task, rate, batch, temperature, engine. The rest makes
    mismatch or acts on it."""
    return {name: value for name, value in line.cell.items() if name in _SETTING}


def kind_of(line: Line) -> str:
    """What acts on a run's mismatch: a form of the constraint, a correction, a switch, or nothing (GRPO)."""
    cell = line.cell
    kinds = []
    if cell.get("constraint", "none") != "none":
        kinds.append(str(cell.get("constraint_form", "injected")))
    if cell.get("rollout_correction", "none") != "none":
        kinds.append(str(cell["rollout_correction"]))
    kinds += [words for field, words in _SWITCHES.items() if cell.get(field)]
    return " + ".join(kinds) or "GRPO"
