"""`dc-trl serve` and what it starts: a real vLLM server, its peers, its end."""

import errno
import os
import signal
import socket
import sys

import psutil
import pytest
from transformers import AutoConfig
from trl.generation.vllm_client import VLLMClient

from dc_trl.command import call
from dc_trl.serving import server as serving_server
from dc_trl.serving.client import ServerClient
from dc_trl.serving.connection import Connection
from dc_trl.serving.errors import ServerError
from dc_trl.serving.fit import check_server, reloadable
from dc_trl.serving.server import VLLMServer, scheme_options

from .gaps import PROMPTS, mean_gap
from .helpers import (
    ROOT,
    TINY_MODEL,
    at_server,
    make_experts,
    make_model,
    make_tokenizer,
    make_trainer,
    refuses,
    succeed,
    tiny_model,
)
from .stub_server import stub_server
from .vllm_server import Serve, complete, requires_vllm, serving, wait_until_gone


pytestmark = requires_vllm


def test_trls_stock_client_talks_to_it(fp8_server):
    client = VLLMClient(base_url=fp8_server.url)
    questions = [[{"role": "user", "content": question}] for question in ("12+34=", "7+5=")]
    prompts = make_tokenizer().apply_chat_template(questions, add_generation_prompt=True)["input_ids"]
    output = client.generate(prompts, n=2, max_tokens=24, temperature=1.0)
    assert output["prompt_ids"] == prompts
    assert len(output["completion_ids"]) == 4
    columns = output["completion_ids"], output["logprobs"], output["logprob_token_ids"]
    for ids, logps, sampled in zip(*columns, strict=True):
        assert [token for (token,) in sampled] == ids
        assert all(logp <= 0 for (logp,) in logps)
    assert client.get_server_info()["model_config"]["max_logprobs"] == -1
    client.reset_prefix_cache()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scheme": "int4"}, ["CompressedTensorsW8A8Fp8", "deployment_scheme='int4'", "--scheme int4"]),
        ({"scheme": "fp8+fp8_kv"}, ["--kv-cache-dtype auto", "start it with --kv-cache-dtype fp8"]),
        ({"max_length": 300}, ["256 tokens", "--max-model-len 300"]),
        ({"vocabulary": 263}, ["vocabulary of 262", "263", "added tokens"]),
        ({"weight_sync": "nccl"}, ["weight_sync='checkpoint'", "--quantization fp8_per_channel"]),
    ],
)
def test_a_server_that_does_not_fit_is_refused(fp8_server, changed, words):
    client = ServerClient(fp8_server.url)
    needs = {"scheme": "fp8", "max_length": 256, "weight_sync": "checkpoint", "vocabulary": 262} | changed
    model = make_model(128, num_hidden_layers=4, vocab_size=needs.pop("vocabulary"))
    with refuses(ServerError, *words):
        check_server(client.get_server_info(), client.layers(), config=model.config, **needs)


MIXTURE = make_experts(128).config
ON_A_GPU = [
    ("fp8", MIXTURE, {"moe_backend": "triton"}),
    ("fp8+fp8_kv", MIXTURE, {"moe_backend": "triton"}),
    ("fp8_block", MIXTURE, {"moe_backend": "triton"}),
    ("nvfp4", MIXTURE, {"enforce_eager": True}),
    ("bf16", MIXTURE, {}),
    ("int8", MIXTURE, {}),
    ("fp8", make_model(128).config, {}),
]


@pytest.mark.parametrize(("scheme", "config", "arguments"), ON_A_GPU)
def test_on_a_gpu_a_mixture_is_served_so_that_it_takes_new_weights(scheme, config, arguments, monkeypatch):
    """vLLM's own parser reads the options, and takes what the user adds behind them."""
    assert scheme_options(scheme, config) == (["--kv-cache-dtype", "fp8"] if "kv" in scheme else [])  # on this CPU
    monkeypatch.setattr(serving_server, "vllm_version", lambda: "0.31.0")
    options = scheme_options(scheme, config)
    assert reloadable(scheme, config) == arguments
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    parsed, other = parser.parse_args(options), parser.parse_args([*options, "--moe-backend", "marlin"])
    usual = {"moe_backend": "auto", "enforce_eager": False}
    assert {name: getattr(parsed, name) for name in usual} == usual | arguments
    assert other.moe_backend == "marlin"
    assert all(hasattr(EngineArgs, name) for name in arguments)


def test_a_mixture_that_new_weights_would_crash_is_refused(fp8_server):
    client = ServerClient(fp8_server.url)
    info, layers = client.get_server_info(), client.layers()
    needs = {"scheme": "fp8", "max_length": 256, "config": MIXTURE, "weight_sync": "checkpoint"}
    check_server(info, layers, **needs)
    info["device_config"]["device"] = "cuda"
    info["parallel_config"]["worker_extension_cls"] = ""
    check_server(info, layers, **needs)  # as it is eager
    info["model_config"]["enforce_eager"] = False
    with refuses(ServerError, "--moe-backend auto", "--moe-backend triton"):
        check_server(info, layers, **needs)
    check_server(info, layers, **needs | {"weight_sync": "none"})
    check_server(info, layers, **needs | {"config": make_model(128).config})
    info["kernel_config"]["moe_backend"] = "triton"
    check_server(info, layers, **needs)


KEY, TOKEN = "sk-wxyz-never-to-be-seen", "mine-and-nobody-elses"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server in INT4 that asks for a key and holds a token. The last of its tests ends it."""
    options = ["--scheme", "int4", "--max_model_len", "256", "--require_api_key", "--", "--hf-token", TOKEN]
    with serving(tmp_path_factory.mktemp("guarded"), *options, VLLM_API_KEY=KEY) as server:
        server.url()
        yield server


@pytest.mark.long
def test_an_api_key_is_asked_for_and_kept_secret(guarded, monkeypatch):
    shown = guarded.output + guarded.log_path.read_text()
    assert "--hf-token '(hidden)'" in guarded.output
    assert TOKEN not in shown
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with refuses(ServerError, "VLLM_API_KEY"):
        ServerClient(guarded.url())
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert ServerClient(guarded.url()).generate(["12+34="], max_tokens=2)["completion_ids"]
    family = guarded.family()
    assert len(family) >= 3
    assert all(KEY not in " ".join(process.cmdline()) for process in family)
    assert KEY not in guarded.output + guarded.log_path.read_text()


@pytest.mark.long
def test_another_scheme_reloads_in_place(guarded, tmp_path, monkeypatch):
    """int4; int8 is the doctor's, bf16 the servers' that are killed."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    fields = at_server(guarded.url()) | {"vllm_server_timeout": 120.0, "deployment_scheme": "int4", "max_steps": 2}
    trainer = make_trainer(tmp_path, tiny_model(), max_completion_length=24, **fields)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    served = complete(guarded.url(), PROMPTS, max_tokens=16)
    assert 3 * mean_gap(served, trainer.model, "int4") < mean_gap(served, tiny_model(), "int4")


@pytest.mark.long
def test_ctrl_c_ends_everything(guarded):
    family = guarded.family()
    guarded.process.send_signal(signal.SIGINT)
    assert guarded.process.wait(120) == 0
    assert guarded.output.endswith("stopped\n")
    wait_until_gone(family)


@pytest.mark.long
def test_a_server_that_dies_says_why_and_where_its_log_is(tmp_path):
    server = Serve(tmp_path, "--", "--no-such-option")
    assert server.process.wait(180) == 1
    message = server.output.splitlines()[-1]
    assert message.startswith("error: vLLM ended with exit code"), server.output[-3000:]
    assert "unrecognized arguments" in message
    assert str(server.log_path) in message


@pytest.fixture
def occupied():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"--model": "/no/such/model"}, ["model='/no/such/model'", "exist"]),
        ({"--model": "QUANTIZED", "--scheme": "fp8"}, ["scheme='fp8'", "QUANTIZED", "'bf16'"]),
        ({"--port": "OCCUPIED"}, ["port=OCCUPIED", os.strerror(errno.EADDRINUSE), "another port"]),
        ({"--host": "192.0.2.1"}, ["host='192.0.2.1'", os.strerror(errno.EADDRNOTAVAIL)]),
        ({"--": "--host=0.0.0.0"}, ["--host=0.0.0.0", "set host and port"]),
    ],
)
def test_what_cannot_start_is_refused_before_vllm_is_started(options, words, occupied, tmp_path, monkeypatch, capsys):
    quantized = AutoConfig.from_pretrained(TINY_MODEL)
    quantized.quantization_config = {"quant_method": "compressed-tensors"}
    quantized.save_pretrained(tmp_path / "QUANTIZED")
    given = {"--model": str(TINY_MODEL), "--port": "0", "--log": str(tmp_path / "log")} | options
    places = {"OCCUPIED": str(occupied), "QUANTIZED": str(tmp_path / "QUANTIZED")}
    arguments = [places.get(word, word) for option in given.items() for word in option]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with refuses(SystemExit, "error: ", *(word.replace("OCCUPIED", str(occupied)) for word in words)):
        call("serve", arguments)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--api-key", "SECRET-1"],
        ["--api_key", "SECRET-1", "SECRET-2", "--seed", "1"],
        ["--model-loader-extra-config", '{"s3_secret_access_key": "SECRET-1", "concurrency": 4}'],
        ["--otlp-traces-endpoint", "http://me:SECRET-1@127.0.0.1:4317"],
    ],
)
def test_keys_among_the_options_are_not_shown(options, tmp_path):
    server = VLLMServer("unused", options=options, log_path=tmp_path / "log", environment={"VLLM_API_KEY": "SECRET-3"})
    assert "SECRET" not in server.command
    assert "VLLM_API_KEY='(hidden)'" in server.command
    assert "--max-logprobs -1" in server.command
    assert server.arguments[-len(options) :] == options  # the server gets them


@requires_vllm
def test_another_server_that_took_the_port_is_not_taken_for_ours(tmp_path, monkeypatch):
    with stub_server() as stub:
        monkeypatch.setattr("dc_trl.serving.server.free_port", lambda host, port: int(stub.url.rpartition(":")[2]))
        server = VLLMServer("unused", log_path=tmp_path / "log", options=["--nothing"], start_timeout=120)
        assert Connection(server.url).why_down() is None
        with refuses(ServerError, "exit code", tmp_path / "log"):
            server.start()


@requires_vllm
def test_a_server_does_not_take_itself_for_a_process_of_the_run(tmp_path, monkeypatch):
    of_torchrun = ("RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    for name in (*of_torchrun, "RANKING"):
        monkeypatch.setenv(name, "1")
    seen = []

    def why_down(_):
        seen.append(psutil.Process(server.pid).environ())
        return "not yet"

    monkeypatch.setattr("dc_trl.serving.server.Connection.why_down", why_down)
    server = VLLMServer(str(TINY_MODEL), log_path=tmp_path / "log", start_timeout=1)
    with refuses(ServerError, "start_timeout"):
        server.start()
    assert not {*of_torchrun} & seen[-1].keys()
    assert seen[-1]["RANKING"] == "1"


@requires_vllm
def test_a_server_that_writes_is_waited_for(tmp_path, monkeypatch):
    """In the place of vLLM's program stands one that writes for three seconds, and then nothing."""
    program = tmp_path / "vllm" / "entrypoints" / "cli" / "main.py"
    program.parent.mkdir(parents=True)
    for folder in program.parents[:3]:
        (folder / "__init__.py").touch()
    lines = "for _ in range(15):\n    print('compiling', flush=True)\n    time.sleep(0.2)\n"
    program.write_text(f"import time\n{lines}time.sleep(99)\n")
    monkeypatch.setattr("dc_trl.serving.server.Connection.why_down", lambda _: "not yet")
    options = {"start_timeout": 2.0, "environment": {"PYTHONPATH": str(tmp_path)}}
    server = VLLMServer("unused", log_path=tmp_path / "log", **options)
    with refuses(ServerError, "start_timeout=2 s", "compiling"):
        server.start()
    assert (tmp_path / "log").read_text().count("compiling") == 15


def test_a_key_is_not_shown_in_the_servers_last_words(tmp_path):
    server = VLLMServer("unused", options=["--api-key", "mine", "--nothing=x"], log_path=tmp_path / "log")
    (tmp_path / "log").write_text("vllm: error: unrecognized arguments: mine --nothing=x\n")
    assert server.last_error() == "vllm: error: unrecognized arguments: (hidden) --nothing=x"


def test_on_amx_fp8_products_are_what_onednns_reference_gives_and_an_fp8_cache_is_read_without_tiles():
    """In a process of its own, where the operator's kernel is replaced; compiled too."""
    code = """
import torch

torch.manual_seed(0)
a, b = (torch.randn(n, 64).to(torch.float8_e4m3fn) for n in (5, 32))
one = torch.ones(1)
product = lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
before = product()
torch.cpu.get_capabilities = lambda: {"amx_int8": True, "amx_fp16": False}
from dc_trl.serving import cpu_reload
assert cpu_reload._FP8_PRODUCTS is not None
assert torch.equal(product(), before)
assert torch.equal(torch.compile(product)(), before)
assert torch.allclose(before, a.float() @ b.float().t(), rtol=1e-6, atol=1e-6)
from vllm.v1.attention.backends import cpu_attn
torch.cpu._is_amx_tile_supported = lambda: True
chosen = [cpu_attn._get_attn_isa(torch.bfloat16, 32, 64, cache) for cache in ("auto", "fp8", "fp8_e4m3")]
assert chosen == ["amx", "vec", "vec"]
"""
    succeed([sys.executable, "-c", code])


@pytest.mark.long
def test_an_emulated_nvfp4_server_samples_with_the_probabilities_of_the_replica(tmp_path):
    """vLLM loads, fuses and multiplies what the checkpoint holds, activations included, by its own code."""
    extension = ("--worker-extension-cls", "tests.vllm_emulation.EmulatedExtension")
    arguments = ("--scheme", "nvfp4", "--max_model_len", "256", "--", *extension)
    with serving(tmp_path, *arguments, PYTHONPATH=str(ROOT)) as server:
        served = complete(server.url(), PROMPTS, max_tokens=24, temperature=1.0, seed=0)
    policy = tiny_model()
    assert mean_gap(served, policy, "nvfp4") <= 1e-6 < 1e-3 < mean_gap(served, policy, "nvfp4a16")
