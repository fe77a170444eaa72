"""Reward functions that a user writes: calling them as TRL does, and refusing what would harm a training silently."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any


# Settings are also read without torch.
if TYPE_CHECKING:
    from torch import Tensor

RewardFunction = Callable[..., list[float | None]]

# Largest reward: advantages are normalised in float32, in which the square of a larger one would overflow.
LARGEST = 1e18


def reward_name(reward: Callable[..., Any]) -> str:
    """Return the name that TRL gives a reward function: the function's, also within `partial`, or the class's."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return getattr(reward, "__name__", type(reward).__name__)


def require_finite(named: str, rewards: Tensor) -> None:
    """Refuse rewards, or weighted sums, of shape (B,), of which one is not finite or above `LARGEST`."""
    wrong = ~(rewards.abs() <= LARGEST)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{named} is {rewards[row].item():g} for completion {row}: advantages would be 0, infinite or NaN. Give "
            f"finite rewards of at most {LARGEST:g}."
        )


def excerpt(value: Any) -> str:
    """Return a value as a message shows it, in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def call_reward(reward: RewardFunction, **arguments: Any) -> list[float | None]:
    """Call a reward function with arguments as TRL passes them; None where it returned None or NaN."""
    return [None if value is None or math.isnan(value) else float(value) for value in reward(**arguments)]


def require_callable(
    named: str, reward: RewardFunction, columns: Iterable[str], extra: Iterable[str] = (), more: bool = False
) -> None:
    """Refuse a reward function that cannot be called as TRL calls it; TRL would find out after the first rollout.

    It is given the rows' `columns` and this run's `extra` arguments; with `more`, a `rollout_func` may add others.
    """
    given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    given |= {*extra, *columns} - {"prompt", "completion"}  # which TRL does not pass: `prompts` holds the former
    try:
        signature = inspect.signature(reward)
    except ValueError:  # a function in C may have none
        return
    try:
        (signature.bind_partial if more else signature.bind)(**dict.fromkeys(given))
    except TypeError as error:
        raise ValueError(
            f"{named} cannot be called ({error}): it is given {', '.join(sorted(given))}; add **kwargs for"
            " what it does not read."
        ) from error
