"""The work that a training configuration states, and the divisions of the devices into training and sampling that fit.

Training takes the first of DDP, FSDP2 and FSDP2 with `sync_each_batch` that fits, in the largest micro-batch that
does. Sampling takes the smallest tensor parallel size that fits, in as many replicas as there is room for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from ..files import read_yaml
from ..quantization.schemes import require_served_scheme
from ..records.settings import training_defaults
from ..settings.fields import require_fields, setting
from ..settings.ranges import COUNT
from .architecture import Architecture
from .memory import DEVICES, PRECISIONS, USABLE, Engine, MicroBatch, Strategy, TrainerMemory, trainer_memory


_WAYS: tuple[tuple[Strategy, bool], ...] = (("ddp", False), ("fsdp2", False), ("fsdp2", True))
_MICRO_BATCHES = (16, 8, 4, 2, 1)
_TENSOR_PARALLEL = (1, 2, 4, 8)
_PLANNED = {"use_vllm": True, "vllm_mode": "server", "use_peft": False, "beta": 0}  # what the formulas cover


@dataclass(frozen=True)
class Work:
    """One generation batch and the optimizer steps on it, whatever the devices. The help of a field describes it.

    Raises:
        ValueError: names the field, its value and the remedy.
    """

    prompts: Annotated[int, COUNT] = setting(64, "prompts of a generation batch")
    generations: Annotated[int, COUNT] = setting(8, "completions of a prompt")
    optimizer_steps: Annotated[int, COUNT] = setting(4, "optimizer steps on a generation batch")
    max_prompt_length: Annotated[int, COUNT] = setting(2048, "tokens of the longest prompt")
    max_completion_length: Annotated[int, COUNT] = setting(8192, "tokens of the longest completion")
    scheme: str = setting("fp8", "deployment scheme that the engine serves")
    checkpointing: Literal["true", "false"] = setting("true", "whether layers are computed again in backward")
    precision: Literal["mixed", "bfloat16", "float32"] = setting(
        "mixed", "of training: float32 weights with BF16 compute (mixed), or both in one format"
    )

    def __post_init__(self) -> None:
        require_fields(self)
        require_served_scheme(self.scheme)
        if self.completions % self.optimizer_steps:
            raise ValueError(
                f"optimizer_steps={self.optimizer_steps} does not divide the {self.completions} completions of a "
                f"generation batch: choose a divisor, or other prompts={self.prompts}."
            )

    @property
    def completions(self) -> int:
        """Completions of a generation batch."""
        return self.prompts * self.generations

    @property
    def completions_per_step(self) -> int:
        """Completions of an optimizer step, on all devices together."""
        return self.completions // self.optimizer_steps

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return self.max_prompt_length + self.max_completion_length


def work_of_config(path: Path, processes: int) -> tuple[dict[str, Any], str]:
    """Read the fields of `Work` that a training configuration sets, and the model that it names.

    Args:
        path: YAML file of `dc-trl train`.
        processes: how many training processes the file's batch is meant for.

    Raises:
        ValueError: names the field, its value and the remedy.
        OSError: the file cannot be read.
    """
    config = training_defaults() | {"dtype": "float32", "use_peft": False} | read_yaml(path)
    for name, planned in _PLANNED.items():
        if config[name] != planned:
            raise ValueError(
                f"{name}={config[name]!r}: the plan covers full training beside a vLLM server, without a reference "
                f"model. Set {name}: {planned}."
            )
    if "model_name_or_path" not in config:
        raise ValueError("model_name_or_path is not set: give a Hub id or a directory.")
    batch, accumulation = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    per_step = processes * batch * accumulation
    steps = config["steps_per_generation"] or accumulation
    completions = config["generation_batch_size"] or processes * batch * steps
    generations = config["num_generations"]
    if completions % generations or completions % per_step:
        raise ValueError(
            f"{processes} processes make a generation batch of {completions} completions of {path}, no multiple of "
            f"num_generations={generations} and of the {per_step} of an optimizer step: give the --processes that the "
            "file is written for."
        )
    found = {
        "prompts": completions // generations,
        "generations": generations,
        "optimizer_steps": completions // per_step,
        "max_completion_length": config["max_completion_length"],
        "scheme": config["deployment_scheme"] or "bf16",
        "precision": "bfloat16" if config["dtype"] == "bfloat16" else "mixed" if config["bf16"] else "float32",
    }
    if config.get("max_prompt_length") is not None:
        found["max_prompt_length"] = config["max_prompt_length"]
    return found, config["model_name_or_path"]


class Training(NamedTuple):
    """How some of the devices train: each computes `micro_batch` sequences at once.

    With FSDP2 and `sync_each_batch`, gradients are reduced after each micro-batch, and not accumulated whole.
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
    """A model, what is to be done with it, and the devices that there are, for training and sampling together.

    `device` is a key of `memory.DEVICES`.
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

    def trainings(self, devices: int) -> Iterator[Training]:
        """Yield the ways to train on so many devices, the preferred one first."""
        each = self.work.completions_per_step // devices
        for strategy, sync_each_batch in _WAYS if devices > 1 else _WAYS[:1]:
            for micro_batch in _MICRO_BATCHES:
                if each % micro_batch == 0 and (each > micro_batch or not sync_each_batch):
                    yield Training(strategy, devices, micro_batch, sync_each_batch)

    def training_counts(self) -> list[int]:
        """Return the numbers of devices that can train: any on one node, whole nodes on several."""
        unit = 1 if self.devices <= self.devices_per_node else self.devices_per_node
        return [count for count in range(unit, self.devices, unit) if self.work.completions_per_step % count == 0]

    def engines(self) -> list[Engine]:
        """Return the engines that could serve the model on one node, by tensor parallel size."""
        sizes = (size for size in _TENSOR_PARALLEL if size <= min(self.devices, self.devices_per_node))
        return [Engine(self.model, self.work.scheme, DEVICES[self.device], size) for size in sizes]


def layouts(problem: Problem) -> Iterator[Layout]:
    """Yield one layout that fits for each number of training devices."""
    fitting = [engine for engine in problem.engines() if engine.fits(problem.work.longest)]
    for count in problem.training_counts():
        trainings = (each for each in problem.trainings(count) if problem.memory(each).total <= problem.usable)
        nodes, rest = divmod(problem.devices - count, problem.devices_per_node)
        for engine in fitting:
            # No replica spans two nodes.
            size = engine.tensor_parallel
            replicas = nodes * (problem.devices_per_node // size) + rest // size
            training = next(trainings, None) if replicas else None
            if training is not None:
                yield Layout(training, engine, min(replicas, problem.work.completions))
                break


def reason(problem: Problem) -> str:
    """Return why nothing fits: what the leanest training and the largest engine need."""
    ways = [way for count in problem.training_counts() for way in problem.trainings(count)]
    if not ways:
        return (
            f"training and vLLM servers need a device each, and no number of training devices below {problem.devices} "
            f"divides the {problem.work.completions_per_step} completions of an optimizer step"
        )
    needed = min(problem.memory(way).total for way in ways)
    engine = problem.engines()[-1]
    return (
        f"training needs at least {needed / 1e9:.0f} GB of {problem.usable / 1e9:.0f} GB on each of up to "
        f"{ways[-1].devices} devices, and {engine.weights / 1e9:.0f} GB of {problem.work.scheme} weights on each of "
        f"{engine.tensor_parallel} leave a cache of {engine.cache_tokens:,} tokens for sequences of "
        f"{problem.work.longest:,}; use more or larger devices, a scheme with fewer bits, or shorter sequences"
    )
