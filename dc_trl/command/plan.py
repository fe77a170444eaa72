"""Plans the memory of a run from a model's configuration alone: what each training device holds.

    dc-trl plan --model configs/models/qwen3_8b.json --device h100 --gpus 4
    dc-trl plan --config qwen3_30b_a3b_fp8 --device h100 --gpus 16

It loads no weights and no engine, and starts nothing. docs/gpu.md has the formulas, and runs beside them.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields

from ..planning.architecture import load_architecture
from ..planning.memory import DEVICES, USABLE, Strategy, Work, trainer_memory, work_of_config
from ..records.tables import print_table
from ..settings.command_line import OptionParser, add_fields, refused_in_one_line
from ..settings.paths import config_file, shipped
from ..settings.ranges import COUNT, require_number


WORK = [field.name for field in fields(Work)]
# How the devices train: the strategy, and whether gradients are reduced after each micro-batch.
WAYS: dict[str, tuple[Strategy, bool]] = {
    "ddp": ("ddp", False),
    "fsdp2": ("fsdp2", False),
    "fsdp2, sync_each_batch": ("fsdp2", True),
}


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "plan")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", default="h100", choices=DEVICES, help="kind of device (default: h100)")
    machine.add_argument("--gpus", type=int, default=8, help="devices that train (default: 8)")
    work = parser.add_argument_group("the work")
    work.add_argument("--model", type=shipped, help="Hub id, directory or config.json (default: that of --config)")
    work.add_argument("--revision", default="main", help="revision of a Hub model")
    work.add_argument("--config", help="training configuration, or the name of one that ships, as for dc-trl train")
    add_fields(work, Work, *WORK)
    parser.set_defaults(**dict.fromkeys(WORK))  # an option that is given replaces the configuration's value
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    with refused_in_one_line():
        require_number("gpus", args.gpus, COUNT)
        settings, of_config = ({}, None) if args.config is None else work_of_config(config_file(args.config))
        name = args.model or shipped(of_config or "")
        if not name:
            raise ValueError("model is not set: give --model, or --config with a model_name_or_path.")
        given = {field: value for field in WORK if (value := getattr(args, field)) is not None}
        work = Work(**settings | given)
        model = load_architecture(name, args.revision)
    memories = [trainer_memory(model, strategy, args.gpus, work, sync) for strategy, sync in WAYS.values()]
    usable = DEVICES[args.device] * USABLE
    rows = [
        [f"{part}, GB", *(f"{asdict(memory)[part] / 1e9:.1f}" for memory in memories)] for part in asdict(memories[0])
    ]
    rows.append(["peak, GB", *(f"{memory.total / 1e9:.1f}" for memory in memories)])
    rows.append(["fits", *("yes" if memory.total <= usable else "no" for memory in memories)])
    title = f"{name}: each of {args.gpus} training {args.device}, of which {usable / 1e9:.0f} GB are usable"
    print_table(["", *WAYS], rows, title)
