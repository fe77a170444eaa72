"""Runs an ablation: every variant of a sweep file with every seed, several jobs at a time; then one table, one figure.

    python scripts/ablate.py configs/sweeps/tolerance.yaml [--jobs 2] [--base configs/qwen3_8b_fp8.yaml]

The same command goes on where a stopped or killed sweep was. docs/ablations.md says what a sweep file holds.
"""

import argparse
import functools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from dc_trl.ablation.figure import draw_sweep
from dc_trl.ablation.jobs import Failure, OutputLock, require_own_folders, run_jobs, status
from dc_trl.ablation.plan import Job, Sweep, load_sweep
from dc_trl.ablation.results import collect, write_results
from dc_trl.records.tables import print_table
from dc_trl.settings.command_line import OptionParser


TRAIN = Path(__file__).with_name("train.py")


def parse_arguments() -> argparse.Namespace:
    parser = OptionParser(__doc__)
    parser.add_argument("sweep", type=Path, help="sweep file; those of the paper are in configs/sweeps")
    parser.add_argument("--output", type=Path, help="directory for runs and results (default: runs/ablations/NAME)")
    parser.add_argument("--base", type=Path, help="configuration in place of the sweep's `config`")
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
    what.add_argument("--check", action="store_true", help=argparse.SUPPRESS)  # how the script calls itself
    return parser.parse_args()


def parse_overrides(words: list[str]) -> dict[str, Any]:
    overrides = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ValueError(f"set={word!r} is invalid: write FIELD=VALUE.")
        try:
            overrides[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"set={word!r} is invalid: {value!r} is no YAML value.") from error
    return overrides


def parse_launch(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"launch={text!r} is invalid ({error}): write it as on a command line.") from error
    if not words:
        raise ValueError(f"launch={text!r} is empty: write a command, or leave it out.")
    return words


def choose_slots(args: argparse.Namespace, sweep: Sweep) -> list[dict[str, str]]:
    """Environment variables of the jobs that run at the same time, a mapping for each."""
    cores = len(os.sched_getaffinity(0))
    if not 1 <= args.threads <= cores:
        raise ValueError(f"threads={args.threads} is invalid with {cores} cores: use 1 to {cores}.")
    if args.devices is not None:
        groups = [group.replace("+", ",") for group in args.devices.split(",")]
        single = [device for group in groups for device in group.split(",")]
        if not all(single) or len(set(single)) < len(single):
            raise ValueError(f"devices={args.devices!r} is invalid: name each GPU once, as in 0,1 or 0+1,2+3.")
    elif args.launch or all(sweep.settings(variant).get("use_cpu") for variant in sweep.variants):
        groups = []
    else:
        groups = visible_gpus()
    most = cores // args.threads
    jobs = args.jobs
    if jobs is None:
        jobs = min(most, len(groups)) if groups else 1 if args.launch else most
    if not 1 <= jobs <= most:
        raise ValueError(f"jobs={jobs} with threads={args.threads} is invalid with {cores} cores: use 1 to {most}.")
    if groups and jobs > len(groups):
        raise ValueError(f"jobs={jobs} is invalid with {len(groups)} device(s) for one job each: use fewer jobs.")
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    if not groups:
        return [threads] * jobs
    return [threads | {"CUDA_VISIBLE_DEVICES": group} for group in groups[:jobs]]


def visible_gpus() -> list[str]:
    import torch  # slow, and only asked where the configuration may use GPUs

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def check(path: Path, jobs: int) -> None:
    """Puts every variant through the parser of the training script, and what else it refuses before it loads a model.

    In a process of its own, started as the jobs will be: the parser sets up devices and process groups, and some
    settings have to fit the number of processes.
    """
    import train  # beside this file
    from trl import ModelConfig

    from dc_trl import DCGRPOConfig
    from dc_trl.grading.rewards import get_reward
    from dc_trl.settings.configuration import ConfigurationParser
    from dc_trl.settings.pretrained import require_model
    from dc_trl.training.arguments import ServerArguments, require_servable
    from dc_trl.training.problems import DataArguments

    sys.path.append(os.getcwd())  # where reward functions of one's own stand
    for name, settings in yaml.safe_load(path.read_text()).items():
        config = path.with_name(f"variant-{os.getpid()}.yaml")
        config.write_text(yaml.safe_dump(settings))
        try:
            parser = ConfigurationParser(train.ARGUMENTS)
            parts = {type(part): part for part in parser.parse_args_and_config(["--config", str(config)])}
            server, args = parts[ServerArguments], parts[DCGRPOConfig]
            require_servable(server, args)
            require_model(parts[ModelConfig].model_name_or_path)
            for reward in parts[DataArguments].rewards:
                get_reward(reward)
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise ValueError(f"variant {name!r}: {error}") from error
        shared = args.use_vllm and args.vllm_mode == "server" and (server.serve is None or server.serve_devices)
        if shared and jobs > 1:
            raise ValueError(
                f"variant {name!r}: jobs={jobs} would share one vLLM server, or its GPUs, and load their weights over "
                "each other's: use --jobs 1, serve=auto without serve_devices, or vllm_mode=colocate."
            )


def require_settings(sweep: Sweep, launch: list[str], slots: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory(prefix="dc_trl-ablate-") as folder:
        file = Path(folder, "variants.yaml")
        own = {"output_dir": folder, "seed": sweep.seeds[0]}
        variants = {variant.name: sweep.settings(variant) | own for variant in sweep.variants}
        file.write_text(yaml.safe_dump(variants))
        command = [*launch, str(Path(__file__)), str(file), "--check", "--jobs", str(len(slots))]
        try:
            done = subprocess.run(command, env=os.environ | slots[0], capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ValueError(
                f"launch={launch[0]!r} is no command: activate its environment, or give its path."
            ) from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        raise ValueError(errors[0].removeprefix("error: ") if errors else done.stderr.strip()[-3000:])


def list_jobs(jobs: list[Job]) -> None:
    print_table(["job", "would"], [[job.name, status(job)] for job in jobs])


def report(sweep: Sweep, jobs: list[Job], output: Path) -> None:
    results = collect(sweep, jobs)
    for title, table in results.tables():
        print_table(*table, title=title)
    for path in [*write_results(results, output), *draw_sweep(results, output)]:
        print(f"wrote {path}")


def list_failures(failures: list[Failure]) -> None:
    for failure in failures:
        print(f"\n{failure.job.name} failed with exit code {failure.code}:", file=sys.stderr)
        for line in failure.last_lines:
            print(f"    {line}", file=sys.stderr)


def main() -> None:
    args = parse_arguments()
    # Leaves as Ctrl-C does, through the block that ends the jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    say = functools.partial(print, flush=True)
    failures: list[Failure] = []
    try:
        if args.check:
            check(args.sweep, args.jobs)
            return
        sweep = load_sweep(args.sweep, args.base, parse_overrides(args.set), args.seeds)
        output = args.output or Path("runs", "ablations", sweep.name)
        jobs = sweep.jobs(output)
        require_own_folders(jobs)
        if not args.collect:
            slots = choose_slots(args, sweep)
            launch = parse_launch(args.launch) if args.launch else [sys.executable]
            require_settings(sweep, launch, slots)
            if args.dry_run:
                list_jobs(jobs)
                return
            with OutputLock(output, say) as lock:
                failures = run_jobs(jobs, [*launch, str(TRAIN)], slots, lock, say)
        report(sweep, jobs, output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    list_failures(failures)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
