"""Deployable checkpoints: what transformers reads from them, and what a reader, a kill or a full disk can do."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GraniteMoeConfig,
    Qwen2MoeConfig,
)

from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.schemes import SCHEMES, resolve_scheme
from dc_trl.quantization.tensors import deployed_tensors
from dc_trl.sampling.replica import Replica

from .helpers import (
    DEEPSEEK,
    ROOT,
    TORCHRUN,
    TWO_EXPERTS,
    assert_same_tensors,
    files_in,
    make_experts,
    make_model,
    random_model,
    read_json,
    refuses,
    succeed,
    tensors_in,
    write_checkpoint,
)
from .test_replica import by_hand


@pytest.mark.parametrize(
    ("model", "scheme", "form"),
    [
        *((make_model(256), scheme, scheme) for scheme in SCHEMES if scheme != "bf16"),
        # For experts in INT8 and in blocks of FP8 transformers 5.17 has no conversion, and says so.
        (make_experts(), "fp8", "fp8"),
        (make_experts(), "int4", "int4_g32"),  # 64 columns are no 128
    ],
)
def test_transformers_loads_every_scheme_as_its_format_is_defined(tmp_path, model, scheme, form):
    write_checkpoint(model, scheme, tmp_path / "checkpoint")
    # compressed-tensors decompresses these formats to bfloat16.
    dtype = torch.bfloat16 if scheme in ("nvfp4", "nvfp4a16", "mxfp8") else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=dtype)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling the rounding to FP4 takes a minute
        loaded(torch.tensor([[5, 6, 7]]))  # decompresses on its first call
    for name, weight in model.named_parameters():
        mine, expected = loaded.get_parameter(name), weight.detach()
        if "experts" in name:  # in FP8 they arrive as bfloat16 numbers
            mine = mine.bfloat16()
            expected = torch.stack([by_hand(each, form) for each in expected]).bfloat16()
        else:
            expected = by_hand(expected, form) if name.endswith("proj.weight") else expected.bfloat16()
        assert torch.equal(mine.float(), expected.float()), name


EMBEDDING, HEAD = "embed_tokens", "lm_head"
ADAPTED_EMBEDDINGS = {
    "adapted head": {"target_modules": [HEAD]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": [EMBEDDING]},
    "one saved, one adapted": {"target_modules": [HEAD], "modules_to_save": [EMBEDDING]},
    "adapted as one": {"target_modules": [EMBEDDING], "ensure_weight_tying": True},
}


def adapted(setting):
    """A policy with tied embeddings whose adapter has moved; q_proj, where it is adapted at all, has not."""
    policy = get_peft_model(make_model(64), LoraConfig(r=4, task_type="CAUSAL_LM", **ADAPTED_EMBEDDINGS[setting]))
    torch.manual_seed(1)
    moved = set()
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and "q_proj" not in name and parameter.data_ptr() not in moved:
            moved.add(parameter.data_ptr())
            torch.nn.init.normal_(parameter, std=0.1)
    return policy.eval()


@torch.no_grad()
def as_it_computes(policy):
    """A model without adapters that computes what the policy does: embedding and head are read off their outputs."""
    model = make_model(64, tie_word_embeddings=False)
    model.load_state_dict(make_model(64).state_dict())
    base = policy.get_base_model()
    model.get_input_embeddings().weight.copy_(base.get_input_embeddings()(torch.arange(262)))
    model.get_output_embeddings().weight.copy_(base.get_output_embeddings()(torch.eye(64)).T)
    return model


@torch.no_grad()
def token_probabilities(model):
    tokens = torch.randint(2, 262, (4, 24), generator=torch.Generator().manual_seed(0))
    return model(input_ids=tokens).logits.float().softmax(-1)


@pytest.mark.parametrize("setting", ADAPTED_EMBEDDINGS)
def test_tied_embeddings_that_an_adapter_parts_are_deployed_as_the_policy_computes(tmp_path, setting):
    policy = adapted(setting)
    own, plain = token_probabilities(policy), as_it_computes(policy)
    torch.testing.assert_close(token_probabilities(plain), own, rtol=0, atol=1e-4)

    def engines(model, scheme, folder):
        """The replica, and what transformers loads of the export."""
        write_checkpoint(model, scheme, folder)
        yield Replica(model, scheme).model
        yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    for scheme in ("bf16", "fp8"):
        found, references = engines(policy, scheme, tmp_path / scheme), engines(plain, scheme, tmp_path / "plain")
        for model, reference in zip(found, references, strict=True):
            probabilities = token_probabilities(model)
            assert (probabilities - own).abs().max() < (0.03 if scheme == "bf16" else 0.15), (model, scheme)
            torch.testing.assert_close(probabilities, token_probabilities(reference), rtol=0, atol=0.02)
        tied = setting.endswith("as one")
        assert read_json(tmp_path / scheme / "config.json")["tie_word_embeddings"] == tied
        assert ("lm_head.weight" in tensors_in(tmp_path / scheme)) != tied


def test_experts_without_a_name_each_are_refused():
    model = random_model(GraniteMoeConfig, **TWO_EXPERTS)
    CheckpointWriter(model, "bf16")
    with refuses(ValueError, "deployment_scheme='fp8'", "GraniteMoe", "down_proj", "'bf16'"):
        CheckpointWriter(model, "fp8")


def test_a_shared_expert_is_quantized_and_its_gate_is_not(tmp_path):
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    model = random_model(Qwen2MoeConfig, shared_expert_intermediate_size=32, **experts)
    write_checkpoint(model, "fp8", tmp_path / "checkpoint")
    written = tensors_in(tmp_path / "checkpoint")
    block = "model.layers.0.mlp."
    assert written[f"{block}shared_expert.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert written[f"{block}shared_expert_gate.weight"].dtype == torch.bfloat16
    ignored = read_json(tmp_path / "checkpoint" / "config.json")["quantization_config"]["ignore"]
    assert set(ignored) == {"lm_head", f"{block}gate", f"{block}shared_expert_gate"}


@pytest.mark.long
def test_a_sharded_policy_is_scored_among_kept_tokens_and_an_adapted_one_not_deployed_without_vllm(tmp_path):
    succeed([*TORCHRUN, "-m", "tests.sharded_worker", str(tmp_path)])
    refusal = (tmp_path / "refusal").read_text()
    assert all(words in refusal for words in ("use_vllm=False", "FSDP2", "use_vllm=True"))
    # Truncated sampling: a softmax of the model in one piece over the whole vocabulary, with the other tokens at -inf.
    model, ids = make_model(64), torch.arange(20, 32).view(2, 6)
    dropped = torch.ones(2, 3, 262, dtype=torch.bool).scatter(2, ids[:, 3:, None], False)
    dropped[:, :, [7, 8]] = False
    logits = model(input_ids=ids).logits[:, 2:-1].masked_fill(dropped, -torch.inf)
    logps = logits.log_softmax(-1).gather(2, ids[:, 3:, None]).squeeze(2)
    logps.sum().backward()
    expected = logps.detach(), model.get_output_embeddings().weight.grad
    for process in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"kept_{process}.pt"), expected, atol=1e-5, rtol=1e-4)


def test_shards_hold_together_what_one_file_holds(tmp_path, monkeypatch):
    model = make_model(64)
    write_checkpoint(model, "fp8", tmp_path / "whole")
    monkeypatch.setattr("dc_trl.quantization.checkpoint._SHARD_BYTES", 30_000)
    write_checkpoint(model, "fp8", tmp_path / "sharded")
    files = sorted(file.name for file in (tmp_path / "sharded").glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 2
    assert_same_tensors(tensors_in(tmp_path / "whole"), tensors_in(tmp_path / "sharded"))
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name)(torch.tensor([[5, 6, 7]])).logits
        for name in ("whole", "sharded")
    )
    assert torch.equal(first, second)


@pytest.mark.long
def test_a_kill_leaves_the_old_checkpoint_and_the_next_write_clears_up(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(make_model(64, seed=0), "fp8", checkpoint)
    before = files_in(checkpoint)
    code = f"""
import time
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.tensors import policy_tensors
from tests.helpers import make_model, make_tokenizer
model = make_model(64, seed=1)
def slowly():
    for number, item in enumerate(policy_tensors(model)):
        if number == 10:
            print("half", flush=True)
            time.sleep(3600)  # until it is killed
        yield item
CheckpointWriter(model, "fp8", make_tokenizer()).write(slowly(), {str(checkpoint)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    (half,) = tmp_path.glob("*.partial")
    # While that process lives, another writer leaves its folder alone.
    write_checkpoint(make_model(64, seed=0), "fp8", checkpoint)
    assert half.exists()
    process.kill()
    process.wait()
    assert files_in(checkpoint) == before
    write_checkpoint(make_model(64, seed=2), "fp8", checkpoint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_full_disk_is_an_error_and_harms_nothing(small_disk):
    write_checkpoint(make_model(32), "bf16", small_disk / "checkpoint")
    before = files_in(small_disk / "checkpoint")
    with refuses(OSError, "No space left"):
        write_checkpoint(make_model(256), "bf16", small_disk / "checkpoint")
    assert files_in(small_disk / "checkpoint") == before
    assert [path.name for path in small_disk.iterdir()] == ["checkpoint"]


def test_a_file_in_the_way_is_not_overwritten(tmp_path):
    (tmp_path / "checkpoint").write_text("mine")
    with refuses(OSError, "checkpoint"):
        write_checkpoint(make_model(32), "bf16", tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint").read_text() == "mine"


@pytest.mark.parametrize("scheme", ["bf16", "fp8"])
def test_tensors_that_an_architecture_keeps_in_float32_stay_so(tmp_path, scheme):
    model = random_model(DeepseekV3Config, num_key_value_heads=2, first_k_dense_replace=0, **DEEPSEEK)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    biases = torch.tensor([28.0, 28.01, 28.02, 28.07])  # next to each other in bfloat16: 28 and 28.125
    model.state_dict()[name].copy_(biases)
    write_checkpoint(model, scheme, tmp_path / "checkpoint")
    stored = tensors_in(tmp_path / "checkpoint")
    assert torch.equal(stored[name], biases)
    assert stored["model.norm.weight"].dtype == torch.bfloat16
    # Under ZeRO-3 TRL gathers the parameters alone, and the bias is a buffer.
    plugin = SimpleNamespace(zero_stage=3)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin, unwrap_model=lambda each, **_: each
    )
    tensors = deployed_tensors(accelerator, model, model.named_parameters)
    CheckpointWriter(model, scheme).write(tensors, tmp_path / "gathered")
    assert_same_tensors(tensors_in(tmp_path / "gathered"), stored)


def test_fp8_of_weights_alone_is_refused_for_a_mixture():
    with refuses(ValueError, "deployment_scheme='fp8_w8a16'", "'fp8'"):
        resolve_scheme("fp8_w8a16", make_experts())
