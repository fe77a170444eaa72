"""Plans the memory of a run from a model's configuration alone: what each training device holds.

The last row but one is what its process keeps on the host of the weights that sampled, if `discrepancy_split` or a
target asks for the lag's part: one copy of the trained tensors with `weight_sync_steps`, two with `rollout_overlap`,
and one more while a batch is scored with them.

python scripts/plan.py --model configs/models/qwen3_8b.json --device h100 --gpus 4
python scripts/plan.py --config qwen3_30b_a3b_fp8 --device h100 --gpus 16

It loads no weights and no engine, and starts nothing. docs/supported.md says what it covers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from dc_trl.config import DCGRPOConfig
from dc_trl.files import read_yaml
from dc_trl.quantization.schemes import fused_experts
from dc_trl.records.runs import json_value
from dc_trl.records.tables import print_table
from dc_trl.settings.command_line import OptionParser, add_fields, refused_in_one_line
from dc_trl.settings.fields import COUNT, require_fields, require_number, setting
from dc_trl.settings.paths import config_file, require_model_path, shipped
from dc_trl.settings.recipes import default_of


_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
Strategy = Literal["ddp", "fsdp2"]
# NVIDIA's data sheets of the SXM modules: A100 80GB, H100, H200, and HGX B200; bytes.
DEVICES = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "b200": 180e9}
# Our assumption: the CUDA context, NCCL's buffers and fragments of the allocator take the rest of a device.
USABLE = 0.92
# TRL's fused output head computes logits in tiles of so many tokens and vocabulary entries (trl/kernels).
_HEAD_TILE = (4096, 32768)
# Bytes of a number: in the weights that the optimizer updates, and in forward and backward.
PRECISIONS = {"mixed": (4, 2), "bfloat16": (2, 2), "float32": (4, 4)}
_PLANNED = {"use_vllm": True, "vllm_mode": "server", "use_peft": False, "beta": 0}  # what the formulas cover
# How the devices train: the strategy, and whether gradients are reduced after each micro-batch.
WAYS: dict[str, tuple[Strategy, bool]] = {
    "ddp": ("ddp", False),
    "fsdp2": ("fsdp2", False),
    "fsdp2, sync_each_batch": ("fsdp2", True),
}


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


@dataclass(frozen=True)
class Work:
    """What one device trains at once. The help of a field describes it.

    Raises:
        ValueError: names the field, its value and the remedy.
    """

    per_device_train_batch_size: Annotated[int, COUNT] = setting(1, "sequences that a device computes at once")
    gradient_accumulation_steps: Annotated[int, COUNT] = setting(16, "micro-batches of an optimizer step")
    max_prompt_length: Annotated[int, COUNT] = setting(2048, "tokens of the longest prompt")
    max_completion_length: Annotated[int, COUNT] = setting(8192, "tokens of the longest completion")
    checkpointing: Literal["true", "false"] = setting("true", "whether layers are computed again in backward")
    precision: Literal["mixed", "bfloat16", "float32"] = setting(
        "mixed", "of training: float32 weights with BF16 compute (mixed), or both in one format"
    )

    def __post_init__(self) -> None:
        require_fields(self)


def work_of_config(path: Path) -> tuple[dict[str, Any], str]:
    """Read the fields of `Work` that a training configuration sets, and the model that it names.

    Raises:
        ValueError: names the field, its value and the remedy.
        OSError: the file cannot be read.
    """
    config = {field.name: json_value(default_of(field)) for field in fields(DCGRPOConfig)}
    config |= {"dtype": "float32", "use_peft": False} | read_yaml(path)
    for name, planned in _PLANNED.items():
        if config[name] != planned:
            raise ValueError(
                f"{name}={config[name]!r}: the plan covers full training beside a vLLM server, without a reference "
                f"model. Set {name}: {planned}."
            )
    if "model_name_or_path" not in config:
        raise ValueError("model_name_or_path is not set: give a Hub id or a directory.")
    found = {field.name: config[field.name] for field in fields(Work) if config.get(field.name) is not None}
    found["precision"] = "bfloat16" if config["dtype"] == "bfloat16" else "mixed" if config["bf16"] else "float32"
    return found, config["model_name_or_path"]


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one device that trains. `total` is the peak: what stays, and the larger of what comes and goes."""

    weights: float
    gradients: float
    moments: float
    gathered: float  # layers that are whole for the moment, and buckets of gradients on their way
    activations: float  # of one micro-batch of the longest sequences
    head: float  # logits in tiles, and the gradient of the output head
    optimizer: float  # what the update needs for the moment, after the activations are gone

    @property
    def total(self) -> float:
        passing = max(self.gathered + self.activations + self.head, self.optimizer)
        return self.weights + self.gradients + self.moments + passing


def trainer_memory(
    model: Architecture, strategy: Strategy, devices: int, work: Work, sync_each_batch: bool = False
) -> TrainerMemory:
    """Return the bytes on each of the devices that train, with DDP, or with FSDP2 as accelerate sets it up.

    Args:
        model: sizes of the model.
        strategy: how the devices train.
        devices: number of the devices that train.
        work: what each of them computes.
        sync_each_batch: whether gradients are reduced after each micro-batch, not once in an optimizer step.
    """
    weight, compute = PRECISIONS[work.precision]
    scored = work.per_device_train_batch_size * work.max_completion_length
    tokens = work.per_device_train_batch_size * work.max_prompt_length + scored
    layer = layer_activations(model, compute) * tokens
    inputs = model.layers * tokens * model.hidden * compute
    layers = inputs + layer if work.checkpointing == "true" else model.layers * layer
    # The last hidden states with their gradient in float32, two tiles of logits, the head's gradient in float32.
    tile = min(scored, _HEAD_TILE[0]) * min(model.vocabulary, _HEAD_TILE[1])
    head = (4 + 2 * compute) * model.hidden * tokens + 2 * tile * compute + 4 * model.head_parameters
    if strategy == "ddp":
        size = float(weight * model.parameters)
        gradients = size
        # Autocast keeps the weights that it has cast until the forward ends; DDP's buckets hold the gradients again.
        gathered = (compute * model.parameters if weight != compute else 0) + (size if devices > 1 else 0)
    else:
        # accelerate casts trained weights to float32 before it shards them, unless nothing is mixed.
        size = (4 if compute == 2 else weight) * model.parameters / devices
        accumulated = work.gradient_accumulation_steps > 1 and not sync_each_batch
        gradients = size + (compute * model.parameters if accumulated else 0)
        # Two layers, since the next one is gathered ahead, and the gradient of one; embedding and head.
        outside = model.head_parameters * (1 if model.tied else 2)
        gathered = compute * (3 * model.layer_parameters + outside)
    return TrainerMemory(
        weights=size,
        gradients=gradients,
        moments=2 * size,
        gathered=gathered,
        activations=last_norm_activations(model, compute) * tokens + layers,
        head=head,
        optimizer=size,
    )


def layer_activations(model: Architecture, element: int) -> float:
    """Return the bytes that one layer keeps of each token for backward, without checkpointing, averaged over layers.

    They are those of transformers' layers: RMSNorm in float32, rotary embeddings, fused attention, a gated MLP.

    Args:
        model: sizes of the model.
        element: bytes of a number in compute.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms = 2 * ((4 + 2 * element) * model.hidden + 4)
    if model.query_key_norm:
        norms += (4 + element) * (queries + keys) + 4 * (model.heads + model.kv_heads)
    attention = element * 2 * (queries + keys) + 4 * model.heads
    dense = 4 * element * model.intermediate
    # Copies of the token for its experts, their products, what they give, and the router's probabilities.
    visits = model.active_experts * element * (2 * model.hidden + 4 * model.expert_width)
    sparse = visits + 4 * model.experts + 40 * model.active_experts
    share = model.sparse_layers / model.layers
    return norms + attention + (1 - share) * dense + share * sparse


def last_norm_activations(model: Architecture, element: int) -> float:
    """Return the bytes that the norm behind the layers keeps of each token."""
    return (4 + element) * model.hidden + 4


WORK = [field.name for field in fields(Work)]


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__)
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", default="h100", choices=DEVICES, help="kind of device (default: h100)")
    machine.add_argument("--gpus", type=int, default=8, help="devices that train (default: 8)")
    work = parser.add_argument_group("the work")
    work.add_argument("--model", type=shipped, help="Hub id, directory or config.json (default: that of --config)")
    work.add_argument("--revision", default="main", help="revision of a Hub model")
    work.add_argument("--config", help="training configuration, or the name of one that ships, as for dc-trl train")
    add_fields(work, Work, *WORK)
    parser.set_defaults(**dict.fromkeys(WORK))  # an option that is given replaces the configuration's value
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    with refused_in_one_line():
        require_number("gpus", args.gpus, COUNT)
        settings, of_config = ({}, None) if args.config is None else work_of_config(config_file(args.config))
        name = args.model or shipped(of_config or "")
        if not name:
            raise ValueError("model is not set: give --model, or --config with a model_name_or_path.")
        given = {field: value for field in WORK if (value := getattr(args, field)) is not None}
        work = Work(**settings | given)
        model = load_architecture(name, args.revision)
    memories = [trainer_memory(model, strategy, args.gpus, work, sync) for strategy, sync in WAYS.values()]
    usable = DEVICES[args.device] * USABLE
    rows = [
        [f"{part}, GB", *(f"{asdict(memory)[part] / 1e9:.1f}" for memory in memories)] for part in asdict(memories[0])
    ]
    rows.append(["peak, GB", *(f"{memory.total / 1e9:.1f}" for memory in memories)])
    rows.append(["on the host, a copy for the lag, GB", *(f"{memory.weights / 1e9:.1f}" for memory in memories)])
    rows.append(["fits", *("yes" if memory.total <= usable else "no" for memory in memories)])
    title = f"{name}: each of {args.gpus} training {args.device}, of which {usable / 1e9:.0f} GB are usable"
    print_table(["", *WAYS], rows, title)


if __name__ == "__main__":
    main()
