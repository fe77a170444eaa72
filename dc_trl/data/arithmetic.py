"""Two-digit arithmetic with worked steps: a task that a tiny model solves in part, and can learn to solve better."""

import hashlib
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from datasets import Dataset

from ..settings.fields import COUNT, require_choice, require_number
from .prompts import chat_prompt


Split = Literal["train", "held_out"]


class Problem(NamedTuple):
    r"""A problem: `question` "23+45=?", `answer` "68", `solution` "3+5+0=8;2+4+0=6;\boxed{68}"."""

    question: str
    answer: str
    solution: str


def sample_problem(rng: random.Random) -> Problem:
    """Draw a problem from ``rng``: sum or difference of two-digit numbers (half), or product with a digit."""
    operator = rng.choice("+-**")
    if operator == "*":
        first, second = rng.randrange(1, 100), rng.randrange(2, 10)
    else:
        first, second = rng.randrange(10, 100), rng.randrange(10, 100)
        if operator == "-":
            first, second = max(first, second), min(first, second)
    return _worked(first, operator, second)


def _worked(first: int, operator: str, second: int) -> Problem:
    answer = {"+": first + second, "-": first - second, "*": first * second}[operator]
    steps, carry = [], 0
    others = itertools.repeat(str(second)) if operator == "*" else reversed(str(second))
    for digit, other in zip(map(int, reversed(str(first))), map(int, others), strict=False):
        value = {"+": digit + other + carry, "-": digit - other - carry, "*": digit * other + carry}[operator]
        steps.append(f"{digit}{operator}{other}{'-' if operator == '-' else '+'}{carry}={value};")
        carry = int(value < 0) if operator == "-" else value // 10
    return Problem(f"{first}{operator}{second}=?", str(answer), f"{''.join(steps)}\\boxed{{{answer}}}")


def is_held_out(question: str) -> bool:
    """Return whether a problem belongs to the fifth of all problems that is never trained on; stable across versions.

    23+45 and 45+23 are on the same side, or the one would teach the other.
    """
    operator = next(sign for sign in "+-*" if sign in question)
    operands = question.removesuffix("=?").split(operator)
    if operator != "-":
        operands.sort()
    key = operator.join(operands)
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 100 < 20


def arithmetic_problems(size: int, seed: int, split: Split) -> list[Problem]:
    """Problems of one split, in an order that depends on the seed alone.

    Args:
        size: number of problems, at least 1.
        seed: of the draw.
        split: ``"train"``, drawn with repetition; ``"held_out"``, all different and never in ``"train"``.

    Raises:
        ValueError: unknown split, or a size that is not available.
    """
    require_choice("split", split, Split)
    require_number("size", size, COUNT)
    rng = random.Random(seed)
    problems: list[Problem] = []
    if split == "train":
        while len(problems) < size:
            problem = sample_problem(rng)
            if not is_held_out(problem.question):
                problems.append(problem)
        return problems
    two_digits = range(10, 100)
    every = {
        "+": itertools.product(two_digits, two_digits),
        "-": ((first, second) for first in two_digits for second in range(10, first + 1)),
        "*": itertools.product(range(1, 100), range(2, 10)),
    }
    pools = {}
    for operator, pairs in every.items():
        worked = (_worked(first, operator, second) for first, second in pairs)
        pools[operator] = [problem for problem in worked if is_held_out(problem.question)]
    available = sum(map(len, pools.values()))
    if size > available:
        raise ValueError(f"size={size} exceeds the {available} held-out problems: ask for at most {available}.")
    for pool in pools.values():
        rng.shuffle(pool)
    # The operators in the proportions of training, as far as the products reach.
    while len(problems) < size:
        for operator in "+-**":
            if pools[operator] and len(problems) < size:
                problems.append(pools[operator].pop())
    return problems


def arithmetic_dataset(size: int, seed: int, split: Split, to_prompt: Callable[[str], Any] | None = None) -> Dataset:
    """`arithmetic_problems` as a data set: columns `prompt` and `answer` (a plain integer).

    Args:
        size, seed, split: see `arithmetic_problems`.
        to_prompt: what the model is given for a question; by default a conversation of one user message.
    """
    to_prompt = to_prompt or partial(chat_prompt, instruction=None)
    problems = arithmetic_problems(size, seed, split)
    return Dataset.from_list([{"prompt": to_prompt(each.question), "answer": each.answer} for each in problems])
