"""Reward functions that a user writes: calling them as TRL does, and checking what they return."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any


# Settings are also read without torch.
if TYPE_CHECKING:
    pass

RewardFunction = Callable[..., list[float | None]]

# Largest reward: advantages are normalised in float32, in which the square of a larger one would overflow.
LARGEST = 1e18


class CheckedReward:
    """A reward function whose rewards are checked before they become advantages. Picklable if the function is.

    Args:
        reward: the function, which is not async.
        name: in messages and metrics.
    """

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


def reward_name(reward: Callable[..., Any]) -> str:
    """Return the name that TRL gives a reward function: the function's, also within `partial`, or the class's."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return getattr(reward, "__name__", type(reward).__name__)


def is_async(reward: Callable[..., Any]) -> bool:
    """Return whether a reward function returns a coroutine, as TRL sees it."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def require_rewards(name: str, rewards: Any, completions: int) -> list[float | None]:
    """Return what a reward function returned for so many completions as numbers.

    It is a list, tuple, array or tensor of numbers. `None` and NaN mean that there is no reward for a completion.

    Raises:
        TypeError: it is not such a collection, or holds something else than numbers.
        ValueError: there are more or fewer rewards than completions, or one is larger than `LARGEST`.
    """
    remedy = "return one for each completion, a number or None"
    if isinstance(rewards, str | bytes | Mapping | Set):
        raise TypeError(f"reward function {name!r} returned {excerpt(rewards)}, a {type(rewards).__name__}: {remedy}.")
    try:
        values = [math.nan if value is None else float(value) for value in rewards]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: a tensor of several numbers
        raise TypeError(f"reward function {name!r} returned {excerpt(rewards)} ({error}): {remedy}.") from error
    if len(values) != completions:
        raise ValueError(
            f"reward function {name!r} returned {len(values)} rewards for {completions} completions: {remedy}."
        )
    for row, value in enumerate(values):
        if abs(value) > LARGEST:
            raise ValueError(
                f"reward function {name!r} returned {value:g} for completion {row}: advantages would be 0 or "
                f"infinite. Return finite numbers of at most {LARGEST:g}, None where there is no reward."
            )
    return [None if math.isnan(value) else value for value in values]


def excerpt(value: Any) -> str:
    """Return a value as a message shows it, in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def call_reward(reward: RewardFunction, **arguments: Any) -> list[float | None]:
    """Call a reward function, which may be async, with arguments as TRL passes them, `prompts` among them.

    Returns:
        One reward for each prompt; None where the function returned None or NaN.

    Raises:
        TypeError, ValueError: see `require_rewards`.
    """
    rewards: Any = checked_reward(reward)(**arguments)
    if inspect.iscoroutine(rewards):
        # In a thread of its own: in a notebook, this thread runs an event loop already.
        with ThreadPoolExecutor(1, "dc_trl-reward") as pool:
            rewards = pool.submit(asyncio.run, rewards).result()
    return rewards


def require_callable(
    named: str, reward: RewardFunction, columns: Iterable[str], extra: Iterable[str] = (), more: bool = False
) -> None:
    """Refuse a reward function that cannot be called as TRL calls it; TRL would find out after the first rollout.

    Args:
        named: the function as the user has named it, for the message.
        columns: of the rows.
        extra: names of further arguments that this run passes.
        more: whether a `rollout_func` may pass arguments that cannot be known.
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
