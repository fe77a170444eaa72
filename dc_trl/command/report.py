"""Writes the report of a run: one HTML page with its figures, which loads nothing else.

    dc-trl report runs/quickstart
    dc-trl report runs/quickstart --output report.html

To compare several runs, use the tracker that report_to names (trackio, W&B).
"""

from argparse import Namespace
from pathlib import Path

from ..records.page import write_report
from ..settings.command_line import OptionParser
from . import subcommand


PAGE = "report.html"


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "report")
    parser.add_argument("run", metavar="RUN", help="output_dir of a run, finished or not")
    parser.add_argument("--output", type=Path, help=f"file of the page (default: {PAGE} in the run's directory)")
    parser.add_argument("--title", help="title of the page (default: the run's name)")
    return parser


@subcommand(make_parser)
def main(args: Namespace) -> None:
    page = write_report(args.run, args.output or Path(args.run, PAGE), args.title)
    print(f"wrote {page}")
