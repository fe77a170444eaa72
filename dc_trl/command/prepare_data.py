"""Cleans training problems, removes what the benchmarks hold, and writes them with a report.

    dc-trl prepare-data --output data/dapo
    dc-trl prepare-data --file mine.jsonl --prompt_column question --answer_column answer --output data/mine

Train on the result: `dc-trl train --dataset_name data/dapo/train.parquet --prompt_column problem`.
"""

from argparse import Namespace
from pathlib import Path

from ..files import write_json
from ..settings.command_line import OptionParser
from ..settings.paths import require_folder
from . import subcommand


TRAIN_FILE, REPORT_FILE = "train.parquet", "report.json"


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "prepare-data")
    parser.add_argument("--file", help="JSON, JSONL, Parquet or CSV (default: BytedTsinghua-SIA/DAPO-Math-17k)")
    parser.add_argument("--prompt_column", help="column of the problems, if it is not DAPO's")
    parser.add_argument("--answer_column", help="column of the right answers; for a nested field column.field")
    parser.add_argument("--output", required=True, type=Path, help="new directory for the result")
    parser.add_argument(
        "--benchmarks",
        nargs="*",
        metavar="NAME[=FILE]",
        help="benchmarks whose problems are removed, from the Hub or a local file (default: all but arithmetic)",
    )
    return parser


@subcommand(make_parser)
def main(args: Namespace) -> None:
    # They take seconds, which --help does not need.
    from ..data.cleaning import clean, count_reasons, print_cleaning
    from ..data.sources import BENCHMARKS, DAPO, PUBLISHED, load_benchmark, load_dapo, parse_benchmark

    output: Path = args.output
    # What can be wrong with the input is found before rows are read.
    if output.exists():
        raise ValueError(f"output={str(output)!r} already exists: choose another directory, or remove it first.")
    require_folder("output", output)
    files = dict(map(parse_benchmark, PUBLISHED if args.benchmarks is None else args.benchmarks))
    rows = load_dapo(args.file, args.prompt_column, args.answer_column)
    kept, dropped = clean(rows, {name: load_benchmark(name, file) for name, file in files.items()})
    sources = {"problems": args.file or str(DAPO)}
    sources |= {name: file or str(BENCHMARKS[name]) for name, file in files.items()}
    output.mkdir(parents=True)
    kept.to_parquet(output / TRAIN_FILE)
    counts = {"counts": count_reasons(dropped), "rows": len(rows), "kept": len(kept)}
    write_json(output / REPORT_FILE, {"sources": sources, **counts, "dropped": dropped})
    print_cleaning(len(rows), dropped)
    if not kept:
        raise ValueError(f"output={str(output)!r}: no row is left, and {REPORT_FILE} there says why.")
    print(f"{TRAIN_FILE} and {REPORT_FILE} are in {output}")
