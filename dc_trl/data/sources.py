"""The columns of every loaded data set, where one comes from, and how a row of it becomes a problem."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from datasets import Dataset, Features, Value

from .prompts import BOXED_INSTRUCTION, load_rows


Row = Mapping[str, Any]

FEATURES = Features(
    {
        "id": Value("string"),  # unique: the source, a slash, and the row's number
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
    """A row before it has a place in a data set; fields as in `FEATURES`."""

    problem: str
    answer: str
    multiple_answers: bool = False
    unit: str | None = None
    relative_tolerance: float = 0.0
    absolute_tolerance: float = 0.0


def to_dataset(source: str, problems: Iterable[MathProblem]) -> Dataset:
    """Make a data set with the columns of `FEATURES`; the rows are numbered."""
    rows = [{"id": f"{source}/{number}", **asdict(problem)} for number, problem in enumerate(problems)]
    return Dataset.from_list(rows, features=FEATURES)


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

    def problems(self, file: str | None = None) -> list[MathProblem]:
        """Load the problems from the Hub, or from a local file with the Hub's fields, in their order.

        Raises:
            ValueError: the rows cannot be loaded, or a field is missing.
        """
        hub = (self.hub_id, self.config, self.split, self.revision)
        return [self.convert(row) for row in (load_rows(file, field="file") if file else load_rows(*hub))]


def field_of(row: Row, *names: str) -> Any:
    """Return the value of the first of these fields that the row has and that is not null.

    Raises:
        ValueError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"a row holds none of the fields {', '.join(map(repr, names))}: it has {', '.join(row)}.")
