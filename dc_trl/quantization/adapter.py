"""A LoRA adapter that stays beside its quantized base, as vLLM serves it: arithmetic, files, and what is refused.

An adapted layer computes Q(W)·x + s·B·(A·x), where only the first product is quantized.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ..settings.paths import lora_options
from .policy import Policy, base_model


def beside_base(inputs: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return s·B·(A·x) as vLLM computes it (vllm/lora/punica_wrapper/punica_cpu.py).

    A and B are bfloat16 there, and B contains s. A·x is summed up in float32 and rounded for the second product.

    Args:
        inputs: x as the layer gets it, before its activations are quantized, shape (..., channels), bfloat16.
        a, b: of shapes (rank, channels) and (outputs, rank), any floating dtype; gradients pass their rounding.
        scaling: s.
    """
    low = functional.linear(inputs.float(), a.to(torch.bfloat16).float())
    return functional.linear(low.to(torch.bfloat16), b.to(torch.bfloat16) * scaling).to(inputs.dtype)


def lora_terms(policy: PeftModel) -> Iterator[tuple[str, tuple[Tensor, Tensor, float]]]:
    """Yield the name of each adapted layer in the base architecture, and A, B and s of its active adapter."""
    for name, module in policy.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            yield from ((name, term) for term in active_terms(module))


def active_terms(layer: Any) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield A, B and s of each active adapter of one of PEFT's layers; none while its adapters are switched off."""
    if not layer.disable_adapters and not layer.merged:
        for name in layer.active_adapters:
            if name in layer.lora_A:
                yield layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


def require_adapter_beside(policy: Policy | str) -> int:
    """Refuse what vLLM cannot serve as an adapter beside its base, and return the adapter's rank.

    Args:
        policy: a policy, or the name of a model, which has no adapter.

    Raises:
        ValueError: the policy has no adapter, or one that vLLM does not take; the message names it and the remedy.
    """

    def refuse(what: str, remedy: str) -> ValueError:
        return ValueError(f"lora_deployment='adapter': {what}: {remedy}, or set lora_deployment='merged'.")

    if not isinstance(policy, PeftModel):
        raise refuse("the policy has no adapter", "pass a peft_config (use_peft=true)")
    base, name_of_adapter = base_model(policy), policy.active_adapter
    terms = set()
    for name, module in base.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise refuse(f"peft_config trains a copy of {name!r}", "leave modules_to_save and the like out")
        if not isinstance(module, BaseTunerLayer):
            continue
        adapted: Any = module
        plain = isinstance(module, LoraLayer) and isinstance(adapted.get_base_layer(), nn.Linear)
        if not plain or isinstance(module, ParamWrapper) or module is base.get_output_embeddings():
            raise refuse(f"peft_config adapts {name!r}", "adapt linear layers of the decoder by LoRA alone")
        if name.endswith("kv_b_proj"):  # which vLLM's attention reads once, when it loads the base
            raise refuse(f"peft_config adapts {name!r}", "leave kv_b_proj out (exclude_modules)")
        if any((*adapted.lora_variant.values(), *adapted.lora_bias.values())):
            raise refuse(f"peft_config adapts {name!r} by more than s·B·A", "leave use_dora and lora_bias out")
        if name_of_adapter in adapted.lora_A:
            terms.add((adapted.r[name_of_adapter], adapted.scaling[name_of_adapter]))
    if len(terms) != 1:
        raise refuse("the adapter has no common rank and scale", "use LoRA without rank_pattern and alpha_pattern")
    config: Any = policy.active_peft_config
    if config.bias != "none":
        raise refuse(f"peft_config trains biases (bias={config.bias!r}), which vLLM does not load", "set bias='none'")
    ((rank, _),) = terms
    lora_options(rank)
    return rank


def write_adapter(policy: PeftModel, directory: Path) -> int:
    """Write the active adapter of a policy in PEFT's layout, in bfloat16 as it is served; return its size in bytes.

    Args:
        policy: a policy that `require_adapter_beside` accepts.
        directory: new directory, whose parent must exist.
    """
    name = policy.active_adapter
    tensors = get_peft_model_state_dict(policy, adapter_name=name, save_embedding_layers=False)
    directory.mkdir()
    stored = {key: value.detach().to(torch.bfloat16).contiguous().cpu() for key, value in tensors.items()}
    save_file(stored, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    policy.peft_config[name].save_pretrained(directory)
    return sum(file.stat().st_size for file in directory.iterdir())
