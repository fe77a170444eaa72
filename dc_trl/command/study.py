"""Runs the study of docs/study.md, or a part of it: every cell with every seed, then lines, tables and figures.

    dc-trl study                          all sweeps of configs/study, days on two cores
    dc-trl study --only headline          one of them
    dc-trl study --known docs/study.jsonl the runs that have no line there
    dc-trl study --tables docs/study.jsonl --output build/study     tables and figures of raw lines, no run
    dc-trl study --only headline --against docs/study.jsonl         whether this machine finds what the page says

The same command goes on where a stopped or killed one was. A run that two sweeps ask for is made once.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..ablation.jobs import Failure, OutputLock, require_own_folders, require_trainable, run_jobs, status
from ..ablation.machine import choose_slots
from ..ablation.plan import Job
from ..files import write_text
from ..records.tables import TableRows, markdown_table, print_table
from ..settings.command_line import OptionParser, leave_on_sigterm, refused_in_one_line, say
from ..settings.paths import shipped
from ..study.figures import draw_mismatch, draw_sweep
from ..study.lines import Line, lines_of_jobs, merged, read_lines, without_line, write_lines
from ..study.plan import Study, load_study
from ..study.tables import SweepLines, comparison_table, lines_of_sweeps
from .ablate import MODULE


MODELS = Path("runs/study/models")  # where the Makefile puts them
LINES_FILE = "lines.jsonl"
ON_TERMINAL = (0, 1, 2, 6, 7, 8, 9, 10)  # columns of a table that fit there


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "study")
    parser.add_argument(
        "--study",
        type=shipped,
        default=shipped("configs/study"),
        help="folder of sweep files (default: configs/study)",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="SWEEP", help="names of sweep files")
    parser.add_argument("--seeds", nargs="+", type=int, help="in place of the sweeps'")
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="(default: runs/study)")
    parser.add_argument(
        "--known",
        type=Path,
        metavar="LINES",
        help="lines of runs that were made elsewhere: they are not made again, and are in the tables",
    )
    parser.add_argument("--jobs", type=int, help="at a time (default: one for each core)")
    parser.add_argument("--threads", type=int, default=1, help="of each job; default 1")
    parser.add_argument(
        "--devices", help="GPUs of the jobs: 0,1 or, for three jobs on one, 0,0,0 (default: one job for each GPU)"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="LINES",
        help="lines of another study: a table for each sweep says where both ended, and whether they differ",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry_run", action="store_true", help="check the settings and list the jobs")
    what.add_argument("--collect", action="store_true", help="only make lines, tables and figures of runs that ended")
    what.add_argument("--tables", type=Path, metavar="LINES", help="only make tables and figures of these lines")
    return parser


def run_study(args: argparse.Namespace, study: Study) -> list[Failure]:
    """Runs what is not done and writes the lines of what is; returns what failed."""
    if not (args.only or args.collect or torch.accelerator.is_available()):
        study = _on_a_cpu(study)
    known = [] if args.known is None else read_lines(args.known)
    jobs = without_line(study.jobs(args.output), known)
    require_own_folders(jobs)
    if args.collect:
        collect(args.output, jobs, known)
        return []
    for model in sorted({Path(job.settings["model_name_or_path"]) for job in jobs}):
        if model.parent == MODELS and not model.is_dir():
            raise ValueError(f"model_name_or_path={str(model)!r} does not ship: make it by `make {model}`.")
    slots = choose_slots(study.sweeps[0], args.threads, args.jobs, args.devices)
    for sweep in study.sweeps:
        require_trainable(sweep, [sys.executable, *MODULE, "ablate", "--check", "--jobs", str(len(slots))], slots)
    if args.dry_run:
        print_table(["job", "would"], [[job.name, status(job)] for job in jobs])
        return []
    with OutputLock(args.output, say) as lock:
        failures = run_jobs(jobs, [sys.executable, "-m", "dc_trl.command.study_job"], slots, lock, say)
    collect(args.output, jobs, known)
    return failures


def _on_a_cpu(study: Study) -> Study:
    """A study without the sweeps that need a GPU; says which are left out."""
    for sweep in study.sweeps:
        if not sweep.on_cpu:
            say(f"{sweep.name} is left out: its runs need a GPU (use_cpu: false), and this machine has none")
    return replace(study, sweeps=tuple(sweep for sweep in study.sweeps if sweep.on_cpu))


def collect(output: Path, jobs: list[Job], known: list[Line]) -> None:
    """Adds the lines of the jobs that are done, and the known ones, to those that are there."""
    file = output / LINES_FILE
    earlier = merged(known, read_lines(file) if file.is_file() else [])
    write_lines(file, merged(earlier, lines_of_jobs(jobs)))


def report(output: Path, lines_file: Path, study: Study, others: Mapping[str, SweepLines]) -> None:
    """Tables and figures of raw lines; and tables of both where `others` has a sweep of the same name."""
    lines = read_lines(lines_file)
    output.mkdir(parents=True, exist_ok=True)
    parts = []
    for found in lines_of_sweeps(study, lines):
        name = found.sweep.name
        parts.append(_show(name, found.table(), ON_TERMINAL))
        draw_sweep(found, int(study.base["max_steps"]), output / f"{name}.png")
        if name in others:
            table = comparison_table(found, others[name])
            parts.append(_show(f"{name}, compared", table, range(len(table[0]))))
    draw_mismatch(lines, output / "mismatch.png")
    write_text(output / "tables.md", "\n".join(parts))
    print(f"wrote {output / 'tables.md'}, and the figures beside it")


def _show(title: str, table: TableRows, columns: Sequence[int]) -> str:
    """Prints these columns of a table; returns all of it as a section of `tables.md`."""
    head, rows = table
    print_table([head[i] for i in columns], [[row[i] for i in columns] for row in rows], title)
    return f"## {title}\n\n{markdown_table(head, rows)}"


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    leave_on_sigterm()
    failures: list[Failure] = []
    try:
        with refused_in_one_line():
            study = load_study(Path(args.study), args.only, args.seeds)
            others = {} if args.against is None else _others(args)
            if args.tables is None:
                failures = run_study(args, study)
            if not args.dry_run:
                report(args.output, args.tables or args.output / LINES_FILE, study, others)
    except KeyboardInterrupt:
        sys.exit(130)
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures:
        sys.exit(1)


def _others(args: argparse.Namespace) -> dict[str, SweepLines]:
    """The lines to compare with by the sweep's name, of all its seeds, whichever are run."""
    study = load_study(Path(args.study), args.only)
    return {found.sweep.name: found for found in lines_of_sweeps(study, read_lines(args.against))}
