"""What `train` and `save_model` leave by themselves (`export_run`), what stays of the user's, and the signatures."""

import inspect
import json
import os
import random
from importlib import import_module

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GraniteMoeConfig
from trl import GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer

from dc_trl import DCGRPOConfig, DCGRPOTrainer, DeploymentCheckpointCallback, HistoryCallback
from dc_trl.async_grpo import AsyncDCGRPOTrainer
from dc_trl.command.finish import summarize
from dc_trl.records.runs import read_history

from . import helpers
from .helpers import (
    TINY_MODEL,
    TWO_EXPERTS,
    best_at_the_first_step,
    files_in,
    make_model,
    make_prompts,
    random_model,
    read_json,
    refuses,
    steps_of,
    untimed,
    write_checkpoint,
)


OF_A_RUN = {"deployment", "history.jsonl", "settings.json", "run.png"}


def make_trainer(output_dir, model=None, reward=None, **options):
    options = {"deployment_scheme": "fp8", "export_run": True, "max_steps": 2} | options
    return helpers.make_trainer(output_dir, model, reward, **options)


# --- what there is


def test_the_swap_alone_leaves_the_run_and_the_deployment(tmp_path):
    assert DCGRPOConfig(str(tmp_path), use_cpu=True, bf16=False).export_run  # by default
    run = tmp_path / "run"
    trainer = make_trainer(run, str(TINY_MODEL), save_steps=1)
    trainer.train()
    assert {*os.listdir(run)} == OF_A_RUN | {"checkpoint-1", "checkpoint-2", "README.md"}
    assert not list(run.glob("checkpoint-*/deployment"))

    trainer.save_deployment(tmp_path / "by hand")
    deployment = files_in(run / "deployment")
    assert deployment == files_in(tmp_path / "by hand")
    # A second process, as it were: the last checkpoint's weights, read by transformers and quantized by a new writer.
    policy = AutoModelForCausalLM.from_pretrained(run / "checkpoint-2", dtype=torch.float32)
    write_checkpoint(policy, "fp8", tmp_path / "again")
    assert deployment["model.safetensors"] == (tmp_path / "again" / "model.safetensors").read_bytes()
    assert json.loads(deployment["config.json"])["quantization_config"]["format"] == "float-quantized"

    history = read_history(run / "history.jsonl")
    logged = trainer.state.log_history
    assert [row["step"] for row in history] == [row["step"] for row in logged] == [1, 2, 2]
    for name in ("reward", "discrepancy/mean", "lagrangian/lambda"):
        assert [row.get(name) for row in history] == [row.get(name) for row in logged]
    assert read_json(run / "settings.json")["deployment_scheme"] == "fp8"
    with Image.open(run / "run.png") as figure:
        assert min(figure.size) > 200


def test_save_model_leaves_the_deployment_beside_the_model(tmp_path):
    trainer = make_trainer(tmp_path / "run", deployment_scheme="bf16")
    trainer.train()
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(2.0)
    trainer.save_model()
    folder = tmp_path / "run"
    assert {*os.listdir(folder)} >= OF_A_RUN | {"model.safetensors"}
    assert not list(folder.glob("deployment.*"))
    whole, deployed = (load_file(path / "model.safetensors") for path in (folder, folder / "deployment"))
    assert torch.equal(deployed["model.norm.weight"], whole["model.norm.weight"].bfloat16())
    trainer.save_model(tmp_path / "there" / "model")
    assert files_in(tmp_path / "there" / "model" / "deployment") == files_in(folder / "deployment")


def test_turned_off_it_leaves_nothing(tmp_path):
    make_trainer(tmp_path, export_run=False).train()
    assert list(tmp_path.iterdir()) == []


def test_exporting_draws_no_random_number_and_moves_no_weight(tmp_path):
    """With exports at the end and in between, or without: weights and random states are equal, bit for bit."""
    states, weights = [], []
    for export in (True, False):
        trainer = make_trainer(tmp_path / str(export), export_run=export, constraint="none", learning_rate=1e-2)
        for _ in range(2):  # the second starts where an export has just ended
            trainer.train()
            trainer.save_model(tmp_path / f"{export} model")
            states.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert states[:2] == states[2:]
    assert all(map(torch.equal, *weights))
    assert not all(map(torch.equal, weights[0], make_model().parameters()))


# --- one history, one export


def test_a_callback_that_the_user_names_takes_the_place_of_our_own(tmp_path):
    mine = HistoryCallback({"dataset_name": "mine"})
    trainer = make_trainer(tmp_path)
    trainer.add_callback(mine)
    assert [one for one in trainer.callback_handler.callbacks if isinstance(one, HistoryCallback)] == [mine]
    trainer.train()
    assert steps_of(read_history(tmp_path / "history.jsonl")) == [1, 2]
    assert read_json(tmp_path / "settings.json")["dataset_name"] == "mine"


def test_the_callback_for_checkpoints_exports_each(tmp_path):
    trainer = make_trainer(tmp_path, save_steps=1)
    trainer.add_callback(DeploymentCheckpointCallback(trainer))
    trainer.train()
    folders = [tmp_path / name / "deployment" for name in ("checkpoint-1", "checkpoint-2", ".")]
    assert files_in(folders[1]) == files_in(folders[2]) != files_in(folders[0])


def test_the_best_weights_are_exported_as_those_of_their_step(tmp_path, capsys):
    trainer = make_trainer(tmp_path, **best_at_the_first_step())
    trainer.add_callback(DeploymentCheckpointCallback(trainer))
    trainer.train()
    contracts = [read_json(tmp_path / name / "deployment" / "dc_trl.json") for name in (".", "checkpoint-1")]
    assert contracts[0] == contracts[1]
    assert contracts[0]["step"] == 1
    capsys.readouterr()
    summarize(trainer)
    summary, (row,) = (
        read_json(tmp_path / "summary.json"),
        [r for r in trainer.state.log_history if r["step"] == 1][1:],
    )
    assert (summary["steps"], summary["after"]["reward"]) == (3, row["eval_reward"])
    assert "after step 1," in capsys.readouterr().out


# --- resumed, started again, stopped


def test_a_resumed_run_goes_on_with_its_history_and_replaces_its_deployment(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    make_trainer(whole, max_steps=4, save_steps=2).train()
    make_trainer(run, save_steps=2).train()
    half = files_in(run / "deployment")
    make_trainer(run, max_steps=4, save_steps=2).train(resume_from_checkpoint=True)
    assert [path.name for path in run.glob("*.1*")] == ["settings.1.json"]  # with the other max_steps
    assert steps_of(read_history(run / "history.jsonl")) == [1, 2, 3, 4]
    rows, expected = (untimed(read_history(folder / "history.jsonl")) for folder in (run, whole))
    assert rows == expected
    assert files_in(run / "deployment") == files_in(whole / "deployment") != half


@pytest.mark.parametrize("same_trainer", [True, False])
def test_a_second_run_in_the_same_directory_keeps_what_the_first_left(tmp_path, same_trainer, caplog):
    first = make_trainer(tmp_path)
    first.train()
    earlier = {name: (tmp_path / name).read_bytes() for name in OF_A_RUN - {"deployment"}}
    deployment = files_in(tmp_path / "deployment")
    (first if same_trainer else make_trainer(tmp_path, max_steps=1)).train()
    for name, content in earlier.items():
        stem, suffix = name.split(".")
        assert (tmp_path / f"{stem}.1.{suffix}").read_bytes() == content
    assert files_in(tmp_path / "deployment.1") == deployment
    assert files_in(tmp_path / "deployment") != deployment
    assert steps_of(read_history(tmp_path / "history.jsonl")) == ([1, 2] if same_trainer else [1])
    assert "deployment.1" in caplog.text


def test_folders_of_the_user_stay(tmp_path, caplog):
    for folder in (tmp_path / "deployment", tmp_path / "model" / "deployment"):
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    (tmp_path / "deployment.1").mkdir()
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "model")
    for kept, new in (("deployment.2", "deployment"), ("model/deployment.1", "model/deployment")):
        assert files_in(tmp_path / kept) == {"notes.txt": b"mine"}
        assert (tmp_path / new / "config.json").is_file()
    assert f"{tmp_path}/model/deployment " in caplog.text


def test_an_evaluation_begins_no_run(tmp_path):
    make_trainer(tmp_path, max_steps=1).train()
    before = {*os.listdir(tmp_path)}
    trainer = make_trainer(tmp_path)
    trainer.evaluate(make_prompts(4))
    assert {*os.listdir(tmp_path)} == before
    assert steps_of(read_history(tmp_path / "history.jsonl")) == [1]
    trainer.train()
    assert steps_of(read_history(tmp_path / "history.jsonl")) == [1, 2]
    assert steps_of(read_history(tmp_path / "history.1.jsonl")) == [1]


def test_what_cannot_be_exported_is_refused_before_the_first_step(tmp_path):
    model = random_model(GraniteMoeConfig, eos_token_id=1, **TWO_EXPERTS)
    trainer = make_trainer(tmp_path, model)
    with refuses(ValueError, "deployment_scheme='fp8'", "export_run=False"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "history.jsonl").exists()


def test_a_generation_config_that_transformers_does_not_write_is_refused_before_the_first_step(tmp_path):
    """A temperature without do_sample, as in some published models: an adapter's checkpoints do without the file."""
    model = make_model()
    model.generation_config.temperature = 0.6
    with refuses(ValueError, "generation_config", "temperature", "export_run=False"):
        make_trainer(tmp_path, model, deployment_scheme="fp8", export_run=True).train()


# --- signatures


@pytest.mark.parametrize(("ours", "theirs"), [(DCGRPOTrainer, GRPOTrainer), (AsyncDCGRPOTrainer, AsyncGRPOTrainer)])
def test_the_constructor_shows_what_trls_shows(ours, theirs):
    """A parameter that TRL adds, renames, moves or gives another default or type fails here by its name."""
    mine, trls = (list(inspect.signature(cls).parameters.values()) for cls in (ours, theirs))
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in trls]
    # Our configuration, and objects whose types TRL has protocols for.
    others = {"args", "rollout_func", "environment_factory", "rollout_worker", "weight_transfer"}
    names = vars(import_module(theirs.__module__)) | vars(torch.optim) | vars(torch.optim.lr_scheduler)
    names["Reward"] = names["RewardFunc"]
    for parameter, trl in zip(mine, trls, strict=True):
        if parameter.name not in others:
            assert type_of(parameter, names) == type_of(trl, names), parameter.name


def type_of(parameter, names):
    return eval(parameter.annotation, dict(names)) if isinstance(parameter.annotation, str) else parameter.annotation
