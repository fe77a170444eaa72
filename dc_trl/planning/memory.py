"""Bytes of a training device and of a checkpoint; docs/planning.md has formulas and sources."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..quantization.schemes import require_served_scheme
from .architecture import Architecture


Strategy = Literal["ddp", "fsdp2"]
# NVIDIA's data sheets of the SXM modules: A100 80GB, H100, H200, and HGX B200; bytes.
DEVICES = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "b200": 180e9}
# Our assumption: the CUDA context, NCCL's buffers and fragments of the allocator take the rest of a device.
USABLE = 0.92
# TRL's fused output head computes logits in tiles of so many tokens and vocabulary entries (trl/kernels).
_HEAD_TILE = (4096, 32768)


def checkpoint_bytes(model: Architecture, scheme: str) -> int:
    """Return the bytes of the tensors in the checkpoint that `quantization.checkpoint.CheckpointWriter` writes.

    Names of tensors and JSON files take some kilobytes more for each layer.

    Args:
        model: sizes of the model.
        scheme: a deployment scheme that engines serve.

    Raises:
        ValueError: there is no such scheme.
    """
    require_served_scheme(scheme)
    quantized = sum(rows * columns * number for rows, columns, number in model.quantized)
    matrices = sum(number * _matrix_bytes(scheme, rows, columns, model) for rows, columns, number in model.quantized)
    return 2 * (model.parameters - quantized) + matrices


def _matrix_bytes(scheme: str, rows: int, columns: int, model: Architecture) -> int:
    """Return the bytes of a matrix as compressed-tensors stores it: codes and scales, and the shape of packed ones."""
    if scheme == "bf16":
        return 2 * rows * columns
    if scheme in ("fp8", "int8"):
        return rows * columns + 4 * rows  # a float32 scale for each row
    if scheme == "fp8_block":
        return rows * columns + 4 * math.ceil(rows / 128) * math.ceil(columns / 128)
    narrow = scheme == "int4_g32" or any(each % 128 for _, each, _ in model.quantized)
    group = 32 if narrow else 128
    return rows * math.ceil(columns / 8) * 4 + 4 * rows * (columns // group) + 16


class Precision(NamedTuple):
    """Bytes of a number: in the weights that the optimizer updates, and in forward and backward."""

    weight: int
    compute: int


PRECISIONS = {"mixed": Precision(4, 2), "bfloat16": Precision(2, 2), "float32": Precision(4, 4)}


@dataclass(frozen=True)
class MicroBatch:
    """What one device computes at once, and how."""

    sequences: int
    tokens: int  # of the longest sequence, with its prompt
    scored: int  # tokens of its completion
    accumulated: bool  # gradients wait for further micro-batches of the optimizer step before they are reduced
    precision: Precision  # of weights and compute; FSDP2 keeps float32 weights beside a compute of 2 bytes
    checkpointing: bool  # layers keep their input alone, and are computed again in backward


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


def trainer_memory(model: Architecture, strategy: Strategy, devices: int, micro: MicroBatch) -> TrainerMemory:
    """Return the bytes on each of the devices that train, with DDP, or with FSDP2 as accelerate sets it up."""
    weight, compute = micro.precision
    tokens = micro.sequences * micro.tokens
    layer = layer_activations(model, compute) * tokens
    inputs = model.layers * tokens * model.hidden * compute
    layers = inputs + layer if micro.checkpointing else model.layers * layer
    # The last hidden states with their gradient in float32, two tiles of logits, the head's gradient in float32.
    tile = min(micro.sequences * micro.scored, _HEAD_TILE[0]) * min(model.vocabulary, _HEAD_TILE[1])
    head = (4 + 2 * compute) * model.hidden * tokens + 2 * tile * compute + 4 * model.head_parameters
    if strategy == "ddp":
        size = float(weight * model.parameters)
        gradients = size
        # Autocast keeps the weights that it has cast until the forward ends; DDP's buckets hold the gradients again.
        gathered = (compute * model.parameters if weight != compute else 0) + (size if devices > 1 else 0)
    else:
        # accelerate casts trained weights to float32 before it shards them, unless nothing is mixed.
        size = (4 if compute == 2 else weight) * model.parameters / devices
        gradients = size + (compute * model.parameters if micro.accumulated else 0)
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
