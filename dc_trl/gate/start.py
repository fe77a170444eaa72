"""Checks of a trainer's arguments alone, before a model is loaded or a server is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from ..settings.paths import require_model_path
from ..settings.reward_functions import require_callable, reward_name
from .fit import require_end
from .policy import require_policy
from .rows import Rows, data_sets, require_prompts, some_rows


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
        Some rows of each data set.

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
    environments = environment_factory is not None
    functions = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if not functions and not environments and not reward_elsewhere:
        raise ValueError(
            "reward_funcs is not given: pass a function, a reward model, or an environment_factory whose environment "
            "has a get_reward."
        )
    every = [_rows(name, rows, args) for name, rows in data_sets(train_dataset, eval_dataset).items()]
    for shown in every:
        if "prompt" in shown.columns or not environments:
            require_prompts(shown)
    for function in functions:
        if isinstance(function, str):
            require_model_path(function, "reward_funcs")
        elif not isinstance(function, nn.Module):
            named, extra = f"reward_funcs: {reward_name(function)!r}", ["environments"] if environments else []
            for shown in every:
                require_callable(named, function, shown.columns, extra, more=rollout_func is not None)
    return every


def _rows(name: str, dataset: Dataset | IterableDataset, args: Any) -> Rows:
    """Return rows of a data set, which must have as many as one generation batch takes."""
    if name != "train_dataset" or not isinstance(args, GRPOConfig):
        return some_rows(name, dataset, 1, "")
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
