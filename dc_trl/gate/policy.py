"""Whether a policy can be trained: of its configuration before it is loaded, and of its weights after."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from accelerate.logging import get_logger
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from ..quantization.policy import base_model
from ..settings.pretrained import load_config, require_model


if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..settings.distribution import Sharding

logger = get_logger(__name__)

# Weights of a tensor that are looked at to see what a step of the learning rate moves.
_SAMPLED = 4096
# Exponent bits that are all ones, which is how infinities and NaN are written; and a word as wide as the number.
_EXPONENT = {
    torch.bfloat16: (0x7F80, torch.int16, np.uint16),
    torch.float16: (0x7C00, torch.int16, np.uint16),
    torch.float32: (0x7F800000, torch.int32, np.uint32),
}


def require_policy(
    model: Any, adapter: bool, quantization_config: Any, field: str = "model", **load_options: Any
) -> None:
    """Refuses a policy that cannot be trained, before its weights are loaded.

    Args:
        model: Hub id, directory, or loaded model, as the trainer takes it.
        adapter: whether a new adapter is trained in place of the model.
        quantization_config: that the model is loaded with, None for none.
        field: the option that the model comes from.
        **load_options: of `from_pretrained`: revision, trust_remote_code.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no such model, it is an adapter's folder, quantized, or does not generate text.
    """
    if not isinstance(model, str | nn.Module):
        raise TypeError(
            f"{field}={model!r} is a {type(model).__name__}: give the Hub id or the directory of a model as text, or "
            "a loaded model."
        )
    if isinstance(model, str):
        require_model(model, field)
        config, named = load_config(model, field, **load_options), f"{field}={model!r}"
        _require_generating(config, _architecture(config, named), named)
    elif isinstance(model, PreTrainedModel | PeftModel):
        base = base_model(model)
        config, named = base.config, f"{field}, a {type(base).__name__},"
        adapter = adapter or isinstance(model, PeftModel)
        _require_generating(config, type(base), named)
    else:
        return  # compiled, for example
    stored = config.to_dict().get("quantization_config")
    _require_trainable_format(named, stored, quantization_config, adapter)


def _architecture(config: PretrainedConfig, named: str) -> type[PreTrainedModel] | None:
    """The class that TRL loads a policy as; None where it comes with the checkpoint's own code."""
    if not config.architectures:
        raise ValueError(
            f"{named} names no architecture in its config.json: save it there with save_pretrained, or set "
            "architectures to the name of its class."
        )
    return getattr(transformers, config.architectures[0], None)


def _require_generating(config: PretrainedConfig, kind: type[PreTrainedModel] | None, named: str) -> None:
    if kind is not None and (config.is_encoder_decoder or not kind.can_generate()):
        raise ValueError(
            f"{named} is no causal language model (its class is {kind.__name__}), and GRPO trains one that writes "
            "text token by token: give a model of a class like …ForCausalLM."
        )


def _require_trainable_format(named: str, stored: Any, asked: Any, adapter: bool) -> None:
    """Refuses weights in a format that gradients cannot move.

    Args:
        named: the model, for the message.
        stored: `quantization_config` of the checkpoint; None for none.
        asked: that of the call, which may undo it.
        adapter: whether an adapter is trained beside the weights.
    """
    chosen = asked or stored or {}
    config = chosen if isinstance(chosen, dict) else vars(chosen)  # its to_dict leaves dequantize out
    method = config.get("quant_method")  # a string, or one of an enumeration
    if not config or config.get("dequantize") or (method == "bitsandbytes" and adapter):
        return
    if method == "bitsandbytes":
        raise ValueError(
            f"{named} is loaded in the numbers of bitsandbytes, which cannot be trained by themselves: train an "
            "adapter beside them (peft_config, use_peft=true), or leave the quantization out."
        )
    raise ValueError(
        f"{named} is quantized already ({getattr(method, 'value', method)}), as a run's deployment/ is, and its "
        "weights cannot be trained: give the model that it was made from. deployment_scheme quantizes what samples."
    )


def require_trainable(
    policy: PreTrainedModel | PeftModel, optimizer: Optimizer | None, learning_rate: float
) -> list[tuple[str, nn.Parameter]]:
    """Refuses a policy of which no weight would move.

    Args:
        policy: as the trainer holds it, unwrapped.
        optimizer: that the user has made, None for the trainer's own.
        learning_rate: of the trainer's own.

    Returns:
        The parameters in training, by name.

    Raises:
        ValueError: no parameter is in training, or the optimizer has none of them.
    """
    moving = [(name, weight) for name, weight in policy.named_parameters() if weight.requires_grad]
    if isinstance(policy, PeftModel):
        # Gradients reach the active adapters alone.
        idle = set(policy.peft_config) - set(policy.active_adapters)
        moving = [(name, weight) for name, weight in moving if not idle & set(name.split("."))]
        if not moving:
            raise ValueError(
                f"model is a PeftModel of which nothing is in training (active adapters: "
                f"{', '.join(policy.active_adapters)}): load it with PeftModel.from_pretrained(…, is_trainable=True), "
                "or make its adapter active and leave inference_mode out of peft_config."
            )
    if not moving:
        raise ValueError(
            "model has no parameter in training (requires_grad is False for all of them): call "
            "model.requires_grad_(True), or pass a peft_config to train an adapter."
        )
    rates = [learning_rate]
    if optimizer is not None:
        ours = {id(weight) for _, weight in moving}
        groups = [group for group in optimizer.param_groups if ours & {id(weight) for weight in group["params"]}]
        if not groups:
            raise ValueError(
                f"optimizers: the {type(optimizer).__name__} has no parameter of the model that is in training: make "
                "it of [p for p in model.parameters() if p.requires_grad], of the model that the trainer is given "
                "(peft_config makes a new one: leave the optimizer out, or wrap the model before)."
            )
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]  # a warm-up begins at 0
    if not any(rates):
        logger.warning("learning_rate=0: no weight will move. Set learning_rate above 0 to train.")
    return moving


def require_whole(model: nn.Module, named: str, loaded: bool, sharding: Sharding) -> None:
    """Refuses weights that are missing, without a value, or not finite; looks at this process's part of them.

    Args:
        model: a policy or a reward model.
        named: it, for the message.
        loaded: whether the trainer has loaded it, by name. Weights that the checkpoint of a model lacks are otherwise
            a warning: the user may have put them there.
        sharding: what divides the parameters.

    Raises:
        ValueError: names the first such parameter.
    """
    base = base_model(model) if isinstance(model, PreTrainedModel | PeftModel) else model
    # Of sharded parameters a process may have none, and get them later.
    if not sharding.divides_parameters:
        empty = [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
        if empty:
            raise ValueError(f"{named} has no values in {_some(empty)}, on the meta device: load the weights.")
    if isinstance(base, PreTrainedModel) and not sharding.divides_parameters:
        missing = list(_missing(base))
        if missing:
            words = (
                f"{named} lacks {_some(missing)}: the checkpoint does not hold it, and transformers has drawn it at "
                "random"
            )
            if loaded:
                raise ValueError(f"{words}. Copy or save the model again, or name the model that it belongs to.")
            logger.warning(f"{words}, unless you have put it there.")
    for name, weight in model.named_parameters():
        if weight.device.type != "meta" and weight.is_floating_point() and not _is_finite(_local(weight.detach())):
            raise ValueError(
                f"{named} has numbers that are not finite (NaN or infinity) in {name}: all that it computes would be "
                "NaN. Copy or save the model again, from before they came."
            )


def _missing(model: PreTrainedModel) -> Iterator[str]:
    """Parameters that `from_pretrained` did not find: it marks those that it did, and the modules that it has made."""
    if not any(_is_marked(weight) for weight in model.parameters()):
        return  # made, and not loaded
    if "quantization_config" in model.config.to_dict():
        return  # packed into other tensors, without a mark
    ignored = model._keys_to_ignore_on_load_missing or ()
    for prefix, module in model.named_modules():
        # A copy that an adapter trains is no longer the tensor that was loaded.
        if not _is_marked(module) or "modules_to_save" in prefix.split("."):
            continue
        for name, weight in module.named_parameters(prefix, recurse=False):
            if not _is_marked(weight) and not any(re.search(pattern, name) for pattern in ignored):
                yield name


def _is_marked(loaded: nn.Module | nn.Parameter) -> bool:
    return vars(loaded).get("_is_hf_initialized", False)


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _is_finite(weight: Tensor) -> bool:
    """Whether all numbers of a tensor are finite.

    On a CPU by their bits, with a maximum of integers: the sums and comparisons of PyTorch take seconds for a billion
    numbers in bfloat16, this takes tenths of one.
    """
    if weight.device.type != "cpu" or weight.dtype not in _EXPONENT or weight.numel() == 0:
        return bool(weight.isfinite().all())
    exponent, word, unsigned = _EXPONENT[weight.dtype]
    bits = weight.contiguous().flatten().view(word).numpy()
    sign = 1 << (8 * bits.itemsize - 1)  # numbers below zero are the larger ones without it
    return bool(bits.max() < exponent and bits.view(unsigned).max() < sign | exponent)


def warn_of_rounding(
    moving: list[tuple[str, nn.Parameter]], optimizer: str, learning_rate: float, sharding: Sharding, autocast: bool
) -> None:
    """Warns of weights in 16 bits that a step of the learning rate leaves where they are.

    Adam moves a weight by about the learning rate, whatever its gradient. Where that is less than half the distance to
    the next number, the sum rounds back to the weight.

    Args:
        moving: the parameters in training, by name.
        optimizer: its name.
        learning_rate: at its highest.
        sharding: what divides the parameters; DeepSpeed keeps weights in float32 beside them, FSDP makes them so.
        autocast: whether the run computes in 16 bits by autocast (`bf16`, `fp16`).
    """
    if "adam" not in optimizer.lower() or "anyprecision" in optimizer.lower() or learning_rate == 0:
        return
    if sharding.kind == "DEEPSPEED" or (sharding.kind == "FSDP" and autocast):
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
            f"learning_rate={learning_rate:g} is below what {' and '.join(sorted(kinds))} resolves: a step of Adam "
            f"leaves about {still / weights:.1%} of the weights in training where they are. Load them in float32 "
            "(dtype: float32; in Python model_init_kwargs={'dtype': 'float32'}) and compute in bfloat16 by bf16=True."
        )
