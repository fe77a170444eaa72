"""Every invalid or contradictory setting is refused before anything expensive, by name, value and remedy."""

import pytest
from transformers import HfArgumentParser
from trl import GRPOConfig

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.async_grpo import AsyncDCGRPOConfig
from dc_trl.constraint.lagrangian import LagrangeMultiplier
from dc_trl.settings.contradictions import NO_EFFECT
from dc_trl.settings.recipes import RECIPES

from .helpers import distinct_characters, make_config


CORRECTED = {"recipe": "trl", "rollout_correction": "icepop"}
SEVERAL = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_urls": ["http://a:1", "http://b:1"]}


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
    assert config.train_through_quantization == (recipe in ("format", "both"))


def test_a_recipe_is_no_field_that_was_given(tmp_path):
    """What it has filled in may be without effect; what its user gives may not."""
    for recipe in RECIPES:
        make_config(tmp_path, recipe=recipe, deployment_scheme="fp8", constraint="none")
        with pytest.raises(ValueError, match="constraint_form='quadratic' has no effect with constraint='none'"):
            make_config(
                tmp_path, recipe=recipe, deployment_scheme="fp8", constraint="none", constraint_form="quadratic"
            )
        make_config(tmp_path, recipe=recipe, train_through_quantization=False)
        for through in ({}, {"train_through_quantization": True}):
            if recipe in ("format", "both"):
                with pytest.raises(ValueError, match=f"recipe='{recipe}' contradicts deployment_scheme=None.* set "):
                    make_config(tmp_path, recipe=recipe, **through)


def test_a_correction_of_ours_takes_the_place_of_trls(tmp_path):
    engine = {"use_vllm": True, "use_cpu": True, "bf16": False}
    for fields in ({"rollout_correction": "icepop"}, {"constraint": "static", "constraint_form": "log_ratio"}):
        assert not DCGRPOConfig(str(tmp_path), **engine, **fields).vllm_importance_sampling_correction
    assert DCGRPOConfig(str(tmp_path), **engine).vllm_importance_sampling_correction


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # One value alone.
        ({"recipe": "gae"}, ["recipe='gae'", "'paper'"]),
        ({"deployment_scheme": "fp16"}, ["deployment_scheme='fp16'", "'fp8_block'"]),
        ({"discrepancy_tolerance": "high"}, ["discrepancy_tolerance='high'", "number"]),
        ({"discrepancy_tolerance": "-1"}, ["discrepancy_tolerance=-1", "at least 0"]),
        ({"learning_rate": None}, ["learning_rate=None is invalid: use a finite number, at least 0."]),
        ({"dual_window": 2.5}, ["dual_window=2.5 is invalid: use a whole number, at least 1."]),
        ({"routing_replay": "no"}, ["routing_replay='no'", "use True or False"]),
        ({"train_through_quantization": "activations"}, ["='activations' is unknown: choose", "'all', 'weights'"]),
        ({"loss_type": "ppo"}, ["loss_type='ppo' is unknown: choose one of 'grpo'"]),
        # What makes the difference of the engines another one than their mismatch.
        ({"generation_kwargs": {"top_k": None}}, ["top_k=None", "set top_k=0"]),
        ({"generation_kwargs": {"top_p": 0.5}, "use_vllm": True}, ["top_p=0.5", "constraint='none'"]),
        ({"generation_kwargs": '{"no_repeat_ngram_size": 7}'}, ["no_repeat_ngram_size=7"]),
        (CORRECTED | {"top_p": 0.9, "use_vllm": True}, ["top_p=0.9", "set top_k too", "rollout_correction='none'"]),
    ],
)
def test_refused_when_the_config_is_made(tmp_path, fields, words):
    """What docs/settings.md does not list; tests/test_docs.py has an example of each contradiction."""
    with pytest.raises(ValueError, match="=") as error:
        make_config(**({"output_dir": tmp_path} | fields))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_every_rule_of_what_has_no_effect_applies(tmp_path):
    others = {
        "rollout_correction_max": {"rollout_correction_max": 2.0},
        "rollout_correction_min": {"rollout_correction_min": 0.5},
        "constraint_form": {"constraint_form": "quadratic"},
        "discrepancy_margin": {"discrepancy_margin": 0.1},
        "dual_window": {"constraint": "static", "dual_window": 4},
        "constraint_target": {"constraint_target": "lag", "deployment_scheme": "fp8"},
        "rollout_correction_target": {"rollout_correction_target": "lag", "deployment_scheme": "fp8"},
        "train_through_quantization": {"train_through_quantization": True},
        "vllm_importance_sampling_correction": {"vllm_importance_sampling_correction": True},
        "lora_deployment": {"lora_deployment": "adapter"},
        "use_transformers_continuous_batching": {
            "use_transformers_continuous_batching": True,
            "deployment_scheme": "fp8",
        },
        "weight_sync": {"weight_sync": "checkpoint"},
        "weight_sync_steps": {"weight_sync_steps": 8},
        "vllm_server_base_urls": SEVERAL | {"use_vllm": False},
        "rollout_overlap": {"rollout_overlap": True, "use_vllm": True, "vllm_mode": "colocate"},
        "score_centering_top_k": {"score_centering_top_k": 8},
    }
    of_trainers = {name for rule in NO_EFFECT for name in rule.named.split() if hasattr(DCGRPOConfig, name)}
    assert of_trainers - {"vllm_server_base_urls"} <= others.keys()
    for name, fields in others.items():
        with pytest.raises(ValueError, match=f"^{name}=.* has no effect with .*: leave it out, or "):
            make_config(tmp_path, recipe="trl", **fields)
    with pytest.raises(ValueError, match="with use_vllm=False and deployment_scheme=None: leave it out, or set depl"):
        make_config(tmp_path, recipe="trl", weight_sync_steps=8)
    make_config(tmp_path, recipe="trl", vllm_importance_sampling_correction=False)  # what is off needs no effect


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
    warned = [record.message for record in caplog.records if "with such a lag" in record.message]
    assert len(warned) == (named is not None)
    assert all(named in message and "constraint_form=" in message for message in warned)


@pytest.mark.parametrize("settings", [DCGRPOConfig, AsyncDCGRPOConfig])
def test_a_misspelt_field_gets_the_nearest_name(tmp_path, settings):
    with pytest.raises(TypeError, match=r"^rollout_corection is no field .*did you mean rollout_correction\?$"):
        settings(str(tmp_path), rollout_corection="icepop")


def test_values_that_keep_every_token_do_not_truncate(tmp_path):
    truncating = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}
    assert make_config(tmp_path, **truncating).truncations == truncating
    neutral = {"top_p": 1.0, "temperature": 1.0}
    assert not make_config(tmp_path, top_p=1.0, top_k=-1, min_p=0.0, generation_kwargs=neutral).truncations


def test_a_constraint_without_log_probabilities_is_refused_before_the_model_loads(tmp_path):
    with pytest.raises(ValueError, match=r"constraint='static'.*deployment_scheme.*use_vllm=True.*'none'"):
        DCGRPOTrainer("no/such-model", distinct_characters, make_config(tmp_path, constraint="static"))


def test_a_plain_grpo_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="args is a GRPOConfig: DCGRPOTrainer needs a DCGRPOConfig"):
        DCGRPOTrainer("no/such-model", args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_fields_can_be_set_from_the_command_line(tmp_path):
    usual = f"--output_dir {tmp_path} --use_cpu true --bf16 false "

    def parse(command):
        (config,) = HfArgumentParser(DCGRPOConfig).parse_args_into_dataclasses((usual + command).split())
        return config

    config = parse("--recipe both --deployment_scheme fp8 --train_through_quantization false")
    assert (config.constraint_form, config.train_through_quantization) == ("log_ratio", False)
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
