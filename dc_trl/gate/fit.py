"""Whether model, tokenizer and prompts fit each other: what indexes what, and what has a greatest length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = get_logger(__name__)

# Of a tokenizer of the model's own. Rows that it leaves unused round the matrix up, or are held back for later tokens.
_LEAST_SHARE = 0.8


class Limits(NamedTuple):
    """What a model can read.

    Attributes:
        tokens: rows of its input embedding: ids are below.
        named: the model, for messages.
        context: positions of prompt and completion together; None: no limit is known.
        goes_on: whether it computes positions beyond, which it was not trained on (rotary positions, ALiBi); a table
            has none.
        completion: tokens that a completion may have.
        counted: where `context` comes from, for messages.
    """

    tokens: int
    named: str
    context: int | None
    goes_on: bool
    completion: int
    counted: str

    def require(self, prompt_ids: Sequence[Sequence[int]], named: Callable[[int], str]) -> None:
        """Refuses prompts that are empty, or that the model cannot read to the end.

        Args:
            prompt_ids: token ids of each prompt.
            named: words for a prompt by its number, for messages.

        Raises:
            ValueError: names the first such prompt.
        """
        for number, ids in enumerate(prompt_ids):
            if len(ids) == 0:
                raise ValueError(f"{named(number)} has no tokens: leave such rows out, for example with filter.")
            if max(ids) >= self.tokens:
                raise ValueError(
                    f"{named(number)} has the token id {max(ids)}, and the input embedding of {self.named} has "
                    f"{self.tokens} rows: give the tokenizer of this model, or make room by "
                    "model.resize_token_embeddings(len(tokenizer)) and train with tokens that it knows."
                )
            if self.context is not None and len(ids) + (0 if self.goes_on else self.completion) > self.context - 1:
                self._require_room(len(ids), self.context, named(number))

    def _require_room(self, length: int, context: int, name: str) -> None:
        remedy = "leave longer prompts out (max_prompt_length in a configuration, dataset.filter in Python)"
        if length >= context:
            raise ValueError(
                f"{name} has {length} tokens, and {self.named} reads {context} ({self.counted}), completion "
                f"included: {remedy}."
            )
        if length + self.completion > context:
            raise ValueError(
                f"{name} has {length} tokens, with max_completion_length={self.completion} more than the "
                f"{context} that {self.named} has positions for ({self.counted}): lower max_completion_length to "
                f"{context - length}, or {remedy}."
            )

    def warn(self, prompt_ids: Sequence[Sequence[int]], named: Callable[[int], str]) -> None:
        """Warns of the longest prompt, if the model computes beyond what it was trained on where completions are long.

        Args: see `require`.
        """
        longest = max(range(len(prompt_ids)), key=lambda number: len(prompt_ids[number]))
        length = len(prompt_ids[longest])
        if self.context is not None and length + self.completion > self.context:
            logger.warning(
                f"{named(longest)} has {length} tokens, with max_completion_length={self.completion} more than the "
                f"{self.context} of {self.named} ({self.counted}): a longer completion is cut there by vLLM, and "
                "otherwise has positions that the model was not trained on. Lower max_completion_length to "
                f"{self.context - length}."
            )


def limits_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    named: str,
    completion: int,
    engine_context: int | None = None,
) -> Limits:
    """What a model can read of this tokenizer's tokens; refuses a tokenizer that does not fit it.

    Args:
        model: without an adapter around it.
        tokenizer: its, as it will be used, with a padding token.
        named: the model, for messages.
        completion: tokens that a completion may have.
        engine_context: `vllm_max_model_length`, None where no such engine samples.

    Raises:
        ValueError: a token that every batch has is missing, or has no row in the embedding; or the output head has
            tokens that the input embedding has not.
    """
    head = model.get_output_embeddings()
    tokens = _rows(model.get_input_embeddings()) or model.config.get_text_config().vocab_size
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
    _warn_of_strange_tokens(model, tokenizer, tokens, named)
    context, counted = _context(model)
    goes_on = _computes_positions(model)
    if engine_context is not None and (context is None or engine_context <= context):
        # The engine ends a completion at its limit.
        context, goes_on, counted = engine_context, True, "vllm_max_model_length"
    return Limits(tokens, named, context, goes_on, completion, counted)


def require_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer without an end token; TRL pads with it where there is no padding token.

    Raises:
        ValueError: there is none.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "processing_class: the tokenizer has no eos_token, so that no completion would end: set "
            "tokenizer.eos_token, or save it in tokenizer_config.json."
        )


def _rows(module: nn.Module) -> int:
    """Rows of an embedding or a head; 0 where another process has them."""
    weight = module.get_parameter("weight")
    return weight.shape[0] if weight.dim() == 2 else 0


def _warn_of_strange_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, named: str
) -> None:
    size = len(tokenizer)
    if size > tokens:
        logger.warning(
            f"the tokenizer has {size} tokens and the input embedding of {named} {tokens} rows: a prompt with one of "
            "the others ends the run. Give the tokenizer of this model."
        )
    elif size < _LEAST_SHARE * tokens:
        logger.warning(
            f"the tokenizer has {size} tokens and the input embedding of {named} {tokens} rows: it looks like another "
            "model's, whose tokens would mean something else."
        )
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    beyond = [end for end in ([ends] if isinstance(ends, int) else ends or []) if end >= tokens]
    if beyond:
        logger.warning(
            f"generation_config.eos_token_id={ends!r} of {named} names tokens beyond the {tokens} rows of its "
            "embedding, which it never samples: correct generation_config.json."
        )


def _context(model: PreTrainedModel) -> tuple[int | None, str]:
    config = model.config.get_text_config()
    # Where a model has no limit, or another name for it, there is no such attribute.
    context = getattr(config, "max_position_embeddings", None)
    return (context, "max_position_embeddings") if isinstance(context, int) and context > 0 else (None, "")


def _computes_positions(model: PreTrainedModel) -> bool:
    """Whether positions beyond those of training are computed; a table of them has an end."""
    rotary = any(name.rpartition(".")[2].endswith("inv_freq") for name, _ in model.named_buffers())
    return rotary or bool(model.config.get_text_config().to_dict().get("alibi"))


def require_template(tokenizer: Any, prompts: Sequence[Any], named: Callable[[int], str]) -> None:
    """Refuses conversations where there is no chat template.

    Args:
        tokenizer: or processor.
        prompts: all plain, or all conversational.
        named: words for a prompt by its number, for the message.

    Raises:
        ValueError: names the first prompt.
    """
    if not isinstance(prompts[0], str) and tokenizer.chat_template is None:
        raise ValueError(
            f"{named(0)} is a list of messages, and the tokenizer has no chat template: set tokenizer.chat_template, "
            "or give the prompts as text."
        )


def require_reward_model(model: PreTrainedModel, tokenizer: Any, name: str) -> None:
    """Refuses a reward model that cannot read what its tokenizer gives; warns where it is no reward model.

    Args:
        model: that TRL takes the first logit of.
        tokenizer: its, as TRL uses it.
        name: of the model, for messages.

    Raises:
        ValueError: it has no padding token, or its tokenizer more tokens than it reads.
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
        label = (model.config.id2label or {}).get(0)
        logger.warning(
            f"{named} has {model.config.num_labels} labels, and the logit of the first one ({label!r}) is taken as "
            "the reward: load a model with num_labels=1, or score with a function."
        )
