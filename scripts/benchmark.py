"""What DC-GRPO costs over GRPO, the replica over model.generate, and graders: ratios within one run, medians.

And what routing replay removes of the mismatch of a mixture of experts.

python scripts/benchmark.py overhead    step time and peak memory on identical, replayed rollouts
python scripts/benchmark.py time        where the time of a step goes, and what the clock of that costs itself
python scripts/benchmark.py replica     wall time on the same prompts, one row for each scheme
python scripts/benchmark.py grading     completions graded in this process, and in worker processes
python scripts/benchmark.py routing     KL, |Δp| and flipped experts of random mixtures, without and with replay
python scripts/benchmark.py aligned     what train_through_quantization leaves of the mismatch, costs, and earns
python scripts/benchmark.py lengths     what length-aware batches save on TRL's padding
python scripts/benchmark.py lora        mismatch, bytes and seconds of an adapter merged, and beside its base
"""

import argparse
import random
import statistics
import tempfile
import time
import warnings
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.aligned import aligned
from benchmarks.lengths import SIZES, lengths
from benchmarks.lora import lora
from benchmarks.routing import routing
from benchmarks.steps import StepClock, peak, ratios, train_in_turns
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PrinterCallback,
)
from trl import GRPOConfig, GRPOTrainer

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.constraint.corrections import CORRECTIONS
from dc_trl.constraint.forms import COEFFICIENTS
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.grading import Gold, Grader, grade
from dc_trl.quantization.schemes import RESEARCH_BITS, SCHEMES
from dc_trl.records.clock import PartsClock
from dc_trl.records.tables import print_table
from dc_trl.sampling.replica import Replica
from dc_trl.settings.command_line import OptionParser


# Where log π_train comes from, see dc_trl/trainer.py: the loss's own forward, or TRL's old log-probs.
ROUTES = {"loss's forward": {"gradient_accumulation_steps": 2}, "old log-probs": {"gradient_accumulation_steps": 1}}


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
    kind: type[GRPOTrainer],
    args: argparse.Namespace,
    output_dir: str,
    replay: bool = True,
    first: int = 0,
    **options: Any,
) -> GRPOTrainer:
    # Only ours would write files.
    config = (partial(DCGRPOConfig, export_run=False) if kind is DCGRPOTrainer else GRPOConfig)(
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
        callbacks=[clock := StepClock(first)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.step_clock = clock
    return trainer


def with_recompute(trainer: GRPOTrainer) -> GRPOTrainer:
    """TRL with its importance-sampling correction for vLLM, whose rollouts are replayed too: no engine is asked."""
    trainer.use_vllm = True
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = 0
    return trainer


def overhead(args: argparse.Namespace) -> None:
    baseline = peak()
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
                theirs = peaks[other]
                memory = f"{ours / theirs:.3f}", f"{(ours - baseline) / (theirs - baseline):.3f}"
                rows.append([route, other, *ratios(seconds["DC-GRPO"], seconds[other], 3), *memory])
    tokens = 2 * args.batch_size * args.completion_length
    title = f"DC-GRPO as a multiple, {args.repetitions} repetitions, {tokens:,} completion tokens per batch"
    print_table(["route", "over", "step time", "quartiles", "memory", "its growth"], rows, title)
    overhead_of_methods(args)


# What is switched on, beside GRPO on the same rollouts.
METHODS: dict[str, dict[str, Any]] = {
    **{f"constraint_form={form}": {"constraint": "static", "constraint_form": form} for form in COEFFICIENTS},
    **{f"rollout_correction={name}": {"rollout_correction": name} for name in CORRECTIONS},
    "train_through_quantization": {"train_through_quantization": True},
    "discrepancy_split": {"discrepancy_split": True},
    "discrepancy_split, train_through_quantization": {"discrepancy_split": True, "train_through_quantization": True},
    "score_centering": {"score_centering": True},
}


def overhead_of_methods(args: argparse.Namespace) -> None:
    """What `METHODS` switches on, each over GRPO, in one optimizer step whose weights lag by one."""
    with tempfile.TemporaryDirectory() as output_dir:
        of_step = {"deployment_scheme": "fp8", "gradient_accumulation_steps": 2, "replay": False}
        of_step |= {"weight_sync_steps": 2, "max_steps": 2, "first": 1}
        trainers = {}
        for name, settings in {"GRPO": {}, **METHODS}.items():
            trainer = make_trainer(DCGRPOTrainer, args, output_dir, **of_step, **({"constraint": "none"} | settings))
            # Random completions, the same at every call, in no time.
            trainer.replica.generate = lambda prompts, *_, **__: random_completions(
                len(prompts), args.completion_length
            )
            trainers[name] = trainer
        seconds, peaks = train_in_turns(trainers, args.repetitions)
    rows = [
        [name, *ratios(seconds[name], seconds["GRPO"], 3), f"{peaks[name] / peaks['GRPO']:.3f}"] for name in METHODS
    ]
    title = f"One optimizer step of age 1 as a multiple of GRPO's, FP8, {args.repetitions} repetitions"
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
            trainer.clock = CountingClock()
            shares: dict[str, list[float]] = {}
            for _ in range(args.repetitions + 1):
                trainer.clock.entered = 0
                trainer.train()
                seconds = trainer.clock.seconds()
                total = sum(seconds.values())
                for part, spent in [*seconds.items(), ("the clock itself", trainer.clock.entered * cost)]:
                    shares.setdefault(part, []).append(spent / total)
            for part, values in sorted(shares.items(), key=lambda found: -statistics.median(found[1])):
                low, middle, high = statistics.quantiles(values[1:], n=4)  # the first one warms up
                rows.append([route, part, f"{middle:.2%}", f"{low:.2%} – {high:.2%}"])
    title = f"Shares of 10 optimizer steps, {args.repetitions} repetitions, {1e6 * cost:.1f} µs a part"
    print_table(["route", "part", "share", "quartiles"], rows, title)


class CountingClock(PartsClock):
    """Counts the parts that it has been in."""

    entered = 0

    def part(self, name: str, within: str | None = None) -> AbstractContextManager[None]:
        self.entered += 1
        return super().part(name, within)


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


BENCHMARKS = {
    "overhead": overhead,
    "time": time_of_parts,
    "replica": replica,
    "grading": grading,
    "routing": routing,
    "aligned": aligned,
    "lengths": lengths,
    "lora": lora,
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
