"""Cleaning and decontamination of training problems, with a report of every row that was left out."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ..files import write_text
from ..grading import is_gradable
from ..settings.described import described
from ..settings.ranges import require_choice
from .overlap import Overlap, find_overlaps, require_ngram
from .prompts import make_prompt, prompt_length
from .schema import FEATURES
from .templates import BOXED_INSTRUCTION
from .text import has_control_characters, is_english, plain_whitespace, problem_key, restore_commands


Language = Literal["any", "en"]


@described
@dataclass(frozen=True)
class Cleaning:
    """What cleaning leaves out besides what is wrong.

    Args:
        language (`str`, defaults to `"any"`):
            'en' leaves out problems with letters other than Latin and Greek ones.
        max_prompt_length (`int`, *optional*):
            In tokens, of the prompt with the instruction as training makes it; needs the tokenizer.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Of the model that will be trained.
        instruction (`str` or `None`, defaults to `BOXED_INSTRUCTION`):
            Of the prompts, counted in their length.
        ngram (`int`, defaults to 13):
            Words in a row that count as overlap, at least 4.
        common (`int`, defaults to 10):
            Training problems that may share an n-gram before it is a turn of phrase and counts for nothing.

    Raises:
        ValueError: an option is invalid.
    """

    language: Language = "any"
    max_prompt_length: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    instruction: str | None = BOXED_INSTRUCTION
    ngram: int = 13
    common: int = 10

    def __post_init__(self) -> None:
        require_choice("language", self.language, Language)
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ValueError(f"max_prompt_length={self.max_prompt_length} is invalid: use at least 1 token.")
        if (self.max_prompt_length is None) != (self.tokenizer is None):
            other = "tokenizer" if self.tokenizer is None else "max_prompt_length"
            raise ValueError(f"max_prompt_length and tokenizer go together: set {other} too, or leave both out.")
        require_ngram(self.ngram, self.common)

    def describe(self) -> dict[str, Any]:
        """The options as JSON can hold them: the tokenizer by its name."""
        return vars(self) | {"tokenizer": self.tokenizer.name_or_path if self.tokenizer is not None else None}


class _Row(NamedTuple):
    """What rules look at: columns of `FEATURES`, and what the problem shares with benchmarks."""

    id: str
    problem: str
    answer: str
    overlap: Overlap | None


# Which of the rows that are left a rule leaves out: their numbers, and of each the detail for the report.
_Rule = Callable[[Mapping[int, _Row], Cleaning], dict[int, str]]


def _of_one_row(detail: Callable[[_Row, Cleaning], str | None]) -> _Rule:
    """A rule that looks at one row at a time; ``detail`` is None where the row stays."""

    def rule(rows: Mapping[int, _Row], options: Cleaning) -> dict[int, str]:
        found = {number: detail(row, options) for number, row in rows.items()}
        return {number: text for number, text in found.items() if text is not None}

    return rule


def _where(holds: Callable[[_Row, Cleaning], bool]) -> _Rule:
    """A rule that looks at one row at a time, and has nothing to add."""
    return _of_one_row(lambda row, options: "" if holds(row, options) else None)


def _shared(kind: str) -> _Rule:
    def detail(row: _Row, options: Cleaning) -> str | None:
        if row.overlap is None or row.overlap.kind != kind:
            return None
        return " ".join(row.overlap.ids) + (f": {row.overlap.phrase}" if row.overlap.phrase else "")

    return _of_one_row(detail)


def _ungradable(row: _Row, options: Cleaning) -> str | None:
    return None if row.answer and is_gradable(row.answer) else row.answer


def _too_long(row: _Row, options: Cleaning) -> str | None:
    if options.max_prompt_length is None or options.tokenizer is None:
        return None
    length = prompt_length(make_prompt(row.problem, options.tokenizer, options.instruction), options.tokenizer)
    return f"{length} tokens" if length > options.max_prompt_length else None


def _duplicates(key: Callable[[_Row], Any]) -> _Rule:
    """All rows of one key but the first, whose id is the detail."""

    def rule(rows: Mapping[int, _Row], options: Cleaning) -> dict[int, str]:
        return {number: rows[first].id for first, *others in _grouped(rows, key) for number in others}

    return rule


def _conflicting(rows: Mapping[int, _Row], options: Cleaning) -> dict[int, str]:
    found: dict[int, str] = {}
    for numbers in _grouped(rows, lambda row: problem_key(row.problem)):
        answers = {"".join(rows[number].answer.split()) for number in numbers}
        if len(answers) > 1:
            found |= dict.fromkeys(numbers, " | ".join(sorted(answers)))
    return found


def _grouped(rows: Mapping[int, _Row], key: Callable[[_Row], Any]) -> list[list[int]]:
    groups = defaultdict(list)
    for number, row in rows.items():
        groups[key(row)].append(number)
    return list(groups.values())


# By the reason that the report gives. A row is left out for the first rule that holds; each rule sees what the ones
# before it have left.
RULES: dict[str, _Rule] = {
    "benchmark, exact": _shared("exact"),
    "benchmark, n-gram": _shared("n-gram"),
    "no problem": _where(lambda row, options: not row.problem),
    "control characters": _where(lambda row, options: has_control_characters(row.problem + row.answer)),
    "gold answer cannot be parsed": _of_one_row(_ungradable),
    "language": _where(lambda row, options: options.language == "en" and not is_english(row.problem)),
    "prompt too long": _of_one_row(_too_long),
    "exact duplicate": _duplicates(lambda row: (row.problem, row.answer)),
    "conflicting answers": _conflicting,
    "normalised duplicate": _duplicates(lambda row: problem_key(row.problem)),
}


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
        """Rows left out, by reason, in the order of the rules."""
        counts = Counter(row.reason for row in self.dropped)
        return {reason: counts[reason] for reason in RULES}

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
        write_text(Path(path), json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def save_dropped(self, path: Path | str) -> None:
        """Writes one JSON line for each row left out: `id`, `reason`, `detail`."""
        lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in self.dropped]
        write_text(Path(path), "".join(lines))


def clean(
    rows: Dataset, benchmarks: Mapping[str, Dataset] | None = None, options: Cleaning | None = None
) -> tuple[Dataset, Report]:
    """Training problems that can be graded, that occur once, and that no benchmark holds; in their order.

    Before anything else LaTeX commands whose first letter an export took for a control character are restored, and
    tabs become spaces. Where one problem has several answers nobody can say which is right, and all its rows go.

    Args:
        rows: columns of `dc_trl.data.schema.FEATURES`.
        benchmarks: by name, with the same columns; None: no decontamination.
        options: None: the defaults.

    Returns:
        (the rows that are left, the report).

    Raises:
        ValueError: a column is missing.
    """
    benchmarks, options = benchmarks or {}, options or Cleaning()
    missing = set(FEATURES) - set(rows.column_names)
    if missing:
        raise ValueError(f"rows lack the columns {', '.join(sorted(missing))}: load them with dc_trl.data's loaders.")
    records, restored = _repaired(rows)
    overlaps = find_overlaps([record["problem"] for record in records], benchmarks, options.ngram, options.common)
    left = {
        number: _Row(record["id"], record["problem"], record["answer"], overlap)
        for number, (record, overlap) in enumerate(zip(records, overlaps, strict=True))
    }
    dropped: dict[int, Dropped] = {}
    for reason, rule in RULES.items():
        for number, detail in rule(left, options).items():
            dropped[number] = Dropped(left.pop(number).id, reason, detail)
    report = Report(
        rows=len(records),
        kept=len(left),
        restored=restored,
        dropped=[dropped[number] for number in sorted(dropped)],
        benchmarks={name: _count_overlap(benchmark, overlaps) for name, benchmark in benchmarks.items()},
        options=options.describe(),
    )
    return Dataset.from_list([records[number] for number in left], features=FEATURES), report


def _repaired(rows: Dataset) -> tuple[list[dict[str, Any]], int]:
    """The rows with LaTeX commands restored and plain white space, and how many of them had a command to restore."""
    records, restored = [], 0
    for row in rows:
        texts = {column: restore_commands(row[column]) for column in ("problem", "answer")}
        restored += any(texts[column] != row[column] for column in texts)
        records.append(row | {column: plain_whitespace(text).strip() for column, text in texts.items()})
    return records, restored


def _count_overlap(benchmark: Dataset, overlaps: list[Overlap | None]) -> BenchmarkOverlap:
    ids = set(benchmark["id"])
    found = [overlap for overlap in overlaps if overlap is not None and not ids.isdisjoint(overlap.ids)]
    exact = {problem for overlap in found if overlap.kind == "exact" for problem in overlap.ids} & ids
    ngram = {problem for overlap in found if overlap.kind == "n-gram" for problem in overlap.ids} & ids
    return BenchmarkOverlap(problems=len(ids), exact=len(exact), ngram=len(ngram - exact), rows=len(found))
