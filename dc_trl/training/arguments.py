"""What a training configuration says of the run around the trainer: its vLLM server, and what watches it."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from ..config import DCGRPOConfig
from ..serving.server import serve
from ..settings.ranges import COUNT, SHARE, require_numbers


SERVER_LOG = "vllm_server.log"


@dataclass
class ServerArguments:
    """The vLLM server, where the run starts its own."""

    serve: str | None = field(
        default=None,
        metadata={
            "help": "'auto' starts a vLLM server for the model in its deployment_scheme, and ends it with the run "
            "(use_vllm: true, vllm_mode: server). One that runs elsewhere: vllm_server_base_url."
        },
    )
    serve_devices: str | None = field(
        default=None, metadata={"help": "GPUs of that server, as in CUDA_VISIBLE_DEVICES: '3' or '2,3'."}
    )
    serve_options: list[str] = field(
        default_factory=list, metadata={"help": "Further options of that server, as for `vllm serve`."}
    )


def require_servable(server: ServerArguments, args: DCGRPOConfig) -> None:
    """Refuses a server that the settings leave without use."""
    if server.serve not in (None, "auto"):
        raise ValueError(f"serve={server.serve!r} is unknown: use 'auto', or vllm_server_base_url for a server's URL.")
    if server.serve is None and (server.serve_devices or server.serve_options):
        name = "serve_devices" if server.serve_devices else "serve_options"
        raise ValueError(f"{name}={getattr(server, name)!r} has no effect without a server: set serve=auto.")
    if server.serve is not None and not (args.use_vllm and args.vllm_mode == "server"):
        raise ValueError(
            f"serve={server.serve!r} with use_vllm={args.use_vllm} and vllm_mode={args.vllm_mode!r} starts a server "
            "that nothing uses: set use_vllm=true and vllm_mode=server, or leave serve out."
        )
    if server.serve is not None and args.vllm_server_base_url is not None:
        raise ValueError(
            f"vllm_server_base_url={args.vllm_server_base_url!r} and serve={server.serve!r} name two servers: set one."
        )


def start_server(server: ServerArguments, args: DCGRPOConfig, model: str, revision: str, stack: ExitStack) -> None:
    """Starts the run's own server; it ends when the stack is closed."""
    environment = {"CUDA_VISIBLE_DEVICES": server.serve_devices} if server.serve_devices else {}
    on_gpu = torch.cuda.is_available()
    running = stack.enter_context(
        serve(
            model,
            args.deployment_scheme or "bf16",
            revision=revision,
            max_model_len=args.vllm_max_model_length,
            start_timeout=args.vllm_server_timeout,
            log_path=Path(args.output_dir, SERVER_LOG),
            environment=environment,
            restarts=args.vllm_max_retries,
            options=[
                *(["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)] if on_gpu else []),
                *server.serve_options,
            ],
            report=lambda line: print(line, flush=True),
        )
    )
    args.vllm_server_base_url = running.url


@dataclass
class WatchArguments:
    """Learning rate and alarm, which follow what the run shows."""

    length_decay: bool = field(
        default=False,
        metadata={
            "help": "Halve the learning rate again and again once the responses have surged (arXiv 2602.01826), in "
            "place of lr_scheduler_type. See docs/learning_rate.md."
        },
    )
    length_decay_period: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps between two halvings; by default 1.8 times the step of the surge."},
    )
    length_decay_floor: float = field(
        default=0.1, metadata={"help": "Lowest learning rate, as a fraction of learning_rate."}
    )
    collapse_alarm: Literal["off", "warn", "stop"] = field(
        default="warn",
        metadata={
            "help": "When reward, entropy, gradient norm, mismatch or lambda show a collapse: warn once, or also stop "
            "and keep the last good checkpoint. See docs/collapse.md."
        },
    )

    def __post_init__(self):
        require_numbers(self, {"length_decay_period": COUNT, "length_decay_floor": SHARE})
        if not self.length_decay:
            for name, default in {"length_decay_period": None, "length_decay_floor": 0.1}.items():
                value = getattr(self, name)
                if value != default:
                    raise ValueError(
                        f"{name}={value!r} has no effect without length_decay=true: set it, or leave it out."
                    )
