"""Settings of `DCGRPOTrainer`."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from accelerate.logging import get_logger
from transformers import GenerationConfig
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
from .settings.fields import require_fields, setting, values_named
from .settings.neutral_sampling import TRUNCATIONS, VLLM_SETTINGS
from .settings.ranges import ABOVE_0, AT_LEAST_0, COUNT, FINITE, WHOLE, require_choice, require_number
from .settings.recipes import RECIPES, Recipe, fill_in


logger = get_logger(__name__)

LossType = Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]

# What the values of `train_through_quantization` mean.
_THROUGH: dict[str, Any] = {"true": True, "all": True, "weights": "weights", "false": False}

# vLLM's own bound on the tokens that it names (--max-logprobs), which TRL leaves as it is where it builds the engine.
_COLOCATED_LOGPROBS = 20


@dataclass
class DCGRPOConfig(ConstraintSettings, GRPOConfig):
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

    recipe: Recipe = setting(
        "trl",
        'Where the fields that are left open get their values. "trl": TRL\'s GRPOConfig, with constraint="none". '
        '"paper": DC-GRPO (arXiv 2606.08779). "lag", "format" and "both": what docs/study.md found best for a sampler '
        "whose weights lag, for a coarse number format, and for the two at once; see docs/settings.md.",
    )
    # Open, so that the recipe fills them in.
    epsilon: Annotated[float | None, AT_LEAST_0] = setting(None, "Clip range of the policy ratio (not the tolerance).")
    loss_type: LossType | None = setting(None, "Loss formulation, see TRL's GRPOConfig.")
    vllm_importance_sampling_correction: bool | None = setting(
        None,
        "TRL's own importance sampling (TIS/MIS). If it is not set, it is on where TRL has it on and no constraint, "
        "rollout_correction or score_centering takes its place.",
    )

    drop_zero_std_groups: bool = setting(
        False,
        "In training, leave prompts whose completions all got the same reward out of loss and δ̄ (arXiv 2602.01826).",
    )
    train_through_quantization: str | None = setting(
        None,
        'True or "all" lets the policy\'s layers compute with weights and activations of deployment_scheme, as the '
        'engine does; "weights" with its weights alone (QUADS, arXiv 2607.15810); False with neither. Gradients pass '
        "the rounding unchanged; see docs/aligned.md. If it is not set, recipe decides.",
    )
    lora_deployment: Literal["merged", "adapter"] = setting(
        "merged",
        'How a LoRA adapter is sampled and shipped: "merged" into the weights before they are quantized; "adapter", '
        "beside a base that is quantized once, so that the adapter alone goes to the server; see docs/lora.md.",
    )
    score_centering: bool = setting(
        False,
        "Subtract from the score ∇ log π_train of each sampled token the mean score under the sampler's distribution "
        "(arXiv 2609.20807); see docs/corrections.md.",
    )
    score_centering_top_k: Annotated[int | None, COUNT] = setting(
        None,
        "Number of the sampler's most probable tokens that score_centering reads at each position. If it is not set, "
        "the replica returns all tokens, and vLLM 20, the most that it returns by default (--max-logprobs).",
    )
    routing_replay: bool = setting(
        False,
        "In a mixture of experts, the trainer's forward uses the experts that the engine chose for each token (R3, "
        "arXiv 2510.11370); a vLLM server needs --enable-return-routed-experts.",
    )
    weight_sync: Literal["auto", "nccl", "checkpoint"] = setting(
        "auto",
        'How new weights reach a vLLM server: "checkpoint", as the deployable checkpoint; "nccl", by TRL\'s stream; '
        '"auto", by checkpoint for quantized schemes and where NCCL cannot work (no CUDA, or one shared GPU).',
    )
    weight_sync_dir: str | None = setting(
        None,
        "Directory that trainer and vLLM server both see under this path, through which checkpoints reach the server; "
        "by default shared memory (/dev/shm), for a server on the same machine.",
    )
    weight_sync_steps: Annotated[int, COUNT] = setting(
        1, "Optimizer steps after which new weights go to the engine. Above 1 its weights lag, and δ contains the lag."
    )
    vllm_server_base_urls: list[str] | None = setting(
        None,
        "Addresses of several vLLM servers that sample together; the prompts of one that fails go to the others. If "
        "vllm_server_base_url is given too, it is that of a router before them (see docs/fast_loop.md).",
    )
    rollout_overlap: bool = setting(
        False,
        "While a generation batch trains, a vLLM server samples the next one, with the weights from before the "
        "batch's steps, so that δ contains the lag; see docs/fast_loop.md.",
    )
    vllm_request_timeout: Annotated[float | None, ABOVE_0] = setting(
        None,
        "Seconds that a request to the vLLM server may take, by default 3600; at most nine tenths of ddp_timeout.",
    )
    vllm_max_retries: Annotated[int, WHOLE] = setting(
        3,
        "How often a rollout or a synchronization that failed is tried again, each time once a server is up within "
        "vllm_server_timeout seconds. Then the run saves a checkpoint and stops.",
    )
    hub_base_model_id: str | None = setting(
        None, "Hub id of a base model that is loaded from a directory; a push writes it into model card and adapter."
    )
    length_aware_batches: bool = setting(
        True,
        "Within an optimizer step completions of similar length share a forward, which reads no more than its own "
        "longest prompt and completion. Loss and gradient equal TRL's up to rounding; see docs/fast_loop.md.",
    )
    export_run: bool = setting(
        True,
        "Write history.jsonl, settings.json and run.png into output_dir, and with deployment_scheme the deployable "
        "checkpoint too (deployment/), as save_model does; see docs/tour.md.",
    )

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
        of_transformers = vars(GenerationConfig()).keys()
        known = VLLM_SETTINGS if self.use_vllm else of_transformers if self.deployment_scheme else given
        for name in given:
            if name not in known:
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
