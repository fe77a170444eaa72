"""The report of one run: an HTML page without scripts, requests and fonts from elsewhere."""

import base64
import gc
import io
from collections import defaultdict
from os import PathLike
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..files import write_text
from ..secrets import printable
from ..version import __version__
from .outcome import facts_table, outcome_table, settings_table, time_table
from .panels import panels_of
from .runs import Run, read_run
from .verdict import verdict_of


_DPI = 220  # sharp in print


_TEMPLATES = Environment(
    loader=PackageLoader("dc_trl.records"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def write_report(run_dir: str | PathLike[str], path: str | PathLike[str], title: str | None = None) -> Path:
    """Write what happened in a run as one self-contained HTML page.

    The run may still be going on, or have been killed. A page that stands at `path` is replaced.

    Missing directories are made. Return the path of the page.

    Raises:
        ValueError: the directory holds no run or a damaged one, or the path is not that of a page.
    """
    return write_page(read_run(run_dir), path, title)


def write_page(run: Run, path: str | PathLike[str], title: str | None = None) -> Path:
    """Write the page of a run that has been read; see `write_report`."""
    page_path = Path(path)
    if page_path.suffix != ".html":
        raise ValueError(f"output='{page_path}' is not a page: give a file whose name ends in .html.")
    page = _TEMPLATES.get_template("page.html").render(
        title=title or f"Run {run.name}",
        subtitle=f"dc_trl {__version__}",
        verdict=verdict_of(run).lines,
        tables=[facts_table(run), outcome_table(run), time_table(run)],
        sections=_sections(run),
        settings=settings_table(run),
    )
    page_path.parent.mkdir(parents=True, exist_ok=True)
    write_text(page_path, printable(page))
    return page_path


def _sections(run: Run) -> dict[str, list[dict[str, str]]]:
    """Return the figures of each section, with their descriptions and captions."""
    sections = defaultdict(list)
    for panel in panels_of(run):
        file = io.BytesIO()
        # Without a background: in dark mode the browser inverts its lightness and keeps its hues.
        panel.figure(run).savefig(file, format="png", dpi=_DPI, transparent=True)
        source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        figure = {"source": source, "alt": panel.text(run), "caption": panel.caption}
        sections[panel.section].append(figure)
        gc.collect()  # a figure of many strokes holds 26 MB, and is part of a cycle
    return sections
