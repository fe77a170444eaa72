"""The policy without the wrappers of training, and its architecture without values."""

import copy
import math
from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import torch
from accelerate import Accelerator, init_empty_weights
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


Policy: TypeAlias = PreTrainedModel | PeftModel


def base_model(policy: Policy) -> PreTrainedModel:
    """Return the transformers model of a policy, without the PEFT model around it."""
    return policy.get_base_model() if isinstance(policy, PeftModel) else policy


def not_finite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first weight, or shard in this process, with a number that is not finite."""
    for name, weight in weights:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        # What bitsandbytes packs holds no numbers, and on the meta device there are none.
        known = local.is_floating_point() and local.numel() and not local.is_meta
        # The largest magnitude takes no memory, as `isfinite` of a large weight does.
        if known and not math.isfinite(torch.linalg.vector_norm(local.detach(), math.inf)):
            return name
    return None


def require_finite(policy: nn.Module) -> None:
    """Refuse a policy with a weight that is not finite, from which nothing can be sampled.

    Raises:
        ValueError: names the weight.
    """
    if (name := not_finite(policy.named_parameters())) is not None:
        raise ValueError(
            f"model: its weight {name} is not finite, as a run that diverged leaves it: give a checkpoint of before."
        )


def with_positions(options: dict[str, Any]) -> dict[str, Any]:
    """Return a model's arguments with positions counted from each prompt's first token, as engines count them.

    TRL counts padding too. Rotary embeddings depend on distances alone, but they round differently in bfloat16.
    """
    mask = options.get("attention_mask")
    if mask is None or mask.ndim != 2 or options.get("position_ids") is not None:
        return options
    return options | {"position_ids": (mask.long().cumsum(1) - 1).masked_fill(mask == 0, 0)}


def unwrapped(accelerator: Accelerator, model: nn.Module) -> Policy:
    """Return the policy without accelerate's wrappers and torch.compile's module, which renames its tensors."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor whole, in every process, where FSDP2 has divided it among the processes."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Shards that FSDP2 keeps in CPU memory are gathered on the devices that compute, because NCCL needs them there.
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()


def shares_embeddings(policy: Policy) -> bool:
    """Return whether input embedding and output head are one matrix, adapters included.

    `tie_word_embeddings` makes them one. An adapter on one of the two, or a trained copy of one (`modules_to_save`),
    separates them; with PEFT's `ensure_weight_tying` both read the same tensors and stay one.
    """
    base = base_model(policy)
    embedding, head = (_identities(module) for module in (base.get_input_embeddings(), base.get_output_embeddings()))
    return embedding == head


def require_shared_embeddings(policy: Policy) -> None:
    """Refuse an adapter that separates an embedding and an output head that are tied in the configuration.

    Raises:
        ValueError: an adapter separates them where the engine, or TRL's merge in place, has one matrix.
    """
    tied = base_model(policy).config.tie_word_embeddings
    if isinstance(policy, PeftModel) and tied and not shares_embeddings(policy):
        raise ValueError(
            "peft_config separates the input embedding from the output head, which tie_word_embeddings=True makes one "
            "matrix in this engine. Use vllm_mode='colocate' with deployment_scheme (for example 'bf16') or, without "
            "sharding, the in-process replica, keep both out of target_modules and modules_to_save, or save them as "
            "one (modules_to_save=['embed_tokens'], ensure_weight_tying=True)."
        )


def _identities(module: nn.Module) -> set[int]:
    """Return identities of the parameters of a module, without biases: their addresses, or the shards' object ids."""
    parameters = [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]
    return {parameter.data_ptr() or id(parameter) for parameter in parameters}


def empty_copy(policy: Policy) -> PreTrainedModel:
    """Return the base architecture of a policy on the meta device, with names, shapes and dtypes but without values.

    The dtypes are those of the deployed policy, as transformers loads it in bfloat16: some architectures keep small
    tensors in float32, such as the bias that chooses DeepSeek's experts, and some compute buffers in the dtype of the
    model. Its embedding and output head are one tensor only where the policy's are. It is built without drawing from
    the random state that a training run continues from.
    """
    base = base_model(policy)
    config = copy.deepcopy(base.config)
    config.use_cache = True
    vars(config).pop("quantization_config", None)  # a base that bitsandbytes has packed has no values here
    if not shares_embeddings(policy):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.dtype = config.get_text_config().dtype = torch.bfloat16
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
            model = type(base)(config)
    finally:
        torch.set_default_dtype(default)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            exact = any(part in name for part in model._keep_in_fp32_modules_strict)
            tensor.data = tensor.data.to(torch.float32 if exact else torch.bfloat16)
    return model
