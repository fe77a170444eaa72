"""The figures of a run: what each shows, and how all look (colours, axes, the smoothed curve)."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..files import write_bytes
from .runs import GREEDY, Run, benchmark_metrics


INK, MUTED, ACCENT = "#1f3b5c", "#9aa7b4", "#c8553d"
_STRETCHES = 500  # of a long line, of two dots each
WINDOW = 9  # values that the dark line of a curve averages, an odd number
PANEL_WIDTH = 4.8  # inches: text stays readable where a phone shows it 360 px wide


def new_figure(
    rows: int = 1, columns: int = 1, width: float = PANEL_WIDTH, height: float = 2.8, share_x: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make a figure outside of pyplot, and return it with its axes, row by row.

    Args:
        rows, columns: of axes.
        width: of the whole figure, in inches.
        height: of each row, in inches.
        share_x: whether the columns share their x axes.
    """
    figure = Figure(figsize=(width, height * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text; without it, matplotlib begins to save a file for each measurement
    all_axes = list(figure.subplots(rows, columns, sharex=share_x, squeeze=False).flat)
    for axes in all_axes:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes


def draw_curve(axes: Axes, x: Sequence[float], y: Sequence[float], name: str = "") -> Sequence[float]:
    """Draw values in grey and their centred mean over 9 in dark blue, which is returned; few values as points.

    Args:
        axes: to draw on.
        x, y: places, ascending, and as many values.
        name: of the dark line, written at its end.
    """
    if len(y) <= 2 * WINDOW:
        axes.plot(x, y, color=INK, linewidth=1.2, marker="o", markersize=2.5)
        return y
    half = WINDOW // 2
    smooth = [fmean(y[max(0, place - half) : place + half + 1]) for place in range(len(y))]
    axes.plot(*thinned(x, by=y), color=MUTED, linewidth=0.8, alpha=0.8)
    axes.plot(*thinned(x, by=smooth), color=INK, linewidth=1.8)
    label_end(axes, smooth[-1], name, INK)
    return smooth


def thinned(*others: Sequence[float], by: Sequence[float]) -> list[list[float]]:
    """Return the values of each sequence where `by`, the last one, has its ends and extremes in short stretches.

    A line through them looks the same, and drawing it takes neither seconds nor 100 MB. Short ones stay whole.
    """
    stretch = max(1, len(by) // _STRETCHES)
    starts = range(0, len(by), stretch)
    parts = [range(start, min(start + stretch, len(by))) for start in starts]
    ends = [{part[0], min(part, key=by.__getitem__), max(part, key=by.__getitem__), part[-1]} for part in parts]
    places = [place for part in ends for place in sorted(part)]
    return [[values[place] for place in places] for values in (*others, by)]


def label_end(axes: Axes, y: float, text: str, color: str) -> None:
    """Write the name of a line right of the axes, at the height `y`."""
    axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), color=color, fontsize=9, va="center")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix, replacing the file in one step.

    Args:
        figure: to be drawn.
        path: of the file, which ends in a suffix that matplotlib knows.

    Raises:
        OSError: the file cannot be written; the message names it.
    """
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix("."))
    write_bytes(path, content.getvalue())


# --- what each figure of a run shows


_MARK: dict[str, Any] = {"color": ACCENT, "linestyle": "--", "linewidth": 1.2}  # lines that are no values of the run
_OUTCOME, _CONSTRAINT, _GAP, _COURSE = "Reward and accuracy", "Constraint", "Mismatch of the engines", "Training"


def _draw_from_zero(axes: Axes, run: Run, metric: str) -> None:
    draw_curve(axes, *run.series(metric))
    axes.set_ylim(bottom=0)


def _draw_any(axes: Axes, run: Run, metric: str) -> None:
    draw_curve(axes, *run.series(metric), name=f"mean of\n{WINDOW} logs")


def _draw_steps(axes: Axes, run: Run, metric: str) -> None:
    steps, values = run.series(metric)
    axes.step(*thinned(steps, by=values), where="post", color=INK, linewidth=1.5)


def _draw_discrepancy(axes: Axes, run: Run, metric: str) -> None:
    steps, values = run.series(metric)
    shown = dict(zip(steps, draw_curve(axes, steps, values), strict=True))
    tolerance = run.series("lagrangian/tolerance")
    constrained = "discrepancy/lag_mean" if run.settings.get("constraint_target") == "lag" else "discrepancy/mean"
    if tolerance.steps and metric == constrained:  # an automatic tolerance is known after the first batches only
        axes.step(*thinned(tolerance.steps, by=tolerance.values), where="post", **_MARK)
        label_end(axes, tolerance.values[-1], f"ε {tolerance.values[-1]:.4g}", ACCENT)
        if _moves(run):
            top = [max(shown.get(step, level), level) for step, level in zip(*tolerance, strict=True)]
            at, low, high = thinned(*tolerance, by=top)
            axes.fill_between(at, low, high, color=ACCENT, alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)  # last, since it fixes the top, which may be that of ε


def _moves(run: Run) -> bool:
    return len({*run.series("lagrangian/lambda").values}) > 1


def _draw_multiplier(axes: Axes, run: Run, metric: str) -> None:
    _draw_steps(axes, run, metric)
    _, violations = run.series("lagrangian/violation")
    if violations and _moves(run):
        _note(axes, f"grows while δ̄ > ε ({sum(v > 0 for v in violations)} of {len(violations)} logs), else falls")


def _draw_length(axes: Axes, run: Run, metric: str) -> None:
    _draw_from_zero(axes, run, metric)
    surge, period = run.last("length_decay/surge_step"), run.last("length_decay/period")
    if surge is not None:
        axes.axvline(surge, **_MARK)
        halvings = "" if period is None else f", halved every {period:g} steps"
        _note(axes, f"surge at step {surge:g}{halvings}")


def _draw_evaluations(axes: Axes, run: Run, metric: str) -> None:
    series, errors = run.series(metric), run.series(f"{metric}_se").by_step()  # a single problem has no error
    bars = [errors.get(step, 0.0) for step in series.steps]
    steps, bars, values = thinned(series.steps, bars, by=series.values)
    axes.errorbar(steps, values, bars, color=INK, linewidth=1.6, marker="o", markersize=5, capsize=3)


def _note(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="right", fontsize=9, color=ACCENT)


class Panel(NamedTuple):
    """One figure of a run, which is left out where the run does not have its metric."""

    section: str  # heading of the page that the figure stands under
    label: str  # what is drawn, the figure's title
    caption: str  # what the reader should know, printed below the figure
    metric: str  # name in the history
    draw: Callable[[Axes, Run, str], None] = _draw_from_zero  # draws the metric of a run

    def figure(self, run: Run) -> Figure:
        """Draw the run into a figure of its own."""
        figure, (axes,) = new_figure()
        self.draw(axes, run, self.metric)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.tick_params(labelsize=9)
        axes.set_title(self.label, loc="left", fontsize=10.5, color=INK)
        return figure

    def text(self, run: Run) -> str:
        """Describe the figure in words, for readers who cannot see it: its first and its last value."""
        steps, values = run.series(self.metric)
        ends = f"{values[0]:.3g} at step {steps[0]}, {values[-1]:.3g} at step {steps[-1]}"
        return f"{self.label} over optimizer steps: {ends}."


# In the order of the page.
_PANELS = (
    Panel(_OUTCOME, "mean reward", "Mean reward of the rollouts.", "reward", _draw_any),
    Panel(
        _OUTCOME,
        "held-out problems, greedy",
        "Mean reward of the deployed policy's greedy answers to held-out problems, ± standard error over problems.",
        GREEDY,
        _draw_evaluations,
    ),
    Panel(_OUTCOME, "held-out problems, sampled", "Mean reward of sampled answers.", "eval_reward", _draw_any),
    Panel(
        _CONSTRAINT,
        "discrepancy δ̄",
        "Batch discrepancy δ̄ between the training and the sampling engine. Where it is above ε (filled), λ grows.",
        "discrepancy/mean",
        _draw_discrepancy,
    ),
    Panel(
        _CONSTRAINT,
        "part of the lag",
        "Mean discrepancy between the policy and itself with the weights that sampled: what training did since then.",
        "discrepancy/lag_mean",
        _draw_discrepancy,
    ),
    Panel(
        _CONSTRAINT,
        "part of the engine",
        "Mean discrepancy between the policy with the weights that sampled and the engine: number format and kernels.",
        "discrepancy/engine_mean",
    ),
    Panel(
        _CONSTRAINT,
        "age of the weights, steps",
        "Optimizer steps between the weights that sampled a batch and those that it trains.",
        "sync/age",
    ),
    Panel(
        _CONSTRAINT, "multiplier λ", "Lagrange multiplier λ, the price of δ̄.", "lagrangian/lambda", _draw_multiplier
    ),
    Panel(
        _CONSTRAINT,
        "mean penalty",
        "What the constraint takes from a token's advantage.",
        "lagrangian/penalty_mean",
        _draw_any,
    ),
    Panel(_GAP, "KL (k3), nats", "KL(π_inf ‖ π_train), k3 estimator.", "discrepancy/k3_kl"),
    Panel(_GAP, "lag's KL (k3), nats", "k3 of what the weights did since they sampled.", "discrepancy/lag_k3_kl"),
    Panel(
        _GAP,
        "log-perplexity difference, nats",
        "Mean |difference| of a completion's log-perplexity between the engines.",
        "discrepancy/log_ppl_abs_diff",
    ),
    Panel(
        _COURSE,
        "response length",
        "Mean response length in tokens. Vertical line: surge of the length.",
        "completions/mean_length",
        _draw_length,
    ),
    Panel(
        _COURSE, "cut off", "Share of the completions that the limit of tokens cut off.", "completions/clipped_ratio"
    ),
    Panel(
        _COURSE,
        "groups without spread",
        "Share of the prompts whose completions all earned the same reward, which teach nothing.",
        "frac_reward_zero_std",
    ),
    Panel(_COURSE, "learning rate", "Learning rate.", "learning_rate", _draw_steps),
    Panel(_COURSE, "entropy, nats", "Mean entropy of the policy's tokens.", "entropy"),
    Panel(_COURSE, "gradient norm", "Gradient norm before clipping.", "grad_norm"),
)


def panels_of(run: Run) -> list[Panel]:
    """Return the panels for which the run has a value; those of a section are in the order of the page."""
    caption = "{}, answered by the deployed policy: ± standard error over problems."
    benchmarks = (
        Panel(_OUTCOME, label, caption.format(label), metric, _draw_evaluations)
        for label, metric in benchmark_metrics(run).items()
    )
    return [panel for panel in (*_PANELS, *benchmarks) if run.series(panel.metric).steps]


def plot_run(history: Iterable[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the reward, the batch discrepancy with its tolerance, and λ of a history into one PNG.

    A run with `LengthDecayCallback` has two more panels: response length, with the surge, and learning rate.

    Args:
        history: rows of a history file.
        path: of the PNG, which is replaced.
        title: printed above the panels.
    """
    run = Run("", history)
    drawn = {"discrepancy/mean", "lagrangian/lambda"}
    if any(name.startswith("length_decay/") for name in run.columns):
        drawn |= {"completions/mean_length", "learning_rate"}
    drawn = {"reward", *(metric for metric in drawn if run.series(metric).steps)}
    panels = [panel for panel in _PANELS if panel.metric in drawn]
    figure, all_axes = new_figure(len(panels), width=7.2, height=2.0, share_x=True)
    if title:
        figure.suptitle(title, fontsize=11, color=INK).set_parse_math(False)
    for panel, axes in zip(panels, all_axes, strict=True):
        panel.draw(axes, run, panel.metric)
        axes.set_ylabel(panel.label)
    all_axes[-1].set_xlabel("optimizer step")
    figure.align_ylabels()
    save_figure(figure, path)
