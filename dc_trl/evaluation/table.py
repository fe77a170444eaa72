"""The tables of evaluations, for the terminal."""

from collections.abc import Sequence

from ..records.estimators import Difference
from ..records.tables import TableRows, percent, print_table, verdict, with_error
from .results import Evaluation, compare


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Print the tables of evaluations; of two evaluations also their comparison."""
    print_table(*evaluation_table(evaluations), title="avg@k, percent ± standard error over problems")
    print_table(*evaluation_details(evaluations))
    for evaluation in evaluations:
        if failures := evaluation.grading_failures:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(failures.items()))
            wrong = f"{sum(failures.values())} answers count as wrong because grading failed"
            print(f"{evaluation.scheme}: {wrong} ({reasons})")
    if len(evaluations) == 2:
        print_comparison(*evaluations)


def print_comparison(first: Evaluation, second: Evaluation) -> None:
    """Print how the second evaluation differs from the first."""
    title = f"{second.model} {second.scheme} against {first.model} {first.scheme}, percentage points"
    print_table(*comparison_table(first, second, compare(first, second)), title=title)


def evaluation_table(evaluations: Sequence[Evaluation]) -> TableRows:
    """Return avg@k in percent ± standard error: a row for each model and scheme, a column for each benchmark."""
    columns = {name: result.samples for evaluation in evaluations for name, result in evaluation.results.items()}
    head = ["model", "scheme", *(f"{name} avg@{k}" for name, k in columns.items()), "Avg."]
    rows = []
    for evaluation in evaluations:
        cells = [percent(evaluation.results[name].avg) if name in evaluation.results else "–" for name in columns]
        rows.append([evaluation.model, evaluation.scheme, *cells, percent(evaluation.average)])
    return head, rows


def evaluation_details(evaluations: Sequence[Evaluation]) -> TableRows:
    """Return bootstrap interval, pass@k, maj@k, truncation and mean length for each benchmark."""
    head = ["scheme", "benchmark", "problems", "95 % of avg@k", "pass@k", "maj@k", "truncated", "mean tokens"]
    rows = []
    for evaluation in evaluations:
        for name, result in evaluation.results.items():
            ungraded = f" ({len(result.ungraded)} ungraded)" if result.ungraded else ""
            interval = f"{100 * result.avg.low:.1f} – {100 * result.avg.high:.1f}"
            rows.append(
                [
                    evaluation.scheme,
                    f"{name}, k = {result.samples}",
                    f"{result.avg.problems}{ungraded}",
                    # A single problem says nothing about chance.
                    "–" if result.avg.standard_error is None else interval,
                    percent(result.pass_at[result.samples]),
                    percent(result.maj),
                    f"{100 * result.truncated:.1f} %",
                    f"{result.mean_tokens:,.0f}",
                ]
            )
    return head, rows


def comparison_table(first: Evaluation, second: Evaluation, differences: dict[str, Difference]) -> TableRows:
    """Return second minus first in percentage points on the same problems, and whether that is more than noise."""
    head = ["benchmark", "first", "second", "difference", "95 %", "p", "second is"]
    rows = []
    for name, difference in differences.items():
        a, b = (e.average if name == "average" else e.results[name].avg for e in (first, second))
        interval, p_value = "–", "–"
        if difference.p_value is not None:
            interval = f"{100 * difference.low:+.1f} – {100 * difference.high:+.1f}"
            p_value = f"{difference.p_value:.4f}"
        value = with_error(difference.value, difference.standard_error, 100, 1, "+")
        words = [value, interval, p_value, verdict(difference, "better", "worse")]
        rows.append([name, f"{100 * a.value:.1f}", f"{100 * b.value:.1f}", *words])
    return head, rows
