"""The report of one run, or of several side by side: a page, its figures as PNGs, and a table for the terminal."""

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from ..files import make_folder
from ..records.runs import Run, group_seeds, read_run
from ..records.samples import three_moments
from ..records.verdict import verdict_of
from ..version import __version__
from .figures import save_figure
from .html import Page, Quote, page_generator
from .panels import BENCHMARK_PREFIX, PANEL_NAMES, Panel, panels_of, run_lines
from .tables import origin_table, seeds_table, settings_tables, summary_table, time_table


GENERATOR = "dc_trl run report"


def write_report(
    run_dirs: Sequence[str | PathLike[str]], path: str | PathLike[str], title: str | None = None
) -> list[Path]:
    """Writes what happened in runs as one self-contained HTML page, and beside it each figure as a PNG.

    The PNGs stand in a folder with the page's name, its suffix replaced by `_figures`. A run may still be going on, or
    have been killed. A report that stands at `path` is replaced; anything else is left alone, and refused.

    Args:
        run_dirs: output directories of runs, at least one.
        path: of the page; directories are made.
        title: of the page; by default it names the runs.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: a directory holds no run or is given twice, or what is no report of runs stands in the way.
    """
    page_path = Path(path)
    folder = page_path.with_name(f"{page_path.stem}_figures")
    _require_free(page_path, folder)
    runs = _read_runs(run_dirs)
    lines, panels = run_lines(runs), panels_of(runs)
    page = Page(title or _title(runs), f"dc_trl {__version__}", GENERATOR)
    page.heading("Verdict")
    for run in runs:
        page.text(" ".join([*([f"{run.name}:"] if len(runs) > 1 else []), *verdict_of(run).lines]))
    page.heading("Summary")
    for table in (origin_table(runs), summary_table(runs)):
        if table[1]:  # a history alone says nothing of its origin
            page.table(*table)
    groups = [group for group in group_seeds(runs) if len(group) > 1]
    if groups:
        page.table(*seeds_table(groups))
    if any(run.seconds_of_parts() for run in runs):
        page.table(*time_table(runs))
    figures = {}
    section = ""
    for panel in panels:
        if panel.section != section:
            section = panel.section
            page.heading(section)
        figure = panel.figure(lines)
        page.figure(figure, panel.caption + _left_out(panel, runs), panel.text(lines))
        figures[folder / f"{panel.name}.png"] = figure
    _add_samples(page, runs)
    if any(run.settings for run in runs):
        page.heading("Settings")
        for table in settings_tables(runs):
            page.table(*table)
    # The page first: it marks the folder as ours.
    make_folder("output", page_path.parent)
    page.save(page_path)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        if old not in figures and (old.stem in PANEL_NAMES or old.stem.startswith(BENCHMARK_PREFIX)):
            old.unlink()  # of a report that had more to show
    for file, figure in figures.items():
        save_figure(figure, file, pil_kwargs={"compress_level": 1})  # half the time of 6, for files a tenth larger
    return [page_path, *figures]


def _add_samples(page: Page, runs: Sequence[Run]) -> None:
    """Completions of three moments of each run that kept some."""
    if not any(run.moments for run in runs):
        return
    page.heading("Sampled completions")
    page.text(
        "Of the generation batch at each of these steps: the first completion, the one with the highest and the one "
        "with the lowest reward. The prompt stands above the line."
    )
    for run in runs:
        for moment in three_moments(run.moments):
            quotes = [
                Quote(
                    f"{sample.which}: " + ("no reward" if sample.reward is None else f"reward {sample.reward:.3f}"),
                    sample.prompt,
                    sample.completion or "(empty)",
                )
                for sample in moment.samples
            ]
            page.quotes(f"Step {moment.step}" if len(runs) == 1 else f"{run.name}, step {moment.step}", quotes)


def _require_free(page: Path, folder: Path) -> None:
    if page.is_dir():
        raise ValueError(
            f"output={str(page)!r} is a directory: give a file, for example {str(page / 'report.html')!r}."
        )
    if page.exists():
        if page_generator(page) != GENERATOR:
            raise ValueError(f"output={str(page)!r} exists and is no report of runs: choose another file.")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"output={str(page)!r} needs {str(folder)!r} for its figures, which holds something else: choose another "
            "output, or remove it."
        )


def _read_runs(run_dirs: Sequence[str | PathLike[str]]) -> list[Run]:
    """The runs, each with a name of its own: as much of its path as tells it from the others."""
    if not run_dirs:
        raise ValueError("runs=[] is empty: give at least one output_dir of a run.")
    paths = [Path(directory).resolve() for directory in run_dirs]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"run={str(path)!r} is given twice: give it once.")
    runs = []
    for directory, path in zip(run_dirs, paths, strict=True):
        run = read_run(directory)
        length = 1
        while sum(other.parts[-length:] == path.parts[-length:] for other in paths) > 1:
            length += 1
        runs.append(replace(run, name="/".join(path.parts[-length:])))
    return runs


def _title(runs: Sequence[Run]) -> str:
    return f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs compared"


def _left_out(panel: Panel, runs: Sequence[Run]) -> str:
    counts = [(run.name, run.not_finite(panel.metric)) for run in runs]
    parts = [f"{name} {count}" if len(runs) > 1 else str(count) for name, count in counts if count]
    return f" Not drawn because NaN or infinite: {', '.join(parts)} values." if parts else ""
