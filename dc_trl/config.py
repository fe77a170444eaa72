"""Settings of `DCGRPOTrainer`."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from accelerate.logging import get_logger
from trl import GRPOConfig

from .constraint.corrections import correction_of
from .constraint.forms import coefficient_of
from .constraint.settings import Constraint, ConstraintSettings, read_correction, read_tolerance
from .constraint.thresholds import lag_warning
from .files import parse_object
from .quantization.schemes import SCHEMES, require_scheme, require_served_scheme
from .rollouts.neutral_sampling import TRUNCATIONS, restrictions, truncations
from .serving.preflight import require_addresses
from .settings.contradictions import require_no_contradiction
from .settings.distribution import require_division
from .settings.fields import require_fields, setting
from .settings.ranges import ABOVE_0, AT_LEAST_0, COUNT, FINITE, WHOLE, require_choice, require_number
from .settings.recipes import RECIPES, Recipe


logger = get_logger(__name__)

HubDeployment = Literal["subfolder", "none"]
LossType = Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]

# vLLM's own bound on the tokens that it names (--max-logprobs), which TRL leaves as it is where it builds the engine.
_COLOCATED_LOGPROBS = 20
# Of the fields that hold a dict, or JSON from a command line, those that may also name a file.
_FILE_OR_DICT = ("accelerator_config", "fsdp_config", "deepspeed")


@dataclass
class DCGRPOConfig(ConstraintSettings, GRPOConfig):
    """Configuration of [`DCGRPOTrainer`]: everything of [`~trl.GRPOConfig`], and the discrepancy constraint.

    The defaults train as TRL does, and measure. `recipe="paper"` is the dense 8B recipe of DC-GRPO (arXiv 2606.08779).
    A recipe gives values to the fields that are left open (`None`): `constraint`, `constraint_form`,
    `train_through_quantization`, `loss_type`, `epsilon` and `vllm_importance_sampling_correction`. A value that is
    given wins over the recipe. With the paper's form, λ_0 and η_λ have its values by default; ε is found by the
    run, and the paper's is 0.0037. docs/settings.md lists the fields, `dc-trl train --help` does too.

    Raises:
        ValueError: a field has a value that it does not take, or fields contradict each other; the message names the
            fields, their values and the remedy.
        TypeError: there is no field of a name that was given.
    """

    recipe: Recipe = setting(
        "trl",
        'Where the fields that are left open get their values. "trl": constraint="none", and everything else as in '
        'TRL\'s GRPOConfig. "paper": constraint="lagrangian", loss_type="grpo", epsilon=0.24 and '
        "vllm_importance_sampling_correction=false (DC-GRPO, arXiv 2606.08779). The others have the last three values "
        'too, and what docs/study.md found best: "lag", for a sampler whose weights lag, constraint="static" and '
        'constraint_form="log_ratio"; "format", for a coarse number format, train_through_quantization=true; and '
        '"both", for the two causes at once, all three. "format" and "both" need deployment_scheme.',
    )
    # The recipe fills in those that are left open.
    constraint: Constraint | None = setting(  # type: ignore[assignment]
        None, ConstraintSettings.__dataclass_fields__["constraint"].metadata["help"]
    )
    constraint_form: str = setting(None, ConstraintSettings.__dataclass_fields__["constraint_form"].metadata["help"])
    epsilon: Annotated[float | None, AT_LEAST_0] = setting(None, "Clip range of the policy ratio (not the tolerance).")
    loss_type: LossType | None = setting(None, "Loss formulation, see TRL's GRPOConfig.")
    vllm_importance_sampling_correction: bool | None = setting(
        None,
        "Truncated or masked importance sampling (TIS/MIS) of TRL against the engine's log-probabilities. If it is "
        "not set, it is on where TRL has it on and no constraint, rollout_correction or score_centering takes its "
        "place.",
    )

    advantage_estimator: Literal["grpo", "rloo"] = setting(
        "grpo",
        '"grpo" is TRL\'s group-normalised advantage. "rloo" is the reward minus the mean reward of the prompt\'s '
        "other completions (leave-one-out, arXiv 2402.14740), unscaled; scale_rewards does not apply.",
    )
    drop_zero_std_groups: bool = setting(
        False,
        "In training, leave the completions of a prompt that all got the same reward out of the loss and of δ̄; the "
        "loss is the mean over the others (arXiv 2602.01826).",
    )
    train_through_quantization: bool = setting(
        None,
        "Train through the deployed forward: the policy's layers compute with the weights and activations of "
        "deployment_scheme, in bfloat16, as the engine does, and gradients pass the rounding unchanged to the trained "
        "weights (straight-through). What is left of δ is the gap between the kernels, see docs/aligned.md. The "
        "reference model of beta computes so with an adapter only, where it is the policy. If it is not set, recipe "
        "decides.",
    )
    score_centering: bool = setting(
        False,
        "Take the mean of the score ∇ log π_train(v) over the sampler's distribution away from the score of each "
        "sampled token, with the weights of rollout_correction where there are some (arXiv 2609.20807): what the "
        "gradient drifts by where the engines differ, whatever the rewards are. It reads the replica's whole "
        "vocabulary, in one more forward without a gradient, or vLLM's most probable tokens.",
    )
    score_centering_top_k: Annotated[int | None, COUNT] = setting(
        None,
        "Number of vLLM's most probable tokens that score_centering reads at each position; the others count as "
        "π_train, scaled to the probability that is left. If it is not set, 20, the most that an engine names by "
        "default (--max-logprobs). Under truncated sampling vLLM gives those that it keeps.",
    )
    routing_replay: bool = setting(
        False,
        "In a mixture of experts, the trainer's forward takes the experts that the engine chose for each token, with "
        "the weights of its own router (R3, arXiv 2510.11370). This needs a router like Qwen3-MoE's, and rollouts of "
        "the replica or of a vLLM server with --enable-return-routed-experts (on a GPU).",
    )
    padding_free: bool = setting(
        False,
        "Let forward passes of training compute real tokens only: the sequences of a micro-batch stand in one row, "
        "and the attention implementation keeps them apart. Loss and gradient equal those of padded rows up to "
        "rounding. This needs a text model without recurrent layers and attn_implementation "
        '"flash_attention_2", "flash_attention_3", "flex_attention" or "sdpa"; see docs/fast_loop.md.',
    )
    weight_sync: Literal["auto", "nccl", "checkpoint"] = setting(
        "auto",
        'How new weights reach a vLLM server. "checkpoint": as the deployable checkpoint, in shared memory or in '
        'weight_sync_dir, which the server reloads in place; what samples is what is exported. "nccl": by TRL\'s '
        'stream of the trained weights. "auto": by checkpoint for quantized schemes and where NCCL cannot work (no '
        "CUDA, or one shared GPU).",
    )
    weight_sync_dir: str | None = setting(
        None,
        "Directory for checkpoints on their way, which trainer and vLLM server both see under this path. If it is "
        "not set, shared memory (/dev/shm) is used, for a server on the same machine.",
    )
    weight_sync_steps: Annotated[int, COUNT] = setting(
        1,
        "Number of optimizer steps after which new weights go to the engine that samples, at the next generation "
        "batch. Above 1 the engine samples with weights that lag, δ contains the lag, and a vLLM engine gets its "
        "weights as checkpoints.",
    )
    vllm_server_base_urls: list[str] | None = setting(
        None,
        "Addresses of several vLLM servers that sample together, in place of TRL's vllm_server_base_url. Prompts are "
        "spread over them, all hold the same weights, and the prompts of one that fails go to the others (see "
        "docs/fast_loop.md). The weights go as checkpoints.",
    )
    rollout_overlap: bool = setting(
        False,
        "While a generation batch trains, a vLLM server samples the next one, with the weights from before the "
        "batch's steps: one batch ahead, never more. Its log-probabilities are the sampler's own, so δ contains the "
        'lag. This needs vllm_mode="server"; see docs/fast_loop.md.',
    )
    vllm_request_timeout: Annotated[float | None, ABOVE_0] = setting(
        None,
        "Seconds that a request to the vLLM server may take: a generation batch, or a reload of the weights. If it is "
        "not set, 3600. With several processes the others wait for the one that asks the server, no longer than "
        "ddp_timeout; nine tenths of ddp_timeout are the limit then.",
    )
    vllm_max_retries: Annotated[int, WHOLE] = setting(
        3,
        "How often a rollout or a synchronization that failed is tried again, each time once a server is up within "
        "vllm_server_timeout seconds. With several processes all tries and the waits between them take no longer than "
        "nine tenths of ddp_timeout. Then the run saves a checkpoint and stops.",
    )
    hub_deployment: HubDeployment = setting(
        "subfolder",
        'Where a push puts the deployment checkpoint: "subfolder" is deployment/ of hub_model_id, and "none" pushes '
        "none.",
    )
    hub_base_model_id: str | None = setting(
        None,
        "Hub id of the model that is trained, where it is loaded from a directory. A pushed adapter and the model "
        "card name their base by it; directories of this machine are not pushed.",
    )
    length_aware_batches: bool = setting(
        True,
        "Within an optimizer step completions of similar length share a forward, and a forward reads no more than its "
        "own longest prompt and completion. Loss and gradient of the step equal TRL's up to rounding. Losses that are "
        "a mean over the micro-batch keep their completions together, and are only cut; see docs/batching.md.",
    )
    max_tokens_per_micro_batch: Annotated[int | None, COUNT] = setting(
        None,
        "Largest number of tokens (prompts, completions and their padding) that a forward of training reads in each "
        "process. per_device_train_batch_size times gradient_accumulation_steps then says how many completions share "
        "an optimizer step, and no longer how many share a forward. A longer completion has a forward of its own.",
    )
    export_run: bool = setting(
        True,
        "train leaves history.jsonl, settings.json and run.png in output_dir, and with deployment_scheme also the "
        "deployable checkpoint (deployment/), which save_model leaves beside the model too. With false there are only "
        "TRL's files (dc-trl train keeps its history all the same). An export gathers, quantizes and writes all "
        "weights, at the end of train and in each call of save_model: its time and its disk space grow with the model "
        "(see docs/tour.md), and an earlier deployment stays until the new one is whole. No checkpoint-N has one. For "
        'formats that no engine serves ("int3", "int2") only history and figure are left.',
    )

    def __post_init__(self):
        require_choice("recipe", self.recipe, Recipe)
        self._fill_in()
        self._check_values()
        # Parses the JSON strings that dict fields hold when they come from a command line.
        super().__post_init__()
        require_division(self)
        require_no_contradiction(self)
        self._check_sampling()
        self._warn_of_lag()

    @property
    def vllm_time_limit(self) -> float:
        """Seconds that one rollout or synchronization through a vLLM server may take, with all its tries.

        In a single process there is no limit. Several wait for the main one no longer than `ddp_timeout`; a tenth of
        it is left for them to hear of a failure, so that all of them save the run.
        """
        return 0.9 * self.ddp_timeout if self.world_size > 1 else math.inf

    @property
    def exports_deployment(self) -> bool:
        """Whether `train` and `save_model` write the deployable checkpoint by themselves."""
        return self.export_run and self.deployment_scheme in SCHEMES

    @property
    def truncations(self) -> dict[str, Any]:
        """Those of top-p, top-k and min-p that cut off what is sampled, with their values."""
        return truncations(self._sampling)

    @property
    def named_tokens(self) -> int:
        """How many tokens vLLM is to name at each position, the most probable ones; 0: the sampled one alone."""
        if not self.use_vllm:
            return 0
        if self.truncations:
            top_k = self.truncations.get("top_k") or 0
            return top_k if self.vllm_mode != "colocate" or top_k <= _COLOCATED_LOGPROBS else 0
        return (self.score_centering_top_k or _COLOCATED_LOGPROBS) if self.score_centering else 0

    @property
    def _comparisons(self) -> dict[str, Any]:
        return super()._comparisons | {"score_centering": False}

    @property
    def _sampling(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*TRUNCATIONS, "repetition_penalty")}
        return own | (self.generation_kwargs or {})

    def _fill_in(self) -> None:
        """Give the fields that are left open the values of the recipe, or else TRL's."""
        open_correction = self.vllm_importance_sampling_correction is None
        for name, value in RECIPES[self.recipe].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if open_correction and self.recipe == "trl":  # on by default there, unless something of ours takes its place
            self.vllm_importance_sampling_correction = self.use_vllm and self.compared_by is None

    def _check_values(self) -> None:
        self.rollout_correction = read_correction(self.rollout_correction)
        require_fields(self)
        self.fill_in_multiplier()
        coefficient_of(self)  # refuses a form, and correction_of a correction, that does not exist
        correction_of(self)
        self.discrepancy_tolerance = read_tolerance(self.discrepancy_tolerance)
        if self.vllm_server_base_url is not None:
            require_addresses("vllm_server_base_url", [self.vllm_server_base_url])
        if self.vllm_server_base_urls is not None:
            require_addresses("vllm_server_base_urls", self.vllm_server_base_urls)
        for weight in self.reward_weights or []:
            require_number("reward_weights", weight, FINITE)
        self._check_dicts()
        if self.deployment_scheme is not None:
            written = self.use_vllm or (self.push_to_hub and self.hub_deployment != "none")
            (require_served_scheme if written else require_scheme)(self.deployment_scheme)

    def _check_dicts(self) -> None:
        for name in self._VALID_DICT_FIELDS:
            value = getattr(self, name)
            a_file = name in _FILE_OR_DICT and isinstance(value, str) and not value.startswith("{")
            if value is not None and not a_file:
                parse_object(name, value)

    def _warn_of_lag(self) -> None:
        name = "weight_sync_steps" if self.weight_sync_steps > 1 else "rollout_overlap"
        warning = lag_warning(self, f"{name}={getattr(self, name)!r}")
        if warning is not None and (self.weight_sync_steps > 1 or self.rollout_overlap):
            logger.warning(warning)

    def _check_sampling(self) -> None:
        """Refuses what makes the engine's distribution another one than the policy's, where the two are compared."""
        if self.compared_by is None:
            return
        for name, value, remedy in restrictions(self._sampling, corrected=TRUNCATIONS):
            where = " in generation_kwargs" if name in (self.generation_kwargs or {}) else ""
            raise ValueError(
                f"{name}={value!r}{where} makes the engine sample from a distribution that is not the policy's, or "
                f"report another's, and {self.comparison} would take that difference for mismatch: {remedy} or "
                f"{self.without_comparison}."
            )
        top_k = self._sampling["top_k"]
        if not self.use_vllm:
            return
        if self.truncations and top_k <= 0:
            raise ValueError(
                f"top_k={top_k} with top_p={self._sampling['top_p']!r} and min_p={self._sampling['min_p']!r} leaves "
                "open how many tokens vLLM keeps, and it cannot name them all: set top_k too (for example 20), sample "
                f"by the in-process replica (use_vllm=False, deployment_scheme), or set {self.without_comparison}."
            )
        name = "top_k" if self.truncations else "score_centering_top_k"
        most = top_k if self.truncations else self.score_centering_top_k or 0
        if self.vllm_mode == "colocate" and most > _COLOCATED_LOGPROBS:
            raise ValueError(
                f"{name}={most} takes more tokens than an engine of vllm_mode='colocate' names "
                f"({_COLOCATED_LOGPROBS}): lower it, or use vllm_mode='server'."
            )
