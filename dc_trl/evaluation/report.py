"""What an evaluation found, on the terminal and in `results.md`."""

from collections.abc import Sequence
from pathlib import Path

from ..files import write_text
from ..records.tables import markdown_table, print_table
from .results import Evaluation, compare
from .tables import comparison_table, evaluation_details, evaluation_table, failures_line


REPORT_FILE = "results.md"


def write_report(evaluations: Sequence[Evaluation], output: Path) -> None:
    """Prints the tables of evaluations and writes them; two evaluations are compared, the second with the first."""
    table, details = evaluation_table(evaluations), evaluation_details(evaluations)
    print_table(*table, title="avg@k, percent ± standard error over problems")
    print_table(*details)
    text = markdown_table(*table) + "\n" + markdown_table(*details)
    for line in filter(None, map(failures_line, evaluations)):
        print(line)
        text += f"\n{line}\n"
    if len(evaluations) == 2:
        text += "\n" + print_comparison(*evaluations)
    write_text(output / REPORT_FILE, text)


def print_comparison(first: Evaluation, second: Evaluation) -> str:
    """Prints how the second differs from the first, and returns it as Markdown."""
    table = comparison_table(first, second, compare(first, second))
    title = f"{second.model} {second.scheme} against {first.model} {first.scheme}, percentage points"
    print_table(*table, title=title)
    return f"{title}\n\n{markdown_table(*table)}"
