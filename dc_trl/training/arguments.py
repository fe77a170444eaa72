"""All settings of a training run, and what starts by them beside the trainer: its own server, and its callbacks."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from transformers import PrinterCallback, ProgressCallback
from trl import ModelConfig

from ..callbacks.collapse import CollapseAlarmCallback
from ..callbacks.deployment import DeploymentCheckpointCallback
from ..callbacks.length_decay import LengthDecayCallback
from ..config import DCGRPOConfig
from ..serving.fit import ROUTES_OPTION
from ..serving.server import serve
from ..settings.command_line import say
from ..settings.configuration import ConfigurationParser
from ..settings.contradictions import require_effect
from ..settings.fields import require_fields, setting
from ..settings.paths import shipped
from ..settings.ranges import COUNT
from ..trainer import DCGRPOTrainer
from .adapter import AdapterArguments
from .problems import DataArguments


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


@dataclass
class WatchArguments:
    """Learning rate and alarm, which follow what the run shows."""

    length_decay: bool = setting(
        False,
        "Halve the learning rate again and again once the responses have surged, down to a tenth (arXiv 2602.01826), "
        "in place of lr_scheduler_type. See docs/learning_rate.md.",
    )
    length_decay_period: Annotated[int | None, COUNT] = setting(
        None, "Optimizer steps between two halvings. If it is not set, 1.8 times the step of the surge."
    )
    collapse_alarm: Literal["off", "warn", "stop"] = setting(
        "warn",
        "What happens when reward, entropy, gradient norm, mismatch or λ show a collapse: "
        '"off" does nothing, "warn" warns once, and "stop" warns and ends the run, which keeps the last good '
        "checkpoint. See docs/collapse.md.",
    )

    def __post_init__(self):
        require_fields(self)
        require_effect(self)


class RunArguments(NamedTuple):
    """The dataclasses whose fields a configuration file and a command line may set."""

    data: DataArguments
    server: ServerArguments
    watch: WatchArguments
    adapter: AdapterArguments
    trainer: DCGRPOConfig
    model: ModelConfig

    @classmethod
    def parse(cls, words: Sequence[str] | None = None) -> "RunArguments":
        """Read a command line, by default that of the process, and the file that its `--config` names.

        Raises:
            ValueError: a setting or the file is refused; the message names the file, or the field with its value.
            OSError: the file cannot be read.
        """
        arguments = cls(*ConfigurationParser(ARGUMENTS).parse(words))
        if arguments.model.model_name_or_path is not None:
            arguments.model.model_name_or_path = shipped(arguments.model.model_name_or_path)
        return arguments


ARGUMENTS: tuple[type, ...] = tuple(RunArguments.__annotations__.values())


def require_servable(server: ServerArguments, args: DCGRPOConfig) -> None:
    """Refuse a server that the settings would not use."""
    require_effect(server)
    named = args.vllm_server_base_url or args.vllm_server_base_urls
    if server.serve is not None and (named is not None or not args.use_vllm or args.vllm_mode != "server"):
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


class ConstraintProgressCallback(ProgressCallback):
    """Transformers' progress bar, with reward, δ̄ and λ on it in place of a printed line for every log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        shown = {"reward": "reward", "δ̄": "discrepancy/mean", "λ": "lagrangian/lambda"}
        values = {label: f"{logs[name]:.4g}" for label, name in shown.items() if logs.get(name) is not None}
        if values:
            self.training_bar.set_postfix(values)


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
