"""Results of an evaluation by benchmark and over all: saved, loaded, compared with others, and shown."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..files import read_object, write_json
from ..records.estimators import Difference, Estimate, majority_at_k, mean_estimate, paired_difference, pass_at_k
from ..records.tables import TableRows, percent, print_table, verdict, with_error
from ..version import DOCS
from .samples import Sample


@dataclass(frozen=True)
class BenchmarkResult:
    """Results on one benchmark. `per_problem` holds each problem's mean over its k samples, by id."""

    benchmark: str
    samples: int  # k
    avg: Estimate  # avg@k
    pass_at: dict[int, Estimate]  # k' → pass@k' for the powers of 2 up to k, and k
    maj: Estimate  # maj@k
    truncated: float  # share of the samples that the token limit cut off
    mean_tokens: float
    ungraded: list[str]  # problems whose gold answer cannot be graded; they do not count
    per_problem: dict[str, float]

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> "BenchmarkResult":
        """Return what JSON holds of a result."""
        pass_at = {int(k): Estimate(**estimate) for k, estimate in tree["pass_at"].items()}
        avg, maj = (Estimate(**tree[name]) for name in ("avg", "maj"))
        return cls(**{**tree, "avg": avg, "maj": maj, "pass_at": pass_at})


@dataclass(frozen=True)
class Evaluation:
    """Results of one model in one deployment scheme, and the `settings` that they depend on.

    `grading_failures` counts the answers that count as wrong because grading them failed, by reason (the keys of
    `Grader.failures`).
    """

    model: str
    scheme: str
    settings: dict[str, Any]
    results: dict[str, BenchmarkResult]
    average: Estimate  # of avg@k over the benchmarks
    grading_failures: Mapping[str, int]

    @property
    def engine(self) -> str:
        """The engine as a command line names it: a scheme, of the replica `"replica:fp8"`."""
        return f"replica:{self.scheme}" if self.settings.get("engine") == "replica" else self.scheme

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the evaluation as JSON."""
        write_json(Path(path), asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Evaluation":
        """Read what `save` wrote.

        Raises:
            ValueError: there is no such file, or it holds no evaluation.
        """
        tree = read_object(Path(path))
        try:
            results = {name: BenchmarkResult.of(result) for name, result in tree["results"].items()}
            return cls(**tree | {"results": results, "average": Estimate(**tree["average"])})
        except (LookupError, TypeError) as error:
            raise ValueError(f"{path} holds no results of an evaluation ({error}): repair or remove it.") from error


def benchmark_result(
    name: str, problems: Sequence[str], k: int, samples: Mapping[tuple[str, int], Sample]
) -> BenchmarkResult:
    """Compute the results from the first k samples of every problem.

    Args:
        name: of the benchmark.
        problems: ids of its problems.
        k: number of samples of each problem that count.
        samples: by problem and number; all numbers from 0 to k − 1 are there.

    Raises:
        ValueError: no gold answer can be graded.
        KeyError: a sample is missing.
    """
    groups = {problem: [samples[problem, number] for number in range(k)] for problem in problems}
    graded = {problem: group for problem, group in groups.items() if group[0].correct is not None}
    if not graded:
        raise ValueError(f"benchmark {name!r}: none of the gold answers can be graded; see {DOCS}/rewards.md.")
    right = {problem: sum(bool(sample.correct) for sample in group) for problem, group in graded.items()}
    sizes = sorted({2**power for power in range(k.bit_length())} | {k})
    every = [sample for group in groups.values() for sample in group]
    return BenchmarkResult(
        name,
        k,
        mean_estimate([count / k for count in right.values()]),
        {size: mean_estimate([pass_at_k(k, count, size) for count in right.values()]) for size in sizes},
        mean_estimate(
            [majority_at_k([s.answer for s in group], [bool(s.correct) for s in group]) for group in graded.values()]
        ),
        sum(sample.truncated for sample in every) / len(every),
        sum(sample.tokens for sample in every) / len(every),
        [problem for problem in groups if problem not in graded],
        {problem: count / k for problem, count in right.items()},
    )


def compare(first: Evaluation, second: Evaluation) -> dict[str, Difference]:
    """Return how much better the second evaluation is than the first, on the benchmarks that both have.

    Returns:
        Difference of avg@k by benchmark, and of the mean over several as "average".

    Raises:
        ValueError: the evaluations have no benchmark in common, or answered other problems of one.
    """
    names = [name for name in first.results if name in second.results]
    if not names:
        raise ValueError("The evaluations have no benchmark in common: evaluate both on one.")
    pairs = []
    for name in names:
        a, b = first.results[name].per_problem, second.results[name].per_problem
        # The ids are those of any file with as many rows.
        known = {rows for each in (first, second) if (rows := each.settings.get("problems", {}).get(name))}
        if a.keys() != b.keys() or len(known) > 1:
            raise ValueError(f"The evaluations answered different problems of {name!r}: evaluate both on the same.")
        pairs.append((list(a.values()), [b[problem] for problem in a]))
    differences = {name: paired_difference([a], [b]) for name, (a, b) in zip(names, pairs, strict=True)}
    if len(names) > 1:
        differences["average"] = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    return differences


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Print the tables of evaluations; of two evaluations also their comparison."""
    print_table(*evaluation_table(evaluations), title="percent ± standard error over problems")
    for evaluation in evaluations:
        if failures := evaluation.grading_failures:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(failures.items()))
            wrong = f"{sum(failures.values())} answers count as wrong because grading failed"
            print(f"{evaluation.engine}: {wrong} ({reasons})")
    if len(evaluations) == 2:
        print_comparison(*evaluations)


def print_comparison(first: Evaluation, second: Evaluation) -> None:
    """Print how the second evaluation differs from the first."""
    title = f"{second.model} {second.engine} against {first.model} {first.engine}, percentage points"
    print_table(*comparison_table(first, second), title=title)


def evaluation_table(evaluations: Sequence[Evaluation]) -> TableRows:
    """Return a row for each benchmark of each evaluation, and one for the mean over several."""
    head = ["engine", "benchmark", "problems", "avg@k", "95 %", "pass@k", "maj@k", "truncated", "mean tokens"]
    rows = []
    for evaluation in evaluations:
        for name, result in evaluation.results.items():
            ungraded = f" ({len(result.ungraded)} ungraded)" if result.ungraded else ""
            interval = f"{100 * result.avg.low:.1f} – {100 * result.avg.high:.1f}"
            rows.append(
                [
                    evaluation.engine,
                    f"{name} avg@{result.samples}",
                    f"{result.avg.problems}{ungraded}",
                    percent(result.avg),
                    # A single problem says nothing about chance.
                    "–" if result.avg.standard_error is None else interval,
                    percent(result.pass_at[result.samples]),
                    percent(result.maj),
                    f"{100 * result.truncated:.1f} %",
                    f"{result.mean_tokens:,.0f}",
                ]
            )
        if len(evaluation.results) > 1:
            rows.append([evaluation.engine, "Avg.", "", percent(evaluation.average), *[""] * 5])
    return head, rows


def comparison_table(first: Evaluation, second: Evaluation) -> TableRows:
    """Return second minus first in percentage points on the same problems, and whether that is more than noise."""
    head = ["benchmark", "first", "second", "difference", "95 %", "p", "second is"]
    rows, differences = [], compare(first, second)
    for name, difference in differences.items():
        names = differences.keys() - {"average"} if name == "average" else [name]
        a, b = (fmean(e.results[each].avg.value for each in names) for e in (first, second))
        interval, p_value = "–", "–"
        if difference.p_value is not None:
            interval = f"{100 * difference.low:+.1f} – {100 * difference.high:+.1f}"
            p_value = f"{difference.p_value:.4f}"
        value = with_error(difference.value, difference.standard_error, 100, 1, "+")
        words = [value, interval, p_value, verdict(difference)]
        rows.append([name, f"{100 * a:.1f}", f"{100 * b:.1f}", *words])
    return head, rows
