"""Figures and tables of a run, from the history that `LambdaLoggingCallback` writes."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table


HISTORY_FILE = "history.jsonl"
FIGURE_FILE = "run.png"
_INK, _MUTED = "#1f3b5c", "#9aa7b4"
_ACCENT = "#c8553d"


def read_history(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a history file, one per log, each with its `step`; a last line that a kill cut short is left out."""
    text = Path(path).read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def plot_run(history: list[dict[str, Any]], path: str | Path, title: str = "") -> None:
    """Draws reward, batch discrepancy with its tolerance, and λ over the steps of a run into a PNG.

    A run with `LengthDecayCallback` has two more panels: response length and learning rate, with surge and halvings.

    Args:
        history: rows of a history file.
        path: of the PNG.
        title: above the panels.
    """
    rows = [row for row in history if row.get("discrepancy/mean") is not None]
    rewards = [row for row in history if row.get("reward") is not None]
    decays = [row for row in history if any(name.startswith("length_decay/") for name in row)]
    panels = 5 if decays else 3
    figure = Figure(figsize=(7.2, 2.0 * panels), dpi=150, layout="constrained")
    reward_axes, discrepancy_axes, lambda_axes, *decay_axes = all_axes = figure.subplots(panels, 1, sharex=True)
    if title:
        figure.suptitle(title, fontsize=11, color=_INK)

    _curve(reward_axes, [row["step"] for row in rewards], [row["reward"] for row in rewards])
    reward_axes.set_ylabel("mean reward")

    steps = [row["step"] for row in rows]
    _curve(discrepancy_axes, steps, [row["discrepancy/mean"] for row in rows])
    constrained = [row for row in rows if "lagrangian/violation" in row]
    if constrained:
        tolerance = constrained[-1]["discrepancy/mean"] - constrained[-1]["lagrangian/violation"]
        discrepancy_axes.axhline(tolerance, color=_ACCENT, linestyle="--", linewidth=1.2)
        discrepancy_axes.set_title(f"– –  tolerance ε = {tolerance:.4g}", loc="right", fontsize=8, color=_ACCENT)
    discrepancy_axes.set_ylabel("discrepancy δ̄")
    discrepancy_axes.set_ylim(bottom=0)

    lambda_axes.step(
        [row["step"] for row in constrained],
        [row["lagrangian/lambda"] for row in constrained],
        where="post",
        color=_INK,
    )
    if not constrained:
        lambda_axes.text(0.5, 0.5, "no constraint", transform=lambda_axes.transAxes, ha="center", color=_MUTED)
    lambda_axes.set_ylabel("multiplier λ")
    if decays:
        _length_decay(decay_axes[0], decay_axes[1], history, decays)
    all_axes[-1].set_xlabel("optimizer step")
    for axes in all_axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.savefig(path)


def _length_decay(
    length_axes: Axes, rate_axes: Axes, history: list[dict[str, Any]], decays: list[dict[str, Any]]
) -> None:
    lengths = [row for row in history if row.get("completions/mean_length") is not None]
    _curve(length_axes, [row["step"] for row in lengths], [row["completions/mean_length"] for row in lengths])
    length_axes.set_ylabel("response length")
    length_axes.set_ylim(bottom=0)
    rates = [row for row in history if "learning_rate" in row]
    # A step's rate holds from the end of the step before.
    rate_axes.step([row["step"] for row in rates], [row["learning_rate"] for row in rates], where="pre", color=_INK)
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_ylim(bottom=0)
    for row in decays:
        if "length_decay/halvings" in row:
            rate_axes.axvline(row["step"], color=_MUTED, linestyle=":", linewidth=1.2)
    found = {name: value for row in decays for name, value in row.items()}
    title = []
    if "length_decay/surge_step" in found:
        title.append(f"surge at step {found['length_decay/surge_step']}")
        for axes in (length_axes, rate_axes):
            axes.axvline(found["length_decay/surge_step"], color=_ACCENT, linestyle="--", linewidth=1.2)
    if "length_decay/period" in found:
        title.append(f"halved every {found['length_decay/period']} steps")
    length_axes.set_title(", ".join(title), loc="right", fontsize=8, color=_ACCENT)


def _curve(axes: Axes, steps: list[int], values: list[float], window: int = 9) -> None:
    """The values as they are, light, and their centred moving average, dark."""
    axes.plot(steps, values, color=_MUTED, linewidth=0.8, alpha=0.8)
    half = window // 2
    if len(values) > 2 * window:
        smooth = [
            sum(values[max(0, i - half) : i + half + 1]) / len(values[max(0, i - half) : i + half + 1])
            for i in range(len(values))
        ]
        axes.plot(steps, smooth, color=_INK, linewidth=1.8)
    else:
        axes.plot(steps, values, color=_INK, linewidth=1.2, marker="o", markersize=2.5)


def print_summary(rows: list[tuple[str, str, str]], title: str, console: Console | None = None) -> None:
    """Prints (quantity, before, after) rows as a table."""
    table = Table("", "before", "after", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    (console or Console()).print(table)
