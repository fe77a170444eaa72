"""Starts a vLLM server for training: the model in its deployment scheme, with all options that the trainer needs.

    dc-trl serve --model Qwen/Qwen3-8B --scheme fp8 --port 8000

It stays in the foreground; Ctrl-C ends the server and all its processes. Options after `--` go to `vllm serve`. If the
environment variable VLLM_API_KEY has a key, every client has to give it; the trainer reads the same variable.
"""

import os
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..quantization.schemes import SERVED_SCHEMES
from ..serving.errors import ServerError
from ..settings.command_line import OptionParser, add_model, say
from ..settings.fields import ABOVE_0, COUNT, PORT, require_numbers
from . import subcommand


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "serve")
    add_model(parser, "of the model that is trained")
    parser.add_argument("--scheme", default="bf16", choices=SERVED_SCHEMES, help="the server's format (default: bf16)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000); 0 chooses a free one")
    parser.add_argument("--max_model_len", type=int, help="largest number of tokens of a prompt and its completion")
    parser.add_argument(
        "--start_timeout", type=float, default=600.0, help="seconds to wait for a server that logs nothing"
    )
    parser.add_argument("--log", type=Path, help="file for the server's output")
    parser.add_argument("--routing_replay", action="store_true", help="let the server return its choice of experts")
    parser.add_argument("--require_api_key", action="store_true", help="refuse to start without VLLM_API_KEY")
    parser.add_argument("options", nargs="*", help="options of `vllm serve`, after --")
    return parser


@subcommand(make_parser)
def main(args: Namespace) -> None:
    from ..serving.fit import ROUTES_OPTION  # these take seconds, for which a help need not wait
    from ..serving.server import serve

    require_numbers(args, {"port": replace(PORT, least=0), "max_model_len": COUNT, "start_timeout": ABOVE_0})
    if args.require_api_key and not os.environ.get("VLLM_API_KEY"):
        raise ValueError("--require_api_key: set the environment variable VLLM_API_KEY to the key.")
    options = [*([ROUTES_OPTION] if args.routing_replay else []), *args.options]
    given = {name: getattr(args, name) for name in ("revision", "host", "port", "max_model_len", "start_timeout")}
    with (
        suppress(KeyboardInterrupt),
        serve(args.model, args.scheme, **given, log_path=args.log, options=options, report=say) as server,
    ):
        say(
            f"ready: train with --use_vllm --vllm_mode server --vllm_server_base_url {server.url} "
            f"--deployment_scheme {args.scheme}"
        )
        while server.pid is not None:
            time.sleep(1)
        raise ServerError(f"vLLM ended by itself: {server.last_error()} (log: {server.log_path})")
    say("stopped")
