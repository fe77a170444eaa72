"""Reward functions that a user writes: calling them as TRL does, and checking what they return."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any


RewardFunction = Callable[..., list[float | None]]

# Largest reward: advantages are normalised in float32, in which the square of a larger one would overflow.
LARGEST = 1e18


class RewardError(TypeError, ValueError):
    """What a reward function returned cannot be rewards; the message says why."""


class CheckedReward:
    """A reward function, not async, whose rewards are checked before they become advantages; picklable if it is."""

    def __init__(self, reward: Callable[..., Any], name: str):
        self._reward: Callable[..., Any] = reward
        self.__name__ = name  # which TRL reads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return require_rewards(self.__name__, self._reward(*args, **kwargs), len(kwargs["prompts"]))


class AsyncCheckedReward(CheckedReward):
    """The same for an async function, which TRL has to recognise as one."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return require_rewards(self.__name__, await self._reward(*args, **kwargs), len(kwargs["prompts"]))


def checked_reward(reward: Callable[..., Any], name: str | None = None) -> CheckedReward:
    """Wrap a reward function, which may be async, so that it refuses what `require_rewards` refuses."""
    if isinstance(reward, CheckedReward):
        return reward
    return (AsyncCheckedReward if is_async(reward) else CheckedReward)(reward, name or reward_name(reward))


def _without_partial(reward: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward


def reward_name(reward: Callable[..., Any]) -> str:
    """Return the name that TRL gives a reward function: the function's, also within `partial`, or the class's."""
    reward = _without_partial(reward)
    return getattr(reward, "__name__", type(reward).__name__)


def is_async(reward: Callable[..., Any]) -> bool:
    """Return whether a reward function returns a coroutine, as TRL sees it."""
    reward = _without_partial(reward)
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def require_rewards(name: str, rewards: Any, completions: int) -> list[float | None]:
    """Return what a reward function returned for so many completions as numbers; None and NaN: there is no reward.

    Raises:
        RewardError: it is no list, tuple, array or tensor of numbers, not one for each completion, or one is larger
            than `LARGEST`.
    """
    remedy = "return one for each completion, a finite number or None"
    try:
        if isinstance(rewards, str | bytes | Mapping | Set):
            raise TypeError(f"a {type(rewards).__name__}")
        rewards = list(rewards)
        if any(isinstance(value, str | bytes) for value in rewards):
            raise TypeError("there are texts among them")
        values = [math.nan if value is None else float(value) for value in rewards]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: a tensor of several numbers
        raise RewardError(f"reward function {name!r} returned {excerpt(rewards)} ({error}): {remedy}.") from error
    if len(values) != completions:
        raise RewardError(
            f"reward function {name!r} returned {len(values)} rewards for {completions} completions: {remedy}."
        )
    for row, value in enumerate(values):
        if abs(value) > LARGEST:
            raise RewardError(f"reward function {name!r} returned {value:g} for completion {row}: {remedy}.")
    return [None if math.isnan(value) else value for value in values]


def excerpt(value: Any) -> str:
    """Return a value as a message shows it, in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_callable(
    named: str, reward: RewardFunction, columns: Iterable[str], extra: Iterable[str] = (), more: bool = False
) -> None:
    """Refuse a reward function that cannot be called as TRL calls it; TRL would find out after the first rollout.

    It is given the rows' `columns` and this run's `extra` arguments; with `more`, a `rollout_func` may add others.
    """
    given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", *extra}
    if twice := given & {*columns}:
        raise ValueError(f"{named} is given {twice.pop()!r} by the trainer: rename that column of the data set.")
    given |= {*columns} - {"prompt", "completion"}  # which TRL does not pass: `prompts` holds the former
    try:
        signature = inspect.signature(reward)
    except ValueError:  # a function in C may have none
        return
    try:
        (signature.bind_partial if more else signature.bind)(**dict.fromkeys(given))
    except TypeError as error:
        others = ("VAR_POSITIONAL", "VAR_KEYWORD")
        needed = [each for each in signature.parameters.values() if each.kind.name not in others]
        missing = [each.name for each in needed if each.default is each.empty and each.name not in given]
        remedy = "add **kwargs for what it does not read"
        if missing:
            remedy = f"the data set has no column {missing[0]!r}; rename yours, or give the argument a default"
        raise ValueError(
            f"{named} cannot be called ({error}): it is given {', '.join(sorted(given))}; {remedy}."
        ) from error
