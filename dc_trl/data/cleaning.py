"""Cleaning of training problems, also of what benchmarks hold, with a report of every row that was left out."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from ..grading import is_gradable
from ..records.tables import print_table
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
    copies: dict[str, list[int]] = defaultdict(list)  # rows of one problem
    for number, row in left.items():
        copies[problem_key(row["problem"])].append(number)
    for numbers in copies.values():
        answers = {"".join(left[number]["answer"].split()) for number in numbers}
        if len(answers) > 1:
            dropped |= dict.fromkeys(numbers, ("conflicting answers", " | ".join(sorted(answers))))
        else:
            dropped |= dict.fromkeys(numbers[1:], ("duplicate", left[numbers[0]]["id"]))
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


# --- problems of benchmarks among them, word for word or in part, and keys of equal problems


# Shorter problems are found by exact overlap only: three words in a row are no evidence.
FEWEST_WORDS = 4


def find_overlaps(
    problems: Sequence[str], benchmarks: Mapping[str, Dataset], ngram: int = 13, common: int = 10
) -> list[tuple[str, str] | None]:
    """Return how each training problem overlaps with the benchmarks, and with which problems; None where it does not.

    *Exact*: the two have one `problem_key`. *n-gram*: ``ngram`` words in a row are shared; of a benchmark problem with
    fewer words, all of them. An n-gram in more than ``common`` different training problems is a turn of phrase ("where
    m and n are relatively prime positive integers, find m + n") and does not count. The rule and its values, 13 words
    and 10 documents, are GPT-3's (arXiv 2005.14165, appendix C).

    Args:
        problems: texts of the training problems.
        benchmarks: data sets with columns `id` and `problem`.
        ngram: words in a row, at least 4.
        common: training problems that may share an n-gram before it is a turn of phrase, at least 1.

    Returns:
        `exact` or `n-gram`, and the ids of the benchmarks' problems, with the rarest n-gram that is shared.
    """
    exact: dict[str, list[str]] = defaultdict(list)  # ids of benchmark problems, by the key of the whole problem
    known: dict[str, set[str]] = defaultdict(set)  # the same ids, by the word sequences that a problem holds
    short: set[str] = set()  # whole problems with fewer words than an n-gram
    for benchmark in benchmarks.values():
        for problem_id, problem in zip(benchmark["id"], benchmark["problem"], strict=True):
            exact[problem_key(problem)].append(problem_id)
            sequence = words(problem)
            grams = _grams(sequence, ngram)
            if FEWEST_WORDS <= len(sequence) < ngram:
                grams = {f" {' '.join(sequence)} "}  # spaces around it keep "1 2" out of "11 23"
                short |= grams
            for gram in grams:
                known[gram].add(problem_id)
    keys = [problem_key(problem) for problem in problems]
    shared = []
    for problem in problems:
        text = f" {' '.join(words(problem))} "
        shared.append((_grams(words(problem), ngram) & known.keys()) | {whole for whole in short if whole in text})
    # Copies of one problem make no turn of phrase: only the first of them counts.
    distinct = dict(zip(reversed(keys), reversed(shared), strict=True))
    spread = Counter(phrase for phrases in distinct.values() for phrase in phrases)
    overlaps: list[tuple[str, str] | None] = []
    for key, phrases in zip(keys, shared, strict=True):
        telling = [phrase for phrase in phrases if spread[phrase] <= common]
        if key in exact:
            overlaps.append(("exact", " ".join(exact[key])))
        elif telling:
            ids = set().union(*(known[phrase] for phrase in telling))
            rarest = min(telling, key=lambda phrase: (spread[phrase], phrase))
            overlaps.append(("n-gram", f"{' '.join(sorted(ids))}: {rarest.strip()}"))
        else:
            overlaps.append(None)
    return overlaps


def problem_key(text: str) -> str:
    """Return a key that is equal for texts that differ in case, spaces and punctuation alone.

    What tells two problems apart stays: operators, relations, and the separators between digits.
    """
    parts = re.split(r"(?<=\d)[\s,.]+(?=\d)", _fold(text).replace("\u2212", "-"))
    return ",".join("".join(filter(_tells_apart, part)) for part in parts)


def words(text: str) -> list[str]:
    """Return words and numbers in order, case folded; LaTeX commands count by their names."""
    return re.findall(r"[^\W_]+", _fold(text))


def _tells_apart(character: str) -> bool:
    is_operator = character in "-*/^!%" or (character != "~" and unicodedata.category(character) == "Sm")
    return is_operator or character.isalnum()


def _fold(text: str) -> str:
    # Case folding can undo the normal form, so once more.
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _grams(sequence: list[str], size: int) -> set[str]:
    return {" ".join(sequence[start : start + size]) for start in range(len(sequence) - size + 1)}
