"""What each figure of a run shows."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..records.runs import GREEDY, Run, benchmark_metrics, is_number
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
    """

    section: str
    label: str
    caption: str
    metric: str
    draw: Callable[[Axes, Run], None] | None = None
    from_zero: bool = False
    log: bool = False

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
        steps, values = run.series(self.metric)
        ends = f"{values[0]:.3g} at step {steps[0]}, {values[-1]:.3g} at step {steps[-1]}"
        return f"{self.label} over optimizer steps: {ends}."


def panels_of(run: Run) -> list[Panel]:
    """Return the panels for which the run has a value, in the order of the page."""
    benchmarks = [
        _evaluation_panel(label, f"{label}, answered by the deployed policy:", metric)
        for label, metric in benchmark_metrics(run).items()
    ]
    panels = [
        REWARD,
        _GREEDY,
        _HELD_OUT,
        *benchmarks,
        DISCREPANCY,
        _FORMAT,
        _LAG,
        _AGE,
        MULTIPLIER,
        *_MISMATCH,
        *_COURSE_OF_TRAINING,
    ]
    return [panel for panel in panels if run.series(panel.metric).steps]


def plot_run(history: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw the reward, the batch discrepancy with its tolerance, and λ of a history into one PNG.

    A run with `LengthDecayCallback` has two more panels: response length, with the surge, and learning rate.

    Args:
        history: rows of a history file.
        path: of the PNG, which is replaced.
        title: printed above the panels.
    """
    run = Run("", history)
    decays = any(name.startswith("length_decay/") for row in history for name in row)
    panels = [REWARD, DISCREPANCY, MULTIPLIER, *((_LENGTH, _LEARNING_RATE) if decays else ())]
    panels = [panel for panel in panels if panel is REWARD or run.series(panel.metric).steps]
    figure, all_axes = new_figure(len(panels), width=7.2, height=2.0, share_x=True)
    if title:
        figure.suptitle(title, fontsize=11, color=INK).set_parse_math(False)
    for panel, axes in zip(panels, all_axes, strict=True):
        panel.draw_into(axes, run)
        axes.set_ylabel(panel.label)
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
        axes.set_yscale("symlog", linthresh=statistics.median(sizes))
    elif from_zero:
        axes.set_ylim(bottom=0)


def _note(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="right", fontsize=8, color=ACCENT)


def _draw_discrepancy(axes: Axes, run: Run) -> None:
    _draw_metric(axes, run, "discrepancy/mean", from_zero=True, log=True)
    if run.settings.get("constraint_target") != "lag":
        _draw_tolerance(axes, run)


def _draw_lag(axes: Axes, run: Run) -> None:
    _draw_metric(axes, run, "discrepancy/lag_mean", from_zero=True, log=True)
    if run.settings.get("constraint_target") == "lag":
        _draw_tolerance(axes, run)


def _draw_tolerance(axes: Axes, run: Run) -> None:
    steps, values = run.series("lagrangian/tolerance")
    if steps:  # an automatic tolerance is known after the first batches only
        axes.step(steps, values, where="post", **_MARK)
        _note(axes, f"– –  tolerance ε = {values[-1]:.4g}")


def _draw_multiplier(axes: Axes, run: Run) -> None:
    axes.step(*run.series("lagrangian/lambda"), where="post", color=INK, linewidth=1.5)


def _draw_age(axes: Axes, run: Run) -> None:
    axes.step(*run.series("sync/age"), where="mid", color=INK, linewidth=1.0)
    axes.set_ylim(bottom=0)


def _draw_length(axes: Axes, run: Run) -> None:
    names = [f"completions/{which}_length" for which in ("min", "max")]
    rows = [row for row in run.history if all(is_number(row.get(name)) for name in names)]
    shortest, longest = ([row[name] for row in rows] for name in names)
    axes.fill_between([row["step"] for row in rows], shortest, longest, color=MUTED, alpha=0.18, linewidth=0)
    _draw_metric(axes, run, "completions/mean_length", from_zero=True)
    surge, period = run.last("length_decay/surge_step"), run.last("length_decay/period")
    if surge is not None:
        axes.axvline(surge, **_MARK)
        halvings = "" if period is None else f", halved every {period:g} steps"
        _note(axes, f"surge at step {surge:g}{halvings}")


def _draw_learning_rate(axes: Axes, run: Run) -> None:
    # The rate of a step applies from the end of the step before it.
    axes.step(*run.series("learning_rate"), where="pre", color=INK, linewidth=1.5)
    axes.set_ylim(bottom=0)


# --- the panels ------------------------------------------------------------------------------------------------------

_OUTCOME, _CONSTRAINT, _GAP, _COURSE = "Reward and accuracy", "Constraint", "Mismatch of the engines", "Training"


def _evaluation_panel(label: str, caption: str, metric: str) -> Panel:
    """Return the panel of a mean over problems, which has its standard error beside it in the history."""

    def draw(axes: Axes, run: Run) -> None:
        series, errors = run.series(metric), run.series(f"{metric}_se").by_step()  # a single problem has no error
        bars = [errors.get(step, 0.0) for step in series.steps]
        axes.errorbar(*series, bars, color=INK, linewidth=1.6, marker="o", markersize=5, capsize=3)

    return Panel(_OUTCOME, label, f"{caption} ± standard error over problems.", metric, draw)


REWARD = Panel(_OUTCOME, "mean reward", "Mean reward of the rollouts.", "reward")
_GREEDY = _evaluation_panel(
    "held-out problems, greedy", "Mean reward of the deployed policy's greedy answers to held-out problems,", GREEDY
)
_HELD_OUT = Panel(_OUTCOME, "held-out problems, sampled", "Mean reward of sampled answers.", "eval_reward")
DISCREPANCY = Panel(
    _CONSTRAINT,
    "discrepancy δ̄",
    "Batch discrepancy δ̄ between the training and the sampling engine; above the tolerance ε, λ grows.",
    "discrepancy/mean",
    _draw_discrepancy,
)
_FORMAT = Panel(
    _CONSTRAINT,
    "part of the format",
    "Mean discrepancy between the policy and itself as it is deployed: the number format's part.",
    "discrepancy/format_mean",
    from_zero=True,
    log=True,
)
_LAG = Panel(
    _CONSTRAINT,
    "part of the lag",
    "Mean discrepancy between the deployed policy and the sampling engine: the part of older weights and of kernels.",
    "discrepancy/lag_mean",
    _draw_lag,
)
_AGE = Panel(
    _CONSTRAINT,
    "age of the weights, steps",
    "Optimizer steps between the weights that sampled a batch and those that it trains.",
    "sync/age",
    _draw_age,
)
MULTIPLIER = Panel(_CONSTRAINT, "multiplier λ", "Lagrange multiplier λ.", "lagrangian/lambda", _draw_multiplier)
_ESS = "Effective sample size of the importance weights π_train/π_inf, as a fraction; 1 is agreement."
_PPL = "Mean over trajectories of |log ppl_train − log ppl_inf|, the indicator of arXiv 2602.01826."
_MISMATCH = (
    Panel(_GAP, "KL (k3), nats", "KL(π_inf ‖ π_train), k3 estimator.", "discrepancy/k3_kl", from_zero=True, log=True),
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
    "Learning rate.",
    "learning_rate",
    _draw_learning_rate,
)
_COURSE_OF_TRAINING = (
    _LENGTH,
    _LEARNING_RATE,
    Panel(_COURSE, "entropy, nats", "Mean entropy of the policy's tokens.", "entropy", from_zero=True),
    Panel(_COURSE, "gradient norm", "Gradient norm before clipping.", "grad_norm", from_zero=True, log=True),
)
