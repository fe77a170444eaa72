"""Cleaning and decontamination of training problems, with a report of every row that was left out."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ..grading.rewards import is_gradable
from .overlap import Overlap, find_overlaps, require_ngram
from .prompts import make_prompt, prompt_length
from .schema import FEATURES
from .templates import BOXED_INSTRUCTION
from .text import has_control_characters, is_english, plain_whitespace, problem_key, restore_commands


Language = Literal["any", "en"]
# In this order: a row is left out for the first reason that holds.
Reason = Literal[
    "benchmark, exact",
    "benchmark, n-gram",
    "no problem",
    "control characters",
    "gold answer cannot be parsed",
    "language",
    "prompt too long",
    "exact duplicate",
    "conflicting answers",
    "normalised duplicate",
]


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, and why; `detail` names the benchmark problems, the row kept, or the answers."""

    id: str
    reason: Reason
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
    """What cleaning found. `options` are those of `clean`, and what the caller adds; `repeats` rows came in twice."""

    rows: int
    kept: int
    restored: int
    dropped: list[Dropped]
    benchmarks: dict[str, BenchmarkOverlap]
    options: dict[str, Any] = field(default_factory=dict)
    repeats: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Rows left out, by reason, in the order of the rules."""
        counts = Counter(row.reason for row in self.dropped)
        return {reason: counts[reason] for reason in get_args(Reason)}

    def print(self, console: Console | None = None) -> None:
        """Prints the report as two tables."""
        console = console or Console()
        table = Table("rows", "", title="Cleaning", title_justify="left")
        table.columns[1].justify = "right"
        if self.repeats:
            table.add_row("repeated, collapsed on loading", f"{self.repeats:,}")
        table.add_row("rows", f"{self.rows:,}")
        table.add_row("LaTeX commands restored", f"{self.restored:,}", end_section=True)
        for reason, count in self.counts.items():
            table.add_row(f"left out: {reason}", f"{count:,}")
        table.add_section()
        table.add_row("kept", f"{self.kept:,}", style="bold")
        console.print(table)
        if self.benchmarks:
            headings = ("benchmark", "problems", "found exactly", "share an n-gram", "rows left out")
            table = Table(*headings, title="Overlap with benchmarks", title_justify="left")
            for name, overlap in self.benchmarks.items():
                table.add_row(name, *(f"{count:,}" for count in asdict(overlap).values()))
            for column in table.columns[1:]:
                column.justify = "right"
            console.print(table)

    def save(self, path: Path | str) -> None:
        """Writes the counts and options as JSON; `save_dropped` writes the rows."""
        content = {key: value for key, value in asdict(self).items() if key != "dropped"} | {"dropped": self.counts}
        Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def save_dropped(self, path: Path | str) -> None:
        """Writes one JSON line for each row left out: `id`, `reason`, `detail`."""
        lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in self.dropped]
        Path(path).write_text("".join(lines), encoding="utf-8")


def clean(
    rows: Dataset,
    benchmarks: Mapping[str, Dataset] | None = None,
    *,
    language: Language = "any",
    max_prompt_length: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    instruction: str | None = BOXED_INSTRUCTION,
    ngram: int = 13,
    common: int = 10,
) -> tuple[Dataset, Report]:
    """Training problems that can be graded, that occur once, and that no benchmark holds; in their order.

    Before anything else LaTeX commands whose first letter an export took for a control character are restored, and
    tabs become spaces. Where one problem has several answers nobody can say which is right, and all its rows go.

    Args:
        rows: columns of `dc_trl.data.schema.FEATURES`.
        benchmarks: by name, with the same columns; None: no decontamination.
        language: ``"en"`` leaves out problems with letters other than Latin and Greek ones.
        max_prompt_length: in tokens, of the prompt with ``instruction`` as training makes it; needs ``tokenizer``.
        tokenizer: of the model that will be trained.
        instruction: of the prompts; None: none.
        ngram: words in a row that count as overlap (see `find_overlaps`).
        common: training problems that may share an n-gram before it is a turn of phrase.

    Returns:
        (the rows that are left, the report).

    Raises:
        ValueError: an option is invalid, or a column is missing.
    """
    benchmarks = benchmarks or {}
    missing = set(FEATURES) - set(rows.column_names)
    if missing:
        raise ValueError(f"rows lack the columns {', '.join(sorted(missing))}: load them with dc_trl.data's loaders.")
    require_options(language, max_prompt_length, tokenizer, ngram, common)
    restored = 0
    records: list[dict[str, Any]] = []
    for row in rows:
        texts = {column: restore_commands(row[column]) for column in ("problem", "answer")}
        restored += any(texts[column] != row[column] for column in texts)
        records.append(row | {column: plain_whitespace(text).strip() for column, text in texts.items()})

    dropped: dict[int, Dropped] = {}

    def drop(number: int, reason: Reason, detail: str = "") -> None:
        dropped[number] = Dropped(records[number]["id"], reason, detail)

    overlaps = find_overlaps([record["problem"] for record in records], benchmarks, ngram, common)
    for number, (record, overlap) in enumerate(zip(records, overlaps, strict=True)):
        if overlap is not None:
            reason: Reason = "benchmark, exact" if overlap.kind == "exact" else "benchmark, n-gram"
            drop(number, reason, " ".join(overlap.ids) + (f": {overlap.phrase}" if overlap.phrase else ""))
        elif not record["problem"]:
            drop(number, "no problem")
        elif has_control_characters(record["problem"] + record["answer"]):
            drop(number, "control characters")
        elif not record["answer"] or not is_gradable(record["answer"]):
            drop(number, "gold answer cannot be parsed", record["answer"])
        elif language == "en" and not is_english(record["problem"]):
            drop(number, "language")
        elif max_prompt_length is not None and tokenizer is not None:
            length = prompt_length(make_prompt(record["problem"], tokenizer, instruction), tokenizer)
            if length > max_prompt_length:
                drop(number, "prompt too long", f"{length} tokens")

    groups: dict[str, list[int]] = defaultdict(list)
    first: dict[tuple[str, str], int] = {}
    for number, record in enumerate(records):
        if number in dropped:
            continue
        kept = first.setdefault((record["problem"], record["answer"]), number)
        if kept != number:
            drop(number, "exact duplicate", records[kept]["id"])
        else:
            groups[problem_key(record["problem"])].append(number)
    for numbers in groups.values():
        answers = {"".join(records[number]["answer"].split()) for number in numbers}
        if len(answers) > 1:
            for number in numbers:
                drop(number, "conflicting answers", " | ".join(sorted(answers)))
        else:
            for number in numbers[1:]:
                drop(number, "normalised duplicate", records[numbers[0]]["id"])

    left = [record for number, record in enumerate(records) if number not in dropped]
    report = Report(
        rows=len(records),
        kept=len(left),
        restored=restored,
        dropped=[dropped[number] for number in sorted(dropped)],
        benchmarks={
            name: _count_overlap(benchmark, [overlap for overlap in overlaps if overlap is not None])
            for name, benchmark in benchmarks.items()
        },
        options={
            "language": language,
            "max_prompt_length": max_prompt_length,
            "tokenizer": tokenizer.name_or_path if tokenizer is not None else None,
            "instruction": instruction,
            "ngram": ngram,
            "common": common,
        },
    )
    return Dataset.from_list(left, features=FEATURES), report


def require_options(
    language: str, max_prompt_length: int | None, tokenizer: PreTrainedTokenizerBase | None, ngram: int, common: int
) -> None:
    """Raises a ValueError where `clean` would, before any row is loaded."""
    if language not in get_args(Language):
        raise ValueError(
            f"language={language!r} is unknown: choose one of {', '.join(map(repr, get_args(Language)))}."
        )
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ValueError(f"max_prompt_length={max_prompt_length} is invalid: use at least 1 token.")
    if (max_prompt_length is None) != (tokenizer is None):
        other = "tokenizer" if tokenizer is None else "max_prompt_length"
        raise ValueError(f"max_prompt_length and tokenizer go together: set {other} too, or leave both out.")
    require_ngram(ngram, common)


def _count_overlap(benchmark: Dataset, overlaps: list[Overlap]) -> BenchmarkOverlap:
    ids = set(benchmark["id"])
    exact = {problem for overlap in overlaps if overlap.kind == "exact" for problem in overlap.ids} & ids
    ngram = {problem for overlap in overlaps if overlap.kind == "n-gram" for problem in overlap.ids} & ids
    rows = sum(not ids.isdisjoint(overlap.ids) for overlap in overlaps)
    return BenchmarkOverlap(problems=len(ids), exact=len(exact), ngram=len(ngram - exact), rows=rows)
