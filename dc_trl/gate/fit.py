"""Checks that model, tokenizer and prompts fit each other: token ids, embedding rows, and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = get_logger(__name__)

# Smallest usual size of a model's own tokenizer as a share of the rows, some of which may be padding or reserved.
_LEAST_SHARE = 0.8


class Limits(NamedTuple):
    """The limits of what a model can read.

    Attributes:
        tokens: rows of the input embedding; token ids must be below.
        named: name of the model, for messages.
        context: positions for prompt and completion together; None if no limit is known.
        extrapolates: whether the model can compute positions beyond `context`, on which it was not trained (rotary
            positions, ALiBi); a table of positions cannot.
        completion: largest number of tokens of a completion.
        origin: source of `context`, for messages.
    """

    tokens: int
    named: str
    context: int | None
    extrapolates: bool
    completion: int
    origin: str

    def require(self, prompt_ids: Sequence[Sequence[int]], named: Callable[[int], str]) -> None:
        """Refuse prompts that are empty or that the model cannot read completely.

        Args:
            prompt_ids: token ids of each prompt.
            named: returns the name of a prompt from its number, for messages.

        Raises:
            ValueError: a prompt is refused; the message names the first one.
        """
        remedy = "leave longer prompts out (max_prompt_length in a configuration, dataset.filter in Python)"
        for number, ids in enumerate(prompt_ids):
            length = len(ids)
            if length == 0:
                raise ValueError(f"{named(number)} has no tokens: leave out such rows, for example with filter.")
            if max(ids) >= self.tokens:
                raise ValueError(
                    f"{named(number)} has the token id {max(ids)}, and the input embedding of {self.named} has "
                    f"{self.tokens} rows: give the tokenizer of this model, or make room by "
                    "model.resize_token_embeddings(len(tokenizer)) and train with tokens that it knows."
                )
            if self.context is None:
                continue
            if length >= self.context:
                raise ValueError(
                    f"{named(number)} has {length} tokens, and {self.named} reads {self.context} ({self.origin}), "
                    f"completion included: {remedy}."
                )
            if length + self.completion > self.context and not self.extrapolates:
                raise ValueError(f"{self._beyond(named(number), length)}, or {remedy}.")

    def warn(self, prompt_ids: Sequence[Sequence[int]], named: Callable[[int], str]) -> None:
        """Warn of the longest prompt if a long completion would exceed the positions on which the model was trained.

        Args: see `require`.
        """
        length, longest = max((len(ids), -number) for number, ids in enumerate(prompt_ids))
        if self.context is not None and length + self.completion > self.context:
            logger.warning(
                f"{self._beyond(named(-longest), length)}: vLLM cuts a longer completion there, and other engines use "
                "positions that the model was not trained on."
            )

    def _beyond(self, name: str, length: int) -> str:
        assert self.context is not None
        return (
            f"{name} has {length} tokens, with max_completion_length={self.completion} more than the {self.context} "
            f"of {self.named} ({self.origin}): lower max_completion_length to {self.context - length}"
        )


def limits_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    named: str,
    completion: int,
    engine_context: int | None = None,
) -> Limits:
    """Return the limits of a model with this tokenizer; refuse a tokenizer that does not fit the model.

    Args:
        model: the model without an adapter around it.
        tokenizer: the model's tokenizer as it will be used, with a padding token.
        named: name of the model, for messages.
        completion: largest number of tokens of a completion.
        engine_context: `vllm_max_model_length`; None if vLLM does not sample.

    Raises:
        ValueError: a token that every batch needs is missing or has no row in the embedding, or the output head has
            more tokens than the input embedding.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    tokens = _rows(model.get_input_embeddings()) or config.vocab_size
    require_end(tokenizer)
    for kind in ("eos", "pad", "bos"):
        number = getattr(tokenizer, f"{kind}_token_id")
        if number is not None and number >= tokens:
            raise ValueError(
                f"the tokenizer's {kind}_token {getattr(tokenizer, f'{kind}_token')!r} has the id {number}, and the "
                f"input embedding of {named} has {tokens} rows: give the tokenizer of this model, or another "
                f"{kind}_token, or make room by model.resize_token_embeddings(len(tokenizer))."
            )
    if isinstance(head, nn.Linear) and _rows(head) > tokens:
        raise ValueError(
            f"the output head of {named} has {_rows(head)} rows and its input embedding {tokens}: it would sample "
            "tokens that it cannot read. Save the model with matrices of one size (model.resize_token_embeddings)."
        )
    sizes = f"the tokenizer has {len(tokenizer)} tokens and the input embedding of {named} {tokens} rows"
    if len(tokenizer) > tokens:
        logger.warning(
            f"{sizes}: a prompt with a token that has no row ends the run. Give the tokenizer of this model."
        )
    elif len(tokenizer) < _LEAST_SHARE * tokens:
        logger.warning(f"{sizes}: it may belong to another model, so that its token ids would have other meanings.")
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    if any(end >= tokens for end in ([ends] if isinstance(ends, int) else ends or [])):
        logger.warning(
            f"generation_config.eos_token_id={ends!r} of {named} names a token beyond the {tokens} rows of its input "
            "embedding, which it never samples: correct generation_config.json."
        )
    # A model without a limit, or with another name for it, does not have this attribute.
    context, origin = getattr(config, "max_position_embeddings", None), "max_position_embeddings"
    if not isinstance(context, int) or context <= 0:
        context = None
    rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    extrapolates = rotary or bool(config.to_dict().get("alibi"))
    if engine_context is not None and (context is None or engine_context <= context):
        # The engine ends a completion at its own limit.
        context, extrapolates, origin = engine_context, True, "vllm_max_model_length"
    return Limits(tokens, named, context, extrapolates, completion, origin)


def require_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without an end token, which TRL also pads with if there is no padding token.

    Raises:
        ValueError: the tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "processing_class: the tokenizer has no eos_token, so that no completion would end: set "
            "tokenizer.eos_token, or save it in tokenizer_config.json."
        )


def _rows(module: nn.Module) -> int:
    """Return the rows of an embedding or a head; 0 if another process holds them."""
    weight = module.get_parameter("weight")
    return weight.shape[0] if weight.dim() == 2 else 0


def require_template(tokenizer: Any, prompts: Sequence[Any], named: Callable[[int], str]) -> None:
    """Refuse conversations if there is no chat template.

    Args:
        tokenizer: tokenizer or processor.
        prompts: prompts that are all plain or all conversational.
        named: returns the name of a prompt from its number, for the message.

    Raises:
        ValueError: there is no chat template; the message names the first prompt.
    """
    if not isinstance(prompts[0], str) and tokenizer.chat_template is None:
        raise ValueError(
            f"{named(0)} is a list of messages, and the tokenizer has no chat template: set tokenizer.chat_template, "
            "or give the prompts as text."
        )


def require_reward_model(model: PreTrainedModel, tokenizer: Any, name: str) -> None:
    """Refuse a reward model that cannot read its tokenizer's tokens; warn if the model has several labels.

    Args:
        model: model whose first logit TRL takes as the reward.
        tokenizer: the reward model's tokenizer, as TRL uses it.
        name: name of the model, for messages.

    Raises:
        ValueError: the tokenizer has no padding token, or more tokens than the model can read.
    """
    named = f"the reward model {name!r}"
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer of {named} has no pad_token: completions could not be scored together. Set it on what you "
            "pass as reward_processing_classes."
        )
    tokens = _rows(model.get_input_embeddings()) or len(tokenizer)
    if tokenizer.pad_token_id >= tokens or len(tokenizer) > tokens + len(tokenizer.added_tokens_decoder):
        raise ValueError(
            f"the tokenizer of {named} has {len(tokenizer)} tokens (pad_token_id={tokenizer.pad_token_id}), and its "
            f"input embedding {tokens} rows: pass its own tokenizer as reward_processing_classes."
        )
    if model.config.num_labels != 1:
        logger.warning(
            f"{named} has {model.config.num_labels} labels, and the logit of the first one is taken as the reward: "
            "load a model with num_labels=1, or score with a function."
        )
