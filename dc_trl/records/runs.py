"""What a run leaves in its output directory to be read again: settings, history, evaluations."""

import json
import logging
import math
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ..constraint.settings import ConstraintSettings
from ..files import read_object
from ..secrets import hide_in_options, is_secret_name, without_secrets
from ..settings.fields import Range
from ..settings.recipes import default_of
from .tables import with_error


HISTORY_FILE = "history.jsonl"
FIGURE_FILE = "run.png"
SETTINGS_FILE = "settings.json"
SUMMARY_FILE = "summary.json"  # what `dc-trl train` has changed, and what it cost
DEPLOYMENT_FOLDER = "deployment"  # the policy as it is served
GREEDY = "eval_greedy_reward"  # metric of the deployed policy's greedy answers to held-out problems
# What a summary holds of the policy before and after, where the run has held-out problems.
MEASURED = {
    "greedy": GREEDY,
    "greedy_se": f"{GREEDY}_se",
    "reward": "eval_reward",
    "discrepancy": "eval_discrepancy/mean",
}
ENDED = "ended/"  # begins the metric, at the last step, whose name says what ended a run before its time
TRAINER_STATE_FILE = "trainer_state.json"  # of a checkpoint: the file that transformers writes last
STEP = Range(least=0, most=2**63 - 1, whole=True)  # an optimizer step
_DEFAULTS = {field.name: default_of(field) for field in fields(ConstraintSettings)} | {"seed": 42}

logger = logging.getLogger(__name__)


class Series(NamedTuple):
    """Optimizer steps, and the values of a metric at them."""

    steps: list[int]
    values: list[float]

    def by_step(self) -> dict[int, float]:
        """Return the values by their steps; the last one where a step has several."""
        return dict(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True)
class Run:
    """A run as its files describe it."""

    name: str  # of the directory
    history: Iterable[Mapping[str, Any]]  # rows of `history.jsonl`, each with its `step`
    settings: Mapping[str, Any] = field(default_factory=dict)  # those that differ from the defaults
    summary: Mapping[str, Any] = field(default_factory=dict)  # of a finished run: `seconds`, `tokens`, `engine`, …

    def series(self, metric: str) -> Series:
        """Return the metric where it is a finite number."""
        steps, values = self.columns.get(metric, ((), ()))
        found = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        return Series([step for step, _ in found], [value for _, value in found])

    @cached_property
    def columns(self) -> Mapping[str, tuple[array, array]]:
        """Steps and values of each metric of the history, NaN where a value is no number.

        A long history is read once, and takes 16 bytes a value in place of a hundred in its rows.
        """
        columns: dict[str, tuple[array, array]] = defaultdict(lambda: (array("q"), array("d")))
        for row in self.history:
            step = row["step"]
            for name, value in row.items():
                steps, values = columns[name]
                steps.append(step)
                try:
                    values.append(value)
                except (OverflowError, TypeError):
                    values.append(math.nan)
        return dict(columns)

    def last(self, metric: str) -> float | None:
        """Return the last value of the metric; None if there is none."""
        return next(reversed(self.series(metric).values), None)

    def setting(self, name: str) -> Any:
        """Return the recorded setting, or else the default; None where that is not known."""
        return self.settings.get(name, _DEFAULTS.get(name))

    @property
    def steps(self) -> int:
        """Number of optimizer steps in the history."""
        return max(self.columns["step"][0])

    @property
    def ended_by(self) -> str | None:
        """What has ended the run before its time; None where nothing has, or it has gone on."""
        ends = [name for name, (at, _) in self.columns.items() if name.startswith(ENDED) and at[-1] == self.steps]
        return ends[-1].removeprefix(ENDED) if ends else None

    @property
    def finished(self) -> bool:
        """Whether training came to its end at the last step: the trainer then logs how long it took."""
        return bool(self.summary) or self.steps in self.series("train_runtime").steps


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether the value is a finite number."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


class History:
    """The rows of a history file, which are read anew each time: one for each log, with its `step`.

    A last line that a kill cut short is left out, and so is what is no such row, with a warning.
    """

    def __init__(self, path: str | PathLike[str]):
        self._path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        left_out = []
        with open(self._path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if line.isspace() or not line.endswith("\n"):
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict) and STEP.allows(row.get("step")):
                    yield row
                else:
                    left_out.append(number)
        if left_out:
            logger.warning(
                f"{self._path} has no row with a step in {len(left_out)} lines, line {left_out[0]} the first: they "
                "are left out."
            )


def read_history(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return all rows of a history file; see `History`."""
    return list(History(path))


def read_run(directory: str | PathLike[str]) -> Run:
    """Read a run from its output directory, whether it is finished or not.

    Raises:
        ValueError: there is no such directory, no history in it or an empty one, or a file that cannot be read.
    """
    folder = Path(directory)
    path, settings = folder / HISTORY_FILE, folder / SETTINGS_FILE
    if not path.is_file():
        raise ValueError(
            f"run={str(folder)!r} has no {HISTORY_FILE}: give the output_dir of a run of dc-trl train, or of a "
            "trainer with HistoryCallback."
        )
    set_by_user = read_object(settings) if settings.is_file() else {}
    run = Run(folder.resolve().name, History(path), set_by_user)
    if not run.columns:
        raise ValueError(f"{path} is empty: wait until the run has logged its first step (logging_steps).")
    # The summary of a run that goes on is that of its first part.
    return replace(run, summary=read_summary(folder)) if run_ended(folder, run.steps) else run


def read_summary(folder: Path) -> dict[str, Any]:
    """Read what a run wrote about itself at its end; {} where there is no such file."""
    path = folder / SUMMARY_FILE
    return read_object(path) if path.is_file() else {}


def run_ended(folder: str | PathLike[str], step: int) -> bool:
    """Return whether a run of `dc-trl train` came to its end at this step: it writes its summary last."""
    return read_summary(Path(folder)).get("steps") == step


def benchmark_metrics(run: Run) -> dict[str, str]:
    """Return the metrics `eval_BENCHMARK/avg@k` of the history by "BENCHMARK avg@k", in order."""
    found = [re.fullmatch(r"eval_(.+)/(avg@\d+)", name) for name in sorted(run.columns)]
    return {" ".join(match.groups()): match[0] for match in found if match is not None}


def outcome(run: Run) -> list[list[str]]:
    """Return a row for each result of a run: its name, and the first and the last value that the run measured.

    The step of a last value is named if the run went on after it.
    """
    held_out = MEASURED["discrepancy"]
    metrics = {
        "greedy reward": GREEDY,
        "sampled reward": "eval_reward",
        **benchmark_metrics(run),
        "discrepancy δ̄": held_out if run.series(held_out).steps else "discrepancy/mean",
        "multiplier λ": "lagrangian/lambda",
    }
    rows = []
    for label, metric in metrics.items():
        series, errors = run.series(metric), run.series(f"{metric}_se").by_step()
        values = [
            f"{value:.4g}" if step not in errors else with_error(value, errors[step], 1, 3)
            for step, value in zip(*series, strict=True)
        ]
        if values:
            at = series.steps[-1]
            last = values[-1] if at == run.steps else f"{values[-1]} (step {at})"
            rows.append([label, values[0], last if len(values) > 1 else ""])
    return rows


# --- the settings of a run as it records them: what differs from the defaults, without secrets


# TrainingArguments fills the first three in itself, and a resumed run may have the other two otherwise.
_LEFT_OUT = {"disable_tqdm", "dataloader_pin_memory", "pad_to_multiple_of", "eval_on_start", "resume_from_checkpoint"}
_EMPTY: tuple[Any, ...] = (None, "", "none", [], {})


def changed_settings(config: Any, defaults: type | None = None) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as JSON values without secrets.

    Fields and dict entries whose names mean tokens, keys or passwords are left out; strings lose what looks like a
    token, and URLs lose user and query.

    Args:
        config: an instance of a dataclass.
        defaults: a dataclass whose defaults are used where it has the field; by default the instance's own class.
    """
    standard = {f.name: f for f in fields(config)} | ({f.name: f for f in fields(defaults)} if defaults else {})
    changed = {}
    for name in (f.name for f in fields(config) if f.init and f.name not in _LEFT_OUT):
        value, default = json_value(getattr(config, name)), json_value(default_of(standard[name]))
        if not is_secret_name(name) and value != default and not (value in _EMPTY and default in _EMPTY):
            changed[name] = value
    return changed


def json_value(value: Any) -> Any:
    """Return the value as JSON represents it, without secrets."""
    if isinstance(value, Enum):
        return json_value(value.value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): json_value(v) for k, v in value.items() if not is_secret_name(str(k))}
    if isinstance(value, list | tuple):
        if all(isinstance(item, str) for item in value):
            return hide_in_options(value)  # in command-line options the secret is the word after the name
        return [json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((json_value(item) for item in value), key=str)
    if is_dataclass(value) and not isinstance(value, type):
        return changed_settings(value)
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return without_secrets(str(value))
