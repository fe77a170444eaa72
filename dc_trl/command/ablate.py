"""Runs an ablation: every variant of a sweep file with every seed, several jobs at a time; then one table, one figure.

    dc-trl ablate tolerance [--jobs 2] [--base qwen3_8b_fp8]

A name is that of a file that ships, a path that of one of yours. The same command goes on where a stopped or killed
sweep was. docs/ablations.md says what a sweep file holds.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..ablation.jobs import Failure, OutputLock, require_own_folders, require_trainable, run_jobs, status
from ..ablation.machine import choose_slots, parse_launch
from ..ablation.plan import Job, Sweep, load_sweep, parse_overrides
from ..ablation.results import collect, write_results
from ..ablation.sweep_figure import draw_sweep
from ..records.tables import print_table
from ..settings.command_line import OptionParser, leave_on_sigterm, refused_in_one_line, say
from ..settings.paths import config_file


# Starts a sub-command behind an interpreter or a launcher, wherever the package is installed.
MODULE = ("-m", "dc_trl")


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "ablate")
    parser.add_argument("sweep", help="sweep file, or the name of one that ships in configs/sweeps")
    parser.add_argument("--output", type=Path, help="directory for runs and results (default: runs/ablations/NAME)")
    parser.add_argument(
        "--base", help="configuration, or the name of one that ships, in place of the sweep's `config`"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for all jobs, on top of the sweep's `fixed`"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="in place of the sweep's")

    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--jobs", type=int, help="at a time (default: one for each device; without GPUs as many as the cores allow)"
    )
    machine.add_argument("--threads", type=int, default=1, help="of each job (OMP_NUM_THREADS); default 1")
    machine.add_argument(
        "--devices", help="GPUs, each for one job: 0,1,2,3; several for a job: 0+1,2+3 (default: all, one for a job)"
    )
    machine.add_argument(
        "--launch", help="what starts a job of several processes: 'accelerate launch --config_file FILE'"
    )

    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry_run", action="store_true", help="check the settings and list the jobs")
    what.add_argument("--collect", action="store_true", help="only make table and figure of what is there")
    what.add_argument("--check", action="store_true", help=argparse.SUPPRESS)  # how the command calls itself
    return parser


def check(variants: Path, jobs: int) -> None:
    """In a process that is started as the jobs will be."""
    from ..training.check import check_configurations  # slow, with all of the trainer

    sys.path.append(os.getcwd())  # where reward functions of one's own stand
    check_configurations(variants, jobs)


def run(args: argparse.Namespace) -> list[Failure]:
    """Does what the options ask for, and returns the jobs that failed."""
    base = None if args.base is None else config_file(args.base, "base")
    file = config_file(args.sweep, "sweep", "sweeps")
    sweep = load_sweep(file, base, parse_overrides(args.set), args.seeds)
    output = args.output or Path("runs", "ablations", sweep.name)
    jobs, failures = sweep.jobs(output), list[Failure]()
    require_own_folders(jobs)
    if not args.collect:
        slots = choose_slots(sweep, args.threads, args.jobs, args.devices, args.launch)
        launch = parse_launch(args.launch) if args.launch else [sys.executable]
        require_trainable(sweep, [*launch, *MODULE, "ablate", "--check", "--jobs", str(len(slots))], slots)
        if args.dry_run:
            print_table(["job", "would"], [[job.name, status(job)] for job in jobs])
            return []
        with OutputLock(output, say) as lock:
            failures = run_jobs(jobs, [*launch, *MODULE, "train"], slots, lock, say)
    report(sweep, jobs, output)
    return failures


def report(sweep: Sweep, jobs: list[Job], output: Path) -> None:
    results = collect(sweep, jobs)
    for title, table in results.tables():
        print_table(*table, title=title)
    for path in [*write_results(results, output), *draw_sweep(results, output)]:
        print(f"wrote {path}")


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    leave_on_sigterm()
    try:
        with refused_in_one_line():
            if args.check:
                check(Path(args.sweep), args.jobs)
                return
            failures = run(args)
    except KeyboardInterrupt:
        sys.exit(130)
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures:
        sys.exit(1)
