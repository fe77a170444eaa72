"""What a run leaves in its output directory to be read again: settings, history, evaluations."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeGuard

from ..files import read_object, read_text
from .samples import Moment, read_samples
from .settings import training_defaults
from .started import read_starts
from .time_parts import PARTS, PREFIX


HISTORY_FILE = "history.jsonl"
FIGURE_FILE = "run.png"
SETTINGS_FILE = "settings.json"
BASELINE_FILE = "before.json"  # the deployed policy before the first step, as `dc-trl train` measures it
SUMMARY_FILE = "summary.json"  # the same after the last step, and what the run cost
DEPLOYMENT_FOLDER = "deployment"  # the policy as it is served

Types = Mapping[str, type | tuple[type, ...]]
# What a finished run's summary holds, the measurements in it, and what of the settings is read as a number.
_SUMMARY: Types = {
    "engine": str,
    "constraint": str,
    "steps": int,
    "before": dict,
    "after": dict,
    "lambda": (int, float),
    "tokens": (int, float),
    "seconds": (int, float),
    "seconds_of_parts": dict,
    "rewards": dict,
}
_MEASURED: Types = dict.fromkeys(("greedy", "greedy_se", "problems", "reward", "discrepancy"), (int, float, NoneType))
_PARTS: Types = dict.fromkeys(PARTS, (int, float))
_SETTINGS: Types = dict.fromkeys(("lambda_min", "lambda_max"), (int, float))

# What a run is called and where it stands, and with that what else may differ between seeds of one setting.
NAME_SETTINGS = frozenset({"output_dir", "run_name", "hub_model_id"})
SEED_SETTINGS = NAME_SETTINGS | {"seed", "data_seed"}


class Series(NamedTuple):
    """Optimizer steps and values of a metric at them."""

    steps: list[int]
    values: list[float]

    def by_step(self) -> dict[int, float]:
        """Values by their steps; the last one where a step has several."""
        return dict(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True)
class Run:
    """A run as its files tell it.

    Args:
        name: of the directory.
        history: rows of `history.jsonl`, each with its `step`.
        settings: what differs from the defaults; empty for runs of earlier versions.
        before: the deployed policy on held-out problems: `greedy`, `greedy_se`, `problems`, `greedy_is_share`,
            `reward`, `discrepancy`. `greedy` and `reward` are means of the weighted sum of all reward functions.
        summary: `after` (as `before`), `rewards` (the functions' weights by name), `steps`, `seconds`, `tokens`,
            `engine`, …; empty when the run did not finish.
        starts: when and on what it was started, see `records.started`.
        moments: completions that it kept.
    """

    name: str
    history: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    starts: Sequence[Mapping[str, Any]] = ()
    moments: Sequence[Moment] = ()

    def series(self, metric: str) -> Series:
        """The metric where it is a finite number."""
        found = [(row["step"], row[metric]) for row in self.history if is_number(row.get(metric))]
        return Series([step for step, _ in found], [value for _, value in found])

    def first(self, metric: str) -> float | None:
        """First value of the metric; None if there is none."""
        values = self.series(metric).values
        return values[0] if values else None

    def last(self, metric: str) -> float | None:
        """Last value of the metric; None if there is none."""
        values = self.series(metric).values
        return values[-1] if values else None

    def tolerance(self) -> Series:
        """The tolerance ε over the steps that had one; from δ̄ and its violation where ε itself is not logged."""
        logged = self.series("lagrangian/tolerance")
        if logged.steps:
            return logged
        means, above = (self.series(name).by_step() for name in ("discrepancy/mean", "lagrangian/violation"))
        steps = [step for step in means if step in above]
        # Rounded, because the subtraction is.
        return Series(steps, [float(f"{means[step] - above[step]:.6g}") for step in steps])

    def seconds_of_parts(self) -> dict[str, float]:
        """Seconds of each part of the work, see `records.time_parts`; {} for runs of before they were measured.

        From the summary, and of a run that has none from what its history has logged so far.
        """
        if "seconds_of_parts" in self.summary:
            return dict(self.summary["seconds_of_parts"])
        return {part: sum(values) for part in PARTS if (values := self.series(f"{PREFIX}{part}").values)}

    def not_finite(self, metric: str) -> int:
        """How many rows have the metric as NaN or infinity."""
        values = [row.get(metric) for row in self.history]
        return sum(isinstance(value, float) and not math.isfinite(value) for value in values)

    def evaluations(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Steps and measurements of the deployed policy: before training, at evaluations, and after it if it ended."""
        after = [(self.summary["steps"], self.summary["after"])] if "after" in self.summary else []
        end = after[0][0] if after else math.inf
        errors = self.series("eval_greedy_reward_se").by_step()
        between = [
            (step, {"greedy": value, "greedy_se": errors.get(step)})
            for step, value in self.series("eval_greedy_reward").by_step().items()
            if 0 < step < end
        ]
        return [(0, self.before), *between, *after]

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds of λ; None for a run without recorded settings."""
        if not self.settings:
            return None
        low, high = (setting(self, name) for name in ("lambda_min", "lambda_max"))
        return low, high

    @property
    def steps(self) -> int:
        """Optimizer steps that the history knows of."""
        return max(row["step"] for row in self.history)

    @property
    def finished(self) -> bool:
        """Whether training came to its end: the trainer then logs what it took."""
        return bool(self.summary) or any("train_runtime" in row for row in self.history)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether the value is a finite number."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def setting(run: Run, name: str) -> Any:
    """Value of a recorded setting; of one that was left alone its default, None where that is not known."""
    return run.settings.get(name, training_defaults().get(name))


def greedy_is_share(measured: Mapping[str, Any]) -> bool:
    """Whether a measured `greedy` is the share of problems that were solved, which a percentage may show.

    A run that measures it says so: it is where a single function gave each problem 0 or 1. Of runs of earlier
    versions, whose tables had a percentage, a value from 0 to 1 counts as one.
    """
    value = measured.get("greedy")
    return bool(measured.get("greedy_is_share", is_number(value) and 0 <= value <= 1))


def group_seeds(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ only in seeds and names, together; a run without recorded settings stands alone."""
    groups: list[tuple[dict[str, Any], list[Run]]] = []
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in SEED_SETTINGS}
        same = [group for other, group in groups if run.settings and group[0].settings and settings == other]
        if same:
            same[0].append(run)
        else:
            groups.append((settings, [run]))
    return [group for _, group in groups]


def read_history(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a history file, one per log, each with its `step`; a last line that a kill cut short is left out.

    Raises:
        ValueError: a line is no row of a history; the message names it.
    """
    text = read_text(Path(path))
    rows = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}): repair or remove the line.") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f"{path}, line {number} has no step: it is no row of a history, remove it.")
        rows.append(row)
    return rows


def read_run(directory: str | PathLike[str]) -> Run:
    """A run from its output directory, finished or not.

    Raises:
        ValueError: there is no such directory, no history in it or an empty one, or a file that cannot be read.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ValueError(f"run={str(folder)!r} is no directory: give the output_dir of a run.")
    path = folder / HISTORY_FILE
    if not path.is_file():
        raise ValueError(
            f"run={str(folder)!r} has no {HISTORY_FILE}: give the output_dir of a run of dc-trl train, or of a "
            "trainer with LambdaLoggingCallback."
        )
    history = read_history(path)
    if not history:
        raise ValueError(f"{path} is empty: wait until the run has logged its first step (logging_steps).")
    summary = read_summary(folder)
    before = summary.get("before") or read_baseline(folder)
    settings = _read_checked(folder / SETTINGS_FILE, _SETTINGS)
    name, starts, moments = folder.resolve().name, read_starts(folder), read_samples(folder)
    return Run(name, history, settings, before, summary, starts, moments)


def read_summary(folder: Path) -> dict[str, Any]:
    """What a finished run wrote of itself, {} where there is none.

    Raises:
        ValueError: the file lacks something, or holds something else; the message names it.
    """
    path = folder / SUMMARY_FILE
    summary = _read_checked(path, _SUMMARY, required=("steps", "after"))
    for when in ("before", "after"):
        _require_types(path, summary.get(when, {}), _MEASURED)
    _require_types(path, summary.get("seconds_of_parts", {}), _PARTS)
    return summary


def run_ended(folder: str | PathLike[str], step: int) -> bool:
    """Whether a run of `dc-trl train` has come to its end at this step: its summary is the last thing that it writes.

    Raises:
        ValueError: the summary cannot be read; the message names it.
    """
    return read_summary(Path(folder)).get("steps") == step


def read_baseline(folder: Path) -> dict[str, Any]:
    """The deployed policy before the first step, as a run measured it, {} where there is none.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    return _read_checked(folder / BASELINE_FILE, _MEASURED)


def _read_checked(path: Path, types: Types, required: Sequence[str] = ()) -> dict[str, Any]:
    """The object in a file, {} where there is no file."""
    if not path.is_file():
        return {}
    tree = read_object(path)
    for name in required:
        if name not in tree:
            raise ValueError(f"{path} lacks {name!r}: repair or remove the file.")
    _require_types(path, tree, types)
    return tree


def _require_types(path: Path, tree: Mapping[str, Any], types: Types) -> None:
    for name in types.keys() & tree.keys():
        if isinstance(tree[name], bool) or not isinstance(tree[name], types[name]):
            raise ValueError(f"{path}: {name}={tree[name]!r} is nothing that a run writes: repair or remove the file.")
