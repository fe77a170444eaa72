"""Plans a run from a model's configuration alone: what fits, where the time goes, and the commands to launch it.

    dc-trl plan --model configs/models/qwen3_8b.json --device h100 --gpus 8
    dc-trl plan --model configs/models/qwen3_30b_a3b.json --device h100 --gpus 16 32 64 \\
      --config qwen3_30b_a3b_fp8 --accelerate_config configs/accelerate/fsdp2_moe.yaml
    dc-trl plan --check          formulas against runs of the shipped model and a random 0.6B on this CPU
    dc-trl plan --growth         step time against batch, length, model and processes, beside the plan's

It loads no weights and no engine, and starts nothing but with --check and --growth. Formulas and assumptions:
docs/planning.md. A number may be given for each assumption, or two: the slow and the fast one.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ..files import read_yaml
from ..planning.architecture import load_architecture
from ..planning.commands import shell_lines, vllm_command
from ..planning.devices import DEVICES, FAST, SLOW, Assumptions, with_overrides
from ..planning.plan import Cluster, NoPlan, Plan, make_plan
from ..planning.report import as_json, assumption_lines, refusal, summary_table, tables
from ..planning.settings import PlanSettings, settings_of_config
from ..records.tables import print_table
from ..settings.command_line import OptionParser, add_fields, refused_in_one_line, say
from ..settings.paths import config_file, shipped
from ..settings.ranges import COUNT, require_number


WORK = [field.name for field in fields(PlanSettings)]


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "plan")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="measure here what the formulas say")
    what.add_argument("--growth", action="store_true", help="measure step time against size here")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", default="h100", choices=DEVICES, help="kind of device (default: h100)")
    machine.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=[8],
        help="devices in all, several give a table; and the processes of --config",
    )
    machine.add_argument("--gpus_per_node", type=int, default=8, help="devices of a node (default: 8)")
    machine.add_argument("--transport", choices=("memory", "shared", "nccl"), help="how weights reach the engine")
    work = parser.add_argument_group("the work")
    work.add_argument(
        "--model", type=shipped, help="Hub id, directory or config.json; by default the model of --config"
    )
    work.add_argument("--revision", default="main", help="revision of a Hub model")
    work.add_argument("--config", help="training configuration, or the name of one that ships, as for dc-trl train")
    work.add_argument(
        "--accelerate_config", type=shipped, help="a launch configuration, whose processes --config is for"
    )
    work.add_argument("--processes", type=int, help="processes that --config is for, in place of --gpus")
    add_fields(work, PlanSettings, *WORK)
    parser.set_defaults(**dict.fromkeys(WORK))  # what is given overrides the configuration
    assumed = parser.add_argument_group("assumptions, one number or the slow and the fast one")
    for field in fields(Assumptions):
        slow, fast = (getattr(each, field.name) for each in (SLOW, FAST))
        words = f"{field.metadata['help'].replace('%', '%%')} (default: {slow:g} {fast:g})"
        assumed.add_argument(f"--{field.name}", type=float, nargs="+", help=words)
    parser.add_argument("--json", action="store_true", help="print numbers for a program: bytes, seconds, FLOPs")
    return parser


def make_plans(args: argparse.Namespace) -> tuple[list[Plan | NoPlan], tuple[Assumptions, Assumptions]]:
    """One plan for each number of devices."""
    for name in ("gpus_per_node", "processes"):
        if (value := getattr(args, name)) is not None:
            require_number(name, value, COUNT)
    for count in args.gpus:
        require_number("gpus", count, COUNT)
    given = {name: value for name in WORK if (value := getattr(args, name)) is not None}
    named, found = args.model, [given] * len(args.gpus)
    if args.config is not None:
        processes = args.processes
        if processes is None and args.accelerate_config is not None:
            processes = read_yaml(Path(args.accelerate_config)).get("num_processes", 1)
        of_config = [settings_of_config(config_file(args.config), processes or count) for count in args.gpus]
        named, found = named or shipped(of_config[0][1]), [settings | given for settings, _ in of_config]
    if named is None:
        raise ValueError("model is not set: give --model, or --config with a model_name_or_path.")
    works = [PlanSettings(**settings).workload() for settings in found]
    overrides = {field.name: value for field in fields(Assumptions) if (value := getattr(args, field.name))}
    assumptions = with_overrides(overrides)
    architecture = load_architecture(named, args.revision)
    clusters = [Cluster(DEVICES[args.device], count, args.gpus_per_node) for count in args.gpus]
    pairs = zip(works, clusters, strict=True)
    return [
        make_plan(architecture, work, cluster, assumptions, args.transport) for work, cluster in pairs
    ], assumptions


def print_plan(plan: Plan | NoPlan, assumptions: tuple[Assumptions, Assumptions], config: str) -> None:
    if isinstance(plan, NoPlan):
        say("\n".join(refusal(plan)))
    else:
        for title, (head, rows) in tables(plan):
            print_table(head, rows, title)
        say("\n".join([*shell_lines(plan, config), "# the server's own line:", shlex.join(vllm_command(plan))]))
    say("\nAssumed: " + "\n  ".join(assumption_lines(plan, assumptions)))


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    if args.check or args.growth:
        from ..planning.trials import check_tables, growth_table  # loads the trainer, which takes a while

        for title, (head, rows) in check_tables() if args.check else [growth_table()]:
            print_table(head, rows, title)
        return
    with refused_in_one_line():
        plans, assumptions = make_plans(args)
    config = str(args.config or "CONFIG.yaml")
    if args.json:
        say(json.dumps([as_json(plan, assumptions, config) for plan in plans], indent=2))
        return
    for plan in plans:
        print_plan(plan, assumptions, config)
    if len(plans) > 1:
        head, rows = summary_table(plans)
        print_table(head, rows, "All of them")
