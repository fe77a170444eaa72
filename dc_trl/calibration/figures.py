"""Figures of a calibration, as matplotlib figures that a notebook shows."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ..report.figures import ACCENT, INK, MUTED, PANEL_WIDTH, LineStyle, new_figure, series_style
from .result import GRID, HISTOGRAM_EDGES, Bin, Calibration, EngineMismatch


MEASURES = {
    "prob_diff": "|π_train − π_inf|",
    "prob_ratio": "|π_train / π_inf − 1|",
    "log_prob": "|log π_train − log π_inf|",
}
UNEXPLAINED = "unexplained"
FEW_TOKENS = 20  # a mean over fewer is left out
_SHADES = LinearSegmentedColormap.from_list("tokens", ["#cfdbe8", INK])


def label(engine: str) -> str:
    """An engine's name for a reader: `vLLM fp8`, `replica fp8`, or the host of a URL."""
    if "://" in engine:
        return engine.split("://", 1)[1]
    return engine.replace("replica:", "replica ") if engine.startswith("replica:") else f"vLLM {engine}"


def comparison_figure(calibration: Calibration) -> Figure:
    """δ̄ and proposed ε of each engine with their 95 % intervals."""
    engines = calibration.engines
    figure, (axes,) = new_figure(height=1.1 + 0.45 * len(engines))
    for row, engine in enumerate(engines):
        delta = engine.estimates["discrepancy"]
        for offset, (value, low, high), colour, marker, name in (
            (-0.12, (delta.value, delta.low, delta.high), INK, "o", "δ̄"),
            (0.12, engine.tolerance[:3], ACCENT, "D", "proposed ε"),
        ):
            axes.plot([low, high], [row + offset] * 2, color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot(value, row + offset, marker, color=colour, markersize=6, label=name if row == 0 else None)
    axes.set_yticks(range(len(engines)), [label(engine.engine) for engine in engines])
    axes.set_ylim(len(engines) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("discrepancy, with 95 % intervals over prompts")
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def split_figure(calibration: Calibration) -> Figure:
    """δ̄ of each engine, piled up from the shares of its causes and what none explains; negative shares go left."""
    diagnosed = [engine for engine in calibration.engines if engine.diagnosis is not None]
    figure, (axes,) = new_figure(height=1.3 + 0.45 * len(diagnosed))
    splits = [engine.diagnosis.split for engine in diagnosed if engine.diagnosis is not None]
    longest_first = sorted(splits, key=lambda split: -len(split.shares))
    causes = [*dict.fromkeys(cause for split in longest_first for cause in split.shares), UNEXPLAINED]
    for row, split in enumerate(splits):
        ends = {True: 0.0, False: 0.0}  # of what is piled up to the right, and to the left
        for cause, share in (*split.shares.items(), (UNEXPLAINED, split.unexplained)):
            end = ends[share.value >= 0]
            colour, _, _ = series_style(causes.index(cause))
            axes.barh(row, share.value, left=end, height=0.6, color=colour)
            ends[share.value >= 0] = end + share.value
    handles = [Patch(color=series_style(number)[0], label=cause) for number, cause in enumerate(causes)]
    axes.set_yticks(range(len(diagnosed)), [label(engine.engine) for engine in diagnosed])
    axes.set_ylim(len(diagnosed) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # more numbers than that run into one another
    axes.set_xlabel("share of δ̄")
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return figure


def probability_figure(engines: Sequence[EngineMismatch]) -> Figure:
    """π_train against π_inf of all tokens, a panel for each engine."""
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


def histogram_figure(calibration: Calibration) -> Figure:
    """How δ is distributed over the tokens, on logarithmic scales."""
    figure, (axes,) = new_figure()
    counts = np.array([engine.histogram for engine in calibration.engines])
    used = np.flatnonzero(counts.sum(0))
    edges = np.array(HISTOGRAM_EDGES[used[0] : used[-1] + 2])
    for engine, colour, line, _ in _drawn(calibration):
        shares = np.array(engine.histogram[used[0] : used[-1] + 1]) / engine.tokens
        shares[shares == 0] = np.nan
        axes.stairs(shares, edges, color=colour, linestyle=line, linewidth=1.5, label=label(engine.engine))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"δ = {MEASURES[calibration.settings['measure']]}")
    axes.set_ylabel("share of tokens")
    _legend(axes)
    return figure


def position_figure(calibration: Calibration) -> Figure:
    """Mean δ by position in the completion, with 95 % bands."""
    figure, (axes,) = new_figure()
    for engine, colour, line, _ in _drawn(calibration):
        middle, mean, error = _filled(engine.by_position)
        middle = middle - 0.5  # the last position of a bin is one below its upper edge
        axes.fill_between(middle, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)
        axes.plot(middle, mean, color=colour, linestyle=line, linewidth=1.5, label=label(engine.engine))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("position in the completion, tokens")
    axes.set_ylabel("mean δ")
    _legend(axes)
    return figure


def confidence_figure(calibration: Calibration) -> Figure:
    """Mean δ by the probability that the engine gave the token, beside a curve in proportion to p(1 − p)."""
    figure, (axes,) = new_figure()
    for engine, colour, _, marker in _drawn(calibration):
        middle, mean, error = _filled(engine.by_probability)
        dots: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.5, "linestyle": "none"}
        axes.errorbar(middle, mean, error, **dots, elinewidth=1, label=label(engine.engine))
        if calibration.settings["measure"] == "prob_diff":
            shape = middle * (1 - middle)
            factor = (mean * shape).sum() / (shape**2).sum()
            x = np.linspace(0, 1, 101)
            axes.plot(x, factor * x * (1 - x), color=colour, linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("π_inf of the token")
    axes.set_ylabel("mean δ")
    _legend(axes)
    return figure


def weight_figure(calibration: Calibration) -> Figure:
    """How importance weights of sequences spread with length, and what is left of the sample."""
    figure, (weights, effective) = new_figure(rows=2, height=2.1, share_x=True)
    for engine, colour, line, marker in _drawn(calibration):
        tokens = [row.tokens for row in engine.growth]
        style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.5}
        weights.plot(tokens, [row.low for row in engine.growth], **style)
        weights.plot(tokens, [row.high for row in engine.growth], **style)
        ess = [100 * row.ess for row in engine.growth]
        effective.plot(tokens, ess, **style, marker=marker, markersize=3, label=label(engine.engine))
    weights.axhline(1, color=MUTED, linewidth=0.8)
    weights.set_ylabel("weight, 5–95 %")
    effective.set_ylabel("effective\nsample size, %")
    effective.set_ylim(0, 105)
    effective.set_xscale("log", base=2)
    lengths = {row.tokens for engine in calibration.engines for row in engine.growth}
    ticks = sorted(length for length in lengths if length.bit_count() == 1)  # powers of 2
    effective.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    effective.minorticks_off()
    effective.set_xlabel("tokens of the completion that count")
    _legend(effective)
    return figure


def _drawn(calibration: Calibration) -> Iterator[tuple[EngineMismatch, str, LineStyle, str]]:
    """The engines, each with its colour, line and marker."""
    for index, engine in enumerate(calibration.engines):
        yield engine, *series_style(index)


def _filled(bins: Sequence[Bin]) -> tuple[NDArray, NDArray, NDArray]:
    """Middles of the bins that hold enough tokens, their means, and half the widths of the 95 % intervals."""
    rows = [
        ((b.low + b.high) / 2, b.mean, 1.96 * b.standard_error)
        for b in bins
        if b.tokens >= FEW_TOKENS and math.isfinite(b.standard_error)
    ]
    middle, mean, error = np.array(rows).reshape(-1, 3).T
    return middle, mean, error


def _legend(axes: Axes) -> None:
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, fontsize=8)
