"""Tables for the terminal and as Markdown, and the texts of values with their errors."""

from collections.abc import Sequence

from .estimators import Difference, Estimate


SIGNIFICANCE = 0.05  # a p-value below this is called a difference

TableRows = tuple[list[str], list[list[str]]]  # head, rows


def percent(estimate: Estimate) -> str:
    """Return a value from 0 to 1 with its standard error, in percent."""
    return with_error(estimate.value, estimate.standard_error, 100, 1)


def with_error(value: float, standard_error: float | None, factor: float, decimals: int, sign: str = "") -> str:
    """Return a value times a factor ± its standard error; without the error where it is None."""
    error = "" if standard_error is None else f" ± {factor * standard_error:.{decimals}f}"
    return f"{factor * value:{sign}.{decimals}f}{error}"


def verdict(difference: Difference) -> str:
    """Return "better" or "worse" where the second of two values differs by more than noise, else a denial."""
    if difference.p_value is None or not difference.p_value < SIGNIFICANCE:
        return "not shown to differ"
    return "better" if difference.value > 0 else "worse"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, which ends with a line break."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table, within the width of the terminal; elsewhere as wide as its cells need."""
    from rich.console import Console  # imported here because it is slow, and the report prints no table
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for cell in head:
        table.add_column(Text(cell), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # "[x]" in a cell is text, not markup
    console = Console()
    if not console.file.isatty():  # rich would take 80 columns
        # First wide enough for any text (a character has at most two columns), then as wide as the table.
        console.width = sum(2 * max(map(len, column)) + 3 for column in zip(head, *rows, strict=True)) + 1
        console.width = console.measure(table).maximum
    if title:
        console.print(Text(title), style="table.title", soft_wrap=True)
    console.print(table)
