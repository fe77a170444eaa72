"""Completions with their log-probabilities from any engine, and under the model that is trained.

An engine is a vLLM server, started or running, or the replica. The model computes as it does in TRL's trainer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from trl.trainer.utils import add_fused_lm_head, pad

from ..quantization.checkpoint import CheckpointWriter
from ..quantization.policy import Policy, base_model
from ..quantization.tensors import policy_tensors
from ..sampling.empty_completions import without_rest
from ..sampling.engine_names import EngineSpec
from ..sampling.replica import Replica, end_tokens
from ..serving.client import ServerClient, Weights, require_loaded
from ..serving.connection import Patience
from ..serving.fit import layer_kinds, schemes_of
from ..serving.guard import temporary_folder
from ..serving.server import VLLMServer, scheme_options, vllm_version
from .result import CalibrationSettings


# All completions are asked for at once, and may take hours.
_PATIENCE = Patience(request_timeout=14400.0, server_timeout=60.0, max_retries=3)


class Rollout(NamedTuple):
    """One completion: its token ids, and the engine's log π_inf of each in nats."""

    prompt: int  # position in the list of prompts
    ids: list[int]
    logps: list[float]
    truncated: bool  # by the limit of tokens


def sampled_logps(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Return log π_inf of each rollout's tokens as the engine gave it, float64, shape (tokens,)."""
    return [torch.tensor(rollout.logps, dtype=torch.float64) for rollout in rollouts]


class EngineSample(NamedTuple):
    """What one engine sampled: rollouts in the order of their prompts, all samples of a prompt together."""

    engine: str
    precision: str  # the scheme, or what a running server says of its layers
    rollouts: list[Rollout]
    schemes: Sequence[str]  # schemes that the engine may be in; several where it does not say which


def sample_rollouts(
    engine: EngineSpec,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    settings: CalibrationSettings,
) -> EngineSample:
    """Sample completions of all prompts (token ids) from one engine.

    A vLLM server that is started runs the policy's present weights, written as training deploys them.

    Raises:
        ValueError: a prompt leaves no room for a completion, or the scheme does not fit the model.
        ServerError: the server is not there, does not fit the model, or failed repeatedly.
    """
    longest, limit = max(map(len, prompts)), policy.config.get_text_config().max_position_embeddings
    precision, schemes = engine.scheme or "", [engine.scheme or ""]
    if engine.kind == "url":
        client = _connect(engine.name, policy.config, longest)
        kinds, info = layer_kinds(client.layers()), client.get_server_info()
        limit, cache = info["model_config"]["max_model_len"], info["cache_config"]["cache_dtype"]
        precision = f"{', '.join(kinds) or 'not quantized'}, KV cache {cache}, served as {client.model}"
        schemes = schemes_of(kinds, cache)
        settings.report(f"{engine.name}: {precision}, taken for the weights of {policy.name_or_path}")
    if longest >= limit:
        raise ValueError(
            f"engine={engine.name!r} takes {limit} tokens for prompt and completion, and a prompt has {longest}: "
            "leave long prompts out (max_prompt_length), or serve with a larger --max-model-len."
        )
    room, ends = min(settings.max_tokens, limit - longest), end_tokens(policy, tokenizer)
    if engine.kind == "url":
        rollouts = _from_server(client, ends, prompts, room, settings)
    elif engine.kind == "replica":
        rollouts = _from_replica(Replica(policy, precision), ends, prompts, settings)
    else:
        options, report = settings.serve_options, settings.report
        with temporary_folder("calibrate") as folder:
            checkpoint = folder / "checkpoint"
            CheckpointWriter(policy, precision, tokenizer).write(policy_tensors(policy), checkpoint)
            options = [*scheme_options(precision, policy.config), *options]
            with VLLMServer(checkpoint, max_model_len=longest + room, options=options, report=report) as server:
                client = ServerClient(server.url, patience=_PATIENCE, report=report)
                rollouts = _from_server(client, ends, prompts, room, settings)
    return EngineSample(engine.name, precision, rollouts, schemes)


def _from_replica(
    replica: Replica, ends: list[int], prompts: Sequence[list[int]], settings: CalibrationSettings
) -> list[Rollout]:
    device = replica.model.device
    limit = replica.model.config.get_text_config().max_position_embeddings
    order = [number for number in range(len(prompts)) for _ in range(settings.samples)]
    rollouts: list[Rollout] = []
    bar = tqdm(total=len(order), unit="completion", desc="sampling", disable=not settings.progress)
    # The caller may be about to train, so its random state is left as it was.
    with bar, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        for start in range(0, len(order), settings.replica_batch):
            batch = order[start : start + settings.replica_batch]
            asked = [prompts[number] for number in batch]
            config = GenerationConfig(
                max_new_tokens=min(settings.max_tokens, limit - max(map(len, asked))),
                do_sample=True,
                temperature=settings.temperature,
                top_k=0,
                pad_token_id=ends[0],
                eos_token_id=ends,
            )
            completions, logps = replica.generate(asked, config, settings.temperature)
            for number, ids, values in zip(batch, completions, logps, strict=True):
                rollouts.append(Rollout(number, ids, values, ids[-1] not in ends))
            bar.update(len(batch))
    return rollouts


def _from_server(
    client: ServerClient, ends: list[int], prompts: Sequence[list[int]], room: int, settings: CalibrationSettings
) -> list[Rollout]:
    client.weights = Weights(client.weight_version(), None)  # a change of the weights while it samples is an error
    client.seeds.draw(settings.seed)  # from which the client makes a seed for each prompt
    output = client.generate(
        list(prompts),
        n=settings.samples,
        temperature=settings.temperature,
        max_tokens=room,
        # The penalties, which TRL's client leaves out, would come from the model's generation_config.
        generation_kwargs={"presence_penalty": 0.0, "frequency_penalty": 0.0},
    )
    completions, logprobs = without_rest(output["completion_ids"], output["logprobs"], ends)
    answers = enumerate(zip(completions, logprobs, strict=True))
    return [
        Rollout(i // settings.samples, ids, [p for (p,) in logps], len(ids) >= room and ids[-1] not in ends)
        for i, (ids, logps) in answers
    ]


def _connect(url: str, config: PretrainedConfig, longest_prompt: int) -> ServerClient:
    """Return a client of a running server that fits the policy."""

    def fits(client: ServerClient) -> None:
        require_loaded(client.weight_version(), client.base_url)
        # No weights are sent, and the server may be in any number format.
        client.require_fit(config, scheme=None, max_length=longest_prompt + 1, weight_sync="none")

    return ServerClient(url, fits=fits, start_timeout=5.0, patience=_PATIENCE)


def require_engines(engines: Sequence[EngineSpec], config: PretrainedConfig) -> None:
    """Refuse engines that cannot be measured, before any of them starts.

    Raises:
        ServerError: a running server is not there, or runs another model.
        ImportError: a server is to be started, and vLLM is not installed.
    """
    for engine in engines:
        if engine.kind == "url":
            _connect(engine.name, config, 0)
        elif engine.kind == "vllm":
            vllm_version()


# --- under the model that is trained


@torch.no_grad()
def train_logps(
    policy: Policy, prompts: Sequence[list[int]], rollouts: Sequence[Rollout], settings: CalibrationSettings
) -> list[Tensor]:
    """Return log π_train of each rollout's tokens, as TRL's trainer computes it.

    The forward is the one of training: prompts padded on the left, completions on the right, under autocast where the
    run has `bf16: true`, with TRL's fused output head, which takes the softmax in float32 and holds the logits of at
    most 4,096 tokens × 32,768 words at a time. Peak memory above the weights: those logits, 2 GB or less, and one
    layer's activations of `batch_tokens` tokens.

    Returns:
        A float32 tensor of shape (tokens,) for each rollout, on the CPU.
    """
    logps = [torch.empty(0) for _ in rollouts]
    # Completions of similar length share a forward, so that little of it is padding.
    order = sorted(range(len(rollouts)), key=lambda number: -len(rollouts[number].ids))
    base = base_model(policy)
    was_training, own_forward = policy.training, base.__dict__.get("forward")
    add_fused_lm_head(base, temperature=settings.temperature)
    policy.eval()
    try:
        # One pass of many leaves no bar behind.
        with tqdm(
            total=len(rollouts), unit="completion", desc="scoring", leave=False, disable=not settings.progress
        ) as bar:
            while order:
                longest = max(map(len, prompts)) + len(rollouts[order[0]].ids)
                size = max(1, settings.batch_tokens // longest)
                batch, order = order[:size], order[size:]
                scored = _forward(policy, prompts, [rollouts[number] for number in batch], settings)
                for number, values in zip(batch, scored, strict=True):
                    logps[number] = values
                bar.update(len(batch))
    finally:
        policy.train(was_training)
        del base.forward
        if own_forward is not None:
            base.forward = own_forward
    return logps


def _forward(
    policy: Policy, prompts: Sequence[list[int]], rollouts: Sequence[Rollout], settings: CalibrationSettings
) -> list[Tensor]:
    """Score rollouts in one batch as TRL lays it out: prompts padded on the left, completions on the right."""
    device = policy.device
    before = pad([torch.tensor(prompts[rollout.prompt]) for rollout in rollouts], -100, padding_side="left")
    after = pad([torch.tensor(rollout.ids) for rollout in rollouts], -100)
    whole = torch.cat([before, after], dim=1).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.bf16):
        output = policy(
            input_ids=whole.clamp(min=0),
            attention_mask=(whole != -100).long(),
            labels=torch.cat([torch.full_like(before, -100), after], dim=1).to(device),
            fused_lm_head=True,
        )
    values = output.log_probs[:, -after.shape[1] :].float().cpu()
    return [values[row, : len(rollout.ids)].clone() for row, rollout in enumerate(rollouts)]
