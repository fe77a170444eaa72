"""The look of a figure: colours, axes, the smoothed curve."""

import io
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..files import write_bytes


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


def save_figure(figure: Figure, path: str | PathLike[str]) -> None:
    """Write a figure in the format of the file's suffix, replacing the file in one step.

    Args:
        figure: to be drawn.
        path: of the file, which ends in a suffix that matplotlib knows.

    Raises:
        OSError: the file cannot be written; the message names it.
    """
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix.removeprefix("."))
    write_bytes(Path(path), content.getvalue())
