"""scripts/train.py as a user runs it: what it makes, what it refuses, and what it never overwrites."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from .helpers import ROOT, TINY_MODEL


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_script"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def launch(script, monkeypatch, tmp_path):
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
        script.main()
        return tmp_path / "run"

    return run


def refusal(launch, **options):
    with pytest.raises(SystemExit) as stop:
        launch(**options)
    message = stop.value.code
    assert message.startswith("error: ")
    return message


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_readme_command_in_a_process_of_its_own(tmp_path):
    command = [os.path.join(os.path.dirname(sys.executable), "accelerate"), "launch", "scripts/train.py"]
    command += ["--config", "configs/quickstart.yaml", "--output_dir", str(tmp_path), "--max_steps", "3"]
    command += ["--eval_size", "64", "--per_device_train_batch_size", "32", "--report_to", "tensorboard"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    for words in ("64 held-out problems", "before", "after", "discrepancy δ̄", "multiplier λ", "tokens", "seconds"):
        assert words in done.stdout
    assert "reward=" in done.stderr
    assert "δ̄=" in done.stderr
    assert "λ=" in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["before"]["problems"] == 64
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
        ({"model_name_or_path": "/no/such/model"}, ["model_name_or_path='/no/such/model'", "does not exist"]),
        ({"model_name_or_path": "./nothing"}, ["model_name_or_path='./nothing'", "does not exist"]),
        ({"model_name_or_path": "tests"}, ["model_name_or_path='tests'", "no model"]),
        ({"model_name_or_path": "nobody/nothing-at-all"}, ["nobody/nothing-at-all"]),
        ({"dataset_name": "/no/rows.jsonl"}, ["dataset_name='/no/rows.jsonl'", "does not exist"]),
        ({"rewards": "nonsense"}, ["rewards='nonsense'", "'math'"]),
        ({"eval_size": -1}, ["eval_size=-1"]),
        ({"eval_size": 99999}, ["size=99999", "at most"]),
        ({"deployment_scheme": "fp4"}, ["deployment_scheme='fp4'"]),
        ({"discrepancy_tolerance": -1}, ["discrepancy_tolerance=-1"]),
        ({"top_p": 0.9}, ["top_p=0.9"]),
        ({"num_generations_eval": 3, "eval_size": 6}, ["per_device_eval_batch_size=16", "num_generations_eval=3"]),
    ],
)
def test_refused_before_training(launch, tmp_path, options, words):
    message = refusal(launch, **options)
    for word in words:
        assert word in message
    assert not list((tmp_path / "run").glob("*")), "a refused run leaves nothing that looks like one"


def test_a_missing_column_is_named(launch, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"question": "1+1", "gold": "2"}])
    message = refusal(launch, dataset_name=rows, prompt_column="question")
    assert "answer_column='answer' is missing: the data set has 'question', 'gold'" in message


def test_an_output_directory_that_cannot_be_made(launch, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(launch, output_dir=str(tmp_path / "file" / "run"))
    assert "cannot be written (Not a directory)" in message


def test_a_full_disk(launch, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        # Room for the probe, not for the model and a checkpoint.
        message = refusal(launch, output_dir=str(disk / "run"), save_strategy="steps")
        assert "0.00 GB free and the model and a checkpoint need 0.01 GB" in message
        (disk / "full").write_bytes(bytes((4 << 20) - 8192))
        assert "cannot be written (No space left on device)" in refusal(launch, output_dir=str(disk / "other"))
    finally:
        subprocess.run(["umount", disk], check=True)


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
