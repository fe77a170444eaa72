"""Checks that need no model: in a trainer's constructor, and in `dc-trl train` before it starts a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig

from ..config import DCGRPOConfig
from ..data.prompts import ends_with_answer, require_messages
from ..grading.checked_reward import excerpt, require_callable, reward_name
from ..grading.rewards import REWARDS
from ..processes import raised_together
from ..quantization.adapter import require_adapter_beside
from ..quantization.policy import base_model
from ..settings.distribution import require_whole_models, sharding_of
from ..settings.paths import require_model_path
from ..settings.pretrained import load_config


_OF_A_CONFIG = {"revision", "trust_remote_code"}  # arguments that choose a model's configuration
_LOOKED_AT = 256  # rows of a data set, from the first on; the others are looked at when they come


def require_runnable(
    *, model: Any, args: DCGRPOConfig, field: str = "model", has_servers: bool = True, tools: Any = None, **others: Any
) -> list[Any]:
    """Refuse arguments of a `DCGRPOTrainer` with which it could not sample, train or compare; see `require_startable`.

    Args:
        model, args, tools: arguments of the trainer.
        field: name of the option that gives the model.
        has_servers: whether the vLLM servers of the run are up; a run that starts its own has none yet.
        **others: further arguments of `require_startable`.

    Returns:
        The first prompts of the data sets; none where an environment gives them.

    Raises:
        TypeError, ValueError: an argument is refused; the message names it, its value and the remedy.
        ServerError: a server is refused; the message names it, the reason and the option to change.
    """
    turns = {name: others.get(name) for name in ("environment_factory", "rollout_func")} | {"tools": tools}
    for name in turns:
        if args.rollout_overlap and turns[name]:
            raise ValueError(
                f"rollout_overlap=True samples a generation batch by one request ahead of training, and {name} "
                f"asks the engine turn by turn: leave {name} out, or set rollout_overlap=False."
            )
    new_adapter = others.get("peft_config") is not None
    _require_comparable(args, turns["rollout_func"] is not None, new_adapter or isinstance(model, PeftModel))
    prompts = require_startable(model=model, args=args, field=field, **others)
    if args.lora_deployment == "adapter" and not new_adapter:
        require_adapter_beside(model)
    if has_servers and args.use_vllm and args.vllm_mode == "server":
        _require_servers(args, _config_of(model, args, field))
    return prompts


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
) -> list[Any]:
    """Refuse arguments of a trainer with which no step could be made, or no step would learn.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, peft_config, quantization_config,
            rollout_func, environment_factory: arguments of the trainer.
        reward_elsewhere: whether something else gives the rewards, such as an asynchronous rollout worker.
        field: name of the option that gives the model.

    Returns:
        The first prompts of the data sets; none where an environment gives them.

    Raises:
        TypeError, ValueError: an argument is refused; the message names it, its value and the remedy.
    """
    adapted = peft_config is not None or isinstance(model, PeftModel)
    quantization = quantization_config or (args.model_init_kwargs or {}).get("quantization_config")
    _require_unquantized(model, _config_of(model, args, field), adapted, quantization, field)
    if isinstance(processing_class, PreTrainedTokenizerBase):
        require_end(processing_class)
    functions = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if isinstance(args, DCGRPOConfig):
        models = any(isinstance(function, str | nn.Module) for function in functions)
        require_whole_models(args, models, reference=args.beta != 0 and not adapted)
    if not functions and environment_factory is None and not reward_elsewhere:
        raise ValueError(
            "reward_funcs is not given: pass a function, a reward model, or an environment_factory whose environment "
            "has a get_reward."
        )
    for function in functions:
        if not (callable(function) or isinstance(function, str)):
            raise TypeError(
                f"reward_funcs has {excerpt(function)} of type {type(function).__name__}: pass a function, a reward "
                "model or its name, or a list of these."
            )
        if isinstance(function, str):
            if function in REWARDS and not Path(function).exists():  # TRL would look for a model on the Hub
                named = f"dc_trl.grading.rewards.{REWARDS[function].__name__}"
                raise ValueError(f"reward_funcs={function!r} is a name of the command line: pass {named}.")
            require_model_path(function, "reward_funcs")
    # An asynchronous worker keeps all columns.
    loses_columns = isinstance(args, GRPOConfig) and args.remove_unused_columns
    setting = "remove_unused_columns=True, reward_funcs" if loses_columns else "reward_funcs"
    prompts = []
    for name, rows in _data_sets(train_dataset, eval_dataset).items():
        of_rows, columns = _look_at(name, rows, args, environment_factory is not None)
        prompts += of_rows
        for function in functions:
            if not isinstance(function, str | nn.Module):
                require_callable(
                    f"{setting}: {reward_name(function)!r}",
                    function,
                    ["prompt"] if loses_columns else columns,
                    ["environments"] * bool(environment_factory),
                    more=rollout_func is not None,
                )
    return prompts


def _config_of(model: Any, args: Any, field: str) -> PretrainedConfig:
    """Return the configuration of a model, or of the Hub id or directory that the option `field` gives."""
    if isinstance(model, PreTrainedModel | PeftModel):
        return model.config
    if not isinstance(model, str):
        raise TypeError(f"{field}={excerpt(model)} has the type {type(model).__name__}: give text, or a loaded model.")
    options = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
    return load_config(model, field, **{name: options[name] for name in _OF_A_CONFIG & options.keys()})


def _require_unquantized(model: Any, config: PretrainedConfig, adapted: bool, quantization: Any, field: str) -> None:
    """Refuse a policy that is quantized, and not by bitsandbytes for an adapter beside it."""
    quantization = quantization or config.to_dict().get("quantization_config") or {}
    if not isinstance(quantization, dict):
        quantization = vars(quantization)  # its to_dict omits dequantize
    method = quantization.get("quant_method")  # a string or an enumeration member
    if not quantization or quantization.get("dequantize") or (method == "bitsandbytes" and adapted):
        return
    named = f"{field}={model!r}" if isinstance(model, str) else f"{field}, a {type(base_model(model)).__name__},"
    raise ValueError(
        f"{named} is quantized ({getattr(method, 'value', method)}), like a run's deployment/, and its weights cannot "
        "be trained: give the model from which it was made (deployment_scheme quantizes the sampler), or train an "
        "adapter beside weights of bitsandbytes (peft_config, use_peft=true)."
    )


def _data_sets(train: Any, evaluation: Any) -> dict[str, Any]:
    """Return the data sets that are given, by the names under which they are given."""
    found = {"train_dataset": train}
    if isinstance(evaluation, dict):
        found |= {f"eval_dataset[{name!r}]": rows for name, rows in evaluation.items()}
    else:
        found["eval_dataset"] = evaluation
    return {name: rows for name, rows in found.items() if rows is not None}


def _look_at(name: str, data_set: Any, args: Any, environments: bool) -> tuple[list[Any], list[str]]:
    """Return the first prompts of a data set and its columns; refuse too few rows, and rows without a prompt."""
    if not isinstance(data_set, Dataset | IterableDataset):
        raise TypeError(
            f"{name} is a {type(data_set).__name__}: pass a data set, for example one split, or "
            "datasets.Dataset.from_list(rows)."
        )
    needed, why = 1, "there is nothing to train on or to evaluate"
    if name == "train_dataset" and isinstance(args, GRPOConfig):
        completions, generations = args.generation_batch_size, args.num_generations
        needed = completions // generations
        why = (
            f"a generation batch takes {needed} (generation_batch_size={completions} completions, "
            f"num_generations={generations} of each), so no step would be made: give more rows, or lower "
            "per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation, or raise "
            "num_generations"
        )
    if isinstance(data_set, IterableDataset):  # which yields them again later
        rows = list(data_set.take(needed))
        table = {column: [row.get(column) for row in rows] for column in (rows[0] if rows else ())}
    else:
        table = data_set[: max(needed, _LOOKED_AT)]  # row by row it would take a minute with thousands of columns
    columns, size = list(table), len(next(iter(table.values()), ()))
    if size < needed:
        raise ValueError(f"{name} has {size} rows, and {why}.")
    if "prompt" not in columns:
        if environments:
            return [], columns
        raise ValueError(
            f"{name} has the columns {', '.join(map(repr, columns))} and none called 'prompt': "
            f"{_to_prompt(name, table)}."
        )
    prompts = [*table["prompt"]]
    _require_prompts(name, prompts)
    images = {"image", "images"} & {*columns}
    for column in images:
        if all(image is None for image in table[column]):
            raise ValueError(
                f"{name}: the column {column!r} has no image in its first {size} rows: leave it out, by "
                f"{name}.remove_columns({column!r})."
            )
    if images and isinstance(args, DCGRPOConfig) and args.vllm_server_base_urls:
        raise ValueError(
            f"{name} has {images.pop()!r}, and one server alone samples prompts with images: set vllm_server_base_url "
            f"in place of vllm_server_base_urls={args.vllm_server_base_urls}."
        )
    return prompts, columns


def _require_prompts(name: str, prompts: list[Any]) -> None:
    """Refuse prompts of a data set that are no texts or no conversations, and those that end with the answer."""
    text = isinstance(prompts[0], str)
    for number, prompt in enumerate(prompts):
        if not prompt or not isinstance(prompt, str if text else list):
            raise ValueError(
                f"{name}: row {number} has prompt={excerpt(prompt)}: the prompts are all text, or all of them "
                "lists of messages, each with a role and a content. Leave out such rows, for example with filter."
            )
        if isinstance(prompt, list):
            require_messages(prompt, images=True)
            if ends_with_answer(prompt):
                answer = excerpt(prompt[-1]["content"])
                raise ValueError(
                    f"{name}: the prompt of row {number} ends with the assistant's {answer}, which the policy would "
                    "read before it answers: leave that message out, and give what rewards compare with in another "
                    "column."
                )


def _to_prompt(name: str, table: dict[str, list[Any]]) -> str:
    """Return how a data set with such columns gets the column `prompt`, without the answers."""
    for column, (value, *_) in table.items():
        if ends_with_answer(value):
            return f"{column!r} ends with the answer: {name}.map(lambda row: {{'prompt': row[{column!r}][:-1]}})"
    return f"rename the one of what is asked, without the answer, by {name}.rename_column(..., 'prompt')"


def _require_comparable(args: DCGRPOConfig, own_rollouts: bool, adapted: bool) -> None:
    """Refuse settings for which the engines cannot be compared, or the policy not be copied.

    Args:
        args: settings of the run.
        own_rollouts: whether a `rollout_func` samples.
        adapted: whether an adapter is trained.
    """
    scheme, sharding = args.deployment_scheme, sharding_of(args)
    has_replica = scheme is not None and not args.use_vllm
    replica = f"deployment_scheme={scheme!r} without use_vllm"
    if own_rollouts and (args.routing_replay or has_replica):
        setting = "routing_replay=True" if args.routing_replay else replica
        raise ValueError(f"{setting} needs an engine of its own, and contradicts rollout_func: omit one of them.")
    if own_rollouts and args.split_by is not None and not args.use_vllm:
        raise ValueError(
            f"{args.split_by} needs to know which weights sampled, and rollout_func samples by itself: set "
            "use_vllm=True and let it ask that engine, or leave it out."
        )
    colocated = f"vllm_mode='colocate' with deployment_scheme={scheme!r}"
    by_file = scheme is not None or args.weight_sync == "checkpoint" or args.weight_sync_steps > 1
    whole = sharding.kind is None or sharding.is_fsdp2
    undivided = not sharding.divides_parameters
    for setting, applies, works in (
        (replica, has_replica, whole or undivided),
        (replica, has_replica and adapted, not sharding.is_fsdp2),
        (f"train_through_quantization={args.train_through_quantization!r}", args.train_through_quantization, whole),
        (f"{args.split_by}", args.split_by is not None, whole or (sharding.kind == "DEEPSPEED" and undivided)),
        ("top_p, top_k or min_p", args.truncations, sharding.kind != "DEEPSPEED" or undivided),
        ("score_centering=True", args.score_centering, sharding.kind is None),
        ("lora_deployment='adapter'", args.lora_deployment == "adapter", undivided),
        # The engine is built on a checkpoint, which has to be written before FSDP1 has wrapped the policy.
        (colocated, args.use_vllm and args.vllm_mode == "colocate" and by_file, whole or sharding.kind == "DEEPSPEED"),
    ):
        if applies and not works:
            raise ValueError(
                f"{setting} reads whole parameters, which {sharding} divides: "
                f"{'set use_vllm=True' if setting == replica else 'leave it out'}, or launch without sharding (DDP) "
                "or, unless for score_centering or an adapter, with FSDP2 (fsdp_version: 2)."
            )
    if args.compared_by is not None and not args.use_vllm and scheme is None and not own_rollouts:
        raise ValueError(
            f"{args.comparison} needs the rollouts' log-probabilities, and model.generate returns none: set "
            "deployment_scheme (for example 'fp8') to sample from an in-process replica, use_vllm=True, or "
            f"{args.without_comparison}."
        )


def _require_servers(args: DCGRPOConfig, config: PretrainedConfig) -> None:
    """Refuse servers that are not up within `vllm_server_timeout`, or do not fit the model of this configuration.

    Every process has to call it. `ServerGeneration` makes the checks that need the loaded model, and those of the
    weight stream's connections.
    """
    from ..sampling.vllm_backends import connect, needs_checkpoint
    from ..serving.errors import ServerError

    weight_sync: str = args.weight_sync
    if weight_sync == "auto":
        # What else decides, the policy and whether the GPU is shared, is not known yet.
        weight_sync = "checkpoint" if needs_checkpoint(args, args.device) else "none"
    least_rank = int(args.lora_deployment == "adapter")  # the adapter's own is not known yet
    with raised_together(ServerError):
        if PartialState().is_main_process:
            connect(args, config, weight_sync, least_rank, longest_request=60.0)


def require_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without an end token, which TRL also pads with if there is no padding token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "processing_class: the tokenizer has no eos_token, so that no completion would end: set "
            "tokenizer.eos_token, or save it in tokenizer_config.json."
        )
