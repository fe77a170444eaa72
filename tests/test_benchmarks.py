"""Benchmarks and training problems in one schema, from rows made for the purpose and from the real ones."""

import re

import datasets
import pytest

from dc_trl.data.sources import (
    FEATURES,
    MINERVA_RELATIVE_TOLERANCE,
    holds_several,
    load_benchmark,
    load_dapo,
    parse_benchmark,
)
from dc_trl.grading import is_gradable

from .helpers import ROOT, read_rows, refuses, write_rows
from .test_data import SHARED_DATA, requires_shared_data


FILES = {
    "aime24": "aime24.jsonl",
    "amc23": "amc23.jsonl",
    "math500": "math500.jsonl",
    "minerva": "minerva_math.jsonl",
    "olympiadbench": "olympiadbench_sample40.jsonl",
    "gsm8k": "gsm8k_test.jsonl",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        write_rows(path, rows)
        return str(path)

    return write


# Rows of the Hub and of the usual local files, and what of a problem each has to become.
ROWS = [tuple(each.values()) for each in read_rows(ROOT / "tests" / "benchmark_rows.jsonl")]


@pytest.mark.parametrize(("name", "row", "expected"), ROWS)
def test_rows_of_every_benchmark(write, name, row, expected):
    benchmark = load_benchmark(name, write(row))
    assert benchmark.features == FEATURES
    assert benchmark[0] | expected == benchmark[0]


def test_what_cannot_be_loaded_is_said(write, tmp_path):
    with refuses(ValueError, "benchmark='aime'", "'aime24'"):
        load_benchmark("aime")
    own = write({"problem": "1+1=?", "answer": "2"})
    with refuses(ValueError, f"benchmarks='arithmetic={own}'", "leave"):
        load_benchmark("arithmetic", own)
    with refuses(ValueError, f"benchmarks='arithmetic={own}'", "leave"):
        parse_benchmark(f"arithmetic={own}")
    with refuses(ValueError, "benchmark 'amc23'", "file='", "none.jsonl'"):
        load_benchmark("amc23", str(tmp_path / "none.jsonl"))
    with refuses(ValueError, "benchmark 'amc23'", "'question', 'problem'", "has q"):
        load_benchmark("amc23", write({"q": "Q?", "answer": 1}))
    with refuses(ValueError, "benchmark 'minerva'", "minerva/0", "gold answer"):
        load_benchmark("minerva", write({"question": "Q?", "solution": "none"}))


def test_several_answers_are_told_from_tuples_and_thousands():
    for answer in ("3, 5, 7", "(1,2), (3,4)", r"\frac{1}{2},\{3\}"):
        assert holds_several(answer)
    for answer in ("58,500", r"10,\!080", r"x \in [-2,7]", r"\{1\pm\sqrt{5},-2\}", r"\left( 3, \frac{\pi}{2} \right)"):
        assert not holds_several(answer)


TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)


def dapo_row(problem, answer, index):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": problem, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_repeated_rows_of_dapo_are_collapsed(write):
    row = dapo_row(TEMPLATE.replace("{}", "1+1?"), "2", "a-1")
    rows = load_dapo(write(*[row] * 100, dapo_row("2+2?", "4", "b-2"), dapo_row("2+2?", "5", "b-2"), row))
    assert rows["problem"] == ["1+1?", "2+2?", "2+2?"]
    assert rows["answer"] == ["2", "4", "5"]
    assert len(set(rows["id"])) == 3


@requires_shared_data
@pytest.mark.parametrize(
    ("name", "size", "several"),
    [("aime24", 30, 0), ("amc23", 40, 0), ("math500", 500, 3), ("minerva", 272, 1), ("olympiadbench", 40, 8),
     ("gsm8k", 1319, 0)],
)  # fmt: skip
def test_real_benchmarks(name, size, several):
    benchmark = load_benchmark(name, str(SHARED_DATA / FILES[name]))
    assert len(benchmark) == len(set(benchmark["id"])) == size
    assert sum(benchmark["multiple_answers"]) == several
    if name == "aime24":
        assert all(re.fullmatch(r"\d{3}", answer) for answer in benchmark["answer"])
    if name in ("amc23", "gsm8k"):
        assert all(re.fullmatch(r"-?(0|[1-9]\d*)", answer) for answer in benchmark["answer"])


@requires_shared_data
def test_real_minerva_golds():
    benchmark = load_benchmark("minerva", str(SHARED_DATA / FILES["minerva"]))
    scientific = [row for row in benchmark if re.fullmatch(r"-?[\d.]+e[+-]?\d+", row["answer"])]
    assert len(scientific) == 58
    assert all(row["relative_tolerance"] == MINERVA_RELATIVE_TOLERANCE for row in scientific)
    symbolic = [row["answer"] for row in benchmark if row["relative_tolerance"] == 0]
    assert all(re.search(r"[A-Za-z]", answer) for answer in symbolic)
    solutions = [row["solution"] for row in read_rows(SHARED_DATA / FILES["minerva"])]
    rewritten = [row["id"] for row, text in zip(benchmark, solutions, strict=True) if row["answer"] not in text]
    assert rewritten == ["minerva/5", "minerva/38", "minerva/49"]
    assert all(is_gradable(row["answer"]) for row in benchmark if row["id"] in rewritten)
