"""A page of text, tables and figures in one HTML file, without scripts, requests and fonts from elsewhere."""

import base64
import html
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from ..files import write_text


# A larger figure, which has many points, goes into the page as a PNG, whose size does not grow with them.
_LARGEST_SVG = 200_000  # bytes
_PRINT_DPI = 220
_WIDE = 6.0  # inches; narrower figures stand side by side where there is room


def _valid(value: Any) -> Any:
    """Replace control characters, which HTML does not allow even where they are escaped."""
    if not isinstance(value, str):
        return value
    return type(value)(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", value))


_TEMPLATES = Environment(
    loader=PackageLoader("dc_trl.report"),
    autoescape=True,
    finalize=_valid,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


class Quote(NamedTuple):
    """Text that a program or a user wrote, of any length; the page scrolls a long one."""

    label: str  # a line above it
    context: str  # the prompt that it answers
    text: str


class Page:
    """A self-contained HTML page for phone, desktop and paper, built from top to bottom.

    All text is escaped. Consecutive figures stand side by side where there is room.

    Args:
        title: of the page, and its first heading.
        subtitle: a line below it.
        generator: what made the page, for its `<meta name="generator">` (see `page_generator`).
    """

    def __init__(self, title: str, subtitle: str = "", generator: str = "dc_trl"):
        self._head = {"title": title, "subtitle": subtitle, "generator": generator}
        self._blocks: list[dict[str, Any]] = []
        self._tables = 0

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._blocks.append({"heading": text})

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._blocks.append({"text": text})

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
        """Add a table whose first column names the rows.

        Line breaks within cells are kept, and the caption stands above the table. Consecutive tables of two columns
        stand side by side where there is room. On a phone, a table of more than four columns becomes a list.

        Raises:
            ValueError: a row has more or fewer cells than the header.
        """
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"row={list(row)!r} has {len(row)} cells and the header {len(header)}: give as many.")
        self._tables += 1
        self._beside("tables", {"number": self._tables, "header": header, "rows": rows, "caption": caption})

    def quotes(self, heading: str, quotes: Sequence[Quote]) -> None:
        """Add texts that others wrote, below a heading, side by side where there is room."""
        self._blocks.append({"quotes": quotes, "over": heading})

    def figure(self, figure: Figure, caption: str, alt: str = "") -> None:
        """Add a figure as SVG, or as a PNG for print where the SVG is large.

        The figure has no background. In dark mode the browser inverts its lightness and keeps its hues.

        Args:
            figure: at most 6 inches wide to stand beside another one.
            caption: printed below it.
            alt: description for readers who cannot see the figure; by default the caption.
        """
        wide = figure.get_figwidth() > _WIDE
        self._beside("figures", {"source": _data_url(figure), "alt": alt or caption, "caption": caption, "wide": wide})

    def _beside(self, kind: str, item: dict[str, Any]) -> None:
        """Add a table or figure, in one row with those right before it."""
        if not self._blocks or kind not in self._blocks[-1]:
            self._blocks.append({kind: []})
        self._blocks[-1][kind].append(item)

    def html(self) -> str:
        """Return the page."""
        return _TEMPLATES.get_template("page.html").render(self._head, blocks=self._blocks)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page, replacing the file in one step."""
        write_text(Path(path), self.html())


def page_generator(path: str | os.PathLike[str]) -> str | None:
    """Return the `generator` of a page that `Page` wrote, and None for any other file."""
    with open(path, "rb") as file:
        start = file.read(1000).decode("utf-8", errors="replace")
    found = re.match(r'<!DOCTYPE html>\n<html lang="en">\n(?:<.*>\n)*?<meta name="generator" content="(.*)">', start)
    return html.unescape(found[1]) if found else None


def _data_url(figure: Figure) -> str:
    # As an image, not inline: matplotlib gives the glyphs of every figure the same ids.
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "dc_trl"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    kind = "svg+xml"
    if file.tell() > _LARGEST_SVG:
        file, kind = io.BytesIO(), "png"
        figure.savefig(file, format="png", dpi=_PRINT_DPI, transparent=True)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
