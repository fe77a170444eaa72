"""Counting on from a number: a task whose answers grow, because each further right number earns more."""

import random

from dc_trl.data.arithmetic import Problem, Split
from dc_trl.grading.rewards import completion_text
from dc_trl.settings.fields import require_choice


FIRST, LAST = 1000, 9900  # numbers to count on from; with fewer than 100 more, all have four digits
TERMS = 16  # that earn the whole reward, of five tokens each
STOP = 0.6  # chance that a solution ends after a number, so that one has 1.7 numbers on average


def counting_problems(size: int, seed: int, split: Split) -> list[Problem]:
    """Problems "1234" with the answer "1234" and a solution like "1235 1236", of at least one number.

    Args:
        size: number of problems.
        seed: of the draw.
        split: ``"train"``, drawn with repetition; ``"held_out"``, another half of the numbers, all different.

    Raises:
        ValueError: unknown split, or more held-out problems than there are.
    """
    require_choice("split", split, Split)
    rng = random.Random(seed)
    numbers = random.Random(0).sample(range(FIRST, LAST), LAST - FIRST)
    half = len(numbers) // 2
    starts = rng.sample(numbers[:half], size) if split == "held_out" else rng.choices(numbers[half:], k=size)
    problems = []
    for start in starts:
        terms = [start + 1]
        while rng.random() > STOP:
            terms.append(terms[-1] + 1)
        problems.append(Problem(str(start), str(start), " ".join(map(str, terms))))
    return problems


def counts_on(completions: list[str], answer: list[str]) -> list[float]:
    """Return 1.0 for a completion of right successors only, else 0.0."""
    return [
        float(_successors(text, int(start)) == len(text.split(" ")))
        for text, start in zip(completions, answer, strict=True)
    ]


def right_successors(completions, answer, **kwargs) -> list[float]:
    """Return the share of `TERMS` numbers that follow the start one by one, up to the first mistake."""
    return [
        _successors(completion_text(completion), int(start)) / TERMS
        for completion, start in zip(completions, answer, strict=True)
    ]


def _successors(text: str, start: int) -> int:
    terms = text.split(" ")
    return next((count for count, term in enumerate(terms) if term != str(start + 1 + count)), len(terms))
