"""`scripts/serve.py` and what it starts: a real vLLM server, its peers, its end."""

import signal
import subprocess
import sys
import time

import pytest
from openai import OpenAI
from trl.generation.vllm_client import VLLMClient

from dc_trl.deployment.client import ServerClient, ServerUnavailableError
from dc_trl.deployment.server import ServerError, VLLMServer, check_server

from .helpers import TINY_MODEL, make_model, make_tokenizer
from .vllm_server import Serve, requires_vllm, serving, wait_until_gone


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


def test_an_ordinary_openai_client_talks_to_it(fp8_server):
    client = OpenAI(base_url=f"{fp8_server.url}/v1", api_key="unused")
    assert [model.id for model in client.models.list()] == [str(TINY_MODEL)]
    question = [{"role": "user", "content": "12+34="}]
    answer = client.chat.completions.create(model=str(TINY_MODEL), messages=question, max_tokens=40, temperature=0)
    assert "boxed" in answer.choices[0].message.content
    text = client.completions.create(model=str(TINY_MODEL), prompt="12", max_tokens=4, n=2)
    assert len(text.choices) == 2


def test_it_holds_the_scheme_and_the_settings_that_training_needs(fp8_server):
    client = ServerClient(fp8_server.url)
    info = client.get_server_info()
    assert "quant=CompressedTensorsW8A8Fp8" in client.layers()
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["cache_config"]["enable_prefix_caching"]
    check_server(
        info,
        client.layers(),
        scheme="fp8",
        config=make_model(128, num_hidden_layers=4, intermediate_size=256).config,
        max_length=256,
        weight_sync="checkpoint",
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scheme": "int4"}, ["CompressedTensorsW8A8Fp8", "deployment_scheme='int4'", "--scheme int4"]),
        ({"scheme": None}, ["CompressedTensorsW8A8Fp8", "deployment_scheme=None", "--scheme bf16"]),
        ({"max_length": 300}, ["256 tokens", "--max-model-len 300"]),
        ({"layers": 6}, ["4 layers", "6", "vllm serve MODEL"]),
        ({"vocabulary": 263}, ["vocabulary of 262", "263", "added tokens"]),
        ({"channels": 64}, ["128 channels", "64"]),
        ({"weight_sync": "nccl"}, ["weight_sync='checkpoint'", "--quantization fp8_per_channel"]),
    ],
)
def test_a_server_that_does_not_fit_is_refused(fp8_server, changed, words):
    client = ServerClient(fp8_server.url)
    model = make_model(
        changed.get("channels", 128),
        num_hidden_layers=changed.get("layers", 4),
        vocab_size=changed.get("vocabulary", 262),
    )
    with pytest.raises(ServerError) as error:
        check_server(
            client.get_server_info(),
            client.layers(),
            scheme=changed.get("scheme", "fp8"),
            config=model.config,
            max_length=changed.get("max_length", 256),
            weight_sync=changed.get("weight_sync", "checkpoint"),
        )
    assert all(word in str(error.value) for word in words), error.value


def test_the_printed_command_starts_the_same_server_elsewhere_and_wrong_options_are_named(tmp_path, fp8_server):
    """The line that serve.py prints, run by a shell with one option changed and without the development endpoints."""
    command = fp8_server.wait(r"starting (VLLM_SERVER_DEV_MODE=1 .*)")[1]
    assert "--host 127.0.0.1" in command
    port = VLLMServer("unused").port
    command = command.replace(f"--port {fp8_server.url.rsplit(':', 1)[1]}", f"--port {port}")
    command = command.replace("processed_logprobs", "raw_logprobs")
    command = command.replace(" vllm serve", f" exec {sys.executable} -m vllm.entrypoints.cli.main serve")
    refusals = {}
    for mode in ("1", "0"):
        line = command.replace("DEV_MODE=1", f"DEV_MODE={mode}")
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(["bash", "-c", line], stdout=log, stderr=log)
        try:
            client = ServerClient(f"http://127.0.0.1:{port}", start_timeout=120)
            with pytest.raises(ServerError) as error:
                check_server(
                    client.get_server_info(),
                    client.layers(),
                    scheme="fp8",
                    config=make_model(128, num_hidden_layers=4).config,
                    max_length=256,
                    weight_sync="checkpoint",
                )
            refusals[mode] = str(error.value)
        finally:
            process.terminate()
            process.wait(60)
    assert "--logprobs-mode processed_logprobs" in refusals["1"]
    assert "VLLM_SERVER_DEV_MODE=1" in refusals["0"]


def test_an_api_key_is_asked_for_and_kept_secret_and_ctrl_c_ends_everything(tmp_path, monkeypatch):
    key = "sk-wxyz-never-to-be-seen"
    with serving(tmp_path, "--require_api_key", VLLM_API_KEY=key) as server:
        url = server.url()
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        with pytest.raises(ServerError, match="VLLM_API_KEY"):
            ServerClient(url)
        monkeypatch.setenv("VLLM_API_KEY", key)
        client = ServerClient(url)
        assert client.generate(["12+34="], max_tokens=2)["completion_ids"]
        family = server.family()
        assert len(family) >= 3
        assert all(key not in " ".join(process.cmdline()) for process in family)
        assert key not in server.output + server.log_path.read_text()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert server.output.endswith("stopped\n")
        wait_until_gone(family)


def test_a_required_key_that_is_missing_is_an_error_at_once(tmp_path):
    server = Serve(tmp_path, "--require_api_key", VLLM_API_KEY="")
    assert server.process.wait(60) == 1
    assert "VLLM_API_KEY" in server.output


def test_nothing_outlives_a_killed_serve(tmp_path):
    server = Serve(tmp_path)
    server.wait("starting VLLM")
    end = time.monotonic() + 120
    while len(family := server.family()) < 3:  # until the engine is there too
        assert time.monotonic() < end
        time.sleep(0.1)
    server.process.kill()
    server.process.wait()
    wait_until_gone(family)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max_model_len", "100000"], "max_model_len"),
        (["--scheme", "fp8_block"], "Failed to find a kernel"),
        (["--", "--num-gpu-blocks-override", "1", "--max-model-len", "512"], "cache"),
        (["--", "--no-such-option"], "unrecognized arguments"),
    ],
    ids=["too-long", "no-kernel", "no-kv-memory", "unknown-option"],
)
def test_a_server_that_dies_says_why_and_where_its_log_is(tmp_path, arguments, words):
    server = Serve(tmp_path, *arguments)
    assert server.process.wait(180) == 1
    message = server.output.splitlines()[-1]
    assert message.startswith("error: vLLM ended with exit code"), server.output[-3000:]
    assert words in message
    assert str(server.log_path) in message


def test_a_wider_address_is_warned_of(tmp_path):
    lines: list[str] = []
    server = VLLMServer(str(tmp_path), host="0.0.0.0", log_path=tmp_path / "log", report=lines.append)
    with pytest.raises(ServerError):
        server.start()  # no model there
    assert any("0.0.0.0 is not loopback" in line and "API key" in line for line in lines)


def test_a_server_that_never_comes_is_waited_for_and_given_up():
    lines: list[str] = []
    begin = time.monotonic()
    with pytest.raises(ServerUnavailableError, match=r"after 3 s.*vllm_server_timeout"):
        ServerClient("http://127.0.0.1:9", start_timeout=3, report=lines.append)
    assert time.monotonic() - begin < 15
    assert lines
    assert "waiting for vLLM" in lines[0]
