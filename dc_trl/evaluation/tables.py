"""Tables of evaluations."""

from collections.abc import Sequence

from ..records.estimators import Difference
from ..records.tables import SIGNIFICANCE, TableRows, percent, with_error
from .results import Evaluation


def evaluation_table(evaluations: Sequence[Evaluation]) -> TableRows:
    """avg@k in percent ± standard error, a row for each model and scheme, a column for each benchmark."""
    columns = {
        result.benchmark: result.samples for evaluation in evaluations for result in evaluation.results.values()
    }
    head = ["model", "scheme", *(f"{name} avg@{k}" for name, k in columns.items()), "Avg."]
    rows = []
    for evaluation in evaluations:
        cells = [percent(evaluation.results[name].avg) if name in evaluation.results else "–" for name in columns]
        rows.append([evaluation.model, evaluation.scheme, *cells, percent(evaluation.average)])
    return head, rows


def evaluation_details(evaluations: Sequence[Evaluation]) -> TableRows:
    """What else is known of each benchmark: bootstrap interval, pass@k, maj@k, truncation, length."""
    head = ["scheme", "benchmark", "problems", "95 % of avg@k", "pass@k", "maj@k", "truncated", "mean tokens"]
    rows = []
    for evaluation in evaluations:
        for name, result in evaluation.results.items():
            ungraded = f" ({len(result.ungraded)} ungraded)" if result.ungraded else ""
            rows.append(
                [
                    evaluation.scheme,
                    f"{name}, k = {result.samples}",
                    f"{result.avg.problems}{ungraded}",
                    # A single problem says nothing of the chance in it.
                    "–"
                    if result.avg.standard_error is None
                    else f"{100 * result.avg.low:.1f} – {100 * result.avg.high:.1f}",
                    percent(result.pass_at[result.samples]),
                    percent(result.maj),
                    f"{100 * result.truncated:.1f} %",
                    f"{result.mean_tokens:,.0f}",
                ]
            )
    return head, rows


def failures_line(evaluation: Evaluation) -> str:
    """How many answers count as wrong because grading them failed, and why; "" where none did."""
    if not evaluation.grading_failures:
        return ""
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(evaluation.grading_failures.items()))
    total = sum(evaluation.grading_failures.values())
    return f"{evaluation.scheme}: {total} answers count as wrong because grading failed ({reasons})"


def comparison_table(first: Evaluation, second: Evaluation, differences: dict[str, Difference]) -> TableRows:
    """Second minus first in percentage points, on the same problems, and whether that is more than noise."""
    head = ["benchmark", "first", "second", "difference", "95 %", "p", "second is"]
    rows = []
    for name, difference in differences.items():
        a, b = (e.average if name == "average" else e.results[name].avg for e in (first, second))
        interval, p_value, verdict = "–", "–", "not shown to differ"
        if difference.p_value is not None:
            interval = f"{100 * difference.low:+.1f} – {100 * difference.high:+.1f}"
            p_value = f"{difference.p_value:.4f}"
            if difference.p_value < SIGNIFICANCE:
                verdict = "better" if difference.value > 0 else "worse"
        value = with_error(difference.value, difference.standard_error, 100, 1, "+")
        rows.append([name, f"{100 * a.value:.1f}", f"{100 * b.value:.1f}", value, interval, p_value, verdict])
    return head, rows
