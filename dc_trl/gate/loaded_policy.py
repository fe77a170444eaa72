"""Checks of the policy once it is loaded: whether it would learn, and fits its tokenizer, prompts and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate.logging import get_logger
from jinja2 import TemplateError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOTrainer

from ..config import DCGRPOConfig
from ..data.prompts import require_messages, unread_text
from ..grading.checked_reward import checked_reward, excerpt
from ..quantization.adapter import require_adapter_beside
from ..quantization.head import FusedHead, given, logits_of
from ..quantization.policy import base_model, require_finite
from ..settings.distribution import sharding_of
from .before_loading import require_end


logger = get_logger(__name__)

_LARGEST_LOGIT = 50.0  # of the hidden states for which heads are compared: a cap of logits has to act
_SAME_LOG_PROBS = 0.5  # nats between them, which bfloat16 does not reach
_SAMPLED = 4096  # weights of a tensor that show whether a step of the learning rate changes it


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
    require_end(tokenizer)
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
