"""Rollouts in TRL's buffer: no completion is empty, and those in flight survive a kill."""

import json
import math
from functools import wraps
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class UnsampledToken(int):
    """Id of a token that no engine is known to have sampled.

    TRL takes completions apart and together as lists of ids, in which it keeps its type.
    """


def fill_empty(completion_ids, logprobs, eos_token_id):
    """Gives an empty completion an end token without a log-probability, which [`sampled_only`] keeps out of the loss.

    TRL reads the last token of every completion, and there is nothing to learn from a completion of no tokens.
    """
    if all(len(ids) > 0 for ids in completion_ids):
        return completion_ids, logprobs
    if logprobs is not None:
        logprobs = [
            values if len(ids) > 0 else [math.nan] for ids, values in zip(completion_ids, logprobs, strict=True)
        ]
    return [ids if len(ids) > 0 else [UnsampledToken(eos_token_id)] for ids in completion_ids], logprobs


def sampled_only(completion_ids, tool_mask):
    """TRL's mask of the tokens that the model wrote, with 0 at those that `fill_empty` put there; None: all count.

    Such a token stands at the end of its completion: neither does a tool follow on no answer, nor another turn.
    """
    filled = [isinstance(ids[-1], UnsampledToken) for ids in completion_ids]
    if not any(filled):
        return tool_mask
    if tool_mask is None:
        tool_mask = [[1] * len(ids) for ids in completion_ids]
    return [
        [*mask[: len(ids) - 1], 0] if empty else mask
        for ids, mask, empty in zip(completion_ids, tool_mask, filled, strict=True)
    ]


def with_nonempty_completions(rollout_func):
    """A `rollout_func` for TRL whose empty completions are filled by `fill_empty`."""

    @wraps(rollout_func)
    def rollout(prompts, trainer):
        output = rollout_func(prompts, trainer)
        if not {"completion_ids", "logprobs"} <= output.keys():
            return output  # TRL says which keys it needs
        completion_ids, logprobs = fill_empty(
            output["completion_ids"], output["logprobs"], trainer._tokenizer.eos_token_id
        )
        return {**output, "completion_ids": completion_ids, "logprobs": logprobs}

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
