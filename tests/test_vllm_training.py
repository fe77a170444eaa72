"""Training with rollouts of a real vLLM server: whose weights sample, what is exported, what faults do."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.generation import vllm_generation

from dc_trl import DeploymentCheckpointCallback
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.sampling.engines import build_vllm
from dc_trl.sampling.vllm_backends import ColocateGeneration
from dc_trl.serving.errors import ServerError
from dc_trl.serving.server import VLLMServer

from . import helpers
from .gaps import PROMPTS, SampledBy, mean_gap
from .helpers import (
    ROOT,
    TINY_MODEL,
    TWO_SHARDED,
    Watch,
    assert_finite,
    assert_same_tensors,
    at_server,
    best_at_the_first_step,
    completion_logits,
    files_in,
    logged,
    make_experts,
    make_model,
    make_tokenizer,
    read_json,
    refuses,
    succeed,
    takes_minutes,
    tensors_in,
    tiny_model,
)
from .stub_server import Router, stub_server
from .vllm_server import complete, engine_processes, requires_vllm, shared_memory, wait_until_gone


pytestmark = requires_vllm

ADAPTER = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


def make_trainer(url, output_dir, model=None, **overrides):
    fields = at_server(url) | {"vllm_server_timeout": 120.0, "vllm_request_timeout": 120.0, "deployment_scheme": "fp8"}
    fields |= {"max_completion_length": 24, "learning_rate": 1e-3}
    model = model or tiny_model()
    return helpers.make_trainer(output_dir, model, **fields | overrides)


def test_every_step_samples_with_the_present_weights(fp8_server, tmp_path):
    trainer = make_trainer(fp8_server.url, tmp_path, max_steps=3, learning_rate=3e-3)
    sampled_by = SampledBy("fp8", lambda: complete(fp8_server.url, PROMPTS, max_tokens=16))
    trainer.add_callback(sampled_by)
    trainer.train()
    assert_finite(trainer)
    assert len(logged(trainer, "discrepancy/mean")) == 3
    assert len(set(logged(trainer, "lagrangian/lambda"))) > 1
    for present, stale in sampled_by.gaps:
        assert stale > 3 * present


@pytest.mark.parametrize("kind", ["all weights", "adapter"])
def test_the_lag_is_what_the_weights_did_whatever_the_server_computes(fp8_server, tmp_path, kind):
    """In step the server's own part alone is there; with a lag it stays, and another copy's forwards give the rest."""

    def policy():
        torch.manual_seed(0)
        return get_peft_model(tiny_model(), ADAPTER) if kind == "adapter" else tiny_model()

    options = {"weight_sync_steps": 3, "max_steps": 4, "learning_rate": 3e-3, "constraint": "none"}
    trainer = make_trainer(fp8_server.url, tmp_path, policy(), discrepancy_split=True, **options)
    watch = Watch(trainer)
    trainer.train()
    assert logged(trainer, "sync/age") == [0, 1, 2, 0]
    lags = watch.compared_lags(policy(), 1e-4)
    assert min(lag.abs().max() for lag in lags) > 0.05
    lag, engine = (logged(trainer, f"discrepancy/{part}_k3_kl") for part in ("lag", "engine"))
    assert (lag[0], lag[3]) == (0, 0)
    assert min(lag[1:3]) > max(engine)


def test_the_best_weights_reach_the_server_when_they_are_loaded_at_the_end(fp8_server, tmp_path):
    trainer = make_trainer(fp8_server.url, tmp_path, learning_rate=3e-3, **best_at_the_first_step())
    trainer.train()
    assert trainer.state.best_global_step == 1
    trainer.evaluate()
    served = complete(fp8_server.url, PROMPTS, max_tokens=16)
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3", dtype=torch.float32)
    assert mean_gap(served, last, "fp8") > 3 * mean_gap(served, trainer.model, "fp8")


def test_an_adapter_reaches_the_server(fp8_server, tmp_path):
    model = get_peft_model(tiny_model(), ADAPTER)
    trainer = make_trainer(fp8_server.url, tmp_path, model, max_steps=4, learning_rate=1e-2)
    trainer.train()
    for name in ("bytes_written", "write_seconds", "reload_seconds"):
        assert all(logged(trainer, f"sync/{name}"))
    # The server holds what a checkpoint holds that is written at once.
    trainer.save_deployment(tmp_path / "deployment")
    trainer.vllm_generation.sync_weights()
    sampled = complete(fp8_server.url, PROMPTS, max_tokens=16)
    assert mean_gap(sampled, tiny_model(), "fp8") > 3 * mean_gap(sampled, trainer.model, "fp8")
    served, exported = (tensors_in(path) for path in (trainer.vllm_generation.checkpoint, tmp_path / "deployment"))
    assert_same_tensors(served, exported)


def test_truncated_sampling_is_corrected_by_what_the_server_names(fp8_server, tmp_path):
    trainer = make_trainer(fp8_server.url, tmp_path, max_steps=2, top_k=6, top_p=0.9, temperature=1.5)
    trainer.train()
    assert max(logged(trainer, "discrepancy/log_ppl_abs_diff")) < 0.05
    assert max(logged(trainer, "discrepancy/mean")) < 0.03  # at this temperature the policy is unsure
    # Beside it, the same server's whole distribution after each prompt, truncated by hand.
    trainer.vllm_generation.max_completion_length = 1
    trainer.vllm_generation.sync_weights()
    _, ids, logps, _ = trainer.vllm_generation.generate(PROMPTS, None, 1)
    for prompt, (token,), ((value,),) in zip(PROMPTS, ids, logps, strict=True):
        request = {"max_tokens": 1, "temperature": 1.5, "logprobs": 262, "return_tokens_as_token_ids": True}
        body = {"model": trainer.vllm_generation.vllm_client.model, "prompt": [prompt], "top_k": 0, "top_p": 1.0}
        answer = httpx.post(f"{fp8_server.url}/v1/completions", json=body | request, timeout=120).json()
        named = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        whole = sorted(((value, int(name.removeprefix("token_id:"))) for name, value in named.items()), reverse=True)
        probs = torch.tensor([value for value, _ in whole[:6]]).softmax(0)
        size = int((probs.cumsum(0) - probs < 0.9).sum())
        kept = [token for _, token in whole[:size]]
        assert token in kept
        expected = (probs[:size] / probs[:size].sum()).log()[kept.index(token)]
        assert value == pytest.approx(expected.item(), abs=1e-4)
    assert trainer.deployed_completions(["12+34="])  # greedy: what is kept is of no matter


def test_completions_that_the_server_ends_at_a_text_are_not_cut_off(fp8_server, tmp_path):
    """The tiny model writes steps that end with a semicolon."""
    rows = arithmetic_dataset(8, 0, "train")
    fields = {"generation_kwargs": {"stop": [";"]}, "mask_truncated_completions": True, "recipe": "trl"}
    fields |= {"reward": lambda completions, **_: [float(number % 2) for number in range(len(completions))]}
    trainer = make_trainer(fp8_server.url, tmp_path, train_dataset=rows, max_steps=2, **fields)
    batches = Watch(trainer).batches
    trainer.train()
    semicolon = trainer.processing_class.convert_tokens_to_ids(";")
    for batch in batches:
        counted = batch["completion_mask"] * batch["tool_mask"]
        last = [ids[counts.bool()][-1:].tolist() for ids, counts in zip(batch["completion_ids"], counted, strict=True)]
        assert last == [[semicolon]] * len(last)
    assert max(logged(trainer, "completions/clipped_ratio")) == 0
    assert min(logged(trainer, "grad_norm")) > 0


@pytest.mark.parametrize(
    "fields", [{"score_centering_top_k": 262}, {"score_centering_top_k": 6}, {"top_k": 6}], ids=str
)
def test_the_score_is_centred_by_what_the_server_names(fp8_server, tmp_path, seen_by_the_loss, fields):
    """A step of SGD with the rate 1 moves by the formula's gradient, with q from the named tokens of the batch."""
    options = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "temperature": 1.5}
    options |= {"constraint": "none", "score_centering": True, "length_aware_batches": False}
    trainer = make_trainer(fp8_server.url, tmp_path, steps_per_generation=1, **options | fields)
    trainer.train()
    (batch,) = seen_by_the_loss
    ids, counts, logps = (batch[f"named_{kind}"] for kind in ("ids", "counts", "logps"))
    scored, sampled = batch["completion_mask"].bool(), batch["completion_ids"].unsqueeze(-1)
    model = tiny_model()
    assert (counts[scored] == min(model.config.vocab_size, *fields.values())).all()
    logits = completion_logits(model, batch) / 1.5
    q = torch.zeros_like(logits)
    for row in range(len(sampled)):
        positions = torch.arange(len(counts[row])).repeat_interleave(counts[row])
        held = ids[row] >= 0
        q[row, positions, ids[row][held].long()] = logps[row][held].exp()
    of_head = q > 0
    if "top_k" in fields:
        logits = logits.masked_fill(~of_head & scored.unsqueeze(-1), -1e9)
    log_p = logits.log_softmax(-1)
    p = log_p.detach().exp()
    tail = (1 - q.sum(-1)).clamp(min=0) / (1 - (p * of_head).sum(-1)).clamp(min=1e-6)
    mean = (((q - tail.unsqueeze(-1) * p) * of_head).detach() * log_p).sum(-1)
    terms = -batch["advantages"].unsqueeze(1) * (log_p.gather(-1, sampled).squeeze(-1) - mean) * scored
    (terms.sum(-1) / scored.sum(-1)).mean().backward()
    held = of_head.gather(-1, sampled).squeeze(-1) & scored
    of_named = q.gather(-1, sampled).squeeze(-1)[held].log()
    torch.testing.assert_close(of_named, batch["sampling_per_token_logps"][held], rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        moved = (parameter - trainer.model.get_parameter(name)).detach()
        torch.testing.assert_close(moved, parameter.grad, rtol=1e-2, atol=2e-3 * parameter.grad.abs().max().item())


@pytest.mark.long
def test_a_killed_run_leaves_no_weights_and_comes_to_the_same_ones_when_it_is_resumed(fp8_server, tmp_path):
    options = {"max_steps": 4, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "max_completion_length": 24}
    options |= {"save_steps": 2}
    killed = options | {"output_dir": str(tmp_path / "killed"), "kill_at": 3, "server": fp8_server.url}
    done = subprocess.run([sys.executable, "-m", "tests.worker", json.dumps(killed)], cwd=ROOT, timeout=280)
    assert done.returncode == -signal.SIGKILL
    left = sync_folder(tmp_path / "killed")
    assert left.parent == Path("/dev/shm")
    assert left.exists()  # the next run on this machine removes it

    def digest(output_dir, checkpoint=None):
        trainer = make_trainer(fp8_server.url, output_dir, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.vllm_generation.checkpoint.is_dir()
        trainer.save_model(str(output_dir / "end"))
        return hashlib.sha256((output_dir / "end" / "model.safetensors").read_bytes()).hexdigest()

    first = digest(tmp_path / "first")
    assert not left.exists()
    assert digest(tmp_path / "killed", str(tmp_path / "killed" / "checkpoint-2")) == first
    untrained = hashlib.sha256((tmp_path / "first" / "checkpoint-2" / "model.safetensors").read_bytes()).hexdigest()
    assert untrained != first


@pytest.mark.long
def test_what_samples_is_what_ships(fp8_server, tmp_path):
    """The exported checkpoint in a fresh plain server says what the training server said, token for token."""
    trainer = make_trainer(fp8_server.url, tmp_path, max_steps=4, save_steps=2, learning_rate=1e-3)
    trainer.add_callback(DeploymentCheckpointCallback(trainer))
    trainer.train()
    trainer.vllm_generation.sync_weights()
    exported = tmp_path / "deployment"
    synchronized = trainer.vllm_generation.checkpoint
    contract = read_json(exported / "dc_trl.json")
    version = httpx.get(f"{fp8_server.url}/version").json()["version"]
    assert (contract["engine"], contract["engine_version"]) == ("vllm", version)
    held = files_in(synchronized)
    assert files_in(exported) == held | {"dc_trl.json": (exported / "dc_trl.json").read_bytes()}
    assert "dc_trl.json" not in held
    assert (tmp_path / "checkpoint-2" / "deployment" / "model.safetensors").is_file()
    questions = arithmetic_dataset(64, seed=1, split="held_out")["prompt"][:]
    prompts = make_tokenizer().apply_chat_template(questions, add_generation_prompt=True)["input_ids"]
    trained = complete(fp8_server.url, prompts, max_tokens=48, temperature=0)
    with VLLMServer(exported, max_model_len=256, log_path=tmp_path / "log") as fresh:
        shipped = complete(fresh.url, prompts, max_tokens=48, temperature=0)
    assert [choice["ids"] for choice in trained] == [choice["ids"] for choice in shipped]
    for first, second in zip(trained, shipped, strict=True):
        assert first["logps"] == pytest.approx(second["logps"], abs=1e-3)
    assert 3 * mean_gap(shipped, trainer.model, "fp8", prompts) < mean_gap(shipped, tiny_model(), "fp8", prompts)


def load_into(url, checkpoint):
    """Another client gives the server other weights."""
    request = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
    assert httpx.post(f"{url}/collective_rpc", json=request, timeout=60).status_code == 200
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=60).json()["success"]


def test_nan_from_the_server_is_repaired_by_loading_the_weights_again(fp8_server, tmp_path, caplog):
    trainer = make_trainer(fp8_server.url, tmp_path)
    trainer.vllm_generation.sync_weights()
    broken = tmp_path / "broken"
    shutil.copytree(trainer.vllm_generation.checkpoint, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    load_into(fp8_server.url, broken)
    _, _, logps, _ = trainer.vllm_generation.generate(PROMPTS, None, 1)
    assert all(value < 0.001 for completion in logps for (value,) in completion)
    assert "computed NaN" in caplog.text
    # A policy that is broken itself cannot be repaired: the run ends, and says so.
    trainer.model.model.norm.weight.data.fill_(float("nan"))
    client = trainer.vllm_generation.vllm_client
    client.patience = client.patience._replace(max_retries=1)
    trainer.vllm_generation.sync_weights()
    with refuses(ServerError, fp8_server.url, "NaN", "2 times"):
        trainer.vllm_generation.generate(PROMPTS, None, 1)


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, action):
        self._step, self._action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._action()


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def sync_folder(output_dir):
    """Where a run of tests/worker.py had its weights for the server."""
    return Path((output_dir / "sync_folder.txt").read_text())


@pytest.mark.long
def test_two_processes_train_on_one_server(fp8_server, tmp_path):
    options = {
        "output_dir": str(tmp_path / "two"),
        "server": fp8_server.url,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
    }
    succeed([*TWO_SHARDED, "-m", "tests.worker", json.dumps(options)])
    logs = read_json(tmp_path / "two" / "logs.json")
    assert logs["kind"] == "DistributedType.FSDP"
    assert len(set(logs["lambda"])) == 1
    assert all(0 < row["discrepancy/mean"] < 0.05 for row in logs["rows"] if "discrepancy/mean" in row)
    assert not sync_folder(tmp_path / "two").exists()


# --- faults of the server: killed, restarted, stopped, by its pid ---------------------------------------------------


@pytest.fixture(scope="module")
def own_server(tmp_path_factory):
    """A server that tests may kill, with room for few tokens: it serves the shipped model in BF16."""
    folder = tmp_path_factory.mktemp("own_server")
    # 6 blocks of 128 tokens: not all completions of a batch fit at once.
    options = ["--num-gpu-blocks-override", "6"]
    server = VLLMServer(TINY_MODEL, max_model_len=256, log_path=folder / "log", options=options)
    server.start()
    yield server
    server.stop()


def faulty_trainer(server, output_dir, **overrides):
    """Completions of 200 tokens, so that there is time to break something."""
    fields = {"deployment_scheme": "bf16", "max_completion_length": 200, "max_steps": 4}
    return make_trainer(server.url, output_dir, generation_kwargs={"ignore_eos": True}, **fields | overrides)


def kill(server):
    """Kills the server; returns its processes."""
    processes = engine_processes(server)
    processes[0].kill()
    return processes


def in_next_rollout(trainer, server, action):
    """Does something, in a thread, in the middle of the trainer's next rollout; returns the thread.

    The engine behind the server's HTTP is stopped when the request is sent: it cannot be done before the action.
    """
    connection = trainer.vllm_generation.vllm_client.connection
    request = connection.arequest
    engine = engine_processes(server)[1:]

    def act():
        time.sleep(2)  # the request is at the server, which cannot answer it meanwhile
        action(engine)

    def send(*args, **kwargs):
        if "/v1/completions" not in args:
            return request(*args, **kwargs)
        connection.arequest = request
        for process in engine:
            process.suspend()
        thread.start()
        return request(*args, **kwargs)

    thread = threading.Thread(target=act)
    connection.arequest = send
    return thread


@pytest.mark.long
def test_a_server_killed_in_a_rollout_and_restarted_gets_the_weights_again(own_server, tmp_path, caplog):
    trainer = faulty_trainer(own_server, tmp_path, learning_rate=3e-3)
    threads = []

    def restart(engine):
        kill(own_server)
        for process in engine:
            process.resume()
        own_server.stop()  # ends what is left of the killed one
        own_server.start()

    trainer.add_callback(At(2, lambda: threads.append(in_next_rollout(trainer, own_server, restart))))
    trainer.train()
    threads[0].join()
    assert trainer.state.global_step == 4
    assert "broke during /v1/completions" in caplog.text
    # With the weights that the restarted server had loaded from its own checkpoint, the batch would be far off.
    served = complete(own_server.url, PROMPTS, max_tokens=64, ignore_eos=True)
    stale = mean_gap(served, tiny_model(), "bf16")
    assert max(logged(trainer, "discrepancy/mean")) < stale / 3


@pytest.mark.long
def test_a_server_that_comes_back_in_another_scheme_ends_the_run(fp8_server, own_server, tmp_path):
    with stub_server(Router([fp8_server.url])) as address:
        trainer = make_trainer(address.url, tmp_path, max_steps=4)
        trainer.add_callback(At(2, lambda: setattr(address, "turns", cycle([own_server.url]))))
        with refuses(ServerError, address.url, "'compressed-tensors'", "options", "resume_from_checkpoint"):
            trainer.train()
    assert trainer.state.global_step == 2
    assert max(logged(trainer, "discrepancy/mean")) < 0.1  # 0.8 with another scheme's weights


@pytest.mark.long
def test_a_server_that_stays_away_ends_the_run_in_time_with_a_checkpoint_that_resumes(own_server, tmp_path):
    options = {"vllm_server_timeout": 5.0, "vllm_max_retries": 1, "lambda_lr": 50.0}
    trainer = faulty_trainer(own_server, tmp_path, **options)
    trainer.add_callback(DeploymentCheckpointCallback(trainer))
    gone, killed = [], []
    trainer.add_callback(At(2, lambda: (killed.append(time.monotonic()), gone.append(kill(own_server)))))
    with refuses(ServerError, " 5 s", "2 times", f"resume_from_checkpoint='{tmp_path / 'checkpoint-2'}'"):
        trainer.train()
    assert time.monotonic() - killed[0] < 100
    own_server.stop()
    wait_until_gone(gone[0])
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "deployment" / "model.safetensors").is_file()

    # The server starts late: the trainer is there first and waits for it.
    late = threading.Thread(target=own_server.start)
    late.start()
    resumed = faulty_trainer(own_server, tmp_path, **options | {"vllm_server_timeout": 120.0})
    late.join()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    assert logged(resumed, "lagrangian/lambda")[2] == trainer.lagrange_multiplier.value
    assert_finite(resumed)


def test_a_server_on_another_machine_needs_a_directory_that_both_see(tmp_path):
    with refuses(ServerError, "weight_sync_dir=None", "192.0.2.1", "weight_sync='nccl'"):
        make_trainer("http://192.0.2.1:8000", tmp_path)  # an address that is nobody's (RFC 5737)


@takes_minutes
def test_nothing_is_left_of_the_server_of_a_killed_run(tmp_path):
    """The whole script: the run starts its own server, and is killed."""
    output = tmp_path / "output"
    command = [sys.executable, "scripts/train.py", "--config", "configs/quickstart_vllm_fp8.yaml"]
    command += ["--output_dir", str(tmp_path / "run"), "--eval_size", "0", "--per_device_train_batch_size", "16"]
    history = tmp_path / "run" / "history.jsonl"
    with open(output, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    def trained():
        assert process.poll() is None, output.read_text()[-3000:]
        return history.exists() and history.read_text()

    try:
        wait_for(trained, 400)
        family = psutil.Process(process.pid).children(recursive=True)
        shared = shared_memory(family)
        assert shared
    finally:
        process.kill()
        process.wait()
    wait_until_gone(family)
    assert not any(path.exists() for path in shared)


def test_an_engine_that_sleeps_between_the_turns_of_tools_is_refused(tmp_path):
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "deployment_scheme": "fp8"}
    args = helpers.make_config(tmp_path, **engine)
    with refuses(ValueError, "vllm_enable_sleep_mode=True", "tools"):
        build_vllm(SimpleNamespace(args=args, model=None, processing_class=None, tools=[max]))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"vllm_mode": "server"}, ["num_processes=2"]),
        ({"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, ["vllm_tensor_parallel_size=2"]),
    ],
)
def test_turns_of_tools_that_processes_would_get_of_each_other_are_refused(tmp_path, engine, words):
    """TRL's server mode gives process r the answers from r × n on, n being the number of its own prompts."""
    args = helpers.make_config(tmp_path, use_vllm=True, deployment_scheme="fp8", **engine)
    processes = SimpleNamespace(num_processes=2)
    with refuses(ValueError, "tools", "use_vllm=False", *words):
        build_vllm(SimpleNamespace(args=args, model=None, processing_class=None, tools=[max], accelerator=processes))


@pytest.mark.long
def test_colocated_vllm_reloads_the_scheme(tmp_path):
    """In a process of its own: vLLM takes over the process that it is in."""
    options = {"output_dir": str(tmp_path), "colocate": "fp8", "max_steps": 3, "learning_rate": 3e-3}
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = succeed([sys.executable, "-m", "tests.worker", json.dumps(options)], env=environment)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]  # the process group has gone before the engine
    logs = read_json(tmp_path / "logs.json")
    gaps = logs["gaps"]
    assert len(gaps) == 2
    assert all(stale > 3 * present for present, stale in gaps)
    before, asleep, restored = logs["scales"]
    assert len(before) == 4
    assert before == restored == [[1.0, 1.0, 1.0]] * 4
    assert asleep == [[0.0, 0.0, 0.0]] * 4  # until vLLM 0.31; later ones are buffers, which sleep keeps


@pytest.mark.parametrize("make", [make_experts, make_model])
def test_on_a_gpu_the_colocated_engine_of_a_mixture_takes_new_weights(make, tmp_path, monkeypatch):
    """TRL's own constructor of the engine, and our argument of it; that it is vLLM's says `test_server.py`."""
    built = []
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto"))
    parts = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace())
    engine = SimpleNamespace(llm_engine=parts, generate=list)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **arguments: built.append(arguments) or engine)
    accelerator = Accelerator(cpu=True)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # TRL sets them
    monkeypatch.setattr(Accelerator, "device", torch.device("cuda"))
    args = SimpleNamespace(deployment_scheme="fp8", weight_sync_dir=str(tmp_path), lora_deployment="merged")
    of_trl = {"accelerator": accelerator, "processing_class": make_tokenizer(), "mode": "colocate"}
    generation = ColocateGeneration(args, model=make(128), **of_trl)
    assert [arguments.get("moe_backend") for arguments in built] == ["triton" if make is make_experts else None]
    assert built[0]["model"] == str(generation.checkpoint)
    generation.close()  # as with vLLM 0.26, whose engine in this process has no finalizer
