"""The policy as it is deployed: its architecture without values, and its weights with adapters merged."""

import copy
from collections.abc import Iterator

import torch
from accelerate import Accelerator, init_empty_weights
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def base_model(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers model of a policy, without the PEFT model around it."""
    return policy.get_base_model() if isinstance(policy, PeftModel) else policy


def unwrapped(accelerator: Accelerator, model: nn.Module) -> PreTrainedModel | PeftModel:
    """The policy without what accelerate put around it; without torch.compile's module, which renames its tensors."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def shares_embeddings(policy: PreTrainedModel | PeftModel) -> bool:
    """Whether input embedding and output head are one matrix, adapters included.

    An adapter on one of the two, or a trained copy of one (`modules_to_save`), parts what `tie_word_embeddings` ties.
    PEFT's `ensure_weight_tying` keeps them one: both then read the same tensors.
    """
    base = base_model(policy)
    embedding, head = (_matrices(module) for module in (base.get_input_embeddings(), base.get_output_embeddings()))
    return embedding == head


def require_shared_embeddings(policy: PreTrainedModel | PeftModel, reason: str, remedy: str) -> None:
    """Refuses an adapter that parts what the model's configuration ties, where only one matrix can be taken.

    Raises:
        ValueError: with the reason and the remedy.
    """
    tied = base_model(policy).config.tie_word_embeddings
    if isinstance(policy, PeftModel) and tied and not shares_embeddings(policy):
        raise ValueError(
            "peft_config parts the input embedding from the output head, which tie_word_embeddings=True makes one "
            f"matrix, and {reason}. {remedy}, keep both out of target_modules and modules_to_save, or save them as "
            "one (modules_to_save=['embed_tokens'], ensure_weight_tying=True)."
        )


def _matrices(module: nn.Module) -> set[int]:
    """Where in memory the parameters of a module lie, without biases; of sharded ones, the objects that they are."""
    parameters = [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]
    return {parameter.data_ptr() or id(parameter) for parameter in parameters}


def end_tokens(policy: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens that end a completion: the model's and the tokenizer's, as in TRL's trainer and in vLLM.

    Raises:
        ValueError: neither has one.
    """
    config = base_model(policy).generation_config
    declared = None if config is None else config.eos_token_id
    ids = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.insert(0, tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "eos_token_id=None in the tokenizer and in the model's generation_config: set one, no completion would "
            "ever end."
        )
    return ids


def pad_token(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> int:
    """Id that fills prompts and completions up: the tokenizer's, or an end token where it has none."""
    return ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def empty_copy(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The base architecture of a policy, on the meta device: names and shapes, no values.

    Its embedding and output head are one tensor only where the policy's are. Built without drawing from the random
    state that a training run continues from.
    """
    base = base_model(policy)
    config = copy.deepcopy(base.config)
    config.use_cache = True
    if not shares_embeddings(policy):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        return type(base)(config)


def policy_tensors(policy: PreTrainedModel | PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a policy as its base architecture names them, adapters merged.

    The policy itself is not touched: each adapted layer is merged in a copy, one at a time, because merging in place
    and unmerging again would leave rounding errors in the weights that are being trained.

    Args:
        policy: a transformers model, or a PEFT model around one.

    Yields:
        (name, tensor); a tensor that two modules share is yielded under both names.

    Raises:
        ValueError: the adapter has no merged form.
    """
    if not isinstance(policy, PeftModel):
        yield from policy.named_parameters(remove_duplicate=False)
        yield from policy.named_buffers(remove_duplicate=False)
        return
    adapter = policy.active_peft_config
    if adapter.is_prompt_learning:
        raise ValueError(
            f"peft_config of type {adapter.peft_type} learns a prompt and cannot be merged into the "
            "weights that are deployed: use LoRA or another adapter of the weights, or set deployment_scheme=None."
        )
    yield from _merged_tensors(policy.get_base_model(), "")


def _merged_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, BaseTunerLayer):
        # Not what PEFT built it from: with `ensure_weight_tying` that holds views, which cannot be copied.
        built_from = {id(module.kwargs): module.kwargs} if isinstance(module, LoraLayer) else {}
        module = copy.deepcopy(module, built_from)
        while isinstance(module, BaseTunerLayer):  # of fused experts, an adapter for each parameter around the next
            module.merge()
            module = module.base_layer
    elif isinstance(module, ModulesToSaveWrapper):
        module = module.modules_to_save[module.active_adapters[0]]
    elif isinstance(module, AuxiliaryTrainingWrapper):
        raise ValueError(
            f"peft_config trains {prefix.rstrip('.')!r} through {type(module).__name__}, which has no merged form: "
            "train it through target_modules or modules_to_save, or set deployment_scheme=None."
        )
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield prefix + name, tensor
    for name, child in module.named_children():
        yield from _merged_tensors(child, f"{prefix}{name}.")
