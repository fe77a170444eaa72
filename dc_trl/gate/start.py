"""Checks of a trainer's arguments alone, before a model is loaded or a server is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from ..settings.paths import require_model_path
from ..settings.ranges import FINITE, require_number
from ..settings.reward_functions import LARGEST, RewardFunction, require_callable, reward_name
from .fit import require_end
from .policy import require_policy
from .rows import PASSED, Rows, data_sets, require_no_clash, require_prompts, some_rows


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


def require_startable(
    *,
    model: Any,
    reward_funcs: Any,
    args: Any,
    train_dataset: Any,
    eval_dataset: Any = None,
    processing_class: Any = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    rollout_func: Any = None,
    environment_factory: Any = None,
    reward_elsewhere: bool = False,
    field: str = "model",
) -> list[Rows]:
    """Refuse arguments of a trainer with which no step could be made, or no step would learn.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, peft_config, quantization_config,
            rollout_func, environment_factory: arguments of the trainer.
        reward_elsewhere: whether something else gives the rewards, such as an asynchronous rollout worker.
        field: name of the option that gives the model.

    Returns:
        Some rows of each data set, which represent all of its rows.

    Raises:
        TypeError, ValueError: an argument is refused; the message names it, its value and the remedy.
    """
    load: Mapping[str, Any] = args.model_init_kwargs or {}
    options = {name: load[name] for name in ("revision", "trust_remote_code") if name in load}
    require_policy(
        model,
        adapter=peft_config is not None,
        quantization_config=quantization_config or load.get("quantization_config"),
        field=field,
        **{"trust_remote_code": args.trust_remote_code, **options},
    )
    if isinstance(processing_class, PreTrainedTokenizerBase):
        require_end(processing_class)
    functions = _functions(reward_funcs)
    environments = environment_factory is not None
    if not functions and not environments and not reward_elsewhere:
        raise ValueError(
            "reward_funcs is not given: pass a function, a reward model, or an environment_factory whose environment "
            "has a get_reward."
        )
    if isinstance(args, GRPOConfig) and args.reward_weights is not None:
        _require_weights(args.reward_weights, len(functions))
    if train_dataset is None and not environments:
        raise ValueError(
            "train_dataset is not given: pass a data set with a column 'prompt', or an environment_factory whose "
            "environment gives the prompts."
        )
    every = [_rows(name, rows, args) for name, rows in data_sets(train_dataset, eval_dataset).items()]
    called = [function for function in functions if not isinstance(function, str | nn.Module)]
    extra = ["environments"] if environments else []
    for shown in every:
        if isinstance(environment_factory, dict):
            _require_environments(shown, environment_factory)
        if "prompt" in shown.columns or not environments:
            require_prompts(shown)
        if called:
            require_no_clash(shown, [*PASSED, *extra])
        for function in called:
            named = f"reward_funcs: {reward_name(function)!r}"
            require_callable(named, function, shown.columns, extra, more=rollout_func is not None)
    return every


def _functions(reward_funcs: Any) -> list[str | nn.Module | RewardFunction]:
    functions = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    for function in functions:
        if isinstance(function, str):
            require_model_path(function, "reward_funcs")
        elif not callable(function):
            raise TypeError(
                f"reward_funcs: {function!r} is a {type(function).__name__}: pass a function, a reward model or its "
                "name, or a list of them."
            )
    return functions


def _require_weights(weights: list[float], functions: int) -> None:
    if len(weights) != functions:
        raise ValueError(
            f"reward_weights={weights!r} has {len(weights)} numbers for {functions} reward functions: give one for "
            "each, in the same order."
        )
    for weight in weights:
        require_number("reward_weights", weight, FINITE)
        if abs(weight) > LARGEST:
            raise ValueError(f"reward_weights={weights!r}: use numbers of at most {LARGEST:g}.")


def _rows(name: str, dataset: Dataset | IterableDataset, args: Any) -> Rows:
    """Return rows of a data set, which must have as many as one generation batch takes."""
    if name != "train_dataset" or not isinstance(args, GRPOConfig):
        return some_rows(name, dataset, 1, "")
    if not hasattr(dataset, "__len__") and args.max_steps <= 0:
        raise ValueError(
            f"max_steps={args.max_steps}: train_dataset is a stream of unknown length: set max_steps to the "
            "number of steps."
        )
    size, generations = args.generation_batch_size, args.num_generations
    needed = size // generations
    return some_rows(
        name,
        dataset,
        needed,
        f"a generation batch takes {needed} (generation_batch_size={size} completions, num_generations={generations} "
        "of each), so no step would be made: give more rows, or lower per_device_train_batch_size, "
        "gradient_accumulation_steps or steps_per_generation, or raise num_generations",
    )


def _require_environments(rows: Rows, environment_factory: Mapping[str, Any]) -> None:
    """Refuse rows that do not name one of several environments."""
    known = ", ".join(map(repr, environment_factory))
    for number, row in rows.rows.items():
        if row.get("environment") not in environment_factory:
            raise ValueError(
                f"{rows.name}: row {number} has environment={row.get('environment')!r}: environment_factory has "
                f"{known}, and the column environment has to name one of them."
            )
