"""`train_through_quantization` in the real trainer: what is left of δ̄, and that training is otherwise as it was."""

import itertools

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.run.deployment import DeploymentCheckpointCallback

from .helpers import (
    TWO_PROCESSES,
    On,
    assert_same_weights,
    logged,
    make_model,
    make_prompts,
    make_trainer,
    read_json,
    refuses,
    succeed,
    tiny_model,
)


def train(tmp_path, model=None, resume=None, **options):
    options = {"deployment_scheme": "fp8", "train_through_quantization": True} | options
    trainer = make_trainer(tmp_path, make_model(128) if model is None else model, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "fp8_block", "int8", "int3", "nvfp4", "nvfp4a16", "mxfp8"])
def test_nothing_is_left_of_the_replicas_mismatch(tmp_path, scheme):
    """The target of every scheme, over some optimizer steps; without the field it is a hundred times as much."""
    trainer = train(
        tmp_path,
        tiny_model(),
        train_dataset=arithmetic_dataset(32, 0, "train"),
        deployment_scheme=scheme,
        bf16=scheme == "int8",  # autocast, which TRL's default asks for, has no part in it
        per_device_train_batch_size=32,
        max_completion_length=24,
        learning_rate=1e-4,
    )
    assert len(logged(trainer, "discrepancy/mean")) == 3
    assert sum(logged(trainer, "discrepancy/mean")) / 3 <= 1e-5


def test_weights_alone_leave_the_part_of_the_activations(tmp_path):
    """Here in MXFP8; where a scheme quantizes weights alone, it is the same as training through all of it."""
    gaps = {}
    for scheme, through in itertools.product(("mxfp8", "nvfp4a16"), (False, "weights", "all")):
        trainer = train(
            tmp_path / f"{scheme} {through}",
            tiny_model(),
            train_dataset=arithmetic_dataset(16, 0, "train"),
            deployment_scheme=scheme,
            train_through_quantization=through,
            per_device_train_batch_size=16,
            max_completion_length=24,
            max_steps=1,
        )
        (gaps[scheme, through],) = logged(trainer, "discrepancy/mean")
    assert gaps["mxfp8", "all"] <= 1e-5 < 1e-4 < gaps["mxfp8", "weights"] < gaps["mxfp8", False]
    assert gaps["nvfp4a16", "weights"] == gaps["nvfp4a16", "all"] <= 1e-5 < 1e-3 < gaps["nvfp4a16", False]


def test_adapters(tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = train(tmp_path, peft_config=lora, per_device_train_batch_size=16, beta=0.1)
    assert max(logged(trainer, "discrepancy/mean")) <= 1e-4  # of a random policy, whose probabilities are wide apart
    assert max(logged(trainer, "kl")) > 0  # the policy without its adapter, through the same forward


def test_training_is_the_same(tmp_path):
    plain = train(tmp_path / "plain").model
    for option in ("gradient_checkpointing", "bf16"):
        assert_same_weights(train(tmp_path / option, **{option: True}).model, plain)


def test_masters_are_saved_and_a_resumed_run_goes_on_exactly(tmp_path):
    options = {"save_steps": 2, "max_steps": 4, "gradient_checkpointing": True}
    whole = train(tmp_path, **options)
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(weight, whole.model.get_parameter(name)) for name, weight in saved.items())
    assert any((weight != weight.bfloat16()).any() for weight in saved.values())
    resumed = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    assert_same_weights(resumed.model, whole.model)


def test_evaluation_computes_so_too(tmp_path):
    trainer = train(tmp_path, per_device_eval_batch_size=16)
    assert trainer.evaluate(make_prompts(16))["eval_discrepancy/mean"] <= 1e-4


@pytest.mark.long
def test_two_processes(tmp_path):
    succeed([*TWO_PROCESSES, "-m", "tests.aligned_worker", str(tmp_path)])
    gaps = read_json(tmp_path / "gaps.json")
    assert gaps.keys() == {f"{kind}, experts={experts}" for kind in ("FSDP2", "DDP") for experts in (False, True)}
    assert max(gaps.values()) <= 1e-6, gaps


def test_schemes_for_research_are_of_the_replica_alone(tmp_path):
    with refuses(ValueError, "deployment_scheme='int3'", "'bf16'"):
        CheckpointWriter(make_model(128), "int3")
    trainer = train(tmp_path, deployment_scheme="int2", max_steps=1)
    with refuses(ValueError, "deployment_scheme='int2'", "'bf16'"):
        DeploymentCheckpointCallback(trainer)


def test_what_a_gradient_needs_is_freed_before_the_optimizers_step(tmp_path):
    """Two activations of each layer, for gradient checkpointing."""
    seen = []

    def look(state, **kwargs):
        (end,) = trainer.parts[1].deployed._ends
        seen.append(len(end.__self__._entries))

    trainer = make_trainer(
        tmp_path, make_model(128), deployment_scheme="fp8", train_through_quantization=True, max_steps=1
    )
    trainer.add_callback(On("on_optimizer_step", look))
    trainer.train()
    assert seen == [0]
