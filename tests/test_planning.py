"""The planner: its sizes and formulas against models and runs, its layouts against what they promise."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from accelerate.utils import calculate_maximum_sizes
from transformers import LlamaConfig, LlamaForCausalLM

from dc_trl.command import plan as plan_command
from dc_trl.planning.architecture import architecture_of, load_architecture
from dc_trl.planning.layouts import Problem, Work, layouts, reason, work_of_config
from dc_trl.planning.memory import PRECISIONS, MicroBatch, trainer_memory
from dc_trl.quantization.schemes import SCHEMES

from . import planning_measured as measured
from .helpers import ROOT, TINY_MODEL, TWO_PROCESSES, make_experts, make_model


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
    return {file.stem: load_architecture(str(file)) for file in MODELS.glob("*.json")}


# --- sizes and memory


def test_the_sizes_of_published_models(known):
    """Billions of parameters on their model cards."""
    cards = {"qwen3_0_6b": 0.6, "qwen3_8b": 8.2, "qwen3_30b_a3b": 30.5, "qwen3_235b_a22b": 235}
    for name, billions in cards.items():
        assert known[name].parameters / 1e9 == pytest.approx(billions, abs=0.1 if billions < 100 else 0.5)


def test_sizes_are_those_of_the_model(model):
    sizes = architecture_of(model.config, "")
    assert sizes.parameters == model.num_parameters()
    # accelerate's largest layer may be the embedding.
    assert max(sizes.layer_parameters, sizes.head_parameters) * 4 == calculate_maximum_sizes(model)[1][0]


def test_the_configuration_of_the_tiny_model_is_read():
    sizes = load_architecture(str(TINY_MODEL))
    assert sizes == replace(load_architecture(str(TINY_MODEL / "config.json")), name=str(TINY_MODEL))
    assert sizes.parameters == measured.tiny_model().num_parameters()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_has_the_bytes_that_were_predicted(model, scheme):
    row = measured.checkpoint_row(model, scheme)
    assert row.predicted == row.measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_autograd_keeps(model, dtype):
    row = measured.activation_row(model, 2, 256, dtype)
    assert abs(row.error) < 0.03, row


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says the peak of a step")
def test_the_peak_of_a_real_step():
    """The plan is a lower bound for a model of 3 MB: the C library keeps freed blocks, and backward has buffers."""
    row = measured.peak_row(measured.tiny_model, 16, 64, 2)
    assert -0.8 < row.error < 0.05, row


def test_states_of_each_strategy_by_hand(known):
    """Bytes for a parameter: 16 in float32 with AdamW, sharded or not (ZeRO, arXiv 1910.02054)."""
    sizes = known["qwen3_8b"]

    def states(strategy, devices, precision="mixed", accumulated=True):
        micro = MicroBatch(1, 100, 50, accumulated, PRECISIONS[precision], checkpointing=True)
        memory = trainer_memory(sizes, strategy, devices, micro)
        return (memory.weights + memory.gradients + memory.moments) / sizes.parameters

    assert states("ddp", 8) == 16
    assert states("ddp", 1, "float32") == 16
    assert states("fsdp2", 8, accumulated=False) == 16 / 8
    assert states("fsdp2", 8) == 16 / 8 + 2


@pytest.mark.long
def test_fsdp2_holds_accumulated_gradients_whole(tmp_path):
    """What the plan says of gradients that are not reduced between micro-batches, in two real processes."""
    file = tmp_path / "held.json"
    command = [*TWO_PROCESSES, "-m", "tests.planning_worker", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    held, count = json.loads(file.read_text()), make_model(64).num_parameters()
    assert held["accumulated"] == 2 * count  # whole, in BF16
    assert held["reduced"] == pytest.approx(4 * count / 2, rel=0.01)  # a float32 shard, and padding


# --- layouts


@pytest.mark.parametrize(
    ("name", "devices"), [("qwen3_0_6b", 8), ("qwen3_8b", 8), ("qwen3_30b_a3b", 32), ("qwen3_235b_a22b", 512)]
)
def test_a_layout_keeps_its_promises(known, name, devices):
    problem = Problem(known[name], Work(), "h100", devices)
    found = list(layouts(problem))
    assert found
    for layout in found:
        training, engine, replicas = layout
        numbers = plan_command.numbers_of(problem, layout)
        assert training.devices + engine.tensor_parallel * replicas <= devices
        assert numbers["peak"] <= 80e9 * 0.92
        assert numbers["cache_tokens"] >= 10240
        rows = training.devices * numbers["per_device_train_batch_size"]
        assert rows * numbers["gradient_accumulation_steps"] == 128
        assert rows * numbers["steps_per_generation"] == 512


def test_what_does_not_fit_says_why(known):
    problem = Problem(known["qwen3_30b_a3b"], Work(), "h100", 16)
    assert not list(layouts(problem))
    assert "training needs at least 76 GB of 74 GB on each of up to 8 devices" in reason(problem)
    assert list(layouts(replace(problem, devices=24)))
    assert list(layouts(replace(problem, device="h200")))
    odd = Problem(known["qwen3_8b"], Work(prompts=171, generations=3, optimizer_steps=3), "h100", 16)
    assert "171 completions" in reason(odd)
    large = Problem(known["qwen3_235b_a22b"], Work(scheme="bf16"), "h100", 4)
    assert "leave a cache of 0 tokens for sequences of 10,240" in reason(large)


# --- configurations and the command


def test_the_batch_of_a_recipe():
    path = ROOT / "configs" / "qwen3_30b_a3b_fp8.yaml"
    found, model = work_of_config(path, 16)
    assert model == "Qwen/Qwen3-30B-A3B"
    work = Work(**found)
    assert (work.completions, work.completions_per_step, work.generations) == (512, 128, 8)
    assert (work.max_completion_length, work.longest, work.scheme) == (8192, 10240, "fp8")
    assert PRECISIONS[work.precision] == (4, 2)
    with pytest.raises(ValueError, match="use_vllm"):
        work_of_config(ROOT / "configs" / "quickstart.yaml", 1)


@pytest.mark.parametrize(("options", "completions"), [("--gpus 8", 1024), ("--gpus 8 --processes 4", 512)])
def test_the_devices_are_the_processes_that_the_batch_is_for(options, completions, monkeypatch):
    """By hand: the file has 2 rows for each process, 64 times."""
    monkeypatch.chdir(ROOT)
    words = f"--model configs/models/qwen3_8b.json --config configs/qwen3_8b_fp8.yaml {options}"
    problem = plan_command.problem_of(plan_command.make_parser().parse_args(words.split()))
    assert problem.work.completions == completions


def test_models_that_are_not_known(tmp_path):
    wrong = {"deepseek_v3": "kv_lora_rank", "qwen3_next": "linear_attention", "bert": "num_key_value_heads"}
    for kind, words in wrong.items():
        file = tmp_path / f"{kind}.json"
        file.write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ValueError, match=words):
            load_architecture(str(file))
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded: Unrecognized model"):
        load_architecture(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="does not exist"):
        load_architecture(str(tmp_path / "absent"))


def test_the_table_and_its_refusal(capsys):
    plan_command.main(["--model", str(MODELS / "qwen3_8b.json")])
    assert "A weight sync moves 9.4 GB as a checkpoint in fp8, 16 GB as TRL's stream." in capsys.readouterr().out
    plan_command.main(["--model", str(MODELS / "qwen3_8b.json"), "--gpus", "1"])
    assert "nothing fits, because" in capsys.readouterr().out
