"""The report of one run: a self-contained page."""

from os import PathLike
from pathlib import Path

from ..files import make_folder
from ..records.runs import Run, read_run
from ..records.samples import three_moments
from ..records.verdict import verdict_of
from ..version import __version__
from .html import Page, Quote, page_generator
from .panels import panels_of
from .tables import origin_table, settings_tables, summary_table, time_table


GENERATOR = "dc_trl run report"


def write_report(run_dir: str | PathLike[str], path: str | PathLike[str], title: str | None = None) -> Path:
    """Write what happened in a run as one self-contained HTML page.

    The run may still be going on, or have been killed. A report that stands at `path` is replaced; any other file is
    left alone, and refused.

    Args:
        run_dir: output directory of the run.
        path: of the page. Missing directories are made.
        title: of the page; by default it names the run.

    Returns:
        The path of the page.

    Raises:
        ValueError: the directory holds no run or a damaged one, or something that is no report stands at `path`.
    """
    page_path = Path(path)
    if page_path.is_dir():
        example = str(page_path / "report.html")
        raise ValueError(f"output={str(page_path)!r} is a directory: give a file, for example {example!r}.")
    if page_path.exists() and page_generator(page_path) != GENERATOR:
        raise ValueError(f"output={str(page_path)!r} exists and is no report of a run: choose another file.")
    run = read_run(run_dir)
    page = Page(title or f"Run {run.name}", f"dc_trl {__version__}", GENERATOR)
    page.heading("Verdict")
    page.text(" ".join(verdict_of(run).lines))
    page.heading("Summary")
    for table in (origin_table(run), summary_table(run), time_table(run)):
        if table[1]:  # a history alone says nothing of its origin
            page.table(*table)
    section = ""
    for panel in panels_of(run):
        if panel.section != section:
            section = panel.section
            page.heading(section)
        left_out = run.not_finite(panel.metric)
        note = f" Not drawn because NaN or infinite: {left_out} values." if left_out else ""
        page.figure(panel.figure(run), panel.caption + note, panel.text(run))
    _add_samples(page, run)
    if run.settings:
        page.heading("Settings")
        for table in settings_tables(run):
            page.table(*table)
    make_folder("output", page_path.parent)
    page.save(page_path)
    return page_path


def _add_samples(page: Page, run: Run) -> None:
    """Add completions of three moments, if the run kept some."""
    if not run.moments:
        return
    page.heading("Sampled completions")
    page.text(
        "Of the generation batch at each of these steps: the first completion, the one with the highest and the one "
        "with the lowest reward. The prompt stands above the line."
    )
    for moment in three_moments(run.moments):
        quotes = [
            Quote(
                f"{sample.which}: " + ("no reward" if sample.reward is None else f"reward {sample.reward:.3f}"),
                sample.prompt,
                sample.completion or "(empty)",
            )
            for sample in moment.samples
        ]
        page.quotes(f"Step {moment.step}", quotes)
