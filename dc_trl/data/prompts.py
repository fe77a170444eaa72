"""Prompts and gold answers from any data set: a Hub id, a local file, or the built-in arithmetic."""

import glob
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Json, Value, load_dataset
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException
from transformers import PreTrainedTokenizerBase

from ..files import read_text
from ..grading import GRADING_COLUMNS, Gold, gold_answer, is_gradable
from ..grading.checked_reward import excerpt
from ..settings.paths import READERS, is_data_file, require_data_file


# The wording of Qwen2.5-Math's evaluation, which the Qwen models know.
BOXED_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."

Prompt = str | list[dict[str, Any]]

_NOT_PASSED_ON = {"prompt", "answer", "image", "images", "prompts", "completions"}


def load_rows(
    name: str,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    field: str = "dataset_name",
) -> Dataset:
    """Load the rows of a local JSON, JSONL, Parquet or CSV file, or of a data set on the Hub.

    Args:
        name: path of a file, or Hub id.
        config: configuration of a Hub data set.
        split: split of a Hub data set; a local file is one split.
        revision: commit, tag or branch of a Hub data set, None for its main branch.
        field: the option that ``name`` comes from, for error messages.

    Raises:
        ValueError: no such file or data set, or it cannot be read.
    """
    options: dict[str, str | None]
    if is_data_file(name):
        require_data_file(name, field)
        path = Path(name).expanduser()
        if path.suffix != ".parquet":
            read_text(path)  # refuses other encodings than UTF-8, which datasets would guess
        # To datasets a path is a pattern: "rows[1].jsonl" would mean rows1.jsonl.
        source, options = READERS[path.suffix], {"data_files": glob.escape(str(path)), "split": "train"}
    else:
        source, options = name, {"name": config, "split": split, "revision": revision}
    try:
        rows = load_dataset(source, **options)
    except (DatasetsError, ArrowException, OSError, ValueError, TypeError, StopIteration) as error:  # of an empty file
        # datasets wraps what went wrong in its own DatasetGenerationError; the cause says more.
        reason = (str(error.__cause__ or error).strip() or "it is empty").splitlines()[0]
        raise ValueError(
            f"{field}={name!r} (dataset_config={config!r}, dataset_split={split!r}) cannot be loaded: {reason}"
        ) from error
    if isinstance(rows, DatasetDict) or len(rows) == 0:
        raise ValueError(f"{field}={name!r} holds no rows in split {split!r}: choose another dataset_split.")
    return rows


def load_prompts(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    instruction: str | None = None,
    max_prompt_length: int | None = None,
    graded: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Dataset, Counter[str]]:
    """Make prompts and gold answers as the trainer takes them; rows that cannot be used are counted and left out.

    Args:
        tokenizer: with a chat template prompts become conversations, without one they stay text.
        prompt_column: text, or a list of chat messages, which reach the chat template as they are. A dot reads nested
            fields: `extra_info.question`.
        answer_column: number, or text with the gold answer, of which only what follows `####` counts (GSM8K's form). A
            dot reads nested fields: `reward_model.ground_truth`.
        instruction: what the prompt says after the problem (see `make_prompt`).
        max_prompt_length: in tokens, with the chat template; longer prompts are left out.
        graded: whether a reward of ours reads the answers: rows whose answer it cannot read are left out. Otherwise
            the answers are passed on as they are.
        chat_template_kwargs: variables of the chat template, which may add tokens to a prompt.

    Returns:
        (data set with the columns `prompt` and `answer`, and the others of the rows, except for images; counts by
        reason: `rows`, `kept`, and what was left out).

    Raises:
        ValueError: a column is missing, or no row is left.
    """
    counts = Counter(rows=len(rows), kept=0)
    # TRL would give images to the model, and everything else goes to the reward functions.
    # By the names of TRL's own arguments it could not give them a column.
    others = [name for name in rows.column_names if name not in _NOT_PASSED_ON]
    variables = chat_template_kwargs or {}
    as_it_is = not graded and answer_column.split(".")[0] in rows.column_names
    kept: list[dict[str, Any]] = []
    for row in rows:
        prompt = prompt_of(row, prompt_column, tokenizer, instruction)
        answer = nested(row, answer_column, "answer_column") if graded or as_it_is else None
        answer = gold_answer(answer) if graded else answer
        compared = {name: row[name] for name in GRADING_COLUMNS if graded and row.get(name) is not None}
        if not prompt:
            counts["without prompt"] += 1
        elif ends_with_answer(prompt):
            counts["with the answer at the end of the prompt"] += 1
        elif graded and not is_gradable(Gold(answer or "", **compared)):
            counts["without a gold answer that can be parsed"] += 1
        elif max_prompt_length is not None and len(tokenize([prompt], tokenizer, **variables)[0]) > max_prompt_length:
            counts[f"with a prompt of more than {max_prompt_length} tokens"] += 1
        else:
            kept.append({"prompt": prompt, "answer": answer, **{name: row[name] for name in others}})
    counts["kept"] = len(kept)
    if not kept:
        raise ValueError(
            f"prompt_column={prompt_column!r}, answer_column={answer_column!r}: none of the {len(rows)} rows can be "
            f"used ({describe_counts(counts)}): check the columns and max_prompt_length."
        )
    features = {
        "prompt": Value("string") if tokenizer.chat_template is None else [Json()],  # which adds no keys to messages
        "answer": reduce(getitem, answer_column.split("."), rows.features) if as_it_is else Value("string"),
        **{name: rows.features[name] for name in others},  # a column of nulls would lose its type
    }
    return Dataset.from_list(kept, features=Features(features)), counts


def describe_counts(counts: dict[str, int]) -> str:
    """Say in one line how many rows there are, how many were kept, and why the others were left out."""
    dropped = [f"{count} {reason}" for reason, count in counts.items() if reason not in ("rows", "kept")]
    return f"{counts['kept']} of {counts['rows']} rows kept" + (f", left out: {'; '.join(dropped)}" if dropped else "")


def nested(row: Mapping[str, Any], column: str, field: str) -> Any:
    """Return what a column holds, or by `a.b` a field of it; None where a record on the way is null.

    Raises:
        ValueError: the row has no such field; the message names the option, `field`.
    """
    value: Any = row
    for key in column.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or key not in value:
            there = ", ".join(map(repr, value if isinstance(value, dict) else row))
            raise ValueError(f"{field}={column!r} is missing: set it to a column of the rows, which have {there}.")
        value = value[key]
    return value


def prompt_of(
    row: Mapping[str, Any], column: str, tokenizer: PreTrainedTokenizerBase, instruction: str | None
) -> Prompt:
    """Return the prompt that a row has in a column, as a text or as messages; "" where there is none.

    Messages stay as they are, and the last one of the user says the instruction too.

    Raises:
        ValueError: a message is no text, or the tokenizer has no chat template for those of others than the user.
    """
    given = nested(row, column, "prompt_column")
    text = text_of_prompt(given)
    if not isinstance(given, list) or tokenizer.chat_template is None:
        for message in given if isinstance(given, list) else ():
            if message["role"] != "user":
                raise ValueError(
                    f"prompt_column={column!r} has messages of the role {message['role']!r}, and the tokenizer has no "
                    "chat template: use a tokenizer with one, or a column of texts."
                )
        return make_prompt(text, tokenizer, instruction) if text else ""
    # A file with columns has null for what a message does not have.
    messages = [{key: value for key, value in each.items() if value is not None or key == "content"} for each in given]
    if not messages or not "".join(parts_of(messages[-1])).strip():
        return ""
    if instruction:
        asks = next((row for row in reversed(range(len(messages))) if messages[row]["role"] == "user"), -1)
        content, added = messages[asks]["content"] or "", f"\n\n{instruction}"
        more = [*content, {"type": "text", "text": added}] if isinstance(content, list) else content + added
        messages[asks] = messages[asks] | {"content": more}
    return messages


def require_messages(messages: list[Any], images: bool = False) -> None:
    """Refuse messages without a role or a content, and a content that is no text, unless there may be images."""
    for message in messages:
        whole = isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        if not whole or not (images or all(isinstance(part, str) for part in parts_of(message))):
            raise ValueError(
                f"the message {excerpt(message)} of a prompt is invalid: give its role and its content, a text or a "
                "list of {'type': 'text', 'text': ...}, in each message."
            )


def parts_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the texts of a message, one for each part of its content; what is no text as it is."""
    content = message["content"]
    if isinstance(content, list):
        return [part.get("text", part) if isinstance(part, dict) else part for part in content]
    return [] if content is None else [content]


def ends_with_answer(prompt: Any) -> bool:
    """Return whether the last message of a conversation is the assistant's, which the policy would read."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def text_of_prompt(prompt: Any) -> str:
    """Return the text, or what the user says in chat messages, last if others speak too; "" for everything else."""
    if isinstance(prompt, list):
        require_messages(prompt)
        others = any(message["role"] != "user" for message in prompt)
        asked = [message for message in (prompt[-1:] if others else prompt) if message["role"] == "user"]
        prompt = "\n\n".join(part for message in asked for part in parts_of(message))
    return prompt.strip() if isinstance(prompt, str) else ""


def unread_text(conversation: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> Any:
    """Return what a chat template leaves out of a conversation, or changes; None where it reads all texts.

    Spaces do not count, nor does what an assistant thought (`<think>`), which templates leave out of earlier turns.

    Args:
        conversation: messages of texts.
        render: returns what the template makes of messages.
    """
    shown = render(conversation)
    squeezed = "".join(shown.split())
    for message in conversation:
        texts = parts_of(message)
        if message["role"] == "assistant":
            texts = [text.rpartition("</think>")[2] for text in texts]
            texts += [call.get("function", call)["name"] for call in message.get("tool_calls") or ()]
        for text in texts:
            written = (text, json.dumps(text, ensure_ascii=False)[1:-1])  # which templates make of a tool's result
            if not any("".join(each.split()) in squeezed for each in written):
                return text
        parts = message["content"] if isinstance(message["content"], list) else ()
        if any(str(part) in shown or json.dumps(part, ensure_ascii=False) in shown for part in parts):
            return parts  # printed as Python or JSON writes them
    return None


def make_prompt(problem: str, tokenizer: PreTrainedTokenizerBase, instruction: str | None) -> Prompt:
    """Make a conversation where the tokenizer has a chat template, else the text that a base model continues.

    Without an instruction (None or "") both hold the bare problem.
    """
    if tokenizer.chat_template is not None:
        return chat_prompt(problem, instruction)
    return f"Problem: {problem}\n\n{instruction}\n\nSolution:" if instruction else problem


def chat_prompt(problem: str, instruction: str | None = BOXED_INSTRUCTION) -> list[dict[str, str]]:
    """Return one user message, for a model with a chat template; the bare problem without an instruction."""
    return [{"role": "user", "content": f"{problem}\n\n{instruction}" if instruction else problem}]


def tokenize(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, /, **chat_template_kwargs: Any
) -> list[list[int]]:
    """Return the token ids of prompts, all texts or all conversations, as TRL's trainer makes them."""
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    encoded = tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, return_dict=True, **chat_template_kwargs
    )
    return encoded["input_ids"]
