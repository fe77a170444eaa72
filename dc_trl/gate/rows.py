"""Checks that there are enough rows to train on, and that they have prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from ..settings.reward_functions import excerpt


_LOOKED_AT = 256  # rows of a data set, from the first on; the others are looked at when they come


class Rows(NamedTuple):
    """Some rows of a data set by their numbers, and the name of the data set in messages."""

    name: str
    rows: dict[int, Mapping[str, Any]]

    @property
    def columns(self) -> list[str]:
        return list(next(iter(self.rows.values())))


def data_sets(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """Return the data sets of a run by their names in messages.

    Raises:
        TypeError: a value is not a data set.
    """
    found = {} if train_dataset is None else {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        found |= {f"eval_dataset[{name!r}]": rows for name, rows in eval_dataset.items()}
    elif eval_dataset is not None:
        found["eval_dataset"] = eval_dataset
    for name, rows in found.items():
        if isinstance(rows, DatasetDict | IterableDatasetDict) or not isinstance(rows, Dataset | IterableDataset):
            raise TypeError(
                f"{name} is a {type(rows).__name__}: pass a data set, for example one split, or "
                "datasets.Dataset.from_list(rows)."
            )
    return found


def some_rows(name: str, dataset: Dataset | IterableDataset, needed: int, why: str) -> Rows:
    """Return the first rows of a data set; a stream yields them again later.

    Args:
        name: name of the data set, for messages.
        dataset: any data set.
        needed: number of rows that the data set must have.
        why: reason for that number, for the message.

    Raises:
        ValueError: there are fewer rows.
    """
    if isinstance(dataset, IterableDataset):
        rows = dict(enumerate(dataset.take(needed)))
        count = len(rows)
    else:
        count = len(dataset)
        rows = {number: dataset[number] for number in range(min(count, _LOOKED_AT))}
    if count == 0:
        raise ValueError(f"{name} has no rows: there is nothing to train on or to evaluate.")
    if count < needed:
        raise ValueError(f"{name} has {count} rows, and {why}.")
    return Rows(name, rows)


def require_prompts(rows: Rows) -> None:
    """Refuse rows whose prompts are neither all text nor all conversations.

    Raises:
        ValueError: a prompt is refused or the column is missing; the message names the data set, row and prompt.
    """
    if "prompt" not in rows.columns:
        raise ValueError(
            f"{rows.name} has the columns {', '.join(map(repr, rows.columns))} and none called 'prompt': rename "
            f"yours, for example {rows.name}.rename_column({rows.columns[0]!r}, 'prompt')."
        )
    kinds: dict[bool, int] = {}
    for number, row in rows.rows.items():
        prompt = row["prompt"]
        if not prompt or not isinstance(prompt, str | list):
            raise ValueError(
                f"{rows.name}: row {number} has prompt={excerpt(prompt)}: a prompt is text, or a list of messages, "
                "each with a role and a content. Leave out such rows, for example with filter."
            )
        kinds.setdefault(isinstance(prompt, str), number)
    if len(kinds) == 2:
        raise ValueError(
            f"{rows.name}: the prompt of row {kinds[True]} is text, and that of row {kinds[False]} a list of "
            "messages: write all of them in the same form."
        )
