"""The canary beside a trainer: its numbers against a computation of their own, and what it does not take."""

import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model

from dc_trl.calibration.live_server import newest_checkpoint
from dc_trl.command import watch
from dc_trl.command.problems import DataArguments, draw_prompts
from dc_trl.data.prompts import tokenize
from dc_trl.serving.client import ServerClient, Weights

from .helpers import (
    DEFAULT_SIGINT,
    ROOT,
    as_words,
    make_model,
    make_tokenizer,
    read_rows,
    save,
    tiny_model,
    write_rows,
)
from .stub_server import stub_server
from .test_verify import deploy
from .vllm_server import requires_vllm


PROMPTS = ["12+3=", "7+8=", "31+5="]
TOKENS = 6  # of each completion


def options(tmp_path, url, *more):
    rows = write_rows(tmp_path / "prompts.jsonl", ({"prompt": prompt, "answer": "1"} for prompt in PROMPTS))
    given = {"output": tmp_path / "watch", "max_tokens": TOKENS, "dataset_name": rows, "prompts": len(PROMPTS)}
    given |= {"train_dtype": "float32", "device": "cpu"}
    return [url, str(tmp_path / "run"), *as_words(given), *more]


def looks(tmp_path):
    return read_rows(tmp_path / "watch" / "watch.jsonl")


@torch.no_grad()
def log_softmax(model, prompt, ids):
    return model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)


def by_hand(model, asked):
    """δ̄, k3, total variation and flips over the whole vocabulary, from prompts and the choices that complete them."""
    deltas, k3, variation, flips = [], [], [], []
    for prompt, choice in asked:
        ids, of_row = choice["token_ids"], []
        for p, token, logp, top in zip(
            log_softmax(model, prompt, ids),
            ids,
            choice["logprobs"]["token_logprobs"],
            choice["logprobs"]["top_logprobs"],
            strict=True,
        ):
            q = torch.zeros(len(p), dtype=torch.double)
            for name, value in top.items():
                q[int(name.split(":")[1])] = math.exp(value)
            assert q.sum() == pytest.approx(1, abs=1e-4)
            of_row.append(abs(math.exp(p[token]) - math.exp(logp)))
            k3.append(math.expm1(p[token] - logp) - (p[token].item() - logp))
            variation.append((q - p.exp()).abs().sum().item() / 2)
            flips.append(q.argmax() != p.argmax())
        deltas.append(sum(of_row) / len(of_row))
    return [sum(map(float, each)) / len(each) for each in (deltas, k3, variation, flips)]


class Policy:
    """Completions of a policy, as vLLM's public endpoint answers them."""

    def __init__(self, model):
        self.model, self.asked = model, []

    def __call__(self, body):
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (1.0, 1.0, TOKENS)
        ids = [(body["seed"] + 3 * number) % 20 + 4 for number in range(TOKENS)]
        logps = log_softmax(self.model, body["prompt"], ids)
        logprobs = {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": [row[token].item() for row, token in zip(logps, ids, strict=True)],
            "top_logprobs": [{f"token_id:{n}": value for n, value in enumerate(row.tolist())} for row in logps],
        }
        choice = {"index": 0, "finish_reason": "length", "prompt_token_ids": body["prompt"]}
        self.asked.append((body["prompt"], choice | {"token_ids": ids, "logprobs": logprobs}))
        return {"choices": [self.asked[-1][1]]}


def test_the_numbers_are_those_of_a_computation_by_hand(tmp_path, capsys):
    torch.manual_seed(1)
    served, trained = make_model(), make_model()
    with torch.no_grad():
        trained.lm_head.weight.add_(0.02 * torch.randn(trained.lm_head.weight.shape))
    save(trained, tmp_path / "run" / "checkpoint-4")
    with stub_server() as stub:
        stub.completes = Policy(served)
        # The trainer's server needs no development mode, and may be gone for a moment.
        stub.says = {"/weight_info": (404, "Not Found")}
        stub.says["/metrics"] = (200, 'vllm:cache_config_info{block_size="16",cache_dtype="fp8",x="y"} 1.0')
        stub.failures["/v1/completions"] = len(PROMPTS)
        tracked = ["--report_to", "tensorboard"]
        assert watch.main(options(tmp_path, stub.url, "--looks", "2", "--every", "0.02", *tracked)) == 0
        assert not {path for path in stub.asked if path.startswith(("/collective", "/update", "/reset"))}
    assert "asked again" in capsys.readouterr().out
    first, second = looks(tmp_path)
    last = stub.completes.asked[-len(PROMPTS) :]
    expected = by_hand(trained, sorted(last, key=lambda pair: pair[0]))
    names = ("discrepancy", "k3_kl", "drift_tv", "top1_flips")
    assert [second[name] for name in names] == pytest.approx(expected, rel=1e-4)
    assert expected[0] > 1e-5
    assert 0 < expected[3] < 1
    assert [first[name] for name in names] == [second[name] for name in names]  # the same prompts and seeds
    assert first["discrepancy_low"] <= first["discrepancy"] <= first["discrepancy_high"]
    assert (first["step"], first["kv_cache_dtype"], first["tokens"]) == (4, "fp8", TOKENS * len(PROMPTS))
    assert first["weight_version"] is None
    assert first["floor"] == 0  # float32 is not rounded again
    assert list((tmp_path / "watch").rglob("events.out.tfevents.*"))


def test_a_watch_beside_an_adapter_asks_for_it_and_outlasts_a_refusal(tmp_path, capsys):
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
    save(model, tmp_path / "run" / "checkpoint-4")
    base, *adapters = [{"id": name, "root": name, "parent": "base"} for name in ("base", "run-3", "run-4\x1b[2J")]
    cards = [base | {"parent": None, "max_model_len": 64}, *(card | {"max_model_len": None} for card in adapters)]
    with stub_server() as stub:
        stub.completes = Policy(tiny_model())
        stub.says = {"/v1/models": (200, json.dumps({"data": cards})), "/v1/completions": (404, "no such model")}
        stub.before = lambda stub, path: len(stub.bodies) >= len(PROMPTS) and stub.says.pop("/v1/completions", None)
        assert watch.main(options(tmp_path, stub.url, "--looks", "1", "--every", "0.02")) == 0
        assert {body["model"] for body in stub.bodies} == {"run-4\x1b[2J"}
    assert looks(tmp_path)[0]["name"] == "run-4\x1b[2J"
    out = capsys.readouterr().out
    assert "asked again" in out
    assert "\x1b" not in out


def test_a_gate_does_not_pass_what_is_not_known(tmp_path, capsys):
    trained = make_model()
    with torch.no_grad():
        trained.lm_head.weight[5, 0] = math.nan
    save(trained, tmp_path / "run" / "checkpoint-4")
    with stub_server() as stub:
        stub.completes = Policy(make_model())
        assert watch.main(options(tmp_path, stub.url, "--looks", "1", "--fail_above", "1e9")) == 1
    (look,) = looks(tmp_path)
    assert math.isnan(look["discrepancy"])
    assert "not known to be at most --fail_above" in capsys.readouterr().out


@pytest.mark.long
def test_ctrl_c_ends_a_watch_without_a_traceback(tmp_path):
    with stub_server() as stub:
        command = [*DEFAULT_SIGINT, sys.executable, "-u", "-m", "dc_trl", "watch", stub.url, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while "waiting for" not in process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in error


def test_only_a_complete_checkpoint_is_taken(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    save(make_model(), tmp_path / "checkpoint-1")
    save(make_model(), tmp_path / "global_step_2" / "actor" / "huggingface")  # verl's layout
    whole = tmp_path / "global_step_2" / "actor" / "huggingface"
    # What `dc-trl train` exports is quantized, and no policy that is trained.
    save(make_model(), whole / "deployment")
    save(make_model(), whole / ".deployment-1.partial")
    assert newest_checkpoint(tmp_path).step == 2
    assert newest_checkpoint(tmp_path).path == whole
    make_model().save_pretrained(tmp_path / "checkpoint-3", max_shard_size="20KB")
    assert newest_checkpoint(tmp_path).step == 3
    (tmp_path / "checkpoint-3" / "model.safetensors.index.json").unlink()  # which is written last
    assert newest_checkpoint(tmp_path).step == 2
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert newest_checkpoint(tmp_path).step == 1
    # The directory itself may be the checkpoint, rewritten in place.
    before = newest_checkpoint(tmp_path / "checkpoint-1")
    time.sleep(0.01)
    save(make_model(), tmp_path / "checkpoint-1")
    assert newest_checkpoint(tmp_path / "checkpoint-1") != before


def test_the_reference_adapter_within_a_checkpoint_is_not_the_trained_one(tmp_path):
    """TRL adds the adapter "ref" to a model that has one already, where `beta` is above 0."""
    policy = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    policy.add_adapter("ref", policy.peft_config["default"])
    policy.save_pretrained(tmp_path / "checkpoint-4")
    assert (tmp_path / "checkpoint-4" / "ref" / "adapter_model.safetensors").is_file()
    assert newest_checkpoint(tmp_path).path == tmp_path / "checkpoint-4"
    assert newest_checkpoint(tmp_path / "checkpoint-4" / "ref").path.name == "ref"  # where it is asked for


def test_a_watch_that_cannot_begin_says_why(tmp_path, capsys):
    assert watch.main(options(tmp_path, "http://127.0.0.1:9")) == 2  # the port of "discard", where nothing listens
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    with stub_server() as stub:
        for option, value in {"top_k": 0, "report_to": "aim"}.items():
            assert watch.main(options(tmp_path, stub.url, f"--{option}", str(value))) == 2
            assert f"{option}={value!r}" in capsys.readouterr().err
        save(make_model(), tmp_path / "run" / "checkpoint-1")
        words = options(tmp_path, stub.url, "--looks", "1")
        write_rows(tmp_path / "prompts.jsonl", [{"prompt": PROMPTS[0], "answer": "1"}])
        stub.completes = Policy(make_model())
        assert watch.main(words) == 2
        assert "has one prompt" in capsys.readouterr().err
        stub.completes = lambda body: {"choices": [{"index": 3}]}
        assert watch.main(options(tmp_path, stub.url, "--looks", "1")) == 2
        assert stub.url in capsys.readouterr().err


@requires_vllm
def test_a_real_server_is_watched_while_its_checkpoints_come(fp8_server, tmp_path):
    model = tiny_model()
    ServerClient(fp8_server.url).hold(Weights("own", deploy(model, "fp8", tmp_path / "own")), reload=True)
    save(model, tmp_path / "ready" / "checkpoint-1")
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    save(get_peft_model(model, adapter), tmp_path / "ready" / "checkpoint-2")

    def trainer():
        shutil.copytree(tmp_path / "ready" / "checkpoint-1", tmp_path / "run" / "checkpoint-1")
        while not (tmp_path / "watch" / "watch.jsonl").exists():
            time.sleep(0.1)
        (tmp_path / "run" / "checkpoint-2").mkdir()
        for file in (tmp_path / "ready" / "checkpoint-2").iterdir():  # as a trainer does, the weights in two parts
            content = file.read_bytes()
            (tmp_path / "run" / "checkpoint-2" / file.name).write_bytes(content[:2000])
            time.sleep(0.2)
            (tmp_path / "run" / "checkpoint-2" / file.name).write_bytes(content)

    writing = threading.Thread(target=trainer)
    writing.start()
    code = watch.main(options(tmp_path, fp8_server.url, "--every", "60", "--fail_above", "0.02"))
    writing.join()
    assert code == 1
    first, second = looks(tmp_path)
    assert (first["step"], second["step"]) == (1, 2)
    assert first["weight_version"] == second["weight_version"] == "own"
    assert first["quantization"] == "compressed-tensors"
    assert first["discrepancy"] < 0.02 < second["discrepancy"]
    assert first["pearson"] > 0.99
    # The same requests without our client, and with the server's whole distribution.
    tokenizer, asked = make_tokenizer(), []
    data = DataArguments(dataset_name=str(tmp_path / "prompts.jsonl"))
    for seed, ids in enumerate(tokenize(draw_prompts(data, tokenizer, len(PROMPTS), seed=0), tokenizer)):
        body = {"model": first["name"], "prompt": ids, "seed": seed, "max_tokens": TOKENS, "temperature": 1.0}
        body |= {"logprobs": model.config.vocab_size, "return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = httpx.post(f"{fp8_server.url}/v1/completions", json=body, timeout=60).json()
        asked.append((ids, answer["choices"][0]))
    discrepancy, k3, variation, flips = by_hand(tiny_model(), asked)
    assert [first["discrepancy"], first["k3_kl"]] == pytest.approx([discrepancy, k3], rel=0.05)
    assert first["drift_tv"] == pytest.approx(variation, rel=0.2)  # of 20 tokens and the others as one
    assert first["top1_flips"] == flips
