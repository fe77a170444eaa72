"""Pushes to a Hub on this machine, through the real client: what arrives, what does not, and how a push goes on."""

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants, metadata_load, snapshot_download
from huggingface_hub.utils import logging as hub_logging
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dc_trl import DCGRPOTrainer, HistoryCallback
from dc_trl.hub.push import run_files
from dc_trl.quantization.checkpoint import write_deployable

from .helpers import (
    ROOT,
    TINY_MODEL,
    TWO_PROCESSES,
    distinct_characters,
    load_script,
    make_config,
    make_prompts,
)
from .hub_server import READ_TOKEN, TOKEN, USER, Repository, serve_hub


MODEL = {"config.json", "generation_config.json", "model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
CHECKPOINT = {f"deployment/{name}" for name in MODEL | TOKENIZER}
RUN = MODEL | TOKENIZER | {"README.md", "history.jsonl", "run.png", "settings.json"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process takes for the real one. Xet, which needs a storage of its own, is switched off."""
    with serve_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def make_trainer(output_dir, callbacks=None, peft_config=None, rollout_func=None, **overrides):
    return DCGRPOTrainer(
        model=str(TINY_MODEL),
        reward_funcs=distinct_characters,
        args=make_config(output_dir, **{"max_steps": 2, "deployment_scheme": "fp8"} | overrides),
        train_dataset=make_prompts(),
        callbacks=[HistoryCallback()] if callbacks is None else callbacks,
        peft_config=peft_config,
        rollout_func=rollout_func,
    )


def local_files(folder, names):
    return {name: (folder / name).read_bytes() for name in names}


def assert_without_token(folder):
    """No file holds the token, archives (as torch.save writes them) included."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert TOKEN.encode() not in path.read_bytes(), path
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                assert not any(TOKEN.encode() in archive.read(name) for name in archive.namelist()), path


@pytest.mark.long
def test_what_a_run_leaves_on_the_hub(hub, tmp_path, monkeypatch, capfd, caplog):
    # Everything that can log does.
    monkeypatch.setattr(constants, "HF_DEBUG", True)
    caplog.set_level(logging.DEBUG)
    for library in (hub_logging, transformers_logging):
        monkeypatch.setattr(library._get_library_root_logger(), "level", logging.DEBUG)
    monkeypatch.delenv("HF_TOKEN")
    hub.drops = 2
    hub.fail("PUT", "/lfs/", 503)

    folder = tmp_path / "run"
    trainer = make_trainer(
        folder,
        push_to_hub=True,
        hub_token=TOKEN,
        hub_strategy="checkpoint",
        hub_private_repo=True,
        save_strategy="steps",
        save_steps=1,
        num_iterations=2,  # a checkpoint within a generation batch
        report_to="tensorboard",
    )
    for name in ("notes.txt", "rewards.py", "model.bin", "vllm_server.log", "before.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not the run's")
    trainer.train()
    trainer.push_to_hub(dataset_name="arithmetic")
    repository = hub.repositories[f"{USER}/run"]
    assert hub.drops == 0
    assert hub.failures[0][-1] == 0
    assert len(hub.received) == len(set(hub.received)), "no blob is sent twice"
    assert repository.private

    # What is there is what was there, to the byte, and nothing else.
    last = {path for path in repository.files if path.startswith("last-checkpoint/")}
    assert set(repository.files) - last == RUN | CHECKPOINT
    as_it_lies = (RUN | CHECKPOINT) - {"settings.json"}  # which names directories of this machine
    assert {name: repository.files[name] for name in as_it_lies} == local_files(folder, as_it_lies)
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/dc_grpo_state.json"} <= last
    assert not [path for path in repository.files if "training_args" in path or "not the run's" in path]
    state = json.loads(repository.files["last-checkpoint/trainer_state.json"])
    assert state["global_step"] in (1, 2)  # the second is left out where the first is still on its way
    assert "Training in progress, step 1" in [commit["summary"] for commit in repository.log]
    assert repository.log[-1]["summary"] == "End of training"

    # It loads from there, as it was trained and as it is deployed.
    fetched = snapshot_download(f"{USER}/run", token=TOKEN, cache_dir=tmp_path / "cache")
    assert local_files(Path(fetched), as_it_lies) == local_files(folder, as_it_lies)
    options = {"token": TOKEN, "cache_dir": tmp_path / "other-cache"}
    tokens = torch.arange(10, 60).unsqueeze(0)
    for subfolder in ("", "deployment"):
        pulled = AutoModelForCausalLM.from_pretrained(f"{USER}/run", subfolder=subfolder, **options)
        local = AutoModelForCausalLM.from_pretrained(folder / subfolder)
        assert torch.equal(pulled(tokens).logits, local(tokens).logits)
    trained = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(trained, trainer.model(tokens).logits, rtol=1e-5, atol=1e-5)
    # The deployment checkpoint is the model's: quantized from what was saved, it is the same.
    write_deployable(str(folder), "fp8", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == repository.files["deployment/model.safetensors"]

    # The token got there and nowhere else; the trainer still has it.
    assert trainer.args.hub_token == TOKEN
    assert_without_token(folder)
    output = capfd.readouterr()
    logs = output.out + output.err + caplog.text
    assert "authenticated: True" in logs
    assert "Authorization: <TOKEN>" in logs or "authorization: <TOKEN>" in logs
    assert TOKEN not in logs
    assert not [content for content in repository.files.values() if TOKEN.encode() in content]
    # Pickled for a file it is gone; the model's training arguments are there but for it.
    saved = torch.load(folder / "training_args.bin", weights_only=False)
    assert saved.hub_token is None
    assert saved.learning_rate == trainer.args.learning_rate


def test_a_run_is_exported_once_and_pushed(hub, tmp_path, monkeypatch):
    """`export=False` pushes what `train` has left."""
    written = []
    save = DCGRPOTrainer.save_deployment
    monkeypatch.setattr(
        DCGRPOTrainer, "save_deployment", lambda self, directory: written.append(directory) or save(self, directory)
    )
    folder = tmp_path / "run"
    trainer = make_trainer(folder, callbacks=[], push_to_hub=True, export_run=True)
    trainer.train()
    trainer.push_to_hub(export=not trainer.args.exports_deployment)
    assert written == [folder / "deployment"]
    files = hub.repositories[f"{USER}/run"].files
    assert {name for name in files if name.startswith("deployment/")} == CHECKPOINT
    assert "history.jsonl" in files
    write_deployable(str(folder), "fp8", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == files["deployment/model.safetensors"]


def test_a_card_without_a_summary_compares_the_first_and_the_last_step(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3, lambda_init=0.25)
    trainer.train()
    trainer.create_model_card(tags="mine")
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    first, last = (next(row for row in rows if row["step"] == step and "reward" in row) for step in (1, 3))
    card = ModelCard.load(tmp_path / "README.md")
    assert "|  | step 1 | step 3 |" in card.text
    for label, name in (("mean reward", "reward"), ("discrepancy δ̄", "discrepancy/mean")):
        assert f"| {label} | {first[name]:.4g} | {last[name]:.4g} |" in card.text
    assert set(card.data.tags) == {"generated_from_trainer", "mine", "trl", "grpo", "dc-grpo"}


def test_the_model_card(hub, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    trainer = make_trainer(folder, hub_model_id="tester/a-model", lambda_init=0.25)
    trainer.train()
    summary = {
        "engine": "fp8",
        "steps": 2,
        "before": {"reward": 0.5, "discrepancy": 0.00123, "greedy": 0.25, "greedy_se": 0.125, "problems": 12},
        "after": {"reward": 0.625, "discrepancy": 0.00456, "greedy": 0.75, "greedy_se": 0.0625, "problems": 12},
        "lambda": 0.375,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    trainer.push_to_hub(dataset_name="openai/gsm8k")

    files = hub.repositories["tester/a-model"].files
    text = files["README.md"].decode()
    for part in (
        "2606.08779",
        "DC-GRPO",
        "![Mean reward, batch discrepancy with its tolerance, and the multiplier over the steps](run.png)",
        "| mean reward of greedy completions, 12 held-out problems | 0.250 ± 0.125 | 0.750 ± 0.062 |",
        "| discrepancy δ̄ | 0.00123 | 0.00456 |",
        "| multiplier λ | 0.25 | 0.375 |",
        "| `constraint` | lagrangian |",
        "| `discrepancy_tolerance` | 0.0037 |",
        "| `deployment_scheme` | fp8 |",
        "vllm serve model/deployment",
        'model="tester/a-model"',
    ):
        assert part in text, part
    assert "None" not in text
    assert str(tmp_path) not in text

    # The metadata passed the Hub's validation, and the client reads it back.
    assert hub.cards
    data = ModelCard(text).data
    assert data.pipeline_tag == "text-generation"
    assert (data.library_name, data.datasets, data.base_model) == ("transformers", "openai/gsm8k", None)
    assert {"dc-grpo", "grpo", "trl", "generated_from_trainer"} <= set(data.tags)
    assert "licence" not in metadata_load(folder / "README.md")


def test_a_plain_trainer_pushes_what_there_is(hub, tmp_path):
    folder = tmp_path / "run"
    trainer = make_trainer(folder, callbacks=[], hub_deployment="none")
    trainer.push_to_hub()
    assert set(hub.repositories[f"{USER}/run"].files) == MODEL | TOKENIZER | {"README.md"}
    assert not (folder / "deployment").exists()
    # A token of the call counts.
    with pytest.raises(OSError, match="write access"):
        trainer.push_to_hub(token=READ_TOKEN)
    # Weights that an earlier model left there would be loaded in place of this one's shards.
    (folder / "model.safetensors").unlink()
    trainer.model.save_pretrained(folder, max_shard_size="1MB")
    trainer.save_model = lambda *args, **kwargs: None
    trainer.push_to_hub()
    names = {name for name in hub.repositories[f"{USER}/run"].files if name.endswith(".safetensors")}
    assert "model.safetensors" not in names
    assert len(names) > 1


def pushed_adapter(folder, base, **fields):
    """A run that trains an adapter of a model in a directory, and has pushed it and its last checkpoint."""
    trainer = DCGRPOTrainer(
        model=str(base),
        reward_funcs=distinct_characters,
        args=make_config(
            folder,
            **{
                "max_steps": 1,
                "deployment_scheme": "fp8",
                "push_to_hub": True,
                "hub_strategy": "checkpoint",
                "save_strategy": "steps",
                "save_steps": 1,
                "export_run": True,
                "metric_for_best_model": "reward",
                "eval_strategy": "steps",
                "eval_steps": 1,
                "load_best_model_at_end": True,
            }
            | fields,
        ),
        train_dataset=make_prompts(),
        eval_dataset=make_prompts(4),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    trainer.train()
    trainer.push_to_hub(dataset_name=str(folder / "rows.jsonl"))
    return trainer


def test_a_pushed_adapter_is_loaded_with_its_base_from_the_hub(hub, tmp_path):
    base = shutil.copytree(TINY_MODEL, tmp_path / "base")
    client = HfApi(endpoint=hub.url, token=TOKEN)
    client.create_repo(f"{USER}/base")
    client.upload_folder(repo_id=f"{USER}/base", folder_path=base)
    folder = tmp_path / "run"
    trainer = pushed_adapter(folder, base, hub_base_model_id=f"{USER}/base")
    repository = hub.repositories[f"{USER}/run"]
    for name in ("", "last-checkpoint/"):
        config = json.loads(repository.files[f"{name}adapter_config.json"])
        assert config["base_model_name_or_path"] == f"{USER}/base"
    assert ModelCard(repository.files["README.md"].decode()).data.base_model == f"{USER}/base"
    shutil.move(base, tmp_path / "elsewhere")
    fetch = partial(snapshot_download, token=TOKEN, cache_dir=tmp_path / "cache")
    adapter = fetch(f"{USER}/run")
    its_base = AutoModelForCausalLM.from_pretrained(fetch(PeftConfig.from_pretrained(adapter).base_model_name_or_path))
    loaded = PeftModel.from_pretrained(its_base, adapter)
    tokens = torch.arange(10, 60).unsqueeze(0)
    torch.testing.assert_close(loaded(tokens).logits, trainer.model.eval()(tokens).logits, rtol=1e-4, atol=1e-4)


def test_no_path_of_this_machine_is_pushed(hub, tmp_path):
    base, folder = tmp_path / "models" / "my base", tmp_path / "run"
    shutil.copytree(TINY_MODEL, base)
    pushed_adapter(folder, base, hub_model_id="run")
    (files,) = [repository.files for repository in hub.repositories.values()]
    for name, content in files.items():
        assert str(tmp_path).encode() not in content, name
    for name in ("settings.json", "adapter_config.json"):
        assert str(tmp_path) in (folder / name).read_text(), name
        assert json.loads(files[name]).keys() == json.loads((folder / name).read_text()).keys()
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "my base"
    state = json.loads(files["last-checkpoint/trainer_state.json"])
    assert state["best_model_checkpoint"] == "checkpoint-1"


def test_a_push_while_training_that_fails_is_said(hub, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("dc_trl.hub.push.logger.warning", said.append)
    hub.fail("POST", "/commit/", 403)
    options = {"push_to_hub": True, "hub_strategy": "every_save", "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path / "run", max_steps=1, **options)
    trainer.train()
    trainer.push_to_hub()
    assert len(said) == 1
    assert "A push during training failed" in said[0]
    assert "403" in said[0]
    assert hub.repositories[f"{USER}/run"].log[-1]["summary"] == "End of training"
    assert set(hub.repositories[f"{USER}/run"].files) == RUN | CHECKPOINT


@pytest.fixture
def train(monkeypatch, tmp_path):
    """scripts/train.py in this process: the quickstart, two steps of it."""

    def run(**options):
        arguments = {
            "config": "configs/quickstart.yaml",
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2,
            "eval_size": 8,
            "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 8,
            "max_completion_length": 16,
            "disable_tqdm": "true",
            "save_strategy": "no",
            "push_to_hub": "true",
            **options,
        }
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        load_script("train").main()

    return run


@pytest.mark.parametrize(
    ("token", "options", "words"),
    [
        (None, {}, ["hub_model_id='run'", "hf auth login", "HF_TOKEN"]),
        ("hf_wrong", {}, ["hub_model_id='run'", "HF_TOKEN"]),
        (READ_TOKEN, {"hub_model_id": "tester/there"}, ["hub_model_id='tester/there'", "write access"]),
    ],
)
def test_refused_before_training(hub, tmp_path, train, monkeypatch, token, options, words):
    hub.repositories["tester/there"] = Repository(private=False)
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    # The model is not looked at before the Hub is asked.
    with pytest.raises(SystemExit) as refused:
        train(model_name_or_path="nobody/nothing", **options)
    for word in words:
        assert word in str(refused.value)
    assert token is None or token not in str(refused.value)
    assert not list((tmp_path / "run").glob("*"))


def test_no_hub_there(hub, tmp_path, train, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemExit, match=r"cannot be pushed to .*check HF_ENDPOINT"):
        train()


@pytest.mark.long
def test_two_processes_push_once(hub, tmp_path):
    environment = {name: text for name, text in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_VERBOSITY": "debug"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_DEBUG": "1", "TRANSFORMERS_VERBOSITY": "debug"}
    folder = tmp_path / "run"
    options = f"--config configs/quickstart.yaml --output_dir {folder} --max_steps 2 --eval_size 8 --push_to_hub "
    options += (
        "--per_device_eval_batch_size 4 --per_device_train_batch_size 8 --max_completion_length 16 --save_steps 2"
    )
    command = [*TWO_PROCESSES, "scripts/train.py", *shlex.split(options)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert TOKEN not in done.stdout + done.stderr
    assert_without_token(folder)
    repository = hub.repositories[f"{USER}/run"]
    assert [commit["summary"] for commit in repository.log].count("End of training") == 1
    assert set(repository.files) == set(run_files(folder))
    as_it_lies = set(repository.files) - {"settings.json"}  # which names directories of this machine
    assert {name: repository.files[name] for name in as_it_lies} == local_files(folder, as_it_lies)
    assert RUN | CHECKPOINT | {"summary.json"} <= set(repository.files)
    card = ModelCard(repository.files["README.md"].decode())
    assert card.data.datasets is None
    assert "Trained on: `arithmetic`." in card.text
    assert "fine-tuned version of `tiny_qwen3`" in card.text


def test_invalid_settings(tmp_path):
    with pytest.raises(ValueError, match=r"hub_deployment='both' is unknown: choose one of 'subfolder'"):
        make_config(tmp_path, hub_deployment="both", constraint="none")
