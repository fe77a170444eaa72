"""What devices can do, from their makers' data sheets, and how much of it programs get: the assumptions of a plan."""

from dataclasses import dataclass, fields, replace

from ..settings.described import setting
from ..settings.ranges import ABOVE_0, require_number


GB = 1e9


@dataclass(frozen=True)
class Device:
    """Peak figures of one device, without sparsity.

    Args:
        name: as in `--device`.
        memory: bytes.
        bf16, fp8: FLOP/s of matrix products; fp8 is None where the device has no such products.
        bandwidth: of its memory, bytes/s.
        link: to the other devices of its node, bytes/s in one direction.
        network: its share of the node's connection to other nodes, bytes/s in one direction.
    """

    name: str
    memory: float
    bf16: float
    fp8: float | None
    bandwidth: float
    link: float
    network: float


# NVIDIA's data sheets of the SXM modules: A100 80GB, H100, H200, and HGX B200. NVLink there is the sum of both
# directions. `network` is that of NVIDIA's DGX systems: 200 Gb/s for each GPU of a DGX A100, 400 since.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 80 * GB, 312e12, None, 2039 * GB, 300 * GB, 25 * GB),
        Device("h100", 80 * GB, 989e12, 1979e12, 3350 * GB, 450 * GB, 50 * GB),
        Device("h200", 141 * GB, 989e12, 1979e12, 4800 * GB, 450 * GB, 50 * GB),
        Device("b200", 180 * GB, 2250e12, 4500e12, 8000 * GB, 900 * GB, 50 * GB),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What the time depends on beside sizes, as one number each. A plan is made twice, with `slow` and with `fast`.

    The docstring of a field says where its range comes from; "ours" is a guess that a measurement should replace.
    """

    training_utilization: float = setting(0.4, "share of the peak FLOP/s in training a dense model")
    expert_utilization: float = setting(0.25, "the same for a mixture of experts")
    prefill_utilization: float = setting(0.5, "share of the peak FLOP/s in sampling")
    bandwidth_share: float = setting(0.75, "share of the memory's bandwidth in sampling and in the optimizer")
    step_overhead: float = setting(0.002, "seconds of scheduling and sampling for each token that is decoded")
    reduce_latency: float = setting(15e-6, "seconds of one all-reduce of tensor parallelism; a layer has two")
    link_share: float = setting(0.75, "share of links and network in gathering weights")
    write_rate: float = setting(2 * GB, "bytes/s of a checkpoint that one process quantizes and writes to memory")
    read_rate: float = setting(4 * GB, "bytes/s of a server that reloads it")
    shared_rate: float = setting(10 * GB, "bytes/s of each node from a file system that several share")
    stream_rate: float = setting(20 * GB, "bytes/s of TRL's NCCL stream, tensor by tensor")

    def __post_init__(self) -> None:
        for field in fields(self):
            require_number(field.name, getattr(self, field.name), ABOVE_0)


# Dense: the Llama 3 report has 38 to 43 % on H100s with 4-D parallelism (arXiv 2407.21783); FSDP2 with transformers'
# own layers has less. All other ranges are ours.
FAST = Assumptions()
SLOW = Assumptions(
    training_utilization=0.2,
    expert_utilization=0.08,
    prefill_utilization=0.25,
    bandwidth_share=0.45,
    step_overhead=0.008,
    reduce_latency=40e-6,
    link_share=0.4,
    write_rate=0.5 * GB,
    read_rate=1 * GB,
    shared_rate=1 * GB,
    stream_rate=4 * GB,
)
# Memory. What a program cannot use of a device (context, NCCL's buffers, fragments of the allocator), and what a
# server needs beside weights and cache (activations, captured graphs): ours.
USABLE = 0.92
SERVER_SHARE = 0.90  # --gpu-memory-utilization
SERVER_RUNTIME = 4 * GB


def with_overrides(overrides: dict[str, list[float]]) -> tuple[Assumptions, Assumptions]:
    """The slow and the fast assumptions, where a user's numbers replace ours.

    Args:
        overrides: by the name of a field one number, or the slow and the fast one.

    Raises:
        ValueError: a number that is not above 0, or more than two.
    """
    for name, values in overrides.items():
        if len(values) > 2:
            raise ValueError(f"{name}={values} are {len(values)} numbers: give one, or the slow and the fast one.")
    slow = replace(SLOW, **{name: values[0] for name, values in overrides.items()})
    fast = replace(FAST, **{name: values[-1] for name, values in overrides.items()})
    return slow, fast
