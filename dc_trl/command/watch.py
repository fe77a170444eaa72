"""Watches the mismatch between a live vLLM server and the checkpoints of any trainer beside it, and warns of it.

    dc-trl watch http://127.0.0.1:8000 runs/grpo --every 10 --fail_above 0.05

Each time a new checkpoint is complete, and every few minutes, the server samples completions of fixed prompts through
its public endpoints, and the newest checkpoint below the directory scores them here. A look prints a line and appends
one to watch.jsonl. Trainer and server are not changed; a server that does not answer is asked again later.

The exit code is 1 as soon as δ̄ is not known to be at most --fail_above, 0 after --looks, and 2 if the watch cannot
begin or fails.
"""

import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibration.result import CalibrationSettings
from ..files import append_json
from ..serving.errors import ServerRefusedError, ServerUnavailableError
from ..settings.command_line import OptionParser, add_fields, say, saying_if_slow
from ..settings.fields import ABOVE_0, AT_LEAST_0, COUNT, Range, require_numbers
from . import subcommand
from .own_arguments import TRAIN_DTYPES, add_prompts, prompt_source


if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..calibration.live_server import Checkpoint
    from ..sampling.seeded import Disclosed

WATCH_FILE = "watch.jsonl"
_RANGES = {
    "every": ABOVE_0,
    "looks": COUNT,
    "prompts": Range(least=2, whole=True),
    "top_k": COUNT,
    "fail_above": AT_LEAST_0,
}
_POLL = 1.0  # seconds between two looks at the directory
_SECONDS = 600.0  # that a request for completions may take, while the server samples for a trainer
_SOON = 30.0  # and all that the server says of itself


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "watch")
    parser.add_argument("url", metavar="URL", help="address of the server, http://HOST:PORT")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where a trainer saves its checkpoints")
    parser.add_argument("--every", type=float, default=5.0, help="minutes from one look to the next (default: 5)")
    parser.add_argument("--looks", type=int, help="end after this number of looks; 1 for CI (default: no end)")
    parser.add_argument("--fail_above", type=float, metavar="X", help="end with exit code 1 once δ̄ is above X")
    parser.add_argument("--train_dtype", default="bfloat16", choices=TRAIN_DTYPES, help="see dc-trl calibrate")
    prompts = add_prompts(parser, default=32)
    prompts.add_argument("--top_k", type=int, default=20, help="most probable tokens to compare at a position")
    add_fields(prompts, CalibrationSettings, "max_tokens", "seed", "device")
    parser.set_defaults(max_tokens=64)
    output = parser.add_argument_group("the results")
    output.add_argument("--output", type=Path, default=Path("runs", "watch"), help=f"directory of {WATCH_FILE}")
    output.add_argument("--report_to", help="also log to this tracker of accelerate, as trackio or wandb")
    return parser


@subcommand(make_parser, code=2)
def main(args: Namespace) -> int:
    # They take seconds, which --help does not need.
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from ..calibration.live_server import look, newest_checkpoint
    from ..data.prompts import tokenize
    from ..sampling.seeded import Disclosed
    from ..serving.connection import Connection, Deadline, Patience
    from ..settings.pretrained import load_tokenizer
    from .calibrate import device_of
    from .problems import draw_prompts

    disable_progress_bar()  # a look is one line
    require_numbers(args, _RANGES)
    source = prompt_source(args)
    device = device_of(args)
    connection = Connection(args.url, Patience(request_timeout=_SECONDS))
    tracker = _tracker(args)
    with connection.task(Deadline(_SOON)):
        say(f"{args.url}: {Disclosed.of(connection)}")
    dtype, bf16 = TRAIN_DTYPES[args.train_dtype]
    settings = CalibrationSettings(max_tokens=args.max_tokens, seed=args.seed, bf16=bf16, batch_prompts=args.prompts)
    args.output.mkdir(parents=True, exist_ok=True)
    before = seen = prompts = None
    due, looks = 0.0, 0
    say(f"waiting for a complete checkpoint in {args.directory}")
    while True:
        newest = newest_checkpoint(args.directory)
        # Of a checkpoint that is being rewritten in place, two polls see different files.
        ready = newest is not None and newest == before and (newest != seen or time.monotonic() >= due)
        before = newest
        if not ready or newest is None:
            time.sleep(_POLL)
            continue
        seen, due = newest, time.monotonic() + 60 * args.every
        try:
            if prompts is None:
                tokenizer = load_tokenizer(str(newest.path), "checkpoint")
                prompts = tokenize(draw_prompts(source, tokenizer, args.prompts, args.seed), tokenizer)
            policy = AutoModelForCausalLM.from_pretrained(newest.path, dtype=dtype).to(device).eval()
            with connection.task(Deadline(_SOON)):
                server = Disclosed.of(connection, newest.is_adapter)
            with saying_if_slow(f"{args.url} is asked for completions, and may take {_SECONDS:g} s"):
                numbers = look(connection, server.name, policy, prompts, args.top_k, settings)
        except (ServerUnavailableError, ServerRefusedError) as error:
            say(f"{error}; it is asked again in {args.every:g} minutes, or at the next checkpoint")
            continue
        except (OSError, SafetensorError) as error:
            if newest_checkpoint(args.directory) == newest:
                raise
            say(f"{newest.path} was removed or replaced while it was read ({error}); the next one is read")
            continue
        finally:
            policy = None  # two do not fit beside each other, nor does one stay on the device between the looks
        looks += 1
        age = time.time() - newest.written
        say(_line(newest, age, server, numbers))
        record = {"time": time.time(), "checkpoint": str(newest.path), "step": newest.step, "age": age}
        append_json(args.output / WATCH_FILE, record | server._asdict() | numbers)
        if tracker is not None:
            tracker.log({f"watch/{name}": value for name, value in numbers.items()}, step=looks)
        # NaN is not known to be low.
        failed = args.fail_above is not None and not numbers["discrepancy"] <= args.fail_above
        if failed:
            say(f"failed: δ̄ {numbers['discrepancy']:.3g} is not known to be at most --fail_above {args.fail_above:g}")
        if failed or looks == args.looks:
            if tracker is not None:
                tracker.end_training()
            return int(failed)


def _line(checkpoint: "Checkpoint", age: float, server: "Disclosed", numbers: dict[str, float]) -> str:
    return (
        f"{time.strftime('%H:%M:%S')} {checkpoint.path.name}, {age:.0f} s old: "
        f"δ̄ {numbers['discrepancy']:.3g} [{numbers['discrepancy_low']:.3g}, {numbers['discrepancy_high']:.3g}], "
        f"k3 {numbers['k3_kl']:.2g}, drift {numbers['drift_tv']:.2g}, top-1 flips {numbers['top1_flips']:.1%}, "
        f"floor {numbers['floor']:.2g}; server: weights {server.weight_version}, KV cache {server.kv_cache_dtype}"
    )


def _tracker(args: Any) -> "Accelerator | None":
    if args.report_to is None:
        return None
    from accelerate import Accelerator
    from accelerate.tracking import get_available_trackers

    if args.report_to not in (installed := list(map(str, get_available_trackers()))):
        raise ValueError(
            f"report_to={args.report_to!r} is not one of the trackers that are installed: {', '.join(installed)}. "
            f"Choose one, or pip install {args.report_to}."
        )
    tracker = Accelerator(log_with=args.report_to, project_dir=args.output)
    tracker.init_trackers("dc_trl-watch", {name: str(value) for name, value in vars(args).items()})
    return tracker
