"""Cleans training problems, removes what the benchmarks hold, and writes them with a report.

    dc-trl prepare-data --dataset dapo --output data/dapo
    dc-trl prepare-data --file mine.jsonl --prompt_column question --answer_column answer --output data/mine

Train on the result: `dc-trl train --dataset_name data/dapo/train.parquet --prompt_column problem`.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from ..data.benchmarks import BENCHMARKS, PUBLISHED, benchmark_files, load_benchmark, require_benchmark
from ..data.cleaning import Language, Report, clean
from ..data.contamination import require_ngram
from ..data.dapo import DAPO, load_dapo
from ..files import make_folder
from ..settings.command_line import OptionParser, refused_in_one_line


TRAIN_FILE, REPORT_FILE, DROPPED_FILE = "train.parquet", "report.json", "dropped.jsonl"


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "prepare-data")
    parser.add_argument("--dataset", choices=["dapo"], default="dapo", help=f"from the Hub: {DAPO.hub_id}")
    parser.add_argument("--file", help="local JSON, JSONL or Parquet file of the data set, in place of the Hub")
    parser.add_argument("--prompt_column", help="column of the problems, where the file has others than DAPO's")
    parser.add_argument("--answer_column", help="column of the gold answers; a dot reads nested fields")
    parser.add_argument("--output", required=True, type=Path, help="new directory for the result")
    parser.add_argument(
        "--benchmarks",
        nargs="*",
        default=PUBLISHED,
        metavar="NAME",
        help=f"benchmarks whose problems are removed; without this option all: {' '.join(PUBLISHED)}",
    )
    parser.add_argument(
        "--benchmark_files",
        nargs="*",
        default=[],
        metavar="NAME=FILE",
        help="local files of benchmarks, in place of the Hub",
    )
    parser.add_argument(
        "--language",
        choices=get_args(Language),
        default="any",
        help="'en' leaves out problems with letters other than Latin and Greek ones",
    )
    parser.add_argument("--ngram", type=int, default=13, help="words in a row that count as overlap, at least 4")
    parser.add_argument(
        "--common",
        type=int,
        default=10,
        help="training problems that may share an n-gram before it is a turn of phrase and counts for nothing",
    )
    return parser


def require_new(output: Path) -> None:
    """Refuse an output that holds something, and make the directory above it."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output={str(output)!r} already exists: choose another directory, or remove it first.")
    make_folder("output", output.parent)


def prepare(arguments: argparse.Namespace, folder: Path) -> Report:
    """Write all files into a folder. Everything that can be wrong with the input is found before rows are read."""
    for name in arguments.benchmarks:
        require_benchmark(name)
    files = benchmark_files(arguments.benchmark_files, arguments.benchmarks)
    require_ngram(arguments.ngram, arguments.common)
    rows, repeats = load_dapo(arguments.file, arguments.prompt_column, arguments.answer_column)
    benchmarks = {name: load_benchmark(name, files.get(name)) for name in arguments.benchmarks}
    kept, report = clean(rows, benchmarks, arguments.language, arguments.ngram, arguments.common)
    sources = {arguments.dataset: arguments.file or str(DAPO)}
    sources |= {name: files.get(name) or str(BENCHMARKS[name]) for name in benchmarks}
    report = replace(report, repeats=repeats, options=report.options | {"sources": sources})
    kept.to_parquet(folder / TRAIN_FILE)
    report.save(folder / REPORT_FILE)
    report.save_dropped(folder / DROPPED_FILE)
    return report


def main(words: Sequence[str] | None = None) -> None:
    arguments = make_parser().parse_args(words)
    output = arguments.output.absolute()
    with refused_in_one_line():
        require_new(output)
        # Beside the output, which then appears at once and whole, or not at all.
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
            result = Path(folder, output.name)
            result.mkdir()
            report = prepare(arguments, result)
            os.replace(result, output)
    report.print()
    print(f"{TRAIN_FILE}, {REPORT_FILE} and {DROPPED_FILE} are in {arguments.output}")
