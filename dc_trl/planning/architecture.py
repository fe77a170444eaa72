"""Reads what a plan has to know about a model, its matrices and attention, from the configuration alone."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..quantization.schemes import fused_experts
from ..settings.paths import require_model_path


_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder with softmax attention, dense or a mixture of experts. All counts are of numbers."""

    hidden: int
    layers: int
    vocabulary: int  # rows of the output head
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of a dense layer's MLP, 0 where no layer is dense
    experts: int  # of a sparse layer, 0 in a dense model
    active_experts: int  # that a token visits in a sparse layer
    expert_width: int
    sparse_layers: int  # number of layers that have experts
    query_key_norm: bool
    tied: bool  # embedding and output head are one matrix
    parameters: int  # of the whole model; a shared one counts once
    layer_parameters: int  # of the largest decoder layer, which FSDP2 gathers at once

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, tied or not."""
        return self.vocabulary * self.hidden


def load_architecture(model: str, revision: str = "main") -> Architecture:
    """Read the sizes of a model from its configuration, and nothing else of it.

    Args:
        model: Hub id, directory, or a configuration file (JSON) like a model's config.json.
        revision: revision of a Hub model.

    Raises:
        ValueError: there is no such model, or its memory is not known here.
    """
    path = Path(model).expanduser()
    if not path.is_file():
        require_model_path(model, "model")
    try:
        config = AutoConfig.from_pretrained(path if path.is_file() else model, revision=revision)
    except (OSError, ValueError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"model={model!r} cannot be loaded: {reason} Give the path of its config.json.") from error
    return architecture_of(config, model)


def architecture_of(config: PreTrainedConfig, name: str) -> Architecture:
    """Return the sizes of a configuration's model, which transformers builds without values.

    Raises:
        ValueError: the model has keys, values or layers that the formulas do not cover.
    """
    text = config.get_text_config()
    values = text.to_dict()
    unknown = set(values.get("layer_types") or ()) - _KNOWN_LAYERS
    if unknown or values.get("kv_lora_rank"):
        kinds = ", ".join(sorted(unknown)) or "compressed keys and values (kv_lora_rank)"
        raise ValueError(
            f"model={name!r} has {kinds}, and the plan knows decoders with softmax attention that keep heads × "
            "head_dim numbers of a token: plan a Qwen3, a Llama, a Mistral or a model like them."
        )
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    experts = fused_experts(model)
    shapes = [dict(block.named_parameters(recurse=False))["down_proj"].shape for block in experts.values()]
    layers = next(
        each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == text.num_hidden_layers
    )
    return Architecture(
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        # Optional in configurations: Qwen2 has none.
        head_dim=values.get("head_dim") or text.hidden_size // text.num_attention_heads,
        intermediate=text.intermediate_size if len(experts) < text.num_hidden_layers else 0,
        experts=shapes[0][0] if shapes else 0,
        active_experts=text.num_experts_per_tok if experts else 0,
        expert_width=shapes[0][2] if shapes else 0,
        sparse_layers=len(experts),
        query_key_norm=any(key.endswith(("q_norm", "q_layernorm")) for key, _ in model.named_modules()),
        tied=text.tie_word_embeddings,
        parameters=model.num_parameters(),
        layer_parameters=max(sum(weight.numel() for weight in layer.parameters()) for layer in layers),
    )
