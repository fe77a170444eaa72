"""The tables of a run's page: what was trained, what came out, where the time went, what was set."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from .clock import PARTS, PREFIX
from .runs import Run, is_number, outcome


# Parts of a run's time whose work is done on tokens.
_WORK_ON_TOKENS = {"generation", "logps", "loss", "all"}


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


def settings_table(run: Run) -> Table:
    """Return the settings that are not the default."""
    rows = [[name, _text(value)] for name, value in sorted(run.settings.items())]
    return Table(["setting", "value"], rows, "Settings that are not the default.")


def _tokens(run: Run) -> float | None:
    return run.summary.get("tokens", run.last("num_tokens"))


def _number(value: Any, form: str) -> str:
    return form.format(value) if is_number(value) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
