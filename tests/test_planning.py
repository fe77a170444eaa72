"""The planner: its formulas against models, counters and runs, its layouts against what they promise."""

import itertools
import json
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import calculate_maximum_sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl import TrlParser
from trl.trainer.utils import compute_flops_per_token

from dc_trl import DCGRPOConfig
from dc_trl.command import plan as plan_command
from dc_trl.command.serve import make_parser
from dc_trl.planning import commands, measured
from dc_trl.planning.architecture import architecture_of, load_architecture
from dc_trl.planning.deployed import cache_bytes, checkpoint_bytes
from dc_trl.planning.devices import DEVICES, FAST, SLOW, with_overrides
from dc_trl.planning.flops import generation_flops, training_flops
from dc_trl.planning.lengths import Lengths, Moments
from dc_trl.planning.memory import BF16_COMPUTE, FLOAT32, MicroBatch, trainer_memory
from dc_trl.planning.plan import Cluster, NoPlan, Plan, accumulation, fits, layouts, make_plan
from dc_trl.planning.sampling import Engine
from dc_trl.planning.settings import PlanSettings, settings_of_config
from dc_trl.planning.step import memory_of
from dc_trl.quantization.schemes import SCHEMES
from dc_trl.serving import server as serving
from dc_trl.training.arguments import ARGUMENTS

from .helpers import ROOT, TWO_PROCESSES, make_experts, make_model
from .vllm_server import requires_vllm


MODELS = ROOT / "configs" / "models"
ASSUMED = (SLOW, FAST)


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


# --- sizes


def test_the_sizes_of_published_models(known):
    """Numbers of their model cards, in billions: all parameters, and those that a token visits."""
    cards = {
        "qwen3_0_6b": (0.6, 0.6),
        "qwen3_8b": (8.2, 8.2),
        "qwen3_30b_a3b": (30.5, 3.3),
        "qwen3_235b_a22b": (235, 22),
    }
    for name, (total, active) in cards.items():
        digits = 0 if total > 100 else 1
        assert round(known[name].parameters / 1e9, digits) == total
        assert round(known[name].active_parameters / 1e9, digits) == pytest.approx(active, abs=0.11)


def test_sizes_are_those_of_the_model(model):
    sizes = architecture_of(model.config, "")
    assert sizes.parameters == model.num_parameters()
    # accelerate's largest layer may be the embedding.
    assert max(sizes.layer_parameters, sizes.head_parameters) * 4 == calculate_maximum_sizes(model)[1][0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_has_the_bytes_that_were_predicted(model, scheme, tmp_path):
    from dc_trl.quantization.checkpoint import CheckpointWriter
    from dc_trl.quantization.tensors import policy_tensors

    CheckpointWriter(model, scheme).write(policy_tensors(model), tmp_path / "checkpoint")
    assert measured.written(tmp_path / "checkpoint") == checkpoint_bytes(architecture_of(model.config, ""), scheme)


def test_operations_are_those_that_pytorch_counts(model):
    for row in measured.flop_rows(model, 2, 96):
        assert abs(row.error) < 2e-4, row  # the rotary embedding's table is not in the formula


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_autograd_keeps(model, dtype):
    (row,) = measured.activation_rows(model, 2, 256, dtype)
    assert abs(row.error) < 0.03, row


def test_operations_are_those_of_trl_and_transformers(known):
    for name, sizes in known.items():
        values = json.loads((MODELS / f"{name}.json").read_text())
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        tokens = 1000
        ours = training_flops(
            sizes, Moments(tokens, tokens**2), tokens, checkpointing=False, fused_head=False, causal=False
        )
        assert ours.total == pytest.approx(tokens * compute_flops_per_token(config, tokens), rel=1e-12)
        if not sizes.has_experts:
            # transformers' `floating_point_ops`: 6 × tokens × parameters without embeddings; norms are among these.
            assert ours.linear + (0 if sizes.tied else ours.head) == pytest.approx(
                6 * tokens * (sizes.parameters - sizes.head_parameters), rel=3e-4
            )


def test_causal_attention_and_windows():
    sizes = architecture_of(make_model(64).config, "")
    sequence = Moments(100, 100**2)
    every = {"checkpointing": False, "causal": False}
    half = training_flops(sizes, sequence, 1, checkpointing=False).attention
    assert training_flops(sizes, sequence, 1, **every).attention == 2 * half
    windowed = replace(sizes, windows=(10,) * sizes.layers)
    assert training_flops(windowed, sequence, 1, checkpointing=False).attention == pytest.approx(half * 10 / 50)


# --- lengths


@pytest.mark.parametrize("sigma", [0.4, 0.8])
def test_padding_is_that_of_simulated_batches(sigma):
    lengths = Lengths(2500, sigma, 8192)
    normal = np.random.default_rng(0).normal(size=(400, 512))
    drawn = np.minimum(np.exp(np.log(2500) - sigma**2 / 2 + sigma * normal), 8192)
    assert lengths.moments.first == pytest.approx(drawn.mean(), rel=0.01)
    assert lengths.moments.second == pytest.approx((drawn**2).mean(), rel=0.01)
    steps = np.sort(drawn.reshape(-1, 128))
    simulated = {
        "generation_batch": drawn.max(1),
        "micro_batch": drawn.reshape(-1, 4).max(1),
        "by_length": steps[:, 3::4],
    }
    for batching, computed in simulated.items():
        moments = lengths.computed(batching, 512, 128, 4)
        assert moments.first == pytest.approx(computed.mean(), rel=0.01), batching
        assert moments.second == pytest.approx((computed**2).mean(), rel=0.02), batching


@given(
    mean=st.floats(20, 3000), sigma=st.floats(0, 1.2), micro=st.sampled_from([1, 2, 4, 8]), cap=st.integers(1500, 4000)
)
@settings(max_examples=25, deadline=None)
def test_the_ways_to_pad_are_in_order(mean, sigma, micro, cap):
    lengths = Lengths(mean, sigma, cap)
    real = lengths.moments.first
    by_length, by_micro, by_all = (
        lengths.computed(batching, 64, 32, micro).first
        for batching in ("by_length", "micro_batch", "generation_batch")
    )
    slack = 1 + 5 * cap / 1024 / real  # the grid of the order statistics
    assert real <= by_length * slack
    assert by_length <= by_micro * slack
    assert by_micro <= by_all * 1.0001
    if micro == 1:
        assert by_micro == pytest.approx(real)


# --- time and memory


def test_generation_is_the_sum_of_its_steps(known):
    """All of one length: a loop over tokens, written by hand for a dense model in BF16 on two devices."""
    sizes, device = known["qwen3_8b"], DEVICES["h100"]
    sequences, prompt, length = 16, 100, 400
    engine = Engine(sizes, "bf16", device, 2)
    weights = 2 * (sizes.parameters - sizes.vocabulary * sizes.hidden) / 2
    seconds = 0.0
    for t in range(length):
        read = weights + sequences * (prompt + t) * 36 * 2 * (8 / 2) * 128 * 2
        products = sequences * (2 * (sizes.active_linear + sizes.head_parameters) + 4 * 36 * 4096 * (prompt + t))
        memory, arithmetic = read / (3350e9 * 0.75), products / (2 * 989e12 * 0.5)
        seconds += max(memory, arithmetic) + 0.002 + 2 * 36 * 15e-6
    read_prompts = 2 * (2 * sizes.active_linear * prompt + 4 * 36 * 4096 * prompt**2 / 2 + 2 * sizes.head_parameters)
    seconds += read_prompts / (2 * 989e12 * 0.5)
    assert engine.seconds(sequences, prompt, Lengths(length, 0, 8192), 8, FAST) == pytest.approx(seconds, rel=1e-6)


def test_generation_operations_are_the_sum_over_tokens(known):
    sizes = known["qwen3_8b"]
    expected = 0.0
    for position in range(50 + 200):
        share = 1 / 4 if position < 50 else 1  # four completions share a prompt
        expected += share * (2 * sizes.active_linear + 4 * sizes.layers * sizes.query_width * (position + 0.5))
    expected += 200 * 2 * sizes.head_parameters
    assert generation_flops(sizes, 50, Moments(200, 200**2), 4).total == pytest.approx(expected)


def test_waves_where_the_cache_is_small(known):
    """A cache for half of the sequences: twice the steps, each of half the batch."""
    lengths = Lengths(1000, 0, 2048)
    engine = Engine(known["qwen3_8b"], "bf16", DEVICES["h100"], 1)
    limit = engine.concurrency(100, lengths)
    one, two = (engine.seconds(count, 100, lengths, 10**9, FAST) for count in (limit, 2 * limit))
    assert two == pytest.approx(2 * one)


def test_tensor_parallel_beyond_the_heads_repeats_the_cache(known):
    sizes = known["qwen3_30b_a3b"]  # 4 key-value heads
    assert cache_bytes(sizes, 4) == cache_bytes(sizes) / 4
    assert cache_bytes(sizes, 8) == cache_bytes(sizes, 4)


def test_states_of_each_strategy_by_hand(known):
    """Bytes for a parameter: 16 in float32 with AdamW; ZeRO's 2 + 2 + 12 (arXiv 1910.02054)."""
    sizes = known["qwen3_8b"]
    micro = MicroBatch(1, 100, 50, accumulated=True)

    def states(strategy, devices, micro=micro, precision=BF16_COMPUTE):
        memory = trainer_memory(sizes, strategy, devices, micro, precision=precision, checkpointing=True)
        return (memory.weights + memory.gradients + memory.moments) / sizes.parameters

    assert states("ddp", 8) == 16
    assert states("ddp", 1, precision=FLOAT32) == 16
    assert states("fsdp2", 8, micro._replace(accumulated=False)) == 16 / 8
    assert states("fsdp2", 8) == 16 / 8 + 2
    assert states("zero2", 8) == 2 + (2 + 12) / 8
    assert states("zero3", 8) == (2 + 2 + 12) / 8


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


# --- plans


WORK = PlanSettings().workload()
CLUSTERS = {
    "qwen3_0_6b": Cluster(DEVICES["h100"], 8, 8),
    "qwen3_8b": Cluster(DEVICES["h100"], 8, 8),
    "qwen3_30b_a3b": Cluster(DEVICES["h100"], 32, 8),
    "qwen3_235b_a22b": Cluster(DEVICES["h100"], 512, 8),
}


@pytest.fixture(scope="module", params=CLUSTERS)
def plan(request, known):
    made = make_plan(known[request.param], WORK, CLUSTERS[request.param], ASSUMED)
    assert isinstance(made, Plan)
    return made


def test_a_layout_keeps_its_promises(plan):
    every = list(itertools.islice(layouts(plan.model, WORK, plan.cluster), 500))
    assert plan.layout in layouts(plan.model, WORK, plan.cluster)
    for layout in every:
        assert layout.train_devices + layout.serving_devices <= plan.cluster.devices
        assert memory_of(plan.model, WORK, layout).total <= plan.cluster.device.memory
        assert not Engine(plan.model, "fp8", plan.cluster.device, layout.tensor_parallel).why_not(WORK.longest)
        micro, steps, generation = accumulation(WORK, layout)
        assert layout.train_devices * micro * steps == 128
        assert layout.train_devices * micro * generation == 512


def test_parts_and_gains(plan):
    for parts in (plan.slow, plan.fast):
        assert parts.total() == pytest.approx(sum(parts))
        training = parts.old_logps + parts.loss + parts.optimizer
        assert parts.total(overlap=True) == pytest.approx(max(parts.generation, training) + parts.sync)
    seconds = list(plan.gains.values())
    assert all(later[0] <= earlier[0] for earlier, later in itertools.pairwise(seconds))
    assert seconds[-1] == (plan.slow.total(overlap=True), plan.fast.total(overlap=True))


def test_faster_assumptions_are_faster(plan):
    assert plan.fast.total() < plan.slow.total()
    slow, fast = with_overrides({"write_rate": [3e9]})
    assert slow.write_rate == fast.write_rate == 3e9
    assert slow.read_rate == SLOW.read_rate
    with pytest.raises(ValueError, match="write_rate"):
        with_overrides({"write_rate": [1.0, 2.0, 3.0]})


def test_nothing_fits_and_the_remedy_does(known):
    cluster = Cluster(DEVICES["h100"], 16, 8)
    refused = make_plan(known["qwen3_30b_a3b"], WORK, cluster, ASSUMED)
    assert isinstance(refused, NoPlan)
    assert "training needs" in refused.reasons[0]
    assert "use 24 devices of this kind" in refused.remedies
    assert fits(known["qwen3_30b_a3b"], WORK, replace(cluster, devices=24))
    assert not fits(known["qwen3_30b_a3b"], WORK, replace(cluster, devices=16))
    (other,) = (remedy for remedy in refused.remedies if "×" in remedy)
    assert isinstance(
        make_plan(known["qwen3_30b_a3b"], WORK, replace(cluster, device=DEVICES[other.split()[-1]]), ASSUMED), Plan
    )


def test_an_odd_batch_is_refused_with_the_reason(known):
    odd = replace(WORK, completions=513, completions_per_step=171)
    refused = make_plan(known["qwen3_8b"], odd, Cluster(DEVICES["h100"], 16, 8), ASSUMED)
    assert "171 completions" in refused.reasons[0]
    alone = make_plan(known["qwen3_0_6b"], WORK, Cluster(DEVICES["h100"], 1, 8), ASSUMED)
    assert isinstance(alone, NoPlan)


# --- commands


def test_the_server_line_is_that_of_our_script(plan, monkeypatch):
    monkeypatch.setattr(serving, "vllm_version", lambda: "0.31.0")
    monkeypatch.setattr(serving, "free_port", lambda host, port: port)
    words = commands.vllm_command(plan)
    server = serving.VLLMServer(
        words[2],
        host=words[4],
        port=8000,
        max_model_len=plan.work.longest,
        options=commands.engine_options(plan),
    )
    assert sorted(server.arguments) == sorted(words[1:])
    program, name, *options = commands.serve_command(plan)
    assert (program, name) == ("dc-trl", "serve")
    assert make_parser().parse_args(options).options == commands.engine_options(plan)


@requires_vllm
def test_the_installed_vllm_reads_the_server_line(plan):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = commands.vllm_command(plan)[2:]
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert read.max_model_len == WORK.longest
    assert read.tensor_parallel_size == plan.layout.tensor_parallel
    assert read.data_parallel_size == commands.replicas_of_a_node(plan.layout)
    assert read.logprobs_mode == "processed_logprobs"


def test_the_launcher_and_the_trainer_read_the_launch_line(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = commands.launch_command(plan)
    script = words.index("dc_trl")
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2 : script + 2]))
    assert (args.module, args.training_script, args.training_script_args) == (True, "dc_trl", ["train"])
    assert args.num_processes == plan.layout.train_devices
    assert args.num_machines == plan.layout.train_nodes
    assert args.use_fsdp == (plan.layout.strategy == "fsdp2")
    known_options = {option for action in TrlParser(ARGUMENTS)._actions for option in action.option_strings}
    assert {word for word in words[script + 2 :] if word.startswith("--")} <= known_options | {"--config"}


def test_the_trainer_takes_gradients_that_are_reduced_each_time(plan, tmp_path):
    words = commands.launch_command(replace(plan, layout=replace(plan.layout, strategy="fsdp2", reduce_each=True)))
    value = words[words.index("--accelerator_config") + 1]
    config = DCGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, accelerator_config=value)
    assert config.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}


# --- configurations and the script


def test_the_batch_of_a_recipe():
    path = ROOT / "configs" / "qwen3_30b_a3b_fp8.yaml"
    found, model = settings_of_config(path, 16)
    assert model == "Qwen/Qwen3-30B-A3B"
    work = PlanSettings(**found).workload()
    assert (work.completions, work.completions_per_step, work.generations) == (512, 128, 8)
    assert (work.lengths.cap, work.longest, work.scheme) == (8192, 10240, "fp8")
    assert work.precision == BF16_COMPUTE
    with pytest.raises(ValueError, match="use_vllm"):
        settings_of_config(ROOT / "configs" / "quickstart.yaml", 1)


@pytest.mark.parametrize(
    ("options", "completions"),
    [
        ("--gpus 8", [1024]),
        ("--gpus 4 8", [512, 1024]),
        ("--gpus 8 16 --processes 4", [512, 512]),
        ("--gpus 16 --accelerate_config configs/accelerate/fsdp2.yaml", [512]),
    ],
)
def test_the_devices_are_the_processes_that_the_batch_is_for(options, completions, monkeypatch):
    """By hand: the file has 2 rows for each process, 64 times; fsdp2.yaml has 4 processes."""
    monkeypatch.chdir(ROOT)
    words = f"--model configs/models/qwen3_8b.json --config configs/qwen3_8b_fp8.yaml {options}"
    plans, _ = plan_command.make_plans(plan_command.make_parser().parse_args(words.split()))
    assert [plan.work.completions for plan in plans] == completions


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompts": 0}, "prompts"),
        ({"optimizer_steps": 3}, "optimizer_steps=3 does not divide"),
        ({"prompt_length": 5000}, "prompt_length=5000"),
        ({"scheme": "int3"}, "int3"),
        ({"length_sigma": -1.0}, "length_sigma"),
    ],
)
def test_wrong_settings_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        PlanSettings(**wrong).workload()


def test_models_that_are_not_known(tmp_path):
    wrong = {
        "deepseek_v3": "kv_lora_rank",
        "qwen3_next": "linear_attention",
        "bert": "num_key_value_heads",
    }
    for kind, words in wrong.items():
        file = tmp_path / f"{kind}.json"
        file.write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ValueError, match=words):
            load_architecture(str(file))
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(ValueError, match="no model_type"):
        load_architecture(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="does not exist"):
        load_architecture(str(tmp_path / "absent"))


@pytest.mark.long
def test_the_script_starts_nothing(tmp_path):
    """It loads neither vLLM nor TRL nor weights, and prints the numbers of the plan."""
    arguments = ["dc-trl", "plan", "--model", str(MODELS / "qwen3_8b.json"), "--gpus", "8", "--json"]
    arguments += ["--config", "configs/qwen3_8b_fp8.yaml", "--accelerate_config", "configs/accelerate/fsdp2.yaml"]
    code = f"import runpy, sys; sys.argv = {arguments}; runpy.run_module('dc_trl', run_name='__main__')"
    code += "; print(sorted({'vllm', 'trl', 'deepspeed'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.splitlines()[-1] == "[]"
    (plan,) = json.loads(done.stdout)
    assert plan["fits"]
    assert plan["parameters"] == 8190735360
    assert plan["seconds"]["fast"]["generation"] < plan["seconds"]["slow"]["generation"]
    assert shlex.split(plan["commands"][1])[1:3] == ["accelerate", "launch"]


def test_the_configuration_of_the_tiny_model_is_read():
    folder = ROOT / "dc_trl" / "assets" / "tiny_qwen3"
    sizes = load_architecture(str(folder))
    assert sizes == replace(load_architecture(str(folder / "config.json")), name=str(folder))
    assert sizes.parameters == AutoModelForCausalLM.from_pretrained(folder).num_parameters()


def test_steps_are_measured():
    from dc_trl.planning.measured import missing_memory, run_steps, tiny_model

    run, model = run_steps(tiny_model, 8, 16, 3)
    sizes = architecture_of(model.config, "")
    assert run.seconds > 0
    assert run.tokens > 16
    if sys.platform == "linux":
        assert run.peak > 3 * 4 * sizes.parameters  # weights, gradients and more
    assert not missing_memory(sizes, 1, 16)
    assert "are free" in missing_memory(sizes, 10**6, 10**4)


@pytest.mark.long
def test_steps_of_two_processes_are_measured():
    from dc_trl.planning.trials import _two_processes

    assert _two_processes(8, 16).seconds > 0
