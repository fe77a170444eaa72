"""What starts by the settings beside the trainer: its own server, and its callbacks."""

from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PrinterCallback, ProgressCallback

from ..callbacks.collapse import CollapseAlarmCallback
from ..callbacks.deployment import DeploymentCheckpointCallback
from ..callbacks.length_decay import LengthDecayCallback
from ..callbacks.progress import ConstraintProgressCallback
from ..config import DCGRPOConfig
from ..serving.fit import ROUTES_OPTION
from ..serving.server import serve
from ..settings.command_line import say
from ..trainer import DCGRPOTrainer
from .arguments import ServerArguments, WatchArguments


SERVER_LOG = "vllm_server.log"


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


def add_callbacks(trainer: DCGRPOTrainer, watch: WatchArguments) -> CollapseAlarmCallback | None:
    """Add callbacks that watch the run, write its deployment checkpoints and show its progress; return the alarm."""
    if watch.length_decay:
        trainer.add_callback(LengthDecayCallback(trainer, watch.length_decay_period))
    alarm = None
    if watch.collapse_alarm != "off":
        alarm = CollapseAlarmCallback(trainer, stop=watch.collapse_alarm == "stop")
        trainer.add_callback(alarm)
    if trainer.args.exports_deployment:
        trainer.add_callback(DeploymentCheckpointCallback(trainer))
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(ConstraintProgressCallback())
    return alarm
