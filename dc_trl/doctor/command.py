"""Checks in minutes what this machine can do for dc_trl, and prints a block to paste into an issue.

    dc-trl doctor                              no network, the shipped tiny model
    dc-trl doctor --schemes all --minutes 20   every scheme
    dc-trl doctor --model Qwen/Qwen3-0.6B      your model, which is downloaded

It names versions and devices, and tries PyTorch's kernels, the replica, the cost of the constraint, and, where vLLM is
installed, a vLLM server in each scheme: does it start, how far are its probabilities from the policy's, does it take
new weights, and how fast. A check that fails or hangs does not stop the others. The exit code is 1 if one failed.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..files import write_text
from ..settings.command_line import OptionParser, add_serve_options, refused_in_one_line, say
from ..settings.ranges import ABOVE_0, SEED, require_number
from .block import Report, block, progress, publishable, system, variables, versions
from .checks import DEFAULT_SCHEMES, REPLICA_SCHEMES, SERVED_SCHEMES, Result, Setup, plan_checks
from .run import run_checks


TINY_MODEL = Path(__file__).parent.parent / "assets" / "tiny_qwen3"
_INTERRUPTED = 130


def make_parser() -> OptionParser:
    """The options of the command line."""
    parser = OptionParser(__doc__, "doctor")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default: 10)")
    parser.add_argument("--schemes", nargs="+", default=list(DEFAULT_SCHEMES), help="deployment schemes, or 'all'")
    parser.add_argument("--model", help="Hub id or directory (default: the tiny model that is shipped)")
    parser.add_argument("--device", help="'cpu', 'cuda', or one of several: 'cuda:1' (default: what PyTorch finds)")
    parser.add_argument("--no_servers", action="store_true", help="start no vLLM server")
    parser.add_argument("--seed", type=int, default=0, help="of samples (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="new file for the raw results")
    parser.add_argument("--log", type=Path, metavar="FILE", help="new file for tracebacks (default: in runs/)")
    add_serve_options(parser)
    return parser


def chosen_schemes(names: Sequence[str]) -> list[str]:
    """The schemes that `--schemes` means.

    Raises:
        ValueError: there is no such scheme.
    """
    known = [*SERVED_SCHEMES, *REPLICA_SCHEMES]
    if list(names) == ["all"]:
        return known
    for name in names:
        if name not in known:
            raise ValueError(f"schemes: {name!r} is unknown: use 'all' alone, or some of {', '.join(known)}.")
    return list(dict.fromkeys(names))


def require_new(option: str, path: Path) -> None:
    """Makes an empty file, in a folder that is made where it is missing.

    Raises:
        ValueError: the file exists.
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise ValueError(f"{option}='{path}' exists already: choose another file, or remove it.") from None


def main(words: Sequence[str] | None = None) -> int:
    """Runs the checks and prints what they found; the exit code is 1 if one failed, 130 after Ctrl-C."""
    args = make_parser().parse_args(words)
    begin = time.monotonic()
    with refused_in_one_line():
        require_number("minutes", args.minutes, ABOVE_0)
        require_number("seed", args.seed, SEED)
        schemes = chosen_schemes(args.schemes)
        log = args.log or Path("runs", f"doctor-{time.strftime('%Y%m%d-%H%M%S')}.log")
        for option, path in (("log", log), ("json", args.json)):
            if path is not None:
                require_new(option, path)
    model = args.model or str(TINY_MODEL)
    setup = Setup(model, args.device, str(log.resolve()), args.serve_options, seed=args.seed)
    checks = plan_checks(schemes, servers=not args.no_servers)
    say(f"{len(checks)} checks in at most {args.minutes:g} minutes; their output goes to {log}")
    results: list[Result] = []
    interrupted = False
    running = run_checks(checks, setup, 60 * args.minutes - (time.monotonic() - begin))
    try:
        for result in running:
            results.append(result)
            say(publishable(progress(result)))
    except KeyboardInterrupt:
        interrupted = True
        running.close()
        results += [Result(check.name, "left out", reason="stopped by Ctrl-C") for check in checks[len(results) :]]
    named = args.model or "dc_trl's tiny model"
    report = Report(
        results, time.monotonic() - begin, args.minutes, named, str(log), versions(), system(), variables()
    )
    say("\nTo paste into an issue:\n\n" + block(report))
    if args.json is not None:
        write_text(args.json, json.dumps(asdict(report), indent=2) + "\n")
    if interrupted:
        return _INTERRUPTED
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
