"""Checks whether a policy can be trained: its configuration before it is loaded, and its weights afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.logging import get_logger
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..quantization.policy import base_model
from ..settings.pretrained import load_config, require_model


if TYPE_CHECKING:
    from torch.optim import Optimizer

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
        TypeError: `model` has none of these types.
        ValueError: the model does not exist, is an adapter's folder, is quantized, or does not generate text.
    """
    if not isinstance(model, str | nn.Module):
        raise TypeError(
            f"{field}={model!r} is a {type(model).__name__}: give the Hub id or the directory of a model as text, or "
            "a loaded model."
        )
    if isinstance(model, str):
        require_model(model, field)
        config, named = load_config(model, field, **load_options), f"{field}={model!r}"
        if not config.architectures:
            raise ValueError(
                f"{named} names no architecture in its config.json: save it there with save_pretrained, or set "
                "architectures to the name of its class."
            )
        kind = getattr(transformers, config.architectures[0], None)  # None if the checkpoint brings its own code
    elif isinstance(model, PreTrainedModel | PeftModel):
        base = base_model(model)
        config, kind, named = base.config, type(base), f"{field}, a {type(base).__name__},"
        adapter = adapter or isinstance(model, PeftModel)
    else:
        return  # for example a compiled model
    if kind is not None and (config.is_encoder_decoder or not kind.can_generate()):
        raise ValueError(
            f"{named} is no causal language model (its class is {kind.__name__}), and GRPO trains one that writes "
            "text token by token: give a model of a class like …ForCausalLM."
        )
    quantization = quantization_config or config.to_dict().get("quantization_config") or {}
    if not isinstance(quantization, dict):
        quantization = vars(quantization)  # its to_dict omits dequantize
    method = quantization.get("quant_method")  # a string or an enumeration member
    if not quantization or quantization.get("dequantize") or (method == "bitsandbytes" and adapter):
        return
    if method == "bitsandbytes":
        raise ValueError(
            f"{named} is loaded in a format of bitsandbytes, whose weights cannot be trained: train an "
            "adapter beside them (peft_config, use_peft=true), or leave the quantization out."
        )
    raise ValueError(
        f"{named} is quantized already ({getattr(method, 'value', method)}), like a run's deployment/, and its "
        "weights cannot be trained: give the model from which it was made. deployment_scheme quantizes the sampler."
    )


def require_trainable(
    policy: PreTrainedModel | PeftModel, optimizer: Optimizer | None, learning_rate: float
) -> list[tuple[str, nn.Parameter]]:
    """Refuse a policy none of whose weights would change.

    Args:
        policy: the unwrapped policy of the trainer.
        optimizer: the user's optimizer, or None if the trainer makes one.
        learning_rate: learning rate of the trainer's own optimizer.

    Returns:
        The trainable parameters with their names.

    Raises:
        ValueError: no parameter is trainable, or the optimizer has none of them.
    """
    moving = [(name, weight) for name, weight in policy.named_parameters() if weight.requires_grad]
    if isinstance(policy, PeftModel):
        # Only the active adapters receive gradients.
        idle = set(policy.peft_config) - set(policy.active_adapters)
        if not (moving := [(name, weight) for name, weight in moving if not idle & set(name.split("."))]):
            raise ValueError(
                f"model is a PeftModel without a trainable parameter (active adapters: "
                f"{', '.join(policy.active_adapters)}): load it with PeftModel.from_pretrained(…, is_trainable=True), "
                "or activate its adapter and leave inference_mode out of peft_config."
            )
    if not moving:
        raise ValueError(
            "model has no trainable parameter (requires_grad is False for all of them): call "
            "model.requires_grad_(True), or pass a peft_config to train an adapter."
        )
    rates = [learning_rate]
    if optimizer is not None:
        ours = {id(weight) for _, weight in moving}
        groups = [group for group in optimizer.param_groups if ours & {id(weight) for weight in group["params"]}]
        if not groups:
            raise ValueError(
                f"optimizers: the {type(optimizer).__name__} has no trainable parameter of the model: make "
                "it of [p for p in model.parameters() if p.requires_grad], of the model that is passed to the trainer "
                "(peft_config makes a new one: leave the optimizer out, or wrap the model before)."
            )
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]  # a warm-up begins at 0
    if not any(rates):
        logger.warning("learning_rate=0: no weight will change. Set learning_rate above 0 to train.")
    return moving


def require_whole(model: nn.Module, named: str, loaded: bool, sharding: Sharding) -> None:
    """Refuse missing, uninitialized or non-finite weights among those that this process holds.

    Args:
        model: a policy or a reward model.
        named: name of the model, for the message.
        loaded: whether the trainer loaded the model by name. Otherwise weights that the checkpoint lacks are only a
            warning: the user may have set them.
        sharding: how the parameters are sharded.

    Raises:
        ValueError: a parameter is refused; the message names the first one.
    """
    if not sharding.divides_parameters:  # otherwise a process may receive the values later
        if empty := [name for name, weight in model.named_parameters() if weight.device.type == "meta"]:
            raise ValueError(f"{named} has no values in {_summary(empty)}, on the meta device: load the weights.")
        if isinstance(model, PreTrainedModel | PeftModel) and (missing := list(_missing(base_model(model)))):
            words = (
                f"{named} lacks {_summary(missing)}: the checkpoint does not hold it, and transformers has "
                "initialized it at random"
            )
            if loaded:
                raise ValueError(f"{words}. Copy or save the model again, or name the model that it belongs to.")
            logger.warning(f"{words}, unless you have set it.")
    for name, weight in model.named_parameters():
        values = _local(weight.detach())
        if values.device.type == "meta" or not values.is_floating_point() or values.numel() == 0:
            continue
        if not all(extreme.isfinite() for extreme in values.aminmax()):  # 40 times as fast as values.isfinite()
            raise ValueError(
                f"{named} has numbers that are not finite (NaN or infinity) in {name}: all of its outputs would be "
                "NaN. Copy or save the model again, from a state without them."
            )


def _missing(model: PreTrainedModel) -> Iterator[str]:
    """Yield the parameters that `from_pretrained` did not find; it marks the parameters and modules that it set."""
    if not any(_is_marked(weight) for weight in model.parameters()):
        return  # constructed, not loaded
    if "quantization_config" in model.config.to_dict():
        return  # packed into other tensors, which have no mark
    ignored = model._keys_to_ignore_on_load_missing or ()
    for prefix, module in model.named_modules():
        # A copy that an adapter trains is not the tensor that was loaded.
        if not _is_marked(module) or "modules_to_save" in prefix.split("."):
            continue
        for name, weight in module.named_parameters(prefix, recurse=False):
            if not _is_marked(weight) and not any(re.search(pattern, name) for pattern in ignored):
                yield name


def _is_marked(loaded: nn.Module | nn.Parameter) -> bool:
    return vars(loaded).get("_is_hf_initialized", False)


def _summary(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


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
        values = _local(weight.detach())
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
