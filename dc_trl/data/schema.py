"""The columns of every loaded data set: a problem, its gold answer, and what grading the answer needs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from datasets import Dataset, Features, Value

from ..settings.ranges import AT_LEAST_0


FEATURES = Features(
    {
        "id": Value("string"),  # unique: the source, a slash, and the row's own id or its number
        "problem": Value("string"),
        "answer": Value("string"),
        "multiple_answers": Value("bool"),  # the answer holds several, separated by commas
        "unit": Value("string"),  # of the answer; null where it has none
        "relative_tolerance": Value("float64"),  # 0.0: exact
        "absolute_tolerance": Value("float64"),  # 0.0: exact
    }
)


@dataclass(frozen=True)
class MathProblem:
    """A row before it has a place in a data set; fields as in `FEATURES`, `own_id` as its source numbers it."""

    problem: str
    answer: str
    own_id: str | None = None
    multiple_answers: bool = False
    unit: str | None = None
    relative_tolerance: float = 0.0
    absolute_tolerance: float = 0.0


def to_dataset(source: str, problems: Sequence[MathProblem]) -> Dataset:
    """Make a data set with the columns of `FEATURES`; rows are numbered where their own ids are not unique."""
    own_ids = [problem.own_id for problem in problems]
    numbered = None in own_ids or len(set(own_ids)) < len(own_ids)
    rows = []
    for number, problem in enumerate(problems):
        row = asdict(problem)
        own_id = row.pop("own_id")
        rows.append({"id": f"{source}/{number if numbered else own_id}", **row})
    return Dataset.from_list(rows, features=FEATURES)


def require_grading(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row whose columns of `GRADING_COLUMNS` hold what grading cannot use.

    Raises:
        ValueError: names the row, the column, its value and what it may be.
    """
    for column, kind, words in (("multiple_answers", bool, "true or false"), ("unit", str, "text")):
        if row.get(column) is not None and not isinstance(row[column], kind):
            raise ValueError(f"{where}: {column}={row[column]!r} is invalid: use {words}, or rename the column.")
    for column in ("relative_tolerance", "absolute_tolerance"):
        if row.get(column) is not None and not AT_LEAST_0.allows(row[column]):
            raise ValueError(f"{where}: {column}={row[column]!r} is invalid: use {AT_LEAST_0}, or rename the column.")
