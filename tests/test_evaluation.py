"""Evaluations by the replica and by a real vLLM server: what they sample, keep, continue and conclude."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch

from dc_trl.command import call
from dc_trl.data.sources import MathProblem, to_dataset
from dc_trl.evaluation import RESULTS_FILE, Benchmark, evaluate, tokenize_prompts
from dc_trl.evaluation.opened import EvaluatedModel, fingerprint
from dc_trl.evaluation.results import Evaluation, benchmark_result, compare, comparison_table, evaluation_table
from dc_trl.evaluation.samples import Sample
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.records.estimators import macro_estimate, mean_estimate
from dc_trl.sampling.engine_names import Sampling
from dc_trl.sampling.replica import Replica, end_tokens
from dc_trl.sampling.seeded import ReplicaEngine, Request, ServerEngine, sample_seed
from dc_trl.serving.client import ServerClient

from .helpers import ROOT, TINY_MODEL, make_model, make_tokenizer, read_json, read_rows, refuses, tiny_model
from .vllm_server import requires_vllm


SHORT = Sampling(max_tokens=48, temperature=0.7)
MODEL = "dc_trl/assets/tiny_qwen3"


@pytest.fixture(scope="module")
def replica():
    return Replica(tiny_model(), "fp8")


def run(engine, output, benchmarks, **options):
    options = {"sampling": SHORT, "grading_processes": 1, "progress": False} | options
    return evaluate(MODEL, "fp8", engine, make_tokenizer(), benchmarks, output, **options)


def stored(folder):
    """All rows of the sample file in a folder, by problem and number of the sample."""
    rows = read_rows(folder / "samples.jsonl")
    keys = Counter((row["id"], row["sample"]) for row in rows)
    assert set(keys.values()) == {1}
    return {(row["id"], row["sample"]): row for row in rows}


# --- engines --------------------------------------------------------------------------------------------------------


def test_a_completion_depends_on_its_seed_and_not_on_its_batch(replica, tokenizer):
    benchmark = Benchmark.load("arithmetic", limit=6)
    prompts = list(tokenize_prompts(benchmark, tokenizer, {}).values())
    requests_ = [Request(ids, seed) for ids in prompts for seed in (1, 2)]
    batches = [
        dict(ReplicaEngine(replica, tokenizer, batch_size).sample(requests_, SHORT)) for batch_size in (12, 5, 1)
    ]
    # Batches of another size round differently in bfloat16, which may rarely tip a choice.
    same = [batches[0][position] == other[position] for other in batches[1:] for position in range(12)]
    assert sum(same) >= 20
    texts = [batches[0][position].text for position in range(12)]
    assert any(texts[position] != texts[position + 1] for position in range(0, 12, 2))


def test_the_replica_samples_from_its_distribution(tokenizer):
    replica = Replica(make_model(), "bf16")
    prompt = tokenizer("1+1=")["input_ids"]
    sampling = Sampling(max_tokens=1, temperature=0.5, top_p=0.9)
    engine = ReplicaEngine(replica, tokenizer, 500)
    noisy = [Request(prompt, seed) for seed in range(4000)]
    counts = Counter(completion.text for _, completion in engine.sample(noisy, sampling))
    with torch.no_grad():
        logits = replica.model(torch.tensor([prompt])).logits[0, -1].float() / 0.5
    probabilities, tokens = logits.softmax(-1).sort(descending=True)
    kept = int((probabilities.cumsum(0) < 0.9).sum()) + 1
    wanted = Counter()
    shares = 4000 * probabilities[:kept] / probabilities[:kept].sum()
    for token, share in zip(tokens[:kept].tolist(), shares.tolist(), strict=True):
        wanted[tokenizer.decode([token], skip_special_tokens=True)] += share
    assert set(counts) <= set(wanted)
    # Chi-squared, with the rare texts as one: its mean is the degrees of freedom, its variance twice that.
    cells = [(counts[text], share) for text, share in wanted.items() if share >= 5]
    rest = [4000 - sum(each) for each in zip(*cells, strict=True)]
    cells += [rest] if rest[1] > 1e-6 else []
    freedom = len(cells) - 1
    assert sum((seen - share) ** 2 / share for seen, share in cells) < freedom + 5 * (2 * freedom) ** 0.5


def test_every_end_token_of_the_model_ends_a_completion(tokenizer):
    """Llama-3 has several, of which the tokenizer knows one."""
    policy, ends = make_model(), [1, *range(40, 120)]
    policy.generation_config.eos_token_id = ends
    prompt = tokenizer("1+1=")["input_ids"]
    engine = ReplicaEngine(Replica(policy, "bf16"), tokenizer)
    sampling = Sampling(max_tokens=30, temperature=1.0)
    completions = dict(engine.sample([Request(prompt, seed) for seed in range(64)], sampling)).values()
    ended = [completion for completion in completions if not completion.truncated]
    assert len(ended) > 32
    assert {completion.tokens for completion in completions if completion.truncated} <= {30}
    # The end token is counted and, though it is an ordinary one here, not shown: as by vLLM.
    shown = [tokenizer(completion.text)["input_ids"] for completion in completions]
    assert not any(set(ids) & set(ends) for ids in shown)
    assert end_tokens(policy, tokenizer) == ends


@requires_vllm
def test_the_server_gives_what_an_openai_client_gets(fp8_server, tokenizer):
    prompts = list(tokenize_prompts(Benchmark.load("arithmetic", limit=8), tokenizer, {}).values())
    engine = ServerEngine(fp8_server.url, concurrency=3)
    assert engine.max_length == 256
    greedy = dict(engine.sample([Request(ids, 0) for ids in prompts], Sampling(48, 0.0)))
    assert sorted(greedy) == list(range(8))
    for position, ids in enumerate(prompts):
        request = {"model": engine.model, "prompt": ids, "max_tokens": 48, "temperature": 0}
        answer = httpx.post(f"{fp8_server.url}/v1/completions", json=request, timeout=60).json()
        assert greedy[position].text == answer["choices"][0]["text"]
        assert greedy[position].tokens == answer["usage"]["completion_tokens"]
    (cut,) = dict(engine.sample([Request(prompts[0], 0)], Sampling(5, 0.0))).values()
    assert (cut.tokens, cut.truncated) == (5, True)


# --- evaluations ----------------------------------------------------------------------------------------------------


def test_an_evaluation_against_rewards_counted_by_hand(replica, tokenizer, tmp_path):
    benchmark = Benchmark.load("arithmetic", samples=3, limit=40)
    evaluation = run(ReplicaEngine(replica, tokenizer), tmp_path, [benchmark])
    result = evaluation.results["arithmetic"]
    rows = stored(tmp_path / "arithmetic")
    assert len(rows) == 120
    assert all(row["seed"] == sample_seed(0, *key) for key, row in rows.items())
    assert len({row["seed"] for row in rows.values()}) == 120
    answers = dict(zip(benchmark.rows["id"], benchmark.rows["answer"], strict=True))
    right = {key: arithmetic_reward([row["completion"]], [answers[key[0]]])[0] for key, row in rows.items()}
    means = {problem: sum(right[problem, number] for number in range(3)) / 3 for problem in answers}
    assert result.per_problem == pytest.approx(means)
    assert result.avg == mean_estimate(list(result.per_problem.values()))
    assert 0.1 < result.avg.value < 0.9
    assert result.pass_at[3].value == sum(mean > 0 for mean in means.values()) / 40
    assert sorted(result.pass_at) == [1, 2, 3]
    assert result.mean_tokens == sum(row["tokens"] for row in rows.values()) / 120
    assert evaluation.average == result.avg
    assert Evaluation.load(tmp_path / RESULTS_FILE) == evaluation
    # Why grading failed is stored with a sample, and counted again when nothing is left to sample.
    assert evaluation.grading_failures == {}
    path = tmp_path / "arithmetic" / "samples.jsonl"
    path.write_text(path.read_text().replace('"failure": null', '"failure": "time"', 2))
    again = run(ReplicaEngine(replica, tokenizer), tmp_path, [benchmark])
    assert again.grading_failures == {"time": 2}
    assert not (tmp_path / "results.1.json").exists()
    results = tmp_path / RESULTS_FILE
    of_another = results.read_text().replace('"arithmetic": {', '"other": {')
    results.write_text(of_another)
    assert run(ReplicaEngine(replica, tokenizer), tmp_path, [benchmark]) == Evaluation.load(results) == again
    assert (tmp_path / "results.1.json").read_text() == of_another


def test_samples_of_another_evaluation_are_refused(replica, tokenizer, tmp_path):
    engine = ReplicaEngine(replica, tokenizer)
    two, three = ([Benchmark.load("arithmetic", samples=1, limit=limit)] for limit in (2, 3))
    run(engine, tmp_path, two)
    for problems, change, words in (
        (two, {"sampling": Sampling(48, 1.0)}, ["temperature=1.0", "temperature=0.7"]),
        (two, {"settings": {"weights": "others"}}, ["weights='others'", "weights=None"]),
        (three, {}, ["problems="]),
    ):
        with refuses(ValueError, *words, "output"):
            run(engine, tmp_path, problems, **change)


def test_problems_of_another_file_are_not_compared(replica, tokenizer, tmp_path):
    """Their ids are the same: the benchmark's name and the row's number."""
    evaluations = []
    for number in (2, 2, 3):
        benchmark = Benchmark("amc23", to_dataset("amc23", [MathProblem(f"{number}+{number}=?", f"{2 * number}")]), 1)
        folder = tmp_path / str(len(evaluations))
        evaluations.append(run(ReplicaEngine(replica, tokenizer), folder, [benchmark], sampling=Sampling(4)))
    assert compare(*evaluations[:2])["amc23"].problems == 1
    with refuses(ValueError, "'amc23'", "the same"):
        compare(*evaluations[1:])


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    of_hub = tmp_path / "models--me--mine"
    (of_hub / "snapshots" / "abc123").mkdir(parents=True)
    (of_hub / "snapshots" / "abc123" / "config.json").write_text("{}")
    (of_hub / "refs").mkdir()
    (of_hub / "refs" / "main").write_text("abc123")
    assert fingerprint(EvaluatedModel("me/mine", "main", None, None)) == "abc123"
    assert fingerprint(EvaluatedModel("me/other", "main", None, None)) == "main"


def test_gold_answers_that_cannot_be_graded_count_nowhere():
    samples = {
        (problem, number): Sample(problem, number, 0, "", 10, False, answer, correct)
        for problem, verdicts in {
            "a": [("1", True), ("2", False), ("1", True)],
            "b": [(None, None), ("3", None), (None, None)],
            "c": [("5", False), ("6", False), (None, False)],
        }.items()
        for number, (answer, correct) in enumerate(verdicts)
    }
    result = benchmark_result("made", ["a", "b", "c"], 3, samples)
    assert result.ungraded == ["b"]
    assert result.per_problem == {"a": pytest.approx(2 / 3), "c": 0.0}
    assert result.maj.value == 0.5
    assert result.pass_at[2].value == pytest.approx(0.5)
    with refuses(ValueError, "benchmark 'made'", "rewards.md"):
        benchmark_result("made", ["b"], 3, samples)


# --- the script -----------------------------------------------------------------------------------------------------


OF_TINY = ["--model", MODEL, "--benchmarks", "arithmetic"]


@pytest.fixture
def script(monkeypatch, capsys):
    """Runs dc-trl evaluate in this process, from the project's root; returns what it printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "160")

    def run_script(*words):
        call("evaluate", list(map(str, words)))
        return capsys.readouterr().out

    return run_script


@pytest.mark.long
def test_a_killed_evaluation_is_continued(tmp_path, script):
    command = [*OF_TINY, "--engine", "replica:bf16", "--samples", "4", "--limit", "25", "--max_tokens", "48"]
    command += ["--concurrency", "4", "--output"]
    folders = [tmp_path / name / "bf16" for name in ("whole", "parts")]
    assert "arithmetic avg@4" in script(*command, tmp_path / "whole")
    words = [sys.executable, "-m", "dc_trl", "evaluate", *command, tmp_path / "parts"]
    with open(tmp_path / "log", "w") as log, subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log) as process:
        while not list(folders[1].glob("arithmetic/samples.jsonl")):
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.02)
        process.kill()
    kept = stored(folders[1] / "arithmetic")
    assert 0 < len(kept) < 100
    script(*command, tmp_path / "parts")
    whole, rows = (stored(folder / "arithmetic") for folder in folders)
    assert len(rows) == 100
    assert {key: rows[key] for key in kept} == kept
    # The same seeds: batches of other sequences round differently in bfloat16, which tips a choice now and then.
    assert sum(row["completion"] == rows[key]["completion"] for key, row in whole.items()) > 85
    compared = script("--compare", *folders)
    assert "arithmetic" in compared
    assert not {"better", "worse"} & {*compared.split()}


@requires_vllm
def test_samples_of_a_server_are_known_by_what_it_discloses(fp8_server, tmp_path, script):
    client = ServerClient(fp8_server.url)
    options = ["--engine", fp8_server.url, "--scheme", "fp8", "--samples", "1", "--limit", "4", "--max_tokens", "8"]
    command = [*OF_TINY, *options, "--output", tmp_path]
    client.name_weights("run-7")
    assert "holds Disclosed(name=" in script(*command)
    before = stored(tmp_path / "fp8" / "arithmetic")
    assert len(before) == 4
    root = Path(httpx.get(f"{fp8_server.url}/v1/models", timeout=30).json()["data"][0]["root"])
    weights = read_json(tmp_path / "fp8" / RESULTS_FILE)["settings"]["weights"]
    assert weights == {
        "url": fp8_server.url,
        "files": fingerprint(EvaluatedModel(MODEL, "main", None, None)),
        "name": str(TINY_MODEL),
        "root": str(root),
        "weight_version": "run-7",
        "revision": None,
        "quantization": "compressed-tensors",
    }
    client.name_weights("run-8")
    with refuses(SystemExit, "error: weights=", "run-8", "run-7", "output"):
        script(*command, "--samples", "2")
    assert stored(tmp_path / "fp8" / "arithmetic") == before


@requires_vllm
def test_a_server_that_serves_something_else_is_refused(fp8_server, tmp_path, script):
    other = tmp_path / "other"
    shutil.copytree(TINY_MODEL, other)
    command = [*OF_TINY, "--engine", fp8_server.url, "--limit", "2", "--output", tmp_path / "out"]
    with refuses(SystemExit, f"error: model='{other}'", f"'{TINY_MODEL}'", "--model"):
        script(*command, "--scheme", "fp8", "--model", other)
    with refuses(SystemExit, "error: scheme='bf16'", "quantization='compressed-tensors'", "--scheme"):
        script(*command)


def test_the_script_by_the_replica_compares_two_schemes(tmp_path, script):
    options = ["--engine", "replica:bf16", "replica:int4", "--samples", "2", "--limit", "8"]
    output = script(*OF_TINY, *options, "--max_tokens", "48", "--output", tmp_path)
    assert "second is" in output
    for scheme in ("bf16", "int4"):
        cells = evaluation_table([Evaluation.load(tmp_path / scheme / RESULTS_FILE)])[1][0]
        assert cells[0] == f"replica:{scheme}"  # as the command line names it
        assert all(cell in output for cell in cells)
    assert "Avg." not in output  # of one benchmark
    assert "average" not in output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--benchmarks", "amc23=x.jsonl"], "benchmarks='x.jsonl'"),
        (["--engine", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_what_the_script_refuses(tmp_path, script, options, words):
    with refuses(SystemExit, "error: ", words):
        script(*OF_TINY, "--limit", "2", "--output", tmp_path / "out", *options)


# --- results --------------------------------------------------------------------------------------------------------


def made_evaluation(scheme, values):
    results = {}
    for name, means in values.items():
        samples = {
            (f"{name}/{row}", number): Sample(f"{name}/{row}", number, 0, "", 5, False, "1", number < 4 * mean)
            for row, mean in enumerate(means)
            for number in range(4)
        }
        results[name] = benchmark_result(name, [f"{name}/{row}" for row in range(len(means))], 4, samples)
    average = macro_estimate([list(result.per_problem.values()) for result in results.values()])
    return Evaluation("m|1", scheme, {}, results, average, {})


def test_two_evaluations_are_compared_on_their_common_benchmarks():
    first = made_evaluation("bf16", {"aime24": [0.25] * 30, "amc23": [0.5, 0.75], "gsm8k": [1.0, 0.0]})
    second = made_evaluation("fp8", {"amc23": [0.5, 0.5], "aime24": [0.25, 0.75] * 15})
    differences = compare(first, second)
    assert list(differences) == ["aime24", "amc23", "average"]
    assert differences["aime24"].value == pytest.approx(0.25)
    assert differences["aime24"].p_value < 0.001
    assert differences["amc23"].p_value > 0.05
    assert differences["average"].value == pytest.approx((0.25 - 0.125) / 2)
    rows = comparison_table(first, second)[1]
    assert [row[-1] for row in rows[:2]] == ["better", "not shown to differ"]
    assert rows[2][:3] == ["average", "43.8", "50.0"]  # (25 + 62.5) / 2 and (50 + 50) / 2, without gsm8k
    with refuses(ValueError, "benchmark in common"):
        compare(first, made_evaluation("fp8", {"math500": [1.0]}))
    with refuses(ValueError, "'amc23'", "the same"):
        compare(first, made_evaluation("fp8", {"amc23": [1.0, 1.0, 1.0]}))
