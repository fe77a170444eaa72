"""Problems made on the spot, prompts from files, and problems as text."""

import copy
import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from jinja2 import TemplateError

from dc_trl.command.problems import DataArguments, draw_prompts, load_data
from dc_trl.data.arithmetic import Problem, arithmetic_dataset, arithmetic_problems, is_held_out
from dc_trl.data.prompts import describe_counts, gold_answer, load_prompts, load_rows, tokenize, unread_text
from dc_trl.data.sources import MathProblem, to_dataset
from dc_trl.grading import GRADING_COLUMNS
from dc_trl.grading.rewards import arithmetic_reward

from .helpers import ROOT, refuses, write_rows


SHARED_DATA = ROOT.parent / "shared" / "data"
requires_shared_data = pytest.mark.skipif(
    not SHARED_DATA.is_dir(),
    reason=f"no real rows in {SHARED_DATA.parent.name}/{SHARED_DATA.name} beside the checkout",
)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_worked_step_is_right(split):
    for problem in arithmetic_problems(2000, 1, split):
        assert str(eval(problem.question.removesuffix("=?"))) == problem.answer
        *steps, box = problem.solution.split(";")
        assert box == f"\\boxed{{{problem.answer}}}"
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right)


def test_held_out_problems_are_never_trained_on():
    train = {problem.question for problem in arithmetic_problems(20000, 0, "train")}
    held_out = [problem.question for problem in arithmetic_problems(2000, 0, "held_out")]
    assert len(set(held_out)) == 2000
    assert not train & set(held_out)
    swapped = {"+".join(reversed(question.removesuffix("=?").split("+"))) + "=?" for question in held_out}
    assert not train & swapped
    assert all(map(is_held_out, held_out))


def test_arithmetic_depends_on_the_seed_alone():
    assert arithmetic_problems(50, 3, "train") == arithmetic_problems(50, 3, "train")
    assert arithmetic_problems(50, 3, "train") != arithmetic_problems(50, 4, "train")
    # Stable across versions and machines: the shipped model was made from these.
    assert arithmetic_problems(1, 0, "train")[0] == Problem("98*8=?", "784", r"8*8+0=64;9*8+6=78;\boxed{784}")
    rows = arithmetic_dataset(3, 0, "held_out")
    assert rows.column_names == ["prompt", "answer"]
    assert rows[0]["prompt"][0]["role"] == "user"


def test_gold_answers():
    given = {"He had 3.\n#### 1,234": "1,234", 27.0: "27", 0.5: "0.5", None: None, "####": None}
    assert {value: gold_answer(value) for value in given} == given
    assert (gold_answer(["4"]), gold_answer(["4", "5"]), gold_answer(True)) == ("4", None, None)
    scalars = [
        np.int64(4),
        np.float32(4),
        np.array([4]),
        torch.tensor(4),
        torch.tensor([4.0]),
        Decimal(4),
        Fraction(4),
    ]
    assert {gold_answer(scalar) for scalar in scalars} == {"4"}
    assert (gold_answer(Fraction(1, 2)), gold_answer(np.str_("4")), gold_answer(np.bool_(True))) == ("1/2", "4", None)
    assert arithmetic_reward([r"\boxed{4}"], torch.tensor([4])) == [1.0]


@pytest.fixture
def rows():
    return [
        {"q": "1+1?", "a": {"gold": "2"}},
        {"q": " ", "a": {"gold": "2"}},
        {"q": "?", "a": {"gold": "not known"}},
        {"q": "?", "a": {"gold": None}},
        {"q": "long " * 50, "a": {"gold": "3"}},
        {"q": "2+2?", "a": {"gold": "x #### 4"}},
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_files(tmp_path, suffix, tokenizer, rows, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / f"rows.{suffix}"
    flat = Dataset.from_list([{"q": row["q"], "gold": row["a"]["gold"]} for row in rows])
    getattr(flat, f"to_{suffix.removesuffix('l')}")(path)
    prompts, counts = load_prompts(load_rows(str(path)), tokenizer, "q", "gold", max_prompt_length=100)
    assert prompts["answer"] == ["2", "4"]
    assert prompts[0]["prompt"] == [{"role": "user", "content": "1+1?"}]
    assert counts["rows"] == 6
    assert counts["kept"] == 2


def test_nested_columns_instruction_and_counts(tokenizer, rows):
    prompts, counts = load_prompts(Dataset.from_list(rows), tokenizer, "q", "a.gold", "Box it.", 100)
    assert prompts[1]["prompt"][0]["content"] == "2+2?\n\nBox it."
    assert describe_counts(counts) == (
        "2 of 6 rows kept, left out: 1 without prompt; 2 without a gold answer that can be parsed; "
        "1 with a prompt of more than 100 tokens"
    )


def test_the_length_of_a_prompt_counts_what_the_template_adds_by_its_variables(tokenizer, tmp_path, monkeypatch):
    """With `enable_thinking` off, Qwen3's template writes an empty thought behind the prompt."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3.jinja").read_text()
    rows = [{"prompt": "1" * length, "answer": "5"} for length in range(1, 40)]
    data = DataArguments(dataset_name=write_rows(tmp_path / "rows.jsonl", rows), max_prompt_length=80)
    for variables in ({}, {"enable_thinking": False}):
        prompts = load_data(data, tokenizer, 0, 0, variables)[0]["prompt"][:]
        assert max(map(len, tokenize(prompts, tokenizer, **variables))) == 80
        assert sorted(draw_prompts(data, tokenizer, 99, 0, variables), key=str) == sorted(prompts, key=str)


def test_messages_reach_the_template_as_they_are(tokenizer, tmp_path):
    system, example = {"role": "system", "content": "Think."}, {"role": "assistant", "content": "2"}
    first, question = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "2+3?"}
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]
    result = {"role": "tool", "name": "add", "content": "5"}
    used = [question, {"role": "assistant", "content": None, "tool_calls": calls}, result]
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    rows = [[system, question], [system, first, example, question], [first, example], [first, question], used, parts]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": messages, "answer": "5"} for messages in rows])
    data = load_rows(str(tmp_path / "rows.jsonl"))
    assert load_prompts(data, tokenizer)[0]["prompt"][:] == [*rows[:2], *rows[3:]]
    prompts, counts = load_prompts(data, tokenizer, "prompt", "answer", "Box it.")
    boxed = {"role": "user", "content": "2+3?\n\nBox it."}
    assert prompts["prompt"][:2] == [[system, boxed], [system, first, example, boxed]]
    assert prompts["prompt"][2:4] == [[first, boxed], [boxed, *used[1:]]]
    assert prompts["prompt"][4][0]["content"] == [*parts[0]["content"], {"type": "text", "text": "\n\nBox it."}]
    assert counts == {"rows": 6, "kept": 5, "with the answer at the end of the prompt": 1}
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    with refuses(ValueError, "prompt_column='prompt'", "'system'", "column of texts"):
        load_prompts(data, plain, "prompt", "answer")


@pytest.mark.parametrize("template", sorted(Path(trl.__file__).with_name("chat_templates").glob("*.jinja")))
def test_what_a_template_leaves_out_or_prints_as_python_is_seen(tokenizer, template):
    """By what every template that TRL ships makes of it."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template, tokenizer.bos_token = template.read_text(), "<s>"
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    call = {"type": "function", "function": {"name": "weather_of", "arguments": {"city": "Rome"}}}
    asked = {"role": "user", "content": "What is 1+1?"}
    conversations = [
        ([asked | {"content": [{"type": "text", "text": asked["content"]}]}], [asked["content"]]),
        ([{"role": "developer", "content": "Be brief."}, asked], ["Be brief.", asked["content"]]),
        (
            [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "Rain"}],
            [asked["content"], "weather_of", "Rain"],
        ),
    ]
    for messages, texts in conversations:
        try:
            shown = render(messages)
        except (TemplateError, TypeError):
            continue
        reads = all(text in shown for text in texts) and not re.search("""['"]type['"]: ['"]text""", shown)
        assert (unread_text(messages, render) is None) == reads, shown


def test_what_grading_needs_is_carried_along(tokenizer):
    rows = to_dataset(
        "made", [MathProblem("Roots of $x^2=9$?", "3, -3", multiple_answers=True), MathProblem("?", "what it is")]
    )
    prompts, _ = load_prompts(rows, tokenizer, "problem")
    assert prompts.column_names[:2] == ["prompt", "answer"]
    assert {*GRADING_COLUMNS} < {*prompts.column_names}  # for rewards of one's own there are the others too
    assert prompts.features["unit"] == rows.features["unit"]
    assert prompts[0] == {
        "id": "made/0",
        "problem": "Roots of $x^2=9$?",
        "prompt": [{"role": "user", "content": "Roots of $x^2=9$?"}],
        "answer": "3, -3",
        "multiple_answers": True,
        "unit": None,
        "relative_tolerance": 0.0,
        "absolute_tolerance": 0.0,
    }


def test_missing_columns_are_named(tokenizer, rows):
    data = Dataset.from_list(rows)
    with refuses(ValueError, "prompt_column='prompt'", "'q', 'a'"):
        load_prompts(data, tokenizer)
    with refuses(ValueError, "answer_column='answer'", "'q', 'a'"):
        load_prompts(data, tokenizer, "q")
    with refuses(ValueError, "answer_column='a.silver'", "'gold'"):
        load_prompts(data, tokenizer, "q", "a.silver")
    with refuses(ValueError, "6 rows", "tokens"):
        load_prompts(data, tokenizer, "q", "a.gold", max_prompt_length=1)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "data file"),
        ("rows.txt", b"{}", "data file"),
        ("broken.jsonl", b"{not json", "loaded"),
        ("latin.jsonl", '{"prompt": "Zo\u00e9", "answer": "3"}\n'.encode("latin1"), "UTF-8"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refuses(ValueError, name, words):
        load_rows(str(tmp_path / name))


def test_a_file_whose_name_looks_like_a_pattern_is_read_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("rows1.jsonl", "rows[1].jsonl", "[a] b?.jsonl"):
        write_rows(tmp_path / name, [{"prompt": name}])
    for name in ("rows[1].jsonl", "[a] b?.jsonl"):
        assert load_rows(str(tmp_path / name))["prompt"][:] == [name]


def test_a_reward_of_ones_own_gets_answers_that_no_grader_reads(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"prompt": f"Name a {kind}.", "answer": kind} for kind in ("dog", "cat")])
    own = DataArguments(dataset_name=str(path), rewards=["my_rewards.names"])
    assert load_data(own, tokenizer, 0, 0)[0]["answer"][:] == ["dog", "cat"]
    for given in ([True, False], [3, 4], ["1 #### 7", ""], [["Paris", "paris"], []]):
        rows = [{"question": "?", "reply": {"of": each}, "prompts": 1, "completions": 2} for each in given]
        write_rows(path, rows)
        columns = {"prompt_column": "question", "answer_column": "reply.of"}
        found = load_data(replace(own, **columns), tokenizer, 0, 0)[0]
        assert found["answer"][:] == given
        assert not {"prompts", "completions"} & {*found.column_names}  # which are TRL's own arguments of a reward
    # A reward may read other columns, and no answer at all.
    write_rows(path, [{"prompt": "2+3?", "total": 5}])
    assert load_data(own, tokenizer, 0, 0)[0][0] == {
        "prompt": [{"role": "user", "content": "2+3?"}],
        "answer": None,
        "total": 5,
    }
    write_rows(path, [{"prompt": "?", "answer": kind} for kind in ("dog", "cat")])
    with refuses(ValueError, "2 without a gold answer"):
        load_data(replace(own, rewards=["my_rewards.names", "math"]), tokenizer, 0, 0)
    write_rows(path, [{"prompt": "2+3?", "answer": 5, "unit": 3}])  # a chapter
    with refuses(ValueError, "unit=3", "rename"):
        load_data(DataArguments(dataset_name=str(path)), tokenizer, 0, 0)
