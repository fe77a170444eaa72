"""A plan: which layout of so many devices is the fastest that fits, or why none does and what would."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .architecture import Architecture
from .deployed import checkpoint_bytes
from .devices import DEVICES, USABLE, Assumptions, Device
from .lengths import Batching
from .memory import STRATEGIES, Strategy, TrainerMemory
from .sampling import Engine
from .step import Layout, Parts, Transport, Workload, memory_of, micro_batches, parts_of


# Those for which the project has a launch configuration; of the others a plan says the memory alone.
_LAUNCHED: tuple[Strategy, ...] = ("fsdp2", "ddp")
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_TENSOR_PARALLEL = (1, 2, 4, 8)
_MOST_DEVICES = 8192


@dataclass(frozen=True)
class Cluster:
    """What there is.

    Args:
        device: of one kind.
        devices: how many, for training and sampling together.
        devices_per_node: of them in a node.
    """

    device: Device
    devices: int
    devices_per_node: int

    @property
    def usable(self) -> float:
        """Bytes of a device's memory that training may count on."""
        return self.device.memory * USABLE


@dataclass(frozen=True)
class Plan:
    """The fastest layout that fits.

    Args:
        model, work, cluster, layout: what is planned.
        memory: of a device that trains.
        engine: one replica that samples.
        slow, fast: seconds of the parts, under the two assumptions.
        gains: seconds of an iteration, slow and fast, as features are added one after the other.
    """

    model: Architecture
    work: Workload
    cluster: Cluster
    layout: Layout
    memory: TrainerMemory
    engine: Engine
    slow: Parts
    fast: Parts
    gains: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class NoPlan:
    """Why nothing fits, and the nearest remedies."""

    model: Architecture
    work: Workload
    cluster: Cluster
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]


def make_plan(
    model: Architecture,
    work: Workload,
    cluster: Cluster,
    assumptions: tuple[Assumptions, Assumptions],
    transport: Transport | None = None,
) -> Plan | NoPlan:
    """The layout with the shortest iteration, by the geometric mean of the slow and the fast assumptions.

    Args:
        model, work, cluster: what is planned, and on what.
        assumptions: slow and fast.
        transport: of weights; by default memory on one node, and a shared file system between nodes.
    """
    best: tuple[float, Layout, Parts, Parts] | None = None
    for layout in layouts(model, work, cluster, transport):
        slow, fast = (parts_of(model, work, layout, cluster.device, each) for each in assumptions)
        score = math.sqrt(slow.total() * fast.total())
        if best is None or score < best[0]:
            best = score, layout, slow, fast
    if best is None:
        return _no_plan(model, work, cluster)
    _, layout, slow, fast = best
    return Plan(
        model,
        work,
        cluster,
        layout,
        memory_of(model, work, layout),
        Engine(model, work.scheme, cluster.device, layout.tensor_parallel),
        slow,
        fast,
        _gains(model, work, layout, cluster, assumptions),
    )


def layouts(
    model: Architecture, work: Workload, cluster: Cluster, transport: Transport | None = None
) -> Iterator[Layout]:
    """All layouts that fit; devices that do not divide the batch are not used."""
    engines = {
        size: Engine(model, work.scheme, cluster.device, size)
        for size in _TENSOR_PARALLEL
        if size <= cluster.devices_per_node
    }
    fitting = [size for size, engine in engines.items() if not engine.why_not(work.longest)]
    for train in _training_counts(work, cluster):
        one_node = cluster.devices <= cluster.devices_per_node
        for strategy in _LAUNCHED if train > 1 else _LAUNCHED[1:]:
            for layout in _training_layouts(work, cluster, strategy, train, transport or _transport(one_node)):
                if memory_of(model, work, layout).total > cluster.usable:
                    continue
                for size in fitting:
                    replicas = _replicas(cluster, train, size)
                    if replicas:
                        yield replace(layout, tensor_parallel=size, replicas=min(replicas, work.completions))


def fits(model: Architecture, work: Workload, cluster: Cluster) -> bool:
    """Whether any layout does."""
    return next(layouts(model, work, cluster), None) is not None


def _transport(one_node: bool) -> Transport:
    return "memory" if one_node else "shared"


def _replicas(cluster: Cluster, train: int, size: int) -> int:
    """Replicas on the devices that do not train; none spans two nodes."""
    nodes, rest = divmod(cluster.devices - train, cluster.devices_per_node)
    return nodes * (cluster.devices_per_node // size) + rest // size


def _training_counts(work: Workload, cluster: Cluster) -> list[int]:
    """Devices that may train: any number on one node, whole nodes on several; each gets as many completions."""
    unit = 1 if cluster.devices <= cluster.devices_per_node else cluster.devices_per_node
    return [count for count in range(unit, cluster.devices, unit) if work.completions_per_step % count == 0]


def _training_layouts(
    work: Workload, cluster: Cluster, strategy: Strategy, train: int, transport: Transport
) -> Iterator[Layout]:
    each = work.completions_per_step // train
    for micro in _MICRO_BATCHES:
        if each % micro == 0:
            accumulates = each > micro
            for reduce_each in (False, True) if strategy == "fsdp2" and accumulates else (False,):
                yield Layout(strategy, train, micro, reduce_each, 1, 1, cluster.devices_per_node, transport)


def _gains(
    model: Architecture,
    work: Workload,
    layout: Layout,
    cluster: Cluster,
    assumptions: tuple[Assumptions, Assumptions],
) -> dict[str, tuple[float, float]]:
    """Seconds of an iteration on this layout: TRL's batches and BF16 rollouts, then one feature after the other."""
    eight = "fp8" if work.scheme == "bf16" else work.scheme
    steps: dict[str, tuple[Batching, str, bool]] = {
        "padded to the longest of the generation batch, BF16 rollouts": ("generation_batch", "bf16", False),
        "+ batches of similar lengths": ("by_length", "bf16", False),
        f"+ {eight.upper()} rollouts": ("by_length", eight, False),
        "+ sampling beside training": ("by_length", eight, True),
    }
    gains = {}
    for name, (batching, scheme, overlap) in steps.items():
        changed = replace(work, batching=batching, scheme=scheme)
        seconds = [parts_of(model, changed, layout, cluster.device, each).total(overlap) for each in assumptions]
        gains[name] = (seconds[0], seconds[1])
    return gains


def memory_table(plan: Plan) -> dict[Strategy, TrainerMemory]:
    """Bytes on a training device under every way to shard, gradients accumulated as the launchers do by default."""
    every = {strategy: replace(plan.layout, strategy=strategy, reduce_each=False) for strategy in STRATEGIES}
    return {strategy: memory_of(plan.model, plan.work, layout) for strategy, layout in every.items()}


# --- where nothing fits


def _no_plan(model: Architecture, work: Workload, cluster: Cluster) -> NoPlan:
    reasons, remedies = [], []
    if cluster.devices < 2:
        reasons.append("one device cannot hold a server and a trainer apart")
        remedies.append("use 2 devices, or vllm_mode: colocate, which this plan does not cover")
    counts = _training_counts(work, cluster)
    if not counts and cluster.devices > 1:
        reasons.append(
            f"no number of training devices divides the {work.completions_per_step} completions of an optimizer step"
        )
        remedies.append(f"make an optimizer step a multiple of {cluster.devices_per_node} completions")
    for reason, remedy in (_training_gap(model, work, cluster, counts), _serving_gap(model, work, cluster)):
        if reason:
            reasons.append(reason)
            remedies.append(remedy)
    if not reasons:  # each fits, and not both together
        reasons.append(f"training and sampling fit {cluster.devices} devices one at a time, and not side by side")
        remedies.append(_more_devices(model, work, cluster))
    larger = sorted(DEVICES.values(), key=lambda each: (each.memory, each.bf16))
    for device in larger:
        if device.memory > cluster.device.memory and fits(model, work, replace(cluster, device=device)):
            remedies.append(f"use {cluster.devices} × {device.name}")
            break
    return NoPlan(model, work, cluster, tuple(reasons), tuple(remedies))


def _training_gap(model: Architecture, work: Workload, cluster: Cluster, counts: list[int]) -> tuple[str, str]:
    """Why training does not fit, at its smallest, and from how many devices on it would."""
    if not counts:
        return "", ""
    needed = min(_least_memory(model, work, cluster, count) for count in counts)
    if needed <= cluster.usable:
        return "", ""
    reason = (
        f"training needs {needed / 1e9:.0f} GB on each of {counts[-1]} devices (FSDP2, micro-batch 1), "
        f"and {cluster.usable / 1e9:.0f} GB are usable"
    )
    return reason, _more_devices(model, work, cluster)


def _serving_gap(model: Architecture, work: Workload, cluster: Cluster) -> tuple[str, str]:
    sizes = [size for size in _TENSOR_PARALLEL if size <= min(cluster.devices_per_node, cluster.devices)]
    engines = [Engine(model, work.scheme, cluster.device, size) for size in sizes]
    if any(not engine.why_not(work.longest) for engine in engines):
        return "", ""
    smaller = checkpoint_bytes(model, "fp8") < checkpoint_bytes(model, work.scheme)
    remedy = "use scheme fp8" if smaller else "use devices with more memory"
    return engines[-1].why_not(work.longest), f"{remedy}, or a shorter max_completion_length"


def _least_memory(model: Architecture, work: Workload, cluster: Cluster, train: int) -> float:
    strategy: Strategy = "fsdp2" if train > 1 else "ddp"
    options = _training_layouts(work, cluster, strategy, train, "memory")
    return min(memory_of(model, work, layout).total for layout in options)


def _more_devices(model: Architecture, work: Workload, cluster: Cluster) -> str:
    """The nearest number of devices on which the plan exists, and otherwise what is too large for any."""
    count = cluster.devices
    while count < _MOST_DEVICES:
        count += 1 if count < cluster.devices_per_node else cluster.devices_per_node
        if fits(model, work, replace(cluster, devices=count)):
            return f"use {count} devices of this kind"
    bare = replace(work, lengths=replace(work.lengths, cap=1), longest_prompt=1)
    if fits(model, bare, replace(cluster, devices=_MOST_DEVICES)):
        return "use shorter sequences: their activations alone are too large, on any number of devices"
    return "use devices with more memory, or completions_per_step that more devices divide"


def accumulation(work: Workload, layout: Layout) -> tuple[int, int, int]:
    """`per_device_train_batch_size`, `gradient_accumulation_steps` and `steps_per_generation` of a layout."""
    steps = micro_batches(work, layout)
    return layout.micro_batch, steps, steps * (work.completions // work.completions_per_step)
