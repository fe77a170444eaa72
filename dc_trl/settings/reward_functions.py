"""Reward functions that a user writes, called as TRL calls them."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


RewardFunction = Callable[..., list[float | None]]


def call_reward(reward: RewardFunction, **arguments: Any) -> list[float | None]:
    """Rewards from a reward function, which may be async, for arguments as TRL passes them, `prompts` among them.

    Returns:
        One for each prompt; None where there is none, which the function may also call NaN.

    Raises:
        ValueError: there are more or fewer rewards than prompts.
    """
    rewards = reward(**arguments)
    if inspect.iscoroutine(rewards):
        # In a thread of its own: in a notebook, this one runs an event loop already.
        with ThreadPoolExecutor(1, "dc_trl-reward") as pool:
            rewards = pool.submit(asyncio.run, rewards).result()
    if len(rewards) != len(arguments["prompts"]):
        raise ValueError(
            f"reward={reward!r} returned {len(rewards)} rewards for {len(arguments['prompts'])} completions: return "
            "one for each, None where there is none."
        )
    return [None if value is None or math.isnan(value) else float(value) for value in rewards]


def require_callable(name: str, reward: RewardFunction, columns: Iterable[str]) -> None:
    """Refuses a reward function that cannot be called as TRL calls it, with the columns of the data set.

    TRL would find out after the first rollout.

    Raises:
        ValueError: it asks for what it is not given, or does not take what it is.
    """
    given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", *columns}
    given -= {"prompt"}  # `prompts` holds them
    try:
        inspect.signature(reward).bind(**dict.fromkeys(given))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"rewards={name!r} cannot be called ({error}): it is given {', '.join(sorted(given))}; **kwargs takes what"
            " it does not read."
        ) from error
