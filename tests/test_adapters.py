"""Going on from a trained adapter."""

import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from .helpers import (
    assert_same_weights,
    logged,
    make_model,
    make_trainer,
    save,
    tensors_in,
)


LORA = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained adapter of a model that is saved beside it; both folders."""
    folder, base = tmp_path_factory.mktemp("trained"), make_model()
    save(base, folder / "base")
    get_peft_model(base, LoraConfig(**LORA, init_lora_weights=False)).save_pretrained(folder / "adapter")
    return folder / "adapter", folder / "base"


def going_on(output_dir, trained, **fields):
    adapter, base = trained
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)
    return make_trainer(output_dir, model, **fields)


@pytest.mark.long
def test_a_run_from_an_adapter_is_resumed_with_its_reference(tmp_path, trained):
    """With beta the reference is the adapter that the run began with: in a resumed run too."""
    fields = {"learning_rate": 1e-2, "beta": 0.1, "max_steps": 3, "deployment_scheme": "bf16", "save_steps": 1}
    whole = going_on(tmp_path, trained, **fields)
    whole.train()
    assert logged(whole, "kl")[0] == pytest.approx(0.0, abs=1e-6)  # and not that to the base
    assert logged(whole, "kl")[-1] > 1e-4
    shutil.rmtree(tmp_path / "checkpoint-3")
    resumed = going_on(tmp_path, trained, **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed, "kl")[-1] == pytest.approx(logged(whole, "kl")[-1], rel=1e-5)
    assert_same_weights(whole.model, resumed.model)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_goes_on_in_python(tmp_path, trained, beta):
    adapter, base = trained
    fields = {"deployment_scheme": "fp8", "beta": beta, "max_steps": 2, "export_run": True}
    trainer = going_on(tmp_path / "run", trained, **fields)
    trainer.train()
    trainer.save_model()
    if beta:
        assert logged(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-6)
    saved, start = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "run", adapter))
    assert saved.keys() == start.keys()
    assert all(not torch.equal(saved[name], start[name]) for name in start)
    # What is deployed is the adapter that trained, and not the reference.
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    trainer.save_deployment(tmp_path / "deployment")
    expected = again.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    deployed, name = tensors_in(tmp_path / "deployment"), "model.layers.0.self_attn.q_proj.weight"
    found = deployed[name].float() * deployed[f"{name}_scale"].float()
    torch.testing.assert_close(found, expected, rtol=0.07, atol=1e-3)
