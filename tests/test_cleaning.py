"""Cleaning and decontamination, against brute force, and the script that runs them."""

import re
from collections import Counter

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dc_trl.command import call
from dc_trl.data.cleaning import clean, count_reasons, find_overlaps, problem_key, words
from dc_trl.data.prompts import load_prompts, load_rows
from dc_trl.data.sources import FEATURES, MathProblem, load_benchmark, load_dapo, to_dataset

from .helpers import as_words, read_json, refuses, write_rows
from .test_benchmarks import FILES, TEMPLATE, dapo_row
from .test_data import SHARED_DATA, requires_shared_data


def benchmark(*problems, name="bench"):
    return to_dataset(name, [MathProblem(problem, "1") for problem in problems])


def windows(text, size):
    sequence = re.sub(r"[^a-z0-9]+", " ", text.lower()).split()
    return [tuple(sequence[start : start + size]) for start in range(len(sequence) - size + 1)]


SENTENCES = st.lists(st.sampled_from(["a", "b", "c", "D"]), min_size=1, max_size=9).map(" ".join)


@settings(deadline=None)  # other work shares the machine
@given(st.lists(SENTENCES, min_size=1, max_size=6), st.lists(SENTENCES, min_size=1, max_size=3), st.integers(1, 3))
def test_overlaps_as_by_brute_force(problems, bench, common):
    """Every window of four words against every other; shorter problems are found by exact overlap only."""
    found = find_overlaps(problems, {"bench": benchmark(*bench)}, ngram=4, common=common)
    distinct = {problem.lower().replace(" ", ""): problem for problem in reversed(problems)}.values()
    for problem, overlap in zip(problems, found, strict=True):
        exact = [f"bench/{number}" for number, other in enumerate(bench) if squash(other) == squash(problem)]
        if exact:
            assert overlap == ("exact", " ".join(exact))
            continue
        telling = [
            window for window in windows(problem, 4) if sum(window in windows(text, 4) for text in distinct) <= common
        ]
        shared = {f"bench/{n}" for n, other in enumerate(bench) if set(windows(other, 4)) & set(telling)}
        assert (set() if overlap is None else set(overlap[1].partition(":")[0].split())) == shared


def squash(text):
    return re.sub(r"[\W_]+", "", text.lower())


LONG = "A train leaves the old harbour at noon and travels due north for seventeen hours without any stop at all"


def test_thirteen_words_are_an_overlap_and_twelve_are_not():
    sequence = LONG.split()
    twelve, thirteen = " ".join(sequence[:12]), " ".join(sequence[:13])
    bench = {"bench": benchmark(LONG)}
    assert find_overlaps([f"Once, {twelve}, then?"], bench) == [None]
    overlap = ("n-gram", f"bench/0: {thirteen.lower()}")
    assert find_overlaps([f"Once, {thirteen.upper()}, then?"], bench) == [overlap]
    assert find_overlaps([LONG.replace(" ", "  ") + "."], bench) == [("exact", "bench/0")]


def test_a_short_benchmark_problem_is_found_inside_a_longer_one():
    bench = {"bench": benchmark("Compute $\\sin 75^\\circ$.", "Find $x$.")}
    problem = "Compute $\\sin 75^\\circ$. Give it as $a+b$, and find $x$."
    assert find_overlaps([problem], bench) == [("n-gram", "bench/0: compute sin 75 circ")]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Find $x$, if  $x + 1 = 2$.", r"find \(x\) if \(x+1=2\)", True),
        ("$m+n$", "$m-n$", False),
        ("$x = 1.5$", "$x = 15$", False),
        ("the digits 1, 2", "the digits 12", False),
        ("1,000 apples", "1 000 apples", True),
        ("$−3$", "$-3$", True),
        ("$a~b$", "$a b$", True),
    ],
)
def test_what_tells_two_problems_apart(first, second, same):
    assert (problem_key(first) == problem_key(second)) is same


ROWS = [
    ("Add 1 and 1.", "2"),
    ("add  1 and 1", "2"),  # duplicate
    ("Add 1 and 1.", "2"),  # duplicate
    ("Add 2 and 2.", "4"),  # conflicting answers, three rows
    ("add 2 and 2?", "4"),
    ("Add 2 and 2.", "5"),
    ("Halve\r\none.", "0.5"),
    ("Halve \x0crac{1}{2}.", "1"),  # control characters
    ("Name it.", "no idea"),  # cannot be parsed
    ("Name it too.", ""),
    ("  ", "1"),  # no problem
    ("BENCH: what is 6 times 7", "42"),  # benchmark, exact
    (f"Well, {LONG}, or so?", "17"),  # benchmark, n-gram
]


@pytest.fixture
def rows():
    return to_dataset("made", [MathProblem(problem, answer) for problem, answer in ROWS])


@pytest.fixture
def benches():
    return {"one": benchmark("Bench? What is $6$ times $7$", name="one"), "two": benchmark(LONG, name="two")}


def test_every_rule(rows, benches):
    kept, dropped = clean(rows, benches)
    assert kept.features == FEATURES
    assert list(zip(kept["id"], kept["problem"], kept["answer"], strict=True)) == [
        ("made/0", "Add 1 and 1.", "2"),
        ("made/6", "Halve\none.", "0.5"),
    ]
    assert {row["id"]: (row["reason"], row["detail"]) for row in dropped} == {
        "made/1": ("duplicate", "made/0"),
        "made/2": ("duplicate", "made/0"),
        "made/3": ("conflicting answers", "4 | 5"),
        "made/4": ("conflicting answers", "4 | 5"),
        "made/5": ("conflicting answers", "4 | 5"),
        "made/7": ("control characters", ""),
        "made/8": ("gold answer cannot be parsed", "no idea"),
        "made/9": ("gold answer cannot be parsed", ""),
        "made/10": ("no problem", ""),
        "made/11": ("benchmark, exact", "one/0"),
        "made/12": ("benchmark, n-gram", f"two/0: {' '.join(words(LONG)[:13])}"),
    }
    assert sum(count_reasons(dropped).values()) == len(ROWS) - len(kept)


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """Runs dc-trl prepare-data in this process on made rows; returns its output directory and what it printed."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file, amc = tmp_path / "dapo.jsonl", tmp_path / "amc.jsonl"
    rows = [dapo_row(TEMPLATE.replace("{}", problem), answer, str(n)) for n, (problem, answer) in enumerate(ROWS)]
    write_rows(file, [*rows, *rows])
    write_rows(amc, [{"question": "Bench? What is $6$ times $7$", "answer": 42.0}])

    def run(*options, output="out"):
        command = as_words({"file": file, "output": tmp_path / output, "benchmarks": f"amc23={amc}"})
        call("prepare-data", [*command, *map(str, options)])
        return tmp_path / output, capsys.readouterr().out

    return run


def test_the_script_writes_what_training_reads(prepare, tokenizer):
    output, printed = prepare()
    assert sorted(path.name for path in output.iterdir()) == ["report.json", "train.parquet"]
    assert "benchmark, exact" in printed
    report = read_json(output / "report.json")
    assert report["rows"] == len(set(ROWS)) == report["kept"] + len(report["dropped"])
    assert Counter(row["reason"] for row in report["dropped"]) == {r: n for r, n in report["counts"].items() if n}
    assert report["counts"]["benchmark, exact"] == 1
    assert report["sources"]["amc23"].endswith("amc.jsonl")
    rows = load_rows(str(output / "train.parquet"))
    assert len(rows) == report["kept"]
    assert rows.features == FEATURES
    prompts, counts = load_prompts(rows, tokenizer, "problem", instruction="Box it.")
    assert counts["kept"] == counts["rows"] == report["kept"]
    assert {"multiple_answers", "unit", "relative_tolerance", "absolute_tolerance"} < set(prompts.column_names)


def test_the_script_says_why_no_row_is_left(prepare, tmp_path):
    """The messages are a system prompt and a question; of a system prompt alone each row would be a conflict."""
    rows = [dapo_row(question, "as you like", str(number)) for number, question in enumerate(("Why?", "How?"))]
    for row in rows:
        row["prompt"].insert(0, {"role": "system", "content": "You are helpful."})
    write_rows(tmp_path / "prose.jsonl", rows)
    with refuses(SystemExit, f"error: output='{tmp_path / 'out'}'", "report.json"):
        prepare("--file", tmp_path / "prose.jsonl")
    report = read_json(tmp_path / "out" / "report.json")
    assert report["counts"]["gold answer cannot be parsed"] == 2


def test_the_script_reads_other_columns(prepare, tmp_path):
    """GSM8K's rows, chat messages with nested answers, and rows that say how an answer is graded."""
    rows = [{"question": f"How many is {n} and {n}?", "solution": f"{n}+{n}\n#### {1000 * n:,}"} for n in (1, 2)]
    chat = [
        {"messages": [{"role": "user", "content": "Halve one."}], "gold": {"value": 0.5}, "absolute_tolerance": 0.1}
    ]
    for number, (made, prompt, answer, expected) in enumerate(
        (
            (rows, "question", "solution", [(r["question"], f"{n},000", 0.0) for n, r in enumerate(rows, start=1)]),
            (chat, "messages", "gold.value", [("Halve one.", "0.5", 0.1)]),
            ([{"question": "1+1?", "answer": 2}], "question", None, [("1+1?", "2", 0.0)]),
        )
    ):
        file = tmp_path / f"mine{number}.jsonl"
        write_rows(file, made)
        options = ["--prompt_column", prompt] + ([] if answer is None else ["--answer_column", answer])
        output, _ = prepare("--file", file, *options, output=f"out{number}")
        kept = load_rows(str(output / "train.parquet"))
        assert kept.features == FEATURES
        assert [(row["problem"], row["answer"], row["absolute_tolerance"]) for row in kept] == expected
    with refuses(SystemExit, "error: ", "answer_column='gold'", "'question', 'answer'"):
        prepare("--file", file, "--prompt_column", "question", "--answer_column", "gold")
    with refuses(SystemExit, "error: ", "prompt_column='prompt'"):
        prepare("--file", file, "--answer_column", "answer")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        rows = load_dapo(str(SHARED_DATA / "dapo_math_17k.jsonl"))
        benches = {name: load_benchmark(name, str(SHARED_DATA / file)) for name, file in FILES.items()}
        return rows, benches, *clean(rows, benches)


@pytest.mark.long
@requires_shared_data
def test_real_overlaps_come_out(real):
    rows, benches, kept, _ = real
    left = {squash(problem) for problem in kept["problem"]}
    before = {squash(problem) for problem in rows["problem"]}
    found = {}
    for name, rows in benches.items():
        problems = {squash(problem) for problem in rows["problem"]}
        found[name] = len(problems & before)
        assert not problems & left
    assert found == {"amc23": 8, "math500": 7, "olympiadbench": 3, "aime24": 0, "minerva": 0, "gsm8k": 0}


@requires_shared_data
def test_real_rows_are_clean(real):
    rows, _, kept, dropped = real
    assert len(rows) == 17267 == len(kept) + len(dropped)
    assert len(set(kept["problem"])) == len(kept) == len(set(kept["id"]))
    text = "".join(kept["problem"])
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    answers = {}
    for row in rows:
        answers.setdefault(row["problem"], set()).add(row["answer"])
    conflicting = {problem for problem, golds in answers.items() if len(golds) > 1}
    assert len(conflicting) == 12
    assert not conflicting & set(kept["problem"])
