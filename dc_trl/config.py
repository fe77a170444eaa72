"""Settings of `DCGRPOTrainer`."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from accelerate.logging import get_logger
from trl import GRPOConfig

from .constraint.corrections import correction_of
from .constraint.forms import coefficient_of
from .constraint.settings import CHOICES, Constraint, ConstraintSettings, read_tolerance
from .constraint.thresholds import lag_warning
from .files import parse_object
from .quantization.schemes import SCHEMES, require_scheme, require_served_scheme
from .rollouts.neutral_sampling import TRUNCATIONS, restrictions, truncates
from .serving.preflight import require_address, require_addresses, require_waits_that_fit
from .settings.contradictions import require_no_contradiction
from .settings.described import described
from .settings.distribution import require_division
from .settings.ranges import COUNT, FINITE, TRAINING, require_choice, require_number, require_numbers
from .settings.recipes import RECIPES, Recipe
from .settings.values import require_kinds


logger = get_logger(__name__)

WeightSync = Literal["auto", "nccl", "checkpoint"]
SyncTrigger = Literal["steps", "discrepancy"]
AdvantageEstimator = Literal["grpo", "rloo"]
HubDeployment = Literal["subfolder", "repository", "none"]

# Choices that TRL looks at after the first rollout.
_TRL_CHOICES = {
    "loss_type": Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"],
    "importance_sampling_level": Literal["token", "sequence"],
    "scale_rewards": Literal["group", "batch", "none", True, False],
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
    "vllm_importance_sampling_mode": Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
}

# vLLM's own bound on the tokens that it names, which TRL leaves as it is where it builds the engine.
_COLOCATED_LOGPROBS = 20
# Of the fields that hold a dict, or JSON from a command line, those that may also name a file.
_FILE_OR_DICT = ("accelerator_config", "fsdp_config", "deepspeed")


@described
@dataclass
class DCGRPOConfig(ConstraintSettings, GRPOConfig):
    r"""Configuration of [`DCGRPOTrainer`]: everything of [`~trl.GRPOConfig`], and the discrepancy constraint.

    The defaults train as TRL does, and measure. `recipe="paper"` is the dense 8B recipe of DC-GRPO (arXiv 2606.08779).
    It gives values to the fields that are left open (`None`): `constraint`, `loss_type`, `epsilon` and
    `vllm_importance_sampling_correction`. What is said of a field wins over the recipe. λ_0, ε and η_λ have the
    paper's values by default.

    Args:
        recipe (`str`, defaults to `"trl"`):
            Where the fields that are left open get their values. `"trl"`: `constraint="none"`, and all else as in
            TRL's `GRPOConfig`. `"paper"`: `constraint="lagrangian"`, `loss_type="grpo"`, `epsilon=0.24` and
            `vllm_importance_sampling_correction=False`.
        constraint (`str`, *optional*):
            Left open, what `recipe` says. `"none"`: GRPO, the discrepancy is measured and logged only. `"static"`:
            Dual-GRPO (eq. 4), advantages minus λ·δ with a fixed λ = `lambda_init`. `"lagrangian"`: DC-GRPO (eqs. 8 to
            11), λ moves by dual ascent after each generation batch.
        constraint_form (`str`, defaults to `"injected"`):
            How the discrepancy enters the objective (`dc_trl.constraint.forms`). `"injected"`: the paper's, advantages
            minus λ·δ. `"quadratic"`: the gradient of half the squared
            discrepancy (the paper's appendix B). `"log_ratio"`: advantages minus λ·log π_train/π_inf, the gradient of
            half the expected square of that logarithm over the engine's tokens, and nearly of a KL divergence.
            `"two_sided_kl"` and `"two_sided_l1"`: a term of the loss between the policy and its quantized self, with
            gradients through both; they need `deployment_scheme`, and one more forward and backward pass.
            `"module:function"`: a function of your own, see docs/own_form.md.
        discrepancy_measure (`str`, defaults to `"prob_diff"`):
            δ of a token (eq. 2): `"prob_diff"` |π_train − π_inf|, `"prob_ratio"` |π_train/π_inf − 1|, or `"log_prob"`
            |log π_train − log π_inf|.
        discrepancy_level (`str`, defaults to `"token"`):
            `"token"`: every token is penalised by its own δ. `"sequence"`: by the mean δ of its trajectory.
        discrepancy_tolerance (`float` or `"auto"`, defaults to `0.0037`):
            ε, in units of the measure: the batch discrepancy up to which λ does not grow. At least 0. `"auto"`: λ
            rests for the first ten generation batches, and ε is the mean of their δ̄ plus 2.37 standard deviations,
            which one healthy batch in forty exceeds (`dc_trl.constraint.lagrangian.proposed_tolerance`), logged as
            `lagrangian/tolerance`.
        discrepancy_margin (`float`, defaults to `0.0`):
            Tokens with δ at or below it are not penalised. At least 0.
        batch_reduction (`str`, defaults to `"sequence"`):
            Batch discrepancy δ̄ (eq. 11) as the mean over trajectories of their token means (`"sequence"`), or over
            all tokens (`"token"`).
        dual_window (`int`, defaults to `1`):
            Generation batches that δ̄ is averaged over before it moves λ. At least 1.
        lambda_init (`float`, defaults to `0.1`):
            λ_0, within [`lambda_min`, `lambda_max`].
        lambda_lr (`float`, defaults to `1.0`):
            Step size η_λ of the dual ascent. At least 0.
        lambda_min (`float`, defaults to `0.0`):
            Lower bound of λ. At least 0.
        lambda_max (`float`, defaults to `1.0`):
            Upper bound of λ. The paper states none; this one is ours.
        rollout_correction (`str`, defaults to `"none"`):
            What weighs the advantage of a token by r = π_train/π_inf, with any engine and any constraint: `"none"`,
            `"token_truncate"` (TIS): r within bounds, clipped to them. `"token_mask"` (MIS): r, 0 out of bounds.
            `"sequence_truncate"`, `"sequence_mask"`: the same with the product of a trajectory's r.
            `"geometric_mask"`: trajectories whose geometric mean of r is out of bounds are masked. `"icepop"`:
            `"token_mask"` with two bounds. `"tv_mask"` (DPPO): r, 0 where π_train − π_inf has passed the bound in the
            direction of the advantage. `"ppo_clip"`: PPO's clip with the sampler as the old policy. Masked tokens are
            not in δ̄. See `dc_trl.constraint.corrections` for the papers.
        rollout_correction_max (`float`, *optional*):
            Upper bound of the correction, at least 1; infinity for none. By default 2 (arXiv 2602.01826), for
            `"geometric_mask"` 1.01 (SkyRL's), for `"icepop"` 5 (verl's), for `"ppo_clip"` 1.24. For `"tv_mask"` a
            difference of probabilities below 1, by default 0.2 (SkyRL's).
        rollout_correction_min (`float`, *optional*):
            Lower bound of the correction, in [0, 1]. By default 0, for `"geometric_mask"` 0.99, for `"icepop"` 0.5,
            for `"ppo_clip"` 0.76. `"tv_mask"` has none.
        advantage_estimator (`str`, defaults to `"grpo"`):
            `"grpo"`: TRL's group-normalised advantage. `"rloo"`: the reward minus the mean reward of the prompt's
            other completions (leave-one-out, arXiv 2402.14740), not scaled: `scale_rewards` has no part in it.
        drop_zero_std_groups (`bool`, defaults to `False`):
            Completions of a prompt that all got the same reward enter neither the loss nor δ̄, and the loss is the
            mean over the others (arXiv 2602.01826). In training only.
        routing_replay (`bool`, defaults to `False`):
            In a mixture of experts, the trainer's forward takes the experts that the engine chose for each token, with
            the weights of its own router (R3, arXiv 2510.11370). For routers like Qwen3-MoE's, and rollouts of the
            replica, or of a vLLM server with `--enable-return-routed-experts` (on a GPU).
        padding_free (`bool`, defaults to `False`):
            Forward passes of training compute real tokens alone: the sequences of a micro-batch stand in one row, and
            the attention implementation keeps them apart. Loss and gradient are those of padded rows to rounding. For
            text models without recurrent layers, with `attn_implementation` `"flash_attention_2"`, `_3`,
            `"flex_attention"` or `"sdpa"`; see docs/fast_loop.md.
        deployment_scheme (`str`, *optional*):
            Number format that the policy is deployed in, and therefore sampled in: `"bf16"`, `"fp8"`, `"fp8_block"`,
            `"int8"`, `"int4"` or `"int4_g32"`. With `use_vllm=False` an in-process replica of the policy samples,
            with `use_vllm=True` a vLLM engine that runs in this format. For research on a large mismatch the replica
            also has `"int3"` and `"int2"`, which no engine serves.
        train_through_quantization (`bool`, defaults to `False`):
            Train through the deployed forward: the policy's layers compute with the weights and activations of
            `deployment_scheme`, in bfloat16, as the engine does, and gradients pass the rounding unchanged to the
            weights in training (straight-through). What is then left of δ is the kernels' own gap, see
            docs/aligned.md. The reference model of `beta` computes so with an adapter alone, where it is the policy.
        weight_sync (`str`, defaults to `"auto"`):
            How new weights reach a vLLM server. `"checkpoint"`: as the deployable checkpoint in shared memory or in
            `weight_sync_dir`, which the server reloads in place; what samples is what is exported. `"nccl"`: TRL's
            stream of the trained weights. `"auto"`: checkpoint for quantized schemes and where NCCL cannot work (no
            CUDA, one shared GPU).
        weight_sync_dir (`str`, *optional*):
            Directory that trainer and vLLM server both see under this path, for checkpoints on their way. By default
            shared memory (`/dev/shm`), for a server on the same machine.
        weight_sync_steps (`int`, defaults to `1`):
            Optimizer steps after which new weights go to the engine that samples, at the first generation batch from
            there on. Above 1 it samples with weights that lag, and δ contains the lag. A vLLM engine then gets its
            weights as checkpoints. At least 1.
        weight_sync_trigger (`str`, defaults to `"steps"`):
            `"steps"`: new weights go every `weight_sync_steps`. `"discrepancy"`: also earlier, at the generation batch
            after one whose δ̄ was above `discrepancy_tolerance`; at every one while `"auto"` still looks for it.
        vllm_server_base_urls (`list[str]`, *optional*):
            Addresses of several vLLM servers that sample together, in place of TRL's `vllm_server_base_url`: prompts
            are spread over them, all hold the same weights, and the prompts of one that fails go to the others (see
            docs/fast_loop.md). The weights go as checkpoints.
        rollout_overlap (`bool`, defaults to `False`):
            While a generation batch trains, a vLLM server samples the next one, with the weights from before the
            batch's steps: one batch ahead, never more. Its log-probabilities are the sampler's own, so δ contains the
            lag. With `vllm_mode="server"` only; see docs/fast_loop.md.
        vllm_request_timeout (`float`, *optional*):
            Seconds that any one request to the vLLM server may take: a generation batch, a reload of the weights. By
            default 3600. With several processes the others wait for the one that asks the server, no longer than
            `ddp_timeout`: by default no longer than nine tenths of that either, and a value above is refused.
        vllm_max_retries (`int`, defaults to `3`):
            How often a rollout or a synchronization that failed is tried again, each time once a server is up within
            `vllm_server_timeout` seconds. With several processes all tries together, and the waits between them, take
            no longer than nine tenths of `ddp_timeout`. Then the run saves a checkpoint and stops.
        length_aware_batches (`bool`, defaults to `True`):
            Within an optimizer step completions of like length share a forward, and every forward reads no more than
            its own longest prompt and completion. Loss and gradient of the step are TRL's, to rounding. Losses that
            are a mean over the micro-batch keep their completions together, and are only cut; see docs/batching.md.
        max_tokens_per_micro_batch (`int`, *optional*):
            The most tokens, prompts, completions and their padding, that a forward of training reads in each process.
            Then `per_device_train_batch_size` times `gradient_accumulation_steps` says how many completions share an
            optimizer step, and no longer how many share a forward. A completion that is longer is alone in its own.
        hub_deployment (`str`, defaults to `"subfolder"`):
            Where a push puts the deployment checkpoint: in the `"subfolder"` `deployment/` of `hub_model_id`, in a
            second `"repository"` `{hub_model_id}-{deployment_scheme}`, or nowhere (`"none"`).
        hub_base_model_id (`str`, *optional*):
            The Hub id of the model that is trained, where it is loaded from a directory. A pushed adapter and the
            model card name their base by it; directories of this machine are not pushed.
        export_run (`bool`, defaults to `True`):
            `train` leaves `history.jsonl`, `settings.json` and `run.png` in `output_dir`, and with `deployment_scheme`
            the deployable checkpoint (`deployment/`) too, which `save_model` leaves beside the model. `False`: nothing
            but TRL's files (`dc-trl train` keeps its history all the same). An export gathers, quantizes and writes
            all weights, at the end of `train` and in each call of `save_model`: its time and its disk grow with the
            model (docs/tour.md has some), and a deployment that was there stays until the new one is whole. No
            `checkpoint-N` has one. Formats that no engine serves (`"int3"`, `"int2"`) leave history and figure alone.
        checkpoint_hashes (`bool`, defaults to `True`):
            Each `checkpoint-N` has the SHA-256 of its files in its `manifest.json`, and a run that goes on from it
            compares them first: a second for each gigabyte, both times. `False` leaves it to the files' sizes.
    """

    recipe: Recipe = "trl"
    # Left open, the recipe fills these in.
    constraint: Constraint | None = None  # type: ignore[assignment]
    epsilon: float | None = field(
        default=None, metadata={"help": "Clip range of the policy ratio (not the tolerance)."}
    )
    loss_type: str | None = field(default=None, metadata={"help": "Loss formulation, see `GRPOConfig`."})
    vllm_importance_sampling_correction: bool | None = field(
        default=None,
        metadata={
            "help": "Truncated or masked importance sampling (TIS/MIS) against the engine's log-probs. Left open, it "
            "is on where TRL has it on and neither a constraint nor rollout_correction takes its place."
        },
    )

    advantage_estimator: AdvantageEstimator = "grpo"
    drop_zero_std_groups: bool = False
    train_through_quantization: bool = False
    routing_replay: bool = False
    padding_free: bool = False
    weight_sync: WeightSync = "auto"
    weight_sync_dir: str | None = None
    weight_sync_steps: int = 1
    weight_sync_trigger: SyncTrigger = "steps"
    vllm_server_base_urls: list[str] | None = None
    rollout_overlap: bool = False
    vllm_request_timeout: float | None = None
    vllm_max_retries: int = 3
    hub_deployment: HubDeployment = "subfolder"
    hub_base_model_id: str | None = None
    length_aware_batches: bool = True
    max_tokens_per_micro_batch: int | None = None
    export_run: bool = True
    checkpoint_hashes: bool = True

    def __post_init__(self):
        require_choice("recipe", self.recipe, Recipe)
        self._fill_in()
        self._check_values()
        # Parses the JSON strings that dict fields hold when they come from a command line.
        super().__post_init__()
        require_division(self)
        require_no_contradiction(self)
        self._check_waits()
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
    def keeps_history(self) -> bool:
        """Whether the trainer keeps settings, history and figure of a run by itself."""
        return self.export_run

    @property
    def exports_deployment(self) -> bool:
        """Whether `train` and `save_model` write the deployable checkpoint by themselves."""
        return self.export_run and self.deployment_scheme in SCHEMES

    @property
    def truncated_sampling(self) -> bool:
        """Whether top-p, top-k or min-p cut off what is sampled, and are corrected for as the engines are compared."""
        return self.compared_by is not None and truncates(self._sampling)

    @property
    def named_tokens(self) -> int:
        """How many tokens vLLM is to name at each position, the most probable ones; 0: the sampled one alone."""
        return self._sampling["top_k"] if self.use_vllm and self.truncated_sampling else 0

    @property
    def _sampling(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*TRUNCATIONS, "repetition_penalty")}
        return own | (self.generation_kwargs or {})

    def _fill_in(self) -> None:
        """Gives the fields that are left open the values of the recipe, or else TRL's."""
        open_correction = self.vllm_importance_sampling_correction is None
        for name, value in RECIPES[self.recipe].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if open_correction and self.recipe == "trl":  # on by default there, unless something of ours takes its place
            nothing_of_ours = self.constraint == "none" and self.rollout_correction == "none"
            self.vllm_importance_sampling_correction = self.use_vllm and nothing_of_ours

    def _check_values(self) -> None:
        for name, options in {
            **CHOICES,
            "weight_sync": WeightSync,
            "weight_sync_trigger": SyncTrigger,
            "advantage_estimator": AdvantageEstimator,
            "hub_deployment": HubDeployment,
            **_TRL_CHOICES,
        }.items():
            require_choice(name, getattr(self, name), options)
        coefficient_of(self)  # refuse what they name and is not there
        correction_of(self)
        self.discrepancy_tolerance = read_tolerance(self.discrepancy_tolerance)
        if self.output_dir is not None and not str(self.output_dir).strip():
            raise ValueError(f"output_dir={self.output_dir!r} is empty: name a directory.")
        require_numbers(self, TRAINING)
        if self.pad_to_multiple_of is not None and str(self.pad_to_multiple_of).lower() not in (
            "auto",
            "none",
            "null",
        ):
            number = str(self.pad_to_multiple_of)
            require_number("pad_to_multiple_of", int(number) if number.isdecimal() else number, COUNT)
        if self.vllm_server_base_url is not None:
            require_address("vllm_server_base_url", self.vllm_server_base_url)
        if self.vllm_server_base_urls is not None:
            require_addresses("vllm_server_base_urls", self.vllm_server_base_urls)
        require_kinds(self)
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

    def _check_waits(self) -> None:
        if self.use_vllm and self.vllm_mode == "server":
            require_waits_that_fit(
                self.vllm_time_limit,
                self.ddp_timeout,
                self.world_size,
                vllm_request_timeout=self.vllm_request_timeout,
                vllm_server_timeout=self.vllm_server_timeout,
            )

    def _check_sampling(self) -> None:
        """Refuses what makes the engine's distribution another one than the policy's, where the two are compared."""
        if self.compared_by is None:
            return
        for name, value, remedy in restrictions(self._sampling, corrected=TRUNCATIONS):
            where = " in generation_kwargs" if name in (self.generation_kwargs or {}) else ""
            raise ValueError(
                f"{name}={value!r}{where} makes the engine sample from a distribution that is not the policy's, or "
                f"report another's, and {self.comparison} would take that difference for mismatch: {remedy} or "
                f"{self.compared_by}='none'."
            )
        top_k = self._sampling["top_k"]
        if not (self.use_vllm and self.truncated_sampling):
            return
        if top_k <= 0:
            raise ValueError(
                f"top_k={top_k} with top_p={self._sampling['top_p']!r} and min_p={self._sampling['min_p']!r} leaves "
                "open how many tokens vLLM keeps, and it cannot name them all: set top_k too (for example 20), sample "
                f"by the in-process replica (use_vllm=False, deployment_scheme), or set {self.compared_by}='none'."
            )
        if self.vllm_mode == "colocate" and top_k > _COLOCATED_LOGPROBS:
            raise ValueError(
                f"top_k={top_k} keeps more tokens than an engine of vllm_mode='colocate' names "
                f"({_COLOCATED_LOGPROBS}): lower it, or use vllm_mode='server'."
            )
