"""The look of a figure: colours, line styles, axes, the smoothed curve."""

import io
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cbook import strip_math
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

# Inches.
_ABOVE = 0.26  # a title
_EXPONENT = 0.14  # between a title and the axes
_BELOW = 0.445  # numbers and label of the x axis
_LABEL = 0.278  # from the axes down to the top of the label
_TICK = 0.14  # from a number of the y axis to the axes, and a margin
_CHARACTER, _CHARACTERS = 0.075, 6  # width of one of 9 points, and how many fit in any case
_RIGHT = 0.17  # half a number of the x axis


class Style(NamedTuple):
    """How one series is drawn: in colour and, for grey print, by line and marker."""

    colour: str
    line: LineStyle
    marker: str


def series_style(index: int, line: int | None = None) -> Style:
    """Style of the series with this number, at least 0; `line` numbers its line and marker separately from its colour.

    Colours come back after 7 series, pairs of colour and line after 42, of colour and marker after 56.
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
    """A figure that no window and no pyplot knows of, and its axes, row by row.

    The width is that of the whole figure, the height that of each row, both in inches; `dpi` is that of a PNG.
    """
    figure = Figure(figsize=(width, height * rows), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)  # measures text; without it, matplotlib begins to save a file for each measurement
    all_axes = list(figure.subplots(rows, columns, sharex=share_x, squeeze=False).flat)
    for axes in all_axes:
        finish_axes(axes)
    return figure, all_axes


def place_axes(figure: Figure) -> None:
    """Places the only axes of a figure and their x label, for good, above the figure's legend if it has one.

    Constrained layout measures every text twice. Here only the legend is measured; the rest has a known height: titles
    of one line, an exponent, an x label, and no y label. The left margin holds six characters and is the same in all
    figures, so that those of one column line up, unless a number is longer.

    Args:
        figure: with everything in it but the titles, whose place `has_exponent` decides.
    """
    figure.set_layout_engine(None)
    (axes,) = figure.axes
    width, height = figure.get_size_inches()
    bottom = _BELOW + sum(legend.get_window_extent().y1 for legend in figure.legends) / figure.dpi
    axes.set_position((0.1, bottom / height, 0.88, 1 - (bottom + _ABOVE) / height))
    axis = axes.yaxis
    numbers = axis.get_major_formatter().format_ticks(axis.get_majorticklocs().tolist())
    left = _TICK + _CHARACTER * max([_CHARACTERS, *(len(strip_math(number)) for number in numbers)])
    tall = height - bottom - _ABOVE - _EXPONENT * has_exponent(axes)
    axes.set_position((left / width, bottom / height, 1 - (left + _RIGHT) / width, tall / height))
    axes.xaxis.set_label_coords(0.5, -_LABEL / tall)
    axes.yaxis.set_label_coords(0, 0.5)  # of an empty label; else matplotlib measures all numbers to place it


def has_exponent(axes: Axes) -> bool:
    """Whether a factor that all numbers of the y axis share (1e-5) stands above it; known once they are formatted."""
    return bool(axes.yaxis.get_major_formatter().get_offset())


def finish_axes(axes: Axes) -> None:
    """A light grid behind the data, and no frame above and on the right."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def scale_x(axes: Axes, places: Sequence[float]) -> None:
    """Makes the x axis logarithmic where these numbers reach over more than a factor of five; linear below the least
    positive one where 0 is among them."""
    positive = [place for place in places if place > 0]
    if min(places) < 0 or not positive or max(positive) <= 5 * min(positive):
        return
    if min(places) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=min(positive), linscale=0.5)


def say_empty(axes: Axes, why: str) -> None:
    """Says in the middle of axes why nothing is drawn there."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color=MUTED)


def moving_average(values: Sequence[float], window: int = 9) -> list[float]:
    """Centred moving average, as long as `values`; at the ends over what there is of the window."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw_curve(
    axes: Axes, x: Sequence[float], y: Sequence[float], style: Style | None = None, window: int = 9
) -> None:
    """Draws the values as they are, light, and their centred moving average, dark; few values as points on a line.

    Args:
        axes: to draw on.
        x, y: places, ascending, and as many values.
        style: of the line; by default the house's ink, and grey for the values as they are.
        window: values that are averaged, odd. Up to twice as many values are not averaged.
    """
    colour, line, marker = style or series_style(0)
    if len(y) > 2 * window:
        raw, alpha = (MUTED, 0.8) if style is None else (colour, 0.22)
        axes.plot(x, y, color=raw, linewidth=0.8, alpha=alpha)
        axes.plot(x, moving_average(y, window), color=colour, linestyle=line, linewidth=1.8)
    else:
        axes.plot(x, y, color=colour, linestyle=line, linewidth=1.2, marker=marker, markersize=2.5)


def save_figure(figure: Figure, path: str | PathLike[str], **options: Any) -> None:
    """Writes a figure in the format of the file's suffix, whole or not at all, over what is there.

    Args:
        figure: to be drawn.
        path: of the file, which ends in a suffix that matplotlib knows.
        **options: of [`~matplotlib.figure.Figure.savefig`].

    Raises:
        OSError: the file system refused; the message names the file.
    """
    content = io.BytesIO()
    figure.savefig(content, format=Path(path).suffix.removeprefix("."), **options)
    write_bytes(Path(path), content.getvalue())
