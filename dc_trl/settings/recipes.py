"""Recipes: values for the fields of a `DCGRPOConfig` that its user leaves open.

Of λ they say nothing: `ConstraintSettings` gives it the defaults of the form that a recipe sets.
"""

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, Literal

from .fields import declared_default


Recipe = Literal["trl", "paper", "lag", "format"]

# Where nothing is constrained: fields that the asynchronous trainer has too.
UNCONSTRAINED = {"constraint": "none", "constraint_form": "injected", "constraint_target": "all"}
_MEASURED = UNCONSTRAINED | {"train_through_quantization": False}
# arXiv 2606.08779, with which docs/study.md compares all methods.
_OBJECTIVE = {"epsilon": 0.24, "loss_type": "grpo", "vllm_importance_sampling_correction": False}
_PULL = {"constraint": "static", "constraint_form": "log_ratio", "constraint_target": "lag"}

RECIPES: Mapping[Recipe, Mapping[str, Any]] = {
    # TRL's GRPO, with the mismatch measured. Where vLLM samples, TRL's importance sampling is on, unless something of
    # ours takes its place.
    "trl": _MEASURED | {"epsilon": 0.2, "loss_type": "dapo", "vllm_importance_sampling_correction": False},
    # DC-GRPO, arXiv 2606.08779.
    "paper": _MEASURED | _OBJECTIVE | {"constraint": "lagrangian"},
    # What treats each cause: a pull on what the weights did since they sampled, which is enough where the format is
    # coarse too, and the deployed forward, which removes a coarse format's mismatch.
    "lag": _MEASURED | _OBJECTIVE | _PULL,
    "format": _MEASURED | _OBJECTIVE | {"train_through_quantization": True},
}

# What a recipe decides: its own fields, and those that the form of the constraint fills in.
DECIDED = RECIPES["trl"].keys() | {"discrepancy_tolerance", "lambda_init", "lambda_max"}


def fill_in(settings: Any, values: Mapping[str, Any]) -> None:
    """Give these values to those of the fields that are left open (None)."""
    for name, value in values.items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)


def default_of(of: Field) -> Any:
    """Return the default of a field, which for a field that is left open is the recipe's; None where it has none."""
    return RECIPES["trl"].get(of.name) if of.default is None else declared_default(of)
