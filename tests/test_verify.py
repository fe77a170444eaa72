"""The contract of a deployed checkpoint, and whether a server serves what it says."""

import hashlib
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig

from dc_trl import DeploymentCheckpointCallback
from dc_trl.calibration.live_server import compare_hashes
from dc_trl.command import verify
from dc_trl.files import write_text
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.contract import digest, read_contract, read_tensors
from dc_trl.quantization.schemes import SCHEMES
from dc_trl.quantization.tensors import policy_tensors
from dc_trl.run.hub import run_files
from dc_trl.sampling.replica import Replica
from dc_trl.serving.client import ServerClient, Weights
from dc_trl.version import __version__

from .helpers import (
    logged,
    make_model,
    make_tokenizer,
    make_trainer,
    random_model,
    read_json,
    refuses,
    tiny_model,
)
from .stub_server import stub_server
from .vllm_server import requires_vllm


DOWN = "model.layers.1.mlp.down_proj"


def digests_by_hand(file):
    """By the format's own description: eight bytes of a length, a JSON header with offsets, and the tensors' bytes."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {name: hashlib.sha256(data[slice(*entry["data_offsets"])]).hexdigest() for name, entry in header.items()}


def test_every_deployment_of_a_run_says_what_it_is(tmp_path):
    trainer = make_trainer(tmp_path, deployment_scheme="fp8", export_run=True, save_steps=2, max_steps=3)
    trainer.add_callback(DeploymentCheckpointCallback(trainer))
    trainer.train()
    for folder, steps in (tmp_path / "deployment", 3), (tmp_path / "checkpoint-2" / "deployment", 2):
        contract = read_json(folder / "dc_trl.json")
        assert contract["sha256"] == digests_by_hand(folder / "model.safetensors")
        said = [contract[name] for name in ("scheme", "engine", "engine_version", "kv_cache_dtype", "step")]
        assert said == ["fp8", "replica", __version__, "bfloat16", steps]
        means = logged(trainer, "discrepancy/mean")[:steps]
        assert contract["discrepancy"]["value"] == pytest.approx(sum(means) / steps)
        assert contract["discrepancy"]["range"] == [min(means), max(means)]
        assert contract["k3_kl"]["logs"] == steps
    assert "deployment/dc_trl.json" in run_files(tmp_path)
    untrained = make_trainer(tmp_path / "untrained", deployment_scheme="fp8")
    untrained.save_deployment(tmp_path / "untrained" / "deployment")
    contract = read_contract(tmp_path / "untrained" / "deployment")
    assert contract["discrepancy"] is contract["k3_kl"] is None


def deploy(model, scheme, folder):
    CheckpointWriter(model, scheme, make_tokenizer()).write(policy_tensors(model), folder, {})
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replica_of_a_checkpoint_has_the_numbers_of_one_of_the_policy(tmp_path, scheme):
    model = make_model(256)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        read = Replica.of_checkpoint(deploy(model, scheme, tmp_path / "deployment"), scheme).model(ids).logits
        assert torch.equal(read, Replica(model, scheme).model(ids).logits)


def test_an_output_head_that_a_published_checkpoint_calls_by_another_name_is_read(tmp_path):
    """GPT-NeoX, as in Pythia: `embed_out` there is the module `lm_head`."""
    model = random_model(GPTNeoXConfig, tie_word_embeddings=False)
    read = Replica.of_checkpoint(deploy(model, "fp8", tmp_path / "deployment"), "fp8").model
    assert torch.equal(read.lm_head.weight, model.lm_head.weight.bfloat16())


def test_hashes_of_fused_transposed_and_padded_layers_are_the_checkpoints(tmp_path):
    """The layout of vLLM 0.32's CPU engine in FP8, in which /weight_checker was found to hash."""
    tensors = load_file(deploy(make_model(), "fp8", tmp_path / "deployment") / "model.safetensors")
    layer = "model.layers.{}.self_attn.".format
    served = {
        "model.embed_tokens.weight": torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(58, 32).bfloat16()])
    }
    for part in ("weight", "weight_scale"):
        for n in range(2):
            served[f"{layer(n)}qkv_proj.{part}"] = torch.cat(
                [tensors[f"{layer(n)}{p}_proj.{part}"] for p in "qkv"]
            ).t()
    served["model.norm.weight"] = tensors["model.norm.weight"]
    used = [name for name in tensors if "_proj" not in name or any(f".{p}_proj." in name for p in "qkv")]
    own = {name: tensors[name] for name in used if "layernorm" not in name and "_norm" not in name}

    def compared():
        return compare_hashes({f"dp0:pp0:pcp0:tp0:{name}": digest(tensor) for name, tensor in served.items()}, own)

    assert compared() == ([], [])
    served["model.norm.weight"] = served["model.norm.weight"] * 2
    served[f"{layer(1)}qkv_proj.weight_scale"] = served[f"{layer(1)}qkv_proj.weight_scale"] * 2
    assert set(compared()[0]) == {"model.norm.weight", f"{layer(1)}qkv_proj.weight_scale"}
    served["model.embed_tokens.weight"] = served["model.embed_tokens.weight"].flip(0)  # perhaps a kernel's layout
    assert compared()[1] == ["model.embed_tokens.weight"]


def test_what_a_hash_cannot_tell():
    """vLLM 0.32 keeps reciprocals of NVFP4's scales, and with tensor parallelism each process hashes its part; with
    data parallelism each has all."""
    own = {"model.norm.weight": torch.ones(4), "a.weight_global_scale": torch.tensor([4.0]), "a.bias": torch.ones(4)}
    right, other = ({name: digest(tensor * factor) for name, tensor in own.items()} for factor in (1.0, 2.0))
    norm, scale, bias = own

    def compared(*ranks):
        hashes = [{f"{rank}:{name}": hashed for name, hashed in found.items()} for rank, found in ranks]
        return compare_hashes({name: hashed for found in hashes for name, hashed in found.items()}, own)

    assert compared(("dp0:tp0", right | {scale: other[scale]})) == ([], [scale])
    parts = right | {bias: other[bias]}
    assert compared(("dp0:tp0", parts), ("dp0:tp1", parts)) == ([], [bias])
    for stale in (0, 1):
        assert compared(*((f"dp{n}:tp0", other if n == stale else right) for n in range(2)))[0] == [norm, scale, bias]


def test_versions_are_counted_for_a_server_without_them_until_it_is_restarted(capsys):
    with stub_server() as stub:
        stub.says = {"/weight_info": (404, "Not Found"), "/update_weight_version": (404, "Not Found")}
        client, again = ServerClient(stub.url), ServerClient(stub.url)
        assert capsys.readouterr().out.count("counts the versions") == 1
        client.hold(Weights("run-1", Path("anywhere")), reload=True)
        assert (client.weight_version(), again.weight_version()) == ("run-1", "default")
        stub.start = "2"  # restarted, with the weights of its own checkpoint
        assert client.weight_version() == "default"


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "fp8_w8a16", "int8", "int4", "nvfp4", "fp8+fp8_kv", "bf16+fp8_kv"])
def test_a_contract_of_another_scheme_and_a_second_file_of_weights_are_refused(tmp_path, scheme):
    folder = deploy(make_model(256), scheme, tmp_path / "deployment")
    contract = read_contract(folder)
    others = {"bf16", "fp8", "fp8_w8a16", "fp8_block", "int8", "int4", "nvfp4", "nvfp4a16", "mxfp8", "fp8+fp8_kv"}
    for other in others - {scheme}:
        write_text(folder / "dc_trl.json", json.dumps(contract | {"scheme": other}))
        with refuses(ValueError, f"scheme={other!r}"):
            read_contract(folder)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    with refuses(ValueError, "model.safetensors", "remove"):
        read_tensors(folder)


def test_what_cannot_be_asked_is_not_told_apart_from_a_difference(tmp_path, capsys):
    folder = deploy(make_model(), "bf16", tmp_path / "deployment")
    nobody = "http://127.0.0.1:9"  # the port of "discard", where nothing listens
    for place, named in ((folder, nobody), (tmp_path, "dc_trl.json")):
        assert verify.main([nobody, str(place)]) == 2
        assert named in capsys.readouterr().err


@requires_vllm
def test_a_server_is_told_from_one_with_other_weights(fp8_server, tmp_path, capsys):
    client = ServerClient(fp8_server.url)
    model = tiny_model()
    own = deploy(model, "fp8", tmp_path / "own")
    client.hold(Weights("own", own), reload=True)
    assert verify.main([fp8_server.url, str(own)]) == 0
    assert "no proof" in capsys.readouterr().out
    shutil.copytree(own, tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    tensors[f"{DOWN}.weight_scale"][7] *= 1.001
    save_file(tensors, tmp_path / "changed" / "model.safetensors")
    assert verify.main([fp8_server.url, str(tmp_path / "changed")]) == 1
    assert f": {DOWN}.weight_scale was changed." in capsys.readouterr().out
    torch.manual_seed(0)
    weight = model.get_submodule(DOWN).weight
    weight.data.mul_(1 + 0.01 * torch.randn(weight.shape))
    assert verify.main([fp8_server.url, str(deploy(model, "fp8", tmp_path / "other"))]) == 1
    assert "serves other weights" in capsys.readouterr().out
