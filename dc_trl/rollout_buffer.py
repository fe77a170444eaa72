"""Rollouts in TRL's buffer: no completion is empty, and those in flight survive a kill."""

import json
import math
from functools import wraps
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def fill_empty(completion_ids, logprobs, eos_token_id):
    """Gives an empty completion the end token that the engine sampled and dropped, without a log-probability.

    TRL reads the last token of every completion, and there is nothing to learn from a completion of no tokens.
    """
    if all(completion_ids):
        return completion_ids, logprobs
    if logprobs is not None:
        logprobs = [values if ids else [math.nan] for ids, values in zip(completion_ids, logprobs, strict=True)]
    return [ids or [eos_token_id] for ids in completion_ids], logprobs


def with_nonempty_completions(rollout_func):
    """A `rollout_func` for TRL whose empty completions are filled as by `fill_empty`, outside the loss."""

    @wraps(rollout_func)
    def rollout(prompts, trainer):
        output = dict(rollout_func(prompts, trainer))
        if "env_mask" in output:
            output["env_mask"] = [mask or [0] for mask in output["env_mask"]]
        output["completion_ids"], output["logprobs"] = fill_empty(
            output["completion_ids"], output["logprobs"], trainer._tokenizer.eos_token_id
        )
        return output

    return rollout


def save_rollouts(slices: list[dict[str, Any]], path: str) -> None:
    """Writes the slices of a generation batch: tensors, and JSON-compatible values beside them, as safetensors."""
    tensors: dict[str, Tensor] = {}
    values: list[dict[str, Any]] = [{} for _ in slices]
    for index, inputs in enumerate(slices):
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                # Slices are views into one batch, which safetensors does not store.
                tensors[f"{index}.{name}"] = value.cpu().clone().contiguous()
            else:
                values[index][name] = value
    save_file(tensors, path, metadata={"values": json.dumps(values)})


def load_rollouts(path: str, device: torch.device) -> list[dict[str, Any]]:
    """Reads what `save_rollouts` wrote, onto a device."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        slices = json.loads(file.metadata()["values"])
        for key in file.keys():  # noqa: SIM118 (not a dict)
            index, name = key.split(".", 1)
            slices[int(index)][name] = file.get_tensor(key)
    return slices
