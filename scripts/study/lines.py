"""The raw lines of the study: what is kept of each run, one JSON object a line, from which all tables are made."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweeps import Cell, cell_name

from dc_trl.files import write_text
from dc_trl.version import __version__


LAST = 3  # evaluations whose mean is a run's accuracy: at a high learning rate a single one swings
WINDOWS = 12  # of equal length, over which a curve is averaged
HALF, SMOOTHED = 0.5, 9  # reward that counts as half solved, and batches of its moving average
# Metrics of the history whose curves are kept, by their names in a line.
CURVES = {
    "reward": "reward",
    "discrepancy": "discrepancy/mean",
    "k3": "discrepancy/k3_kl",
    "lag_k3": "discrepancy/lag_k3_kl",
    "entropy": "entropy",
    "length": "completions/mean_length",
    "grad_norm": "grad_norm",
    "lambda": "lagrangian/lambda",
    "penalty": "lagrangian/penalty_mean",
    "masked": "correction/masked_fraction",
}
BY_KIND = "accuracy/"  # of metrics whose curves are kept by their own names: a task's accuracies by kinds of problems
# Metrics of evaluations, by their names in a line: of the deployed policy, but for the last.
EVALUATIONS = {
    "greedy": "eval_greedy_reward",
    "sampled": "eval_reward",
    "held_out_discrepancy": "eval_discrepancy/mean",
    "trained_greedy": "eval_trained_greedy_reward",
}
PRIMARY = "greedy"  # the evaluation that all comparisons are about

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Line:
    """What is kept of a run.

    Args:
        cell: fields in which it differs from the study's base.
        seed: of the run.
        evaluations: by the names of `EVALUATIONS`, values by optimizer step; rewards are from 0 to 1.
        curves: by the names of `CURVES` and kinds of problems, means over `WINDOWS` equal parts of the run; None for a
            part in which nothing was measured, as where a generation batch lasts longer.
        steps_to_half: first step at which the moving average of the training reward is 0.5; None where it never is.
        seconds: of training and evaluations.
        version: of dc_trl.
        alarms: step at which each signal of the collapse alarm rings; None in lines from before this was kept.
    """

    cell: dict[str, Any]
    seed: int
    evaluations: dict[str, dict[int, float]]
    curves: dict[str, list[float | None]]
    steps_to_half: int | None
    seconds: float
    version: str
    alarms: dict[str, int] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What tells runs apart: the name of the cell, and the seed."""
        return cell_name(self.cell), self.seed

    def last(self, evaluation: str, count: int = LAST) -> float | None:
        """Return the mean over the last `count` evaluations, or over as many as there are; None without any."""
        values = [value for step, value in sorted(self.evaluations.get(evaluation, {}).items()) if step > 0]
        return statistics.fmean(values[-count:]) if values else None

    def end(self, curve: str) -> float | None:
        """Return the mean of a curve over the last sixth of the run; None where nothing was measured there."""
        values = [value for value in self.curves.get(curve, [])[-WINDOWS // 6 :] if value is not None]
        return statistics.fmean(values) if values else None

    @property
    def late_reward(self) -> float | None:
        """Mean training reward of the steps of the last quarter; None where nothing was measured there."""
        steps = max(max(evaluation) for evaluation in self.evaluations.values())
        windows = [_window_of(step, steps) for step in range(1, steps + 1)]
        rewards = [self.curves["reward"][window] for window in windows if window >= WINDOWS - WINDOWS // 4]
        known = [reward for reward in rewards if reward is not None]
        return statistics.fmean(known) if known else None


def line_of(history: History, summary: Mapping[str, Any], cell: Cell, seed: int) -> Line:
    """Return the line of a finished run, from the rows of its history and its summary."""
    from dc_trl.callbacks.collapse import CollapseMonitor  # imports TRL, which tables can do without

    steps, monitor = int(summary["steps"]), CollapseMonitor()
    kinds = {name: name for row in history for name in row if name.startswith(BY_KIND)}
    metrics = CURVES | kinds
    curves = {name: _windows(_by_step(history, metric), steps) for name, metric in metrics.items()}
    evaluations = {name: _by_step(history, metric) for name, metric in EVALUATIONS.items()}
    return Line(
        cell=dict(cell),
        seed=seed,
        evaluations={
            name: {step: _short(value) for step, value in values.items()}
            for name, values in evaluations.items()
            if values
        },
        curves={name: values for name, values in curves.items() if values},
        steps_to_half=_steps_to_half(_by_step(history, "reward")),
        seconds=round(summary["seconds"], 1),
        version=__version__,
        alarms={alarm.signal: alarm.step for row in history for alarm in monitor.update(row["step"], row)},
    )


def read_run(folder: Path, cell: Cell, seed: int) -> Line:
    """Return the line of the finished run in a folder."""
    history = [json.loads(row) for row in (folder / "history.jsonl").read_text().splitlines()]
    return line_of(history, json.loads((folder / "summary.json").read_text()), cell, seed)


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Write lines in the order of their cells and seeds, whole or not at all, over what is there."""
    ordered = sorted(lines, key=lambda line: line.key)
    write_text(path, "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in ordered))


def read_lines(path: Path) -> list[Line]:
    """Read what `write_lines` wrote."""
    lines = []
    for text in path.read_text().splitlines():
        tree = json.loads(text)
        for name, values in tree["evaluations"].items():
            tree["evaluations"][name] = {int(step): value for step, value in values.items()}
        lines.append(Line(**tree))
    return lines


def merged(old: Iterable[Line], new: Iterable[Line]) -> list[Line]:
    """Return all lines, with new ones in place of those of the same cell and seed."""
    return list(({line.key: line for line in old} | {line.key: line for line in new}).values())


def _by_step(history: History, metric: str) -> dict[int, float]:
    """Values of a metric by step, where it is a finite number."""
    values = {row["step"]: row.get(metric) for row in history if metric in row}
    return {step: value for step, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}


def _window_of(step: int, steps: int) -> int:
    return min(WINDOWS - 1, (step - 1) * WINDOWS // steps)


def _windows(by_step: Mapping[int, float], steps: int) -> list[float | None]:
    """Means over equal parts of the steps, None for a part without a value; [] where there is no value at all."""
    parts: list[list[float]] = [[] for _ in range(WINDOWS)]
    for step, value in by_step.items():
        parts[_window_of(step, steps)].append(value)
    return [_short(statistics.fmean(part)) if part else None for part in parts] if by_step else []


def _steps_to_half(rewards: Mapping[int, float]) -> int | None:
    values, half = list(rewards.values()), SMOOTHED // 2
    for index, step in enumerate(rewards):
        if statistics.fmean(values[max(0, index - half) : index + half + 1]) >= HALF:
            return step
    return None


def _short(value: float) -> float:
    """Five significant digits: more is noise."""
    return float(f"{value:.5g}") if math.isfinite(value) else value
