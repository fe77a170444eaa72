"""The fields that `DCGRPOConfig` adds to TRL's, but for those of the constraint. No import here takes seconds."""

from dataclasses import dataclass
from typing import Annotated, Literal

from .fields import ABOVE_0, AT_LEAST_0, COUNT, WHOLE, setting
from .recipes import Recipe


LossType = Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]


@dataclass
class TrainerFields:
    """Fields of [`~dc_trl.DCGRPOConfig`], of sampler, recipe, parts and output."""

    recipe: Recipe = setting(
        "trl",
        'Where the fields that are left open get their values. "trl": TRL\'s GRPOConfig, with constraint="none". '
        '"paper": DC-GRPO (arXiv 2606.08779). "lag" and "format": what docs/study.md found best for a sampler whose '
        "weights lag, in a coarse number format too, and for a coarse number format alone; see docs/settings.md.",
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
