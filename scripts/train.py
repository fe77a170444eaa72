"""Trains a policy with DC-GRPO.

    accelerate launch scripts/train.py --config configs/quickstart.yaml [--any_field value ...]

Every field of the configuration file can be overridden on the command line; `--help` lists them all.
"""

import json
import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoTokenizer, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from dc_trl import DCGRPOConfig, DCGRPOTrainer, DeploymentCheckpointCallback, LambdaLoggingCallback
from dc_trl.callbacks import DEPLOYMENT_FOLDER, ConstraintProgressCallback
from dc_trl.data.arguments import DataArguments, load_data
from dc_trl.deployment.server import ServerError, serve
from dc_trl.evaluation import Benchmark
from dc_trl.report import FIGURE_FILE, HISTORY_FILE, print_summary, read_history
from dc_trl.rewards import get_reward
from dc_trl.training_evaluation import BenchmarkCallback, greedy_accuracy


BASELINE_FILE = "before.json"
SUMMARY_FILE = "summary.json"
SERVER_LOG = "vllm_server.log"
# What makes an output directory one that holds a run.
RUN_FILES = (
    HISTORY_FILE,
    BASELINE_FILE,
    SUMMARY_FILE,
    DEPLOYMENT_FOLDER,
    "model.safetensors",
    "adapter_model.safetensors",
    "checkpoint-*",
)


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


def start_server(server: ServerArguments, args: DCGRPOConfig, model: ModelConfig, stack: ExitStack) -> None:
    """Starts the run's own server; it ends when the stack is closed."""
    environment = {"CUDA_VISIBLE_DEVICES": server.serve_devices} if server.serve_devices else {}
    on_gpu = torch.cuda.is_available()
    running = stack.enter_context(
        serve(
            model.model_name_or_path,
            args.deployment_scheme or "bf16",
            revision=model.model_revision,
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


def require_fresh_or_resumable(args: DCGRPOConfig) -> None:
    """Refuses an output directory that holds a run, unless that run is to be resumed, or that cannot be written."""
    output_dir = Path(args.output_dir)
    if args.resume_from_checkpoint is not None and args.resume_from_checkpoint.lower() == "true":
        args.resume_from_checkpoint = get_last_checkpoint(output_dir) if output_dir.is_dir() else None
        if args.resume_from_checkpoint is None:
            raise ValueError(f"resume_from_checkpoint=true, but output_dir={str(output_dir)!r} holds no checkpoint.")
    if args.resume_from_checkpoint is not None:
        if not Path(args.resume_from_checkpoint, "trainer_state.json").is_file():
            raise ValueError(f"resume_from_checkpoint={args.resume_from_checkpoint!r} holds no trainer_state.json.")
    elif output_dir.is_dir() and any(path for pattern in RUN_FILES for path in output_dir.glob(pattern)):
        raise ValueError(
            f"output_dir={str(output_dir)!r} already holds a run: choose another output_dir, or continue that run "
            "with --resume_from_checkpoint true."
        )
    probe = output_dir / ".write-probe"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with open(probe, "wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"output_dir={str(output_dir)!r} cannot be written ({error.strerror}).") from error
    finally:
        if output_dir.is_dir():
            probe.unlink(missing_ok=True)


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


def require_model(name: str | None) -> None:
    """Refuses a model that is neither a directory with a model nor a Hub id."""
    if name is None:
        raise ValueError("model_name_or_path is not set: give a Hub id or a directory.")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model_name_or_path={name!r} is a directory without a config.json: it holds no model.")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ValueError(f"model_name_or_path={name!r} does not exist: check the path.")


def load_eval_benchmarks(data: DataArguments) -> list[Benchmark]:
    """The benchmarks that are asked while training."""
    if data.eval_benchmarks and data.eval_size == 0:
        raise ValueError(
            f"eval_benchmarks={data.eval_benchmarks} are asked when the trainer evaluates, and eval_size=0 leaves it "
            "nothing to evaluate: set eval_size."
        )
    if data.eval_benchmark_temperature < 0:
        raise ValueError(
            f"eval_benchmark_temperature={data.eval_benchmark_temperature} is invalid: use a number, at least 0."
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
    data: DataArguments, server: ServerArguments, args: DCGRPOConfig, model: ModelConfig, stack: ExitStack
) -> DCGRPOTrainer:
    """Everything that can be wrong with the input is found here, before training."""
    require_servable(server, args)
    if PartialState().is_main_process:
        require_fresh_or_resumable(args)
    require_model(model.model_name_or_path)
    rewards = [get_reward(name) for name in data.rewards]
    # Fails early, on a small file, when the model is on no Hub either.
    options = {"revision": model.model_revision, "trust_remote_code": args.trust_remote_code}
    try:
        AutoConfig.from_pretrained(model.model_name_or_path, **options)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model_name_or_path={model.model_name_or_path!r} cannot be loaded: {reason}") from error
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left", **options)
    prompts_per_step = args.generation_batch_size // args.num_generations
    steps = args.max_steps if args.max_steps > 0 else 1000
    train_dataset, eval_dataset, line = load_data(data, tokenizer, args.seed, prompts_per_step * steps)
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
        start_server(server, args, model, stack)
    trainer = DCGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=rewards,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[LambdaLoggingCallback()],
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    if benchmarks:
        temperature, batch_size = data.eval_benchmark_temperature, args.per_device_eval_batch_size
        trainer.add_callback(BenchmarkCallback(trainer, benchmarks, temperature, batch_size))
    if args.deployment_scheme is not None:
        trainer.add_callback(DeploymentCheckpointCallback(trainer))
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(ConstraintProgressCallback())
    if trainer.accelerator.is_main_process:
        require_space(trainer)
    return trainer


class BeforeAndAfter(TrainerCallback):
    """What the summary compares: the deployed policy before the first step and after the last, on held-out problems.

    Within `train`, because trackers take metrics only there. Without held-out problems, the discrepancies of the first
    and of the last generation batch.
    """

    def __init__(self, trainer: DCGRPOTrainer):
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.seconds = 0.0  # from the start of the first step to the end of the last
        self._trainer = trainer
        self._start: float | None = None
        self._baseline = Path(trainer.args.output_dir, BASELINE_FILE)
        trainer.args.eval_on_start = trainer.eval_dataset is not None and trainer.args.resume_from_checkpoint is None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step > 0 and self._trainer.eval_dataset is not None and self._baseline.is_file():
            self.before = json.loads(self._baseline.read_text())

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = self._start or time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = time.perf_counter() - self._start
        if state.global_step >= state.max_steps and self._trainer.eval_dataset is not None:
            control.should_evaluate = True

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        trainer = self._trainer
        if 0 < state.global_step < state.max_steps:
            return
        measured = {"reward": metrics.get("eval_reward"), "discrepancy": metrics.get("eval_discrepancy/mean")}
        if trainer.replica is not None or trainer.use_vllm:
            batch_size = args.per_device_eval_batch_size
            estimate = greedy_accuracy(trainer, trainer.eval_dataset, trainer.reward_funcs[0], batch_size)
            measured |= {"greedy": estimate.value, "greedy_se": estimate.standard_error, "problems": estimate.problems}
        if state.global_step > 0:
            self.after = measured
            return
        self.before = measured
        if state.is_world_process_zero:
            self._baseline.write_text(json.dumps(measured) + "\n")

    def on_train_end(self, args, state, control, **kwargs):
        if self._trainer.eval_dataset is None and state.is_world_process_zero:
            batches = [row for row in read_history(Path(args.output_dir, HISTORY_FILE)) if "discrepancy/mean" in row]
            if batches:
                self.before, self.after = (
                    {"discrepancy": row["discrepancy/mean"]} for row in (batches[0], batches[-1])
                )


def summarize(trainer: DCGRPOTrainer, run: BeforeAndAfter) -> None:
    """Prints the summary table and saves it beside the model."""
    before, after = run.before, run.after
    args, multiplier = trainer.args, trainer.lagrange_multiplier
    if args.use_vllm:
        engine = f"vLLM, {args.deployment_scheme}" if args.deployment_scheme else "vLLM"
    else:
        engine = args.deployment_scheme or "model.generate"
    rows = []
    if "greedy" in before and "greedy" in after:
        accuracy = [f"{100 * m['greedy']:.1f} ± {100 * m['greedy_se']:.1f} %" for m in (before, after)]
        rows.append((f"greedy reward, {before['problems']} held-out problems", *accuracy))
    for label, key, form in (
        ("sampled reward, held out", "reward", "{:.3f}"),
        ("discrepancy δ̄", "discrepancy", "{:.3g}"),
    ):
        if before.get(key) is not None and after.get(key) is not None:
            rows.append((label, form.format(before[key]), form.format(after[key])))
    if args.constraint != "none":
        rows.append(("multiplier λ", f"{args.lambda_init:.4g}", f"{multiplier.value:.4g}"))
    tokens = trainer.state.num_input_tokens_seen
    rows.append(("tokens sampled and read", "", f"{tokens:,}"))
    rows.append(("training seconds", "", f"{run.seconds:.0f}"))
    print_summary(rows, title=f"Deployed policy ({engine}), {trainer.state.global_step} steps, {args.constraint}")
    summary = {
        "engine": engine,
        "constraint": args.constraint,
        "seed": args.seed,
        "steps": trainer.state.global_step,
        "before": before,
        "after": after,
        "lambda": multiplier.value,
        "tokens": tokens,
        "seconds": run.seconds,
    }
    Path(args.output_dir, SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    print(f"Model, {HISTORY_FILE} and {FIGURE_FILE} are in {args.output_dir}")
    if args.deployment_scheme is not None:
        print(f"Serve it: vllm serve {Path(args.output_dir, DEPLOYMENT_FOLDER)}")


def main() -> None:
    sys.path.append(os.getcwd())  # where reward functions of one's own stand
    # Leaves as Ctrl-C does, through the block below, which ends the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = TrlParser((DataArguments, ServerArguments, DCGRPOConfig, ModelConfig))
    with ExitStack() as stack:
        try:
            data, server, args, model = parser.parse_args_and_config()
            trainer = build_trainer(data, server, args, model, stack)
        except (ValueError, TypeError, OSError, ImportError, ServerError) as error:
            # Wrong input, not a wrong program: the message says which field and what to do.
            sys.exit(f"error: {error}")

        run = BeforeAndAfter(trainer)
        trainer.add_callback(run)
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        except ServerError as error:
            sys.exit(f"error: {error}")
        trainer.save_model(args.output_dir)
        if trainer.accelerator.is_main_process:
            summarize(trainer, run)
        if args.push_to_hub:
            trainer.push_to_hub(dataset_name=data.dataset_name)
        # Processes that still hold the process group may abort at exit. Gloo deadlocks when it is taken down while its
        # thread lets go of the last gather, which takes the interpreter's lock (torch 2.13): leave it the time.
        if trainer.accelerator.num_processes > 1:
            time.sleep(1)
        trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
