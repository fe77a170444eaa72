"""Makes a trainer from a configuration. Errors of the input are found here, the cheapest checks first."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PrinterCallback, ProgressCallback
from transformers.utils import logging
from trl import get_peft_config, get_quantization_config

from ..callbacks.collapse import CollapseAlarmCallback
from ..callbacks.export import DeploymentCheckpointCallback
from ..callbacks.length_decay import LengthDecayCallback
from ..callbacks.progress import ConstraintProgressCallback
from ..config import DCGRPOConfig
from ..gate import require_startable
from ..grading.rewards import get_reward
from ..quantization.adapter import require_adapter_beside
from ..records.changed_settings import changed_settings
from ..run.history import HistoryCallback
from ..run.manifest import on_main_process
from ..sampling.engines import require_servers
from ..serving.fit import ROUTES_OPTION
from ..serving.server import serve
from ..settings.command_line import say
from ..settings.fields import ranges_of
from ..settings.paths import lora_options
from ..settings.pretrained import load_config_and_tokenizer
from ..settings.ranges import require_numbers
from ..trainer import DCGRPOTrainer
from .arguments import RunArguments, ServerArguments, WatchArguments, require_servable
from .output import open_output
from .problems import load_data


SERVER_LOG = "vllm_server.log"


def build_trainer(arguments: RunArguments, stack: ExitStack) -> tuple[DCGRPOTrainer, CollapseAlarmCallback | None]:
    """Return the trainer with its callbacks, and the alarm among them.

    Args:
        arguments: arguments of the run. This sets, in those of the trainer, the checkpoint to resume from, the options
            with which the model is loaded, and the address of the run's own server.
        stack: stack whose closing ends the run's own server and unlocks the output directory.

    Raises:
        ValueError: a setting is refused; the message names the field, its value and the remedy.
        OSError: a file or the Hub cannot be reached.
        ServerError: the run's own server did not start, or does not fit.
    """
    data, server, watch, args, model = arguments
    require_servable(server, args)
    args.resume_from_checkpoint = on_main_process(lambda: open_output(args, stack))
    rewards = [get_reward(name) for name in data.rewards]
    if model.use_peft:
        require_numbers(model, ranges_of(type(model)))
    # Small files fail early.
    config, tokenizer = load_config_and_tokenizer(
        model.model_name_or_path, revision=model.model_revision, trust_remote_code=args.trust_remote_code
    )
    tokenizer.padding_side = "left"  # as TRL sets it where it loads the tokenizer itself
    if args.use_vllm and args.vllm_mode == "server" and server.serve is None:
        require_servers(args, config)
    prompts_per_step = args.generation_batch_size // args.num_generations
    steps = args.max_steps if args.max_steps > 0 else 1000
    train_dataset, eval_dataset, line = load_data(data, tokenizer, args.seed, prompts_per_step * steps)
    PartialState().print(line)
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    peft_config = get_peft_config(model)
    if args.lora_deployment == "adapter" and peft_config is None:
        require_adapter_beside(model.model_name_or_path)
    quantization_config = get_quantization_config(model)
    arguments_of_both = {
        "reward_funcs": rewards,
        "args": args,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "processing_class": tokenizer,
    }
    # The trainer makes the same checks, but only after the server has taken a minute to start, and it knows the
    # model by another name.
    require_startable(
        model=model.model_name_or_path,
        peft_config=peft_config,
        quantization_config=quantization_config,
        field="model_name_or_path",
        **arguments_of_both,
    )
    if server.serve is not None and PartialState().is_main_process:
        lora = lora_options(peft_config.r) if args.lora_deployment == "adapter" else []
        started = replace(server, serve_options=[*lora, *server.serve_options])
        start_server(started, args, model.model_name_or_path, model.model_revision, stack)
    settings = changed_settings(data) | changed_settings(server) | changed_settings(watch)
    trainer = DCGRPOTrainer(
        model=model.model_name_or_path,
        callbacks=[HistoryCallback(settings)],
        quantization_config=quantization_config,
        peft_config=peft_config,
        **arguments_of_both,
    )
    alarm = add_callbacks(trainer, watch)
    return trainer, alarm


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
        logging.disable_progress_bar()  # those of saved files, which would break into the run's own
    return alarm
