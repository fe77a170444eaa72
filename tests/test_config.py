"""What a configuration means: recipes, what its user says, warnings. tests/test_refusals.py has what it refuses."""

import pytest
from transformers import HfArgumentParser
from trl import GRPOConfig

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.constraint.lagrangian import LagrangeMultiplier
from dc_trl.settings.recipes import RECIPES

from .helpers import distinct_characters, make_config, refuses


def fields_of(config):
    return {name: getattr(config, name) for name in type(config).__dataclass_fields__}


def test_the_papers_recipe(tmp_path):
    config = DCGRPOConfig(str(tmp_path), recipe="paper", use_cpu=True, bf16=False)
    assert (config.constraint, config.discrepancy_measure, config.discrepancy_level) == (
        "lagrangian",
        "prob_diff",
        "token",
    )
    assert (config.lambda_init, config.lambda_lr, config.discrepancy_tolerance) == (0.1, 1.0, "auto")
    assert (config.lambda_min, config.lambda_max, config.dual_window, config.batch_reduction) == (0, 1, 1, "sequence")
    assert (config.loss_type, config.epsilon, config.beta, config.temperature) == ("grpo", 0.24, 0.0, 1.0)
    assert (config.num_generations, config.vllm_importance_sampling_correction) == (8, False)


@pytest.mark.parametrize("engine", [{}, {"use_vllm": True, "vllm_mode": "server"}])
def test_the_default_trains_as_trl_does(engine, tmp_path):
    ours, theirs = (kind(str(tmp_path), use_cpu=True, bf16=False, **engine) for kind in (DCGRPOConfig, GRPOConfig))
    assert ours.constraint == "none"
    changed = {name for name, value in fields_of(theirs).items() if getattr(ours, name) != value}
    # TRL's importance sampling has no effect without vLLM, and is off there.
    assert changed == (set() if engine else {"vllm_importance_sampling_correction"})


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_said_wins_over_the_recipe(recipe, tmp_path):
    engine = {"use_vllm": True, "deployment_scheme": "fp8", "use_cpu": True, "bf16": False}
    said = {"constraint": "none", "loss_type": "dr_grpo", "epsilon": 0.3, "vllm_importance_sampling_correction": True}
    said["train_through_quantization"] = recipe == "paper"
    config = DCGRPOConfig(str(tmp_path), recipe=recipe, **engine, **said)
    assert said.items() <= fields_of(config).items()
    said = {"constraint": "static", "constraint_form": "quadratic"}
    config = DCGRPOConfig(str(tmp_path), recipe=recipe, **engine, **said)
    assert said.items() <= fields_of(config).items()
    assert (config.lambda_init, config.lambda_max) == (2, 8)  # of this form, not of the recipe's
    assert config.train_through_quantization == (recipe == "format")


def test_a_recipe_is_no_field_that_was_given(tmp_path):
    """What it has filled in may be without effect; what its user gives may not, as `test_refusals.py` has it."""
    for recipe in RECIPES:
        make_config(tmp_path, recipe=recipe, deployment_scheme="fp8", constraint="none")
        make_config(tmp_path, recipe=recipe, train_through_quantization=False)


def test_a_correction_of_ours_takes_the_place_of_trls(tmp_path):
    engine = {"use_vllm": True, "use_cpu": True, "bf16": False}
    for fields in ({"rollout_correction": "icepop"}, {"constraint": "static", "constraint_form": "log_ratio"}):
        assert not DCGRPOConfig(str(tmp_path), **engine, **fields).vllm_importance_sampling_correction
    assert DCGRPOConfig(str(tmp_path), **engine).vllm_importance_sampling_correction


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"weight_sync_steps": 2}, "weight_sync_steps=2"),
        ({"use_vllm": True, "vllm_mode": "server", "rollout_overlap": True}, "rollout_overlap=True"),
        ({"weight_sync_steps": 2, "constraint_form": "log_ratio"}, None),
        ({}, None),
    ],
)
def test_a_form_that_pushes_is_warned_of_with_a_sampler_that_lags(tmp_path, caplog, fields, named):
    make_config(tmp_path, deployment_scheme="fp8", **fields)
    warned = [message for message in caplog.messages if "with such a lag" in message]
    assert len(warned) == (named is not None)
    assert all(named in message and "constraint_form=" in message for message in warned)


def test_values_that_keep_every_token_do_not_truncate(tmp_path):
    truncating = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}
    assert make_config(tmp_path, **truncating).truncations == truncating
    neutral = {"top_p": 1.0, "temperature": 1.0}
    assert not make_config(tmp_path, top_p=1.0, top_k=-1, min_p=0.0, generation_kwargs=neutral).truncations


def test_a_constraint_without_log_probabilities_is_refused_before_the_model_loads(tmp_path):
    with refuses(ValueError, "constraint='static'", "deployment_scheme", "use_vllm=True", "'none'"):
        DCGRPOTrainer("no/such-model", distinct_characters, make_config(tmp_path, constraint="static"))


def test_a_plain_grpo_config_is_refused(tmp_path):
    with refuses(TypeError, "GRPOConfig", "DCGRPOConfig"):
        DCGRPOTrainer("no/such-model", args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_fields_can_be_set_from_the_command_line(tmp_path):
    usual = f"--output_dir {tmp_path} --use_cpu true --bf16 false "

    def parse(command):
        (config,) = HfArgumentParser(DCGRPOConfig).parse_args_into_dataclasses((usual + command).split())
        return config

    config = parse("--recipe format --deployment_scheme fp8 --train_through_quantization false")
    assert (config.loss_type, config.train_through_quantization) == ("grpo", False)
    for word, meaning in {"true": True, "all": True, "weights": "weights", "false": False}.items():
        config = parse(f"--deployment_scheme fp8 --train_through_quantization {word}")
        assert config.train_through_quantization == meaning
    config = parse("--constraint static --discrepancy_tolerance 1e-2 --lambda_init 0.3 --lambda_min 0.1")
    multiplier = LagrangeMultiplier.of(config)
    assert (multiplier.value, multiplier.tolerance, multiplier.minimum) == (0.3, 0.01, 0.1)
    config = parse("--discrepancy_tolerance auto")
    assert config.discrepancy_tolerance == "auto"
    assert LagrangeMultiplier.of(config).tolerance is None
    config = parse("--use_vllm true --vllm_mode server --vllm_server_base_urls http://a:1 http://b:1")
    assert config.vllm_server_base_urls == ["http://a:1", "http://b:1"]


@pytest.mark.parametrize(
    "fields",
    [
        {"importance_sampling_level": "sequence", "discrepancy_level": "sequence"},
        {"importance_sampling_level": "sequence", "loss_type": "cispo"},
        {"importance_sampling_level": "sequence", "constraint": "none", "rollout_correction": "geometric_mask"},
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},  # without correction, without effect
    ],
)
def test_ratios_and_masks_that_leave_the_penalty_alone_are_taken(tmp_path, fields):
    make_config(tmp_path, **fields)
