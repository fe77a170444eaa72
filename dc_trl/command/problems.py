"""The problems of a training configuration and their data sets."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..data.arithmetic import arithmetic_dataset
from ..data.cleaning import clean, print_cleaning
from ..data.prompts import BOXED_INSTRUCTION, Prompt, describe_counts, load_prompts, load_rows, make_prompt
from ..data.sources import PUBLISHED, load_benchmark, load_dapo
from ..grading.rewards import REWARDS
from .own_arguments import DataArguments


def load_data(
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    arithmetic_size: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Dataset, Dataset | None, str]:
    """Return training problems, held-out problems (None with `eval_size=0`), and a line about the rows.

    Args:
        data, tokenizer: settings of the data, and the model's tokenizer.
        seed: seed of the held-out split and of the arithmetic problems.
        arithmetic_size: number of arithmetic problems for training.
        chat_template_kwargs: variables of the chat template, by which the length of a prompt is counted.
    """
    if data.dataset_name is None:
        raise ValueError("dataset_name is not set: give a Hub id, a local file, or 'arithmetic'.")
    if data.dataset_name == "arithmetic":
        to_prompt = partial(make_prompt, tokenizer=tokenizer, instruction=data.instruction)
        held_out = arithmetic_dataset(data.eval_size, 0, "held_out", to_prompt) if data.eval_size else None
        train = arithmetic_dataset(arithmetic_size, seed, "train", to_prompt)
        return train, held_out, f"arithmetic: {len(train)} training problems"
    instruction = data.instruction
    if data.dataset_name == "dapo":
        with PartialState().local_main_process_first():  # only one process of a machine downloads
            benchmarks = {name: load_benchmark(name) for name in PUBLISHED}
            rows = load_dapo()
        size = len(rows)
        rows, dropped = clean(rows, benchmarks)
        if PartialState().is_main_process:
            print_cleaning(size, dropped)
        prompt_column, answer_column, instruction = "problem", "answer", instruction or BOXED_INSTRUCTION
    else:
        rows = load_rows(data.dataset_name, data.dataset_config, data.dataset_split)
        prompt_column, answer_column = data.prompt_column, data.answer_column
    graded = not REWARDS.keys().isdisjoint(data.rewards)
    problems, counts = load_prompts(
        rows,
        tokenizer,
        prompt_column,
        answer_column,
        instruction,
        data.max_prompt_length,
        graded,
        chat_template_kwargs,
    )
    line = f"{data.dataset_name}: {describe_counts(counts)}"
    if data.eval_size == 0:
        return problems, None, line
    if data.eval_size >= len(problems):
        raise ValueError(
            f"eval_size={data.eval_size} leaves nothing to train on: {line}. Set eval_size below {len(problems)}; "
            "0 holds none out."
        )
    parts = problems.train_test_split(test_size=data.eval_size, seed=seed)
    # A data set may hold a problem more than once.
    held_out_prompts = {json.dumps(prompt) for prompt in parts["test"]["prompt"]}
    train = parts["train"].filter(lambda row: json.dumps(row["prompt"]) not in held_out_prompts)
    return train, parts["test"], f"{line}; {len(parts['test'])} held out"


def draw_prompts(
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seed: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Draw prompts at random from a data set, by default the built-in arithmetic; their answers may be anything.

    Args:
        data, tokenizer: settings of the data, and the model's tokenizer.
        count: number of prompts; if there are fewer, a line says so and all are returned.
        seed: seed of the draw and of the arithmetic problems.
        chat_template_kwargs: see `load_data`.

    Raises:
        ValueError: there is one prompt alone, by which no spread over prompts can be known.
    """
    ungraded = replace(data, dataset_name=data.dataset_name or "arithmetic", rewards=[])
    every = load_data(ungraded, tokenizer, seed, count, chat_template_kwargs)[0]["prompt"][:]
    if len(every) < 2:
        raise ValueError(f"dataset_name={data.dataset_name!r} has one prompt, and a spread needs at least two.")
    if len(every) < count:
        print(f"prompts={count}: there are {len(every)}, and all of them are taken", flush=True)
    return random.Random(seed).sample(every, min(count, len(every)))
