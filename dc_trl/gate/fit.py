"""Checks that model, tokenizer and prompts fit each other: token ids, embedding rows, and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = get_logger(__name__)


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
        for number, ids in enumerate(prompt_ids):
            if not ids:
                raise ValueError(f"{named(number)} has no tokens: leave out such rows, for example with filter.")
            if max(ids) >= self.tokens:
                raise ValueError(
                    f"{named(number)} has the token id {max(ids)}, and the input embedding of {self.named} has "
                    f"{self.tokens} rows: give the tokenizer of this model, or make room by "
                    "model.resize_token_embeddings(len(tokenizer)) and train with tokens that it knows."
                )
            # A prompt needs room for a token at least, and for the whole completion in a table of positions.
            room = 1 if self.extrapolates else self.completion
            if self.context is not None and len(ids) + room > self.context:
                raise ValueError(
                    f"{self._beyond(named(number), len(ids))}, or leave longer prompts out (max_prompt_length in a "
                    "configuration, dataset.filter in Python)."
                )

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
            f"of {self.named} ({self.origin}): lower max_completion_length to {max(self.context - length, 0)}"
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
        ValueError: a token that every batch needs is missing or has no row in the embedding.
    """
    config = model.config.get_text_config()
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
    """Return the rows of an embedding; 0 if another process holds them."""
    weight = module.get_parameter("weight")
    return weight.shape[0] if weight.dim() == 2 else 0
