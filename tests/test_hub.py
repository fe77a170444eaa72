"""Pushes to a Hub in this process, by the calls of the real client: what arrives, what does not, and how it fails."""

import fnmatch
import json
import logging
import os
import shlex
import shutil
import sys
import zipfile
from collections import defaultdict
from concurrent.futures import Future
from contextlib import ExitStack

import httpx
import pytest
import torch
from huggingface_hub import CommitOperationDelete, HfApi, ModelCard, RepoUrl
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from dc_trl import HistoryCallback
from dc_trl.command import finish
from dc_trl.command.finish import _publish
from dc_trl.command.problems import DataArguments
from dc_trl.quantization.checkpoint import write_deployable
from dc_trl.run.hub import _ABSOLUTE, run_files
from dc_trl.run.interruption import StopSignals

from . import helpers
from .helpers import ROOT, TINY_MODEL, load_script, read_rows, refuses, write_rows


TOKEN = "hf_" + "UnguessableWriteTokenOfTests"
USER = "tester"
MODEL = {"config.json", "generation_config.json", "model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
CHECKPOINT = {f"deployment/{name}" for name in MODEL | TOKENIZER | {"dc_trl.json"}}
RUN = MODEL | TOKENIZER | {"README.md", "history.jsonl", "run.png", "settings.json"}


class Hub:
    """Repositories by their ids; takes the place of the methods of `HfApi` that a push calls."""

    def __init__(self):
        self.files = defaultdict(dict)
        self.commits = []
        self.refusal = None

    def create_repo(self, api, repo_id, *, token=None, private=None, exist_ok=True):
        if (token or api.token or os.environ.get("HF_TOKEN")) != TOKEN:
            raise httpx.HTTPError("401: no write access")
        return RepoUrl(f"https://huggingface.co/{repo_id if '/' in repo_id else f'{USER}/{repo_id}'}")

    def auth_check(self, api, repo_id, *, token=None, write=False):
        assert write

    def list_repo_files(self, api, repo_id, *, revision=None, token=None):
        return list(self.files[repo_id])

    def create_commit(self, api, repo_id, operations, *, commit_message, revision=None, token=None):
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        for operation in operations:
            if isinstance(operation, CommitOperationDelete):
                del self.files[repo_id][operation.path_in_repo]
            else:
                with operation.as_file() as file:
                    self.files[repo_id][operation.path_in_repo] = file.read()
        self.commits.append(commit_message)

    def fail(self, error):
        raise error

    def run_as_future(self, api, function):
        future = Future()
        try:
            future.set_result(function())
        except OSError as error:
            future.set_exception(error)
        return future


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    for name in ("create_repo", "auth_check", "list_repo_files", "create_commit", "run_as_future"):
        method = getattr(hub, name)
        monkeypatch.setattr(HfApi, name, lambda api, *args, _method=method, **kwargs: _method(api, *args, **kwargs))
    monkeypatch.setattr("huggingface_hub.repocard.ModelCard.validate", lambda *args, **kwargs: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def make_trainer(output_dir, model=TINY_MODEL, **options):
    """Of a directory, whose tokenizer is loaded too."""
    usual = {"callbacks": [HistoryCallback()], "processing_class": None, "max_steps": 2, "deployment_scheme": "fp8"}
    return helpers.make_trainer(output_dir, str(model), **usual | options)


def assert_without_token(folder):
    """No file holds the token, archives (as torch.save writes them) included."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                assert not any(TOKEN.encode() in archive.read(name) for name in archive.namelist()), path


def test_what_a_run_leaves_on_the_hub(hub, tmp_path, monkeypatch, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.delenv("HF_TOKEN")
    folder = tmp_path / "run"
    options = {"push_to_hub": True, "hub_token": TOKEN, "hub_strategy": "checkpoint", "save_steps": 1}
    trainer = make_trainer(folder, **options)
    for name in ("notes.txt", "rewards.py", "model.bin", "vllm_server.log"):
        (folder / name).write_text("not the run's")
    trainer.train()
    trainer.push_to_hub(dataset_name="arithmetic")
    files = hub.files[f"{USER}/run"]

    # What is there is what was there, to the byte, and nothing else.
    last = {path for path in files if path.startswith("last-checkpoint/")}
    assert set(files) - last == RUN | CHECKPOINT == set(run_files(folder))
    # Two files name directories of this machine.
    as_it_lies = (RUN | CHECKPOINT) - {"settings.json", "deployment/dc_trl.json"}
    assert json.loads(files["deployment/dc_trl.json"])["base_model"] == "tiny_qwen3"
    for name in as_it_lies:
        assert files[name] == (folder / name).read_bytes(), name
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/dc_grpo_state.json"} <= last
    assert not [path for path in files if "training_args" in path]
    assert len(hub.commits) > 1
    assert hub.commits[-1] == "End of training"
    # The deployment checkpoint is the model's: quantized from what was saved, it is the same.
    write_deployable(str(folder), "fp8", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == files["deployment/model.safetensors"]
    tokens = torch.arange(10, 60).unsqueeze(0)
    trained = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(trained, trainer.model(tokens).logits, rtol=1e-5, atol=1e-5)

    # The token got there and nowhere else; the trainer still has it.
    assert trainer.args.hub_token == TOKEN
    assert_without_token(folder)
    output = capfd.readouterr()
    assert TOKEN not in output.out + output.err + caplog.text
    # Pickled for a file it is gone; the model's training arguments are there but for it.
    saved = torch.load(folder / "training_args.bin", weights_only=False)
    assert (saved.hub_token, saved.learning_rate) == (None, trainer.args.learning_rate)


def test_the_model_card(hub, tmp_path):
    folder = tmp_path / "run"
    trainer = make_trainer(folder, hub_model_id="tester/a-model", lambda_init=0.25)
    trainer.train()
    measured = [{"step": 0, "eval_greedy_reward": 0.25}, {"step": 2, "eval_greedy_reward": 0.75}]
    rows = [*read_rows(folder / "history.jsonl"), *(row | {"eval_greedy_reward_se": 0.125} for row in measured)]
    write_rows(folder / "history.jsonl", rows)
    trainer.push_to_hub(dataset_name="openai/gsm8k", tags="mine")
    text = hub.files["tester/a-model"]["README.md"].decode()
    for part in (
        "2606.08779",
        "![Mean reward, batch discrepancy with its tolerance, and the multiplier over the steps](run.png)",
        "| greedy reward | 0.250 ± 0.125 | 0.750 ± 0.125 |",
        "| multiplier λ | ",
        "| `constraint` | lagrangian |",
        "| `discrepancy_tolerance` | 0.0037 |",
        "| `deployment_scheme` | fp8 |",
        "vllm serve model/deployment",
        'model="tester/a-model"',
    ):
        assert part in text, part
    assert "None" not in text
    assert str(tmp_path) not in text
    data = ModelCard(text).data
    assert data.pipeline_tag == "text-generation"
    assert (data.library_name, data.datasets, data.base_model) == ("transformers", "openai/gsm8k", None)
    assert set(data.tags) == {"generated_from_trainer", "mine", "trl", "grpo", "dc-grpo"}


def test_a_plain_trainer_pushes_what_there_is(hub, tmp_path):
    folder = tmp_path / "run"
    trainer = make_trainer(folder, callbacks=[], deployment_scheme=None, constraint="none")
    trainer.push_to_hub()
    assert set(hub.files[f"{USER}/run"]) == MODEL | TOKENIZER | {"README.md"}
    assert "vllm serve" not in hub.files[f"{USER}/run"]["README.md"].decode()
    # Weights that an earlier model left there would be loaded in place of this one's shards.
    (folder / "model.safetensors").unlink()
    trainer.model.save_pretrained(folder, max_shard_size="1MB")
    trainer.save_model = lambda *args, **kwargs: None
    trainer.push_to_hub()
    names = {name for name in hub.files[f"{USER}/run"] if name.endswith(".safetensors")}
    assert "model.safetensors" not in names
    assert len(names) > 1
    # Where there are no new ones, those that are there stay.
    for file in folder.glob("model*"):
        file.unlink()
    trainer.push_to_hub()
    assert names <= hub.files[f"{USER}/run"].keys()


def test_the_command_after_a_failed_push_sends_the_files_of_a_push(hub, tmp_path):
    trainer = make_trainer(tmp_path / "run", push_to_hub=True, hub_model_id=f"{USER}/run")
    trainer.train()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    hub.refusal = httpx.HTTPError("told to answer 403")
    message = _publish(trainer, None)
    begin, *words = shlex.split(message.partition("Push it later: ")[2])
    assert [begin, *words[:4]] == ["hf", "upload", f"{USER}/run", str(tmp_path / "run"), "."]
    assert words[4::2] == ["--include"] * len(RUN | CHECKPOINT)
    assert set(words[5::2]) == RUN | CHECKPOINT


def test_a_deployment_in_several_files_is_pushed_whole(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("dc_trl.quantization.checkpoint._SHARD_BYTES", 500_000)
    folder = tmp_path / "run"
    (folder / "deployment").mkdir(parents=True)
    (folder / "deployment" / "notes.txt").write_text("mine")
    trainer = make_trainer(folder, callbacks=[], export_run=False)
    trainer.push_to_hub()
    assert (folder / "deployment.1" / "notes.txt").read_text() == "mine"
    files = hub.files[f"{USER}/run"]
    parts = set(json.loads(files["deployment/model.safetensors.index.json"])["weight_map"].values())
    assert len(parts) > 1
    assert {f"deployment/{name}" for name in parts} == {*fnmatch.filter(files, "deployment/*.safetensors")}


def test_paths_of_this_machine_in_what_is_pushed():
    text = '{"model": "/home/me/mine", "serve_options": ["--download-dir=/home/me/cache", "a/b=c"], "id": "a/b"}'
    assert _ABSOLUTE.sub(r"\1", text) == (
        '{"model": "mine", "serve_options": ["--download-dir=cache", "a/b=c"], "id": "a/b"}'
    )


@pytest.mark.parametrize("base_id", [f"{USER}/base", None])
def test_an_adapter_is_pushed_with_its_base_and_without_paths_of_this_machine(hub, tmp_path, base_id):
    base, folder = tmp_path / "models" / "my base", tmp_path / "run"
    shutil.copytree(TINY_MODEL, base)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    options = {"push_to_hub": True, "hub_strategy": "checkpoint", "save_steps": 1}
    options |= {"peft_config": adapter, "max_steps": 1, "hub_base_model_id": base_id, "export_run": True}
    trainer = make_trainer(folder, base, **options)
    trainer.train()
    trainer.push_to_hub(dataset_name=str(folder / "rows.jsonl"))
    files = hub.files[f"{USER}/run"]
    for name, content in files.items():
        assert str(tmp_path).encode() not in content, name
    for name in ("", "last-checkpoint/"):
        config = json.loads(files[f"{name}adapter_config.json"])
        assert config["base_model_name_or_path"] == (base_id or "my base")
    assert ModelCard(files["README.md"].decode()).data.base_model == base_id


def test_a_push_while_training_that_fails_is_said(hub, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("dc_trl.run.hub.logger.warning", said.append)
    hub.refusal = httpx.HTTPError("told to answer 403")
    options = {"push_to_hub": True, "hub_strategy": "every_save", "save_steps": 1}
    trainer = make_trainer(tmp_path / "run", max_steps=1, **options)
    trainer.train()
    trainer.push_to_hub()
    (warning,) = said
    assert "403" in warning
    assert set(hub.files[f"{USER}/run"]) == RUN | CHECKPOINT


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_refused_before_training(hub, tmp_path, monkeypatch, token):
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    command = f"train.py --config configs/quickstart.yaml --output_dir {tmp_path / 'run'} --push_to_hub true"
    monkeypatch.chdir(ROOT)
    # The model is not looked at before the Hub is asked.
    monkeypatch.setattr(sys, "argv", [*command.split(), "--model_name_or_path", "nobody/nothing"])
    with refuses(SystemExit, "hub_model_id='run'", "hf auth login", "HF_TOKEN", "write access") as refused:
        load_script("train").main()
    assert token is None or token not in str(refused.value)
    assert not list((tmp_path / "run").glob("*"))


class Killed(BaseException):
    """Ends what runs as a kill does: nothing more is done."""


@pytest.mark.parametrize("push", [True, False])
def test_a_run_that_is_killed_while_it_is_published_is_published_by_the_next_start(tmp_path, hub, capsys, push):
    def cut_short(write):  # TRL writes the card at each save too
        return lambda **names: hub.fail(Killed()) if (tmp_path / "run" / "summary.json").exists() else write(**names)

    def start(kills=False):
        options = {"push_to_hub": push, "hub_strategy": "end", "save_steps": 1, "resume_from_checkpoint": "auto"}
        trainer = make_trainer(tmp_path / "run", **options)
        if kills and not push:
            trainer.create_model_card = cut_short(trainer.create_model_card)
        return finish.run(trainer, None, DataArguments(), StopSignals(), ExitStack())

    hub.refusal = Killed() if push else None
    with pytest.raises(Killed):
        start(kills=True)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert not hub.commits
    before = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert start() is None
    assert "unchanged" not in capsys.readouterr().out
    assert len(hub.commits) == push
    assert "## The run" in (tmp_path / "run" / "README.md").read_text()
    again = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns != before
    assert again == push  # transformers saves the model before it pushes
    assert start() is None
    assert "unchanged" in capsys.readouterr().out
    assert len(hub.commits) == push
