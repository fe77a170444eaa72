"""Settings of `DCGRPOTrainer`."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import GenerationConfig, get_scheduler
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from trl import GRPOConfig

from .constraint.corrections import correction_of
from .constraint.forms import coefficient_of
from .constraint.settings import ConstraintSettings
from .constraint.thresholds import lag_warning
from .quantization.schemes import SERVED_SCHEMES, require_scheme, require_served_scheme
from .settings.command_line import nearest
from .settings.contradictions import require_consistent
from .settings.distribution import recompute_once, require_division
from .settings.fields import FINITE, require_choice, require_fields, require_number, values_named
from .settings.neutral_sampling import TRUNCATIONS, VLLM_SETTINGS
from .settings.recipes import RECIPES, Recipe, fill_in
from .settings.trainer_fields import TrainerFields


logger = get_logger(__name__)

# What the values of `train_through_quantization` mean.
_THROUGH: dict[str, Any] = {"true": True, "all": True, "weights": "weights", "false": False}

# vLLM's own bound on the tokens that it names (--max-logprobs), which TRL leaves as it is where it builds the engine.
_COLOCATED_LOGPROBS = 20


@dataclass
class DCGRPOConfig(TrainerFields, ConstraintSettings, GRPOConfig):
    """Configuration of [`DCGRPOTrainer`]: everything of [`~trl.GRPOConfig`], and the discrepancy constraint.

    The defaults train as TRL does, and measure. `recipe="paper"` is the dense 8B recipe of DC-GRPO (arXiv 2606.08779).
    A recipe gives values to the fields that are left open (`None`): `constraint`, `constraint_form`,
    `constraint_target`, `train_through_quantization`, `loss_type`, `epsilon` and
    `vllm_importance_sampling_correction`. A value that is
    given wins over the recipe. With the paper's form, λ_0 and η_λ have its values by default; ε is found by the
    run, and the paper's is 0.0037. docs/settings.md lists the fields, `dc-trl train --help` does too.

    Raises:
        ValueError: a field has a value that it does not take, or fields contradict each other; the message names the
            fields, their values and the remedy.
        TypeError: there is no field of a name that was given.
    """

    def __post_init__(self):
        require_choice("recipe", self.recipe, Recipe)
        open_correction = self.vllm_importance_sampling_correction is None
        fill_in(self, RECIPES[self.recipe])
        if open_correction and self.recipe == "trl":  # on by default there, unless something of ours takes its place
            self.vllm_importance_sampling_correction = self.use_vllm and self.compared_by is None
        through = str(self.train_through_quantization).lower()  # a command line hands over text
        require_choice("train_through_quantization", through, _THROUGH)
        self.train_through_quantization = _THROUGH[through]
        if self.deployment_scheme is not None:
            is_served = self.use_vllm or self.push_to_hub
            (require_served_scheme if is_served else require_scheme)(self.deployment_scheme)
        ConstraintSettings.__post_init__(self)
        require_fields(self)
        coefficient_of(self)  # refuses a form, and correction_of a correction, that does not exist
        correction_of(self)
        for weight in self.reward_weights or []:
            require_number("reward_weights", weight, FINITE)
        # Parses the JSON strings that dict fields hold when they come from a command line.
        with values_named(self):
            GRPOConfig.__post_init__(self)
        for tracker in self.report_to or []:
            require_choice("report_to", tracker, INTEGRATION_TO_CALLBACK)
            if tracker not in get_available_reporting_integrations():
                raise ValueError(f"report_to={tracker!r} is not installed: pip install {tracker}, or set 'none'.")
        self._require_schedule()
        require_division(self)
        recompute_once(self)
        require_consistent(self)
        self._check_sampling()
        lagging = "weight_sync_steps" if self.weight_sync_steps > 1 else "rollout_overlap"
        if self.may_lag and (warning := lag_warning(self, f"{lagging}={getattr(self, lagging)!r}")):
            logger.warning(warning)
        if not self.may_lag and self.split_by is not None and "_target='lag'" in self.split_by:
            logger.warning(
                f"{self.split_by} acts on what the weights did since they sampled, which is nothing with "
                "weight_sync_steps=1 and rollout_overlap=False: it changes nothing in this run."
            )

    def _require_schedule(self) -> None:
        weight = torch.zeros(1, requires_grad=True)
        try:
            get_scheduler(
                self.lr_scheduler_type, torch.optim.SGD([weight], self.learning_rate), 1, 2, self.lr_scheduler_kwargs
            )
        except (TypeError, ValueError, ZeroDivisionError) as error:
            kind = self.lr_scheduler_type.value
            raise ValueError(
                f"lr_scheduler_type={kind!r} with lr_scheduler_kwargs={self.lr_scheduler_kwargs!r}: {error}."
            ) from error

    @property
    def may_lag(self) -> bool:
        """Whether a batch of training may be sampled with weights from before its step."""
        return self.weight_sync_steps > 1 or self.rollout_overlap

    @property
    def vllm_time_limit(self) -> float:
        """Seconds that one rollout or synchronization through a vLLM server may take, with all its tries.

        Several processes wait for the main one no longer than `ddp_timeout`, a tenth of which is left for a failure.
        """
        return 0.9 * self.ddp_timeout if self.world_size > 1 else math.inf

    @property
    def exports_deployment(self) -> bool:
        """Whether `train` and `save_model` write the deployable checkpoint by themselves."""
        return self.export_run and self.deployment_scheme in SERVED_SCHEMES

    @property
    def named_tokens(self) -> int:
        """How many tokens vLLM is to name at each position, the most probable ones; 0: the sampled one alone."""
        if not self.use_vllm:
            return 0
        if self.truncations:
            top_k = self.truncations.get("top_k") or 0
            return top_k if self.vllm_mode != "colocate" or top_k <= _COLOCATED_LOGPROBS else 0
        return (self.score_centering_top_k or _COLOCATED_LOGPROBS) if self.score_centering else 0

    def _check_sampling(self) -> None:
        sampling, given = self.sampling, self.generation_kwargs or {}
        if given and (self.use_vllm or self.deployment_scheme):
            of_transformers = vars(GenerationConfig()).keys()
            known = VLLM_SETTINGS if self.use_vllm else of_transformers
            if (name := next((name for name in given if name not in known), None)) is not None:
                engine = "vLLM" if self.use_vllm else "transformers, and with it the replica,"
                other = f"leave it out, or set use_vllm={not self.use_vllm}."
                remedy = other if name in VLLM_SETTINGS | of_transformers else nearest(name, known, "leave it out.")
                raise ValueError(f"generation_kwargs={given!r} has {name!r}, which {engine} would ignore: {remedy}")
        self.require_policys_distribution(given, TRUNCATIONS, "generation_kwargs")
        own = {name: value for name, value in sampling.items() if name not in given}
        self.require_policys_distribution(own, TRUNCATIONS)
        if self.compared_by is None or not self.use_vllm:
            return
        top_k = sampling["top_k"]
        if self.truncations and top_k <= 0:
            raise ValueError(
                f"top_k={top_k} with top_p={sampling['top_p']!r} and min_p={sampling['min_p']!r} leaves "
                "open how many tokens vLLM keeps, and it cannot return them all: set top_k too (for example 20), use "
                f"the in-process replica (use_vllm=False, deployment_scheme), or set {self.without_comparison}."
            )
        name = "top_k" if self.truncations else "score_centering_top_k"
        most = top_k if self.truncations else self.score_centering_top_k or 0
        if self.vllm_mode == "colocate" and most > _COLOCATED_LOGPROBS:
            raise ValueError(
                f"{name}={most} needs more tokens at a position than vllm_mode='colocate' returns "
                f"({_COLOCATED_LOGPROBS}): lower it, or use vllm_mode='server'."
            )
