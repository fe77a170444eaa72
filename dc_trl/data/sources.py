"""Where a data set comes from, and how one row of it becomes a problem."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from pyarrow import ArrowException

from ..settings.paths import require_data_file
from .prompts import load_rows, require_columns
from .schema import FEATURES, MathProblem, to_dataset
from .templates import BOXED_INSTRUCTION


Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A data set on the Hub.

    Attributes:
        hub_id: repository on the Hub; "" for problems that are made on the spot.
        config: configuration there, None for the only one.
        split: split there.
        revision: commit there, in full, so that the rows never change under a result.
        convert: makes a problem of one row, by the field names of the Hub and of the usual local files.
        samples: k of avg@k, the answers drawn per problem, at least 1.
        instruction: what a prompt says after the problem; None: nothing.
    """

    hub_id: str
    config: str | None
    split: str
    revision: str
    convert: Callable[[Row], MathProblem]
    samples: int = 1
    instruction: str | None = BOXED_INSTRUCTION

    def __str__(self) -> str:
        return f"{self.hub_id}@{self.revision}" if self.hub_id else "made on the spot"

    def load(
        self, name: str, where: str, file: str | None, columns: Mapping[str, str] | None = None, distinct: bool = False
    ) -> tuple[Dataset, int]:
        """Load the problems from the Hub or a local file, with the columns of `FEATURES` and in their order.

        Args:
            name, where: begin the problems' ids, and the message of an error.
            file: JSON, JSONL, Parquet or CSV; its fields are those of the Hub, or the columns of `FEATURES`.
            columns: those that `convert` reads instead, by the options that name them.
            distinct: leave a row out that repeats another one's id and content.

        Returns:
            (the problems, how many rows were left out).

        Raises:
            ValueError: the rows cannot be loaded, or a field is missing or holds something else than at the source.
        """
        try:
            rows = self._rows(file)
            if columns is not None:
                require_columns(rows, columns)
            elif set(FEATURES) <= set(rows.column_names):
                return rows.select_columns(list(FEATURES)).cast(FEATURES), 0
            problems = [self._problem(number, row) for number, row in enumerate(rows)]
            if distinct:  # without ids a repeated row is a duplicate like any other, for cleaning to find
                keyed = {number if each.own_id is None else each: each for number, each in enumerate(problems)}
                problems = list(keyed.values())
            return to_dataset(name, problems), len(rows) - len(problems)
        except (ValueError, ArrowException, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error

    def _rows(self, file: str | None) -> Dataset:
        if file is not None:
            require_data_file(file, "file")
            return load_rows(file, field="file")
        try:
            return load_rows(self.hub_id, self.config, self.split, self.revision)
        except ValueError as error:
            raise ValueError(f"{error} Without a network, give a local file.") from error

    def _problem(self, number: int, row: Row) -> MathProblem:
        try:
            return self.convert(row)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"{str(error).rstrip('.')} (row {number}, read as one of {self}).") from error


def field_of(row: Row, *names: str) -> Any:
    """Return the value of the first of these fields that the row has and that is not null.

    Raises:
        ValueError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"a row holds none of the fields {', '.join(map(repr, names))}: it has {', '.join(row)}.")


def own_id(row: Row, name: str) -> str | None:
    """Return the row's own id as text, None where it has none."""
    return None if row.get(name) is None else str(row[name])
