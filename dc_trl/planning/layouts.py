"""Which divisions of the devices into training and sampling fit, and where none does, why and what would."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .architecture import Architecture
from .memory import DEVICES, PRECISIONS, USABLE, Engine, MicroBatch, Strategy, TrainerMemory, trainer_memory
from .work import Work


# Training takes the first of these that fits: (strategy, whether gradients are reduced after each micro-batch).
_WAYS: tuple[tuple[Strategy, bool], ...] = (("ddp", False), ("fsdp2", False), ("fsdp2", True))
_MICRO_BATCHES = (16, 8, 4, 2, 1)
_TENSOR_PARALLEL = (1, 2, 4, 8)
_MOST_DEVICES = 8192


class Training(NamedTuple):
    """How some of the devices train.

    Args:
        strategy: how the model is sharded.
        devices: number of devices that train.
        micro_batch: sequences that each of them computes at once.
        sync_each_batch: with FSDP2, whether gradients are reduced after each micro-batch, and not accumulated whole on
            every device.
    """

    strategy: Strategy
    devices: int
    micro_batch: int
    sync_each_batch: bool


class Layout(NamedTuple):
    """Who trains and who samples: so many replicas of an engine."""

    training: Training
    engine: Engine
    replicas: int


@dataclass(frozen=True)
class Problem:
    """A model, what is to be done with it, and the devices that there are.

    Args:
        model: sizes of the model.
        work: what is to be done.
        device: name of the devices, a key of `memory.DEVICES`.
        devices: number of devices, for training and sampling together.
        devices_per_node: devices of a node.
    """

    model: Architecture
    work: Work
    device: str
    devices: int
    devices_per_node: int = 8

    @property
    def usable(self) -> float:
        """Bytes of a device that training may use."""
        return DEVICES[self.device] * USABLE

    def micro_batches(self, training: Training) -> int:
        """Return how many micro-batches of an optimizer step each training device computes."""
        return self.work.completions_per_step // (training.devices * training.micro_batch)

    def memory(self, training: Training) -> TrainerMemory:
        """Return the bytes on each device that trains, with the longest sequences."""
        micro = MicroBatch(
            training.micro_batch,
            self.work.longest,
            self.work.max_completion_length,
            accumulated=self.micro_batches(training) > 1 and not training.sync_each_batch,
            precision=PRECISIONS[self.work.precision],
            checkpointing=self.work.checkpointing == "true",
        )
        return trainer_memory(self.model, training.strategy, training.devices, micro)

    def engines(self) -> list[Engine]:
        """Return the engines that could serve the model on one node, by tensor parallel size."""
        sizes = (size for size in _TENSOR_PARALLEL if size <= min(self.devices, self.devices_per_node))
        return [Engine(self.model, self.work.scheme, DEVICES[self.device], size) for size in sizes]


def layouts(problem: Problem) -> Iterator[Layout]:
    """Yield one layout that fits for each number of training devices.

    Any number of devices trains on one node, whole nodes on several; each gets as many completions of an optimizer
    step. Training takes the first of DDP, FSDP2 and FSDP2 with `sync_each_batch` that fits, in the largest micro-batch
    that does. Sampling takes the smallest tensor parallel size that fits, in as many replicas as there is room for.
    """
    fitting = [engine for engine in problem.engines() if engine.fits(problem.work.longest)]
    for count in _training_counts(problem):
        trainings = (each for each in _trainings(problem, count) if problem.memory(each).total <= problem.usable)
        nodes, rest = divmod(problem.devices - count, problem.devices_per_node)
        for engine in fitting:
            # No replica spans two nodes.
            size = engine.tensor_parallel
            replicas = nodes * (problem.devices_per_node // size) + rest // size
            training = next(trainings, None) if replicas else None
            if training is not None:
                yield Layout(training, engine, min(replicas, problem.work.completions))
                break


def _training_counts(problem: Problem) -> list[int]:
    unit = 1 if problem.devices <= problem.devices_per_node else problem.devices_per_node
    return [count for count in range(unit, problem.devices, unit) if problem.work.completions_per_step % count == 0]


def _trainings(problem: Problem, devices: int) -> Iterator[Training]:
    """Yield the ways to train on so many devices, the preferred one first."""
    each = problem.work.completions_per_step // devices
    for strategy, sync_each_batch in _WAYS if devices > 1 else _WAYS[:1]:
        for micro_batch in _MICRO_BATCHES:
            if each % micro_batch == 0 and (each > micro_batch or not sync_each_batch):
                yield Training(strategy, devices, micro_batch, sync_each_batch)


def reasons(problem: Problem) -> list[str]:
    """Return why nothing fits."""
    work, counts = problem.work, _training_counts(problem)
    if problem.devices == 1:
        return ["training and vLLM servers need a device each; one device for both (colocated) is not planned"]
    if not counts:
        return [
            f"no number of training devices below {problem.devices} divides the {work.completions_per_step} "
            "completions of an optimizer step"
        ]
    found = []
    needed = min(problem.memory(way).total for count in counts for way in _trainings(problem, count))
    if needed > problem.usable:
        found.append(
            f"training needs {needed / 1e9:.0f} GB on each of {counts[-1]} devices in a micro-batch of 1, and "
            f"{problem.usable / 1e9:.0f} GB are usable"
        )
    if not any(engine.fits(work.longest) for engine in problem.engines()):
        engine = problem.engines()[-1]
        found.append(
            f"{engine.weights / 1e9:.0f} GB of {work.scheme} weights on each of {engine.tensor_parallel} devices "
            f"leave a cache of {engine.cache_tokens:,} tokens, below one sequence of {work.longest:,}"
        )
    return found or [f"training and sampling fit {problem.devices} devices one at a time, and not side by side"]


def remedies(problem: Problem) -> list[str]:
    """Return the nearest changes with which something fits, and otherwise what to make smaller."""
    found, count = [], problem.devices
    while count < _MOST_DEVICES:
        count += 1 if count < problem.devices_per_node else problem.devices_per_node
        if next(layouts(replace(problem, devices=count)), None):
            found.append(f"use {count} devices of this kind")
            break
    for name in sorted(DEVICES, key=lambda each: DEVICES[each]):
        if next(layouts(replace(problem, device=name)), None):
            found.append(f"use {problem.devices} × {name}")
            break
    return found or ["use a scheme with fewer bits, shorter sequences, or other prompts and optimizer_steps"]
