"""The tokens that end a completion, for engines other than TRL's and vLLM's own."""

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..quantization.policy import base_model


def declared_end_tokens(policy: PreTrainedModel | PeftModel) -> list[int]:
    """Return the ids of the end tokens in a model's generation_config, which may have none, one or several."""
    config = base_model(policy).generation_config
    declared = None if config is None else config.eos_token_id
    return [] if declared is None else [declared] if isinstance(declared, int) else list(declared)


def end_tokens(policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end a completion: the tokenizer's and the model's.

    They are equal to `eos_token_ids` of TRL's trainer, which rollouts in training use, and to vLLM's stop tokens.

    Raises:
        ValueError: neither the tokenizer nor the model has one.
    """
    ids = declared_end_tokens(policy)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.insert(0, tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "eos_token_id=None in the tokenizer and in the model's generation_config: set one, because no completion "
            "would ever end."
        )
    return ids


def pad_token(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> int:
    """Return the id that pads prompts and completions: the tokenizer's, or an end token where it has none."""
    return ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
