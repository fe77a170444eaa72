"""What each figure of a run shows."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..records.runs import Run, Series, is_number
from .figures import ACCENT, INK, MUTED, draw_curve, new_figure, save_figure


_MARK: dict[str, Any] = {"color": ACCENT, "linestyle": "--", "linewidth": 1.2}  # lines that are no values of the run


class Panel(NamedTuple):
    """One figure of a run.

    Args:
        section: heading of the page that the figure stands under.
        label: what is drawn, the figure's title.
        caption: what the reader should know, printed below the figure.
        metric: name in the history. The panel is left out where the run does not have it.
        draw: draws more than the curve of the metric; None draws that curve.
        from_zero: whether the curve's axis begins at 0.
        log: whether the curve's axis is logarithmic where a few values are far above the usual ones.
        points: the values that decide whether the panel is shown, if they are not those of the metric.
    """

    section: str
    label: str
    caption: str
    metric: str
    draw: Callable[[Axes, Run], None] | None = None
    from_zero: bool = False
    log: bool = False
    points: Callable[[Run], Series] | None = None

    def series(self, run: Run) -> Series:
        """Return the steps and values that the panel is about; empty where the run has none."""
        return self.points(run) if self.points else run.series(self.metric)

    def draw_into(self, axes: Axes, run: Run) -> None:
        """Draw the run into the axes."""
        if self.draw:
            self.draw(axes, run)
        else:
            _draw_metric(axes, run, self.metric, self.from_zero, self.log)

    def figure(self, run: Run) -> Figure:
        """Draw the run into a figure of its own."""
        figure, (axes,) = new_figure()
        self.draw_into(axes, run)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
        axes.tick_params(labelsize=9)
        axes.set_title(self.label, loc="left", fontsize=10.5, color=INK)
        return figure

    def text(self, run: Run) -> str:
        """Describe the figure in words, for readers who cannot see it: its first and its last value."""
        steps, values = self.series(run)
        ends = f"{values[0]:.3g} at step {steps[0]}, {values[-1]:.3g} at step {steps[-1]}"
        return f"{self.label} over optimizer steps: {ends}."


def panels_of(run: Run) -> list[Panel]:
    """Return the panels for which the run has a value, in the order of the page."""
    benchmarks = [_benchmark_panel(*found.groups()) for found in benchmark_metrics(run)]
    panels = [REWARD, _ACCURACY, *benchmarks, DISCREPANCY, MULTIPLIER, *_MISMATCH, *_COURSE_OF_TRAINING]
    return [panel for panel in panels if panel.series(run).steps]


def benchmark_metrics(run: Run) -> list[re.Match[str]]:
    """Return matches of the names `eval_BENCHMARK/avg@k` in the history, in order, with both parts as groups."""
    names = sorted({name for row in run.history for name in row})
    return [found for name in names if (found := re.fullmatch(r"eval_(.+)/(avg@\d+)", name))]


def plot_run(history: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw the reward, the batch discrepancy with its tolerance, and λ of a history into one PNG.

    A run with `LengthDecayCallback` has two more panels: response length and learning rate, with surge and halvings.

    Args:
        history: rows of a history file.
        path: of the PNG, which is replaced.
        title: printed above the panels.
    """
    run = Run("", history)
    decays = any(name.startswith("length_decay/") for row in history for name in row)
    panels = [REWARD, DISCREPANCY, MULTIPLIER, *((_LENGTH, _LEARNING_RATE) if decays else ())]
    figure, all_axes = new_figure(len(panels), width=7.2, height=2.0, share_x=True)
    if title:
        figure.suptitle(title, fontsize=11, color=INK).set_parse_math(False)
    for panel, axes in zip(panels, all_axes, strict=True):
        panel.draw_into(axes, run)
        axes.set_ylabel(panel.label)
    if not MULTIPLIER.series(run).steps:
        all_axes[2].text(0.5, 0.5, "no constraint", transform=all_axes[2].transAxes, ha="center", color=MUTED)
    all_axes[-1].set_xlabel("optimizer step")
    figure.align_ylabels()
    save_figure(figure, path)


# --- how a run is drawn into axes ------------------------------------------------------------------------------------


def _draw_metric(axes: Axes, run: Run, metric: str, from_zero: bool = False, log: bool = False) -> None:
    steps, values = run.series(metric)
    draw_curve(axes, steps, values)
    sizes = [abs(value) for value in values if value]
    if log and sizes and max(sizes) > 100 * statistics.median(sizes):
        # A few values are far above the others, and both should be visible.
        if min(values) > 0:
            axes.set_yscale("log")
        else:
            axes.set_yscale("symlog", linthresh=statistics.median(sizes))
    elif from_zero:
        axes.set_ylim(bottom=0)


def _note(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="right", fontsize=8, color=ACCENT)


def _greedy(run: Run) -> tuple[Series, list[float]]:
    """Return the greedy rewards that a run measured, and their standard errors; 0 where a single problem has none."""
    found = [(step, point) for step, point in run.evaluations() if is_number(point.get("greedy"))]
    series = Series([step for step, _ in found], [point["greedy"] for _, point in found])
    return series, [point.get("greedy_se") or 0.0 for _, point in found]


def _draw_accuracy(axes: Axes, run: Run) -> None:
    axes.plot(*run.series("eval_reward"), color=INK, linewidth=0.8, marker="o", markersize=3.5, mfc="white")
    _draw_with_errors(axes, *_greedy(run))


def _draw_with_errors(axes: Axes, series: Series, errors: list[float]) -> None:
    if series.steps:
        axes.errorbar(*series, errors, color=INK, linewidth=1.6, marker="o", markersize=5, capsize=3)


def _draw_discrepancy(axes: Axes, run: Run) -> None:
    _draw_metric(axes, run, "discrepancy/mean", from_zero=True, log=True)
    steps, values = run.series("lagrangian/tolerance")
    if not steps:
        return
    if len(set(values)) == 1 and steps[0] <= run.series("discrepancy/mean").steps[0]:
        axes.axhline(values[0], **_MARK)
    else:  # an automatic tolerance is known after the first batches only
        axes.step(steps, values, where="post", **_MARK)
    _note(axes, f"– –  tolerance ε = {values[-1]:.4g}")


def _draw_multiplier(axes: Axes, run: Run) -> None:
    axes.step(*run.series("lagrangian/lambda"), where="post", color=INK, linewidth=1.5)
    if not run.settings:
        return
    bounds = [run.setting(name) for name in ("lambda_min", "lambda_max")]
    low, high = axes.get_ylim()
    for bound in bounds:
        if low <= bound <= high:
            axes.axhline(bound, **_MARK)
    _note(axes, f"bounds {bounds[0]:g} and {bounds[1]:g}")


def _draw_length(axes: Axes, run: Run) -> None:
    names = [f"completions/{which}_length" for which in ("min", "max")]
    rows = [row for row in run.history if all(is_number(row.get(name)) for name in names)]
    shortest, longest = ([row[name] for row in rows] for name in names)
    axes.fill_between([row["step"] for row in rows], shortest, longest, color=MUTED, alpha=0.18, linewidth=0)
    _draw_metric(axes, run, "completions/mean_length", from_zero=True)
    surge, period = _draw_surge(axes, run), run.last("length_decay/period")
    if surge is not None:
        halvings = "" if period is None else f", halved every {period:g} steps"
        _note(axes, f"surge at step {surge:g}{halvings}")


def _draw_surge(axes: Axes, run: Run) -> float | None:
    """Mark the surge of the response length, and return its step."""
    surge = run.last("length_decay/surge_step")
    if surge is not None:
        axes.axvline(surge, **_MARK)
    return surge


def _draw_learning_rate(axes: Axes, run: Run) -> None:
    # The rate of a step applies from the end of the step before it.
    axes.step(*run.series("learning_rate"), where="pre", color=INK, linewidth=1.5)
    _draw_surge(axes, run)
    axes.set_ylim(bottom=0)


# --- the panels ------------------------------------------------------------------------------------------------------

_OUTCOME, _CONSTRAINT, _GAP, _COURSE = "Reward and accuracy", "Constraint", "Mismatch of the engines", "Training"


def _benchmark_panel(benchmark: str, average: str) -> Panel:
    metric = f"eval_{benchmark}/{average}"

    def draw(axes: Axes, run: Run) -> None:
        series, errors = run.series(metric), run.series(f"{metric}_se").by_step()  # a single problem has no error
        _draw_with_errors(axes, series, [errors.get(step, 0.0) for step in series.steps])

    caption = f"{benchmark}, answered by the deployed policy: {average} ± standard error over problems."
    return Panel(_OUTCOME, f"{benchmark} {average}", caption, metric, draw)


def _greedy_or_sampled(run: Run) -> Series:
    greedy, _ = _greedy(run)
    return greedy if greedy.steps else run.series("eval_reward")


REWARD = Panel(_OUTCOME, "mean reward", "Mean reward of the rollouts.", "reward")
_ACCURACY = Panel(
    _OUTCOME,
    "held-out problems, policy as deployed",
    "Held-out problems. Filled: mean reward of greedy answers, before and after, ± standard error. Hollow: mean "
    "reward of sampled answers.",
    "eval_reward",
    _draw_accuracy,
    points=_greedy_or_sampled,
)
DISCREPANCY = Panel(
    _CONSTRAINT,
    "discrepancy δ̄",
    "Batch discrepancy δ̄ between the training and the sampling engine; above the tolerance ε, λ grows.",
    "discrepancy/mean",
    _draw_discrepancy,
)
MULTIPLIER = Panel(_CONSTRAINT, "multiplier λ", "Lagrange multiplier λ.", "lagrangian/lambda", _draw_multiplier)
_ESS = "Effective sample size of the importance weights π_train/π_inf, as a fraction; 1 is agreement."
_PPL = "Mean over trajectories of |log ppl_train − log ppl_inf|, the indicator of arXiv 2602.01826."
_P_MAX = "Largest |π_train − π_inf| of a token."
_MISMATCH = (
    Panel(_GAP, "KL (k3), nats", "KL(π_inf ‖ π_train), k3 estimator.", "discrepancy/k3_kl", from_zero=True, log=True),
    Panel(_GAP, "largest |Δp|", _P_MAX, "discrepancy/probs_diff_max", from_zero=True),
    Panel(_GAP, "effective sample size", _ESS, "discrepancy/ess"),
    Panel(_GAP, "|Δ log perplexity|", _PPL, "discrepancy/log_ppl_abs_diff", from_zero=True, log=True),
)
_LENGTH = Panel(
    _COURSE,
    "response length",
    "Mean response length in tokens, and the range from the shortest to the longest response. Vertical line: surge of "
    "the length.",
    "completions/mean_length",
    _draw_length,
)
_LEARNING_RATE = Panel(
    _COURSE,
    "learning rate",
    "Learning rate. Vertical lines, with length decay: dashed the surge of the response length, dotted the halvings.",
    "learning_rate",
    _draw_learning_rate,
)
_CLIPPED = "Fraction of tokens whose policy ratio is clipped."
_COURSE_OF_TRAINING = (
    _LENGTH,
    _LEARNING_RATE,
    Panel(_COURSE, "entropy, nats", "Mean entropy of the policy's tokens.", "entropy", from_zero=True),
    Panel(_COURSE, "clipped fraction", _CLIPPED, "clip_ratio/region_mean", from_zero=True),
    Panel(_COURSE, "gradient norm", "Gradient norm before clipping.", "grad_norm", from_zero=True, log=True),
    Panel(_COURSE, "step time, seconds", "Seconds per step.", "step_time", from_zero=True),
)
