"""The report of one run: a self-contained page."""

from collections import defaultdict
from os import PathLike
from pathlib import Path

from ..files import make_folder, write_text
from ..records.runs import Run, read_run
from ..records.samples import three_moments
from ..records.verdict import verdict_of
from ..version import __version__
from .html import image_source, page_html
from .panels import panels_of
from .tables import facts_table, outcome_table, settings_table, time_table


def write_report(run_dir: str | PathLike[str], path: str | PathLike[str], title: str | None = None) -> Path:
    """Write what happened in a run as one self-contained HTML page.

    The run may still be going on, or have been killed. A page that stands at `path` is replaced.

    Args:
        run_dir: output directory of the run.
        path: of the page; it ends in `.html`. Missing directories are made.
        title: of the page; by default it names the run.

    Returns:
        The path of the page.

    Raises:
        ValueError: the directory holds no run or a damaged one, or the path is not that of a page.
    """
    page_path = Path(path)
    if page_path.suffix != ".html":
        raise ValueError(f"output='{page_path}' is no page: give a file whose name ends in .html.")
    run = read_run(run_dir)
    page = page_html(
        title=title or f"Run {run.name}",
        subtitle=f"dc_trl {__version__}",
        verdict=" ".join(verdict_of(run).lines),
        tables=[facts_table(run), outcome_table(run), time_table(run)],
        sections=_sections(run),
        moments=three_moments(run.moments),
        settings=settings_table(run),
    )
    make_folder("output", page_path.parent)
    write_text(page_path, page)
    return page_path


def _sections(run: Run) -> dict[str, list[dict[str, str]]]:
    """Return the figures of each section, with their descriptions and captions."""
    sections = defaultdict(list)
    for panel in panels_of(run):
        left_out = run.not_finite(panel.metric)
        note = f" Not drawn because NaN or infinite: {left_out} values." if left_out else ""
        figure = {"source": image_source(panel.figure(run)), "alt": panel.text(run), "caption": panel.caption + note}
        sections[panel.section].append(figure)
    return sections
