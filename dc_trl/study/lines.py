"""The raw lines of a study: what is kept of each run, one JSON object a line, from which all tables are made."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..ablation.jobs import is_done
from ..ablation.plan import Job
from ..files import read_text, write_text
from ..records.runs import Run, read_run
from ..report.figures import moving_average
from ..version import __version__
from .plan import Cell, cell_name


LAST = 3  # evaluations whose mean is a run's accuracy: at a high learning rate a single one swings
WINDOWS = 12  # of equal length, over which a curve is averaged
_HALF, _SMOOTHED = 0.5, 9  # reward that counts as half solved, and batches of its moving average
# Metrics of the history whose curves are kept, by their names in a line.
CURVES = {
    "reward": "reward",
    "discrepancy": "discrepancy/mean",
    "k3": "discrepancy/k3_kl",
    "entropy": "entropy",
    "length": "completions/mean_length",
    "grad_norm": "grad_norm",
    "lambda": "lagrangian/lambda",
    "penalty": "lagrangian/penalty_mean",
    "masked": "correction/masked_fraction",
}
# Metrics of evaluations, by their names in a line: of the deployed policy, but for the last.
EVALUATIONS = {
    "greedy": "eval_greedy_reward",
    "sampled": "eval_reward",
    "held_out_discrepancy": "eval_discrepancy/mean",
    "trained_greedy": "eval_trained_greedy_reward",
}


@dataclass(frozen=True)
class Line:
    """What is kept of a run.

    Args:
        cell: fields in which it differs from the study's base.
        seed: of the run.
        evaluations: by the names of `EVALUATIONS`, values by optimizer step; rewards are from 0 to 1.
        curves: by the names of `CURVES`, means over `WINDOWS` equal parts of the run; None for a part in which nothing
            was measured, as where a generation batch lasts longer.
        steps_to_half: first step at which the moving average of the training reward is 0.5; None where it never is.
        seconds: of training and evaluations.
        version: of dc_trl.
    """

    cell: dict[str, Any]
    seed: int
    evaluations: dict[str, dict[int, float]]
    curves: dict[str, list[float | None]]
    steps_to_half: int | None
    seconds: float
    version: str

    @property
    def key(self) -> tuple[str, int]:
        """What tells runs apart: the cell and the seed."""
        return cell_name(self.cell), self.seed

    def last(self, evaluation: str, count: int = LAST) -> float | None:
        """Mean over the last `count` evaluations, or over as many as there are; None where there are none."""
        values = [value for step, value in sorted(self.evaluations.get(evaluation, {}).items()) if step > 0]
        return statistics.fmean(values[-count:]) if values else None

    def end(self, curve: str) -> float | None:
        """Mean of a curve over the last sixth of the run; None where nothing was measured there."""
        values = [value for value in self.curves.get(curve, [])[-WINDOWS // 6 :] if value is not None]
        return statistics.fmean(values) if values else None


def line_of(run: Run, cell: Cell, seed: int) -> Line:
    """The line of a finished run."""
    steps = int(run.summary["steps"])
    curves = {name: _windows(run.series(metric).by_step(), steps) for name, metric in CURVES.items()}
    evaluations = {name: run.series(metric).by_step() for name, metric in EVALUATIONS.items()}
    return Line(
        cell=dict(cell),
        seed=seed,
        evaluations={name: _rounded(values) for name, values in evaluations.items() if values},
        curves={name: values for name, values in curves.items() if values},
        steps_to_half=_steps_to_half(run),
        seconds=round(run.summary["seconds"], 1),
        version=__version__,
    )


def lines_of_jobs(jobs: Iterable[Job]) -> list[Line]:
    """The lines of those jobs that are done."""
    return [line_of(read_run(job.folder), job.variant.fields, job.seed) for job in jobs if is_done(job)]


def without_line(jobs: Iterable[Job], lines: Iterable[Line]) -> list[Job]:
    """The jobs of whose cell and seed there is no line."""
    made = {line.key for line in lines}
    return [job for job in jobs if (job.variant.name, job.seed) not in made]


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Writes lines in the order of their cells and seeds, whole or not at all, over what is there."""
    ordered = sorted(lines, key=lambda line: line.key)
    write_text(path, "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in ordered))


def read_lines(path: Path) -> list[Line]:
    """Reads what `write_lines` wrote.

    Raises:
        ValueError: a line is no line of a study; the message names it.
        OSError: the file cannot be read.
    """
    lines = []
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        try:
            tree = json.loads(text)
            evaluations = {
                name: {int(step): value for step, value in values.items()}
                for name, values in tree["evaluations"].items()
            }
            lines.append(Line(**tree | {"evaluations": evaluations}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no line of a study ({error}): remove it.") from error
    return lines


def merged(old: Sequence[Line], new: Sequence[Line]) -> list[Line]:
    """Lines with new ones in place of those of the same cell and seed."""
    return list(({line.key: line for line in old} | {line.key: line for line in new}).values())


def _windows(by_step: Mapping[int, float], steps: int) -> list[float | None]:
    """Means over equal parts of the steps, None for a part without a value; [] where there is no value at all."""
    parts: list[list[float]] = [[] for _ in range(WINDOWS)]
    for step, value in by_step.items():
        parts[min(WINDOWS - 1, (step - 1) * WINDOWS // steps)].append(value)
    return [_short(statistics.fmean(part)) if part else None for part in parts] if by_step else []


def _steps_to_half(run: Run) -> int | None:
    steps, rewards = run.series("reward")
    smooth = moving_average(rewards, _SMOOTHED)
    return next((step for step, value in zip(steps, smooth, strict=True) if value >= _HALF), None)


def _rounded(values: Mapping[int, float]) -> dict[int, float]:
    return {step: _short(value) for step, value in values.items()}


def _short(value: float) -> float:
    """Five significant digits: more is noise."""
    return float(f"{value:.5g}") if math.isfinite(value) else value
