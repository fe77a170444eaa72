"""What each panel of a run shows, for one run or for several in the same axes."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..records.runs import Run, Series, group_seeds
from ..records.time_parts import OTHER, PREFIX
from .drawing import (
    Line,
    accuracy,
    draw_accuracy,
    draw_benchmark,
    draw_clipping,
    draw_curves,
    draw_discrepancy,
    draw_learning_rate,
    draw_length,
    draw_multiplier,
    draw_time_shares,
    named_share,
)
from .figures import INK, has_exponent, new_figure, place_axes, save_figure, say_empty, series_style


BENCHMARK_PREFIX = "benchmark_"  # of the names of panels that benchmarks have
_NAME_LENGTH = 48  # characters of a run's name in a legend
_LEGEND_WIDTH = 56  # characters, 8 of them for each line's sample
_HEIGHT, _LEGEND_ROW = 2.8, 0.2  # inches


class Panel(NamedTuple):
    """One kind of figure.

    Args:
        name: of its PNG; stays the same.
        section: of the report that it stands in.
        label: what is drawn.
        caption: what the reader should know.
        metric: of the history; what the panel is about.
        draw: draws the runs into the axes.
        points: what of a run is drawn, if that is not the series of the metric.
    """

    name: str
    section: str
    label: str
    caption: str
    metric: str
    draw: Callable[[Axes, Sequence[Line]], None]
    points: Callable[[Run], Series] | None = None

    def series(self, run: Run) -> Series:
        """Steps and values that are drawn of the run; empty when there are none."""
        return self.points(run) if self.points else run.series(self.metric)

    def figure(self, lines: Sequence[Line]) -> Figure:
        """The panel of those runs that have something to draw; if several are compared, a legend names them."""
        drawn = [line for line in lines if self.series(line.run).steps]
        names = [_shortened(run.name) for run, _ in drawn] if len(lines) > 1 else []
        columns = max(1, _LEGEND_WIDTH // (8 + max(map(len, names), default=0)))
        legend_rows = -(-len(names) // columns)
        figure, (axes,) = new_figure(height=_HEIGHT + _LEGEND_ROW * legend_rows)
        self.draw(axes, drawn)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.tick_params(labelsize=9)
        if legend_rows:
            handles = [
                Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=4)
                for _, style in drawn
            ]
            legend = figure.legend(
                handles, names, loc="lower left", ncols=columns, frameon=False, fontsize=9, handlelength=3.4
            )
            for text in legend.get_texts():
                text.set_parse_math(False)  # a name may hold dollars
        place_axes(figure)
        # Titles stand at 1, unless an exponent is there: matplotlib's search for a place is a fourth of the drawing.
        axes.set_title(self.label, loc="left", fontsize=10.5, color=INK, y=None if has_exponent(axes) else 1.0)
        return figure

    def text(self, lines: Sequence[Line]) -> str:
        """The figure in words: first and last value of each run."""
        parts = []
        for run, _ in lines:
            steps, values = self.series(run)
            if steps:
                parts.append(f"{run.name}: {values[0]:.3g} at step {steps[0]}, {values[-1]:.3g} at step {steps[-1]}")
        return f"{self.label} over optimizer steps. " + "; ".join(parts) + "."


def _shortened(name: str) -> str:
    """The name, its middle left out where it is long: runs often differ at the end."""
    if len(name) <= _NAME_LENGTH:
        return name
    half = _NAME_LENGTH // 2
    return f"{name[:half]}…{name[-half + 1 :]}"


def run_lines(runs: Sequence[Run]) -> list[Line]:
    """A style for each run. Seeds of one setting share their colour and differ in line and marker."""
    groups = group_seeds(runs)
    if len(groups) == len(runs):
        return [Line(run, series_style(index)) for index, run in enumerate(runs)]
    styles = {run.name: series_style(i, j) for i, group in enumerate(groups) for j, run in enumerate(group)}
    return [Line(run, styles[run.name]) for run in runs]


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """The panels for which some run has a value, in the order of the report; shares of the time need a single run."""
    names = sorted({name for run in runs for row in run.history for name in row})
    benchmarks = [_benchmark_panel(found) for name in names if (found := re.fullmatch(r"eval_(.+)/(avg@\d+)", name))]
    panels = [REWARD, ACCURACY, *benchmarks, DISCREPANCY, MULTIPLIER, *_MISMATCH, LENGTH, LEARNING_RATE, *_TRAINING]
    if len(runs) == 1:
        panels.append(TIME_SHARES)
    return [panel for panel in panels if any(panel.series(run).steps for run in runs)]


def plot_run(history: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draws reward, batch discrepancy with its tolerance, and λ over the rows of a history file into a PNG.

    A run with `LengthDecayCallback` has two more panels: response length and learning rate, with surge and halvings.
    """
    run = Run("", history)
    decays = any(name.startswith("length_decay/") for row in history for name in row)
    panels = [REWARD, DISCREPANCY, MULTIPLIER, *((LENGTH, LEARNING_RATE) if decays else ())]
    figure, all_axes = new_figure(len(panels), width=7.2, height=2.0, share_x=True)
    if title:
        figure.suptitle(title, fontsize=11, color=INK).set_parse_math(False)
    for panel, axes in zip(panels, all_axes, strict=True):
        panel.draw(axes, [Line(run, series_style(0))])
        axes.set_ylabel(panel.label)
    if not MULTIPLIER.series(run).steps:
        say_empty(all_axes[2], "no constraint")
    all_axes[-1].set_xlabel("optimizer step")
    figure.align_ylabels()
    save_figure(figure, path)


_OUTCOME, _CONSTRAINT, _GAP, _COURSE = "Reward and accuracy", "Constraint", "Mismatch of the engines", "Training"


def _benchmark_panel(found: re.Match[str]) -> Panel:
    metric, benchmark, average = found[0], found[1], found[2]
    return Panel(
        BENCHMARK_PREFIX + re.sub(r"[^\w-]", "_", f"{benchmark}_{average}"),
        _OUTCOME,
        f"{benchmark} {average}",
        f"{benchmark}, answered by the deployed policy: {average} ± standard error over problems.",
        metric,
        partial(draw_benchmark, metric=metric),
    )


def _curve(section: str, metric: str, label: str, caption: str, from_zero: bool = False, log: bool = False) -> Panel:
    """A panel of one curve a run, named as its metric."""
    draw = partial(draw_curves, metric=metric, from_zero=from_zero, log=log)
    return Panel(metric.rpartition("/")[2], section, label, caption, metric, draw)


REWARD = _curve(_OUTCOME, "reward", "mean reward", "Mean reward of the rollouts.")
ACCURACY = Panel(
    "deployed_accuracy",
    _OUTCOME,
    "held-out problems, policy as deployed",
    "Held-out problems. Filled: mean reward of greedy answers, before and after, ± standard error. Hollow: of sampled "
    "answers.",
    "eval_reward",
    draw_accuracy,
    accuracy,
)
DISCREPANCY = Panel(
    "discrepancy",
    _CONSTRAINT,
    "discrepancy δ̄",
    "Batch discrepancy δ̄ between the training and the sampling engine; above the tolerance ε, λ grows.",
    "discrepancy/mean",
    draw_discrepancy,
)
MULTIPLIER = Panel(
    "lambda",
    _CONSTRAINT,
    "multiplier λ",
    "Lagrange multiplier λ; runs without a constraint have none.",
    "lagrangian/lambda",
    draw_multiplier,
)
LENGTH = Panel(
    "length",
    _COURSE,
    "response length",
    "Mean response length in tokens; of a single run from the shortest to the longest. Vertical: surge of the length.",
    "completions/mean_length",
    draw_length,
)
LEARNING_RATE = Panel(
    "learning_rate",
    _COURSE,
    "learning rate",
    "Learning rate. Vertical, with length decay: dashed the surge of the response length, dotted its halvings.",
    "learning_rate",
    draw_learning_rate,
)
_CLIPPING = Panel(
    "clip_fraction",
    _COURSE,
    "clipped fraction",
    "Fraction of tokens whose policy ratio is clipped; of a single run with its parts below and above the range.",
    "clip_ratio/region_mean",
    draw_clipping,
)
_MISMATCH = (
    _curve(_GAP, "discrepancy/k3_kl", "KL (k3), nats", "KL(π_inf ‖ π_train), k3 estimator.", from_zero=True, log=True),
    _curve(
        _GAP, "discrepancy/probs_diff_max", "largest |Δp|", "Largest |π_train − π_inf| of a token.", from_zero=True
    ),
    _curve(
        _GAP,
        "discrepancy/probs_pearson",
        "correlation of probabilities",
        "Pearson correlation of π_train and π_inf over tokens; 1 is agreement.",
    ),
    _curve(
        _GAP,
        "discrepancy/ess",
        "effective sample size",
        "Effective sample size of the importance weights π_train/π_inf, as a fraction; 1 is agreement.",
    ),
    _curve(_GAP, "discrepancy/chi2_token", "χ² of tokens", "χ² of π_train against π_inf over tokens.", log=True),
    _curve(
        _GAP,
        "discrepancy/chi2_seq",
        "χ² of trajectories",
        "χ² of π_train against π_inf over whole trajectories.",
        log=True,
    ),
    _curve(
        _GAP,
        "discrepancy/log_ppl_abs_diff",
        "|Δ log perplexity|",
        "Mean over trajectories of |log ppl_train − log ppl_inf|, the indicator of arXiv 2602.01826.",
        from_zero=True,
        log=True,
    ),
)
_TRAINING = (
    _curve(_COURSE, "entropy", "entropy, nats", "Mean entropy of the policy's tokens.", from_zero=True),
    _CLIPPING,
    _curve(_COURSE, "grad_norm", "gradient norm", "Gradient norm before clipping.", from_zero=True, log=True),
    _curve(_COURSE, "step_time", "step time, seconds", "Seconds per step.", from_zero=True),
)
TIME_SHARES = Panel(
    "time_shares",
    _COURSE,
    "shares of the time",
    "Where the time of the training went, from one log to the next.",
    f"{PREFIX}{OTHER}",
    draw_time_shares,
    named_share,
)
_ALL = (REWARD, ACCURACY, DISCREPANCY, MULTIPLIER, LENGTH, LEARNING_RATE, *_MISMATCH, *_TRAINING, TIME_SHARES)
PANEL_NAMES = frozenset(panel.name for panel in _ALL)
