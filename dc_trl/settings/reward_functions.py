"""Reward functions that a user writes, called as TRL calls them, and what they return."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Set, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any


# Settings are read where no tensor is needed.
if TYPE_CHECKING:
    from torch import Tensor

RewardFunction = Callable[..., list[float | None]]

# Largest reward: advantages are normalised in float32, and the square of a larger one has no place there.
LARGEST = 1e18


class CheckedReward:
    """A reward function whose rewards are looked at before they become advantages. Picklable if the function is.

    Args:
        reward: the function, which is not async.
        name: of it in messages and metrics.
    """

    def __init__(self, reward: Callable[..., Any], name: str):
        self._reward: Callable[..., Any] = reward
        self.__name__ = name  # which TRL reads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return require_rewards(self.__name__, self._reward(*args, **kwargs), len(kwargs["prompts"]))


class AsyncCheckedReward(CheckedReward):
    """The same for an async function, which TRL has to see that it is."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return require_rewards(self.__name__, await self._reward(*args, **kwargs), len(kwargs["prompts"]))


def checked_reward(reward: Callable[..., Any], name: str | None = None) -> CheckedReward:
    """A reward function that refuses what is no list of rewards, see `require_rewards`.

    Args:
        reward: the function, which may be async.
        name: of it in messages and metrics; by default as `reward_name` has it.
    """
    if isinstance(reward, CheckedReward):
        return reward
    return (AsyncCheckedReward if is_async(reward) else CheckedReward)(reward, name or reward_name(reward))


def reward_name(reward: Callable[..., Any]) -> str:
    """The name that TRL gives a reward function: the function's, also within `partial`, or the class's."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return getattr(reward, "__name__", type(reward).__name__)


def is_async(reward: Callable[..., Any]) -> bool:
    """Whether a reward function returns a coroutine, as TRL sees it."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def require_rewards(name: str, rewards: Any, completions: int) -> list[float | None]:
    """Rewards that a function has returned, as numbers; refuses all else.

    Args:
        name: of the function, for the message.
        rewards: what it returned: a list, tuple, array or tensor of numbers, `None` and NaN, which both mean that
            there is no reward for a completion.
        completions: that it was called with.

    Raises:
        TypeError: it is no such collection, or holds what is no number.
        ValueError: there are more or fewer rewards than completions, or one is larger than `LARGEST`.
    """
    remedy = "return one for each, a number or None"
    if isinstance(rewards, str | bytes | Mapping | Set) or not (isinstance(rewards, Sized) and _has_length(rewards)):
        raise TypeError(f"reward function {name!r} returned {excerpt(rewards)}, a {type(rewards).__name__}: {remedy}.")
    if len(rewards) != completions:
        raise ValueError(
            f"reward function {name!r} returned {len(rewards)} rewards for {completions} completions: {remedy}."
        )
    return [_number(name, row, value, remedy) for row, value in enumerate(rewards)]  # type: ignore[arg-type, var-annotated]


def require_finite(named: str, rewards: Tensor) -> None:
    """Refuses rewards of models, or weighted sums, that are not finite or larger than `LARGEST`.

    Args:
        named: what gave them, for the message.
        rewards: of completions, shape (B,).

    Raises:
        ValueError: names the first of them.
    """
    wrong = ~(rewards.abs() <= LARGEST)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{named} is {rewards[row].item():g} for completion {row}: advantages would be 0, infinite or NaN. Give "
            f"finite rewards of at most {LARGEST:g}."
        )


def _has_length(rewards: Any) -> bool:
    """Whether it can be counted and gone through; arrays and tensors without a dimension cannot."""
    return hasattr(rewards, "__iter__") and getattr(rewards, "ndim", 1) > 0


def _number(name: str, row: int, value: Any, remedy: str) -> float | None:
    if value is None:
        return None
    what = f"reward function {name!r} returned {excerpt(value)} for completion {row}"
    if isinstance(value, str | bytes):
        raise TypeError(f"{what}, which is text: {remedy}.")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
        raise TypeError(f"{what}, which is no number: {remedy}.") from error
    except OverflowError:
        number = math.inf
    if abs(number) > LARGEST:
        raise ValueError(
            f"{what}: advantages would be 0 or infinite. Return finite numbers of at most {LARGEST:g}, None where "
            "there is no reward."
        )
    return None if math.isnan(number) else number


def excerpt(value: Any) -> str:
    """A value as a message shows it, in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _signature(reward: RewardFunction) -> inspect.Signature | None:
    """None for what is written in C and does not tell."""
    try:
        return inspect.signature(reward)
    except ValueError:
        return None


def call_reward(reward: RewardFunction, **arguments: Any) -> list[float | None]:
    """Rewards from a reward function, which may be async, for arguments as TRL passes them, `prompts` among them.

    Returns:
        One for each prompt; None where there is none, which the function may also call NaN.

    Raises:
        TypeError, ValueError: see `require_rewards`.
    """
    rewards: Any = checked_reward(reward)(**arguments)
    if inspect.iscoroutine(rewards):
        # In a thread of its own: in a notebook, this one runs an event loop already.
        with ThreadPoolExecutor(1, "dc_trl-reward") as pool:
            rewards = pool.submit(asyncio.run, rewards).result()
    return rewards


def require_callable(
    named: str, reward: RewardFunction, columns: Iterable[str], extra: Iterable[str] = (), more: bool = False
) -> None:
    """Refuses a reward function that cannot be called as TRL calls it, with the columns of the data set.

    TRL would find out after the first rollout.

    Args:
        named: the function as the user has named it, for the message.
        columns: of the rows.
        extra: what else this run passes.
        more: whether a `rollout_func` may pass what cannot be known.

    Raises:
        ValueError: it asks for what it is not given, or does not take what it is.
    """
    given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    given |= {*extra, *columns} - {"prompt", "completion"}  # which TRL does not pass: `prompts` holds the former
    signature = _signature(reward)
    if signature is None:
        return
    try:
        (signature.bind_partial if more else signature.bind)(**dict.fromkeys(given))
    except TypeError as error:
        raise ValueError(
            f"{named} cannot be called ({error}): it is given {', '.join(sorted(given))}; **kwargs takes what"
            " it does not read."
        ) from error
