"""Training problems that are benchmark problems, word for word or in part."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from datasets import Dataset

from .text import alphanumeric, words


# Shorter problems are found by exact overlap only: three words in a row are no evidence.
_FEWEST_WORDS = 4


@dataclass(frozen=True)
class Overlap:
    """What a training problem shares with benchmarks: `ids` of their problems, and the rarest shared n-gram."""

    kind: Literal["exact", "n-gram"]
    ids: tuple[str, ...]
    phrase: str = ""


def find_overlaps(
    problems: Sequence[str], benchmarks: Mapping[str, Dataset], ngram: int = 13, common: int = 10
) -> list[Overlap | None]:
    """The overlap of each training problem with the benchmarks, None where there is none.

    *Exact*: equal but for case, spaces and punctuation. *n-gram*: ``ngram`` words in a row are shared; of a benchmark
    problem with fewer words, all of them. An n-gram in more than ``common`` different training problems is a turn of
    phrase ("where m and n are relatively prime positive integers, find m + n") and counts for nothing. The rule and
    its values, 13 words and 10 documents, are GPT-3's (arXiv 2005.14165, appendix C).

    Args:
        problems: texts of the training problems.
        benchmarks: data sets with columns `id` and `problem`.
        ngram: words in a row, at least 4.
        common: training problems that may share an n-gram before it is a turn of phrase, at least 1.

    Raises:
        ValueError: ``ngram`` or ``common`` is out of range.
    """
    require_ngram(ngram, common)
    exact: dict[str, list[str]] = defaultdict(list)
    grams: dict[str, set[str]] = defaultdict(set)
    short: dict[str, set[str]] = defaultdict(set)
    for benchmark in benchmarks.values():
        for problem_id, problem in zip(benchmark["id"], benchmark["problem"], strict=True):
            exact[alphanumeric(problem)].append(problem_id)
            sequence = words(problem)
            for gram in _grams(sequence, ngram):
                grams[gram].add(problem_id)
            if _FEWEST_WORDS <= len(sequence) < ngram:
                short[f" {' '.join(sequence)} "].add(problem_id)

    keys = [alphanumeric(problem) for problem in problems]
    shared: list[set[str]] = []
    spread: Counter[str] = Counter()
    counted: set[str] = set()
    for key, problem in zip(keys, problems, strict=True):
        sequence = words(problem)
        text = f" {' '.join(sequence)} "
        found = {gram for gram in _grams(sequence, ngram) if gram in grams}
        found |= {phrase for phrase in short if phrase in text}
        shared.append(found)
        if key not in counted:  # copies of one problem make no turn of phrase
            counted.add(key)
            spread.update(found)

    overlaps: list[Overlap | None] = []
    for key, found in zip(keys, shared, strict=True):
        telling = sorted((gram for gram in found if spread[gram] <= common), key=lambda gram: (spread[gram], gram))
        if key in exact:
            overlaps.append(Overlap("exact", tuple(exact[key])))
        elif telling:
            ids = {problem_id for gram in telling for problem_id in grams.get(gram, set()) | short.get(gram, set())}
            overlaps.append(Overlap("n-gram", tuple(sorted(ids)), telling[0].strip()))
        else:
            overlaps.append(None)
    return overlaps


def require_ngram(ngram: int, common: int) -> None:
    """Raises a ValueError where `find_overlaps` would."""
    if ngram < _FEWEST_WORDS:
        raise ValueError(f"ngram={ngram} is invalid: use at least {_FEWEST_WORDS} words.")
    if common < 1:
        raise ValueError(f"common={common} is invalid: use at least 1 problem.")


def _grams(sequence: list[str], size: int) -> Iterable[str]:
    return (" ".join(sequence[start : start + size]) for start in range(len(sequence) - size + 1))
