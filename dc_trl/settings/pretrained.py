"""The small files behind a model's name: what is missing is refused before the weights are loaded."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from .paths import require_model_path


def load_config(name: str, field: str = "model_name_or_path", **options: Any) -> PretrainedConfig:
    """Load the configuration of a model, with options of `from_pretrained`; refuse a path without one."""
    require_model_path(name, field)
    if options.get("revision") not in (None, "main") and Path(name).is_dir():  # which transformers passes over
        raise ValueError(
            f"revision={options['revision']!r} names a version on the Hub, and {field}={name!r} is a directory, which "
            "has one version: leave revision out."
        )
    try:
        return AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:  # which may not say of what
        raise ValueError(f"{field}={name!r} cannot be loaded: {error}") from error


def load_config_and_tokenizer(
    name: str | None, field: str = "model_name_or_path", **options: Any
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Load configuration and tokenizer of a model, with options of `from_pretrained`; `field` is where it comes from.

    Raises:
        ValueError, OSError: there is no such model, or it has no tokenizer.
    """
    config = load_config(name or "", field, **options)
    return config, load_tokenizer(name or "", field, **options)


def load_tokenizer(name: str, field: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model or adapter, with options of `from_pretrained`; refuse a folder without one."""
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:
        # What transformers makes of a directory without a tokenizer's files.
        raise ValueError(f"{field}={name!r} holds no tokenizer: save one there with tokenizer.save_pretrained.")
    return tokenizer
