"""Checks before the first step, so that no run trains nothing or fails in the middle of its work.

`require_runnable` makes all checks that need no model: in the trainer's constructor, and in `dc-trl train` before it
starts a server. `grading.checked_reward` checks what rewards return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from peft import PeftModel
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from .config import DCGRPOConfig
from .data.prompts import ends_with_answer, require_messages, unread_text
from .grading.checked_reward import checked_reward, excerpt, require_callable, reward_name
from .quantization.adapter import require_adapter_beside
from .quantization.head import FusedHead, given, logits_of
from .quantization.policy import base_model, require_finite
from .settings.distribution import require_whole_models, sharding_of
from .settings.paths import require_model_path
from .settings.pretrained import load_config


logger = get_logger(__name__)

_OF_A_CONFIG = {"revision", "trust_remote_code"}  # arguments that choose a model's configuration
_LOOKED_AT = 256  # rows of a data set, from the first on; the others are looked at when they come
_LARGEST_LOGIT = 50.0  # of the hidden states for which heads are compared: a cap of logits has to act
_SAME_LOG_PROBS = 0.5  # nats between them, which bfloat16 does not reach
_SAMPLED = 4096  # weights of a tensor that show whether a step of the learning rate changes it


# --- before a model is loaded ---------------------------------------------------------------------------------------


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
        _require_end(processing_class)
    functions = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if isinstance(args, DCGRPOConfig):
        models = any(isinstance(function, str | nn.Module) for function in functions)
        require_whole_models(args, models, reference=args.beta != 0 and not adapted)
    if not functions and environment_factory is None and not reward_elsewhere:
        raise ValueError(
            "reward_funcs is not given: pass a function, a reward model, or an environment_factory whose environment "
            "has a get_reward."
        )
    data_sets = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        data_sets |= {f"eval_dataset[{name!r}]": rows for name, rows in eval_dataset.items()}
    else:
        data_sets["eval_dataset"] = eval_dataset
    for function in functions:
        if not (callable(function) or isinstance(function, str)):
            raise TypeError(
                f"reward_funcs has {excerpt(function)} of type {type(function).__name__}: pass a function, a reward "
                "model or its name, or a list of these."
            )
    prompts = []
    for name, rows in data_sets.items():
        if rows is None:
            continue
        of_rows, columns = _look_at(name, rows, args, environment_factory is not None)
        prompts += of_rows
        for function in functions:
            if isinstance(function, str):
                require_model_path(function, "reward_funcs")
            elif not isinstance(function, nn.Module):
                named, extra = f"reward_funcs: {reward_name(function)!r}", ["environments"] * bool(environment_factory)
                if isinstance(args, GRPOConfig) and args.remove_unused_columns:  # an asynchronous worker keeps them
                    named, columns = f"remove_unused_columns=True, {named}", ["prompt"]
                require_callable(named, function, columns, extra, more=rollout_func is not None)
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
    from .sampling.vllm_backends import connect, needs_checkpoint, raised_together
    from .serving.errors import ServerError

    weight_sync: str = args.weight_sync
    if weight_sync == "auto":
        # What else decides, the policy and whether the GPU is shared, is not known yet.
        weight_sync = "checkpoint" if needs_checkpoint(args, args.device) else "none"
    least_rank = int(args.lora_deployment == "adapter")  # the adapter's own is not known yet
    with raised_together(ServerError):
        if PartialState().is_main_process:
            connect(args, config, weight_sync, least_rank, longest_request=60.0)


# --- the loaded policy ----------------------------------------------------------------------------------------------


def require_trainable(policy: nn.Module) -> None:
    """Refuse an unwrapped policy without a trainable parameter, or with one that is not finite."""
    require_finite(policy)
    if not any(weight.requires_grad for weight in policy.parameters()):
        raise ValueError(
            "model has no trainable parameter (requires_grad is False for all of them): call "
            "model.requires_grad_(True), pass a peft_config to train an adapter, or load one with "
            "PeftModel.from_pretrained(…, is_trainable=True)."
        )


@torch.no_grad()
def require_same_logits(policy: nn.Module, temperature: float) -> None:
    """Refuse an unwrapped policy of which the fused head of TRL's trainers computes other log-probabilities than it.

    TRL knows the factor and the cap of logits that many configurations have. It does not know factors of hidden
    states, and layers between backbone and head. They are compared for three random hidden states, so that this
    takes no forward of the backbone.

    Args:
        policy: the policy, to which TRL has added its fused head.
        temperature: divisor of the logits.

    Raises:
        ValueError: the two differ.
    """
    model = base_model(policy)
    head = model.get_output_embeddings()
    if not head.weight.numel() or head.weight.is_meta:
        return  # another process has the weights
    same = model.base_model is not model  # TRL's head reads the output of a backbone
    if same:
        labels = torch.arange(4, device=head.weight.device).unsqueeze(0)
        hidden = torch.randn(1, 4, head.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(head.weight)
        hidden *= _LARGEST_LOGIT / head(hidden).abs().max().clamp(min=1e-6)
        own = logits_of(model, hidden[0], FusedHead(head, hidden))[:-1] / temperature
        with given(model, hidden):
            fused = model.forward(input_ids=labels, labels=labels, fused_lm_head=True).log_probs
        logps = own.log_softmax(-1).gather(1, labels[:, 1:].T).to(fused)
        same = torch.allclose(logps, fused.T, atol=_SAME_LOG_PROBS)
    if not same:
        raise ValueError(
            f"model: a {type(model).__name__} computes its logits otherwise than TRL's trainer, whose loss would have "
            "another policy than the one that samples and is deployed: train a model of another architecture, or with "
            "a release of TRL that knows this one."
        )


def warn_of_rounding(policy: nn.Module, optimizer: str, learning_rate: float) -> None:
    """Warn of 16-bit weights of an undivided policy that a step of the highest learning rate does not change.

    Adam moves a weight by about the learning rate, whatever its gradient. If that is less than half the distance to
    the next representable number, the sum rounds back to the weight.
    """
    if learning_rate == 0 or "adam" not in optimizer.lower():
        return
    weights = still = 0.0
    for weight in (weight for weight in policy.parameters() if weight.requires_grad):
        weights += weight.numel()
        if weight.dtype in (torch.bfloat16, torch.float16) and weight.numel() > 0:
            sample = weight.detach().flatten()[:: -(-weight.numel() // _SAMPLED)]
            up, down = ((sample.float() + step).to(sample.dtype) for step in (learning_rate, -learning_rate))
            still += weight.numel() * ((up == sample) & (down == sample)).float().mean().item()
    if still > weights / 2:
        logger.warning(
            f"learning_rate={learning_rate:g} is below the resolution of 16-bit weights: a step of Adam leaves about "
            f"{still / weights:.1%} of the trainable weights unchanged. Load them in float32 (dtype: float32; in "
            "Python model_init_kwargs={'dtype': 'float32'}) and compute in bfloat16 by bf16=True."
        )


Tokenized: TypeAlias = tuple[Sequence[Sequence[int]], list]  # token ids of prompts, and the prompts


class Limits(NamedTuple):
    """The limits of what a model can read.

    Attributes:
        tokens: rows of the input embedding; token ids must be below.
        context: positions for prompt and completion together; None if no limit is known.
        extrapolates: whether positions beyond `context` can be computed (rotary, ALiBi), or the engine ends there.
        completion: largest number of tokens of a completion.
        server: tokens of prompt and completion together for which a server that samples takes a request; None: any.
    """

    tokens: int
    context: int | None
    extrapolates: bool
    completion: int
    server: int | None = None

    def require(self, prompt_ids: Sequence[Sequence[int]], prompts: list) -> None:
        """Raise a ValueError for the first of the prompts that is empty or that the model cannot read completely."""
        for ids, prompt in zip(prompt_ids, prompts, strict=True):
            if not ids:
                raise ValueError(
                    f"the prompt {excerpt(prompt)} has no tokens: leave out such rows, for example with filter."
                )
            if max(ids) >= self.tokens:
                raise ValueError(
                    f"the prompt {excerpt(prompt)} has the token id {max(ids)}, and the model's input embedding has "
                    f"{self.tokens} rows: "
                    "give the tokenizer of this model, or make room by model.resize_token_embeddings(len(tokenizer)) "
                    "and train with tokens that it knows."
                )
            bounds = (
                (self.context, 1 if self.extrapolates else self.completion, "the model reads"),
                (self.server, self.completion, "the vLLM server (--max-model-len) takes"),
            )
            for bound, room, reads in bounds:
                if bound is not None and len(ids) + room > bound:
                    raise ValueError(
                        f"the prompt {excerpt(prompt)} has {len(ids)} tokens, with max_completion_length="
                        f"{self.completion}, and {reads} {bound} in all: lower max_completion_length, or leave longer "
                        "prompts out (max_prompt_length in a configuration, dataset.filter in Python)."
                    )

    def warn(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Warn if the longest prompt and completion exceed the positions on which the model was trained."""
        length = max(map(len, prompt_ids), default=0)
        if self.context is not None and length + self.completion > self.context:
            logger.warning(
                f"A prompt has {length} tokens, with max_completion_length={self.completion} more than the "
                f"{self.context} that the model reads: vLLM cuts a longer completion there, and other engines use "
                f"positions that the model was not trained on. Lower max_completion_length to {self.context - length}."
            )


def limits_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, completion: int, engine_context: int | None = None
) -> Limits:
    """Return the limits of a model with this tokenizer; refuse a tokenizer that does not fit the model.

    Args:
        model: the model without an adapter around it.
        tokenizer: the model's tokenizer as it will be used, with a padding token.
        completion: largest number of tokens of a completion.
        engine_context: `vllm_max_model_length`; None if vLLM does not sample.

    Raises:
        ValueError: a token that every batch needs is missing or has no row in the embedding.
    """
    config = model.config.get_text_config()
    weight = model.get_input_embeddings().get_parameter("weight")
    tokens = (weight.shape[0] if weight.dim() == 2 else 0) or config.vocab_size  # another process may hold the rows
    _require_end(tokenizer)
    for kind in ("eos", "pad", "bos"):
        number = getattr(tokenizer, f"{kind}_token_id")
        if number is not None and number >= tokens:
            raise ValueError(
                f"the tokenizer's {kind}_token {getattr(tokenizer, f'{kind}_token')!r} has the id {number}, and the "
                f"model's input embedding has {tokens} rows: give the tokenizer of this model, or another "
                f"{kind}_token, or make room by model.resize_token_embeddings(len(tokenizer))."
            )
    # A model without a limit, or with another name for it, does not have this attribute.
    contexts = [engine_context, getattr(config, "max_position_embeddings", None)]
    known = [context for context in contexts if isinstance(context, int) and context > 0]
    rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    extrapolates = rotary or bool(config.to_dict().get("alibi")) or min(known, default=None) == engine_context
    return Limits(tokens, min(known, default=None), extrapolates, completion)


def _require_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without an end token, which TRL also pads with if there is no padding token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "processing_class: the tokenizer has no eos_token, so that no completion would end: set "
            "tokenizer.eos_token, or save it in tokenizer_config.json."
        )


def require_read(trainer: GRPOTrainer, prompts: list[Any], plain: bool = True) -> None:
    """Refuse a conversation of which the chat template leaves out or changes a text, and would train on the rest.

    Args:
        trainer: trainer of a model of texts.
        prompts: texts, which need no template, or conversations.
        plain: whether conversations of a role and a text alone are looked at too.
    """
    render = partial(
        trainer.processing_class.apply_chat_template,
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=False,
        **trainer.chat_template_kwargs,
    )
    for prompt, _ in groupby(prompts):
        if isinstance(prompt, str) or not (plain or any(map(_is_rich, prompt))):
            continue
        require_messages(prompt)
        try:
            lost = unread_text(prompt, render)
        except (TemplateError, TypeError, LookupError, AttributeError) as error:  # of a tool call too
            lost = error
        if lost is not None:
            raise ValueError(
                f"the chat template does not read {excerpt(lost)} in the prompt that ends with "
                f"{excerpt(prompt[-1]['content'])}: give each content as one text, and only roles and tool calls that "
                "it knows, or set another tokenizer.chat_template."
            )


def _is_rich(message: dict[str, Any]) -> bool:
    return message.keys() != {"role", "content"} or not isinstance(message["content"], str)


def _alike(trainer: GRPOTrainer, prompts: list[Any]) -> Iterator[list[Any]]:
    """Yield the texts of one data set, the conversations of another; nothing where others make tokens or prompts."""
    if trainer.rollout_func is None and trainer.environment_factories is None:
        for _, group in groupby(prompts, type):
            yield [*group]


def within_server(args: DCGRPOConfig, limits: Limits, context: int, first: Sequence[Tokenized]) -> Limits:
    """Return the limits with those of the server that samples; refuse a prompt for which it has no room.

    Args:
        args: settings of the run.
        limits, first: results of `require_fit`.
        context: largest number of tokens of prompt and completion together that the server takes.
    """
    asked = (args.generation_kwargs or {}).get("max_tokens", limits.completion)
    limits = limits._replace(server=context, completion=asked)
    for each in first:
        limits.require(*each)
    return limits


def require_fit(trainer: GRPOTrainer, prompts: list[Any]) -> tuple[Limits | None, list[Tokenized]]:
    """Refuse a loaded policy that would not learn, or does not fit tokenizer and prompts; check what rewards return.

    Args:
        trainer: trainer with its policy, whose reward functions are wrapped.
        prompts: first prompts of the data sets.

    Returns:
        What the policy can read; None with images, which become tokens that are not in the text. And the prompts'
        tokens, each data set's with its prompts.

    Raises:
        ValueError: see `require_trainable`, `require_same_logits`, `limits_of` and `require_adapter_beside`.
    """
    args = trainer.args
    require_trainable(trainer.model)
    if trainer.optimizer is not None:
        moved = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
        if moved.isdisjoint(map(id, trainer.model.parameters())):
            raise ValueError("optimizers: the optimizer has no parameter of the model: make it of model.parameters().")
    require_same_logits(trainer.model, trainer.temperature)
    if args.lora_deployment == "adapter":
        require_adapter_beside(trainer.model)
    # DeepSpeed and FSDP keep weights in float32 beside those that compute.
    if trainer.optimizer is None and sharding_of(args).kind is None:
        warn_of_rounding(trainer.model, str(args.optim), args.learning_rate)
    limits, first = None, list[Tokenized]()
    if not isinstance(trainer.processing_class, ProcessorMixin):
        context = args.vllm_max_model_length if args.use_vllm else None
        policy = base_model(trainer.model)
        limits = limits_of(policy, trainer._tokenizer, args.max_completion_length, context)
        for alike in _alike(trainer, prompts):
            require_read(trainer, alike)
            first.append((trainer._tokenize_prompts(alike)[0], alike))
            limits.require(*first[-1])
            limits.warn(first[-1][0])
    trainer.reward_funcs = [
        function if isinstance(function, nn.Module) else checked_reward(function, name)
        for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    ]
    if not trainer.reward_weights.any():
        logger.warning(
            f"reward_weights={trainer.reward_weights.tolist()}: all advantages will be 0, so nothing is learned. "
            "Give at least one reward another weight."
        )
    return limits, first
