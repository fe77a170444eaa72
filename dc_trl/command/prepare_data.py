"""Cleans training problems, removes what the benchmarks hold, and writes them with a report.

    dc-trl prepare-data --dataset dapo --output data/dapo
    dc-trl prepare-data --file mine.jsonl --prompt_column question --answer_column answer --output data/mine

Train on the result: `dc-trl train --dataset_name data/dapo/train.parquet --prompt_column problem`.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.benchmarks import BENCHMARKS, PUBLISHED, load_benchmark, parse_benchmark
from ..data.cleaning import clean, count_reasons, print_cleaning
from ..data.dapo import DAPO, load_dapo
from ..files import write_text
from ..settings.command_line import OptionParser, refused_in_one_line


TRAIN_FILE, REPORT_FILE = "train.parquet", "report.json"


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
        metavar="NAME[=FILE]",
        help=f"benchmarks whose problems are removed, from the Hub or a local file (default: {' '.join(PUBLISHED)})",
    )
    return parser


def prepare(arguments: argparse.Namespace, folder: Path) -> tuple[int, list[dict[str, str]]]:
    """Write all files into a folder; return the number of rows, and those that were left out."""
    files = dict(map(parse_benchmark, arguments.benchmarks))
    rows = load_dapo(arguments.file, arguments.prompt_column, arguments.answer_column)
    kept, dropped = clean(rows, {name: load_benchmark(name, file) for name, file in files.items()})
    sources = {arguments.dataset: arguments.file or str(DAPO)}
    sources |= {name: file or str(BENCHMARKS[name]) for name, file in files.items()}
    kept.to_parquet(folder / TRAIN_FILE)
    content: dict[str, Any] = {"sources": sources, "counts": count_reasons(dropped)}
    content |= {"rows": len(rows), "kept": len(kept), "dropped": dropped}
    write_text(folder / REPORT_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return len(rows), dropped


def main(words: Sequence[str] | None = None) -> None:
    arguments = make_parser().parse_args(words)
    output = arguments.output.absolute()
    with refused_in_one_line():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"output={str(output)!r} already exists: choose another directory, or remove it first.")
        output.parent.mkdir(parents=True, exist_ok=True)
        # Beside the output, which then appears at once and whole, or not at all.
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
            result = Path(folder, output.name)
            result.mkdir()
            counted = prepare(arguments, result)
            os.replace(result, output)
    print_cleaning(*counted)
    print(f"{TRAIN_FILE} and {REPORT_FILE} are in {arguments.output}")
