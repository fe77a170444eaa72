"""Settings that have no effect beside others, and settings that contradict each other: a table of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple

from .fields import declared_default
from .micro_batches import MEANS_OF_MICRO_BATCHES, TWO_SIDED


class NoEffect(NamedTuple):
    """Fields that have no effect while other fields have certain values.

    Attributes:
        named: the fields, separated by spaces; one that has its default or is off is not refused.
        beside: values of other fields, at all of which together the fields have no effect.
        remedy: what else than leaving the field out helps, for the message.
    """

    named: str
    beside: Mapping[str, Sequence[Any]]
    remedy: str


_SERVER = "set use_vllm=True and vllm_mode='server'"

# A rule is for all settings that have its fields: the trainers' and those that `dc-trl train` adds.
NO_EFFECT = (
    NoEffect("rollout_correction_max", {"rollout_correction": ["none"]}, "choose a correction"),
    NoEffect(
        "rollout_correction_min",
        {"rollout_correction": ["none", "tv_mask"]},
        "choose a correction with a lower bound",
    ),
    NoEffect(
        "discrepancy_margin constraint_form", {"constraint": ["none"]}, "choose constraint='static' or 'lagrangian'"
    ),
    NoEffect("constraint_target", {"constraint": ["none"]}, "choose constraint='static' or 'lagrangian'"),
    NoEffect("rollout_correction_target", {"rollout_correction": ["none"]}, "choose a correction"),
    NoEffect("discrepancy_margin discrepancy_level", {"constraint_form": TWO_SIDED}, "choose another constraint_form"),
    NoEffect("lambda_kp lambda_kd", {"dual": ["paper", "auto"]}, "set dual='pid'"),
    NoEffect("dual dual_window", {"constraint": ["none", "static"]}, "choose constraint='lagrangian'"),
    NoEffect("train_through_quantization", {"deployment_scheme": [None]}, "set deployment_scheme (for example 'fp8')"),
    NoEffect(
        "vllm_importance_sampling_correction weight_sync weight_sync_dir", {"use_vllm": [False]}, "set use_vllm=True"
    ),
    NoEffect("weight_sync_dir", {"weight_sync": ["nccl"]}, "set weight_sync='checkpoint'"),
    NoEffect(
        "weight_sync_steps",
        {"use_vllm": [False], "deployment_scheme": [None]},
        "set deployment_scheme (for example 'bf16') or use_vllm=True",
    ),
    NoEffect(
        "weight_sync_trigger",
        {"weight_sync_steps": [1]},
        "raise weight_sync_steps, after which new weights go at the latest",
    ),
    NoEffect("vllm_server_base_urls rollout_overlap", {"use_vllm": [False]}, _SERVER),
    NoEffect("vllm_server_base_urls rollout_overlap", {"vllm_mode": ["colocate"]}, _SERVER),
    NoEffect("max_tokens_per_micro_batch", {"length_aware_batches": [False]}, "set length_aware_batches=True"),
    NoEffect("serve_devices serve_options", {"serve": [None]}, "set serve='auto'"),
    NoEffect("length_decay_period length_decay_floor", {"length_decay": [False]}, "set length_decay=True"),
    NoEffect("eval_benchmarks eval_greedy", {"eval_size": [0]}, "set eval_size"),
)


def require_effect(settings: Any) -> None:
    """Refuse a field that was given a value and has no effect.

    Args:
        settings: an instance of a dataclass; rules about fields that it does not have are passed over.

    Raises:
        ValueError: names the field, the fields that leave it without effect, their values and the remedy.
    """
    defaults = {field.name: declared_default(field) for field in fields(settings)}
    for named, beside, remedy in NO_EFFECT:
        names = named.split()
        if not {*names, *beside} <= defaults.keys():
            continue
        if all(getattr(settings, name) in values for name, values in beside.items()):
            reasons = " and ".join(f"{name}={getattr(settings, name)!r}" for name in beside)
            for name in names:
                if (value := getattr(settings, name)) != defaults[name] and value is not False:
                    raise ValueError(f"{name}={value!r} has no effect with {reasons}: leave it out, or {remedy}.")


class Rule(NamedTuple):
    """A contradiction: whether it applies to a config, and its message, a format string in which `c` is the config."""

    applies: Callable[[Any], bool]
    message: str


def require_no_contradiction(config: Any) -> None:
    """Refuse a `DCGRPOConfig` that contradicts itself, or sets what has no effect.

    Raises:
        ValueError: names the fields, their values and the remedy.
    """
    require(config, RULES_OF_THE_CONSTRAINT_ALONE)
    require_effect(config)
    compared = RULES_OF_A_COMPARISON if config.compared_by is not None else ()
    require(config, RULES, compared, RULES_OF_A_CONSTRAINT if config.constraint != "none" else ())


def require(config: Any, *tables: Sequence[Rule]) -> None:
    """Refuse a config to which a rule of these tables applies.

    Raises:
        ValueError: names the fields, their values and the remedy.
    """
    for rule in chain(*tables):
        if rule.applies(config):
            raise ValueError(rule.message.format(c=config))


# The losses of CISPO and VESPO multiply log π_train of each token; the others multiply the ratio, which a trajectory
# may have one of.
_LOSSES_BY_TOKEN = ("cispo", "vespo")
# Corrections that give all tokens of a trajectory one weight, or none.
_CORRECTIONS_OF_TOKENS = {"token_truncate", "token_mask", "icepop", "tv_mask", "ppo_clip", "odds_truncate"}
_CORRECTIONS_OF_TRAJECTORIES = {"sequence_truncate", "sequence_mask", "geometric_mask"}


def _budget_rule(name: str, applies: Callable[[Any], bool]) -> Rule:
    return Rule(
        lambda c: c.max_tokens_per_micro_batch is not None and applies(c),
        "max_tokens_per_micro_batch={c.max_tokens_per_micro_batch!r} decides which completions share a micro-batch, "
        f"and {name}={{c.{name}!r}} has a term of the loss that is a mean over it: leave one of the two out.",
    )


# These read the settings of the constraint and of the correction alone, which several trainers have.
RULES_OF_THE_CONSTRAINT_ALONE = (
    Rule(
        lambda c: c.lambda_min > c.lambda_max,
        "lambda_min={c.lambda_min!r} is above lambda_max={c.lambda_max!r}: lower lambda_min or raise lambda_max.",
    ),
    Rule(
        lambda c: not c.lambda_min <= c.lambda_init <= c.lambda_max,
        "lambda_init={c.lambda_init!r} lies outside [lambda_min, lambda_max] = [{c.lambda_min!r}, {c.lambda_max!r}]: "
        "choose a value within the bounds or widen them.",
    ),
    Rule(
        lambda c: c.dual != "paper" and c.discrepancy_tolerance == 0,
        "dual={c.dual!r} moves λ by the relative violation δ̄/ε − 1, which discrepancy_tolerance=0 does not have: set "
        "a number above 0 or 'auto'.",
    ),
    Rule(
        lambda c: c.rollout_correction == "tv_mask" and (c.rollout_correction_max or 0) >= 1,
        "rollout_correction_max={c.rollout_correction_max!r} is a difference of probabilities with "
        "rollout_correction='tv_mask', and none is larger than 1: use a number below 1, for example 0.2.",
    ),
    Rule(
        lambda c: (c.rollout_correction_min or 0) > 1,
        "rollout_correction_min={c.rollout_correction_min!r} shuts out the ratio of engines that agree, which is 1: "
        "use a number of at most 1.",
    ),
    Rule(
        lambda c: (
            c.rollout_correction != "tv_mask" and c.rollout_correction_max is not None and c.rollout_correction_max < 1
        ),
        "rollout_correction_max={c.rollout_correction_max!r} shuts out the ratio of engines that agree, which is 1: "
        "use a number of at least 1.",
    ),
    Rule(
        lambda c: c.constraint_form in TWO_SIDED and c.deployment_scheme is None,
        "constraint_form={c.constraint_form!r} compares the policy with its quantized self, and deployment_scheme is "
        "not set: set deployment_scheme (for example 'fp8') or choose constraint_form='log_ratio'.",
    ),
    Rule(
        lambda c: c.constraint_form in TWO_SIDED and c.constraint != "none" and c.constraint_target == "lag",
        "constraint_target='lag' leaves the number format out, and constraint_form={c.constraint_form!r} acts on it "
        "alone: choose constraint_form='log_ratio' or 'quadratic', or constraint_target='all'.",
    ),
    Rule(
        lambda c: c.split_by is not None and c.deployment_scheme is None,
        "{c.split_by}={c.split!r} separates the number format's part of the discrepancy, and deployment_scheme is not "
        "set: set deployment_scheme to the format in which the engine samples (for example 'fp8').",
    ),
)

RULES = (
    Rule(
        lambda c: c.as_deployed_for is not None and c.fp16,
        "fp16=True contradicts {c.as_deployed_for}, which computes in bfloat16 as engines do: set bf16=True.",
    ),
    Rule(
        lambda c: c.fp16 and c.device.type == "cpu",
        "fp16=True has no effect on a CPU, where accelerate computes in float32: train on a GPU or set fp16=False.",
    ),
    Rule(
        lambda c: c.score_centering and (c.use_vllm or c.deployment_scheme is None),
        "score_centering=True reads the whole distribution of the in-process replica, which use_vllm={c.use_vllm!r} "
        "with deployment_scheme={c.deployment_scheme!r} does not have: set deployment_scheme (for example 'fp8') and "
        "use_vllm=False.",
    ),
    Rule(
        lambda c: c.score_centering and c.importance_sampling_level == "sequence",
        "score_centering=True centres the score of each token, and importance_sampling_level='sequence' has one ratio "
        "for a trajectory: set importance_sampling_level='token' or score_centering=False.",
    ),
    Rule(
        lambda c: c.score_centering and c.beta != 0.0,
        "beta={c.beta!r} takes the gradient of a KL term from the log-probabilities that score_centering=True "
        "centres: set beta=0 or score_centering=False.",
    ),
    Rule(
        lambda c: c.score_centering and c.gradient_accumulation_steps % (c.steps_per_generation * c.num_iterations),
        "score_centering=True needs the weights that sampled until a generation batch is used up, and "
        "steps_per_generation={c.steps_per_generation!r} with num_iterations={c.num_iterations!r} reaches over "
        "several optimizer steps: set steps_per_generation to gradient_accumulation_steps and num_iterations=1.",
    ),
    Rule(
        lambda c: c.score_centering and bool({*c.correction_names} - _CORRECTIONS_OF_TOKENS),
        "score_centering=True takes the mean over what might have been sampled, which "
        "rollout_correction={c.rollout_correction!r} does not weigh token by token: set 'token_truncate', "
        "'token_mask', 'icepop', 'tv_mask', 'ppo_clip', 'odds_truncate' or 'none'.",
    ),
    Rule(
        lambda c: c.score_centering and (c.rollout_correction_target == "lag" or c.truncates_sampling),
        "score_centering=True compares the policy with the sampler over the whole vocabulary: set "
        "rollout_correction_target='all', top_p=1.0, top_k=0 and min_p=None.",
    ),
    Rule(
        lambda c: c.score_centering and c.loss_type == "vespo" and c.rollout_correction != "none",
        "loss_type='vespo' has the weights of rollout_correction={c.rollout_correction!r} in its ratio of a "
        "trajectory, which score_centering=True does not centre: set rollout_correction='none' or another loss_type.",
    ),
    Rule(
        lambda c: c.advantage_estimator == "rloo" and c.scale_rewards == "batch",
        "scale_rewards={c.scale_rewards!r} normalises advantages and contradicts advantage_estimator='rloo', which "
        "does not: leave it out, or use advantage_estimator='grpo'.",
    ),
    Rule(
        lambda c: c.advantage_estimator == "rloo" and c.multi_objective_aggregation == "normalize_then_sum",
        "multi_objective_aggregation={c.multi_objective_aggregation!r} normalises advantages and contradicts "
        "advantage_estimator='rloo', which does not: leave it out, or use advantage_estimator='grpo'.",
    ),
    Rule(
        lambda c: (
            c.loss_type == "vespo"
            and c.vllm_importance_sampling_correction
            and c.vllm_importance_sampling_mode not in ("token_truncate", "token_mask")
        ),
        "vllm_importance_sampling_mode={c.vllm_importance_sampling_mode!r} has one ratio for a trajectory, and "
        "loss_type='vespo' takes one for each token: set vllm_importance_sampling_mode='token_truncate' or "
        "'token_mask'.",
    ),
    Rule(
        lambda c: c.rollout_correction != "none" and c.vllm_importance_sampling_correction,
        "vllm_importance_sampling_correction=True corrects the rollouts a second time beside "
        "rollout_correction={c.rollout_correction!r}: set one of the two.",
    ),
    Rule(
        lambda c: c.loss_type == "vespo" and not {*c.correction_names} <= {"token_truncate", "token_mask", "icepop"},
        "rollout_correction={c.rollout_correction!r} weighs a trajectory or goes by the advantage, and "
        "loss_type='vespo' takes a ratio of each token: set rollout_correction='token_truncate', 'token_mask' or "
        "'icepop'.",
    ),
    Rule(
        lambda c: (
            c.importance_sampling_level == "sequence"
            and not {*c.correction_names} <= _CORRECTIONS_OF_TRAJECTORIES
            and c.loss_type not in _LOSSES_BY_TOKEN
        ),
        "rollout_correction={c.rollout_correction!r} weighs each token by itself, and importance_sampling_level="
        "'sequence' with loss_type={c.loss_type!r} has one ratio for a trajectory, through which a masked token still "
        "gets the gradient of the others: set rollout_correction='sequence_truncate', 'sequence_mask' or "
        "'geometric_mask', or importance_sampling_level='token'.",
    ),
    Rule(
        lambda c: c.weight_sync == "nccl" and c.use_vllm and c.vllm_mode == "colocate",
        "weight_sync='nccl' streams weights to a server, and vllm_mode='colocate' has none: set weight_sync='auto' or "
        "vllm_mode='server'.",
    ),
    Rule(
        lambda c: c.vllm_server_base_urls is not None and c.vllm_server_base_url is not None,
        "vllm_server_base_url={c.vllm_server_base_url!r} and vllm_server_base_urls={c.vllm_server_base_urls!r} both "
        "name servers: put all of them into vllm_server_base_urls.",
    ),
    Rule(
        lambda c: c.weight_sync == "nccl" and len(c.vllm_server_base_urls or []) > 1,
        "weight_sync='nccl' is TRL's stream to one server, and vllm_server_base_urls={c.vllm_server_base_urls!r} are "
        "several: set weight_sync='auto' or 'checkpoint', or use one server on several GPUs (--data-parallel-size).",
    ),
    Rule(
        lambda c: c.weight_sync_steps > 1 and c.weight_sync == "nccl",
        "weight_sync='nccl' streams the present weights alone, and weight_sync_steps={c.weight_sync_steps!r} needs "
        "older ones after an evaluation and in checkpoints: set weight_sync='auto' or weight_sync_steps=1.",
    ),
    Rule(
        lambda c: c.weight_sync_steps > 1 and c.use_vllm and c.vllm_enable_sleep_mode,
        "vllm_enable_sleep_mode=True drops the engine's weights after each rollout, and "
        "weight_sync_steps={c.weight_sync_steps!r} needs them again: set vllm_enable_sleep_mode=False or "
        "weight_sync_steps=1.",
    ),
    Rule(
        lambda c: (
            c.weight_sync_trigger == "discrepancy"
            and c.discrepancy_tolerance == "auto"
            and c.constraint != "lagrangian"
        ),
        "discrepancy_tolerance='auto' is found by constraint='lagrangian' alone, and "
        "weight_sync_trigger='discrepancy' with constraint={c.constraint!r} would wait for it: set "
        "discrepancy_tolerance to a number.",
    ),
    *(_budget_rule(name, applies) for name, applies in MEANS_OF_MICRO_BATCHES.items()),
    Rule(
        lambda c: c.deployment_scheme is not None and c.use_transformers_continuous_batching and not c.use_vllm,
        "deployment_scheme={c.deployment_scheme!r} samples from the in-process replica and contradicts "
        "use_transformers_continuous_batching=True: set one of the two.",
    ),
    Rule(
        lambda c: c.routing_replay and not c.use_vllm and c.deployment_scheme is None,
        "routing_replay=True needs an engine that says which experts it chose, and model.generate does not: set "
        "deployment_scheme (for example 'bf16'), or use_vllm=True with vllm_mode='server'.",
    ),
    Rule(
        lambda c: c.routing_replay and c.use_vllm and c.vllm_mode == "colocate",
        "routing_replay=True with vllm_mode='colocate': TRL builds that engine without the option that returns the "
        "chosen experts. Set vllm_mode='server', or use_vllm=False with deployment_scheme.",
    ),
    Rule(
        lambda c: c.train_through_quantization and c.constraint_form in TWO_SIDED,
        "constraint_form={c.constraint_form!r} compares the policy with its quantized self, and "
        "train_through_quantization=True makes them one: set one of the two.",
    ),
    Rule(
        lambda c: c.as_deployed_for is not None and c.cast_lm_head_to_fp32,
        "cast_lm_head_to_fp32=True contradicts {c.as_deployed_for}: the deployed policy has its output head in "
        "bfloat16. Set one of the two.",
    ),
    Rule(
        lambda c: c.as_deployed_for is not None and c.torch_compile,
        "torch_compile=True contradicts {c.as_deployed_for}, whose hooks on every layer it would not see: set one of "
        "the two.",
    ),
    Rule(
        lambda c: c.train_through_quantization and bool((c.gradient_checkpointing_kwargs or {}).get("use_reentrant")),
        "gradient_checkpointing_kwargs={c.gradient_checkpointing_kwargs!r} contradicts "
        "train_through_quantization=True, which says how a layer is recomputed: leave use_reentrant out.",
    ),
)

# Those that follow make the engines' difference unmeasurable, or more than their mismatch, for whatever acts on it.
RULES_OF_A_COMPARISON = (
    Rule(
        lambda c: c.use_transformers_continuous_batching and not c.use_vllm,
        "{c.comparison} needs the rollouts' log-probabilities, and use_transformers_continuous_batching=True returns "
        "none: set deployment_scheme (for example 'bf16'), use_vllm=True, or {c.compared_by}='none'.",
    ),
    Rule(
        lambda c: (c.generation_kwargs or {}).get("temperature", c.temperature) != c.temperature,
        "generation_kwargs['temperature']={c.generation_kwargs[temperature]!r} contradicts "
        "temperature={c.temperature!r}, at which the training log-probabilities are taken: set temperature alone.",
    ),
    Rule(
        lambda c: c.vllm_structured_outputs_regex is not None,
        "vllm_structured_outputs_regex={c.vllm_structured_outputs_regex!r} restricts the tokens that vLLM samples, "
        "and {c.comparison} would take that difference for mismatch: unset it or set {c.compared_by}='none'.",
    ),
)

# Those that follow keep the constraint's penalty from the tokens that δ̄ counts: λ would climb to `lambda_max` without
# effect.
RULES_OF_A_CONSTRAINT = (
    Rule(
        lambda c: (
            c.importance_sampling_level == "sequence"
            and c.discrepancy_level == "token"
            and c.loss_type not in _LOSSES_BY_TOKEN
        ),
        "importance_sampling_level='sequence' with loss_type={c.loss_type!r} has one ratio for a trajectory, which "
        "spreads the penalty of a token over all of them: set discrepancy_level='sequence', "
        "importance_sampling_level='token', or constraint='none'.",
    ),
    Rule(
        lambda c: c.off_policy_mask_threshold is not None,
        "off_policy_mask_threshold={c.off_policy_mask_threshold!r} masks trajectories where the engines differ most, "
        "and with them the penalty of constraint={c.constraint!r}: unset it or set constraint='none'.",
    ),
    Rule(
        lambda c: (
            c.vllm_importance_sampling_correction
            and c.vllm_importance_sampling_mode in ("token_mask", "sequence_mask")
        ),
        "vllm_importance_sampling_mode={c.vllm_importance_sampling_mode!r} masks tokens where the engines differ "
        "most, and with them the penalty of constraint={c.constraint!r}: set "
        "rollout_correction={c.vllm_importance_sampling_mode!r} in its place, which takes those tokens out of δ̄ too, "
        "vllm_importance_sampling_mode='token_truncate' or 'sequence_truncate', or constraint='none'.",
    ),
)
