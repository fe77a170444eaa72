"""What each setting may be: a number of a range, one of several words. All else is refused before anything starts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Integral, Real
from typing import Any, get_args


@dataclass(frozen=True)
class Range:
    """Numbers from `least`, or `above` a bound, to `most`, or `below` a bound.

    They are whole numbers if `whole` is set, and finite unless `infinite` allows +∞. `or_else` is one further number,
    with what it means.
    """

    least: int | None = None
    above: int | None = None
    most: int | None = None
    below: int | None = None
    whole: bool = False
    infinite: bool = False
    or_else: tuple[int, str] | None = None

    def allows(self, value: Any) -> bool:
        """Whether the value is a number, and one of these."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number: Any = value
        if self.or_else is not None and number == self.or_else[0]:
            return True
        finite = abs(number) < (2**63 if isinstance(number, Integral) else math.inf)  # NaN is not
        return (
            (finite or (self.infinite and number == math.inf))
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number" if self.infinite else "a finite number"
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        words = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
        other = [] if self.or_else is None else [f"or {self.or_else[0]} {self.or_else[1]}"]
        return ", ".join([kind, *words, *other])


COUNT = Range(least=1, whole=True)
WHOLE = Range(least=0, whole=True)
FINITE = Range()
AT_LEAST_0 = Range(least=0)
ABOVE_0 = Range(above=0)
SHARE = Range(above=0, most=1)
BELOW_1 = Range(least=0, below=1)
SEED = Range(least=0, most=2**32 - 1, whole=True)
PORT = Range(least=1, most=65535, whole=True)

_NAMES: dict[Range, str] = {
    replace(COUNT, or_else=(-1, "for num_train_epochs")): "max_steps",
    Range(least=2, whole=True): "num_generations",
    Range(least=-1, whole=True): "local_rank",
    replace(WHOLE, or_else=(-1, "(0 and -1: no truncation)")): "top_k",
    Range(least=0, infinite=True): "max_grad_norm epsilon_high",
    Range(above=0, infinite=True): """
        vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_correction_max
    """,
    COUNT: """
        per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps generation_batch_size
        steps_per_generation num_iterations num_generations_eval max_completion_length torch_empty_cache_steps
        eval_accumulation_steps save_total_limit dataloader_prefetch_factor ddp_bucket_cap_mb ddp_timeout
        vllm_max_model_length vllm_tensor_parallel_size ref_model_sync_steps dual_window weight_sync_steps
        max_tokens_per_micro_batch
    """,
    WHOLE: "dataloader_num_workers max_tool_calling_iterations num_completions_to_print vllm_max_retries",
    SEED: "seed data_seed",
    PORT: "vllm_server_port vllm_group_port",
    AT_LEAST_0: """
        learning_rate weight_decay adam_epsilon warmup_steps logging_steps eval_steps eval_delay neftune_noise_alpha
        router_aux_loss_coef beta epsilon vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg entropy_coef_delta
        entropy_target vllm_importance_sampling_clip_min vllm_server_timeout discrepancy_margin lambda_init lambda_lr
        lambda_min lambda_max rollout_correction_min
    """,
    ABOVE_0: """
        num_train_epochs save_steps temperature repetition_penalty delta sapo_temperature_neg sapo_temperature_pos
        off_policy_mask_threshold vllm_request_timeout
    """,
    SHARE: "top_p vllm_gpu_memory_utilization",
    Range(least=0, most=1): "min_p label_smoothing_factor ref_model_mixup_alpha top_entropy_quantile",
    BELOW_1: "adam_beta1 adam_beta2",
    FINITE: "entropy_coef entropy_coef_min entropy_coef_max",
}

# Every field of `DCGRPOConfig` that is a number, those of TRL and transformers included.
TRAINING = {name: range_ for range_, names in _NAMES.items() for name in names.split()}

# Those of TRL's `ModelConfig`, for an adapter.
ADAPTER = {"lora_r": COUNT, "lora_alpha": COUNT, "lora_dropout": BELOW_1}


def require_choice(name: str, value: object, choices: Any) -> None:
    """Refuses a value that is none of the choices: a `Literal`'s, or names.

    Raises:
        ValueError: names the setting, its value and the choices.
    """
    options = get_args(choices) or tuple(choices)
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, options))}.")


def require_number(name: str, value: Any, allowed: Range) -> None:
    """Refuses a number that is out of its range.

    Raises:
        ValueError: names the setting, the value and what it may be.
    """
    if not allowed.allows(value):
        raise ValueError(f"{name}={value!r} is invalid: use {allowed}.")


def require_numbers(settings: Any, allowed: Mapping[str, Range]) -> None:
    """Refuses settings that are out of their ranges.

    Args:
        settings: an instance of a dataclass, or what argparse returns. None is refused where it is not the default.
        allowed: by name of the setting.

    Raises:
        ValueError: names the setting, the value and what it may be.
    """
    defaults = {field.name: field.default for field in fields(settings)} if is_dataclass(settings) else {}
    for name, range_ in allowed.items():
        value = getattr(settings, name)
        if value is not None or defaults.get(name) is not None:
            require_number(name, value, range_)
