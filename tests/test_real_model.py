"""SmolLM2-135M-Instruct, thirty layers and 49,152 tokens: what holds for the toy holds for it, and where it differs.

The bounds are wide, because the figures depend on the machine's kernels. Its weights are those of `make real-model`.
"""

import random
from contextlib import ExitStack

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from dc_trl import calibrate
from dc_trl.command.arguments import RunArguments
from dc_trl.command.build import build_trainer
from dc_trl.sampling.replica import Replica

from .helpers import (
    ROOT,
    floor_and_format,
    logged,
    read_json,
    read_rows,
    succeed,
    tensors_in,
    write_rows,
)
from .vllm_server import requires_vllm, serving


MODEL = ROOT / "runs" / "real_model"
pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.skipif(not MODEL.exists(), reason="the real model is not made (make real-model)"),
]
FORMS = (
    "{n} has {a} {t} and buys {b} bags with {c} {t} in each. How many {t} does {n} have now?",
    "{n} sells {a} {t} in the morning and {b} times as many later, for ${c} each. How much money does {n} get?",
    "A box holds {a} {t}. {n} fills {b} boxes and has {c} {t} left. How many {t} are there?",
)


def questions(count):
    """Word problems in the manner of GSM8K."""
    rng = random.Random(0)
    for number in range(count):
        name, thing = rng.choice(["Anna", "Ben", "Carla", "Farid"]), rng.choice(["apples", "eggs", "stamps"])
        yield FORMS[number % 3].format(
            n=name, t=thing, a=rng.randint(6, 48), b=rng.randint(2, 9), c=rng.randint(2, 18)
        )


@pytest.fixture(scope="module")
def real_tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()


# The vocabulary lacks six control characters, and the bytes that only begin code points from U+40000 on.


def test_the_mismatch_is_that_of_thirty_layers(policy, real_tokenizer):
    prompts = [[{"role": "user", "content": text}] for text in questions(8)]
    engines, options = ["replica:bf16", "replica:fp8"], {"samples": 2, "max_tokens": 24, "split": False}
    bf16, fp8 = calibrate(policy, real_tokenizer, engines, prompts, **options).engines
    assert 0.002 < bf16.estimates["discrepancy"].value < 0.02
    assert 0.02 < fp8.estimates["discrepancy"].value < 0.06  # the toy's is 0.002
    assert 0.02 < fp8.estimates["k3_kl"].value < 0.08  # the toy's is 0.0004


@pytest.mark.parametrize(("scheme", "least", "most"), [("fp8", 0.4, 1.2), ("int4", 0.02, 0.2)])
def test_the_floor_is_that_of_rounded_activations(policy, real_tokenizer, scheme, least, most):
    ids = real_tokenizer(" ".join(questions(8)), return_tensors="pt").input_ids[:, :128]
    floor, of_the_format = floor_and_format(policy, ids, scheme)
    assert least < floor / of_the_format < most


def run(folder, **fields):
    """A run of two steps of `configs/smollm2_135m.yaml`, with few and short completions, and questions of our own."""
    config = yaml.safe_load((ROOT / "configs" / "smollm2_135m.yaml").read_text())
    rows = [{"question": text, "answer": "#### 1"} for text in questions(8)]
    del config["dataset_config"]
    config |= {
        "model_name_or_path": str(MODEL),
        "dataset_name": write_rows(folder / "questions.jsonl", rows),
        "output_dir": str(folder / "run"),
        "eval_size": 0,
        # It is never right in so few tokens, and equal rewards move nothing.
        "rewards": ["tests.helpers.distinct_characters"],
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 16,
        "max_steps": 2,
        "save_strategy": "no",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config | fields))
    stack = ExitStack()
    trainer, _ = build_trainer(RunArguments.parse(["--config", str(folder / "config.yaml")]), stack)
    with stack:
        trainer.train()
    assert len(logged(trainer, "discrepancy/mean")) == 2
    assert min(logged(trainer, "grad_norm")) > 0
    return trainer


@pytest.mark.timeout(900)
def test_its_command_trains_exports_and_measures_before_and_after(tmp_path):
    small = "--max_steps 1 --eval_size 8"  # of a whole batch: the mean over few tokens is too noisy
    # Two threads that wait for each other are several times slower than one beside the tests of another process.
    command = ["make", "real-quickstart", "THREADS=1", f"ARGS={small} --output_dir {tmp_path / 'run'}"]
    assert "training seconds" in succeed(command, timeout=None).stdout
    (step,) = (row for row in read_rows(tmp_path / "run" / "history.jsonl") if "loss" in row)
    assert 0.01 < step["discrepancy/mean"] < 0.08
    config = read_json(tmp_path / "run" / "deployment" / "config.json")
    assert config["quantization_config"]["format"] == "float-quantized"


def test_nothing_is_left_of_the_replicas_mismatch_and_the_export_is_the_replica(tmp_path, real_tokenizer):
    trainer = run(tmp_path, train_through_quantization=True)
    assert max(logged(trainer, "discrepancy/mean")) < 1e-4
    replica = Replica(trainer.model, "fp8").model
    exported = tmp_path / "run" / "deployment"
    stored = tensors_in(exported)
    layers = {name: layer for name, layer in replica.named_modules() if hasattr(layer, "weight_scale")}
    assert len(layers) == 30 * 7
    for name, layer in layers.items():
        assert torch.equal(stored[f"{name}.weight"].float(), layer.weight)
        assert torch.equal(stored[f"{name}.weight_scale"].float().flatten(), layer.weight_scale)
    ids = real_tokenizer(next(questions(1)), return_tensors="pt").input_ids
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    with torch.no_grad():
        mine, theirs = (model(ids).logits[0].float().softmax(-1) for model in (replica, loaded))
    # Half of it is the distance of the distributions. compressed-tensors rounds activations otherwise.
    assert (mine - theirs).abs().sum(-1).mean() < 0.3


@pytest.mark.timeout(900)
@requires_vllm
def test_a_server_samples_answers_and_follows(policy, tmp_path):
    with serving(tmp_path, "--scheme", "fp8", "--max_model_len", "256", model=str(MODEL)) as server:
        url = server.url()
        fields = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        trainer = run(tmp_path, **fields, vllm_max_model_length=256)
        assert all(0.01 < value < 0.08 for value in logged(trainer, "discrepancy/mean"))
        asked = {
            "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 16,
            "logprobs": True,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120).json()
        (choice,) = answer["choices"]
        served = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
        ids = torch.tensor([answer["prompt_token_ids"] + choice["token_ids"]])
        # Two steps at a small rate have left it near the model that it was.
        with torch.no_grad():
            own = policy(ids).logits[0, :-1].float().softmax(-1).gather(-1, ids[0, 1:, None])[-len(served) :, 0]
        assert (served.exp() - own).abs().mean() < 0.15
