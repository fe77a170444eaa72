"""A LoRA adapter merged before quantization, and beside its quantized base: mismatch, bytes and seconds."""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.quantization.adapter import write_adapter
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.tensors import policy_tensors
from dc_trl.records.tables import print_table
from dc_trl.sampling.replica import Replica


SCHEMES = ("bf16", "fp8", "int8", "int4_g32")
WAYS = ("merged", "adapter")
RANK = 16


def lora(args: argparse.Namespace) -> None:
    """Train an adapter a little, sample by it in bfloat16, and score the same tokens by all replicas."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear")
    policy = get_peft_model(base, config)
    problems = arithmetic_dataset(args.batch_size, 0, "train")["prompt"]
    template = {"add_generation_prompt": True, "return_dict": True}
    prompts = [tokenizer.apply_chat_template(problem, **template)["input_ids"] for problem in problems]
    train(policy, prompts, tokenizer.eos_token_id, args.steps)
    size = {"max_new_tokens": args.completion_length, "min_new_tokens": args.completion_length}
    settings = GenerationConfig(**size, do_sample=True, top_k=0, pad_token_id=tokenizer.eos_token_id)
    completions, _ = Replica(policy, "bf16").generate(prompts, settings, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        trained = probabilities(policy, prompts, completions)
    rows = []
    for scheme in SCHEMES:
        gaps = {}
        for way in WAYS:
            replica = Replica(policy, scheme, lora_deployment=way)
            sync = seconds(lambda replica=replica: replica.sync(policy), args.repetitions)
            gaps[way] = (probabilities(replica.model, prompts, completions) - trained).abs()
            written, write = written_by(policy, scheme, way, args.repetitions)
            error = gaps[way].std() / len(gaps[way]) ** 0.5
            rows.append(
                [
                    scheme,
                    way,
                    f"{gaps[way].mean():.5f} ± {error:.5f}",
                    f"{written / 2**20:.2f}",
                    f"{write:.3f}",
                    f"{sync:.3f}",
                ]
            )
        paired = gaps["adapter"] - gaps["merged"]
        rows[-1].append(f"{paired.mean():+.5f} ± {paired.std() / len(paired) ** 0.5:.5f}")
        rows[-2].append("")
    head = [
        "scheme",
        "lora_deployment",
        "mean |Δp|",
        "MiB",
        "write, s",
        "replica's sync, s",
        "adapter − merged, paired",
    ]
    print_table(head, rows, f"{args.model}, rank {RANK}, {len(trained):,} tokens, after {args.steps} steps")


def train(policy, prompts: list[list[int]], end: int, steps: int) -> None:
    """Make the adapter other than zero: it learns to write the prompts, one step on four of them each time."""
    optimizer = torch.optim.AdamW([each for each in policy.parameters() if each.requires_grad], lr=1e-3)
    for step in range(steps):
        loss = torch.zeros(())
        for ids in (prompts[(4 * step + each) % len(prompts)] for each in range(4)):
            tokens = torch.tensor([[*ids, end]])
            loss = loss + policy(input_ids=tokens, labels=tokens).loss / 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def probabilities(model, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
    """Probability of each token of the completions, one after the other."""
    found = []
    for prompt, ids in zip(prompts, completions, strict=True):
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.float().softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0])
    return torch.cat(found)


def written_by(policy, scheme: str, way: str, repetitions: int) -> tuple[int, float]:
    """Bytes and median seconds of what a synchronization writes for a server."""
    sizes: list[int] = []
    writer = CheckpointWriter(policy, scheme)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        target = Path(folder, way)

        def write() -> None:
            if way == "adapter":
                shutil.rmtree(target, ignore_errors=True)
                sizes.append(write_adapter(policy, target))
            else:
                sizes.append(writer.write(policy_tensors(policy), target))

        median = seconds(write, repetitions)
    return sizes[0], median


def seconds(action, repetitions: int) -> float:
    """Median seconds of an action."""
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
