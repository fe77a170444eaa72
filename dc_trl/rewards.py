"""Rewards by checking the final answer."""

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from math_verify import parse
from trl.rewards import accuracy_reward


Completion = str | list[dict[str, Any]]
RewardFunction = Callable[..., list[float | None]]

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_PLAIN_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?")
_PROSE = re.compile(r"[^\W\d_]{2,}|n/a", re.IGNORECASE)


def completion_text(completion: Completion) -> str:
    """Text of a completion, plain or conversational (of its last message)."""
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def is_gradable(answer: str) -> bool:
    """Whether a gold answer is mathematics that math-verify can compare with; prose and broken LaTeX are not."""
    if _PLAIN_NUMBER.fullmatch(answer):
        return True
    # Prose parses too, as a product of its letters: "none" would be e·n²·o.
    if "\\" not in answer and not re.search(r"\d", answer) and _PROSE.search(answer):
        return False
    return any(not isinstance(value, str) for value in parse(_boxed(answer)))


def _boxed(answer: str) -> str:
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


def math_reward(completions: Sequence[Completion], answer: Sequence[str], **kwargs: Any) -> list[float | None]:
    r"""1 for a completion whose boxed answer equals the gold answer as mathematics, 0 otherwise.

    The comparison is TRL's `accuracy_reward`, that is math-verify on the first `\boxed{}`. It accepts equal
    expressions in any form, also unevaluated ones: `\boxed{40+6}` for 46. Use [`arithmetic_reward`] where the value
    must be computed.

    Args:
        completions: plain or conversational completions.
        answer: gold answer of each, LaTeX or a plain number, with or without `\boxed{}`.
        **kwargs: other columns of the data set; unused.

    Returns:
        1.0, 0.0, or None where the gold answer cannot be parsed, which leaves the completion out of the loss.
    """
    conversations = [[{"role": "assistant", "content": completion_text(completion)}] for completion in completions]
    return accuracy_reward(conversations, solution=[_boxed(gold) for gold in answer])


def arithmetic_reward(completions: Sequence[Completion], answer: Sequence[str], **kwargs: Any) -> list[float | None]:
    r"""1 for a completion whose last `\boxed{}` holds exactly the plain integer of the gold answer, 0 otherwise.

    An expression that has the value (`\boxed{40+6}` for 46) or another spelling of it (`\boxed{046}`) is wrong: the
    policy is to compute, and finds whatever else is accepted.

    Args:
        completions: plain or conversational completions.
        answer: gold answer of each, a plain integer.
        **kwargs: other columns of the data set; unused.

    Returns:
        1.0, 0.0, or None where the gold answer is no plain integer.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        boxes = _BOXED.findall(completion_text(completion))
        rewards.append(float(bool(boxes) and boxes[-1] == gold) if _PLAIN_INTEGER.fullmatch(gold) else None)
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
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"rewards={name!r} cannot be imported ({error}): {problem}.") from error
    if not callable(getattr(module, function_name, None)):
        raise ValueError(f"rewards={name!r}: module {module_name!r} has no function {function_name!r}: {problem}.")
    return getattr(module, function_name)
