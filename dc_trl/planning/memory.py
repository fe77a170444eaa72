"""The work of a training device and its bytes; docs/gpu.md has sources, and runs beside the formulas."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from ..config import DCGRPOConfig
from ..files import read_yaml
from ..records.settings import default_of, json_value
from ..settings.fields import require_fields, setting
from ..settings.ranges import COUNT
from .architecture import Architecture


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
