"""The scripts as a user runs them: what they make, what they refuse, and what they never overwrite."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dc_trl.data.arithmetic import arithmetic_problems
from dc_trl.settings.pretrained import load_config_and_tokenizer

from .helpers import ROOT, TINY_MODEL, load_script
from .vllm_server import requires_vllm


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


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_readme_command_in_a_process_of_its_own(tmp_path):
    command = [os.path.join(os.path.dirname(sys.executable), "accelerate"), "launch", "scripts/train.py"]
    command += ["--config", "configs/quickstart.yaml", "--output_dir", str(tmp_path), "--max_steps", "3"]
    command += ["--eval_size", "64", "--per_device_train_batch_size", "32", "--report_to", "tensorboard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    for words in ("greedy reward", "before", "after", "discrepancy δ̄", "multiplier λ", "tokens", "seconds"):
        assert words in done.stdout
    assert "reward=" in done.stderr
    assert "δ̄=" in done.stderr
    assert "λ=" in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0.2 < summary["before"]["greedy"] < 0.65  # the shipped model
    assert summary["steps"] == 3
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(tmp_path.rglob("events.out.tfevents*"))


def test_a_run_is_never_overwritten_and_can_be_continued(launch):
    output = launch(save_strategy="steps", save_steps=2)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    message = refusal(launch, max_steps=4)
    assert "already holds a run" in message
    assert "--resume_from_checkpoint true" in message
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    launch(max_steps=4, save_strategy="steps", save_steps=2, resume_from_checkpoint="true")
    history = [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history if "loss" in row] == [1, 2, 3, 4]
    assert json.loads((output / "summary.json").read_text())["steps"] == 4

    # Nothing is left to do: the history stays as it is.
    launch(max_steps=4, save_strategy="steps", save_steps=2, resume_from_checkpoint="true")
    again = [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in again if "loss" in row] == [1, 2, 3, 4]


def test_nothing_to_resume(launch, tmp_path):
    assert "holds no checkpoint" in refusal(launch, resume_from_checkpoint="true")
    assert "holds no trainer_state.json" in refusal(launch, resume_from_checkpoint=str(tmp_path))


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
    assert "40 of 42 rows kept" in printed
    assert "1 without a gold answer that can be parsed" in printed
    assert "1 without prompt" in printed
    assert "8 held out" in printed
    history = [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]
    trained = [row for row in history if "discrepancy/mean" in row]
    assert len(trained) == 2
    assert all(value is not None for row in trained for name, value in row.items() if name.startswith("discrepancy/"))


@pytest.mark.long
def test_benchmarks_while_training(launch, tmp_path):
    rows = [
        {"problem": f"{number}+{number}=?", "answer": str(2 * number), "unique_id": str(number)} for number in (3, 4)
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    folder = launch(
        eval_size=16,
        eval_benchmarks=f"math500={file}",
        eval_benchmark_samples=2,
        eval_benchmark_temperature=0.0,
        max_completion_length=48,
    )
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    measured = [row["step"] for row in history if "eval_math500/avg@2" in row]
    assert measured == [0, 2]


def test_your_own_reward_and_a_vanilla_run(launch, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def short(completions, **kwargs):\n    return [0.5] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    output = launch(rewards="my_rewards.short", constraint="none", deployment_scheme="int8")
    history = [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]
    assert history[0]["reward"] == 0.5
    assert "lagrangian/lambda" not in history[0]
    assert "discrepancy/mean" in history[0]


def test_lora(launch):
    output = launch(use_peft="true", lora_r=4, learning_rate=1e-3)
    assert (output / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_name_or_path": "nobody/nothing-at-all"}, ["nobody/nothing-at-all"]),
        ({"rewards": "nonsense"}, ["rewards='nonsense'", "'math'"]),
        ({"eval_size": 99999}, ["size=99999", "at most"]),
        ({"serve": "http://127.0.0.1:8000"}, ["--serve", "'http://127.0.0.1:8000'", "'auto'"]),
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
        ({"eval_benchmarks": "aime", "eval_size": 16}, ["benchmark='aime'", "'aime24'"]),
        ({"num_generations_eval": 3, "eval_size": 6}, ["per_device_eval_batch_size=16", "num_generations_eval=3"]),
        ({"use_peft": "true", "lora_r": 0}, ["lora_r=0"]),
        ({"config": "dc_trl/assets/tiny_qwen3/model.safetensors"}, ["model.safetensors is no text"]),
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
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 1
    assert "greedy" in summary["after"]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", b"{}", "cannot be loaded ("),
        ("config.json", b"<html>", "cannot be loaded ("),
        ("chat_template.jinja", b"{% if", "cannot be loaded (TemplateSyntaxError): unexpected"),
        ("tokenizer*", None, "holds no tokenizer: save one there"),
    ],
)
def test_a_model_with_a_broken_or_missing_file(tmp_path, file, content, words):
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model)
    for path in model.glob(file):
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match="model") as refused:
        load_config_and_tokenizer(str(model))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("def reward(completions, solution, **kwargs): ...", "missing a required argument: 'solution'"),
        ("def reward(completions): ...", "got an unexpected keyword argument"),
        ("async def reward(prompts, steps): ...", "reward_funcs: 'reward' cannot be called"),
        ("def reward(:", "rewards='my_rewards.reward': the module 'my_rewards' cannot be imported (invalid syntax"),
    ],
)
def test_a_reward_function_that_cannot_be_called(launch, tmp_path, monkeypatch, function, words):
    (tmp_path / "my_rewards.py").write_text(function + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    message = refusal(launch, rewards="my_rewards.reward")
    assert words in message


def test_a_missing_column_is_named(launch, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"question": "1+1", "graded": {"by": "rule", "truth": "2"}}])
    message = refusal(launch, dataset_name=rows, prompt_column="question")
    assert (
        "answer_column='answer' is missing: set it to a column of the rows, which have 'question', 'graded'."
        in message
    )


def test_more_problems_held_out_than_there_are(launch, tmp_path):
    rows = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(4)] + [{"question": "1+1", "answer": None}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    message = refusal(launch, dataset_name=path, prompt_column="question", rewards="math", eval_size=4)
    assert "eval_size=4 leaves nothing to train on" in message
    assert "4 of 5 rows kept" in message
    assert "Set eval_size below 4" in message


def test_an_output_directory_that_cannot_be_made(launch, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(launch, output_dir=str(tmp_path / "file" / "run"))
    assert "cannot be written (Not a directory)" in message


def test_the_shipped_model_is_what_it_says(tokenizer):
    assert sum(path.stat().st_size for path in TINY_MODEL.iterdir()) < 6e6
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    assert model.config.model_type == "qwen3"
    assert 0.5e6 <= model.num_parameters() <= 3e6
    for text in (
        "héllo 你好 🎉\x00\x07\n\t  lead",
        "  a \\boxed{3} b",
        " .,!? don't 's",
        "\ufeff\u200b\U0001f468\u200d",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("\\boxed{")["input_ids"]) == 1


def test_the_shipped_model_is_as_good_as_its_card_says(tokenizer):
    script = load_script("make_tiny_model")
    card = (TINY_MODEL / "README.md").read_text()
    stated = float(re.search(r"greedy \| ([\d.]+)%", card)[1]) / 100
    assert 0.35 <= stated <= 0.45
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    problems = arithmetic_problems(1000, 0, "held_out")
    greedy, _ = script.accuracy(model, tokenizer, problems, max_new_tokens=48)
    assert greedy == pytest.approx(stated, abs=0.01)


@pytest.mark.long
def test_the_shipped_model_is_what_its_script_makes(tokenizer, tmp_path, monkeypatch):
    script = load_script("make_tiny_model")
    made = script.make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    # A run cut down to four steps.
    for name, value in {"FIRST_CHECK": 4, "CHECK_EVERY": 4, "CHECKED_PROBLEMS": 8, "WARMUP_STEPS": 1}.items():
        monkeypatch.setattr(script, name, value)
    weights = []
    for run in ("one", "two"):
        arguments = ["--output_dir", str(tmp_path / run), "--target", "0", "--problems", "8"]
        monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", *arguments])
        script.main()
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / run).state_dict())
        assert "for 4 steps" in (tmp_path / run / "README.md").read_text()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    config = AutoConfig.from_pretrained(tmp_path / "one")
    assert config.to_diff_dict() == AutoConfig.from_pretrained(TINY_MODEL).to_diff_dict()
    with pytest.raises(SystemExit, match="is taken: choose another one"):
        script.main()


@pytest.mark.long
@pytest.mark.parametrize("what", ["overhead", "replica", "grading"])
def test_the_benchmark_compares_what_it_says(what, monkeypatch, capsys):
    script = load_script("benchmark")
    arguments = ["--repetitions", "2", "--batch_size", "8", "--completion_length", "4", "--threads", "1"]
    arguments += ["--completions", "100"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", what, *arguments])
    script.main()
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.search(r"\d\.\d+ – \d", line)]
    assert len(rows) == {"overhead": 4 + len(script.METHODS), "replica": 7, "grading": 1}[what]


def test_the_benchmark_of_routing_shows_flips_and_none(monkeypatch, capsys):
    script = load_script("benchmark")
    arguments = ["--seeds", "2", "--batch_size", "8", "--completion_length", "8", "--threads", "1"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "routing", *arguments])
    script.main()
    rows = re.findall(r"(fp8|bf16) +│ (no|yes) +│ .*│ +(\S+%) (\S+%)", capsys.readouterr().out)
    assert [row[:2] for row in rows] == [("fp8", "no"), ("fp8", "yes"), ("bf16", "no"), ("bf16", "yes")]
    assert rows[1][2:] == rows[3][2:] == ("0.0%", "0.0%")
    assert min(float(share[:-1]) for share in rows[0][2:]) > 10


@pytest.mark.long
@requires_vllm
@pytest.mark.parametrize("what", ["throughput", "sync"])  # each starts a server
def test_the_engines_are_compared(what, monkeypatch, capsys):
    script = load_script("engines")
    options = ["--schemes", "bf16", "--problems", "16", "--completion_length", "16", "--sizes", "0.3M"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(sys, "argv", ["engines.py", what, "--repetitions", "1", "--threads", "1", *options])
    script.main()
    printed = capsys.readouterr().out
    rows = {"throughput": "vLLM, bf16|replica, bf16|model"}
    rows |= {"sync": "0.3M +│ bf16 +│ full|0.3M +│ bf16 +│ adapter"}
    assert len(re.findall(rf"│ (?:{rows[what]}).*\d │?", printed)) == rows[what].count("|") + 1
