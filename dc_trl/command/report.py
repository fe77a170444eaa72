"""Says what the mismatch of a run means and what to do next, and writes its report: one HTML page, complete in itself.

    dc-trl report runs/quickstart
    dc-trl report runs/quickstart --output report.html

To compare several runs, use the tracker that report_to names (trackio, W&B).
"""

from argparse import Namespace
from pathlib import Path

from ..records.page import write_report
from ..records.runs import read_run
from ..records.verdict import verdict_of
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
    run = read_run(args.run)
    page = write_report(run, args.output or Path(args.run, PAGE), args.title)
    print(*verdict_of(run).lines, sep="\n")
    print(f"wrote {page}")
