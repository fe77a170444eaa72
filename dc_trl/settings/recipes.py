"""Recipes: values for the fields of a `DCGRPOConfig` that its user leaves open."""

from collections.abc import Mapping
from typing import Any, Literal


Recipe = Literal["trl", "paper"]

RECIPES: Mapping[Recipe, Mapping[str, Any]] = {
    # TRL's GRPO, with the mismatch measured. Where vLLM samples, TRL's importance sampling is on, unless something of
    # ours takes its place.
    "trl": {
        "constraint": "none",
        "epsilon": 0.2,
        "loss_type": "dapo",
        "vllm_importance_sampling_correction": False,
    },
    # DC-GRPO, arXiv 2606.08779.
    "paper": {
        "constraint": "lagrangian",
        "epsilon": 0.24,
        "loss_type": "grpo",
        "vllm_importance_sampling_correction": False,
    },
}
