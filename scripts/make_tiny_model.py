"""Makes the tiny model that ships with dc_trl: a byte-level Qwen3 that can half do arithmetic.

    python scripts/make_tiny_model.py --output_dir runs/tiny_qwen3
    python scripts/make_tiny_model.py --task sorting --architecture llama --output_dir runs/tiny_llama_sorting
    python scripts/make_tiny_model.py --size small --device cuda --output_dir runs/small_qwen3

The second line makes another model of another task for the study (docs/study.md), with `problems.jsonl` for its
reinforcement learning beside it: problems that the model was not taught on. The third makes a larger one on a GPU.

Training stops when the model is right about four times in ten, because reinforcement learning then has something to
improve. The same seed gives the same weights on the same kind of machine. About three minutes on two cores.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from sorting import LONG, sorting_problems
from study.counting import counting_problems, counts_on
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    get_constant_schedule_with_warmup,
    set_seed,
)

from dc_trl.data.arithmetic import Problem, Split, arithmetic_problems
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.settings.command_line import OptionParser


BATCH_SIZE = 64
LEARNING_RATE = 2e-3  # of the tiny size; in inverse proportion to the width, as Adam wants it (arXiv 2203.03466)
WARMUP_STEPS = 50
MAX_STEPS = 1000
FIRST_CHECK = 50  # sorting is learnt in fewer steps than arithmetic
CHECKED_PROBLEMS = 500
CHECK_EVERY = 4  # steps; the accuracy climbs by several points from one check to the next
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [dc_trl, {task}]
---

# {architecture} ({size}) for {task}

A {architecture} of {parameters:,} parameters with a byte-level tokenizer, trained from random weights
for {steps} steps of {batch} worked problems ({example}), until it is right in {target:.0%} of
held-out ones, so that reinforcement learning has something to improve. It knows nothing else.

Made by `python scripts/make_tiny_model.py --task {task} --architecture {architecture} --size {size} --seed {seed}
--target {target}` ({seconds:.0f} s, {machine}).

| on {problems} held-out problems | right |
|---|---|
| greedy | {greedy:.1%} |
| sampled at temperature 1 | {sampled:.1%} |
| at least one of 8 samples (pass@8) | {best:.1%} |
"""


class Task(NamedTuple):
    """What a model is taught: problems by (how many, seed, split), the most tokens of an answer, and what is right.

    `written` problems are for reinforcement learning, where no data set of the package has them.
    """

    problems: Callable[[int, int, Split], list[Problem]]
    max_new_tokens: int
    reward: Callable[[list[str], list[str]], list[float | None]] = arithmetic_reward
    written: int = 16384


TASKS = {
    "arithmetic": Task(arithmetic_problems, 48),
    "sorting": Task(sorting_problems, 48),
    "long_sorting": Task(partial(sorting_problems, digits=LONG), 96),
    "counting": Task(counting_problems, 80, counts_on, 4096),
}

# What differs between architectures of one size.
ARCHITECTURES: dict[str, dict[str, int]] = {
    "qwen3": {},
    "llama": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


class Size(NamedTuple):
    """Widths and depth of a model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


# Every width is a multiple of 128, so that every deployment scheme applies.
SIZES = {
    "tiny": Size(128, 256, 4, 4, 2, 64),
    "small": Size(512, 1536, 8, 8, 4, 128),
    "0.6b": Size(1024, 3072, 28, 16, 8, 128),  # of Qwen/Qwen3-0.6B
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer without merges: any UTF-8 text is its bytes; `\\boxed{` and chat marks are one token."""
    marks = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {mark: index for index, mark in enumerate(marks)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.add_tokens([AddedToken("\\boxed{", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, architecture: str = "qwen3", size: str = "tiny") -> PreTrainedModel:
    """Randomly initialised model."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **SIZES[size]._asdict(),
        **ARCHITECTURES[architecture],
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
    )
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    messages = [{"role": "user", "content": problem.question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, target: float, seed: int, task: Task) -> int:
    """Supervised training on worked problems until `target` of the held-out ones are right; returns the steps taken.

    The loss covers the completion and its end.
    """
    taught = task.problems(MAX_STEPS * BATCH_SIZE, seed, "train")
    held_out = task.problems(CHECKED_PROBLEMS, 1, "held_out")
    rate = LEARNING_RATE * SIZES["tiny"].hidden_size / model.config.hidden_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    # No decay: it makes the samples so alike that reinforcement learning finds nothing to choose from.
    schedule = get_constant_schedule_with_warmup(optimizer, WARMUP_STEPS)
    for step in range(1, MAX_STEPS + 1):
        model.train()
        rows, labels = [], []
        for problem in taught[(step - 1) * BATCH_SIZE : step * BATCH_SIZE]:
            prompt = prompt_ids(tokenizer, problem)
            completion = [*tokenizer(problem.solution)["input_ids"], tokenizer.eos_token_id]
            rows.append(torch.tensor(prompt + completion))
            labels.append(torch.tensor([-100] * len(prompt) + completion))
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        # Padding stands after the end, where the causal mask keeps it from the tokens that count.
        logits = model(input_ids=input_ids.to(model.device)).logits[:, :-1]
        targets = targets[:, 1:].to(model.device)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
        if step >= FIRST_CHECK and step % CHECK_EVERY == 0:
            # Most of the checks are far from the target, which a fifth of the problems shows in a fifth of the time.
            fifth = CHECKED_PROBLEMS // 5
            some, _ = accuracy(model, tokenizer, held_out[:fifth], task)
            if some < target / 2:
                continue
            others, _ = accuracy(model, tokenizer, held_out[fifth:], task)
            greedy = round(some * fifth + others * (CHECKED_PROBLEMS - fifth)) / CHECKED_PROBLEMS
            print(f"step {step:4d}  loss {loss.item():.3f}  greedy {greedy:.1%}", flush=True)
            if greedy >= target:
                return step
    sys.exit(
        f"error: target={target} was not reached in {MAX_STEPS} steps: choose another --seed or a lower --target."
    )


@torch.no_grad()
def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    task: Task,
    samples: int = 0,
) -> tuple[float, float]:
    """Mean share of right answers and share of problems solved at least once; one greedy answer if `samples` is 0."""
    model.eval()
    options = {"do_sample": False, "temperature": None} if samples == 0 else {"num_return_sequences": samples}
    mean = best = 0.0
    for start in range(0, len(problems), 100):
        chunk = problems[start : start + 100]
        batch = tokenizer.pad(
            {"input_ids": [prompt_ids(tokenizer, problem) for problem in chunk]}, return_tensors="pt"
        ).to(model.device)
        output = model.generate(**batch, max_new_tokens=task.max_new_tokens, **options)
        texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = [problem.answer for problem in chunk for _ in range(samples or 1)]
        right = torch.tensor(task.reward(texts, answers)).view(len(chunk), -1)
        mean += right.mean(1).sum().item()
        best += right.amax(1).sum().item()
    return mean / len(problems), best / len(problems)


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="arithmetic")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; the larger sizes want a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.4, help="share of held-out problems at which training stops")
    parser.add_argument("--problems", type=int, default=1000, help="held-out problems to report on")
    args = parser.parse_args()
    if args.output_dir.is_file() or (args.output_dir.is_dir() and any(args.output_dir.iterdir())):
        sys.exit(f"error: output_dir={str(args.output_dir)!r} is taken: choose another one.")

    task = TASKS[args.task]
    start = time.perf_counter()
    torch.set_num_threads(2)
    set_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.architecture, args.size).to(args.device)
    steps = train(model, tokenizer, args.target, args.seed, task)
    seconds = time.perf_counter() - start

    problems = task.problems(args.problems, 0, "held_out")
    greedy, _ = accuracy(model, tokenizer, problems, task)
    sampled, best = accuracy(model, tokenizer, problems, task, samples=8)
    example = problems[0]
    card = CARD.format(
        task=args.task,
        architecture=args.architecture,
        size=args.size,
        example=f'"{example.question}" → "{example.solution}"',
        parameters=model.num_parameters(),
        steps=steps,
        target=args.target,
        batch=BATCH_SIZE,
        seed=args.seed,
        seconds=seconds,
        machine=torch.cuda.get_device_name() if model.device.type == "cuda" else f"{torch.get_num_threads()} threads",
        problems=len(problems),
        greedy=greedy,
        sampled=sampled,
        best=best,
    )
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    (args.output_dir / "README.md").write_text(card)
    if args.task != "arithmetic":
        written = task.problems(task.written, 2, "held_out")
        rows = [{"prompt": problem.question, "answer": problem.answer} for problem in written]
        (args.output_dir / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"greedy {greedy:.1%}, sampled {sampled:.1%}, pass@8 {best:.1%}, trained in {seconds:.0f} s: {args.output_dir}"
    )


if __name__ == "__main__":
    main()
