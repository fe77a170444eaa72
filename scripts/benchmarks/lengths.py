"""What padding costs a training step: TRL's trainer and ours on replayed rollouts of log-normal length, in turns.

A step reads one generation batch: so many responses, in micro-batches, for one optimizer step. Sampling takes no time.
Every run has a trainer of its own and, on a CPU, a process of its own, so that its memory is its own.
"""

import argparse
import gc
import json
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Qwen3Config, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.records.figures import new_figure
from dc_trl.records.tables import markdown_table, print_table

from .steps import peak, reset_peak, resident, synchronize


# Of a reasoning run, in tokens; the benchmark divides them by `--scale`.
MEAN, CAP = 2500, 8192
# Settings of our trainer, which measures the discrepancy in all of them; None is TRL's own trainer.
ARMS: dict[str, dict[str, Any] | None] = {
    "TRL": None,
    "ours, neither": {"length_aware_batches": False},
    "length-aware": {},
}
# What is measured of a run, by its name in the file, and the heading of the table.
FIGURES = {"training": "training part", "step": "whole step", "memory": "peak memory"}
# Layers and widths of random models that `--size` makes.
SIZES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
}


def response_lengths(count: int, sigma: float, scale: float) -> list[int]:
    """Log-normal lengths of this mean and this cap, both divided by `scale`; the same at every call."""
    rng = random.Random(0)
    location = math.log(MEAN / scale) - sigma**2 / 2
    return [min(max(1, round(rng.lognormvariate(location, sigma))), round(CAP / scale)) for _ in range(count)]


class Replay:
    """Rollout function: random completions of given lengths, the same at every call."""

    __name__ = "replay"

    def __init__(self, lengths: Sequence[int]):
        rng = random.Random(0)
        self._ids = [[rng.randrange(10, 200) for _ in range(length)] for length in lengths]
        self._logprobs = [[-rng.uniform(0, 8) for _ in range(length)] for length in lengths]
        self.real_tokens = 0  # of the last call, prompts included

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list]:
        tokenizer, template = trainer.processing_class, {"add_generation_prompt": True, "return_dict": True}
        prompt_ids = [tokenizer.apply_chat_template(prompt, **template)["input_ids"] for prompt in prompts]
        self.real_tokens = sum(map(len, prompt_ids)) + sum(map(len, self._ids))
        return {"prompt_ids": prompt_ids, "completion_ids": self._ids, "logprobs": self._logprobs}


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


class Meter(TrainerCallback):
    """Seconds, peak memory and tokens computed of one optimizer step."""

    def __init__(self) -> None:
        self._before = resident()  # no trainer is there yet
        self._first_forward = 0.0
        self.computed = 0

    def listen(self, backbone: torch.nn.Module) -> None:
        backbone.register_forward_pre_hook(self._note)
        backbone.register_forward_hook(self._count)

    def _note(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._first_forward == 0.0:
            synchronize()
            self._first_forward = time.perf_counter()

    def _count(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.computed += output.last_hidden_state.shape[:2].numel()

    def on_step_begin(self, args, state, control, **kwargs):
        reset_peak()
        synchronize()
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        end = time.perf_counter()
        self.step, self.training = end - self._start, end - self._first_forward
        self.memory = peak() - self._before


def warm_up(model: Any) -> None:
    """Loads what a first forward and backward load, so that it counts as nobody's time and memory."""
    model(input_ids=torch.tensor([[5, 6, 7]], device=model.device)).logits.sum().backward()


def apart(function: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """What a function returns; on a CPU from a new process, because freed memory stays with the one that freed it."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        return function(*args)
    context = multiprocessing.get_context("fork")  # of a process that has computed nothing, and so has no threads
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function(*args)))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        sys.exit(f"error: the run's process ended with exit status {process.exitcode}; see above.")
    finally:
        process.join()


def make_model(args: argparse.Namespace) -> Any:
    if args.size is None:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        torch.manual_seed(0)
        tokens = {"tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES[args.size], **tokens), dtype=torch.float32)
    model.set_attn_implementation(args.attn_implementation)
    return model


def run(args: argparse.Namespace, arm: str, micro_batch: int, sigma: float) -> dict[str, float]:
    """One step of a new trainer."""
    if not torch.cuda.is_available():
        warm_up(make_model(args))
    meter, settings = Meter(), ARMS[arm]
    replay = Replay(response_lengths(args.responses, sigma, args.scale))
    micro_batches = args.responses // micro_batch
    with tempfile.TemporaryDirectory() as output_dir:
        fields = {
            "output_dir": output_dir,
            "loss_type": "grpo",
            "epsilon": 0.24,
            "beta": 0.0,
            "bf16": torch.cuda.is_available(),
            "gradient_checkpointing": args.gradient_checkpointing,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": micro_batches,
            "steps_per_generation": micro_batches,
            "num_generations": 8,
            "max_completion_length": round(CAP / args.scale),
            "max_steps": 1,
            "learning_rate": 1e-6,
            "vllm_importance_sampling_correction": False,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": 1000,
        }
        trainer = (GRPOTrainer if settings is None else DCGRPOTrainer)(
            make_model(args),
            reward,
            GRPOConfig(**fields) if settings is None else DCGRPOConfig(**fields, constraint="none", **settings),
            train_dataset=arithmetic_dataset(args.responses, 0, "train"),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            rollout_func=replay,
            callbacks=[meter],
        )
        trainer.remove_callback(PrinterCallback)
        meter.listen(trainer.model.base_model)
        trainer.train()
    measured = {name: getattr(meter, name) for name in FIGURES}
    return measured | {"computed_per_real": meter.computed / replay.real_tokens}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each σ, micro-batch and arm, with the figures of its repetitions in the order they were made."""
    if torch.cuda.is_available():
        for arm in ARMS:  # kernels are chosen and compiled at their first call
            run(args, arm, max(args.micro_batches), args.sigmas[0])
    rows = []
    for sigma, micro_batch in product(args.sigmas, args.micro_batches):
        runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for repetition in range(args.repetitions):
            # The order changes, so that none of them always runs after the same one.
            for arm in random.Random(repetition).sample(list(ARMS), len(ARMS)):
                runs[arm].append(apart(run, args, arm, micro_batch, sigma))
        for arm, measured in runs.items():
            figures = {name: [each[name] for each in measured] for name in measured[0]}
            rows.append({"sigma": sigma, "micro_batch": micro_batch, "arm": arm, **figures})
    return rows


def multiples(rows: Sequence[dict[str, Any]], row: dict[str, Any], name: str) -> list[float]:
    """A figure of an arm as multiples of TRL's in the same repetition."""
    cell = row["sigma"], row["micro_batch"]
    trl = next(each for each in rows if each["arm"] == "TRL" and (each["sigma"], each["micro_batch"]) == cell)
    return [ours / theirs for ours, theirs in zip(row[name], trl[name], strict=True)]


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, one for each σ and micro-batch; cells hold the medians of our arms, in the order of `ARMS`."""
    ours = [arm for arm in ARMS if ARMS[arm] is not None]
    head = ["σ", "micro-batch", "computed per real token: TRL", *ours, "training part: TRL, s"]
    lines = []
    for cell in dict.fromkeys((row["sigma"], row["micro_batch"]) for row in rows):
        arms = {row["arm"]: row for row in rows if (row["sigma"], row["micro_batch"]) == cell}
        computed = [f"{statistics.median(arms[arm]['computed_per_real']):.2f}" for arm in ARMS]
        compared = [
            " · ".join(f"{statistics.median(multiples(rows, arms[arm], name)):.2f}" for arm in ours)
            for name in FIGURES
        ]
        seconds = f"{statistics.median(arms['TRL']['training']):.1f}"
        lines.append([f"{cell[0]:g}", str(cell[1]), *computed, seconds, *compared])
    return [*head, *(f"{heading}, × TRL" for heading in FIGURES.values())], lines


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A column for each σ: tokens computed, training part and peak memory by micro-batch."""
    sigmas, micro_batches = (sorted({row[name] for row in rows}) for name in ("sigma", "micro_batch"))
    value: dict[str, Callable[[dict[str, Any]], float]] = {
        "tokens computed per real token": lambda row: statistics.median(row["computed_per_real"]),
        "training part, × TRL": lambda row: statistics.median(multiples(rows, row, "training")),
        "peak memory, × TRL": lambda row: statistics.median(multiples(rows, row, "memory")),
    }
    figure, all_axes = new_figure(len(value), len(sigmas), width=3.2 * len(sigmas), height=2.4)
    for axes, ((label, of_row), sigma) in zip(all_axes, product(value.items(), sigmas), strict=True):
        for arm in ARMS:
            points = [(row["micro_batch"], of_row(row)) for row in rows if (row["arm"], row["sigma"]) == (arm, sigma)]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=arm)
        axes.set_xscale("log", base=2)
        axes.set_xticks(micro_batches, map(str, micro_batches))
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        if label == next(iter(value)):
            axes.set_title(f"σ = {sigma:g}", fontsize=10, loc="left")
        if sigma == sigmas[0]:
            axes.set_ylabel(label, fontsize=8)
        if label == list(value)[-1]:
            axes.set_xlabel("micro-batch", fontsize=8)
    figure.legend(
        *all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    figure.savefig(path)


def lengths(args: argparse.Namespace) -> None:
    if args.output is not None and args.output.exists():
        sys.exit(f"error: output={str(args.output)!r} already exists: choose another file, or remove it first.")
    for micro_batch in args.micro_batches:
        if args.responses % micro_batch or args.responses % 8:
            sys.exit(f"error: responses={args.responses} is no multiple of 8 and of micro_batches={micro_batch}.")
    logging.disable_progress_bar()
    rows = measure(args)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {args.threads} threads"
    of_lengths = f"mean {MEAN / args.scale:.0f}, cap {CAP / args.scale:.0f} tokens"
    title = f"One step of {args.responses} responses, {of_lengths}, {device}, {args.repetitions} repetitions"
    print_table(*table(rows), title)
    if args.output is not None:
        names = ("responses", "scale", "repetitions", "size", "attn_implementation", "gradient_checkpointing")
        settings = {"device": device} | {name: getattr(args, name) for name in names}
        args.output.write_text("".join(json.dumps(settings | row, ensure_ascii=False) + "\n" for row in rows))
        args.output.with_suffix(".md").write_text(f"{title}.\n\n{markdown_table(*table(rows))}")
        draw(rows, args.output.with_suffix(".png"))
        print(f"wrote {args.output}, and beside it the table (.md) and the figure (.png)")
