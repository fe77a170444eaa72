"""Checks whether a policy can be trained: its configuration before it is loaded, and its weights afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..quantization.policy import base_model
from ..settings.pretrained import load_config


if TYPE_CHECKING:
    from ..settings.distribution import Sharding

logger = get_logger(__name__)

# Number of a tensor's weights that are sampled to see whether a step of the learning rate changes them.
_SAMPLED = 4096


def require_policy(
    model: Any, adapter: bool, quantization_config: Any, field: str = "model", **load_options: Any
) -> None:
    """Refuse a policy that cannot be trained, before its weights are loaded.

    Args:
        model: Hub id, directory or loaded model, as the trainer takes it.
        adapter: whether a new adapter is trained in place of the model.
        quantization_config: quantization with which the model is loaded; None if it is not quantized.
        field: name of the option that gives the model.
        **load_options: arguments of `from_pretrained`: revision, trust_remote_code.

    Raises:
        ValueError: the model does not exist, is an adapter's folder, or is quantized.
    """
    if isinstance(model, str):
        config, named = load_config(model, field, **load_options), f"{field}={model!r}"
    elif isinstance(model, PreTrainedModel | PeftModel):
        base = base_model(model)
        config, named = base.config, f"{field}, a {type(base).__name__},"
        adapter = adapter or isinstance(model, PeftModel)
    else:
        return  # for example a compiled model
    quantization = quantization_config or config.to_dict().get("quantization_config") or {}
    if not isinstance(quantization, dict):
        quantization = vars(quantization)  # its to_dict omits dequantize
    method = quantization.get("quant_method")  # a string or an enumeration member
    if not quantization or quantization.get("dequantize") or (method == "bitsandbytes" and adapter):
        return
    raise ValueError(
        f"{named} is quantized ({getattr(method, 'value', method)}), like a run's deployment/, and its weights cannot "
        "be trained: give the model from which it was made (deployment_scheme quantizes the sampler), or train an "
        "adapter beside weights of bitsandbytes (peft_config, use_peft=true)."
    )


def require_trainable(policy: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters of an unwrapped policy with their names; refuse a policy without one.

    Raises:
        ValueError: no parameter is trainable.
    """
    moving = [(name, weight) for name, weight in policy.named_parameters() if weight.requires_grad]
    if not moving:
        raise ValueError(
            "model has no trainable parameter (requires_grad is False for all of them): call "
            "model.requires_grad_(True), pass a peft_config to train an adapter, or load one with "
            "PeftModel.from_pretrained(…, is_trainable=True)."
        )
    return moving


def warn_of_rounding(
    moving: list[tuple[str, nn.Parameter]], optimizer: str, learning_rate: float, sharding: Sharding, autocast: bool
) -> None:
    """Warn of 16-bit weights that a step of the learning rate does not change.

    Adam moves a weight by about the learning rate, whatever its gradient. If that is less than half the distance to
    the next representable number, the sum rounds back to the weight.

    Args:
        moving: the trainable parameters with their names.
        optimizer: name of the optimizer.
        learning_rate: highest learning rate of the run.
        sharding: how the parameters are sharded; DeepSpeed keeps weights in float32 too, and FSDP converts them.
        autocast: whether the run computes in 16 bits by autocast (`bf16`, `fp16`).
    """
    converts = sharding.kind == "DEEPSPEED" or (sharding.kind == "FSDP" and autocast)
    name = optimizer.lower()
    if converts or learning_rate == 0 or "adam" not in name or "anyprecision" in name:
        return
    weights = still = 0.0
    kinds = set()
    for _, weight in moving:
        values = weight.to_local().detach() if isinstance(weight, DTensor) else weight.detach()
        weights += values.numel()
        if values.dtype not in (torch.bfloat16, torch.float16) or values.numel() == 0:
            continue
        kinds.add(str(values.dtype).removeprefix("torch."))
        sample = values.flatten()[:: -(-values.numel() // _SAMPLED)]
        up, down = ((sample.float() + step).to(sample.dtype) for step in (learning_rate, -learning_rate))
        still += values.numel() * ((up == sample) & (down == sample)).float().mean().item()
    if still > weights / 2:
        logger.warning(
            f"learning_rate={learning_rate:g} is below the resolution of {' and '.join(sorted(kinds))}: a step of "
            f"Adam leaves about {still / weights:.1%} of the trainable weights unchanged. Load them in float32 "
            "(dtype: float32; in Python model_init_kwargs={'dtype': 'float32'}) and compute in bfloat16 by bf16=True."
        )
