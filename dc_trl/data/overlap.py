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
    index = _Index(benchmarks, ngram)
    keys = [alphanumeric(problem) for problem in problems]
    shared = [index.phrases_in(problem) for problem in problems]
    # Copies of one problem make no turn of phrase: of each only the first counts.
    distinct = dict(zip(reversed(keys), reversed(shared), strict=True))
    spread = Counter(phrase for phrases in distinct.values() for phrase in phrases)
    overlaps: list[Overlap | None] = []
    for key, phrases in zip(keys, shared, strict=True):
        telling = [phrase for phrase in phrases if spread[phrase] <= common]
        if key in index.exact:
            overlaps.append(Overlap("exact", tuple(index.exact[key])))
        elif telling:
            ids = set().union(*(index.phrases[phrase] for phrase in telling))
            rarest = min(telling, key=lambda phrase: (spread[phrase], phrase))
            overlaps.append(Overlap("n-gram", tuple(sorted(ids)), rarest.strip()))
        else:
            overlaps.append(None)
    return overlaps


class _Index:
    """Ids of benchmark problems, by the key of the whole problem and by the word sequences that it holds."""

    def __init__(self, benchmarks: Mapping[str, Dataset], ngram: int):
        self._ngram = ngram
        self.exact: dict[str, list[str]] = defaultdict(list)
        self.phrases: dict[str, set[str]] = defaultdict(set)
        # Whole problems with fewer words than an n-gram. Spaces around them keep "1 2" out of "11 23".
        self._short: set[str] = set()
        for benchmark in benchmarks.values():
            for problem_id, problem in zip(benchmark["id"], benchmark["problem"], strict=True):
                self.exact[alphanumeric(problem)].append(problem_id)
                sequence = words(problem)
                for gram in _grams(sequence, ngram):
                    self.phrases[gram].add(problem_id)
                if _FEWEST_WORDS <= len(sequence) < ngram:
                    whole = f" {' '.join(sequence)} "
                    self.phrases[whole].add(problem_id)
                    self._short.add(whole)

    def phrases_in(self, problem: str) -> set[str]:
        """Word sequences that a problem shares with the benchmarks."""
        sequence = words(problem)
        text = f" {' '.join(sequence)} "
        found = {gram for gram in _grams(sequence, self._ngram) if gram in self.phrases}
        return found | {whole for whole in self._short if whole in text}


def require_ngram(ngram: int, common: int) -> None:
    """Raises a ValueError where `find_overlaps` would."""
    if ngram < _FEWEST_WORDS:
        raise ValueError(f"ngram={ngram} is invalid: use at least {_FEWEST_WORDS} words.")
    if common < 1:
        raise ValueError(f"common={common} is invalid: use at least 1 problem.")


def _grams(sequence: list[str], size: int) -> Iterable[str]:
    return (" ".join(sequence[start : start + size]) for start in range(len(sequence) - size + 1))
