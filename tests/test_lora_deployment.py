"""An adapter beside its quantized base (`lora_deployment="adapter"`): replica, aligned forward, server, files."""

import shutil
from functools import partial

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from dc_trl.quantization.adapter import beside_base
from dc_trl.quantization.contract import read_contract
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.run.hub import run_files
from dc_trl.sampling.replica import Replica
from dc_trl.serving.client import ServerClient, Weights
from dc_trl.serving.errors import ServerError
from dc_trl.serving.fit import check_server
from dc_trl.settings.paths import serve_line
from dc_trl.settings.pretrained import load_config_and_tokenizer

from . import helpers
from .gaps import PROMPTS
from .helpers import (
    TINY_MODEL,
    assert_same_tensors,
    assert_same_weights,
    at_server,
    logged,
    make_model,
    refuses,
    tensors_in,
    tiny_model,
)
from .vllm_server import complete, requires_vllm, serving


IDS = torch.arange(3, 67).view(2, 32)


def adapted(base=None, **options):
    lora = {"r": 8, "lora_alpha": 12, "lora_dropout": 0.0, "target_modules": ["q_proj", "o_proj", "down_proj"]}
    base = make_model(64) if base is None else base
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(**lora | {"init_lora_weights": False} | options))


def make_trainer(folder, policy=None, **fields):
    settings = {"deployment_scheme": "int4_g32", "lora_deployment": "adapter", "export_run": True}
    return helpers.make_trainer(folder, adapted() if policy is None else policy, **settings | fields)


def probabilities(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits.float().softmax(-1)


def gap(one, other):
    return (one - other).abs().sum(-1).mean().item() / 2


def with_weights_of(replica):
    """The random model with the numbers that a replica of it in a scheme without activations holds."""
    quantized = make_model(64)
    weights = {name: value.float() for name, value in replica.model.state_dict().items() if "lora" not in name}
    quantized.load_state_dict(weights)
    return quantized


@requires_vllm
def test_the_product_is_vllms():
    """vLLM's own operators on a CPU, with the scale merged into B as its loader does."""
    from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_shrink

    torch.manual_seed(0)
    x, a, b = torch.randn(5, 64).bfloat16(), torch.randn(8, 64), torch.randn(32, 8)
    low, output, rows = torch.zeros(5, 8), torch.zeros(5, 32, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.long)
    bgmv_shrink(x, a.bfloat16()[None], low, rows, 1.0)
    bgmv_expand(low, (b.bfloat16() * 1.3)[None], output, rows, True)
    torch.testing.assert_close(beside_base(x, a, b, 1.3), output, rtol=2**-7, atol=1e-3)


def test_the_replica_adds_the_adapter_to_the_quantized_base():
    """By PEFT's own forward on the quantized weights."""
    policy = adapted()
    replica = Replica(policy, "int4_g32", lora_deployment="adapter")
    expected = probabilities(adapted(with_weights_of(Replica(make_model(64), "int4_g32"))))
    merged = probabilities(Replica(policy, "int4_g32").model)
    assert gap(probabilities(replica.model), expected) < 0.2 * gap(merged, expected)
    with torch.no_grad():  # the next synchronization brings the adapter, and leaves the base as it is
        for name, parameter in policy.named_parameters():
            parameter.mul_(1.5 if "lora" in name else 0.0)
    replica.sync(policy)
    other = adapted(with_weights_of(replica))
    for name, parameter in other.named_parameters():
        parameter.data.mul_(1.5 if "lora" in name else 1.0)
    assert gap(probabilities(replica.model), probabilities(other)) < 0.2 * gap(probabilities(other), expected)


@pytest.mark.parametrize("scheme", ["int4_g32", "fp8", "mxfp8"])
def test_the_aligned_forward_is_the_replicas(scheme):
    policy = adapted()
    with DeployedForward(policy, scheme, lora_deployment="adapter").active():
        replica = Replica(policy, scheme, lora_deployment="adapter")
        assert torch.equal(probabilities(policy), probabilities(replica.model))
        policy(input_ids=IDS).logits.float().log_softmax(-1)[..., 5].sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in policy.named_parameters() if "lora" in name}
    assert all(parameter.grad.abs().sum() > 0 for parameter in policy.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: make_model(64), "no adapter"),
        (lambda: adapted(modules_to_save=["embed_tokens"]), "embed_tokens"),
        (lambda: adapted(target_modules=["embed_tokens", "q_proj"]), "embed_tokens"),
        (lambda: adapted(use_dora=True), "use_dora"),
        (lambda: adapted(bias="lora_only"), "bias='none'"),
        (lambda: adapted(rank_pattern={"q_proj": 4}), "rank_pattern"),
        (lambda: adapted(r=513), "lora_r=513"),
    ],
)
def test_what_vllm_does_not_serve_is_refused_before_an_engine_is_built(tmp_path, model, named):
    with refuses(ValueError, "lora_", named):
        make_trainer(tmp_path, model())


def test_base_and_adapter_are_deployed_and_pushed(tmp_path):
    trainer = make_trainer(tmp_path, train_through_quantization=True)
    trainer.train()
    assert max(logged(trainer, "discrepancy/mean")) < 2e-3  # the aligned forward: the order of sums is left
    folder = tmp_path / "deployment"
    base, adapter = tensors_in(folder), tensors_in(folder / "adapter")
    alone = Replica(make_model(64), "int4_g32")
    assert not [name for name in base if "lora" in name]
    assert {value.dtype for value in adapter.values()} == {torch.bfloat16}
    assert read_contract(folder)["sha256"].keys() == base.keys() | adapter.keys()
    with refuses(ValueError, "--lora-modules"):  # without its adapter it is another policy
        load_config_and_tokenizer(str(folder))
    again = Replica.of_checkpoint(folder, "int4_g32")
    assert_same_tensors(again.model.state_dict(), alone.model.state_dict())
    # PEFT loads it; its forward is that of the replica which sampled.
    loaded = PeftModel.from_pretrained(with_weights_of(alone), folder / "adapter")
    trainer.replica.sync(trainer.model)
    assert gap(probabilities(loaded), probabilities(trainer.replica.model)) < 0.02
    pushed = {f"deployment/adapter/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")}
    assert pushed <= {*run_files(tmp_path)}
    options = f"--enable-lora --max-lora-rank 8 --lora-modules policy={folder}/adapter"
    assert serve_line(folder) == f"vllm serve {folder} {options}"


def require_the_same_resumed(make, folder):
    fields = {"weight_sync_steps": 3, "max_steps": 5, "save_steps": 2, "export_run": False}
    whole = make(folder, **fields)
    whole.train()
    resumed = make(folder, **fields)
    shutil.rmtree(folder / "checkpoint-4")
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "discrepancy/mean")[2:] == logged(whole, "discrepancy/mean")[2:]
    assert_same_weights(whole.model, resumed.model)


def test_a_resumed_run_samples_with_the_same_older_adapter(tmp_path):
    require_the_same_resumed(make_trainer, tmp_path)


# --- a real server --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--scheme", "fp8", "--max_model_len", "256", "--", "--enable-lora", "--max-lora-rank", "8")
    with serving(tmp_path_factory.mktemp("lora"), *options) as it:
        it.url = it.url()
        yield it


def at(server, folder, base=None, **fields):
    base = base or tiny_model()
    fields = {"max_completion_length": 24, "learning_rate": 3e-3, "export_run": False, "max_steps": 4} | fields
    fields = at_server(server.url) | {"vllm_server_timeout": 60.0, "deployment_scheme": "fp8"} | fields
    return make_trainer(folder, adapted(base, init_lora_weights=True), **fields)


def distance(server, model, policy):
    """Mean |Δp| of sampled tokens between what the server calls by a name and a replica of the policy."""
    replica, gaps = Replica(policy, "fp8", lora_deployment="adapter").model, []
    for prompt, done in zip(PROMPTS, complete(server.url, PROMPTS, model=model, max_tokens=16), strict=True):
        chosen = probabilities(replica, torch.tensor([prompt + done["ids"]]))[0, len(prompt) - 1 : -1]
        chosen = chosen.gather(1, torch.tensor(done["ids"])[:, None])[:, 0]
        gaps += (chosen - torch.tensor(done["logps"]).exp()).abs().tolist()
    return sum(gaps) / len(gaps)


@requires_vllm
@pytest.mark.long
def test_the_adapter_alone_goes_to_a_server(server, tmp_path):
    trainer = at(server, tmp_path, train_through_quantization=True)
    trainer.train()
    adapter = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert all(2 * adapter < size < 2 * adapter + 20_000 for size in logged(trainer, "sync/bytes_written"))
    assert max(logged(trainer, "discrepancy/mean")) < 3e-3  # without the aligned forward 0.02
    trainer.vllm_generation.sync_weights()
    version = trainer.vllm_generation.weight_version
    assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == version
    names = [each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert names[1:] == [version]
    present = distance(server, version, trainer.model)
    assert present < 0.2 * distance(server, names[0], trainer.model)
    # A server that lost base and adapter gets both again.
    broken = tmp_path / "broken"
    shutil.copytree(trainer.vllm_generation.checkpoint.parent / "base", broken)
    weights = load_file(broken / "model.safetensors")
    weights |= {name: torch.zeros_like(value) for name, value in weights.items() if "norm" in name}
    save_file(weights, broken / "model.safetensors")
    trainer.vllm_generation.vllm_client.hold(Weights("default", broken), reload=True)
    assert distance(server, version, trainer.model) > 5 * present
    trainer.vllm_generation.generate(PROMPTS, None, 1)
    assert distance(server, version, trainer.model) < 2 * present
    # A run with another base brings it, whatever the server was started with.
    base = tiny_model()
    for parameter in base.parameters():
        parameter.data.mul_(1.1)
    second = at(server, tmp_path / "second", base)
    second.vllm_generation.sync_weights()
    version = second.vllm_generation.weight_version
    assert distance(server, version, second.model) < 0.2 * distance(server, version, trainer.model)


@requires_vllm
@pytest.mark.long
def test_a_run_on_a_server_resumes_with_the_same_older_adapter(server, tmp_path):
    require_the_same_resumed(partial(at, server), tmp_path)


@requires_vllm
@pytest.mark.long
def test_a_server_that_does_not_take_the_adapter_is_refused(fp8_server, server, tmp_path):
    with refuses(ServerError, "--enable-lora"):
        at(fp8_server, tmp_path)
    client = ServerClient(server.url)
    info, layers = client.get_server_info(), client.layers()
    needs = {"scheme": "fp8", "max_length": 256, "weight_sync": "checkpoint", "lora_rank": 8}
    config = AutoConfig.from_pretrained(TINY_MODEL)
    check_server(info, layers, config=config, **needs)
    info["parallel_config"]["_api_process_count"] = 2  # as vLLM says with --api-server-count 2
    with refuses(ServerError, "--api-server-count 1"):
        check_server(info, layers, config=config, **needs)
    policy = adapted(tiny_model(), r=16)
    with refuses(ServerError, "rank 16"):
        make_trainer(tmp_path, policy, **at_server(server.url) | {"deployment_scheme": "fp8"})
