"""A page of text, tables and figures in one HTML file: no script, no request, no font from elsewhere."""

import base64
import html
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from ..files import write_text


# Above this, a figure of many points goes into the page as a PNG, which does not grow with them.
_LARGEST_SVG = 200_000  # bytes
_PRINT_DPI = 220
_WIDE = 6.0  # inches; narrower figures stand side by side where there is room

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2a37; --muted: #5d6b7a; --line: #d5dbe1; --paper: #fff; --head: #1f3b5c }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 3rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; color: var(--head) }
h2 { margin: 2.2rem 0 .6rem; padding-bottom: .2rem; font-size: 1.2rem; color: var(--head);
  border-bottom: 1px solid var(--line) }
p { max-width: 48rem; margin: .6rem 0 }
.subtitle { margin: .3rem 0 1.2rem; color: var(--muted) }
.table { overflow-x: auto; margin: .8rem 0 }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
.caption { margin: .8rem 0 -.4rem; font-size: .9rem; color: var(--muted) }
th, td { padding: .3rem .7rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line);
  white-space: pre-line }
th, td { min-width: 7rem; max-width: 22rem; overflow-wrap: anywhere }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--head) }
tr > :first-child { position: sticky; left: 0; min-width: 8rem; max-width: 14rem; padding-left: 0; text-align: left;
  overflow-wrap: anywhere; background: var(--paper) }
tbody th { font-weight: 600 }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.4rem 1.2rem;
  margin: .8rem 0 }
figure { margin: 0 }
figure.wide { grid-column: 1 / -1 }
img { display: block; width: 100%; height: auto; padding: .3rem; background: #fff; border-radius: .3rem }
figcaption { margin-top: .3rem; font-size: .85rem; line-height: 1.4; color: var(--muted) }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe5ec; --muted: #9aa7b4; --line: #37424e; --paper: #14191f; --head: #a9c4e6 }
}
@media (max-width: 30rem) { th, td { padding: .3rem .45rem } tr > :first-child { max-width: 9rem } }
@media print {
  :root { --ink: #000; --muted: #444; --line: #bbb; --paper: #fff; --head: #1f3b5c; color-scheme: light }
  @page { margin: 14mm }
  body { max-width: none; padding: 0; font-size: 10pt }
  h1, h2, .caption { break-after: avoid }
  .caption { font-size: 8pt }
  .table { overflow: visible }
  table { font-size: 8pt }
  th, td { padding: .15rem .35rem; min-width: 0 }
  tr > :first-child { position: static }
  tr, figure { break-inside: avoid }
  .figures { display: block; margin: 0 -1% }
  figure { display: inline-block; width: 47.5%; margin: 0 1% 5mm; vertical-align: top }
  figure.wide { display: block; width: 98% }
  figcaption { font-size: 8pt }
  img { padding: 0 }
}
"""

# The browser itself refuses what the page is not to do.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Page:
    """A self-contained HTML page for a phone, a desktop and paper, built from top to bottom.

    All text is escaped. Figures that follow one another stand side by side where there is room.

    Args:
        title: of the page, and its first heading.
        subtitle: a line below it.
        generator: what made the page, as its `<meta name="generator">` says (see `page_generator`).
    """

    def __init__(self, title: str, subtitle: str = "", generator: str = "dc_trl"):
        self._title = title
        self._subtitle = subtitle
        self._generator = generator
        self._blocks: list[str] = []
        self._figures: list[str] = []
        self._tables = 0  # with a caption

    def heading(self, text: str) -> None:
        """Begins a section."""
        self._add(f"<h2>{_escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Adds a paragraph."""
        self._add(f"<p>{_escape(text)}</p>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
        """Adds a table; its first column names the rows and stays in sight where a phone scrolls the table sideways.

        Args:
            header: a name for each column.
            rows: a cell for each column; a line break within one is kept.
            caption: above the table.

        Raises:
            ValueError: a row has more or fewer cells than the header.
        """
        lines = [_row("th scope=col", "th scope=col", header)]
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"row={list(row)!r} has {len(row)} cells and the header {len(header)}: give as many.")
            lines.append(_row("th scope=row", "td", row))
        head, *body = lines
        label = f'aria-label="{_escape(header[0] or "table")}"'
        if caption:  # not <caption>, which is no wider than its table
            self._tables += 1
            label = f'aria-labelledby="table-{self._tables}"'
            self._add(f'<p class="caption" id="table-{self._tables}">{_escape(caption)}</p>')
        self._add(
            f'<div class="table" role="region" tabindex="0" {label}>\n<table>\n<thead>\n{head}\n</thead>\n<tbody>\n'
            + "\n".join(body)
            + "\n</tbody>\n</table>\n</div>"
        )

    def figure(self, figure: Figure, caption: str, alt: str = "") -> None:
        """Adds a figure: as SVG, or where that is large (many points) as a PNG that is sharp in print.

        Args:
            figure: at most 6 inches wide to stand beside another one.
            caption: below it.
            alt: what a reader who cannot see the figure is told; by default the caption.
        """
        kind = ' class="wide"' if figure.get_figwidth() > _WIDE else ""
        self._figures.append(
            f'<figure{kind}>\n<img src="{_data_url(figure)}" alt="{_escape(alt or caption)}">\n'
            f"<figcaption>{_escape(caption)}</figcaption>\n</figure>"
        )

    def html(self) -> str:
        """The page."""
        self._end_figures()
        subtitle = f'<p class="subtitle">{_escape(self._subtitle)}</p>\n' if self._subtitle else ""
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta name="generator" content="{_escape(self._generator)}">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f"<title>{_escape(self._title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"<h1>{_escape(self._title)}</h1>\n{subtitle}" + "\n".join(self._blocks) + "\n</main>\n</body>\n</html>\n"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page, whole or not at all, over what is there."""
        write_text(Path(path), self.html())

    def _add(self, block: str) -> None:
        self._end_figures()
        self._blocks.append(block)

    def _end_figures(self) -> None:
        if self._figures:
            self._blocks.append('<div class="figures">\n' + "\n".join(self._figures) + "\n</div>")
            self._figures = []


def page_generator(path: str | os.PathLike[str]) -> str | None:
    """The `generator` of a page that `Page` wrote; None of any other file."""
    with open(path, "rb") as file:
        start = file.read(1000).decode("utf-8", errors="replace")
    found = re.match(r'<!DOCTYPE html>\n<html lang="en">\n(?:<.*>\n)*?<meta name="generator" content="(.*)">', start)
    return html.unescape(found[1]) if found else None


def _escape(text: str) -> str:
    # HTML has no place for control characters, escaped or not; a form feed or NUL of a file would make it invalid.
    return html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text))


def _row(first: str, other: str, cells: Sequence[str]) -> str:
    tags = [first] + [other] * (len(cells) - 1)
    # Names of settings are long; they may break behind an underscore.
    texts = [_escape(cell).replace("_", "_<wbr>") for cell in cells]
    parts = (f"<{tag}>{text}</{tag[:2]}>" for tag, text in zip(tags, texts, strict=True))
    return "<tr>" + "".join(parts) + "</tr>"


def _data_url(figure: Figure) -> str:
    # As an image, not inline: matplotlib gives the glyphs of every figure the same ids.
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "dc_trl"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    kind = "svg+xml"
    if file.tell() > _LARGEST_SVG:
        file, kind = io.BytesIO(), "png"
        figure.savefig(file, format="png", dpi=_PRINT_DPI)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
