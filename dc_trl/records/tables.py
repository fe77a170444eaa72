"""Tables for the terminal and as Markdown, and values with their errors in them."""

from collections.abc import Sequence

from .estimators import Difference, Estimate


SIGNIFICANCE = 0.05  # p-values below it are called a difference

TableRows = tuple[list[str], list[list[str]]]  # head, rows


def percent(estimate: Estimate) -> str:
    """A value from 0 to 1 with its standard error, in percent."""
    return with_error(estimate.value, estimate.standard_error, 100, 1)


def with_error(value: float, standard_error: float | None, factor: float, decimals: int, sign: str = "") -> str:
    """A value times a factor ± its standard error, which a single problem does not have."""
    error = "" if standard_error is None else f" ± {factor * standard_error:.{decimals}f}"
    return f"{factor * value:{sign}.{decimals}f}{error}"


def verdict(difference: Difference, above: str, below: str) -> str:
    """What to call the second of two values: `above` or `below` where it differs by more than noise."""
    if difference.p_value is None or difference.p_value >= SIGNIFICANCE:
        return "not shown to differ"
    return above if difference.value > 0 else below


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown, with a line end."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table to the terminal."""
    from rich.console import Console  # takes a while to load, and the page of a run prints no table
    from rich.table import Table

    table = Table(*head, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
