"""The training that is planned: what a configuration says of it, and options that replace parts of that."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from ..config import DCGRPOConfig
from ..files import read_yaml
from ..quantization.schemes import require_served_scheme
from ..records.settings import default_of, json_value
from ..settings.fields import require_fields, setting
from ..settings.ranges import COUNT
from .memory import PRECISIONS, MicroBatch


_PLANNED = {"use_vllm": True, "vllm_mode": "server", "use_peft": False, "beta": 0}  # what the formulas cover


@dataclass(frozen=True)
class Work:
    """What one device trains at once, and what engines serve. The help of a field describes it.

    Raises:
        ValueError: names the field, its value and the remedy.
    """

    per_device_train_batch_size: Annotated[int, COUNT] = setting(1, "sequences that a device computes at once")
    gradient_accumulation_steps: Annotated[int, COUNT] = setting(16, "micro-batches of an optimizer step")
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

    def micro_batch(self, sync_each_batch: bool) -> MicroBatch:
        """Return what a device computes at once; `sync_each_batch` reduces gradients after each micro-batch."""
        return MicroBatch(
            self.per_device_train_batch_size,
            self.max_prompt_length + self.max_completion_length,
            self.max_completion_length,
            accumulated=self.gradient_accumulation_steps > 1 and not sync_each_batch,
            precision=PRECISIONS[self.precision],
            checkpointing=self.checkpointing == "true",
        )


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
    found["scheme"] = config["deployment_scheme"] or "bf16"
    found["precision"] = "bfloat16" if config["dtype"] == "bfloat16" else "mixed" if config["bf16"] else "float32"
    return found, config["model_name_or_path"]
