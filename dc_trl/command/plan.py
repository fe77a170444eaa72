"""Plans a run from a model's configuration alone: what fits, and what each device holds.

    dc-trl plan --model configs/models/qwen3_8b.json --device h100 --gpus 8
    dc-trl plan --config qwen3_30b_a3b_fp8 --processes 16 --device h100 --gpus 32

It loads no weights and no engine, and starts nothing. docs/planning.md has the formulas, and runs beside them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ..planning.architecture import load_architecture
from ..planning.layouts import Layout, Problem, Work, layouts, reason, work_of_config
from ..planning.memory import DEVICES, checkpoint_bytes
from ..records.tables import print_table
from ..settings.command_line import OptionParser, add_fields, refused_in_one_line, say
from ..settings.paths import config_file, shipped
from ..settings.ranges import COUNT, require_number


WORK = [field.name for field in fields(Work)]


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "plan")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", default="h100", choices=DEVICES, help="kind of device (default: h100)")
    machine.add_argument("--gpus", type=int, default=8, help="devices in all (default: 8)")
    machine.add_argument("--gpus_per_node", type=int, default=8, help="devices of a node (default: 8)")
    work = parser.add_argument_group("the work")
    model = "Hub id, directory or config.json; by default the model of --config"
    work.add_argument("--model", type=shipped, help=model)
    work.add_argument("--revision", default="main", help="revision of a Hub model")
    work.add_argument("--config", help="training configuration, or the name of one that ships, as for dc-trl train")
    work.add_argument("--processes", type=int, help="training processes that --config is for (default: --gpus)")
    add_fields(work, Work, *WORK)
    parser.set_defaults(**dict.fromkeys(WORK))  # an option that is given replaces the configuration's value
    return parser


def problem_of(args: argparse.Namespace) -> Problem:
    """Return what is planned.

    Raises:
        ValueError: names the option, its value and the remedy.
        OSError: a file cannot be read.
    """
    for name in ("gpus", "gpus_per_node", "processes"):
        if (value := getattr(args, name)) is not None:
            require_number(name, value, COUNT)
    settings: dict[str, Any] = {}
    named = args.model
    if args.config is not None:
        settings, of_config = work_of_config(config_file(args.config), args.processes or args.gpus)
        named = named or shipped(of_config)
    if named is None:
        raise ValueError("model is not set: give --model, or --config with a model_name_or_path.")
    work = Work(**settings | {name: value for name in WORK if (value := getattr(args, name)) is not None})
    return Problem(load_architecture(named, args.revision), work, args.device, args.gpus, args.gpus_per_node)


def numbers_of(problem: Problem, layout: Layout) -> dict[str, Any]:
    """Return what a layout sets and holds, by name: settings of the two sides, tokens, and bytes as floats."""
    training, engine, replicas = layout
    steps = problem.micro_batches(training)
    memory = problem.memory(training)
    return {
        "train_devices": training.devices,
        "strategy": training.strategy,
        "sync_each_batch": training.sync_each_batch,
        "per_device_train_batch_size": training.micro_batch,
        "gradient_accumulation_steps": steps,
        "steps_per_generation": steps * problem.work.optimizer_steps,
        **{part: float(size) for part, size in asdict(memory).items()},
        "peak": float(memory.total),
        "replicas": replicas,
        "tensor_parallel_size": engine.tensor_parallel,
        "engine_weights": engine.weights,
        "cache_tokens": engine.cache_tokens,
        "longest_sequences": engine.cache_tokens // problem.work.longest,
    }


def print_plan(problem: Problem) -> None:
    """Print a column for each layout that fits, or why none does."""
    title = f"{problem.model.name} on {problem.devices} × {problem.device}"
    found = [numbers_of(problem, layout) for layout in layouts(problem)]
    if not found:
        say(f"{title}: nothing fits, because {reason(problem)}.")
        return
    rows = [
        [f"{name}, GB" if isinstance(value, float) else name, *(_shown(each[name]) for each in found)]
        for name, value in found[0].items()
    ]
    usable = f"{problem.usable / 1e9:.0f} GB of each device are usable"
    print_table([""] * (1 + len(found)), rows, f"{title}: what fits; {usable}")
    scheme = problem.work.scheme
    checkpoint, stream = (_shown(float(checkpoint_bytes(problem.model, each))) for each in (scheme, "bf16"))
    say(f"A weight sync moves {checkpoint} GB as a checkpoint in {scheme}, {stream} GB as TRL's stream.")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value / 1e9:.1f}" if value < 9.95e9 else f"{value / 1e9:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).lower()


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    with refused_in_one_line():
        problem = problem_of(args)
    print_plan(problem)
