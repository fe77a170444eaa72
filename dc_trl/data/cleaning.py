"""Cleaning and decontamination of training problems, with a report of every row that was left out."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from ..grading import is_gradable
from ..records.tables import print_table
from .contamination import find_overlaps, problem_key
from .sources import FEATURES


# Why a row is left out. The first reason that holds counts, and each is asked of the rows that the ones before have
# left: a duplicate of a row that was left out stays.
REASONS = (
    "benchmark, exact",
    "benchmark, n-gram",
    "no problem",
    "control characters",
    "gold answer cannot be parsed",
    "conflicting answers",
    "duplicate",
)

# All but the line feed, and the sign of a lost character (U+FFFD). An export that read "\frac" in quotes has a form
# feed before "rac".
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ufffd]")


def print_cleaning(rows: int, dropped: Sequence[Mapping[str, str]]) -> None:
    """Print how many of so many rows were left out, by reason, and how many were kept."""
    left_out = {f"left out: {reason}": count for reason, count in count_reasons(dropped).items()}
    lines = {"rows": rows} | left_out | {"kept": rows - len(dropped)}
    print_table(("rows", ""), [(label, f"{count:,}") for label, count in lines.items()], "Cleaning")


def count_reasons(dropped: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Return how many rows were left out, by reason, in the order in which the reasons are asked."""
    counts = Counter(row["reason"] for row in dropped)
    return {reason: counts[reason] for reason in REASONS}


def clean(rows: Dataset, benchmarks: Mapping[str, Dataset] | None = None) -> tuple[Dataset, list[dict[str, str]]]:
    """Keep training problems that can be graded, that occur once, and that no benchmark holds, in their order.

    Where one problem has several answers nobody can say which is right, and all its rows go.

    Args:
        rows: columns of `dc_trl.data.sources.FEATURES`.
        benchmarks: by name, with the same columns; None: no decontamination.

    Returns:
        (the rows that are left; of each other its `id`, the `reason`, and as `detail` the benchmark problems, the row
        kept, or the answers).
    """
    left: dict[int, dict[str, Any]] = {}
    dropped: dict[int, tuple[str, str]] = {}
    overlaps = find_overlaps(rows["problem"], benchmarks or {})
    for number, (row, overlap) in enumerate(zip(rows, overlaps, strict=True)):
        plain = row | {column: row[column].replace("\r\n", "\n").strip() for column in ("problem", "answer")}
        if overlap is not None:
            dropped[number] = f"benchmark, {overlap[0]}", overlap[1]
        elif fault := _fault(plain["problem"], plain["answer"]):
            dropped[number] = fault
        else:
            left[number] = plain
    keys = {number: problem_key(row["problem"]) for number, row in left.items()}
    answers: dict[str, set[str]] = defaultdict(set)
    first: dict[str, str] = {}
    for number, row in left.items():
        answers[keys[number]].add("".join(row["answer"].split()))
        first.setdefault(keys[number], row["id"])
    for number, key in keys.items():
        if len(answers[key]) > 1:
            dropped[number] = "conflicting answers", " | ".join(sorted(answers[key]))
        elif first[key] != left[number]["id"]:
            dropped[number] = "duplicate", first[key]
    kept = [row for number, row in left.items() if number not in dropped]
    reasons = [{"id": rows[n]["id"], "reason": reason, "detail": why} for n, (reason, why) in sorted(dropped.items())]
    columns = {name: [row[name] for row in kept] for name in FEATURES}  # from_list takes no empty list
    return Dataset.from_dict(columns, features=FEATURES), reasons


def _fault(problem: str, answer: str) -> tuple[str, str] | None:
    """Return the reason to leave a row out that lies in the row itself, and its detail; None where there is none."""
    if not problem:
        return "no problem", ""
    if _CONTROL.search(problem + answer):
        return "control characters", ""
    return None if answer and is_gradable(answer) else ("gold answer cannot be parsed", answer)
