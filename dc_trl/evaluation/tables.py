"""Tables of evaluations, for the terminal and as Markdown."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .estimators import Difference, Estimate
from .results import Evaluation


SIGNIFICANCE = 0.05  # p-values below it are called a difference

TableRows = tuple[list[str], list[list[str]]]  # head, rows


def with_error(value: float, standard_error: float | None, decimals: int, factor: float = 1.0) -> str:
    """A value ± its standard error, which a single problem does not have, both times a factor."""
    error = "" if standard_error is None else f" ± {factor * standard_error:.{decimals}f}"
    return f"{factor * value:.{decimals}f}{error}"


def percent(estimate: Estimate) -> str:
    """A value from 0 to 1 with its standard error, in percent."""
    return with_error(estimate.value, estimate.standard_error, 1, 100)


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
                    f"{100 * result.avg.low:.1f} – {100 * result.avg.high:.1f}",
                    percent(result.pass_at[result.samples]),
                    percent(result.maj),
                    f"{100 * result.truncated:.1f} %",
                    f"{result.mean_tokens:,.0f}",
                ]
            )
    return head, rows


def comparison_table(first: Evaluation, second: Evaluation, differences: dict[str, Difference]) -> TableRows:
    """Second minus first in percentage points, on the same problems, and whether that is more than noise."""
    head = ["benchmark", "first", "second", "difference", "95 %", "p", "second is"]
    rows = []
    for name, difference in differences.items():
        a, b = (e.average if name == "average" else e.results[name].avg for e in (first, second))
        error = "" if difference.standard_error is None else f" ± {100 * difference.standard_error:.1f}"
        verdict = (
            "not shown to differ"
            if difference.p_value >= SIGNIFICANCE
            else "better"
            if difference.value > 0
            else "worse"
        )
        rows.append(
            [
                name,
                f"{100 * a.value:.1f}",
                f"{100 * b.value:.1f}",
                f"{100 * difference.value:+.1f}{error}",
                f"{100 * difference.low:+.1f} – {100 * difference.high:+.1f}",
                f"{difference.p_value:.4f}",
                verdict,
            ]
        )
    return head, rows


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown, with a line end."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table to the terminal."""
    table = Table(*head, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
