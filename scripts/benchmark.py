"""What DC-GRPO costs over GRPO, the replica over model.generate, and graders: ratios within one run, medians.

And what routing replay removes of the mismatch of a mixture of experts.

python scripts/benchmark.py overhead    step time and peak memory on identical, replayed rollouts
python scripts/benchmark.py time        where the time of a step goes, and what the clock of that costs itself
python scripts/benchmark.py replica     wall time on the same prompts, one row for each scheme
python scripts/benchmark.py grading     completions graded in this process, and in worker processes
python scripts/benchmark.py routing     KL, |Δp| and flipped experts of random mixtures, without and with replay
python scripts/benchmark.py aligned     what train_through_quantization leaves of the mismatch, costs, and earns
python scripts/benchmark.py lengths     what length-aware batches and padding-free forwards save on TRL's padding
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.lengths import SIZES, lengths
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PrinterCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.calibration.rollouts import sample_rollouts
from dc_trl.calibration.scoring import train_logps
from dc_trl.calibration.settings import CalibrationSettings
from dc_trl.callbacks.benchmarks import greedy_accuracy
from dc_trl.constraint.corrections import CORRECTIONS
from dc_trl.constraint.forms import COEFFICIENTS
from dc_trl.constraint.settings import TWO_SIDED
from dc_trl.constraint.statistics import mismatch_metrics
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.grading import Gold, Grader, grade
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.quantization.schemes import RESEARCH_BITS, SCHEMES
from dc_trl.records.tables import percent, print_table
from dc_trl.rollouts.engines import EngineSpec
from dc_trl.rollouts.replica import Replica
from dc_trl.rollouts.routing import RoutesRecorder, RoutingReplay, Turn, batch_routes
from dc_trl.settings.command_line import OptionParser
from dc_trl.trainers.clock import PartsClock


# Where log π_train comes from, see dc_trl/trainer.py: the loss's own forward, or TRL's old log-probs.
ROUTES = {"loss's forward": {"gradient_accumulation_steps": 2}, "old log-probs": {"gradient_accumulation_steps": 1}}


class StepClock(TrainerCallback):
    """Seconds and peak memory of the steps of one `train` call."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.seconds, self.peak = 0.0, 0

    def on_step_begin(self, args, state, control, **kwargs):
        reset_peak_memory()
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._start
        self.peak = max(self.peak, peak_memory())


def reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Bytes: allocated on the GPU, or else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform != "linux":
        return 0
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def random_completions(count: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
    """Token ids and log-probabilities, the same at every call."""
    rng = random.Random(0)
    completion_ids = [[rng.randrange(10, 200) for _ in range(length)] for _ in range(count)]
    return completion_ids, [[-rng.uniform(0, 8) for _ in range(length)] for _ in range(count)]


class Replay:
    """Rollout function: the same random completions and log-probabilities at every call."""

    __name__ = "replay"

    def __init__(self, length: int):
        self._length = length

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list]:
        completion_ids, logprobs = random_completions(len(prompts), self._length)
        tokenizer = trainer.processing_class
        template = {"add_generation_prompt": True, "return_dict": True}
        return {
            "prompt_ids": [tokenizer.apply_chat_template(prompt, **template)["input_ids"] for prompt in prompts],
            "completion_ids": completion_ids,
            "logprobs": logprobs,
        }


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(completion)) % 7) for completion in completions]


def make_trainer(
    kind: type[GRPOTrainer], args: argparse.Namespace, output_dir: str, replay: bool = True, **options: Any
) -> GRPOTrainer:
    config = (DCGRPOConfig if kind is DCGRPOTrainer else GRPOConfig)(
        output_dir,
        loss_type="grpo",
        epsilon=0.24,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        per_device_train_batch_size=args.batch_size,
        num_generations=8,
        steps_per_generation=2,
        max_completion_length=args.completion_length,
        learning_rate=1e-6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
        **options,
    )
    trainer = kind(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward,
        config,
        train_dataset=arithmetic_dataset(256, 0, "train"),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        rollout_func=Replay(args.completion_length) if replay else None,
        callbacks=[clock := StepClock()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.clock = clock
    return trainer


def with_recompute(trainer: GRPOTrainer) -> GRPOTrainer:
    """TRL with its importance-sampling correction for vLLM, whose rollouts are replayed too: no engine is asked."""
    trainer.use_vllm = True
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = 0
    return trainer


def ratios(ours: list[float], theirs: list[float], digits: int = 2) -> tuple[str, str]:
    """Median and quartiles of the ratios of two lists, measured in turns."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{middle:.{digits}f}", f"{low:.{digits}f} – {high:.{digits}f}"


def train_in_turns(
    trainers: dict[str, GRPOTrainer], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each repetition, and the median of the peak memory in bytes, by trainer; the first two warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    peaks: dict[str, list[int]] = {name: [] for name in trainers}
    for repetition in range(repetitions + 2):
        # The order changes, so that none of them always runs after the same one.
        for name in random.Random(repetition).sample(list(trainers), len(trainers)):
            trainers[name].train()
            if repetition >= 2:
                seconds[name].append(trainers[name].clock.seconds)
                peaks[name].append(trainers[name].clock.peak)
    return seconds, {name: statistics.median(values) for name, values in peaks.items()}


def overhead(args: argparse.Namespace) -> None:
    baseline = peak_memory()
    rows = []
    with tempfile.TemporaryDirectory() as output_dir:
        for route, steps in ROUTES.items():
            # Both routes cover one generation batch: two micro-batches, in one or two optimizer steps.
            steps = steps | {"max_steps": 2 // steps["gradient_accumulation_steps"]}
            plain = {"vllm_importance_sampling_correction": False}
            trainers = {
                "DC-GRPO": make_trainer(DCGRPOTrainer, args, output_dir, **steps),
                "GRPO": make_trainer(GRPOTrainer, args, output_dir, **steps, **plain),
                "GRPO + TIS": with_recompute(make_trainer(GRPOTrainer, args, output_dir, **steps)),
            }
            seconds, peaks = train_in_turns(trainers, args.repetitions)
            ours = peaks["DC-GRPO"]
            for other in ("GRPO", "GRPO + TIS"):
                theirs, memory = peaks[other], ("", "")
                if theirs:
                    memory = f"{ours / theirs:.3f}", f"{(ours - baseline) / (theirs - baseline):.3f}"
                rows.append([route, other, *ratios(seconds["DC-GRPO"], seconds[other], 3), *memory])
    tokens = 2 * args.batch_size * args.completion_length
    title = f"DC-GRPO as a multiple, {args.repetitions} repetitions, {tokens:,} completion tokens per batch"
    print_table(["route", "over", "step time", "quartiles", "memory", "its growth"], rows, title)
    overhead_of_methods(args)


# What is switched on, beside GRPO on the same rollouts.
METHODS: dict[str, dict[str, Any]] = {
    **{
        f"constraint_form={form}": {"constraint": "static", "constraint_form": form}
        for form in (*COEFFICIENTS, *TWO_SIDED)
    },
    **{f"rollout_correction={name}": {"rollout_correction": name} for name in CORRECTIONS},
    "train_through_quantization": {"train_through_quantization": True},
}


class ReplayedReplica:
    """Stands for the replica: random completions and log-probabilities, the same at every call, in no time."""

    def __init__(self, length: int):
        self._length = length

    def sync(self, policy: Any, keep: bool = False) -> None:
        """No engine is there."""

    def generate(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list, list]:
        return random_completions(len(prompt_ids), self._length)


def overhead_of_methods(args: argparse.Namespace) -> None:
    """Each form of the constraint, each correction and the deployed forward over GRPO, in one optimizer step."""
    with tempfile.TemporaryDirectory() as output_dir:
        of_step = {"deployment_scheme": "fp8", "gradient_accumulation_steps": 2, "max_steps": 1, "replay": False}
        trainers = {}
        for name, settings in {"GRPO": {}, **METHODS}.items():
            trainer = make_trainer(DCGRPOTrainer, args, output_dir, **of_step, **({"constraint": "none"} | settings))
            trainer.replica = ReplayedReplica(args.completion_length)
            trainers[name] = trainer
        seconds, peaks = train_in_turns(trainers, args.repetitions)
    rows = [
        [name, *ratios(seconds[name], seconds["GRPO"], 3), f"{peaks[name] / peaks['GRPO']:.3f}" if peaks[name] else ""]
        for name in METHODS
    ]
    title = f"One optimizer step as a multiple of GRPO's, FP8, {args.repetitions} repetitions"
    print_table(["method", "step time", "quartiles", "memory"], rows, title)


def time_of_parts(args: argparse.Namespace) -> None:
    """Median share of each part of training on replayed rollouts, logged at every step, and of the clock itself."""
    cost = cost_of_a_part()
    rows = []
    with tempfile.TemporaryDirectory() as output_dir:
        for route, steps in ROUTES.items():
            trainer = make_trainer(DCGRPOTrainer, args, output_dir, **steps, max_steps=10)
            trainer.args.logging_steps = 1
            trainer.remove_callback(StepClock)  # which measures memory, and takes its time
            trainer.parts_clock = CountingClock()
            shares: dict[str, list[float]] = {}
            for _ in range(args.repetitions + 1):
                trainer.parts_clock.entered = 0
                trainer.train()
                seconds = trainer.parts_clock.seconds()
                total = sum(seconds.values())
                for part, spent in [*seconds.items(), ("the clock itself", trainer.parts_clock.entered * cost)]:
                    shares.setdefault(part, []).append(spent / total)
            for part, values in sorted(shares.items(), key=lambda found: -statistics.median(found[1])):
                low, middle, high = statistics.quantiles(values[1:], n=4)  # the first one warms up
                rows.append([route, part, f"{middle:.2%}", f"{low:.2%} – {high:.2%}"])
    title = f"Shares of 10 optimizer steps, {args.repetitions} repetitions, {1e6 * cost:.1f} µs a part"
    print_table(["route", "part", "share", "quartiles"], rows, title)


class CountingClock(PartsClock):
    """Counts the parts that it has been in."""

    entered = 0

    def part(self, name: str) -> AbstractContextManager[None]:
        self.entered += 1
        return super().part(name)


def cost_of_a_part(times: int = 10_000) -> float:
    """Seconds that entering and leaving a part takes."""
    clock = PartsClock()
    clock.start()
    start = time.perf_counter()
    for _ in range(times):
        with clock.part("loss"):
            pass
    return (time.perf_counter() - start) / times


def replica(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().to(device)
    prompts = [[20 + (row + column) % 100 for column in range(12)] for row in range(args.batch_size)]
    input_ids = torch.tensor(prompts, device=device)
    size = {"min_new_tokens": args.completion_length, "max_new_tokens": args.completion_length}
    config = GenerationConfig(**size, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=[1], disable_compile=True)

    @torch.no_grad()
    def generate() -> None:
        policy.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)

    def sample(engine: Replica) -> None:
        engine.sync(policy)
        engine.generate(prompts, config, 1.0)

    engines = {scheme: Replica(policy, scheme) for scheme in SCHEMES}
    seconds: dict[str, list[float]] = {name: [] for name in ("generate", *engines)}
    for repetition in range(args.repetitions + 1):
        for name, values in seconds.items():
            start = time.perf_counter()
            generate() if name == "generate" else sample(engines[name])
            if device == "cuda":
                torch.cuda.synchronize()
            if repetition >= 1:
                values.append(time.perf_counter() - start)
    rows = []
    tokens = args.batch_size * args.completion_length
    for name, values in seconds.items():
        median = statistics.median(values)
        label = "generate, float32" if name == "generate" else f"replica, {name}"
        rows.append([label, f"{median:.3f}", f"{tokens / median:,.0f}", *ratios(values, seconds["generate"])])
    title = f"{args.batch_size} prompts, {args.completion_length} tokens each, {args.repetitions} repetitions"
    print_table(["engine", "seconds", "tokens/s", "× generate", "quartiles"], rows, title)


def tiny_experts(seed: int) -> Qwen3MoeForCausalLM:
    """A random mixture: 4 layers of 16 experts, of which a token takes 2."""
    torch.manual_seed(seed)
    width, shape = 64, {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": width // 2}
    sizes = {"hidden_size": width, "intermediate_size": width, "moe_intermediate_size": width, "vocab_size": 262}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    # Wide, so that probabilities differ.
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **shape, **heads, **tokens, initializer_range=0.1)).eval()


@torch.no_grad()
def replayed(policy: Qwen3MoeForCausalLM, scheme: str, batch_size: int, length: int) -> list[dict[str, float]]:
    """KL (k3), mean |Δp| and share of tokens with a flipped expert, without and with replay of the same rollouts."""
    engine = Replica(policy, scheme)
    # The last one sees what the policy uses, replayed or not.
    of_engine, replay, of_policy = RoutesRecorder(engine.model), RoutingReplay(policy), RoutesRecorder(policy)
    prompts = [[20 + (7 * row + column) % 100 for column in range(5 + row % 8)] for row in range(batch_size)]
    size = {"min_new_tokens": length, "max_new_tokens": length}
    config = GenerationConfig(**size, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=[1], disable_compile=True)
    with of_engine.recording(batch_size):
        completions, logps = engine.generate(prompts, config, 1.0)
    routes = of_engine.routes(prompts, completions)
    width = max(map(len, prompts))
    input_ids = torch.zeros(batch_size, width + length, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt + completion)
        attention_mask[row, width - len(prompt) :] = 1
    figures = []
    for replaying in (False, True):
        if replaying:
            replay.start(batch_routes([Turn(prompts, routes)], prompts, completions, None))
        with of_policy.recording(batch_size):
            logits = policy(input_ids=input_ids, attention_mask=attention_mask).logits[:, width - 1 : -1]
        scored = logits.log_softmax(-1).gather(2, input_ids[:, width:, None]).squeeze(2)
        metrics = mismatch_metrics(scored, torch.tensor(logps), torch.ones_like(scored))
        pairs = zip(routes, of_policy.routes(prompts, completions), strict=True)
        flipped = torch.cat([(a.sort(-1).values != b.sort(-1).values).flatten(1).any(1) for a, b in pairs])
        figures.append(
            {"k3": metrics["k3_kl"], "p": metrics["probs_diff_mean"], "flipped": flipped.float().mean().item()}
        )
    replay.stop()
    return figures


def routing(args: argparse.Namespace) -> None:
    rows = []
    for scheme in ("fp8", "bf16"):
        seeds = [
            replayed(tiny_experts(seed), scheme, args.batch_size, args.completion_length) for seed in range(args.seeds)
        ]
        for replaying, name in enumerate(("no", "yes")):
            cells = []
            for figure, digits in (("k3", ".1e"), ("p", ".1e"), ("flipped", ".1%")):
                values = [of_seed[replaying][figure] for of_seed in seeds]
                cells.append(" ".join(format(value, digits) for value in values))
            rows.append([scheme, name, *cells])
    title = f"{args.batch_size} rollouts of {args.completion_length} tokens, one figure for each of {args.seeds} seeds"
    print_table(["replica", "replay", "KL (k3), nats", "mean |Δp|", "tokens with a flipped expert"], rows, title)


def grading(args: argparse.Namespace) -> None:
    rng = random.Random(0)
    kinds = (
        "{0}",
        "\\frac{{{0}}}{{{1}}}",
        "{0}\\sqrt{{{1}}}",
        "{0}x^2+{1}x",
        "({0},{1}]",
        "{0}+{1}i",
        "\\frac{{{0}\\pi}}{{{1}}}",
    )

    def answer() -> str:
        return rng.choice(kinds).format(rng.randrange(2, 1000), rng.choice((2, 3, 5, 7, 11, 13)))

    alone, together = [], []
    with Grader(args.threads) as grader:
        grader.start()
        for repetition in range(args.repetitions + 1):
            golds = [Gold(answer()) for _ in range(args.completions)]
            texts = [f"So \\boxed{{{gold.answer if rng.random() < 0.5 else answer()}}}." for gold in golds]
            start = time.perf_counter()
            expected = [grade(text, gold) for text, gold in zip(texts, golds, strict=True)]
            between = time.perf_counter()
            verdicts = grader.grade(texts, golds)
            end = time.perf_counter()
            assert verdicts == expected
            if repetition > 0:
                alone.append(between - start)
                together.append(end - between)
    seconds = [f"{statistics.median(values):.2f}" for values in (alone, together)]
    head = ["one process, s", f"{args.threads} workers, s", "times faster", "quartiles"]
    title = f"{args.completions:,} completions, {args.repetitions} repetitions"
    print_table(head, [[*seconds, *ratios(alone, together)]], title)


# What the policy computes with, next to the replica that samples: switches of `DeployedForward`.
FORWARDS = {"policy, float32": None, "quantized, float32": {"compute": False}, "quantized, bfloat16": {}}


def aligned(args: argparse.Namespace) -> None:
    remaining_mismatch(args)
    aligned_cost(args)
    if args.steps > 0:
        aligned_reward(args)


def remaining_mismatch(args: argparse.Namespace) -> None:
    """Mean |Δp| of the replica's own samples by scheme, forward and seed."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    template = {"add_generation_prompt": True, "return_dict": True}
    rows = []
    for scheme in (*SCHEMES, *RESEARCH_BITS):
        gaps: dict[str, list[str]] = {name: [] for name in FORWARDS}
        for seed in range(args.seeds):
            problems = arithmetic_dataset(args.batch_size, seed, "train")["prompt"]
            prompts = [tokenizer.apply_chat_template(problem, **template)["input_ids"] for problem in problems]
            settings = CalibrationSettings(
                samples=1, max_tokens=args.completion_length, bf16=False, seed=seed, progress=False
            )
            policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
            engine = EngineSpec.parse(f"replica:{scheme}")
            rollouts = sample_rollouts(engine, policy, tokenizer, prompts, settings).rollouts
            infer = torch.cat([torch.tensor(rollout.logps) for rollout in rollouts])
            for name, switches in FORWARDS.items():
                policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
                forward = nullcontext() if switches is None else DeployedForward(policy, scheme, **switches).active()
                with forward:
                    train = torch.cat(train_logps(policy, prompts, rollouts, settings))
                gaps[name].append(f"{(train.exp() - infer.exp()).abs().mean():.1e}")
        rows.append([scheme, *(", ".join(values) for values in gaps.values())])
    title = f"Mean |Δp| of the replica's samples, {args.batch_size} completions a seed, {args.seeds} seeds"
    print_table(["scheme", *FORWARDS], rows, title)


def aligned_trainer(args: argparse.Namespace, output_dir: str, through: bool, **options: Any) -> DCGRPOTrainer:
    """A trainer like the quickstart's."""
    config = DCGRPOConfig(
        output_dir,
        **{
            "deployment_scheme": args.scheme,
            "train_through_quantization": through,
            "recipe": "paper",
            "constraint": "none",
            "bf16": torch.cuda.is_available(),
            "gradient_checkpointing": False,
            "per_device_train_batch_size": args.batch_size,
            "num_generations": 8,
            "max_completion_length": args.completion_length,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.95,
            "save_strategy": "no",
            "export_run": False,
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": 1,
        }
        | options,
    )
    trainer = DCGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        arithmetic_reward,
        config,
        train_dataset=arithmetic_dataset(4096, config.seed, "train"),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        callbacks=[clock := StepClock()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.clock = clock
    return trainer


def aligned_cost(args: argparse.Namespace) -> None:
    """Step time and memory with and without, on identical completions that cost nothing to sample."""
    rng = random.Random(0)

    def replay(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float]]]:
        ids = [[rng.randrange(10, 200) for _ in range(args.completion_length)] for _ in prompt_ids]
        return ids, [[-1.0] * args.completion_length for _ in prompt_ids]

    baseline = peak_memory()
    with tempfile.TemporaryDirectory() as output_dir:
        trainers = {
            through: aligned_trainer(args, output_dir, through, max_steps=2, learning_rate=1e-6)
            for through in (True, False)
        }
        for trainer in trainers.values():
            trainer.replica.generate = replay
        seconds, peaks = train_in_turns(trainers, args.repetitions)
    growth = (peaks[True] - baseline) / (peaks[False] - baseline) if peaks[False] else float("nan")
    row = [*ratios(seconds[True], seconds[False], 3), f"{peaks[True] / max(peaks[False], 1):.3f}", f"{growth:.3f}"]
    title = f"train_through_quantization, {args.scheme}, as a multiple of without, {args.repetitions} repetitions"
    print_table(["step time", "quartiles", "memory", "its growth"], [row], title)


def aligned_reward(args: argparse.Namespace) -> None:
    """Greedy accuracy of the deployed policy on held-out problems, before and after training with and without."""
    held_out = arithmetic_dataset(512, 0, "held_out")
    rows = []
    for seed in range(args.seeds):
        cells = [str(seed)]
        for through in (False, True):
            with tempfile.TemporaryDirectory() as output_dir:
                trainer = aligned_trainer(args, output_dir, through, max_steps=args.steps, seed=seed)
                if not through:
                    cells.append(percent(greedy_accuracy(trainer, held_out, arithmetic_reward, 256)))
                trainer.train()
                cells.append(percent(greedy_accuracy(trainer, held_out, arithmetic_reward, 256)))
                logs = trainer.state.log_history
                gaps = [row["discrepancy/mean"] for row in logs if "discrepancy/mean" in row]
                cells.append(f"{statistics.mean(gaps):.1e}")
        rows.append(cells)
    title = f"Deployed greedy accuracy in %, {args.scheme}, {args.steps} steps, 512 held-out problems"
    print_table(["seed", "before", "without", "its δ̄", "with", "its δ̄"], rows, title)


BENCHMARKS = {
    "overhead": overhead,
    "time": time_of_parts,
    "replica": replica,
    "grading": grading,
    "routing": routing,
    "aligned": aligned,
    "lengths": lengths,
}


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("what", choices=list(BENCHMARKS))
    parser.add_argument("--model", default="dc_trl/assets/tiny_qwen3")
    parser.add_argument("--repetitions", type=int, help="by default 30, of lengths 2")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--completions", type=int, default=2000, help="answers that grading grades")
    parser.add_argument("--completion_length", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scheme", default="fp8", choices=(*SCHEMES, *RESEARCH_BITS), help="of aligned training")
    parser.add_argument("--seeds", type=int, default=3, help="of aligned; models of routing")
    parser.add_argument("--steps", type=int, default=60, help="of training that aligned compares; 0 compares none")
    parser.add_argument("--responses", type=int, default=256, help="of the step of lengths; a multiple of 8")
    parser.add_argument("--scale", type=float, default=64, help="lengths divides a reasoning run's lengths by it")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.4, 0.6, 0.8], help="of log lengths")
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[1, 4, 16], help="of lengths")
    parser.add_argument("--size", choices=SIZES, help="of lengths: a random Qwen3 in place of the model")
    parser.add_argument("--attn_implementation", default="sdpa", help="of lengths")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="of lengths")
    parser.add_argument(
        "--output", type=Path, help="of lengths: a new .jsonl file; the table and a figure go beside it"
    )
    args = parser.parse_args()
    if args.repetitions is None:
        args.repetitions = 2 if args.what == "lengths" else 30
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    BENCHMARKS[args.what](args)


if __name__ == "__main__":
    main()
