"""What a sweep shows: mean and standard error over seeds of each variant, and paired differences to the reference."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..files import write_text
from ..records.runs import HISTORY_FILE, Run, read_run
from ..records.tables import TableRows, markdown_table, with_error
from .jobs import is_done
from .plan import Job, Sweep, Variant, show


class Metric(NamedTuple):
    """A column: its head, what a value is multiplied by to be shown, decimals (None: as many as its error allows)."""

    label: str
    factor: float = 1.0
    decimals: int | None = None


METRICS = {
    "accuracy": Metric("greedy accuracy, %", 100, 1),
    "held_out_discrepancy": Metric("δ̄ held out, 10⁻³", 1e3, 2),
    "lambda": Metric("final λ", 1, 3),
    "reward": Metric("reward, last tenth", 1, 3),
    "discrepancy": Metric("δ̄ in training, 10⁻³", 1e3, 2),
    "final_discrepancy": Metric("δ̄, last tenth, 10⁻³", 1e3, 2),
    "entropy": Metric("entropy, last tenth", 1, 3),
    "seconds": Metric("training seconds", 1, 0),
}
# In units of the measure of discrepancy, or of its inverse.
_IN_UNITS_OF_THE_MEASURE = ("held_out_discrepancy", "lambda", "discrepancy", "final_discrepancy")
RESULTS_FILES = ("results.md", "results.json")


class Mean(NamedTuple):
    """Mean over seeds with its standard error (None for a single seed)."""

    value: float
    standard_error: float | None
    seeds: int


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Mean and s/√n, with s the standard deviation over n − 1, of at least one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Mean(statistics.fmean(values), error, len(values))


def value_of(run: Run, name: str) -> float | None:
    """One of `METRICS` of a run that has ended, in natural units (an accuracy is from 0 to 1).

    Any other name is one of the history: its mean over the last tenth of the steps, or its last value before that.
    """
    after = run.summary["after"]
    if name == "accuracy":
        return after.get("greedy")
    if name == "held_out_discrepancy":
        # Without held-out problems the summary has the last batch's here, and no reward.
        return after.get("discrepancy") if "reward" in after else None
    if name == "lambda":
        return None if run.summary.get("constraint") == "none" else run.summary.get("lambda")
    if name == "seconds":
        return run.summary.get("seconds")
    begin = 0.0 if name == "discrepancy" else 0.9 * run.summary["steps"]
    series = run.series("discrepancy/mean" if name in ("discrepancy", "final_discrepancy") else name)
    values = [value for step, value in zip(*series, strict=True) if step > begin] or series.values[-1:]
    return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Results:
    """Ended runs of a sweep, by variant and seed."""

    sweep: Sweep
    runs: dict[Variant, dict[int, Run]]

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.sweep.metrics or tuple(METRICS)

    @property
    def one_measure(self) -> bool:
        """Whether all variants measure discrepancy in the same units."""
        settings = [self.sweep.settings(variant) for variant in self.sweep.variants]
        return len({each.get("discrepancy_measure") for each in settings}) == 1

    def values(self, variant: Variant, metric: str) -> dict[int, float]:
        """A metric of a variant's runs by their seeds, without the runs that do not have it."""
        found = {seed: value_of(run, metric) for seed, run in self.runs[variant].items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, variant: Variant, metric: str) -> Mean | None:
        """Mean of a metric over the seeds that have ended; None where none has."""
        values = list(self.values(variant, metric).values())
        return mean_over_seeds(values) if values else None

    def difference(self, variant: Variant, metric: str) -> Mean | None:
        """Mean of the variant's values minus the reference's, over the seeds that both have.

        None where they share no seed, or are in units of two measures.
        """
        if metric in _IN_UNITS_OF_THE_MEASURE and not self.one_measure:
            return None
        mine, other = self.values(variant, metric), self.values(self.sweep.reference, metric)
        differences = [mine[seed] - other[seed] for seed in mine if seed in other]
        return mean_over_seeds(differences) if differences else None

    def tables(self) -> list[tuple[str, TableRows]]:
        """Titles and tables: the means, and the differences to the reference.

        Rows are the variants, or the metrics, whichever are more.
        """
        sweep = self.sweep
        labels = ["seeds", *(metric(name).label for name in self.metrics)]
        means = {
            variant: [
                f"{len(self.runs[variant])} of {len(sweep.seeds)}",
                *(show_mean(self.mean(variant, name), name) for name in self.metrics),
            ]
            for variant in sweep.variants
        }
        tables = [("Mean ± standard error over seeds", self._lay_out(labels, means))]
        others = [variant for variant in sweep.variants if variant != sweep.reference]
        differences = {v: [show_mean(self.difference(v, name), name, "+") for name in self.metrics] for v in others}
        if differences:
            title = f"Difference to {sweep.reference.name}, paired by seed, mean ± standard error"
            tables.append((title, self._lay_out(labels[1:], differences)))
        return tables

    def _lay_out(self, labels: list[str], cells: dict[Variant, list[str]]) -> TableRows:
        axis = self.sweep.axis
        names = [show(variant.fields[axis]) if axis else variant.name for variant in cells]
        columns = [
            [axis or "variant", *labels],
            *([name, *of] for name, of in zip(names, cells.values(), strict=True)),
        ]
        if len(names) >= len(labels):
            return columns[0], columns[1:]
        rows = [list(row) for row in zip(*columns, strict=True)]
        return rows[0], rows[1:]

    def as_json(self) -> dict[str, Any]:
        """Every value in natural units, by variant and seed, with means and differences."""
        names = list(dict.fromkeys([*METRICS, *self.metrics]))

        def numbers(mean: Mean | None) -> dict[str, Any] | None:
            return None if mean is None else mean._asdict()

        return {
            "sweep": self.sweep.name,
            "seeds": list(self.sweep.seeds),
            "reference": self.sweep.reference.name,
            "base": self.sweep.base,
            "variants": [
                {
                    "name": variant.name,
                    "fields": variant.fields,
                    "runs": {
                        str(seed): {name: value_of(run, name) for name in names}
                        for seed, run in self.runs[variant].items()
                    },
                    "means": {name: numbers(self.mean(variant, name)) for name in names},
                    "differences": {name: numbers(self.difference(variant, name)) for name in names},
                }
                for variant in self.sweep.variants
            ],
        }


def metric(name: str) -> Metric:
    return METRICS.get(name, Metric(name))


def show_mean(mean: Mean | None, name: str, sign: str = "") -> str:
    """A cell of the table."""
    if mean is None:
        return "–"
    _, factor, decimals = metric(name)
    if decimals is None:  # two significant digits of the error, or of the value where there is none
        scale = mean.standard_error or abs(mean.value)
        decimals = max(0, 1 - math.floor(math.log10(scale))) if scale else 0
    return with_error(mean.value, mean.standard_error, factor, decimals, sign)


def collect(sweep: Sweep, jobs: Sequence[Job]) -> Results:
    """Reads the runs that have ended.

    Raises:
        ValueError: a metric that the sweep asks for is in no run.
    """
    runs: dict[Variant, dict[int, Run]] = {variant: {} for variant in sweep.variants}
    for job in jobs:
        if is_done(job):
            runs[job.variant][job.seed] = read_run(job.folder)
    ended = [run for by_seed in runs.values() for run in by_seed.values()]
    for name in sweep.metrics:
        if ended and name not in METRICS and not any(run.series(name).steps for run in ended):
            raise ValueError(
                f"metrics: {name!r} is in no run: choose of {', '.join(METRICS)}, or a name in a {HISTORY_FILE}."
            )
    return Results(sweep, runs)


def write_results(results: Results, output: Path) -> list[Path]:
    """Writes the tables as Markdown, and every value as JSON."""
    markdown, values = (output / name for name in RESULTS_FILES)
    output.mkdir(parents=True, exist_ok=True)
    parts = [f"{title}\n\n{markdown_table(*table)}" for title, table in results.tables()]
    write_text(markdown, f"# {results.sweep.name}\n\n" + "\n".join(parts))
    write_text(values, json.dumps(results.as_json(), indent=2, ensure_ascii=False) + "\n")
    return [markdown, values]
