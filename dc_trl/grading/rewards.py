"""Rewards by checking the final answer."""

import re
from collections.abc import Sequence
from typing import Any

from ..settings.fields import import_function
from . import GRADING_COLUMNS, Gold, Grader, gold_answer
from .checked_reward import RewardFunction
from .text import last_box


Completion = str | list[dict[str, Any]]

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_GRADER = Grader()  # of this process; its workers start with the first answers


def completion_text(completion: Completion) -> str:
    """Text of a completion, plain or conversational (of its last message)."""
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def math_reward(completions: Sequence[Completion], answer: Sequence[str], **kwargs: Any) -> list[float | None]:
    r"""1 for a completion whose last boxed answer is correct, 0 otherwise.

    What counts as correct is stated, with examples, in docs/rewards.md: equal as mathematics, and as evaluated as the
    gold answer, so `\boxed{40+6}` is no answer of 46. Answers are graded in worker processes, each within five seconds
    and one GiB. What takes more, or raises in grading, is wrong; a trainer logs how many as `grading/failures`, and
    an exception is a warning that names it.

    Args:
        completions: plain or conversational completions.
        answer: gold answer of each: LaTeX or a plain number, with or without `\boxed{}`, or a text of which what
            follows `####` counts, as in GSM8K.
        **kwargs: other columns of the data set. `multiple_answers`, `unit`, `relative_tolerance` and
            `absolute_tolerance` say how an answer is compared, one value for each completion, None for the default
            (see [`dc_trl.grading.Gold`]); the trainer's `log_metric` is called; the others are unused.

    Returns:
        1.0, 0.0, or None where the gold answer cannot be graded, which leaves the completion out of the loss.
    """
    columns = {field: kwargs[field] for field in GRADING_COLUMNS if kwargs.get(field) is not None}
    golds = [
        Gold(
            gold_answer(gold) or "",
            **{field: values[row] for field, values in columns.items() if values[row] is not None},
        )
        for row, gold in enumerate(answer)
    ]
    failures = _GRADER.failures.total()
    verdicts = _GRADER.grade([completion_text(completion) for completion in completions], golds)
    if "log_metric" in kwargs:
        kwargs["log_metric"]("grading/failures", float(_GRADER.failures.total() - failures))
    return [None if verdict.correct is None else float(verdict.correct) for verdict in verdicts]


def arithmetic_reward(completions: Sequence[Completion], answer: Sequence[str], **kwargs: Any) -> list[float | None]:
    r"""1 for a completion whose last `\boxed{}` holds exactly the plain integer of the gold answer, 0 otherwise.

    An expression that has the value (`\boxed{40+6}` for 46) or another spelling of it (`\boxed{046}`) is wrong: the
    policy is to compute, and finds whatever else is accepted.

    Args:
        completions: plain or conversational completions.
        answer: gold answer of each, a plain integer, or a text of which what follows `####` counts, as in GSM8K.
        **kwargs: other columns of the data set; unused.

    Returns:
        1.0, 0.0, or None where the gold answer is no plain integer.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        text, integer = completion_text(completion), gold_answer(gold) or ""
        is_correct = last_box(text) == integer and _BOXED.findall(text)[-1:] == [integer]
        rewards.append(float(is_correct) if _PLAIN_INTEGER.fullmatch(integer) else None)
    return rewards


REWARDS: dict[str, RewardFunction] = {"math": math_reward, "arithmetic": arithmetic_reward}


def get_reward(name: str) -> RewardFunction:
    """Reward function by name (`"math"`, `"arithmetic"`) or by dotted path (`"my_package.rewards.my_reward"`).

    Raises:
        ValueError: there is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    module_name, _, function_name = name.rpartition(".")
    problem = f"use one of {', '.join(map(repr, REWARDS))} or the dotted path of a function that can be imported"
    if not module_name:
        raise ValueError(f"rewards={name!r} is unknown: {problem}.")
    return import_function(f"rewards={name!r}", module_name, function_name, problem)
