"""The settings of `dc-trl train` beside the trainer's, and options that name prompts. No import here takes seconds."""

import argparse
from dataclasses import dataclass
from typing import Annotated, Literal

from ..settings.command_line import add_fields
from ..settings.contradictions import CheckedSettings
from ..settings.fields import COUNT, WHOLE, setting


# Weights, and whether the forward runs under bfloat16 autocast: `dtype` and `bf16` of a training configuration.
TRAIN_DTYPES = {"bfloat16": ("bfloat16", True), "mixed": ("float32", True), "float32": ("float32", False)}
# Fields of `DataArguments` that choose prompts.
PROMPT_FIELDS = (
    *("dataset_name", "dataset_config", "dataset_split", "prompt_column", "answer_column", "instruction"),
    "max_prompt_length",
)


@dataclass
class DataArguments(CheckedSettings):
    """The prompts, answers and rewards of a training configuration."""

    dataset_name: str | None = setting(
        None,
        "Hub id, local .json/.jsonl/.parquet/.csv file, 'arithmetic' (made on the spot), or 'dapo' (DAPO-Math-17K, "
        "cleaned at every start; dc-trl prepare-data does it once).",
    )
    dataset_config: str | None = setting(None, "Configuration of a Hub data set.")
    dataset_split: str = setting("train", "Split of a Hub data set.")
    prompt_column: str = setting(
        "prompt", "Column of the prompts, which are text or messages. For a nested field write column.field."
    )
    answer_column: str = setting("answer", "Column of the right answers. For a nested field write column.field.")
    instruction: str | None = setting(None, "Text that is appended to each prompt after a blank line.")
    max_prompt_length: Annotated[int | None, COUNT] = setting(None, "Prompts of more tokens than this are left out.")
    eval_size: Annotated[int, WHOLE] = setting(
        0, "Number of problems held out to measure the deployed policy before and after training."
    )
    eval_greedy: bool = setting(
        False, "Measure greedy completions of the held-out problems at evaluations in between too (eval_strategy)."
    )
    rewards: list[str] = setting(["math"], "Reward functions: 'math', 'arithmetic', or dotted paths of your own.")


@dataclass
class ServerArguments(CheckedSettings):
    """The vLLM server, where the run starts its own."""

    serve: Literal["auto"] | None = setting(
        None,
        "'auto' starts a vLLM server for the model in its deployment_scheme, and ends it with the run (use_vllm: "
        "true, vllm_mode: server). For a server that runs elsewhere set vllm_server_base_url.",
    )
    serve_devices: str | None = setting(None, "GPUs of the server that 'auto' starts: '3' or '2,3'.")
    serve_options: list[str] = setting([], "Further options of vllm serve for the server that 'auto' starts.")


@dataclass
class WatchArguments(CheckedSettings):
    """Decay of the learning rate, and alarm of a collapse, which react to the metrics of the run."""

    length_decay: bool = setting(
        False,
        "Once the responses have become much longer, halve the learning rate again and again, down to a tenth (arXiv "
        "2602.01826), in place of lr_scheduler_type. See docs/corrections.md.",
    )
    length_decay_period: Annotated[int | None, COUNT] = setting(
        None, "Optimizer steps between two halvings. If it is not set, 1.8 times the step of the longer responses."
    )
    collapse_alarm: Literal["off", "warn", "stop"] = setting(
        "warn",
        "What happens when reward, gradient, mismatch or λ show a collapse: "
        '"off" does nothing, "warn" warns once, and "stop" warns, ends the run and names the last good checkpoint '
        "to resume from. See docs/metrics.md.",
    )


def add_prompts(parser: argparse.ArgumentParser, default: int) -> argparse._ActionsContainer:
    """Add the options of a data set of prompts, for `prompt_source`, and of the number of prompts."""
    group = parser.add_argument_group("the prompts")
    add_fields(group, DataArguments, *PROMPT_FIELDS)
    group.add_argument("--prompts", type=int, default=default, help=f"how many, drawn at random (default: {default})")
    return group


def prompt_source(args: argparse.Namespace) -> DataArguments:
    """Return where the prompts come from, for `draw_prompts`; refuse what its fields do not take."""
    return DataArguments(**{name: getattr(args, name) for name in PROMPT_FIELDS})
