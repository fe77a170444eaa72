"""The work that is planned: what a training configuration says of it, and options that replace parts of that."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from ..config import DCGRPOConfig
from ..files import read_yaml
from ..quantization.schemes import require_served_scheme
from ..records.settings import default_of, json_value
from ..settings.fields import require_fields, setting
from ..settings.ranges import COUNT


_PLANNED = {"use_vllm": True, "vllm_mode": "server", "use_peft": False, "beta": 0}


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
    config = {field.name: json_value(default_of(field)) for field in fields(DCGRPOConfig)}
    config |= {"dtype": "float32", "use_peft": False} | read_yaml(path)
    _require_planned(config)
    batch, accumulation = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    per_step = processes * batch * accumulation
    completions = config["generation_batch_size"] or (
        processes * batch * (config["steps_per_generation"] or accumulation)
    )
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


def _require_planned(config: dict[str, Any]) -> None:
    """Refuse what the formulas do not cover."""
    for name, planned in _PLANNED.items():
        if config[name] != planned:
            raise ValueError(
                f"{name}={config[name]!r}: the plan covers full training beside a vLLM server, without a reference "
                f"model. Set {name}: {planned}."
            )
    if "model_name_or_path" not in config:
        raise ValueError("model_name_or_path is not set: give a Hub id or a directory.")
