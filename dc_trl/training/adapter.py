"""Continued training of an adapter: finds its base model and checks that it fits."""

import os
from dataclasses import dataclass
from pathlib import Path

from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights
from safetensors import SafetensorError
from transformers import PreTrainedModel
from trl import ModelConfig

from ..settings.fields import setting
from ..settings.paths import shipped


_FIELD = "adapter_name_or_path"


@dataclass
class AdapterArguments:
    """The adapter that a run goes on from."""

    adapter_name_or_path: str | None = setting(
        None,
        "Directory or Hub id of a trained adapter that this run goes on training: another run's output directory, or "
        "one of its checkpoints. Its base is model_name_or_path; if that is not set, the model that the adapter was "
        "trained on. Rank and the like are the adapter's own, whatever lora_r and the like say. See docs/lora.md.",
    )


def adapter_of(arguments: AdapterArguments, model: ModelConfig) -> PeftConfig | None:
    """Read the configuration of the adapter, and set the base model if it is not given.

    Args:
        arguments: adapter arguments of the run.
        model: model arguments, whose `model_name_or_path` and `model_revision` are set if they are not given.

    Returns:
        The configuration of the adapter; None if the run starts without one.

    Raises:
        ValueError: there is no such adapter.
    """
    name = arguments.adapter_name_or_path
    if name is None:
        return None
    name = os.path.expanduser(name)
    try:
        config = PeftConfig.from_pretrained(name)
    except (ValueError, TypeError, KeyError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{_FIELD}={name!r} is no adapter, or cannot be loaded: {reason}") from error
    if Path(name).is_dir() and not Path(name, "adapter_model.safetensors").is_file():  # PEFT would read a pickle
        raise ValueError(
            f"{_FIELD}={name!r} has no adapter_model.safetensors: save the adapter again, as safetensors."
        )
    if model.model_name_or_path is None:
        model.model_name_or_path = shipped(config.base_model_name_or_path or "")
        if config.revision is not None and model.model_revision == "main":
            model.model_revision = config.revision
    return config


def load_adapted(base: PreTrainedModel, base_name: str, name: str) -> PeftModel:
    """Return the base model with the adapter on it, ready for training.

    Raises:
        ValueError: the adapter belongs to another model; the message names both.
    """
    name = os.path.expanduser(name)
    try:
        model = PeftModel.from_pretrained(base, name, is_trainable=True)
        # PEFT only warns of tensors that the adapter or the model has no counterpart of.
        saved, wanted = load_peft_weights(name, device="cpu").keys(), get_peft_model_state_dict(model).keys()
        if saved != wanted:
            raise ValueError(f"{min(saved ^ wanted)!r} is in one of the two alone")
    except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if "mismatch" in line), str(error))
        raise ValueError(
            f"{_FIELD}={name!r} does not fit model_name_or_path={base_name!r} ({reason}): give the adapter's base."
        ) from error
    return model
