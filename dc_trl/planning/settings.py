"""What a plan is asked for: options, and the training configuration that `dc-trl train` takes."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..files import read_yaml
from ..quantization.schemes import require_served_scheme
from ..records.settings import training_defaults
from ..settings.described import described
from ..settings.ranges import COUNT, require_numbers
from .lengths import Batching, Lengths
from .memory import BF16_ALL, BF16_COMPUTE, FLOAT32, TrainingPrecision
from .step import Workload


@described
@dataclass
class PlanSettings:
    """The work that is planned. A training configuration sets what it has fields for; options override it.

    Args:
        prompts (`int`, defaults to `64`):
            Prompts of a generation batch.
        generations (`int`, defaults to `8`):
            Completions of a prompt.
        optimizer_steps (`int`, defaults to `4`):
            Optimizer steps on a generation batch.
        iterations (`int`, defaults to `1`):
            Passes over a generation batch, num_iterations in a training configuration.
        prompt_length (`int`, defaults to `200`):
            Tokens of a prompt, on average.
        max_prompt_length (`int`, defaults to `2048`):
            Tokens of the longest prompt.
        mean_length (`float`, defaults to `2500.0`):
            Tokens of a completion, on average before the cut.
        length_sigma (`float`, defaults to `0.6`):
            Standard deviation of the logarithm of the lengths.
        max_completion_length (`int`, defaults to `8192`):
            Tokens of the longest completion.
        scheme (`str`, defaults to `"fp8"`):
            Format that the engine serves, deployment_scheme in a training configuration.
        batching (`str`, defaults to `"by_length"`):
            How far completions are padded: to the longest of the generation batch (generation_batch, TRL), of each
            micro-batch (micro_batch), or of micro-batches of similar lengths (by_length).
        checkpointing (`str`, defaults to `"true"`):
            Whether layers are computed again in backward (true, false): gradient_checkpointing, or
            fsdp_activation_checkpointing of the launch configuration.
        precision (`str`, defaults to `"mixed"`):
            Weights and compute of training: float32 and BF16 (mixed), or both in bfloat16 or float32.
    """

    prompts: int = 64
    generations: int = 8
    optimizer_steps: int = 4
    iterations: int = 1
    prompt_length: int = 200
    max_prompt_length: int = 2048
    mean_length: float = 2500.0
    length_sigma: float = 0.6
    max_completion_length: int = 8192
    scheme: str = "fp8"
    batching: Batching = "by_length"
    checkpointing: Literal["true", "false"] = "true"
    precision: Literal["mixed", "bfloat16", "float32"] = "mixed"

    def __post_init__(self) -> None:
        counts = (field.name for field in fields(self) if field.type is int)
        require_numbers(self, dict.fromkeys(counts, COUNT))
        require_served_scheme(self.scheme)

    def workload(self) -> Workload:
        """The work in the terms of a plan.

        Raises:
            ValueError: names the setting, its value and the remedy.
        """
        completions = self.prompts * self.generations
        if completions % self.optimizer_steps:
            raise ValueError(
                f"optimizer_steps={self.optimizer_steps} does not divide the {completions} completions of a "
                f"generation batch: choose a divisor, or other prompts={self.prompts}."
            )
        if self.prompt_length > self.max_prompt_length:
            raise ValueError(
                f"prompt_length={self.prompt_length} is above max_prompt_length={self.max_prompt_length}: raise the "
                "second, or lower the first."
            )
        precisions: dict[str, TrainingPrecision] = {
            "mixed": BF16_COMPUTE,
            "bfloat16": BF16_ALL,
            "float32": FLOAT32,
        }
        return Workload(
            completions=completions,
            completions_per_step=completions // self.optimizer_steps,
            generations=self.generations,
            iterations=self.iterations,
            prompt=self.prompt_length,
            longest_prompt=self.max_prompt_length,
            lengths=Lengths(self.mean_length, self.length_sigma, self.max_completion_length),
            scheme=self.scheme,
            precision=precisions[self.precision],
            checkpointing=self.checkpointing == "true",
            batching=self.batching,
        )


def settings_of_config(path: Path, processes: int) -> tuple[dict[str, Any], str]:
    """What a training configuration says of the work, and the model that it names.

    Args:
        path: the YAML file of `dc-trl train`.
        processes: that the file's batch is meant for, at least 1.

    Returns:
        Values of `PlanSettings` by name, and the model.

    Raises:
        ValueError: names the field, its value and the remedy.
        OSError: a file cannot be read.
    """
    config = training_defaults() | {"dtype": "float32", "use_peft": False} | read_yaml(path)
    _require_planned(config)
    per_step = processes * config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    batches = config["steps_per_generation"] or config["gradient_accumulation_steps"]
    completions = config["generation_batch_size"] or (processes * config["per_device_train_batch_size"] * batches)
    generations = config["num_generations"]
    if completions % generations or completions % per_step:
        raise ValueError(
            f"{processes} processes make a generation batch of {completions} completions of {path}, no multiple of "
            f"num_generations={generations} and of the {per_step} of an optimizer step: say the --processes that it "
            "is written for."
        )
    found = {
        "prompts": completions // generations,
        "generations": generations,
        "optimizer_steps": completions // per_step,
        "iterations": config["num_iterations"],
        "max_completion_length": config["max_completion_length"],
        "scheme": config["deployment_scheme"] or "bf16",
        "precision": "bfloat16" if config["dtype"] == "bfloat16" else "mixed" if config["bf16"] else "float32",
    }
    if config.get("max_prompt_length") is not None:
        found["max_prompt_length"] = config["max_prompt_length"]
    return found, config["model_name_or_path"]


def _require_planned(config: dict[str, Any]) -> None:
    """Refuses what the formulas do not cover."""
    if not config["use_vllm"] or config["vllm_mode"] != "server":
        raise ValueError(
            f"use_vllm={config['use_vllm']} with vllm_mode={config['vllm_mode']!r}: a plan is of training beside a "
            "vLLM server. Set use_vllm: true and vllm_mode: server."
        )
    if config["use_peft"]:
        raise ValueError("use_peft=True: a plan is of training all weights. Plan without it, as an upper bound.")
    if config["beta"]:
        raise ValueError(
            f"beta={config['beta']}: a plan has no reference model. Set beta: 0, and add its weights and one forward."
        )
    if "model_name_or_path" not in config:
        raise ValueError("model_name_or_path is not set: give a Hub id or a directory.")
