"""What train_through_quantization leaves of the mismatch, what it costs, and what it earns."""

import argparse
import random
import statistics
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.calibration.result import CalibrationSettings
from dc_trl.calibration.rollouts import sample_rollouts, train_logps
from dc_trl.callbacks.before_and_after import greedy_rewards
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.quantization.schemes import RESEARCH_BITS, SCHEMES
from dc_trl.records.estimators import mean_estimate
from dc_trl.records.tables import percent, print_table
from dc_trl.sampling.engine_names import EngineSpec

from .steps import StepClock, peak, ratios, train_in_turns


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
    trainer.step_clock = clock
    return trainer


def aligned_cost(args: argparse.Namespace) -> None:
    """Step time and memory with and without, on identical completions that cost nothing to sample."""
    rng = random.Random(0)

    def replay(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float]]]:
        ids = [[rng.randrange(10, 200) for _ in range(args.completion_length)] for _ in prompt_ids]
        return ids, [[-1.0] * args.completion_length for _ in prompt_ids]

    baseline = peak()
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
                    cells.append(percent(mean_estimate(greedy_rewards(trainer, held_out, 256))))
                trainer.train()
                cells.append(percent(mean_estimate(greedy_rewards(trainer, held_out, 256))))
                logs = trainer.state.log_history
                gaps = [row["discrepancy/mean"] for row in logs if "discrepancy/mean" in row]
                cells.append(f"{statistics.mean(gaps):.1e}")
        rows.append(cells)
    title = f"Deployed greedy accuracy in %, {args.scheme}, {args.steps} steps, 512 held-out problems"
    print_table(["seed", "before", "without", "its δ̄", "with", "its δ̄"], rows, title)
