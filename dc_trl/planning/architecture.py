"""What a plan has to know of a model: its matrices and its attention, read from its configuration alone."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..files import read_object
from ..quantization.schemes import fused_experts, quantized_linears
from ..settings.pretrained import require_model


_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder with softmax attention, dense or a mixture of experts. Counts are of numbers, not bytes.

    Args:
        name: as the user and the engines call the model.
        hidden, layers, vocabulary: width, depth, tokens.
        heads, kv_heads, head_dim: of attention, for queries and for keys and values.
        intermediate: width of a dense layer's MLP, 0 where no layer is dense.
        experts, active_experts, expert_width: of a sparse layer, and those that a token visits; 0 in a dense model.
        sparse_layers: layers with experts.
        windows: for each layer the tokens that its attention sees, None for all.
        query_key_norm: whether queries and keys are normalised.
        tied: whether embedding and output head are one matrix.
        parameters: all of them, a shared one once.
        layer_parameters: of the largest decoder layer, which FSDP2 gathers at once.
        linear: of the matrices that every token meets once, without the output head.
        quantized: (rows, columns, how many) of the matrices that a deployment scheme quantizes.
        positions: the longest sequence that the model takes.
        layer_class: name of the class of its layers, as FSDP wraps them.
    """

    name: str
    hidden: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int
    active_experts: int
    expert_width: int
    sparse_layers: int
    windows: tuple[int | None, ...]
    query_key_norm: bool
    tied: bool
    parameters: int
    layer_parameters: int
    linear: int
    quantized: tuple[tuple[int, int, int], ...]
    positions: int
    layer_class: str

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def head_parameters(self) -> int:
        """Of the output head, which multiplies whether it is tied or not."""
        return self.vocabulary * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of all experts of all layers."""
        return self.sparse_layers * self.experts * 3 * self.hidden * self.expert_width

    @property
    def active_linear(self) -> int:
        """Of the matrices that one token meets, experts included, without the output head."""
        return self.linear + self.sparse_layers * self.active_experts * 3 * self.hidden * self.expert_width

    @property
    def active_parameters(self) -> int:
        """Parameters without the experts that a token does not visit: the second number of a name like 30B-A3B."""
        return self.parameters - self.expert_parameters + self.active_linear - self.linear

    @property
    def has_experts(self) -> bool:
        return self.experts > 0


def load_architecture(model: str, revision: str = "main") -> Architecture:
    """Reads a model's configuration, and nothing else of it.

    Args:
        model: Hub id, directory, or a configuration file (JSON) like a model's config.json.
        revision: of a Hub model.

    Raises:
        ValueError: there is no such model, or one whose cost is not known here.
    """
    path = Path(model).expanduser()
    if path.is_file():
        settings = read_object(path)
        if "model_type" not in settings:
            raise ValueError(f"model={model!r} has no model_type: give a model's config.json.")
        kind = settings.pop("model_type")
        try:
            config = AutoConfig.for_model(kind, **settings)
        except (ValueError, TypeError) as error:
            raise ValueError(f"model={model!r} cannot be read: {error}") from error
        return architecture_of(config, settings.get("_name_or_path") or model)
    require_model(model, "model")
    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"model={model!r} cannot be loaded: {reason} Give the path of its config.json in its place."
        ) from error
    return architecture_of(config, os.fspath(model))


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration on the meta device: names and shapes, no values."""
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def architecture_of(config: PreTrainedConfig, name: str) -> Architecture:
    """The sizes of a configuration's model.

    Raises:
        ValueError: names the configuration's field that is not known here.
    """
    text = config.get_text_config()
    _require_known(text, name)
    try:
        model = empty_model(config)
    except ValueError as error:
        raise ValueError(f"model={name!r} is no causal language model: {str(error).splitlines()[0]}") from error
    experts = fused_experts(model)
    linears = {key: each for key, each in model.named_modules() if isinstance(each, nn.Linear)}
    head = model.get_output_embeddings()
    routers = _router_matrices(model, set(experts))
    shapes: Counter[tuple[int, int]] = Counter()
    for linear in quantized_linears(model).values():
        shapes[linear.out_features, linear.in_features] += 1
    count = width = 0
    for block in experts.values():
        rows = dict(block.named_parameters(recurse=False))
        count, columns, width = rows["down_proj"].shape
        for weight in (*rows["gate_up_proj"].chunk(2, 1), rows["down_proj"]):
            shapes[weight.shape[1], weight.shape[2]] += count
        assert columns == text.hidden_size
    layers = next(
        each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == text.num_hidden_layers
    )
    dense = len(experts) < text.num_hidden_layers
    return Architecture(
        name=name,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=head.weight.shape[0],
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=_head_dim(text),
        intermediate=text.intermediate_size if dense else 0,
        experts=count,
        active_experts=text.num_experts_per_tok if experts else 0,
        expert_width=width,
        sparse_layers=len(experts),
        windows=_windows(text),
        query_key_norm=any(key.endswith(("q_norm", "q_layernorm")) for key, _ in model.named_modules()),
        tied=text.tie_word_embeddings,
        parameters=model.num_parameters(),
        layer_parameters=max(map(_count, layers)),
        linear=sum(each.weight.numel() for each in linears.values() if each is not head) + routers,
        quantized=tuple((*shape, number) for shape, number in sorted(shapes.items())),
        positions=text.max_position_embeddings,
        layer_class=type(layers[0]).__name__,
    )


def _require_known(text: PreTrainedConfig, name: str) -> None:
    values = text.to_dict()
    if values.get("kv_lora_rank"):
        raise ValueError(
            f"model={name!r} compresses its keys and values (kv_lora_rank={values['kv_lora_rank']}), and the plan "
            "knows attention with heads × head_dim numbers for a token: plan a Qwen3, a Llama, a Mistral or their kin."
        )
    unknown = set(values.get("layer_types") or ()) - _KNOWN_LAYERS
    missing = {"num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"} - values.keys()
    if unknown or missing:
        what = f"layers of type {', '.join(sorted(unknown))}" if unknown else f"no {', '.join(sorted(missing))}"
        raise ValueError(
            f"model={name!r} has {what}, and the plan knows decoders with softmax attention: plan a Qwen3, a Llama, a "
            "Mistral or their kin."
        )


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _head_dim(text: PreTrainedConfig) -> int:
    # Optional in configurations: Qwen2 has none.
    return text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads


def _windows(text: PreTrainedConfig) -> tuple[int | None, ...]:
    values = text.to_dict()
    kinds = values.get("layer_types") or ["full_attention"] * text.num_hidden_layers
    window = values.get("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _router_matrices(model: PreTrainedModel, experts: set[str]) -> int:
    """Numbers of the routers, which transformers keeps as modules of their own kind and not as Linear layers."""
    count = 0
    for name in experts:
        block = model.get_submodule(name.rpartition(".")[0])
        for key, child in block.named_children():
            if key in ("gate", "router") and not isinstance(child, nn.Linear):
                count += sum(each.numel() for each in child.parameters(recurse=False) if each.ndim == 2)
    return count
