"""Writes the report of one run, or of several side by side: one HTML page, and its figures as PNGs.

dc-trl report runs/quickstart
dc-trl report runs/grpo-seed0 runs/dc-grpo-seed0 --output report.html
"""

import gc
from collections.abc import Sequence
from pathlib import Path

from ..report import write_report
from ..settings.command_line import OptionParser, refused_in_one_line


PAGE = "report.html"


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run, finished or not")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"the page, its figures go to the folder OUTPUT_figures; without it {PAGE} in the run, if it is one",
    )
    parser.add_argument("--title", help="of the page (default: names the runs)")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    gc.disable()  # figures live to the end of the process, and looking through them takes a tenth of its time
    with refused_in_one_line():
        if args.output is None and len(args.runs) > 1:
            raise ValueError(
                f"output is not set, and there are {len(args.runs)} runs: name the page, --output {PAGE}."
            )
        page, *figures = write_report(args.runs, args.output or Path(args.runs[0], PAGE), args.title)
    print(f"wrote {page}, and {len(figures)} figures in {figures[0].parent}" if figures else f"wrote {page}")
