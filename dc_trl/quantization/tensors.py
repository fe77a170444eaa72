"""Iterate over the policy's tensors, with shards gathered and adapters merged, by the base architecture's names."""

import copy
import re
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .policy import Policy, base_model, gathered, require_shared_embeddings, unwrapped


# Names of the classes in which bitsandbytes packs several numbers into one; it need not be installed.
_PACKED = ("Params4bit", "Int8Params")
# Parts of names that FSDP and PEFT add.
_WRAPPERS = r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model|base_layer)\."


def deployed_tensors(
    accelerator: Accelerator, model: nn.Module, gathered_by_trl: Callable[[], Iterator[tuple[str, Tensor]]] | None
) -> Iterator[tuple[str, Tensor]]:
    """Return the present weights of a policy in training, for a deployable checkpoint; see `policy_tensors`.

    Every process has to iterate to the end, because gathering a shard takes all of them.

    Args:
        accelerator: accelerator of the run.
        model: the policy, as the accelerator prepared it.
        gathered_by_trl: `_iter_named_params` of the vLLM engine, None without vLLM. It gathers what
            `policy_tensors` cannot: FSDP1, DeepSpeed's ZeRO stage 3, and adapters under FSDP2.

    Raises:
        ValueError: TRL has to gather the weights without vLLM, or an adapter parts embedding and output head.
    """
    policy = unwrapped(accelerator, model)
    if not _needs_trl(accelerator, policy):
        return policy_tensors(policy)
    if gathered_by_trl is None:
        raise ValueError(
            "use_vllm=False: without vLLM, sharded weights are gathered only under FSDP2 and without an adapter. "
            "Set use_vllm=True, or launch with FSDP2 and train all weights, or launch without sharding."
        )
    require_shared_embeddings(policy)
    # TRL gathers parameters alone, and a buffer, such as the bias that chooses DeepSeek's experts, is not sharded.
    buffers = base_model(policy).named_buffers()
    return chain(gathered_by_trl(), ((re.sub(_WRAPPERS, "", name), buffer) for name, buffer in buffers))


def _needs_trl(accelerator: Accelerator, policy: nn.Module) -> bool:
    if isinstance(policy, FSDPModule):
        return isinstance(policy, PeftModel)
    if accelerator.distributed_type == DistributedType.FSDP:
        return not accelerator.is_fsdp2  # under FSDP2, the accelerator has not sharded it yet
    return accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.deepspeed_plugin.zero_stage == 3


def policy_tensors(policy: Policy, adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of a policy by its base architecture's names, with FSDP2 gathered, adapters merged.

    The policy itself is not changed: each adapted layer is merged in a copy, one at a time, because merging in place
    and unmerging again would leave rounding errors in the weights that are being trained. Weights that bitsandbytes
    has packed (QLoRA) are unpacked first, because PEFT's merge would round the sum to the same few bits again.

    Args:
        policy: a transformers model, or a PEFT model around one. A policy without adapters may be sharded by FSDP2;
            every process then has to iterate to the end.
        adapters: whether adapters are merged; otherwise the tensors are those of the base.

    Yields:
        (name, tensor); a tensor that two modules share is yielded under both names.

    Raises:
        ValueError: the adapter has no merged form.
    """
    sharded = isinstance(policy, FSDPModule)
    if isinstance(policy, PeftModel):
        require_merged_form(policy)
        yield from _merged_tensors(policy.get_base_model(), "", adapters)
    elif sharded:
        # The state dict holds the shards even where a forward pass has left gathered weights behind in its own
        # precision, and the model's names even where layers are wrapped to recompute activations.
        for name, tensor in policy.state_dict().items():
            yield name, gathered(tensor)
    else:
        yield from policy.named_parameters(remove_duplicate=False)
        yield from policy.named_buffers(remove_duplicate=False)


def require_merged_form(policy: Policy) -> None:
    """Refuse adapters that cannot be merged into the weights that are deployed.

    Raises:
        ValueError: an adapter cannot be merged; the message names it and what it adapts.
    """
    if not isinstance(policy, PeftModel):
        return
    adapter = policy.active_peft_config
    if adapter.is_prompt_learning:
        raise ValueError(
            f"peft_config of type {adapter.peft_type} learns a prompt and cannot be merged into the "
            "weights that are deployed: use LoRA or another adapter of the weights, or set deployment_scheme=None."
        )
    for name, module in policy.get_base_model().named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise ValueError(
                f"peft_config trains {name!r} through {type(module).__name__}, which has no merged form: "
                "train it through target_modules or modules_to_save, or set deployment_scheme=None."
            )
        if _is_packed_layer(module) and any((*module.lora_variant.values(), *module.lora_bias.values())):
            raise ValueError(
                f"peft_config adapts {name!r}, which load_in_4bit or load_in_8bit has packed, by more than a sum: use "
                "LoRA without variants (use_dora and the like) and without lora_bias, or load the weights unquantized."
            )


def _is_packed(tensor: Tensor) -> bool:
    return type(tensor).__name__ in _PACKED


def is_packed(policy: nn.Module) -> bool:
    """Return whether bitsandbytes has packed weights of a policy."""
    return any(map(_is_packed, policy.parameters()))


def _is_packed_layer(module: nn.Module) -> bool:
    """Return whether a module is a LoRA layer around weights that bitsandbytes has packed."""
    return isinstance(module, LoraLayer) and any(map(_is_packed, module.get_base_layer().parameters(recurse=False)))


def _unpacked(layer: nn.Module) -> Tensor:
    # On a CPU, bitsandbytes evaluates with another layout of the weights than dequantizing reads; saving restores it.
    layer.state_dict()
    return dequantize_module_weight(layer)


def _merged_tensors(module: nn.Module, prefix: str, adapters: bool) -> Iterator[tuple[str, Tensor]]:
    delta: Tensor | None = None
    if isinstance(module, BaseTunerLayer) and not adapters:
        module = module.get_base_layer()
    elif _is_packed_layer(module):
        adapter: Any = module
        module = adapter.get_base_layer()
        delta = torch.stack([adapter.get_delta_weight(name).float() for name in adapter.active_adapters]).sum(0)
    elif isinstance(module, BaseTunerLayer):
        # With `ensure_weight_tying` the keyword arguments of PEFT's layer hold views, which cannot be copied.
        memo = {id(module.kwargs): module.kwargs} if isinstance(module, LoraLayer) else {}
        module = copy.deepcopy(module, memo)
        # A sum in bfloat16 would be rounded once more before it is quantized.
        module.to(reduce(torch.promote_types, (parameter.dtype for parameter in module.parameters())))
        while isinstance(module, BaseTunerLayer):  # PEFT nests the adapters of several parameters of fused experts
            module.merge()
            module = module.base_layer
    elif isinstance(module, ModulesToSaveWrapper):
        module = module.modules_to_save[module.active_adapters[0]]
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        value = _unpacked(module) if _is_packed(tensor) else tensor
        yield prefix + name, value if delta is None or name != "weight" else value.float() + delta
    for name, child in module.named_children():
        yield from _merged_tensors(child, f"{prefix}{name}.", adapters)
