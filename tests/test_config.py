"""Every invalid or contradictory setting is refused before anything expensive, by name, value and remedy."""

import copy
import math
import pickle

import pytest
from transformers import HfArgumentParser
from trl import GRPOConfig

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.async_grpo import AsyncDCGRPOConfig
from dc_trl.constraint.lagrangian import LagrangeMultiplier

from .helpers import Rollouts, distinct_characters, make_config


CORRECTED = {"recipe": "trl", "rollout_correction": "icepop"}
TWO_SIDED = {"constraint_form": "two_sided_kl", "deployment_scheme": "fp8"}
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
    assert (config.lambda_init, config.lambda_lr, config.discrepancy_tolerance) == (0.1, 1.0, 0.0037)
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


@pytest.mark.parametrize("recipe", ["trl", "paper"])
def test_what_is_said_wins_over_the_recipe(recipe, tmp_path):
    said = {"constraint": "none", "loss_type": "dr_grpo", "epsilon": 0.3, "vllm_importance_sampling_correction": True}
    config = DCGRPOConfig(str(tmp_path), recipe=recipe, use_vllm=True, use_cpu=True, bf16=False, **said)
    assert said.items() <= fields_of(config).items()


def test_a_correction_of_ours_takes_the_place_of_trls(tmp_path):
    engine = {"use_vllm": True, "use_cpu": True, "bf16": False}
    for fields in ({"rollout_correction": "icepop"}, {"constraint": "static", "constraint_form": "log_ratio"}):
        assert not DCGRPOConfig(str(tmp_path), **engine, **fields).vllm_importance_sampling_correction
    assert DCGRPOConfig(str(tmp_path), **engine).vllm_importance_sampling_correction


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # One value alone.
        ({"output_dir": " "}, ["output_dir=' '", "name a directory"]),
        ({"recipe": "dapo"}, ["recipe='dapo'", "'paper'"]),
        ({"constraint": "soft"}, ["constraint='soft'", "'lagrangian'"]),
        ({"advantage_estimator": "gae"}, ["advantage_estimator='gae'", "'rloo'"]),
        ({"deployment_scheme": "fp16"}, ["deployment_scheme='fp16'", "'fp8_block'"]),
        ({"discrepancy_tolerance": math.nan}, ["discrepancy_tolerance=nan", "finite"]),
        ({"discrepancy_tolerance": "high"}, ["discrepancy_tolerance='high'", "number", "'auto'"]),
        ({"discrepancy_tolerance": "-1"}, ["discrepancy_tolerance=-1", "at least 0"]),
        ({"vllm_server_base_urls": []}, ["vllm_server_base_urls=[]", "http://HOST:PORT"]),
        ({"vllm_server_base_urls": "http://a:1"}, ["vllm_server_base_urls='http://a:1'", "use a list"]),
        ({"vllm_server_base_urls": ["a:1", "b:1"]}, ["['a:1', 'b:1']", "http://HOST:PORT"]),
        ({"vllm_server_base_urls": ["http://a:1", "http://a:1/"]}, ["names http://a:1 twice"]),
        # Truth values and lists of other types are true in Python, or iterated over.
        ({"padding_free": "no"}, ["padding_free='no'", "use True or False"]),
        ({"reward_weights": 1.0}, ["reward_weights=1.0", "use a list of numbers"]),
        ({"reward_weights": ["1"]}, ["reward_weights='1'", "finite number"]),
        # No effect beside another value.
        ({"vllm_importance_sampling_correction": True}, ["no effect with use_vllm=False", "use_vllm=True"]),
        ({"constraint": "none", "discrepancy_margin": 0.1}, ["discrepancy_margin=0.1 has no effect", "'static'"]),
        ({"constraint": "static", "dual_window": 4}, ["dual_window=4", "choose constraint='lagrangian'"]),
        ({"weight_sync_dir": "/dev/shm"}, ["weight_sync_dir='/dev/shm'", "use_vllm=True"]),
        (SEVERAL | {"vllm_mode": "colocate"}, ["has no effect with vllm_mode='colocate'", "vllm_mode='server'"]),
        (
            {"use_vllm": True, "vllm_mode": "server", "weight_sync": "nccl", "weight_sync_dir": "/dev/shm"},
            ["weight_sync_dir='/dev/shm'", "weight_sync='nccl'"],
        ),
        # Two values.
        ({"advantage_estimator": "rloo", "scale_rewards": "batch"}, ["scale_rewards='batch'", "rloo"]),
        (
            SEVERAL | {"vllm_server_base_url": "http://c:1"},
            ["vllm_server_base_url='http://c:1'", "vllm_server_base_urls=['http://a:1', 'http://b:1']"],
        ),
        (SEVERAL | {"weight_sync": "nccl"}, ["weight_sync='nccl'", "weight_sync='auto'", "--data-parallel-size"]),
        ({"lambda_min": 0.5, "lambda_max": 0.2}, ["lambda_min=0.5", "lambda_max=0.2", "raise"]),
        ({"lambda_init": 3.0}, ["lambda_init=3.0", "lambda_max", "[0.0, 1.0]"]),
        ({"lambda_min": 0.2}, ["lambda_init=0.1", "[0.2, 1.0]"]),
        ({"use_vllm": True, "vllm_mode": "colocate", "weight_sync": "nccl"}, ["weight_sync='nccl'", "vllm_mode"]),
        (
            {"deployment_scheme": "fp8", "use_transformers_continuous_batching": True},
            ["deployment_scheme='fp8'", "use_transformers_continuous_batching=True"],
        ),
        # What makes the difference of the engines another one than their mismatch.
        ({"top_p": 0.9, "use_vllm": True}, ["top_p=0.9", "set top_k too"]),
        ({"top_k": 50, "use_vllm": True, "vllm_mode": "colocate"}, ["top_k=50", "vllm_mode='server'"]),
        ({"generation_kwargs": {"top_k": None}}, ["top_k=None", "set top_k=0"]),
        ({"repetition_penalty": 1.1}, ["repetition_penalty=1.1", "constraint='none'"]),
        ({"generation_kwargs": {"top_p": 0.5}, "use_vllm": True}, ["top_p=0.5", "constraint='none'"]),
        ({"generation_kwargs": '{"no_repeat_ngram_size": 7}'}, ["no_repeat_ngram_size=7"]),
        ({"generation_kwargs": {"temperature": 0.3}}, ["['temperature']=0.3", "set temperature alone"]),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, ["vllm_structured_outputs_regex='[0-9]+'", "unset it"]),
        ({"use_transformers_continuous_batching": True}, ["log-probabilities", "deployment_scheme"]),
        (CORRECTED | {"repetition_penalty": 1.1}, ["repetition_penalty=1.1", "rollout_correction='none'"]),
        (CORRECTED | {"vllm_structured_outputs_regex": "[0-9]+"}, ["rollout_correction='icepop'", "unset it"]),
        (CORRECTED | {"top_p": 0.9, "use_vllm": True}, ["top_p=0.9", "set top_k too", "rollout_correction='none'"]),
        # What keeps the penalty from the tokens that δ̄ counts.
        (
            {"importance_sampling_level": "sequence"},
            ["importance_sampling_level='sequence'", "loss_type='grpo'", "discrepancy_level='sequence'"],
        ),
        ({"off_policy_mask_threshold": 0.01}, ["off_policy_mask_threshold=0.01", "constraint='none'"]),
        (
            {"use_vllm": True, "vllm_importance_sampling_correction": True},  # TRL's default mode
            ["vllm_importance_sampling_mode='sequence_mask'", "'token_truncate'", "constraint='none'"],
        ),
    ],
)
def test_refused_when_the_config_is_made(tmp_path, fields, words):
    with pytest.raises(ValueError, match="=") as error:
        make_config(**({"output_dir": tmp_path} | fields))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_every_rule_of_what_has_no_effect_applies(tmp_path):
    others = {
        "rollout_correction_max": {"constraint": "none", "rollout_correction_max": 2.0},
        "rollout_correction_min": {"rollout_correction": "tv_mask", "rollout_correction_min": 0.5},
        "constraint_form": {"constraint": "none", "constraint_form": "quadratic"},
        "discrepancy_level": {"discrepancy_level": "sequence"} | TWO_SIDED,
        "train_through_quantization": {"train_through_quantization": True},
        "weight_sync": {"weight_sync": "checkpoint"},
        "weight_sync_steps": {"weight_sync_steps": 8, "constraint": "none"},
        "weight_sync_trigger": {"weight_sync_trigger": "discrepancy", "deployment_scheme": "fp8"},
        "rollout_overlap": {"rollout_overlap": True, "use_vllm": True, "vllm_mode": "colocate"},
        "max_tokens_per_micro_batch": {"max_tokens_per_micro_batch": 99, "length_aware_batches": False},
    }
    for name, fields in others.items():
        with pytest.raises(ValueError, match=f"^{name}=.* has no effect with .*: leave it out, or "):
            make_config(tmp_path, **fields)
    with pytest.raises(ValueError, match=r"discrepancy_margin=0\.1 has no effect with constraint_form='two_sided_kl'"):
        make_config(tmp_path, discrepancy_margin=0.1, **TWO_SIDED)


@pytest.mark.parametrize(("correction", "loss_type"), [("token_truncate", "grpo"), ("icepop", "luspo")])
def test_one_ratio_for_a_trajectory_and_a_weight_for_each_token_are_refused(tmp_path, correction, loss_type):
    fields = {"constraint": "none", "rollout_correction": correction, "loss_type": loss_type}
    with pytest.raises(ValueError, match=f"rollout_correction='{correction}'.*loss_type='{loss_type}'"):
        make_config(tmp_path, importance_sampling_level="sequence", **fields)
    make_config(tmp_path, **fields)
    for of_trajectories in ("sequence_truncate", "sequence_mask", "geometric_mask"):
        make_config(tmp_path, importance_sampling_level="sequence", **fields | {"rollout_correction": of_trajectories})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"weight_sync_steps": 2}, "weight_sync_steps=2"),
        ({"use_vllm": True, "vllm_mode": "server", "rollout_overlap": True}, "rollout_overlap=True"),
        ({"weight_sync_steps": 2, "constraint_form": "log_ratio"}, None),
        ({"weight_sync_steps": 2, "recipe": "trl"}, None),
        ({}, None),
    ],
)
def test_a_form_that_pushes_is_warned_of_with_a_sampler_that_lags(tmp_path, caplog, fields, named):
    make_config(tmp_path, deployment_scheme="fp8", **fields)
    warned = [record.message for record in caplog.records if "pushes" in record.message]
    assert len(warned) == (named is not None)
    assert all(named in message and "constraint_form=" in message for message in warned)


@pytest.mark.parametrize("settings", [DCGRPOConfig, AsyncDCGRPOConfig])
def test_a_misspelt_field_gets_the_nearest_name(tmp_path, settings):
    with pytest.raises(TypeError, match=r"^rollout_corection is no field .*did you mean rollout_correction\?$"):
        settings(str(tmp_path), rollout_corection="icepop")
    with pytest.raises(TypeError, match=r"^zzz is no field"):
        settings(str(tmp_path), zzz=1)


def test_a_config_can_be_copied(tmp_path):
    config = make_config(tmp_path, rollout_correction="icepop")
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied.to_dict() == config.to_dict()


def test_truncated_sampling_is_free_without_a_constraint(tmp_path):
    assert not make_config(tmp_path, constraint="none", top_p=0.9, top_k=5, min_p=0.1).truncated_sampling
    assert make_config(tmp_path, top_p=0.9, top_k=5, min_p=0.1).truncated_sampling


def test_neutral_sampling_is_accepted(tmp_path):
    make_config(tmp_path, top_p=1.0, top_k=-1, min_p=0.0, generation_kwargs={"top_p": 1.0, "temperature": 1.0})


@pytest.mark.parametrize("constraint", ["static", "lagrangian"])
def test_a_constraint_without_log_probabilities_is_refused_before_the_model_loads(tmp_path, constraint):
    with pytest.raises(ValueError, match=rf"constraint='{constraint}'.*deployment_scheme.*use_vllm=True.*'none'"):
        DCGRPOTrainer("no/such-model", distinct_characters, make_config(tmp_path, constraint=constraint))


def test_two_engines_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"deployment_scheme='fp8'.*contradicts rollout_func"):
        DCGRPOTrainer("no/such-model", args=make_config(tmp_path, deployment_scheme="fp8"), rollout_func=Rollouts())


def test_a_scheme_goes_with_vllm_as_with_the_replica(tmp_path):
    for mode in ("server", "colocate"):
        config = make_config(tmp_path, deployment_scheme="fp8", use_vllm=True, vllm_mode=mode)
        assert config.weight_sync == "auto"


def test_a_plain_grpo_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="args is a GRPOConfig: DCGRPOTrainer needs a DCGRPOConfig"):
        DCGRPOTrainer("no/such-model", args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_every_field_can_be_set_from_the_command_line(tmp_path):
    (config,) = HfArgumentParser(DCGRPOConfig).parse_args_into_dataclasses(
        f"--output_dir {tmp_path} --use_cpu true --bf16 false --constraint static --discrepancy_measure log_prob "
        "--discrepancy_level sequence --discrepancy_tolerance 1e-2 --discrepancy_margin 0.5 --batch_reduction token "
        "--lambda_init 0.3 --lambda_lr 2 --lambda_min 0.1 --lambda_max 0.9 --deployment_scheme int8".split()
    )
    multiplier = LagrangeMultiplier.of(config)
    assert config.discrepancy_tolerance == 0.01
    assert (multiplier.value, multiplier.lr, multiplier.tolerance) == (0.3, 2.0, 0.01)
    assert (multiplier.minimum, multiplier.maximum) == (0.1, 0.9)
    assert (config.discrepancy_level, config.deployment_scheme) == ("sequence", "int8")


def test_several_servers_are_words_of_a_command_line(tmp_path):
    command = f"--output_dir {tmp_path} --use_cpu true --bf16 false --use_vllm true --vllm_mode server "
    command += "--vllm_server_base_urls http://a:1 http://b:1 --weight_sync checkpoint"
    (config,) = HfArgumentParser(DCGRPOConfig).parse_args_into_dataclasses(command.split())
    assert config.vllm_server_base_urls == ["http://a:1", "http://b:1"]


def test_the_tolerance_may_be_found_by_the_run(tmp_path):
    command = f"--output_dir {tmp_path} --use_cpu true --bf16 false --discrepancy_tolerance auto"
    (config,) = HfArgumentParser(DCGRPOConfig).parse_args_into_dataclasses(command.split())
    assert config.discrepancy_tolerance == "auto"
    assert LagrangeMultiplier.of(config).tolerance is None


@pytest.mark.parametrize(
    "fields",
    [
        {"importance_sampling_level": "sequence", "discrepancy_level": "sequence"},
        {"importance_sampling_level": "sequence", "loss_type": "cispo"},
        {"importance_sampling_level": "sequence", "constraint": "none"},
        {"off_policy_mask_threshold": 0.01, "constraint": "none"},
        {
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_truncate",
        },
        {"use_vllm": True, "vllm_importance_sampling_correction": True, "constraint": "none"},
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},  # without correction, without effect
    ],
)
def test_ratios_and_masks_that_leave_the_penalty_alone_are_taken(tmp_path, fields):
    make_config(tmp_path, **fields)
