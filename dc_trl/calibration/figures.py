"""Figures of a calibration, which a notebook can show."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..report.figures import ACCENT, INK, PANEL_WIDTH, new_figure, series_style
from .result import GRID, Calibration, EngineMismatch


MEASURES = {
    "prob_diff": "|π_train − π_inf|",
    "prob_ratio": "|π_train / π_inf − 1|",
    "log_prob": "|log π_train − log π_inf|",
}
UNEXPLAINED = "unexplained"
_SHADES = LinearSegmentedColormap.from_list("tokens", ["#cfdbe8", INK])


def label(engine: str) -> str:
    """Return an engine's name for readers: `vLLM fp8`, `replica fp8`, or the host of a URL."""
    if "://" in engine:
        return engine.split("://", 1)[1]
    return engine.replace("replica:", "replica ") if engine.startswith("replica:") else f"vLLM {engine}"


def split_figure(calibration: Calibration) -> Figure:
    """Draw δ̄ of each engine as a bar of the shares of its causes and the unexplained rest; negative shares go left."""
    splits = {each.engine: each.diagnosis.split for each in calibration.engines if each.diagnosis is not None}
    figure, (axes,) = new_figure(height=1.3 + 0.45 * len(splits))
    longest_first = sorted(splits.values(), key=lambda split: -len(split.shares))
    causes = [*dict.fromkeys(cause for split in longest_first for cause in split.shares), UNEXPLAINED]
    for row, split in enumerate(splits.values()):
        ends = {True: 0.0, False: 0.0}  # of the bars to the right, and to the left
        for cause, share in (*split.shares.items(), (UNEXPLAINED, split.unexplained)):
            end = ends[share.value >= 0]
            colour, _, _ = series_style(causes.index(cause))
            axes.barh(row, share.value, left=end, height=0.6, color=colour)
            ends[share.value >= 0] = end + share.value
    handles = [Patch(color=series_style(number)[0], label=cause) for number, cause in enumerate(causes)]
    axes.set_yticks(range(len(splits)), [label(engine) for engine in splits])
    axes.set_ylim(len(splits) - 0.5, -0.5)
    axes.set_xlim(right=1.04 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(5))  # more numbers would overlap
    axes.set_xlabel("share of δ̄")
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def probability_figure(engines: Sequence[EngineMismatch]) -> Figure:
    """Draw π_train against π_inf of all tokens, a panel for each engine."""
    columns = min(len(engines), 2)
    rows = math.ceil(len(engines) / columns)
    figure, all_axes = new_figure(rows, columns, width=PANEL_WIDTH if columns == 1 else 8.4, height=3.7)
    for axes in all_axes[len(engines) :]:
        axes.set_axis_off()
    for axes, engine in zip(all_axes, engines, strict=False):
        counts = np.zeros((GRID, GRID))
        for x, y, tokens in engine.joint:
            counts[y, x] = tokens
        edges = np.linspace(0, 1, GRID + 1)
        norm = LogNorm(1, max(counts.max(), 2))
        shown = np.ma.masked_equal(counts, 0)
        mesh = axes.pcolormesh(edges, edges, shown, norm=norm, cmap=_SHADES, rasterized=True)
        axes.plot([0, 1], [0, 1], color=ACCENT, linewidth=0.8, linestyle="--")
        axes.set_aspect("equal")
        axes.set_xlabel("π_inf (engine)")
        axes.set_ylabel("π_train (training)")
        axes.set_title(f"{label(engine.engine)}, r = {engine.metrics['probs_pearson']:.4f}", fontsize=9, color=INK)
        figure.colorbar(mesh, ax=axes, label="tokens", shrink=0.85)
    return figure
