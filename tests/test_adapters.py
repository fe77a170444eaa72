"""Going on from a trained adapter: by command and in Python, on its base and on no other."""

import json
import shutil
from contextlib import ExitStack

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from dc_trl import DCGRPOTrainer
from dc_trl.training.adapter import AdapterArguments, adapter_of, load_adapted
from dc_trl.training.arguments import RunArguments
from dc_trl.training.build import build_trainer

from .helpers import (
    ROOT,
    distinct_characters,
    logged,
    make_config,
    make_model,
    make_prompts,
    make_tokenizer,
)


LORA = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": ["q_proj", "down_proj"]}


def save_adapter(folder, base, **options):
    """A trained adapter of a model that is saved beside it; both folders."""
    base.save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(**LORA | options, init_lora_weights=False)
    )
    model.save_pretrained(folder / "adapter")
    return folder / "adapter", folder / "base"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(0)
    return save_adapter(tmp_path_factory.mktemp("trained"), make_model())


def edit(adapter, **values):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def reference_weights(adapter, base):
    """W + s·B·A of each adapted layer, by the files."""
    weights, lora = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in lora if "lora_A" in name]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{layer}.weight"] += 1.5 * lora[name.replace("lora_A", "lora_B")] @ lora[name]
    return weights


def run(tmp_path, *words, **settings):
    """The trainer that `dc-trl train` makes, trained."""
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    del config["model_name_or_path"]
    settings = {
        "output_dir": str(tmp_path / "run"),
        "deployment_scheme": "bf16",
        "eval_size": 0,
        "eval_strategy": "no",
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 8,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 3,
        "report_to": "none",
    } | settings
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config | settings))
    arguments = RunArguments.parse(["--config", str(tmp_path / "run.yaml"), *map(str, words)])
    with ExitStack() as stack:
        trainer, _ = build_trainer(arguments, stack)
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    return trainer


def test_a_command_goes_on_from_an_adapter_on_the_base_that_it_names(tmp_path, trained):
    adapter, base = trained
    trainer = run(tmp_path, "--adapter_name_or_path", adapter, max_steps=1, learning_rate=0.0)
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["adapter_name_or_path"] == str(adapter)
    deployed = load_file(tmp_path / "run" / "deployment" / "model.safetensors")
    for name, expected in reference_weights(adapter, base).items():
        torch.testing.assert_close(deployed[name].float(), expected.bfloat16().float(), rtol=1e-2, atol=1e-6)
    # At rate 0 the adapter stays as it was, and is trained: it alone has gradients.
    trainer.save_model()
    ours = load_file(tmp_path / "run" / "adapter_model.safetensors")
    theirs = load_file(adapter / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {name.split(".")[-3] for name, p in trainer.model.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }


@pytest.mark.long
def test_a_run_from_an_adapter_is_resumed_with_its_reference(tmp_path, trained):
    """With beta the reference is the adapter that the run began with: in a resumed run too."""
    fields = {"learning_rate": 1e-2, "beta": 0.1, "max_steps": 3}
    words = ["--adapter_name_or_path", trained[0]]
    whole = run(tmp_path, *words, **fields)
    assert logged(whole, "kl")[0] == pytest.approx(0.0, abs=1e-6)  # and not that to the base
    assert logged(whole, "kl")[-1] > 1e-4
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    resumed = run(tmp_path, *words, "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2", **fields)
    assert logged(resumed, "kl")[-1] == pytest.approx(logged(whole, "kl")[-1], rel=1e-5)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter), name


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_goes_on_in_python(tmp_path, trained, beta):
    adapter, base = trained
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)
    trainer = DCGRPOTrainer(
        model,
        distinct_characters,
        make_config(tmp_path / "run", deployment_scheme="fp8", beta=beta, max_steps=2, export_run=True),
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    trainer.save_model()
    if beta:
        assert logged(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-6)
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    start = load_file(adapter / "adapter_model.safetensors")
    assert saved.keys() == start.keys()
    assert all(not torch.equal(saved[name], start[name]) for name in start)
    # What is deployed is the adapter that trained, and not the reference.
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    trainer.save_deployment(tmp_path / "deployment")
    deployed = load_file(tmp_path / "deployment" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    expected = again.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    scale = load_file(tmp_path / "deployment" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight_scale"]
    torch.testing.assert_close(deployed.float() * scale.float(), expected, rtol=0.07, atol=1e-3)


def test_a_base_is_found_where_none_is_given(tmp_path, trained):
    adapter, base = trained
    shutil.copytree(adapter, tmp_path / "adapter")
    arguments = AdapterArguments(str(tmp_path / "adapter"))
    model = ModelConfig()
    assert adapter_of(arguments, model).r == 4
    assert model.model_name_or_path == str(base)
    edit(tmp_path / "adapter", base_model_name_or_path="Qwen/Qwen3-0.6B", revision="abc")
    model = ModelConfig()
    adapter_of(arguments, model)
    assert (model.model_name_or_path, model.model_revision) == ("Qwen/Qwen3-0.6B", "abc")


def test_the_adapters_own_configuration_counts(trained):
    assert adapter_of(AdapterArguments(str(trained[0])), ModelConfig(use_peft=True, lora_r=8)).r == 4


def cut_off(folder):
    path = folder / "adapter_config.json"
    path.write_text(path.read_text()[:50])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (cut_off, "cannot be loaded"),
        (lambda folder: edit(folder, peft_type="NEW"), "cannot be loaded"),
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            "has no adapter_model.safetensors: save the adapter again",
        ),
        (shutil.rmtree, "is no adapter, or cannot be loaded"),
    ],
)
def test_what_is_no_adapter_is_refused_in_one_line(tmp_path, trained, broken, words):
    folder = shutil.copytree(trained[0], tmp_path / "adapter")
    broken(folder)
    with pytest.raises(ValueError, match=words) as refused:
        adapter_of(AdapterArguments(str(folder)), ModelConfig())
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"hidden_size": 64}, "size mismatch"),
        ({"num_hidden_layers": 1}, "is in one of the two alone"),
        ({"num_hidden_layers": 3}, "is in one of the two alone"),
    ],
)
def test_an_adapter_of_another_model_is_refused(trained, base, words):
    with pytest.raises(ValueError, match=words) as refused:
        load_adapted(make_model(**base), "another", str(trained[0]))
    assert "does not fit model_name_or_path='another'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_adapter_of_modules_that_are_not_there_is_refused(tmp_path, trained):
    folder = shutil.copytree(trained[0], tmp_path / "adapter")
    edit(folder, target_modules=["wqkv"])
    with pytest.raises(ValueError, match="does not fit"):
        load_adapted(make_model(), "another", str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"0")
    with pytest.raises(ValueError, match="does not fit"):
        load_adapted(make_model(), "another", str(folder))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_other_adapters_go_on_too(tmp_path, options):
    adapter, base = save_adapter(tmp_path, make_model(tie_word_embeddings=False), **options)
    config = adapter_of(AdapterArguments(str(adapter)), ModelConfig())
    assert config.base_model_name_or_path == str(base)
    model = load_adapted(make_model(tie_word_embeddings=False), str(base), str(adapter))
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    saved = load_file(adapter / "adapter_model.safetensors")
    assert any("magnitude" in name or "lm_head" in name for name in saved)
    save_file(dict(list(saved.items())[1:]), adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="does not fit"):
        load_adapted(make_model(tie_word_embeddings=False), str(base), str(adapter))
