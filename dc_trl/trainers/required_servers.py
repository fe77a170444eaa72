"""Checks before the model is loaded that the vLLM servers of a run are up and fit it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from accelerate import PartialState
from accelerate.logging import get_logger
from transformers import AutoConfig, PretrainedConfig

from ..config import DCGRPOConfig


# vLLM's client is imported only where a server is asked.
if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = get_logger(__name__)


def config_of(model: str | PreTrainedModel, args: DCGRPOConfig) -> PretrainedConfig:
    """Return the configuration of a model in any form that the trainer accepts."""
    if not isinstance(model, str):
        return model.config
    revision = (args.model_init_kwargs or {}).get("revision", "main")
    return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=args.trust_remote_code)


def require_servers(args: DCGRPOConfig, config: PretrainedConfig) -> None:
    """Refuse servers that are not up within `vllm_server_timeout`, or do not fit. Call it in every process.

    `ServerGeneration` makes the checks that need the loaded model, and those of the weight stream's connections.

    Args:
        args: arguments of the trainer, with `vllm_mode="server"`.
        config: configuration of the trained model.

    Raises:
        ServerError: a server is refused; the message names it, the reason and the option to change.
    """
    from ..rollouts.vllm_backends import needs_checkpoint, raised_together
    from ..serving.client import ServerClient
    from ..serving.connection import Patience
    from ..serving.errors import ServerError
    from ..serving.fit import require_shared_directory
    from ..serving.pool import meet_all

    one = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    urls = args.vllm_server_base_urls or [one]
    weight_sync: str = args.weight_sync
    if weight_sync == "auto":
        # What else decides, the policy and its device, is not known yet.
        weight_sync = "checkpoint" if needs_checkpoint(args.deployment_scheme, urls, args.device) else "none"
    seconds = min(60.0, args.vllm_request_timeout or math.inf)
    patience = Patience(seconds, args.vllm_server_timeout, args.vllm_max_retries, args.vllm_time_limit, "vllm_")

    def meet(url: str) -> None:
        ServerClient(
            url, start_timeout=args.vllm_server_timeout, patience=patience, report=logger.warning
        ).require_fit(
            config,
            scheme=args.deployment_scheme,
            max_length=max(args.max_completion_length + 1, args.vllm_max_model_length or 0),
            logprobs=args.named_tokens,
            weight_sync=weight_sync,
            routing_replay=args.routing_replay,
        )

    with raised_together(ServerError):
        if not PartialState().is_main_process:
            return
        if weight_sync == "checkpoint":
            require_shared_directory(args.weight_sync_dir, urls)
        meet_all(urls, meet)
