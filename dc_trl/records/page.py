"""The report of one run: an HTML page without scripts, requests and fonts from elsewhere, with figures and tables."""

import base64
import gc
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..files import write_text
from ..secrets import printable
from ..version import __version__
from .clock import PARTS, PREFIX
from .figures import panels_of
from .runs import Run, is_number, outcome, read_run
from .verdict import verdict_of


# Parts of a run's time whose work is done on tokens.
_WORK_ON_TOKENS = {"generation", "logps", "loss", "all"}
_DPI = 220  # sharp in print
_TEMPLATES = Environment(
    loader=PackageLoader("dc_trl.records"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


class Table(NamedTuple):
    """A table of the page, whose first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


def facts_table(run: Run) -> Table:
    """Return what was trained, when and on what, and how far it came, as far as the run has recorded it."""
    alarms = [
        (step, name) for name, (steps, _) in run.columns.items() if name.startswith("collapse/") for step in steps
    ]
    ended = run.ended_by
    known = run.setting if run.settings else lambda name: None  # without recorded settings a default is a guess
    facts = {
        "model": run.settings.get("model_name_or_path"),
        "data": run.settings.get("dataset_name"),
        "sampling engine": run.summary.get("engine", known("deployment_scheme")),
        "constraint": run.summary.get("constraint", known("constraint")),
        "tolerance ε": _number(run.last("lagrangian/tolerance"), "{:.4g}"),
        "seed": known("seed"),
        "state": f"ended by {ended}" if ended else "finished" if run.finished else "going on, or stopped",
        "optimizer steps": f"{run.steps:,}",
        "collapse alarms": ", ".join(
            f"{name.removeprefix('collapse/')} at step {step}" for step, name in sorted(alarms)
        ),
        "tokens sampled and read": _number(_tokens(run), "{:,.0f}"),
        "training seconds": _number(run.summary.get("seconds", run.last("train_runtime")), "{:,.0f}"),
    }
    rows = [[name, _text(value)] for name, value in facts.items() if value not in (None, "")]
    return Table(["", ""], rows, "What was trained, when and on what.")


def outcome_table(run: Run) -> Table:
    """Return what the run measured first and last. Rewards and benchmarks have the units of the figures."""
    caption = (
        "What came out: the first and the last value of each. Greedy reward: of the deployed policy, ± standard error "
        "over held-out problems. δ̄: on held-out problems where the run measured it there, else of a generation batch."
    )
    return Table(["", "first", "last"], outcome(run), caption)


def time_table(run: Run) -> Table:
    """Return a row for each part of the work; none where the run did not measure its time."""
    seconds = {part: sum(values) for part in PARTS if (values := run.series(f"{PREFIX}{part}").values)}
    tokens = _tokens(run)
    total = sum(seconds.values())
    rows = [
        [
            PARTS.get(part, part),
            f"{spent:,.1f}",
            f"{spent / total:.1%}",
            f"{tokens / spent:,.0f}" if tokens and part in _WORK_ON_TOKENS else "",
        ]
        for part, spent in [*seconds.items(), ("all", total)]
        if spent
    ]
    caption = (
        "Where the time of the training went; the parts do not overlap. Tokens: all tokens of the run, per second of "
        "a part that works on them."
    )
    return Table(["part", "seconds", "share", "tokens/s"], rows, caption)


def _tokens(run: Run) -> float | None:
    return run.summary.get("tokens", run.last("num_tokens"))


def _number(value: Any, form: str) -> str:
    return form.format(value) if is_number(value) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_report(run: Run | str | PathLike[str], path: str | PathLike[str], title: str | None = None) -> Path:
    """Write what happened in a run as one self-contained HTML page.

    The run may still be going on, or have been killed. A page that stands at `path` is replaced.

    Missing directories are made. Return the path of the page.

    Args:
        run: the run, or its output directory.
        path: of the page.
        title: of the page; by default the run's name.

    Raises:
        ValueError: the directory holds no run or a damaged one, or the path is not that of a page.
    """
    run = run if isinstance(run, Run) else read_run(run)
    page_path = Path(path)
    if page_path.suffix != ".html":
        raise ValueError(f"output='{page_path}' is not a page: give a file whose name ends in .html.")
    settings = [[name, _text(value)] for name, value in sorted(run.settings.items())]
    page = _TEMPLATES.get_template("page.html").render(
        title=title or f"Run {run.name}",
        subtitle=f"dc_trl {__version__}",
        verdict=verdict_of(run).lines,
        tables=[facts_table(run), outcome_table(run), time_table(run)],
        sections=_sections(run),
        settings=Table(["setting", "value"], settings, "Settings that are not the default."),
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
