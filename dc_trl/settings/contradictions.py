"""Settings that have no effect beside others, and settings that contradict each other: a table of each."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeAlias

from .fields import require_fields
from .paths import is_data_file
from .recipes import RECIPES, default_of


# The values of a field at which a rule applies, or a function that looks at all settings.
Condition: TypeAlias = Collection[Any] | Callable[[Any], bool]


class Rule(NamedTuple):
    """Fields that are refused while other fields have certain values. It is for all settings that have its fields.

    Attributes:
        named: the refused fields, separated by spaces.
        beside: the other fields, all of whose conditions have to hold.
        remedy: what to do, for the message, and why where that is not obvious.
        values: condition of the refused fields; by default any value but their defaults and False.
    """

    named: str
    beside: Mapping[str, Condition]
    remedy: str
    values: Condition | None = None


# Losses that are a mean over completions; the others divide by the tokens that enter them.
MEAN_OVER_COMPLETIONS = ("grpo", "sapo", "dr_grpo", "luspo")
_SERVER = "set use_vllm=True and vllm_mode='server'"
_SCHEME = "set deployment_scheme (for example 'fp8')"
_UNSAMPLED: dict[str, Condition] = {"use_vllm": [False], "deployment_scheme": [None]}
_COLOCATED: dict[str, Condition] = {"use_vllm": [True], "vllm_mode": ["colocate"]}


def _any(settings: Any) -> bool:
    return True


def steps_within_batch(settings: Any) -> bool:
    """Return whether the weights change within a generation batch, so that TRL scores it as it is sampled."""
    return settings.gradient_accumulation_steps % (settings.steps_per_generation * settings.num_iterations) != 0


def _multiplies_ratio(settings: Any) -> bool:
    # The loss of CISPO multiplies log π_train of each token, the others the ratio, which a trajectory may have one of.
    return settings.loss_type != "cispo"


NO_EFFECT = (
    Rule(
        "rollout_correction_min rollout_correction_max rollout_correction_target",
        {"rollout_correction": ["none"]},
        "choose a correction",
    ),
    Rule("discrepancy_margin constraint_form constraint_target", {"constraint": ["none"]}, "choose a constraint"),
    Rule("dual_window", {"constraint": ["none", "static"]}, "choose constraint='lagrangian'"),
    Rule("train_through_quantization", {"deployment_scheme": [None]}, _SCHEME),
    Rule("vllm_importance_sampling_correction weight_sync", {"use_vllm": [False]}, "set use_vllm=True"),
    Rule("weight_sync_steps lora_deployment", _UNSAMPLED, _SCHEME),
    Rule("use_transformers_continuous_batching", {"deployment_scheme": lambda c: c.deployment_scheme}, "unset that"),
    Rule(
        "vllm_server_base_urls rollout_overlap",
        {"use_vllm": _any, "vllm_mode": lambda c: not c.use_vllm or c.vllm_mode == "colocate"},
        _SERVER,
    ),
    Rule("score_centering_top_k", {"score_centering": [False]}, "set score_centering=True"),
    Rule("serve_devices serve_options", {"serve": [None]}, "set serve='auto'"),
    Rule("length_decay_period", {"length_decay": [False]}, "set length_decay=True"),
    Rule("eval_greedy", {"eval_size": [0]}, "set eval_size"),
    Rule("dataset_split", {"dataset_name": lambda c: is_data_file(c.dataset_name or "")}, "give a Hub id"),
)


def mean_of_micro_batch(config: Any) -> str | None:
    """Return a setting, as `name=value`, whose term of the loss depends on which completions share a micro-batch."""
    means = {
        "loss_type": config.loss_type == "bnpo",
        "top_entropy_quantile": config.top_entropy_quantile < 1.0,  # of the entropies of a micro-batch
        "use_adaptive_entropy": config.use_adaptive_entropy,
        "entropy_coef": config.entropy_coef != 0.0,
    }
    return next((f"{name}={getattr(config, name)!r}" for name in means if means[name]), None)


class CheckedSettings:
    """A dataclass of settings that refuses values, and settings that have no effect, when it is made."""

    def __post_init__(self) -> None:
        require_fields(self)
        require_consistent(self)


def require_consistent(settings: Any) -> None:
    """Refuse a field that was given a value and has no effect, and fields that contradict each other; see `refuse`."""
    refuse(settings, NO_EFFECT, "has no effect with", "leave it out, or ")
    refuse(settings, CONTRADICTIONS)


def refuse(settings: Any, rules: Sequence[Rule], verb: str = "contradicts", remedy: str = "") -> None:
    """Refuse settings, an instance of a dataclass, to which one of the rules applies.

    In the message `verb` stands between the refused field and the others, and `remedy` before the rule's.
    """

    def holds(name: str, condition: Condition) -> bool:
        return condition(settings) if callable(condition) else getattr(settings, name) in condition

    defaults = {field.name: default_of(field) for field in fields(settings)}
    if "recipe" in defaults:  # what it has filled in was not given
        defaults |= RECIPES[settings.recipe]
    for rule in rules:
        names = rule.named.split()
        if not {*names, *rule.beside} <= defaults.keys():
            continue
        if not all(holds(name, condition) for name, condition in rule.beside.items()):
            continue
        others = " and ".join(f"{name}={getattr(settings, name)!r}" for name in rule.beside)
        for name in names:
            value = getattr(settings, name)
            given = value != defaults[name] and value is not False
            if given if rule.values is None else holds(name, rule.values):
                raise ValueError(f"{name}={value!r} {f'{verb} {others}'.strip()}: {remedy}{rule.remedy}.")


# Corrections that give all tokens of a trajectory one weight, or none.
_CORRECTIONS_OF_TRAJECTORIES = {"sequence_truncate", "sequence_mask", "geometric_mask"}
# Corrections that weigh a token by its own probabilities alone.
_CORRECTIONS_OF_TOKENS = {"token_truncate", "token_mask", "icepop", "tv_mask", "ppo_clip"}
_CONSTRAINED = {"constraint": ["static", "lagrangian"]}
_ALIGNED = {"train_through_quantization": lambda c: bool(c.train_through_quantization)}
_RECOMPUTED = ("use_reentrant", "offload")
_ONE = "set only one of the two"
_VESPO = "VESPO weighs a trajectory by its own advantage and ratio; set another loss_type, or the other to 'none'"

CONTRADICTIONS = (
    Rule("lambda_max", {"lambda_min": lambda c: c.lambda_max < c.lambda_min}, "choose a lambda_min below it", _any),
    Rule(
        "lambda_init",
        {"lambda_min": _any, "lambda_max": lambda c: not c.lambda_min <= c.lambda_init <= c.lambda_max},
        "choose a value within these bounds, or widen them",
        _any,
    ),
    Rule("discrepancy_split score_centering", _UNSAMPLED, f"{_SCHEME}, or use_vllm=True"),
    Rule(
        "recipe",
        {"deployment_scheme": [None]},
        _SCHEME,
        lambda c: c.train_through_quantization and RECIPES[c.recipe]["train_through_quantization"],
    ),
    Rule("fp16", _ALIGNED, "the deployed forward computes in bfloat16, as engines do; set bf16=True"),
    Rule("cast_lm_head_to_fp32", _ALIGNED, f"the deployed policy has its output head in bfloat16; {_ONE}"),
    Rule(
        "gradient_checkpointing_kwargs",
        _ALIGNED,
        "reentrant or offloaded recomputation gives other gradients there; set use_reentrant and offload to False",
        lambda c: (
            c.gradient_checkpointing and any((c.gradient_checkpointing_kwargs or {}).get(n) for n in _RECOMPUTED)
        ),
    ),
    Rule("use_liger_kernel", _ALIGNED, f"it replaces the norms of the deployed forward; {_ONE}"),
    Rule(
        "model_init_kwargs",
        _ALIGNED,
        "its use_kernels replaces the norms of the deployed forward; leave it out",
        lambda c: (c.model_init_kwargs or {}).get("use_kernels", False),
    ),
    Rule("torch_compile", _ALIGNED, f"it would not see the hooks of the deployed forward; {_ONE}"),
    Rule("score_centering", {"importance_sampling_level": ["sequence"]}, "set importance_sampling_level='token'"),
    Rule("score_centering", {"beta": lambda c: c.beta != 0}, "the KL term would be centred too; set beta=0"),
    Rule(
        "score_centering",
        {"steps_per_generation": steps_within_batch, "num_iterations": _any},
        "it needs the weights that sampled until a generation batch is used up; set num_iterations=1 and "
        "steps_per_generation to gradient_accumulation_steps",
    ),
    Rule(
        "score_centering",
        {"rollout_correction": lambda c: not {*c.correction_names} <= _CORRECTIONS_OF_TOKENS},
        "the mean needs a weight of each token by itself; set 'token_truncate', 'token_mask', 'icepop', 'tv_mask', "
        "'ppo_clip' or 'none'",
    ),
    Rule("score_centering", {"vllm_importance_sampling_correction": [True]}, f"it would weigh the mean too; {_ONE}"),
    Rule("score_centering", {"rollout_correction_target": ["lag", "engine"]}, f"it centres the whole; {_ONE}"),
    Rule("loss_type", {"rollout_correction": lambda c: c.rollout_correction != "none"}, _VESPO, ["vespo"]),
    Rule("loss_type", _CONSTRAINED, _VESPO, ["vespo"]),
    Rule(
        "vllm_importance_sampling_mode",
        {"loss_type": ["vespo"], "vllm_importance_sampling_correction": [True]},
        "set 'token_truncate' or 'token_mask', or vllm_importance_sampling_correction=False",
        ["sequence_truncate", "sequence_mask"],
    ),
    Rule("rollout_correction", {"vllm_importance_sampling_correction": [True]}, f"both correct the rollouts; {_ONE}"),
    Rule(
        "rollout_correction",
        {"importance_sampling_level": ["sequence"], "loss_type": _multiplies_ratio},
        "there is one ratio for a trajectory; set 'sequence_truncate', 'sequence_mask' or 'geometric_mask', or "
        "importance_sampling_level='token'",
        lambda c: not {*c.correction_names} <= _CORRECTIONS_OF_TRAJECTORIES,
    ),
    Rule(
        "weight_sync",
        {"vllm_server_base_urls": lambda c: len(c.vllm_server_base_urls or []) > (c.vllm_server_base_url is None)},
        "TRL streams to one server; set weight_sync='auto'",
        ["nccl"],
    ),
    Rule("lora_deployment routing_replay", _COLOCATED, _SERVER),
    Rule(
        "lora_deployment weight_sync_steps",
        {"weight_sync": ["nccl"]},
        "nccl merges adapters, and brings back no older weights when a run is resumed; set weight_sync='auto'",
    ),
    Rule("weight_sync_steps", {"use_vllm": [True], "vllm_enable_sleep_mode": [True]}, f"sleep drops weights; {_ONE}"),
    Rule("routing_replay", _UNSAMPLED, f"{_SCHEME}, or {_SERVER}"),
    # Those that follow keep the penalty from tokens that δ̄ counts: λ would climb to `lambda_max` without effect.
    Rule(
        "importance_sampling_level",
        {**_CONSTRAINED, "discrepancy_level": ["token"], "loss_type": _multiplies_ratio},
        "there is one ratio for a trajectory; set discrepancy_level='sequence', importance_sampling_level='token', or "
        "constraint='none'",
        ["sequence"],
    ),
    Rule("off_policy_mask_threshold", _CONSTRAINED, "it masks penalised tokens; unset it or set constraint='none'"),
    Rule(
        "vllm_importance_sampling_mode",
        {**_CONSTRAINED, "vllm_importance_sampling_correction": [True]},
        "it masks penalised tokens; set rollout_correction in its place, or constraint='none'",
        ["token_mask", "sequence_mask"],
    ),
)
