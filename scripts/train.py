"""Trains a policy with DC-GRPO.

    accelerate launch scripts/train.py --config configs/quickstart.yaml [--any_field value ...]

Every field of the configuration file can be overridden on the command line; `--help` lists them all.
"""

import os
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from accelerate import PartialState
from transformers import PrinterCallback, ProgressCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from dc_trl import (
    CollapseAlarmCallback,
    DCGRPOConfig,
    DCGRPOTrainer,
    DeploymentCheckpointCallback,
    LambdaLoggingCallback,
    LengthDecayCallback,
)
from dc_trl.callbacks.benchmarks import BenchmarkCallback
from dc_trl.callbacks.logging import ConstraintProgressCallback
from dc_trl.callbacks.summary import BeforeAndAfter, summarize
from dc_trl.data.dapo import DAPO
from dc_trl.evaluation import Benchmark
from dc_trl.files import lock_output
from dc_trl.grading.rewards import get_reward
from dc_trl.hub.push import HubError, push_command, require_pushable
from dc_trl.records.runs import BASELINE_FILE, DEPLOYMENT_FOLDER, HISTORY_FILE, SUMMARY_FILE
from dc_trl.records.settings import changed_settings
from dc_trl.resuming.checkpoints import checkpoints, on_main_process, resumable_checkpoint
from dc_trl.resuming.interruption import RunInterrupted, StopSignals
from dc_trl.rollouts.rewards import require_callable
from dc_trl.serving.errors import ServerError
from dc_trl.settings.configuration import ConfigurationParser
from dc_trl.settings.pretrained import load_config_and_tokenizer
from dc_trl.settings.ranges import ADAPTER, require_numbers
from dc_trl.training.arguments import ServerArguments, WatchArguments, require_servable, start_server
from dc_trl.training.problems import DataArguments, load_data


# What makes an output directory one that holds a run.
RUN_FILES = (
    HISTORY_FILE,
    BASELINE_FILE,
    SUMMARY_FILE,
    DEPLOYMENT_FOLDER,
    "model.safetensors",
    "adapter_model.safetensors",
    "checkpoint-*",
    "last-good-*",
)

# What a configuration file holds the fields of.
ARGUMENTS = (DataArguments, ServerArguments, WatchArguments, DCGRPOConfig, ModelConfig)


def open_output(args: DCGRPOConfig, stack: ExitStack) -> str | None:
    """Locks the output directory until the stack is closed; returns the checkpoint to go on from.

    Refuses a directory that holds a run, unless that run is to be resumed, that another run is writing to, or that
    cannot be written.
    """
    output_dir = Path(args.output_dir)
    stack.enter_context(lock_output(output_dir))
    checkpoint = resumable_checkpoint(args.resume_from_checkpoint, output_dir, args.save_on_each_node)
    if checkpoint is None and any(path for pattern in RUN_FILES for path in output_dir.glob(pattern)):
        if not checkpoints(output_dir):
            raise ValueError(
                f"output_dir={str(output_dir)!r} already holds a run, which has saved no checkpoint: choose another "
                "output_dir, or remove that run."
            )
        raise ValueError(
            f"output_dir={str(output_dir)!r} already holds a run: choose another output_dir, or continue that run "
            "with --resume_from_checkpoint true."
        )
    probe = output_dir / ".write-probe"
    try:
        with open(probe, "wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} cannot be written ({error.strerror}): choose another one."
        ) from error
    finally:
        probe.unlink(missing_ok=True)
    if args.push_to_hub:
        require_pushable(args)
    return checkpoint


def require_space(trainer: DCGRPOTrainer) -> None:
    """Refuses to train when the disk cannot hold the model and a checkpoint."""
    parameters = list(trainer.model.parameters())
    needed = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    if trainer.args.save_strategy != "no":
        # Weights again, and two moments of each trained parameter.
        needed += needed + sum(2 * p.numel() * p.element_size() for p in parameters if p.requires_grad)
    free = shutil.disk_usage(trainer.args.output_dir).free
    if free < needed:
        raise ValueError(
            f"output_dir={trainer.args.output_dir!r} has {free / 1e9:.2f} GB free and the model and a checkpoint need "
            f"{needed / 1e9:.2f} GB: free some space, or choose another output_dir."
        )


def load_eval_benchmarks(data: DataArguments) -> list[Benchmark]:
    """The benchmarks that are asked while training."""
    if data.eval_benchmarks and data.eval_size == 0:
        raise ValueError(
            f"eval_benchmarks={data.eval_benchmarks} are asked when the trainer evaluates, and eval_size=0 leaves it "
            "nothing to evaluate: set eval_size."
        )
    benchmarks = []
    for word in data.eval_benchmarks:
        name, _, file = word.partition("=")
        with PartialState().local_main_process_first():  # one process of a machine downloads
            benchmarks.append(
                Benchmark.load(
                    name,
                    file=file or None,
                    samples=data.eval_benchmark_samples,
                    limit=data.eval_benchmark_limit,
                )
            )
    return benchmarks


def build_trainer(
    data: DataArguments,
    server: ServerArguments,
    watch: WatchArguments,
    args: DCGRPOConfig,
    model: ModelConfig,
    stack: ExitStack,
) -> tuple[DCGRPOTrainer, CollapseAlarmCallback | None]:
    """The trainer with its callbacks, and the alarm among them.

    Everything that can be wrong with the input is found here, before training.
    """
    require_servable(server, args)
    args.resume_from_checkpoint = on_main_process(lambda: open_output(args, stack))
    rewards = [get_reward(name) for name in data.rewards]
    if model.use_peft:
        require_numbers(model, ADAPTER)
    # Fails early, on small files.
    _, tokenizer = load_config_and_tokenizer(
        model.model_name_or_path,
        padding_side="left",
        revision=model.model_revision,
        trust_remote_code=args.trust_remote_code,
    )
    prompts_per_step = args.generation_batch_size // args.num_generations
    steps = args.max_steps if args.max_steps > 0 else 1000
    train_dataset, eval_dataset, line = load_data(data, tokenizer, args.seed, prompts_per_step * steps)
    for name, reward in zip(data.rewards, rewards, strict=True):
        require_callable(name, reward, train_dataset.column_names)
    PartialState().print(line)
    benchmarks = load_eval_benchmarks(data)
    generations = args.num_generations_eval or args.num_generations
    if eval_dataset is not None and args.per_device_eval_batch_size * args.world_size % generations:
        raise ValueError(
            f"per_device_eval_batch_size={args.per_device_eval_batch_size} in {args.world_size} process(es) is no "
            f"multiple of num_generations_eval={generations}: set num_generations_eval=1, or a multiple of it."
        )
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    if server.serve is not None and PartialState().is_main_process:
        start_server(server, args, model.model_name_or_path, model.model_revision, stack)
    settings = changed_settings(data) | changed_settings(server) | changed_settings(watch)
    trainer = DCGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=rewards,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[LambdaLoggingCallback(settings)],
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    if benchmarks:
        temperature, batch_size = data.eval_benchmark_temperature, args.per_device_eval_batch_size
        trainer.add_callback(BenchmarkCallback(trainer, benchmarks, temperature, batch_size))
    if watch.length_decay:
        trainer.add_callback(LengthDecayCallback(trainer, watch.length_decay_period, watch.length_decay_floor))
    alarm = None
    if watch.collapse_alarm != "off":
        alarm = CollapseAlarmCallback(trainer, stop=watch.collapse_alarm == "stop")
        trainer.add_callback(alarm)
    if args.deployment_scheme is not None:
        trainer.add_callback(DeploymentCheckpointCallback(trainer, alarm))
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(ConstraintProgressCallback())
    if trainer.accelerator.is_main_process:
        require_space(trainer)
    return trainer, alarm


def release_processes(trainer: DCGRPOTrainer) -> None:
    """Lets go of the process group: processes that still hold it may abort at exit."""
    # Gloo deadlocks when it is taken down while its thread lets go of the last gather, which takes the interpreter's
    # lock (torch 2.13): leave it the time.
    if trainer.accelerator.num_processes > 1:
        time.sleep(1)
    trainer.accelerator.end_training()


def main() -> None:
    sys.path.append(os.getcwd())  # where reward functions of one's own stand
    parser = ConfigurationParser(ARGUMENTS)
    with StopSignals() as signals, ExitStack() as stack:
        try:
            data, server, watch, args, model = parser.parse_args_and_config()
            trainer, alarm = build_trainer(data, server, watch, args, model, stack)
        except (ValueError, TypeError, OSError, ImportError, ServerError) as error:
            # Wrong input, not a wrong program: the message says which field and what to do.
            sys.exit(f"error: {error}")

        run = BeforeAndAfter(trainer)
        trainer.add_callback(run)
        trainer.add_callback(signals)
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        except (ServerError, RunInterrupted) as error:
            if isinstance(error, RunInterrupted):  # at once: whoever sent the signal may kill soon
                trainer.accelerator.print(f"\n{error}", file=sys.stderr, flush=True)
            stack.close()
            # Together: when one process of several fails, the launcher ends the others, and the server may still run.
            trainer.accelerator.wait_for_everyone()
            release_processes(trainer)
            sys.exit(error.exit_code if isinstance(error, RunInterrupted) else f"error: {error}")
        if alarm is not None and alarm.stopped is not None:
            # What trained last is not to be taken for the run's result.
            way_back = f"resume_from_checkpoint={alarm.last_good!r}" if alarm.last_good else "no checkpoint is good"
            sys.exit(f"error: the collapse alarm stopped the run ({alarm.stopped.signal}): {way_back}.")
        trainer.save_model(args.output_dir, _internal_call=True)  # by a user's call it would push, without a summary
        if trainer.accelerator.is_main_process:
            summarize(trainer, run)
        dataset_name = DAPO.hub_id if data.dataset_name == "dapo" else data.dataset_name
        if args.push_to_hub:
            try:
                trainer.push_to_hub(dataset_name=dataset_name)
            except HubError as error:
                command = push_command(args, trainer.hub_model_id)
                sys.exit(f"error: {error}\nThe run is whole in {args.output_dir}. Push it later: {command}")
        else:
            trainer.create_model_card(dataset_name=dataset_name)
        release_processes(trainer)


if __name__ == "__main__":
    main()
