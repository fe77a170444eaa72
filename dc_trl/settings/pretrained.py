"""The small files behind a model's name: what is missing or broken is refused before the weights are loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from .paths import require_model_path


@contextmanager
def _named(name: str | None, field: str) -> Iterator[None]:
    """Turn what transformers raises about a model's files into a ValueError that names the option."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, TemplateError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{field}={name!r} cannot be loaded ({type(error).__name__}): {reason}") from error


def load_config(name: str, field: str = "model_name_or_path", **options: Any) -> PretrainedConfig:
    """Load the configuration of a model, with options of `from_pretrained`; refuse one that cannot be loaded."""
    require_model_path(name, field)
    with _named(name, field):
        return AutoConfig.from_pretrained(name, **options)


def load_config_and_tokenizer(
    name: str | None, field: str = "model_name_or_path", padding_side: str | None = None, **options: Any
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Load configuration and tokenizer of a model: small files, which show whether it exists.

    Args:
        name: Hub id or directory.
        field: the option that it comes from.
        padding_side: of the tokenizer, its own by default.
        **options: of `from_pretrained`: revision, trust_remote_code.

    Raises:
        ValueError: there is no such model, it has no tokenizer, or its chat template cannot render a message.
    """
    config = load_config(name or "", field, **options)
    tokenizer_options = options if padding_side is None else options | {"padding_side": padding_side}
    with _named(name, field):
        tokenizer = AutoTokenizer.from_pretrained(name, **tokenizer_options)
        if tokenizer.chat_template is not None:
            tokenizer.apply_chat_template([{"role": "user", "content": "1"}], add_generation_prompt=True)
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:
        # What transformers makes of a directory without a tokenizer's files.
        raise ValueError(f"{field}={name!r} holds no tokenizer: save one there with tokenizer.save_pretrained.")
    return config, tokenizer
