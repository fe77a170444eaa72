"""The vLLM server that a training run starts and ends itself."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..config import DCGRPOConfig
from ..serving.fit import ROUTES_OPTION
from ..serving.server import serve
from ..settings.command_line import say
from ..settings.contradictions import require_effect
from ..settings.fields import require_fields, setting


SERVER_LOG = "vllm_server.log"


@dataclass
class ServerArguments:
    """The vLLM server, where the run starts its own."""

    serve: Literal["auto"] | None = setting(
        None,
        "'auto' starts a vLLM server for the model in its deployment_scheme, and ends it with the run (use_vllm: "
        "true, vllm_mode: server). For a server that runs elsewhere set vllm_server_base_url.",
    )
    serve_devices: str | None = setting(None, "GPUs of that server, as in CUDA_VISIBLE_DEVICES: '3' or '2,3'.")
    serve_options: list[str] = setting([], "Further options of that server, as for vllm serve.")

    def __post_init__(self):
        require_fields(self)


def require_servable(server: ServerArguments, args: DCGRPOConfig) -> None:
    """Refuse a server that the settings would not use."""
    require_effect(server)
    if server.serve is None:
        return
    named = args.vllm_server_base_url or args.vllm_server_base_urls
    if named is not None or not args.use_vllm or args.vllm_mode != "server":
        raise ValueError(
            f"serve={server.serve!r} starts a server that nothing uses with use_vllm={args.use_vllm}, vllm_mode="
            f"{args.vllm_mode!r} and the address {named!r}: leave serve out, or set use_vllm=true, vllm_mode=server "
            "and no address."
        )


def start_server(server: ServerArguments, args: DCGRPOConfig, model: str, revision: str, stack: ExitStack) -> None:
    """Start the run's own server and write its address into `args`; it ends when the stack is closed."""
    gpu_options = ["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)]
    running = stack.enter_context(
        serve(
            model,
            args.deployment_scheme or "bf16",
            revision=revision,
            max_model_len=args.vllm_max_model_length,
            start_timeout=args.vllm_server_timeout,
            log_path=Path(args.output_dir, SERVER_LOG),
            environment={"CUDA_VISIBLE_DEVICES": server.serve_devices} if server.serve_devices else {},
            options=[
                *(gpu_options if torch.cuda.is_available() else []),
                *([ROUTES_OPTION] if args.routing_replay else []),
                *server.serve_options,
            ],
            report=say,
        )
    )
    args.vllm_server_base_url = running.url
