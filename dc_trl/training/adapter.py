"""Continued training of an adapter: finds its base model and checks that it fits."""

import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights
from safetensors import SafetensorError
from transformers import PreTrainedModel
from trl import ModelConfig

from ..files import read_object
from ..resuming.checkpoints import checkpoints
from ..settings.fields import setting
from ..settings.paths import is_path, shipped


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
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
        ValueError: there is no such adapter, its base is unknown, or `model` names another base.
    """
    name = arguments.adapter_name_or_path
    if name is None:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        _require_adapter(name, folder)
        name = str(folder)
    elif is_path(name):
        what = "is not a directory" if folder.exists() else "does not exist"
        raise ValueError(f"{_FIELD}={name!r} {what}: give the directory or the Hub id of an adapter.")
    try:
        config = PeftConfig.from_pretrained(name)
    except (ValueError, TypeError, KeyError, OSError, HFValidationError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{_FIELD}={name!r} cannot be loaded: {reason}") from error
    base = shipped(config.base_model_name_or_path or "")
    if model.model_name_or_path is None:
        if not base or (is_path(base) and not Path(base).expanduser().exists()):
            what = "which does not exist" if base else "so its base is unknown"
            raise ValueError(
                f"{_FIELD}={name!r} was trained on base_model_name_or_path={base!r}, {what}: give its base as "
                "model_name_or_path."
            )
        model.model_name_or_path = base
        if config.revision is not None and model.model_revision == "main":
            model.model_revision = config.revision
    elif base and _differ(base, model.model_name_or_path):
        raise ValueError(
            f"model_name_or_path={model.model_name_or_path!r} is not what {_FIELD}={name!r} was trained on, which is "
            f"{base!r}: leave model_name_or_path out."
        )
    return config


def load_adapted(base: PreTrainedModel, base_name: str, name: str) -> PeftModel:
    """Return the base model with the adapter on it, ready for training.

    Raises:
        ValueError: the adapter belongs to another model; the message names both.
    """
    name = os.path.expanduser(name)
    cause: Exception | None = None
    try:
        model = PeftModel.from_pretrained(base, name, is_trainable=True)
        # PEFT ignores tensors that the adapter or the model has no counterpart of.
        saved, wanted = load_peft_weights(name, device="cpu").keys(), get_peft_model_state_dict(model).keys()
        if left := sorted(saved - wanted):
            reason = f"the model has no place for {left[0]!r}, and {len(left)} tensors in all"
        elif missing := sorted(wanted - saved):
            reason = f"the adapter has no {missing[0]!r}, and lacks {len(missing)} tensors in all"
        else:
            return model
    except KeyError as error:  # PEFT looks up a trained copy of a module
        cause, reason = error, f"the adapter has no {error}"
    except (RuntimeError, ValueError, TypeError, OSError, SafetensorError) as error:
        # The messages of PyTorch, PEFT and the Hub's client are shortened to one line.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        cause, reason = error, next((line for line in lines if "mismatch" in line), lines[0])
    raise ValueError(
        f"{_FIELD}={name!r} does not fit model_name_or_path={base_name!r} ({reason}): give the base of the adapter."
    ) from cause


def _require_adapter(name: str, folder: Path) -> None:
    """Refuse a directory without a complete adapter."""
    if (folder / CONFIG_FILE).is_file():
        read_object(folder / CONFIG_FILE)
        if not (folder / WEIGHTS_FILE).is_file():
            raise ValueError(f"{_FIELD}={name!r} has no {WEIGHTS_FILE}: save the adapter again, as safetensors.")
        return
    newest = [path for path in checkpoints(folder) if (path / CONFIG_FILE).is_file()]
    if newest:
        raise ValueError(f"{_FIELD}={name!r} has no {CONFIG_FILE}, only its checkpoints: give {str(newest[0])!r}.")
    if (folder / "config.json").is_file():
        raise ValueError(f"{_FIELD}={name!r} holds a whole model and no {CONFIG_FILE}: give it as model_name_or_path.")
    raise ValueError(f"{_FIELD}={name!r} has no {CONFIG_FILE}, so it holds no adapter: give the directory of one.")


def _differ(base: str, given: str) -> bool:
    """Return whether two names certainly mean two models: a directory may be a copy of a Hub model, or have moved."""
    first, second = Path(base).expanduser(), Path(given).expanduser()
    if first.is_dir() and second.is_dir():
        return not first.samefile(second)
    return not (first.is_dir() or second.is_dir() or is_path(base)) and base != given
