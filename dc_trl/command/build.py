"""Makes the trainer of `dc-trl train` from its settings: output directory, data, the run's own server, callbacks.

Errors of the input are found here, the cheapest checks first.
"""

from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PrinterCallback, ProgressCallback
from transformers.utils import logging
from trl import get_peft_config, get_quantization_config

from ..callbacks.collapse import CollapseAlarmCallback
from ..callbacks.length_decay import LengthDecayCallback
from ..config import DCGRPOConfig
from ..files import lock_output
from ..gate.before_loading import require_runnable
from ..grading.rewards import get_reward
from ..processes import on_main_process
from ..records.runs import DEPLOYMENT_FOLDER, HISTORY_FILE, SUMMARY_FILE, changed_settings, read_history
from ..run.deployment import DeploymentCheckpointCallback
from ..run.history import HistoryCallback
from ..run.hub import WEIGHTS, HubClient
from ..run.manifest import checkpoints, resumable_checkpoint, set_aside_later
from ..run.progress import ConstraintProgressCallback
from ..serving.fit import ROUTES_OPTION
from ..serving.server import serve
from ..settings.command_line import say
from ..settings.fields import require_fields
from ..settings.paths import lora_options
from ..settings.pretrained import load_config_and_tokenizer
from ..trainer import DCGRPOTrainer
from .arguments import RunArguments, WatchArguments, require_servable
from .problems import load_data


SERVER_LOG = "vllm_server.log"
# Files and folders that mark an output directory as one with a run.
_RUN_FILES = (HISTORY_FILE, SUMMARY_FILE, DEPLOYMENT_FOLDER, *WEIGHTS, "checkpoint-*")


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
        require_fields(model)
    # Small files fail early.
    _, tokenizer = load_config_and_tokenizer(
        model.model_name_or_path, revision=model.model_revision, trust_remote_code=args.trust_remote_code
    )
    tokenizer.padding_side = "left"  # as TRL sets it where it loads the tokenizer itself
    prompts_per_step = args.generation_batch_size // args.num_generations
    steps = args.max_steps if args.max_steps > 0 else 1000
    train_dataset, eval_dataset, line = load_data(
        data, tokenizer, args.seed, prompts_per_step * steps, args.chat_template_kwargs
    )
    PartialState().print(line)
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    peft_config = get_peft_config(model)
    given = {
        "model": model.model_name_or_path,
        "reward_funcs": rewards,
        "args": args,
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "processing_class": tokenizer,
        "peft_config": peft_config,
        "quantization_config": get_quantization_config(model),
    }
    # The trainer makes the same checks, but only after the server has taken a minute to start, and it knows the
    # model by another name.
    require_runnable(field="model_name_or_path", has_servers=server.serve is None, **given)
    if server.serve is not None and PartialState().is_main_process:
        lora = lora_options(peft_config.r) if args.lora_deployment == "adapter" else []
        start_server(arguments, lora, stack)
    settings = changed_settings(data) | changed_settings(server) | changed_settings(watch)
    trainer = DCGRPOTrainer(callbacks=[HistoryCallback(settings)], **given)
    return trainer, add_callbacks(trainer, watch)


def open_output(args: DCGRPOConfig, stack: ExitStack) -> str | None:
    """Lock the output directory until the stack is closed, and return the checkpoint to resume from.

    Raises:
        ValueError: the directory holds a run that is not resumed, another run writes to it, or it cannot be written.
        HubError: the Hub refuses the repository of a run that will be pushed.
    """
    output_dir = Path(args.output_dir)
    stack.enter_context(lock_output(output_dir))
    checkpoint = resumable_checkpoint(args.resume_from_checkpoint, output_dir)
    if anew := checkpoint is None and str(args.resume_from_checkpoint).lower() == "auto":
        set_aside_later(output_dir, None)
    # The checkpoint of another run is continued in a directory that holds none.
    if checkpoint is None or Path(checkpoint).resolve().parent != output_dir.resolve():
        _require_no_run(output_dir, anew)
    if args.push_to_hub:
        name = args.hub_model_id or output_dir.absolute().name
        HubClient(args).create_repo(name, private=args.hub_private_repo)
    return checkpoint


def _require_no_run(output_dir: Path, anew: bool) -> None:
    """Refuse a directory that holds a run; with `anew`, accept one that was killed before its first checkpoint."""
    found = {path.name for pattern in _RUN_FILES for path in output_dir.glob(pattern)}
    # A run that was killed before its first step ended is not worth keeping.
    if found <= {HISTORY_FILE}:
        history = read_history(output_dir / HISTORY_FILE) if HISTORY_FILE in found and not anew else []
        if not any(row["step"] > 0 for row in history):
            return
    has, remedy = "a run", "continue that run with --resume_from_checkpoint true"
    if not checkpoints(output_dir):
        has, remedy = "a run without a checkpoint", "remove that run"
    raise ValueError(f"output_dir={str(output_dir)!r} already holds {has}: choose another output_dir, or {remedy}.")


def holds_weights(folder: Path) -> bool:
    """Return whether a run has left its weights."""
    return any(path for name in WEIGHTS for path in folder.glob(name))


def start_server(arguments: RunArguments, options: list[str], stack: ExitStack) -> None:
    """Start the run's own server and write its address into the arguments; it ends when the stack is closed."""
    _, server, _, args, model = arguments
    if torch.cuda.is_available():
        options = ["--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization), *options]
    running = stack.enter_context(
        serve(
            model.model_name_or_path,
            args.deployment_scheme or "bf16",
            revision=model.model_revision,
            max_model_len=args.vllm_max_model_length,
            start_timeout=args.vllm_server_timeout,
            log_path=Path(args.output_dir, SERVER_LOG),
            environment={"CUDA_VISIBLE_DEVICES": server.serve_devices} if server.serve_devices else {},
            options=[*[ROUTES_OPTION] * args.routing_replay, *options, *server.serve_options],
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
