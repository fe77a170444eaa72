"""Several processes: they are divided as they were asked to be, and they compute what one process computes."""

import math
import shutil
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dc_trl.command.arguments import ServerArguments, require_servable
from dc_trl.gate.before_loading import require_startable
from dc_trl.quantization.checkpoint import CheckpointWriter

from . import helpers
from .distribution_worker import RUNS, SAMPLED
from .gaps import PROMPTS, mean_gap
from .helpers import (
    TINY_MODEL,
    TWO_PROCESSES,
    TWO_SHARDED,
    at_server,
    distinct_characters,
    make_config,
    make_experts,
    make_model,
    make_tokenizer,
    read_json,
    refuses,
    save,
    succeed,
)
from .vllm_server import complete, requires_vllm, serving


ZERO = ["configs/accelerate/deepspeed_zero.yaml", "--num_processes", "2", "--mixed_precision", "no", "--zero_stage"]
LAUNCHERS = {
    "one process": [sys.executable],
    "MULTI_CPU": TWO_PROCESSES,
    # Recomputes activations, as on GPUs.
    "FSDP": [*TWO_SHARDED, "--fsdp_activation_checkpointing", "true"],
    "ZeRO-3": [*TWO_PROCESSES[:-1], *ZERO, "3"],
}
# What a launch of two is compared in.
COMPARED = {
    "MULTI_CPU": [
        "accumulated",
        "mini-batches",
        "a rank without a token",
        "a rank without a group",
        "the lag of an adapter",
    ],
    "FSDP": [
        "steps",
        "experts",
        "through the deployed forward",
        "the lag's part",
        "the lag of an adapter at a server",
        "streams",
    ],
    "ZeRO-3": ["rollouts"],
}
pytestmark = pytest.mark.timeout(900)  # the first test of a launcher waits for all its runs
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def runs_of(folder, names, launcher):
    command = [*launcher, "-m", "tests.distribution_worker", str(folder), *names]
    succeed(command, timeout=900)
    return read_json(folder / "logs.json")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder and the logs of the runs that are compared, by launcher."""
    found = {}

    def of(launcher):
        if launcher not in found:
            folder = tmp_path_factory.mktemp("runs")
            sampled = [*SAMPLED, "in bfloat16"] if launcher == "FSDP" else ()
            found[launcher] = folder, runs_of(folder, [*COMPARED.get(launcher, RUNS), *sampled], LAUNCHERS[launcher])
        return found[launcher]

    return of


def cases():
    for launcher, names in COMPARED.items():
        marks = [pytest.mark.long, *([needs_deepspeed] if launcher.startswith("ZeRO") else [])]
        for name in names:
            yield pytest.param(launcher, name, marks=marks, id=f"{launcher}: {name}")


@pytest.mark.parametrize(("launcher", "name"), cases())
def test_two_processes_compute_what_one_does(launched, launcher, name):
    single, double = (launched(each)[1][name] for each in ("one process", launcher))
    assert double["kind"] == ("DEEPSPEED" if launcher.startswith("ZeRO") else launcher)
    assert double["lambda"][0] == double["lambda"][1]
    # bfloat16 products tip numbers of a quantized forward into the next one.
    rough = {"through the deployed forward": 0.1}
    tolerance = rough.get(name, 1e-4)
    assert double["lambda"][0] == pytest.approx(single["lambda"][0], rel=tolerance)
    metrics = [metric for metric in single["rows"][0] if metric.startswith("discrepancy/")]
    assert len(metrics) == (19 if "the lag" in name else 14 if name == "accumulated" else 13)
    # Which completions share a mini-batch differs with the number of processes; the weights stand still there.
    trained = () if name == "mini-batches" else ("loss", "grad_norm", "reward")
    for expected, found in zip(single["rows"], double["rows"], strict=True):
        for metric in (*trained, *(metrics if "discrepancy/mean" in expected else ())):
            assert math.isfinite(found[metric])
            # The effective sample size has squares of the weights: twice their relative error.
            bound = 2 * tolerance if metric == "discrepancy/ess" else tolerance
            assert found[metric] == pytest.approx(expected[metric], rel=bound, abs=tolerance / 10), metric
    if "the lag" in name:
        assert single["rows"][0]["discrepancy/lag_k3_kl"] == 0
        assert min(row["discrepancy/lag_k3_kl"] for row in single["rows"][1:]) > 1e-5
    assert single["lambda"][0] != RUNS[name][0].get("lambda_init", 0.1)


@pytest.mark.long
def test_an_evaluation_whose_batches_are_uneven(launched):
    for name in ("steps", "experts", "streams"):
        single, double = (launched(each)[1][name]["evaluation"] for each in ("one process", "FSDP"))
        compared = [metric for metric in single if metric.startswith("eval_discrepancy/")]
        assert len(compared) == 13
        for metric in (*compared, "eval_reward"):
            assert double[metric] == pytest.approx(single[metric], rel=1e-3, abs=1e-5), metric


@pytest.mark.long
@pytest.mark.parametrize("name", ["steps", "experts", "in bfloat16"])
def test_what_two_processes_deploy_is_what_one_would_of_their_weights(launched, name, tmp_path):
    folder = launched("FSDP")[0] / name
    policy = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tensors = [*policy.named_parameters(remove_duplicate=False), *policy.named_buffers(remove_duplicate=False)]
    CheckpointWriter(policy, "fp8", make_tokenizer()).write(iter(tensors), tmp_path / "one")
    ours, theirs = (path / "model.safetensors" for path in (folder / "deployment", tmp_path / "one"))
    assert ours.read_bytes() == theirs.read_bytes()
    trained, start = load_file(folder / "model" / "model.safetensors"), make_model(64).state_dict()
    if name == "steps":
        assert all(not torch.equal(weight, start[key]) for key, weight in trained.items())


@pytest.mark.long
@requires_vllm
def test_an_adapter_that_two_processes_share_is_deployed_merged_as_by_one(launched):
    one, two = (
        load_file(launched(each)[0] / "the lag of an adapter at a server" / "deployment" / "model.safetensors")
        for each in ("one process", "FSDP")
    )
    start = make_model(64).state_dict()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=2**-7, atol=1e-4)  # the last bit of a number in bfloat16
        assert torch.equal(weight, start[name].bfloat16()) != name.endswith(("q_proj.weight", "v_proj.weight"))


@pytest.mark.long
def test_a_sharded_run_goes_on_with_as_many_processes_and_with_fewer(launched, tmp_path):
    folder, logs = launched("FSDP")
    whole, *others = (logs[name]["rows"] for name in SAMPLED)
    assert others == [whole] * 3
    assert not list((folder / "in shards" / "checkpoint-2").glob("*model*.safetensors"))
    assert [row["discrepancy/lag_mean"] > 0 for row in whole] == [False, True, True, False]
    for name in ("whole", "in shards"):
        shutil.copytree(folder / name, tmp_path / name)
    resumed = ["resumed", "resumed from shards"]
    fewer, from_shards = runs_of(tmp_path, resumed, [*LAUNCHERS["FSDP"], "--num_processes", "1"]).values()
    assert fewer == from_shards
    assert fewer["kind"] == "FSDP"
    assert [row["step"] for row in fewer["rows"]] == [1, 2, 3, 4]
    # The step after the checkpoint has its λ and its weights; what they sample is drawn anew.
    assert fewer["rows"][:2] == whole[:2]
    assert fewer["rows"][2]["lagrangian/lambda"] == whole[2]["lagrangian/lambda"]


@pytest.mark.long
def test_log_probabilities_stay_in_float32_where_the_policy_is_sharded_in_bfloat16(launched):
    assert set(launched("FSDP")[1]["in bfloat16"]["dtypes"]) == {"torch.float32"}


# --- what is refused ------------------------------------------------------------------------------------------------


def test_fsdp_in_one_process_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refuses(ValueError, "fsdp_version: 1", "accelerate"):
        make_config(tmp_path)
    monkeypatch.setenv("FSDP_VERSION", "2")
    with refuses(ValueError, "fsdp_version: 2", "Launch several processes"):
        make_config(tmp_path)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    with refuses(ValueError, "fsdp_version: 2", "accelerate"):
        make_config(tmp_path, fsdp=True)


@pytest.mark.parametrize(
    ("version", "adapter"),
    [
        ("2", LoraConfig()),  # whose reference is the base
        ("1", None),  # accelerate synchronizes all that FSDP1 wraps
    ],
)
def test_one_process_may_load_what_the_others_get(tmp_path, monkeypatch, version, adapter):
    """`test_refusals.py` has the models that they do not get."""
    given = {"model": str(TINY_MODEL), "reward_funcs": distinct_characters, "peft_config": adapter}
    given |= {"args": make_config(tmp_path, beta=0.1), "train_dataset": helpers.make_prompts(4)}
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": version}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    require_startable(**given)


def test_a_server_is_not_started_by_a_process_of_zero_3():
    fields = {"fsdp": None, "vllm_server_base_url": None, "vllm_server_base_urls": None, "use_vllm": True}
    fields |= {"vllm_mode": "server", "deepspeed_plugin": SimpleNamespace(zero_stage=3)}
    server = ServerArguments(serve="auto")
    require_servable(server, SimpleNamespace(**fields, deployment_scheme="bf16"))  # the server loads the model itself
    with refuses(ValueError, "ZeRO-3", "dc-trl serve --scheme fp8"):
        require_servable(server, SimpleNamespace(**fields, deployment_scheme="fp8"))


@pytest.mark.long
def test_a_run_that_saves_shards_leaves_a_model(tmp_path):
    """`SHARDED_STATE_DICT` is what accelerate saves under FSDP2 where nothing is said."""
    launch = [*LAUNCHERS["FSDP"], "--fsdp_state_dict_type", "SHARDED_STATE_DICT", "scripts/train.py"]
    options = {"config": "configs/quickstart.yaml", "max_steps": 2, "save_steps": 2, "eval_size": 0}
    options |= {"output_dir": tmp_path / "run", "per_device_train_batch_size": 16}
    succeed([*launch, *(f"--{name}={value}" for name, value in options.items())], timeout=600)
    assert not list((tmp_path / "run" / "checkpoint-2").glob("*.safetensors"))
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    served = load_file(tmp_path / "run" / "deployment" / "model.safetensors")
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(policy.state_dict()[name].to(torch.bfloat16), served[name], rtol=0, atol=0)
    # The launcher's whole checkpoints are of another form.
    options |= {"max_steps": 3, "resume_from_checkpoint": "true"}
    whole = [*LAUNCHERS["FSDP"], "scripts/train.py", *(f"--{name}={value}" for name, value in options.items())]
    with refuses(AssertionError, "--fsdp_state_dict_type SHARDED_STATE_DICT"):
        succeed(whole, timeout=600)


# --- with a real vLLM server ----------------------------------------------------------------------------------------


@pytest.mark.long
@requires_vllm
def test_a_server_gets_the_weights_of_experts(tmp_path):
    """In bf16, the only format in which vLLM's CPU engine runs a mixture of experts."""
    model, other = make_experts(), make_experts(seed=1)
    folder = save(model, tmp_path / "model")
    with serving(tmp_path, "--scheme", "bf16", "--max_model_len", "256", model=str(folder)) as server:
        url = server.url()
        trainer = helpers.make_trainer(tmp_path / "reload", other, **at_server(url) | {"vllm_server_timeout": 120.0})
        for _ in range(2):  # the first reload makes the kernels whose weights the second one has to reach
            trainer.vllm_generation.sync_weights()
        served = complete(url, PROMPTS, max_tokens=16)
    assert 10 * mean_gap(served, other, "bf16") < mean_gap(served, model, "bf16")
