"""Where a data set comes from, and how one row of it becomes a problem."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from pyarrow import ArrowException

from ..grading import extract_answer
from .prompts import gold_answer, load_rows
from .schema import FEATURES, MathProblem, has_schema, to_dataset
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


def read(source: Source, file: str | None) -> Dataset:
    """Rows of a source as they are on the Hub, or in a local JSON, JSONL, Parquet or CSV file.

    Raises:
        ValueError: they cannot be loaded.
    """
    if file is not None and not Path(file).expanduser().is_file():
        raise ValueError(f"file={file!r} does not exist: check the path.")
    if file is not None:
        return load_rows(file, field="file")
    try:
        return load_rows(source.hub_id, source.config, source.split, source.revision)
    except ValueError as error:
        raise ValueError(f"{error} Without a network, give a local file.") from error


def convert(name: str, source: Source, rows: Dataset) -> Dataset:
    """Rows with the columns of `FEATURES`; those that have them already keep them.

    Raises:
        ValueError: a row lacks a field.
    """
    if has_schema(rows):
        try:
            return rows.select_columns(list(FEATURES)).cast(FEATURES)
        except (ArrowException, TypeError) as error:
            raise ValueError(f"a column has another type than {dict(FEATURES)}: {error}") from error
    return to_dataset(name, [convert_row(source, number, row) for number, row in enumerate(rows)])


def convert_row(source: Source, number: int, row: Row) -> MathProblem:
    """A row of a source as a problem.

    Raises:
        ValueError: it lacks a field, or a field holds something else than at the source; the message names the row.
    """
    try:
        return source.convert(row)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{str(error).rstrip('.')} (row {number}, read as one of {source}).") from error


def field_of(row: Row, *names: str) -> Any:
    """Value of the first of these fields that the row has and that is not null.

    Raises:
        ValueError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"a row holds none of the fields {', '.join(map(repr, names))}: it has {', '.join(row)}.")


def own_id(row: Row, name: str) -> str | None:
    """The row's own id as text, None where it has none."""
    return None if row.get(name) is None else str(row[name])


def text_answer(value: Any) -> str:
    """Gold answer as text, "" where there is none (see `gold_answer`)."""
    return gold_answer(value) or ""


def last_boxed(text: str) -> str:
    r"""What the last `\boxed{}` of a solution holds, "" where there is none."""
    return extract_answer(text) or ""


def holds_several(answer: str) -> bool:
    """Whether an answer is a list: a comma outside all brackets and between no thousands ("3, 5", not "58,500")."""
    text = re.sub(r"(?<=\d),(?:\\!\s*)?(?=\d{3}(?!\d))", "", answer)
    text = text.replace(r"\{", "(").replace(r"\}", ")")
    while (shorter := re.sub(r"[(\[{][^()\[\]{}]*[)\]}]", "", text)) != text:
        text = shorter
    return "," in text
