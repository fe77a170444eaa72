"""The figure of a calibration, which a notebook can show."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from ..report.figures import ACCENT, INK, PANEL_WIDTH, new_figure
from .result import GRID, EngineMismatch, label


_SHADES = LinearSegmentedColormap.from_list("tokens", ["#cfdbe8", INK])


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
        axes.set_title(f"{label(engine.engine)}, r = {engine.pearson:.4f}", fontsize=9, color=INK)
        figure.colorbar(mesh, ax=axes, label="tokens", shrink=0.85)
    return figure
