"""The scripts as a user runs them: what they make, what they refuse, and what they never overwrite."""

import re
import shutil
import sys

import pytest
from transformers import AutoModelForCausalLM

from dc_trl.data.arithmetic import arithmetic_problems
from tests.helpers import ROOT, TINY_MODEL, load_script, read_json, read_rows, succeed, write_rows


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """Runs the script in this process, from the project's root, with the quickstart's configuration made small."""

    def run(**options):
        arguments = {
            "config": "configs/quickstart.yaml",
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "eval_size": 0,
            "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 16,
            "max_completion_length": 16,
            "disable_tqdm": "true",
            "save_strategy": "no",
        } | options
        command = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["train.py", *command])
        load_script("train").main()
        return tmp_path / "run"

    return run


def refusal(launch, capsys=None, **options):
    with pytest.raises(SystemExit) as stop:
        launch(**options)
    # As `sys.exit` says it, or argparse.
    message = capsys.readouterr().err if stop.value.code == 2 else stop.value.code
    assert message.startswith("error: ")
    return message


def test_a_run_is_never_overwritten_and_can_be_continued(launch):
    output = launch(save_strategy="steps", save_steps=2)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    message = refusal(launch, max_steps=4)
    assert "already holds a run" in message
    assert "--resume_from_checkpoint true" in message
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    launch(max_steps=4, save_strategy="steps", save_steps=2, resume_from_checkpoint="true")
    history = read_rows(output / "history.jsonl")
    assert [row["step"] for row in history if "loss" in row] == [1, 2, 3, 4]
    assert read_json(output / "summary.json")["steps"] == 4

    # Nothing is left to do: the history stays as it is.
    launch(max_steps=4, save_strategy="steps", save_steps=2, resume_from_checkpoint="true")
    again = read_rows(output / "history.jsonl")
    assert [row["step"] for row in again if "loss" in row] == [1, 2, 3, 4]


def test_real_text_with_local_files(launch, tmp_path, capsys):
    rows = [{"question": f"What is {n} plus {n}? Zoë says 你好.", "answer": f"Add.\n#### {2 * n}"} for n in range(40)]
    rows += [{"question": "What?", "answer": "#### nobody knows"}, {"question": "", "answer": "#### 3"}]
    output = launch(
        dataset_name=write_rows(tmp_path / "rows.jsonl", rows),
        prompt_column="question",
        answer_column="answer",
        instruction="Put the answer in \\boxed{}.",
        rewards="math",
        eval_size=8,
    )
    printed = capsys.readouterr().out
    assert all(
        words in printed for words in ("40 of 42 rows", "1 without a gold answer", "1 without prompt", "8 held out")
    )
    history = read_rows(output / "history.jsonl")
    trained = [row for row in history if "discrepancy/mean" in row]
    assert len(trained) == 2
    assert all(value is not None for row in trained for name, value in row.items() if name.startswith("discrepancy/"))


def test_your_own_reward_and_a_vanilla_run(launch, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def short(completions, **kwargs):\n    return [0.5] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    output = launch(rewards="my_rewards.short", constraint="none", deployment_scheme="int8")
    history = read_rows(output / "history.jsonl")
    assert history[0]["reward"] == 0.5
    assert "lagrangian/lambda" not in history[0]
    assert "discrepancy/mean" in history[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_name_or_path": "nobody/nothing-at-all"}, ["nobody/nothing-at-all"]),
        ({"rewards": "nonsense"}, ["rewards='nonsense'", "'math'"]),
        ({"eval_size": 99999}, ["size=99999", "at most"]),
        ({"serve": "http://127.0.0.1:8000"}, ["serve='http://127.0.0.1:8000'", "'auto'"]),
        ({"serve": "auto"}, ["serve='auto'", "use_vllm=False", "use_vllm=true"]),
        ({"serve_devices": "1"}, ["serve_devices='1'", "serve='auto'"]),
        (
            {
                "serve": "auto",
                "use_vllm": "true",
                "vllm_mode": "server",
                "vllm_server_base_url": "http://127.0.0.1:8000",
            },
            ["'http://127.0.0.1:8000'", "serve='auto'"],
        ),
        (
            {"serve": "auto", "use_vllm": "true", "vllm_mode": "server", "vllm_max_model_length": -5},
            ["vllm_max_model_length=-5 is invalid"],
        ),
        ({"use_peft": "true", "lora_r": 0}, ["lora_r=0"]),
        ({"config": "dc_trl/assets/tiny_qwen3/model.safetensors"}, ["model.safetensors is not a text"]),
    ],
)
def test_refused_before_training(launch, tmp_path, capsys, options, words):
    message = refusal(launch, capsys, **options)
    for word in words:
        assert word in message
    assert not list((tmp_path / "run").glob("*")), "a refused run leaves nothing that looks like one"


def test_a_tokenizer_without_chat_template_trains_on_plain_prompts(launch, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model)
    (model / "chat_template.jinja").unlink()
    output = launch(model_name_or_path=str(model), eval_size=8, max_steps=1)
    summary = read_json(output / "summary.json")
    assert summary["steps"] == 1
    assert "greedy" in summary["after"]


def test_the_shipped_model_is_as_good_as_its_card_says(tokenizer):
    script = load_script("make_tiny_model")
    card = (TINY_MODEL / "README.md").read_text()
    stated = float(re.search(r"greedy \| ([\d.]+)%", card)[1]) / 100
    assert 0.35 <= stated <= 0.45
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    problems = arithmetic_problems(1000, 0, "held_out")
    greedy, _ = script.accuracy(model, tokenizer, problems, script.TASKS["arithmetic"])
    assert greedy == pytest.approx(stated, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("what", ["overhead", "time", "replica", "grading"])
def test_the_benchmark_compares_what_it_says(what, monkeypatch, capsys):
    script = load_script("benchmark")
    arguments = ["--repetitions", "2", "--batch_size", "8", "--completion_length", "4", "--threads", "1"]
    arguments += ["--completions", "100"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", what, *arguments])
    script.main()
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.search(r"\d\.\d+%? – -?\d", line)]
    expected = {"overhead": 4 + len(script.METHODS), "time": 17, "replica": 1 + len(script.SCHEMES), "grading": 1}
    assert len(rows) == expected[what]  # of `time` 8 parts on each route, and the old log-probs of one


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_installation_replaces_a_pytorch_that_cannot_use_the_gpu(tmp_path, has_gpu):
    """By an interpreter that says what it has and writes down what it is told, on a machine with the driver's tool."""
    path, log = tmp_path / "bin", tmp_path / "log"
    python = tmp_path / "venv" / "bin" / "python"
    for file, lines in {
        python: f"""[ "$1" = -c ] || echo "$@" >> {log}; [ "$1" != -c ] || echo '["2.99.0+cpu", null]'""",
        path / "nvidia-smi": "",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{lines}\n")
        file.chmod(0o755 if has_gpu or file == python else 0o644)
    succeed([sys.executable, "scripts/install.py", "--venv", python.parent.parent], env={"PATH": str(path)})
    asked = [line.split()[-1] for line in log.read_text().splitlines()]
    assert [word.partition("===")[0] for word in asked if word.startswith("torch")] == ["torch"] * has_gpu
    assert asked[-1].endswith("[dev]")
