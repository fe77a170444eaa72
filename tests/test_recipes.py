"""The papers' recipes: their numbers, their sources, their commands, and training steps of each on a tiny stand-in."""

import importlib
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import PreTrainedModel, Qwen2Config, Qwen3MoeForCausalLM

from dc_trl.command.arguments import RunArguments, require_servable
from dc_trl.command.build import build_trainer
from dc_trl.grading.rewards import get_reward
from dc_trl.settings.distribution import recompute_once

from .helpers import (
    ROOT,
    assert_finite,
    code_blocks,
    commands_in,
    logged,
    make_experts,
    make_model,
    random_model,
    save,
)
from .vllm_server import requires_vllm


OF_NO_PAPER = {"quickstart", "quickstart_vllm_fp8", "smollm2_135m", "smollm2_sequences", "own_model"}


class Recipe(NamedTuple):
    """What the papers, or docs/papers.md, say of a recipe: written by hand, not read from its file."""

    architecture: str
    processes: int
    prompts: int  # in a generation batch
    completions: int  # of a prompt
    optimizer_steps: int  # on a generation batch
    scheme: str
    constraint: str
    tolerance: float
    lambda_init: float


DENSE = Recipe("qwen3", 4, 64, 8, 4, "fp8", "lagrangian", 0.0037, 0.1)
LENGTH_DECAY = Recipe("qwen3", 4, 64, 16, 1, "bf16", "none", 0.0037, 0.1)
RECIPES = {
    "qwen3_8b_fp8": DENSE,
    "qwen3_8b_bf16": DENSE._replace(scheme="bf16"),
    "qwen3_30b_a3b_fp8": DENSE._replace(architecture="qwen3_moe", processes=16, tolerance=0.005, lambda_init=0.05),
    # The paper's study is of GRPO.
    "r1_distill_qwen_1_5b_temperature": DENSE._replace(architecture="qwen2", constraint="none"),
    "qwen3_4b_base_length_decay": LENGTH_DECAY,
    "qwen3_8b_base_length_decay": LENGTH_DECAY,
}
# What a small machine forces, and nothing else: every other field is the file's. None: left out.
OVERRIDES = {
    "model_name_or_path": "a tiny stand-in of the same architecture",
    "output_dir": "a temporary directory",
    "use_cpu": True,
    "bf16": False,
    "dataset_name": "arithmetic",
    "eval_size": 0,
    # A random model is never right, and equal rewards move nothing.
    "rewards": ["tests.helpers.distinct_characters"],
    # The replica in the same scheme in the place of the server.
    "use_vllm": False,
    "vllm_mode": None,
    "vllm_server_base_url": None,
    "weight_sync": None,
    "weight_sync_dir": None,
    "serve": None,
    "serve_devices": None,
    "serve_options": None,
    "max_completion_length": 6,
    # One prompt in an optimizer step; the number of steps on a generation batch is the file's.
    "per_device_train_batch_size": "num_generations",
    "gradient_accumulation_steps": 1,
    "steps_per_generation": "optimizer steps on a generation batch",
    # Until the second generation batch has begun.
    "max_steps": "optimizer steps on a generation batch + 1",
}


def path_of(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


def fields(name: str) -> dict:
    return yaml.safe_load(path_of(name).read_text())


def stand_in(architecture: str) -> PreTrainedModel:
    if architecture == "qwen3_moe":
        return make_experts(32)
    if architecture == "qwen3":
        return make_model(32, tie_word_embeddings=False)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": 1}
    return random_model(Qwen2Config, initializer_range=0.2, **shape)


def parse(config: dict, folder: Path) -> RunArguments:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return RunArguments.parse(["--config", str(file)])


def test_no_configuration_escapes():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == OF_NO_PAPER | set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_numbers(name, tmp_path):
    recipe, config = RECIPES[name], fields(name)
    # As it is, on this machine, without the GPUs that BF16 training wants.
    data, server, watch, args, model = parse(config | {"use_cpu": True, "bf16": False}, tmp_path)
    require_servable(server, args)
    completions = recipe.processes * args.per_device_train_batch_size * args.steps_per_generation
    assert completions == recipe.prompts * recipe.completions
    assert args.num_generations == recipe.completions
    assert args.steps_per_generation == recipe.optimizer_steps * args.gradient_accumulation_steps
    step = recipe.processes * args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert step // recipe.completions == recipe.prompts // recipe.optimizer_steps
    assert (args.deployment_scheme, args.constraint) == (recipe.scheme, recipe.constraint)
    assert (args.discrepancy_tolerance, args.lambda_init) == (recipe.tolerance, recipe.lambda_init)
    assert (args.learning_rate, args.max_completion_length, args.beta) == (1e-6, 8192, 0.0)
    assert (args.temperature, args.top_p, args.lr_scheduler_type) == (1.0, 1.0, "constant")
    assert args.vllm_max_model_length == data.max_prompt_length + args.max_completion_length
    assert get_reward(data.rewards[0]).__name__ == "math_reward"
    assert model.dtype == "float32"
    assert args.ddp_timeout > args.vllm_request_timeout
    assert {"weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "loss_type"} < config.keys()
    if recipe.constraint == "lagrangian":
        assert (args.lambda_lr, args.lambda_min, args.lambda_max) == (1.0, 0.0, 1.0)
    if not name.endswith("length_decay"):
        assert (args.epsilon, args.epsilon_high or args.epsilon, args.loss_type) == (0.24, 0.24, "grpo")
        assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.95, 1e-8)
        assert (args.weight_decay, args.max_grad_norm) == (0.0, 1.0)
        assert (args.scale_rewards, args.drop_zero_std_groups, watch.length_decay) == ("group", False, False)
    else:
        assert (args.epsilon, args.epsilon_high, args.weight_decay, args.max_grad_norm) == (0.2, 0.28, 0.01, 1.0)
        assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.loss_type) == (0.9, 0.999, 1e-8, "dapo")
        assert (args.scale_rewards, args.drop_zero_std_groups) == ("none", True)
        assert (watch.length_decay, watch.length_decay_period) == (True, None)
        assert not args.vllm_importance_sampling_correction
        assert args.vllm_importance_sampling_clip_max == 2.0


def parse_small(name: str, config: dict, model: PreTrainedModel, folder: Path):
    """The fields that a small machine leaves as they are, and all arguments for a run of this model there."""
    save(model, folder / "model")
    recipe = RECIPES[name]
    small = OVERRIDES | {
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": recipe.completions,
        "steps_per_generation": recipe.optimizer_steps,
        "max_steps": recipe.optimizer_steps + 1,
    }
    kept = {field: value for field, value in config.items() if field not in OVERRIDES}
    changed = {field: value for field, value in small.items() if value is not None}
    return kept, parse(kept | changed, folder)


@pytest.mark.parametrize("name", RECIPES)
def test_a_stand_in_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe, config = RECIPES[name], fields(name)
    model = stand_in(recipe.architecture)
    steps = recipe.optimizer_steps
    kept, parsed = parse_small(name, config, model, tmp_path)
    assert len(kept) >= 25
    for field, value in kept.items():
        holder = next(arguments for arguments in parsed if hasattr(arguments, field))
        found = getattr(holder, field)
        if field == "accelerator_config":  # transformers makes an object of it
            found = {name: getattr(found, name) for name in value}
        assert found == ([] if value == "none" and field == "report_to" else value), field
    with ExitStack() as stack:
        trainer, _ = build_trainer(parsed, stack)
        trainer.train()
    assert trainer.state.global_step == steps + 1
    assert_finite(trainer)
    assert isinstance(trainer.model, type(model))
    assert isinstance(trainer.replica.model, Qwen3MoeForCausalLM) == (recipe.architecture == "qwen3_moe")
    assert trainer.replica.scheme == recipe.scheme
    losses, rewards = logged(trainer, "loss"), logged(trainer, "reward_std")
    assert len(losses) == steps + 1
    assert max(rewards) > 0
    before, after = trainer.state.log_history[0], trainer.state.log_history[steps]
    discrepancy = logged(trainer, "discrepancy/mean")[0]
    assert 0 < discrepancy < 0.05
    if recipe.constraint == "lagrangian":
        moved = min(max(recipe.lambda_init + 1.0 * (discrepancy - recipe.tolerance), 0.0), 1.0)
        assert before["lagrangian/lambda"] == pytest.approx(recipe.lambda_init)
        assert after["lagrangian/lambda"] == pytest.approx(moved)
    rates = logged(trainer, "learning_rate")
    assert rates == [1e-6] * (steps + 1)


# --- how they are launched ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), [("fsdp2", None), ("fsdp2_moe", "Qwen3MoeDecoderLayer")])
def test_accelerate_reads_the_sharding(name, layer, monkeypatch):
    file = str(ROOT / "configs" / "accelerate" / f"{name}.yaml")
    config = load_config_from_file(file)
    assert {recipe.processes for recipe in RECIPES.values() if launch_of(recipe) == name} == {config.num_processes}
    # What `accelerate launch` would hand to each process, and what they make of it.
    args, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", file, "scripts/train.py"])
    )
    assert args.use_fsdp
    environment = prepare_multi_gpu_env(args)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type.name == ("FULL_STATE_DICT" if layer is None else "SHARDED_STATE_DICT")
    assert plugin.cpu_ram_efficient_loading
    assert plugin.activation_checkpointing
    assert environment["FSDP_OFFLOAD_PARAMS"] == "false"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP") == layer
    # The units are there: the stand-in's decoder layers, and nothing else.
    model = stand_in("qwen3_moe" if layer else "qwen3")
    plugin.set_auto_wrap_policy(model)
    units = [type(module).__name__ for module in model.modules() if plugin.auto_wrap_policy(module, False, 0)]
    assert units == [layer or "Qwen3DecoderLayer"] * 2


@pytest.mark.parametrize(
    "launch", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda file: file.stem
)
@pytest.mark.parametrize("given", [None, True, False])
def test_activations_are_recomputed_once_under_every_launch_file(launch, given, monkeypatch, tmp_path, caplog):
    """Each recipe as it is, and one with the field; accelerate says what a launch file means."""
    launched = yaml.safe_load(launch.read_text())
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(launch), "x.py"]))
    for variable, value in prepare_multi_gpu_env(args).items() if args.use_fsdp else ():
        monkeypatch.setenv(variable, value)
    by_launch = launched.get("fsdp_config", {}).get("fsdp_activation_checkpointing", False)
    sharded = launched["distributed_type"] in ("FSDP", "DEEPSPEED")
    for name in RECIPES if given is None else ["qwen3_8b_fp8"]:
        config = fields(name) | {"use_cpu": True, "bf16": False}
        monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)  # one process is not launched with it
        run = parse(config if given is None else config | {"gradient_checkpointing": given}, tmp_path).trainer
        monkeypatch.setenv("ACCELERATE_USE_FSDP", str(args.use_fsdp).lower())
        if launched["distributed_type"] == "DEEPSPEED":
            run.deepspeed_plugin = SimpleNamespace(zero_stage=launched["deepspeed_config"]["zero_stage"])
        with caplog.at_level("WARNING"):
            recompute_once(run)
        assert by_launch + run.gradient_checkpointing == (given is not False or by_launch), name
        warned = "gradient_checkpointing=False" in caplog.text
        assert warned == (sharded and given is False and not by_launch), name
        caplog.clear()


def launch_of(recipe: Recipe) -> str:
    return "fsdp2_moe" if recipe.architecture == "qwen3_moe" else "fsdp2"


def commands() -> list[list[str]]:
    """Commands of docs/papers.md and of the files' headers."""
    blocks = code_blocks((ROOT / "docs" / "papers.md").read_text(), "bash")
    for name in RECIPES:
        blocks += [line[4:] for line in path_of(name).read_text().splitlines() if line.startswith("#   ")]
    words = commands_in("\n".join(blocks))
    return [[word for word in command if "=" not in word or command.index(word) > 0] for command in words]


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words)[:60])
def test_commands_are_read_by_the_programs_themselves(words, tmp_path):
    if words[:2] == ["accelerate", "launch"]:
        args = launch_command_parser().parse_args(words[2:])
        given = args.training_script_args
        if args.module:
            assert (args.training_script, given.pop(0)) == ("dc_trl", "train")
        else:
            assert args.training_script == "scripts/train.py"
        name = Path(given[1]).stem
        assert args.config_file == f"configs/accelerate/{launch_of(RECIPES[name])}.yaml"
        config = fields(name) | {"use_cpu": True, "bf16": False}
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        RunArguments.parse(["--config", str(file), *given[2:]])
        return
    assert words[0] in ("python", "dc-trl")
    program = Path(words[1]).stem.replace("-", "_")
    assert program in ("serve", "evaluate", "prepare_data")
    args = importlib.import_module(f"dc_trl.command.{program}").make_parser().parse_args(words[2:])
    if program == "evaluate":
        assert (args.max_tokens, args.temperature) == (32768, 0.7)


@requires_vllm
def test_options_of_the_server_are_vllms():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    given = [words[words.index("--") + 1 :] for words in commands() if "--" in words and words[1] == "serve"]
    given.append(fields("r1_distill_qwen_1_5b_temperature")["serve_options"])
    assert len(given) >= 6
    for options in given:
        assert parser.parse_args(options).tensor_parallel_size == 4
