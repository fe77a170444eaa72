"""Bytes on one device that trains: weights, gradients and moments under each way to shard them, activations, head.

The formulas are those of docs/planning.md.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .architecture import Architecture


Strategy = Literal["ddp", "fsdp2", "zero2", "zero3"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "zero2", "zero3")
# TRL's fused output head computes logits in tiles of so many tokens and vocabulary entries (trl/kernels).
_HEAD_TILE = (4096, 32768)
_ZERO3_LIVE = 10**9  # DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one device. The peak is `total`: what stays, and the larger of what comes and goes.

    Args:
        weights, gradients, moments: what stays through a step. With FSDP2, gradients that are accumulated without
            being reduced are whole on every device.
        gathered: layers that are whole for the moment, and buckets of gradients on their way.
        activations: of one micro-batch of the longest sequences.
        head: logits in tiles and the gradient of the output head.
        optimizer: what the update needs for the moment, after the activations are gone.
        replica: the in-process copy that samples.
    """

    weights: float
    gradients: float
    moments: float
    gathered: float
    activations: float
    head: float
    optimizer: float
    replica: float

    @property
    def total(self) -> float:
        passing = max(self.gathered + self.activations + self.head, self.optimizer)
        return self.weights + self.gradients + self.moments + self.replica + passing


@dataclass(frozen=True)
class TrainingPrecision:
    """Bytes of a number: of the weights that the optimizer steps, and of what forward and backward compute with."""

    weight: int
    compute: int


class MicroBatch(NamedTuple):
    """What one device computes at once.

    Args:
        sequences: of the micro-batch.
        tokens: of the longest sequence, prompt included.
        scored: tokens of its completion.
        accumulated: an optimizer step has further micro-batches, and gradients are not reduced between them.
    """

    sequences: int
    tokens: int
    scored: int
    accumulated: bool


BF16_COMPUTE = TrainingPrecision(weight=4, compute=2)
BF16_ALL = TrainingPrecision(weight=2, compute=2)
FLOAT32 = TrainingPrecision(weight=4, compute=4)


def layer_activations(model: Architecture, element: int) -> float:
    """Bytes that one layer keeps of each token for backward, without checkpointing, averaged over layers.

    They are those of transformers' layers: RMSNorm in float32, rotary embeddings, fused attention, a gated MLP.

    Args:
        model: sizes.
        element: bytes of a number in compute.
    """
    h, q, kv = model.hidden, model.query_width, model.kv_width
    norms = 2 * ((4 + 2 * element) * h + 4)
    query_key_norms = (4 + element) * (q + kv) + 4 * (model.heads + model.kv_heads) if model.query_key_norm else 0
    attention = element * (2 * q + 2 * kv) + 4 * model.heads
    dense = 4 * element * model.intermediate
    # Copies of the token for its experts, their products, what they give, and the router's probabilities.
    visits = model.active_experts * element * (2 * model.hidden + 4 * model.expert_width)
    sparse = visits + 4 * model.experts + 40 * model.active_experts
    share = model.sparse_layers / model.layers
    return norms + query_key_norms + attention + (1 - share) * dense + share * sparse


def last_norm(model: Architecture, element: int) -> float:
    """Bytes that the norm behind the layers keeps of each token."""
    return (4 + element) * model.hidden + 4


def trainer_memory(
    model: Architecture,
    strategy: Strategy,
    devices: int,
    micro: MicroBatch,
    *,
    precision: TrainingPrecision,
    checkpointing: bool,
    replica: bool = False,
) -> TrainerMemory:
    """Bytes on each device.

    Args:
        model: sizes.
        strategy: DDP, FSDP2 as accelerate sets it up, DeepSpeed ZeRO stage 2 or 3.
        devices: that train.
        micro: what one device computes at once.
        precision: of weights and compute. FSDP2 and DeepSpeed keep float32 weights beside a compute of 2 bytes.
        checkpointing: layers keep their input alone, and are computed again in backward.
        replica: whether the in-process replica samples.
    """
    element = precision.compute
    batch = micro.sequences * micro.tokens
    per_layer = layer_activations(model, element) * batch
    inputs = model.layers * batch * model.hidden * element
    last = last_norm(model, element) * batch
    activations = last + (inputs + per_layer if checkpointing else model.layers * per_layer)
    # The last hidden states with their gradient in float32, two tiles of logits, the head's gradient in float32.
    tile = min(micro.sequences * micro.scored, _HEAD_TILE[0]) * min(model.vocabulary, _HEAD_TILE[1])
    head = (4 + 2 * element) * model.hidden * batch + 2 * tile * element + 4 * model.head_parameters
    if strategy == "ddp":
        states = _replicated(model, devices, precision)
    elif strategy == "fsdp2":
        states = _fully_sharded(model, devices, precision, micro.accumulated)
    else:
        states = _zero(model, devices, 2 if strategy == "zero2" else 3)
    copy = float(element * model.parameters) if replica else 0.0
    return TrainerMemory(**states._asdict(), activations=activations, head=head, replica=copy)


class _States(NamedTuple):
    """Fields of `TrainerMemory` that depend on how the model is sharded."""

    weights: float
    gradients: float
    moments: float
    gathered: float
    optimizer: float


def _replicated(model: Architecture, devices: int, precision: TrainingPrecision) -> _States:
    size = precision.weight * model.parameters
    # Autocast keeps the weights that it has cast until the forward ends; DDP's buckets hold the gradients again.
    cast = precision.compute * model.parameters if precision.weight != precision.compute else 0
    return _States(size, size, 2 * size, cast + (size if devices > 1 else 0), size)


def _fully_sharded(model: Architecture, devices: int, precision: TrainingPrecision, accumulated: bool) -> _States:
    # accelerate casts trained weights to float32 before it shards them, unless nothing is mixed.
    size = (4 if precision.compute == 2 else precision.weight) * model.parameters / devices
    whole = precision.compute * model.parameters if accumulated else 0
    outside = model.head_parameters * (1 if model.tied else 2)
    # Two layers, since the next one is gathered ahead, and the gradient of one; embedding and head.
    gathered = precision.compute * (3 * model.layer_parameters + outside)
    return _States(size, size + whole, 2 * size, gathered, size)


def _zero(model: Architecture, devices: int, stage: int) -> _States:
    """DeepSpeed's BF16 engine: weights and gradients in 2 bytes; float32 weights and moments, which are sharded."""
    count = model.parameters
    weights = 2 * count / (1 if stage == 2 else devices) + 4 * count / devices
    live = model.layer_parameters if stage == 2 else max(model.layer_parameters, min(count, _ZERO3_LIVE))
    return _States(weights, 2 * count / devices, 8 * count / devices, 2 * live, 4 * count / devices)
