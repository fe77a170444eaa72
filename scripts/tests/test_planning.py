"""The planner: its sizes and formulas against models and runs."""

import json
import multiprocessing
import sys

import planning_measured as measured
import pytest
import torch
from accelerate.utils import calculate_maximum_sizes
from planning_measured import plan
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import ROOT, TINY_MODEL, make_experts, make_model, refuses


MODELS = ROOT / "configs" / "models"


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=300, tie_word_embeddings=False))


MAKERS = {
    "tied": lambda: make_model(128),
    "untied": lambda: make_model(128, tie_word_embeddings=False),
    "experts": lambda: make_experts(128),
    "llama": llama,
}


@pytest.fixture(scope="module", params=MAKERS)
def model(request):
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def known():
    """The published models by the name of their file."""
    return {file.stem: plan.load_architecture(str(file)) for file in MODELS.glob("*.json")}


# --- sizes and memory


def test_the_sizes_of_published_models(known):
    """Billions of parameters on their model cards."""
    cards = {"qwen3_0_6b": 0.6, "qwen3_8b": 8.2, "qwen3_30b_a3b": 30.5, "qwen3_235b_a22b": 235}
    for name, billions in cards.items():
        assert known[name].parameters / 1e9 == pytest.approx(billions, abs=0.1 if billions < 100 else 0.5)


def test_sizes_are_those_of_the_model(model):
    sizes = plan.architecture_of(model.config, "")
    assert sizes.parameters == model.num_parameters()
    # accelerate's largest layer may be the embedding.
    assert max(sizes.layer_parameters, sizes.head_parameters) * 4 == calculate_maximum_sizes(model)[1][0]


def test_the_configuration_of_the_tiny_model_is_read():
    sizes = plan.load_architecture(str(TINY_MODEL))
    assert sizes == plan.load_architecture(str(TINY_MODEL / "config.json"))
    assert sizes.parameters == measured.tiny_model().num_parameters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_autograd_keeps(model, dtype):
    row = measured.activation_row(model, 2, 256, dtype)
    assert abs(row.error) < 0.03, row


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says the peak of a step")
def test_the_peak_of_a_real_step():
    """The plan is a lower bound for a model of 3 MB: the C library keeps freed blocks, and backward has buffers."""
    with multiprocessing.get_context("spawn").Pool(1) as fresh:  # this one has freed blocks to use
        row = fresh.apply(measured.peak_row, (measured.tiny_model, 16, 64, 2))
    assert -0.8 < row.error < 0.05, row


def test_states_of_each_strategy_by_hand(known):
    """Bytes for a parameter: 16 in float32 with AdamW, sharded or not (ZeRO, arXiv 1910.02054)."""
    sizes = known["qwen3_8b"]

    def states(strategy, devices, precision="mixed", accumulated=True):
        memory = plan.trainer_memory(sizes, strategy, devices, plan.Work(precision=precision), not accumulated)
        return (memory.weights + memory.gradients + memory.moments) / sizes.parameters

    assert states("ddp", 8) == 16
    assert states("ddp", 1, "float32") == 16
    assert states("fsdp2", 8, accumulated=False) == 16 / 8
    assert states("fsdp2", 8) == 16 / 8 + 2


# --- configurations and the command


def test_the_work_of_a_recipe():
    found, model = plan.work_of_config(ROOT / "configs" / "qwen3_30b_a3b_fp8.yaml")
    assert model == "Qwen/Qwen3-30B-A3B"
    work = plan.Work(**found)
    assert work.max_completion_length == 8192
    assert plan.PRECISIONS[work.precision] == (4, 2)
    with refuses(ValueError, "use_vllm"):
        plan.work_of_config(ROOT / "configs" / "quickstart.yaml")


def test_models_that_are_not_known(tmp_path):
    wrong = {"deepseek_v3": "kv_lora_rank", "qwen3_next": "linear_attention"}
    for kind, words in wrong.items():
        file = tmp_path / f"{kind}.json"
        file.write_text(json.dumps({"model_type": kind}))
        with refuses(ValueError, words):
            plan.load_architecture(str(file))
    (tmp_path / "none.json").write_text("{}")
    with refuses(ValueError, "Unrecognized model"):
        plan.load_architecture(str(tmp_path / "none.json"))
    with refuses(ValueError, "does not exist"):
        plan.load_architecture(str(tmp_path / "absent"))


def test_the_table(capsys):
    """Qwen3-30B-A3B does not fit eight H100s, and fits sixteen."""
    fits = {}
    for gpus in (8, 16):
        plan.main(["--model", str(MODELS / "qwen3_30b_a3b.json"), "--gpus", str(gpus)])
        shown = capsys.readouterr().out
        (line,) = (line for line in shown.splitlines() if " fits " in line)
        fits[gpus] = [word for word in line.split() if word in ("yes", "no")]
    assert fits == {8: ["no", "no", "no"], 16: ["no", "no", "yes"]}
