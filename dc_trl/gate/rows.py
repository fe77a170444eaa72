"""Checks that there are enough rows to train on, and that they have the columns that are read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from ..settings.reward_functions import excerpt


# Of a data set with more than _ALL rows, only some are checked, among them the first, the longest, the shortest and
# those without a usable prompt.
_ALL = 256
_SOME = 32
# Names that other data sets use for the column `prompt`, the likeliest first.
_OTHER_NAMES = ("question", "problem", "query", "instruction", "input", "text", "messages")
# Names under which TRL passes arguments to reward functions beside the columns of the rows.
PASSED = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


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
    if isinstance(eval_dataset, dict):  # DatasetDict and IterableDatasetDict are dicts too
        found |= {f"eval_dataset[{name!r}]": rows for name, rows in eval_dataset.items()}
    elif eval_dataset is not None:
        found["eval_dataset"] = eval_dataset
    for name, rows in found.items():
        if isinstance(rows, DatasetDict | IterableDatasetDict):
            raise TypeError(
                f"{name} is a {type(rows).__name__} with the splits {', '.join(map(repr, rows))}: pass one of them, "
                f"for example {name}={name.partition('_')[0]}_dataset[{next(iter(rows), 'train')!r}]."
            )
        if not isinstance(rows, Dataset | IterableDataset):
            raise TypeError(
                f"{name} is a {type(rows).__name__}: pass a data set, for example datasets.Dataset.from_list(rows)."
            )
    return found


def some_rows(name: str, dataset: Dataset | IterableDataset, needed: int, why: str) -> Rows:
    """Return rows that represent a data set; from a stream the first ones, which it yields again later.

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
        rows = {} if count < needed else {number: dataset[number] for number in _chosen(dataset)}
    if count == 0:
        raise ValueError(f"{name} has no rows: there is nothing to train on or to evaluate.")
    if count < needed:
        raise ValueError(f"{name} has {count} rows, and {why}.")
    return Rows(name, rows)


def _chosen(dataset: Dataset) -> Sequence[int]:
    """Return the numbers of the rows to check."""
    count = len(dataset)
    if count <= _ALL:
        return range(count)
    if "prompt" not in dataset.column_names or dataset.format["type"] not in (None, "python"):
        return range(0, count, count // _ALL)  # reading every row may take long
    tables = dataset.with_format("arrow", columns=["prompt"]).iter(batch_size=10_000)
    lengths = [_length(prompt) for table in tables for prompt in table["prompt"].to_pylist()]
    order = sorted(range(count), key=lengths.__getitem__)
    return sorted({*range(_SOME), *order[:_SOME], *order[-_SOME:]})


def _length(prompt: Any) -> int:
    """Return the characters of a prompt; -1 for what `require_prompts` refuses."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message["content"])) for message in prompt) if _is_conversation(prompt) else -1


def require_prompts(rows: Rows) -> None:
    """Refuse rows whose prompts are neither all text nor all conversations.

    Raises:
        ValueError: a prompt is refused or the column is missing; the message names the data set, row and prompt.
    """
    if "prompt" not in rows.columns:
        known = ", ".join(map(repr, rows.columns))
        likely = [name for name in _OTHER_NAMES if name in rows.columns]
        close = (likely or difflib.get_close_matches("prompt", rows.columns, n=1) or rows.columns)[0]
        raise ValueError(
            f"{rows.name} has the columns {known} and none called 'prompt': rename yours, for example "
            f"{rows.name}.rename_column({close!r}, 'prompt')."
        )
    kinds: dict[bool, int] = {}
    for number, row in rows.rows.items():
        prompt = row["prompt"]
        if not isinstance(prompt, str) and not _is_conversation(prompt):
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


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 0 and all(map(_is_message, prompt))


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        return False
    content = message["content"]
    # An assistant that called a tool may have no content.
    return isinstance(content, str | list) or (content is None and bool(message.get("tool_calls")))


def require_no_clash(rows: Rows, passed: Sequence[str]) -> None:
    """Refuse columns whose names TRL uses for other arguments of reward functions.

    Raises:
        ValueError: a column is refused; the message names the data set and the column.
    """
    for column in rows.columns:
        if column in passed:
            raise ValueError(
                f"{rows.name} has a column {column!r}, and the trainer passes something else to reward functions by "
                f"this name: rename it, for example {rows.name}.rename_column({column!r}, 'my_{column}')."
            )
