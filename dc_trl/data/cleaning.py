"""Cleaning and decontamination of training problems, with a report of every row that was left out."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset

from ..files import write_text
from ..grading import is_gradable
from ..records.tables import print_table
from ..settings.ranges import require_choice
from .contamination import Overlap, find_overlaps
from .schema import FEATURES
from .text import has_control_characters, is_english, plain_whitespace, problem_key, restore_commands


Language = Literal["any", "en"]

# Why a row is left out. The first reason that holds counts, and each is asked of the rows that the ones before have
# left: a duplicate of a row that was left out stays.
REASONS = (
    "benchmark, exact",
    "benchmark, n-gram",
    "no problem",
    "control characters",
    "gold answer cannot be parsed",
    "language",
    "exact duplicate",
    "conflicting answers",
    "normalised duplicate",
)

_Row = dict[str, Any]  # columns of `FEATURES`


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, and why; `detail` names the benchmark problems, the row kept, or the answers."""

    id: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class BenchmarkOverlap:
    """How many problems of a benchmark were found, and how many training rows went for it (a row may hit several)."""

    problems: int
    exact: int
    ngram: int
    rows: int


@dataclass(frozen=True)
class Report:
    """What cleaning found: `options` are those of cleaning and what the caller adds, `repeats` rows came in twice."""

    rows: int
    kept: int
    restored: int
    dropped: list[Dropped]
    benchmarks: dict[str, BenchmarkOverlap]
    options: dict[str, Any] = field(default_factory=dict)
    repeats: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Rows left out, by reason, in the order in which the reasons are asked."""
        counts = Counter(row.reason for row in self.dropped)
        return {reason: counts[reason] for reason in REASONS}

    def print(self) -> None:
        """Print the report as two tables."""
        lines = {"repeated, collapsed on loading": self.repeats} if self.repeats else {}
        lines |= {"rows": self.rows, "LaTeX commands restored": self.restored}
        lines |= {f"left out: {reason}": count for reason, count in self.counts.items()} | {"kept": self.kept}
        print_table(("rows", ""), [(label, f"{count:,}") for label, count in lines.items()], "Cleaning")
        if self.benchmarks:
            head = ("benchmark", "problems", "found exactly", "share an n-gram", "rows left out")
            found = {name: asdict(overlap).values() for name, overlap in self.benchmarks.items()}
            rows = [(name, *(f"{count:,}" for count in counts)) for name, counts in found.items()]
            print_table(head, rows, "Overlap with benchmarks")

    def save(self, path: Path | str) -> None:
        """Write the counts and options as JSON; `save_dropped` writes the rows."""
        content = {key: value for key, value in asdict(self).items() if key != "dropped"} | {"dropped": self.counts}
        write_text(Path(path), json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def save_dropped(self, path: Path | str) -> None:
        """Write one JSON line for each row left out: `id`, `reason`, `detail`."""
        lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in self.dropped]
        write_text(Path(path), "".join(lines))


def clean(
    rows: Dataset,
    benchmarks: Mapping[str, Dataset] | None = None,
    language: Language = "any",
    ngram: int = 13,
    common: int = 10,
) -> tuple[Dataset, Report]:
    """Keep training problems that can be graded, that occur once, and that no benchmark holds, in their order.

    Before anything else LaTeX commands whose first letter an export took for a control character are restored, and
    tabs become spaces. Where one problem has several answers nobody can say which is right, and all its rows go.

    Args:
        rows: columns of `dc_trl.data.schema.FEATURES`.
        benchmarks: by name, with the same columns; None: no decontamination.
        language: `"en"` leaves out problems with letters other than Latin and Greek ones.
        ngram, common: see `find_overlaps`.

    Returns:
        (the rows that are left, the report).

    Raises:
        ValueError: a column is missing, or an option is invalid.
    """
    require_choice("language", language, Language)
    benchmarks = benchmarks or {}
    missing = set(FEATURES) - set(rows.column_names)
    if missing:
        raise ValueError(f"rows lack the columns {', '.join(sorted(missing))}: load them with dc_trl.data's loaders.")
    left: dict[int, _Row] = {}
    restored = 0
    for number, row in enumerate(rows):
        texts = {column: restore_commands(row[column]) for column in ("problem", "answer")}
        restored += texts != {column: row[column] for column in texts}
        left[number] = row | {column: plain_whitespace(text).strip() for column, text in texts.items()}
    overlaps = find_overlaps([row["problem"] for row in left.values()], benchmarks, ngram, common)
    dropped: dict[int, Dropped] = {}

    def drop(faults: Mapping[int, tuple[str, str]]) -> None:
        for number, fault in faults.items():
            dropped[number] = Dropped(left.pop(number)["id"], *fault)

    faults = {number: _fault(left[number], overlap, language) for number, overlap in enumerate(overlaps)}
    drop({number: fault for number, fault in faults.items() if fault is not None})
    drop(_repeats(left, "exact duplicate", {number: (row["problem"], row["answer"]) for number, row in left.items()}))
    keys = {number: problem_key(row["problem"]) for number, row in left.items()}
    drop(_conflicts(left, keys))
    drop(_repeats(left, "normalised duplicate", keys))
    report = Report(
        rows=len(rows),
        kept=len(left),
        restored=restored,
        dropped=[dropped[number] for number in sorted(dropped)],
        benchmarks={name: _count_overlap(benchmark, overlaps) for name, benchmark in benchmarks.items()},
        options={"language": language, "ngram": ngram, "common": common},
    )
    return Dataset.from_list(list(left.values()), features=FEATURES), report


def _fault(row: _Row, overlap: Overlap | None, language: Language) -> tuple[str, str] | None:
    """Return the reason to leave a row out that lies in the row itself, and its detail; None where there is none."""
    problem, answer = row["problem"], row["answer"]
    if overlap is not None:
        phrase = f": {overlap.phrase}" if overlap.phrase else ""
        return f"benchmark, {overlap.kind}", " ".join(overlap.ids) + phrase
    if not problem:
        return "no problem", ""
    if has_control_characters(problem + answer):
        return "control characters", ""
    if not answer or not is_gradable(answer):
        return "gold answer cannot be parsed", answer
    if language == "en" and not is_english(problem):
        return "language", ""
    return None


def _repeats(rows: Mapping[int, _Row], reason: str, keys: Mapping[int, Any]) -> dict[int, tuple[str, str]]:
    """Return the rows whose key an earlier row has, each with that row's id."""
    first: dict[Any, int] = {}
    earlier = {number: first.setdefault(keys[number], number) for number in rows}
    return {number: (reason, rows[other]["id"]) for number, other in earlier.items() if other != number}


def _conflicts(rows: Mapping[int, _Row], keys: Mapping[int, str]) -> dict[int, tuple[str, str]]:
    """Return the rows of problems that have several answers, each with these answers."""
    answers: dict[str, set[str]] = defaultdict(set)
    for number, row in rows.items():
        answers[keys[number]].add("".join(row["answer"].split()))
    found = {number: sorted(answers[keys[number]]) for number in rows}
    return {number: ("conflicting answers", " | ".join(each)) for number, each in found.items() if len(each) > 1}


def _count_overlap(benchmark: Dataset, overlaps: list[Overlap | None]) -> BenchmarkOverlap:
    ids = set(benchmark["id"])
    found = [overlap for overlap in overlaps if overlap is not None and not ids.isdisjoint(overlap.ids)]
    exact = {problem for overlap in found if overlap.kind == "exact" for problem in overlap.ids} & ids
    ngram = {problem for overlap in found for problem in overlap.ids} & ids - exact
    return BenchmarkOverlap(problems=len(ids), exact=len(exact), ngram=len(ngram), rows=len(found))
