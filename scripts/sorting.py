"""Sorting digits with worked steps: a second task for tiny models, so that no finding rests on arithmetic alone."""

import hashlib
import random

from dc_trl.data.arithmetic import Problem, Split
from dc_trl.settings.fields import require_choice


SHORT = (3, 5)  # digits of a problem, from and to; a solution of 21 to 38 tokens
LONG = (7, 9)  # 59 to 84
_SEARCHED = 0.75  # of the held-out problems that there are, those that are found without a long search


def is_held_out(question: str) -> bool:
    """Whether a problem belongs to the half of all that is never taught; stable across versions."""
    return int(hashlib.sha256(question.encode()).hexdigest(), 16) % 2 == 0


def sorting_problems(size: int, seed: int, split: Split, digits: tuple[int, int] = SHORT) -> list[Problem]:
    r"""Problems "sort 4159" with the answer "1459" and the solution "4159>1;459>4;59>5;9>9;\boxed{1459}".

    The digits are from 1 to 9, so the answer is a plain integer, which `arithmetic_reward` grades. The order depends
    on the seed alone.

    Args:
        size: number of problems.
        seed: of the draw.
        split: ``"train"``, drawn with repetition; ``"held_out"``, all different and never in ``"train"``.
        digits: how many a problem has, at least and at most.

    Raises:
        ValueError: unknown split, or a size that is not available.
    """
    require_choice("split", split, Split)
    held_out = split == "held_out"
    most = int(_SEARCHED / 2 * sum(9**count for count in range(digits[0], digits[1] + 1)))
    if size < 1 or (held_out and size > most):
        raise ValueError(f"size={size} is invalid: use at least 1, and at most {most} held-out problems.")
    rng = random.Random(seed)
    problems: list[Problem] = []
    seen: set[str] = set()
    while len(problems) < size:
        problem = _worked([rng.randrange(1, 10) for _ in range(rng.randint(*digits))])
        if is_held_out(problem.question) == held_out and not (held_out and problem.question in seen):
            seen.add(problem.question)
            problems.append(problem)
    return problems


def _worked(digits: list[int]) -> Problem:
    answer = "".join(map(str, sorted(digits)))
    left, steps = list(digits), []
    for smallest in sorted(digits):
        steps.append(f"{''.join(map(str, left))}>{smallest};")
        left.remove(smallest)
    return Problem(f"sort {''.join(map(str, digits))}", answer, "".join(steps) + f"\\boxed{{{answer}}}")
