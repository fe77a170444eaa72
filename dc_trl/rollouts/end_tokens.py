"""The tokens that end a completion, for every engine that is not TRL's or vLLM's own."""

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..quantization.policy import base_model


def declared_end_tokens(policy: PreTrainedModel | PeftModel) -> list[int]:
    """Ids of the end tokens in the generation_config of a model, which names none, one or several."""
    config = base_model(policy).generation_config
    declared = None if config is None else config.eos_token_id
    return [] if declared is None else [declared] if isinstance(declared, int) else list(declared)


def end_tokens(policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens that end a completion: the model's and the tokenizer's.

    Equal to `eos_token_ids` of TRL's trainer, from which rollouts in training take them, and to what vLLM stops at.

    Raises:
        ValueError: neither has one.
    """
    ids = declared_end_tokens(policy)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.insert(0, tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "eos_token_id=None in the tokenizer and in the model's generation_config: set one, no completion would "
            "ever end."
        )
    return ids


def pad_token(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> int:
    """Id that fills prompts and completions up: the tokenizer's, or an end token where it has none."""
    return ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
