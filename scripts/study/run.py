"""Runs the study of scripts/study/RESULTS.md, or a part of it: every cell with every seed, then tables and figures.

    make study                                             all sweeps, days on two cores
    make study ARGS="--only headline --seeds 0"            the outline of one: a quarter of an hour
    make study ARGS="--known docs/study.jsonl"             the runs that have no line there

The same command goes on where a stopped or killed one was. A run that two sweeps ask for is made once. Its weights are
removed once its line is written, because a hundred runs of SmolLM2 would fill 80 GB.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from jobs import Failure, is_done, lock_output, run_jobs
from lines import merged, read_lines, read_run, write_lines
from show import show_lines
from sweeps import GONE, SWEEPS, Job, Study, load_study

from dc_trl.records.tables import print_table
from dc_trl.settings.command_line import OptionParser, leave_on_sigterm, refused_in_one_line, say


MODELS = Path("runs/study/models")  # where the Makefile puts them
LINES_FILE = "lines.jsonl"


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="SWEEP", help="names of sweeps")
    parser.add_argument("--seeds", nargs="+", type=int, help="in place of the sweeps'")
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="(default: runs/study)")
    parser.add_argument(
        "--known", type=Path, metavar="LINES", help="lines of runs that were made elsewhere, and are not made again"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, help="at a time, each with one thread (default: one for each core)")
    where.add_argument("--devices", help="a GPU for each job at a time: 0,1 or, for three jobs on one, 0,0,0")
    parser.add_argument("--dry_run", action="store_true", help="list the jobs, and make none")
    parser.add_argument("--study", type=Path, default=SWEEPS, help="folder of sweep files (default: the study's own)")
    return parser


def run_study(args: argparse.Namespace) -> list[Failure]:
    """Make the runs that are not made, and write the line of each; return what failed."""
    study = load_study(args.study, args.only, args.seeds)
    if not args.only and not torch.accelerator.is_available():
        study = without_gpu(study)
    known = [] if args.known is None else read_lines(args.known)
    made = {line.key for line in known}
    jobs = [job for job in study.jobs(args.output) if job.key not in made]
    require_runnable(jobs)
    if args.dry_run:
        print_table(["job", "is"], [[job.name, "done" if is_done(job) else "to be made"] for job in jobs])
        return []
    lock = lock_output(args.output)
    file = args.output / LINES_FILE
    lines = merged(known, read_lines(file) if file.is_file() else [])

    def keep(*done: Job) -> None:
        lines[:] = merged(lines, [read_run(job.folder, job.cell, job.seed) for job in done])
        write_lines(file, lines)
        for weights in (file for job in done for file in job.folder.rglob("*.safetensors")):
            weights.unlink()

    keep(*filter(is_done, jobs))
    waiting = [job for job in jobs if not is_done(job)]
    say(f"{len(jobs) - len(waiting)} of {len(jobs)} jobs are done already")
    if args.devices:
        slots = [{"CUDA_VISIBLE_DEVICES": device} for device in args.devices.split(",")]
    else:
        slots = [{}] * (args.jobs or len(os.sched_getaffinity(0)))
    return run_jobs(waiting, slots, lock, keep, say)


def without_gpu(study: Study) -> Study:
    """Return a study without the sweeps that need a GPU, and say which are left out."""
    for sweep in study.sweeps:
        if not sweep.on_cpu:
            say(f"{sweep.name} is left out: its runs need a GPU (use_cpu: false), and this machine has none")
    return replace(study, sweeps=tuple(sweep for sweep in study.sweeps if sweep.on_cpu))


def require_runnable(jobs: list[Job]) -> None:
    """Refuse jobs whose model has not been made, or whose method the package no longer has.

    Raises:
        ValueError: names the setting and the remedy.
    """
    for job in jobs:
        for name, value in job.settings.items():
            if isinstance(value, str) and value in GONE and not is_done(job):
                raise ValueError(f"{name}={value!r} is no longer there: check out {GONE[value]}, where it is 'lag'.")
    for model in sorted({Path(job.settings["model_name_or_path"]) for job in jobs if not is_done(job)}):
        if model.parent == MODELS and not model.is_dir():
            raise ValueError(f"model_name_or_path={str(model)!r} does not ship: make it by `make {model}`.")


def main() -> None:
    args = make_parser().parse_args()
    leave_on_sigterm()
    try:
        with refused_in_one_line():
            failures = run_study(args)
            if not args.dry_run:
                show_lines(args.output / LINES_FILE, args.output, args.study, args.only, args.seeds)
    except KeyboardInterrupt:
        sys.exit(130)
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
