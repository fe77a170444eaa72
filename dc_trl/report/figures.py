"""The look of a figure: colours, line styles, axes, the smoothed curve."""

import io
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..files import write_bytes


INK, MUTED, ACCENT = "#1f3b5c", "#9aa7b4", "#c8553d"
# Neighbours differ in lightness too, and every pair for readers who see no red or no green.
SERIES = (INK, ACCENT, "#e0a458", "#2a9d8f", "#a23b87", "#6f8fd8", "#6b6b6b")
# Solid, dashed, dotted, dash-dotted, long dashes, dash-dot-dotted: what tells lines apart in grey print.
LineStyle = Literal["-"] | tuple[float, tuple[float, ...]]
LINE_STYLES: tuple[LineStyle, ...] = (
    "-",
    (0, (4, 1.5)),
    (0, (1, 1)),
    (0, (5, 1.2, 1, 1.2)),
    (0, (9, 2)),
    (0, (4, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

PANEL_WIDTH = 4.8  # inches: text stays readable where a phone shows it 360 px wide


class Style(NamedTuple):
    """How one series is drawn: in colour and, for grey print, by line and marker."""

    colour: str
    line: LineStyle
    marker: str


def series_style(index: int, line: int | None = None) -> Style:
    """Return the style of a series.

    Colours repeat after 7 series, pairs of colour and line after 42, pairs of colour and marker after 56.

    Args:
        index: number of the series, at least 0.
        line: number of its line style and marker, where they are not to follow the colour.
    """
    line = index if line is None else line
    return Style(SERIES[index % len(SERIES)], LINE_STYLES[line % len(LINE_STYLES)], MARKERS[line % len(MARKERS)])


def new_figure(
    rows: int = 1,
    columns: int = 1,
    width: float = PANEL_WIDTH,
    height: float = 2.8,
    share_x: bool = False,
    dpi: int = 150,
) -> tuple[Figure, list[Axes]]:
    """Make a figure outside of pyplot, and return it with its axes, row by row.

    Args:
        rows, columns: of axes.
        width: of the whole figure, in inches.
        height: of each row, in inches.
        share_x: whether the columns share their x axes.
        dpi: dots per inch of a PNG.
    """
    figure = Figure(figsize=(width, height * rows), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)  # measures text; without it, matplotlib begins to save a file for each measurement
    all_axes = list(figure.subplots(rows, columns, sharex=share_x, squeeze=False).flat)
    for axes in all_axes:
        finish_axes(axes)
    return figure, all_axes


def finish_axes(axes: Axes) -> None:
    """Give axes a light grid behind the data, and no frame above and on the right."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def scale_x(axes: Axes, places: Sequence[float]) -> None:
    """Make the x axis logarithmic where the places span more than a factor of five.

    Where 0 is among them, the axis is linear below the least positive place.
    """
    positive = [place for place in places if place > 0]
    if min(places) < 0 or not positive or max(positive) <= 5 * min(positive):
        return
    if min(places) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=min(positive), linscale=0.5)


def say_empty(axes: Axes, why: str) -> None:
    """Write into the middle of axes why nothing is drawn there."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color=MUTED)


def moving_average(values: Sequence[float], window: int = 9) -> list[float]:
    """Return the centred moving average, as long as `values`. At the ends it averages what there is of the window."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw_curve(
    axes: Axes, x: Sequence[float], y: Sequence[float], style: Style | None = None, window: int = 9
) -> None:
    """Draw values in a light colour and their centred moving average in a dark one; few values as points on a line.

    Args:
        axes: to draw on.
        x, y: places, ascending, and as many values.
        style: of the line; by default dark blue, and grey for the values themselves.
        window: how many values are averaged, an odd number. Up to twice as many values are drawn as points.
    """
    colour, line, marker = style or series_style(0)
    if len(y) > 2 * window:
        raw, alpha = (MUTED, 0.8) if style is None else (colour, 0.22)
        axes.plot(x, y, color=raw, linewidth=0.8, alpha=alpha)
        axes.plot(x, moving_average(y, window), color=colour, linestyle=line, linewidth=1.8)
    else:
        axes.plot(x, y, color=colour, linestyle=line, linewidth=1.2, marker=marker, markersize=2.5)


def save_figure(figure: Figure, path: str | PathLike[str], **options: Any) -> None:
    """Write a figure in the format of the file's suffix, replacing the file in one step.

    Args:
        figure: to be drawn.
        path: of the file, which ends in a suffix that matplotlib knows.
        **options: of [`~matplotlib.figure.Figure.savefig`].

    Raises:
        OSError: the file cannot be written; the message names it.
    """
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix.removeprefix("."), **options)
    write_bytes(Path(path), content.getvalue())
