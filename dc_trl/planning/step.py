"""The time of one iteration (a generation batch, and the optimizer steps on it), part by part, for one layout."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .architecture import Architecture
from .deployed import checkpoint_bytes
from .devices import Assumptions, Device
from .flops import forward_flops, sequence_moments, training_flops
from .lengths import Batching, Lengths, Moments
from .memory import MicroBatch, Strategy, TrainerMemory, TrainingPrecision, trainer_memory
from .sampling import Engine


Transport = Literal["memory", "shared", "nccl"]


@dataclass(frozen=True)
class Workload:
    """What is to be done, whatever the devices.

    Args:
        completions: of a generation batch.
        completions_per_step: of an optimizer step.
        generations: completions of a prompt.
        iterations: passes over a generation batch.
        prompt, longest_prompt: tokens, on average and at most.
        lengths: of completions.
        scheme: that the engine serves.
        precision, checkpointing: of training.
        batching: how far completions are padded.
    """

    completions: int
    completions_per_step: int
    generations: int
    iterations: int
    prompt: int
    longest_prompt: int
    lengths: Lengths
    scheme: str
    precision: TrainingPrecision
    checkpointing: bool
    batching: Batching

    @property
    def optimizer_steps(self) -> int:
        """In one iteration."""
        return self.completions // self.completions_per_step * self.iterations

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.longest_prompt + self.lengths.cap


@dataclass(frozen=True)
class Layout:
    """Who does it.

    Args:
        strategy, train_devices, micro_batch: of training.
        reduce_each: with FSDP2, gradients are reduced after each micro-batch (`sync_each_batch`), and not accumulated
            whole on every device.
        tensor_parallel, replicas: of sampling.
        devices_per_node: what one node has.
        transport: how new weights reach the engines.
    """

    strategy: Strategy
    train_devices: int
    micro_batch: int
    reduce_each: bool
    tensor_parallel: int
    replicas: int
    devices_per_node: int
    transport: Transport

    @property
    def train_nodes(self) -> int:
        return -(-self.train_devices // self.devices_per_node)

    @property
    def serving_devices(self) -> int:
        return self.tensor_parallel * self.replicas

    @property
    def serving_nodes(self) -> int:
        return -(-self.serving_devices // self.devices_per_node)


class Parts(NamedTuple):
    """Seconds of the parts of an iteration. Rewards are not among them: they depend on the user's functions."""

    generation: float
    old_logps: float
    loss: float
    optimizer: float
    sync: float

    def total(self, overlap: bool = False) -> float:
        """Of the iteration; with `overlap`, sampling goes on beside training."""
        training = self.old_logps + self.loss + self.optimizer
        return self.sync + (max(self.generation, training) if overlap else self.generation + training)


def micro_batches(work: Workload, layout: Layout) -> int:
    """Of an optimizer step, on each device."""
    return work.completions_per_step // (layout.train_devices * layout.micro_batch)


def memory_of(model: Architecture, work: Workload, layout: Layout) -> TrainerMemory:
    """Bytes on each device that trains, with the longest sequences."""
    return trainer_memory(
        model,
        layout.strategy,
        layout.train_devices,
        MicroBatch(
            layout.micro_batch,
            work.longest,
            work.lengths.cap,
            accumulated=micro_batches(work, layout) > 1 and not layout.reduce_each,
        ),
        precision=work.precision,
        checkpointing=work.checkpointing,
    )


def computed_lengths(work: Workload, layout: Layout) -> tuple[Moments, float]:
    """Mean tokens (and their squares) that are computed for a sequence, and completion tokens that are scored."""
    completion = work.lengths.computed(
        work.batching, work.completions, work.completions_per_step, min(layout.micro_batch, work.completions_per_step)
    )
    return sequence_moments(work.prompt, completion), completion.first


def parts_of(model: Architecture, work: Workload, layout: Layout, device: Device, assumptions: Assumptions) -> Parts:
    """Seconds of each part of an iteration."""
    engine = Engine(model, work.scheme, device, layout.tensor_parallel)
    share = work.completions / layout.replicas
    generation = engine.seconds(share, work.prompt, work.lengths, work.generations, assumptions)
    sequence, scored = computed_lengths(work, layout)
    utilization = assumptions.expert_utilization if model.has_experts else assumptions.training_utilization
    rate = device.bf16 * utilization
    of_device = work.completions / layout.train_devices
    gather = _gather_seconds(model, work, layout, device, assumptions)
    batches = micro_batches(work, layout) * (work.completions // work.completions_per_step)
    forward = forward_flops(model, sequence, scored).total
    # TRL computes them where several optimizer steps share a generation batch.
    old = max(of_device * forward / rate, batches * gather) if work.optimizer_steps > 1 else 0.0
    both = training_flops(model, sequence, scored, checkpointing=work.checkpointing).total
    reduced = micro_batches(work, layout) if layout.reduce_each else 1
    # Gathered for forward and for backward; then gradients are reduced. The longer of compute and traffic counts.
    reduce = _reduce_seconds(model, work, layout, device, assumptions)
    per_step = 2 * micro_batches(work, layout) * gather + reduced * reduce
    loss = max(of_device * both * work.iterations / rate, per_step * work.optimizer_steps)
    shards = layout.train_devices if layout.strategy != "ddp" else 1
    # AdamW reads weight, gradient and two moments, and writes three of them.
    touched = 7 * 4 * model.parameters / shards
    optimizer = work.optimizer_steps * touched / (device.bandwidth * assumptions.bandwidth_share)
    return Parts(generation, old, loss, optimizer, sync_seconds(model, work, layout, device, assumptions))


def _links(layout: Layout, device: Device) -> float:
    """bytes/s at which a device receives what all have: over the node's links, or through its share of the network.

    A ring through all devices passes from node to node once, over all network cards of the node together.
    """
    if layout.train_nodes == 1:
        return device.link
    return min(device.link, device.network * layout.devices_per_node)


def _gather_seconds(
    model: Architecture, work: Workload, layout: Layout, device: Device, assumptions: Assumptions
) -> float:
    """Seconds in which every device receives all weights once, in the precision of compute; DDP shards none."""
    if layout.train_devices == 1 or layout.strategy in ("ddp", "zero2"):
        return 0.0
    return work.precision.compute * model.parameters / (_links(layout, device) * assumptions.link_share)


def _reduce_seconds(
    model: Architecture, work: Workload, layout: Layout, device: Device, assumptions: Assumptions
) -> float:
    """Seconds to add up the gradients of all devices: each gets its shard, or in DDP all (twice the bytes)."""
    if layout.train_devices == 1:
        return 0.0
    size = 2 * work.precision.weight if layout.strategy == "ddp" else work.precision.compute
    return size * model.parameters / (_links(layout, device) * assumptions.link_share)


def sync_bytes(model: Architecture, work: Workload, layout: Layout) -> int:
    """Bytes that reach an engine at each synchronization: the checkpoint in its scheme, or TRL's stream in BF16."""
    return checkpoint_bytes(model, "bf16" if layout.transport == "nccl" else work.scheme)


def sync_seconds(
    model: Architecture, work: Workload, layout: Layout, device: Device, assumptions: Assumptions
) -> float:
    """Seconds to gather the weights, to write and to reload them. There is one synchronization in an iteration."""
    sharded = layout.strategy in ("fsdp2", "zero3") and layout.train_devices > 1
    wide = 4 if work.precision.compute == 2 else work.precision.weight
    gather = wide * model.parameters / (_links(layout, device) * assumptions.link_share) if sharded else 0.0
    size = sync_bytes(model, work, layout)
    if layout.transport == "nccl":
        return gather + size / assumptions.stream_rate
    write, read = assumptions.write_rate, assumptions.read_rate
    if layout.transport == "shared":
        write, read = min(write, assumptions.shared_rate), min(read, assumptions.shared_rate)
    return gather + size / write + size / read
