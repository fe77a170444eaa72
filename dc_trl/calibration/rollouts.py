"""Completions with their log-probabilities from any engine: a vLLM server, started or running, or the replica."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..quantization.checkpoint import CheckpointWriter
from ..quantization.tensors import policy_tensors
from ..rollouts.replica import Replica, end_tokens
from ..rollouts.sampling import EngineSpec
from ..serving.client import ServerClient, require_loaded
from ..serving.connection import Patience
from ..serving.errors import ServerError, ServerUnavailableError
from ..serving.fit import check_server, layer_kinds, schemes_of
from ..serving.guard import temporary_folder
from ..serving.server import VLLMServer, vllm_version
from .settings import CalibrationSettings


# All completions are asked for at once, and may take hours.
_PATIENCE = Patience(request_timeout=14400.0, server_timeout=60.0, max_retries=3)

Policy: TypeAlias = PreTrainedModel | PeftModel


class Rollout(NamedTuple):
    """One completion: its token ids, and the engine's log π_inf of each in nats, NaN where it gave none."""

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
    schemes: Sequence[str] = ()  # schemes that the engine may be in; several where it does not say which


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
    longest, text_config = max(map(len, prompts)), policy.config.get_text_config()
    ends = end_tokens(policy, tokenizer)
    if engine.kind == "url":
        client, kinds, limit = _connect(engine.name, policy.config, longest)
        precision = f"{', '.join(kinds) or 'not quantized'}, served as {client.model}"
        settings.report(f"{engine.name}: {precision}, taken for the weights of {policy.name_or_path}")
        rollouts = _from_server(client, ends, prompts, _room(prompts, limit, engine.name, settings), settings)
        return EngineSample(engine.name, precision, rollouts, schemes_of(kinds))
    assert engine.scheme is not None
    room = _room(prompts, text_config.max_position_embeddings, engine.name, settings)
    if engine.kind == "replica":
        rollouts = _from_replica(Replica(policy, engine.scheme), tokenizer, ends, prompts, settings)
    else:
        with _serving(policy, engine.scheme, tokenizer, longest + room, settings) as server:
            client = ServerClient(server.url, patience=_PATIENCE, report=settings.report)
            client.vocabulary = text_config.vocab_size
            rollouts = _from_server(client, ends, prompts, room, settings)
    return EngineSample(engine.name, engine.scheme, rollouts, [engine.scheme])


def _room(prompts: Sequence[list[int]], limit: int, name: str, settings: CalibrationSettings) -> int:
    """Return how many tokens a completion may have, where prompt and completion share `limit` tokens."""
    long = sum(len(ids) >= limit for ids in prompts)
    if long:
        raise ValueError(
            f"engine={name!r} takes {limit} tokens for prompt and completion, and {long} of the prompts are as long: "
            "leave long prompts out (max_prompt_length), or serve with a larger --max-model-len."
        )
    return min(settings.max_tokens, limit - max(map(len, prompts)))


def _from_replica(
    replica: Replica,
    tokenizer: PreTrainedTokenizerBase,
    ends: list[int],
    prompts: Sequence[list[int]],
    settings: CalibrationSettings,
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
    version = client.weight_version()
    require_loaded(version, client.base_url)
    client.seeds.draw(settings.seed)  # from which the client makes a seed for each prompt
    output = client.generate(
        list(prompts),
        n=settings.samples,
        temperature=settings.temperature,
        max_tokens=room,
        # The penalties, which TRL's client leaves out, would come from the model's generation_config.
        generation_kwargs={"presence_penalty": 0.0, "frequency_penalty": 0.0},
    )
    if (now := client.weight_version()) != version:
        raise ServerError(
            f"vLLM at {client.base_url} did not keep its weights: it began with {version!r} and has {now!r}. The "
            "weights changed while it sampled: measure again when no run loads others into this server."
        )
    answers = enumerate(zip(output["completion_ids"], output["logprobs"], strict=True))
    return [
        Rollout(i // settings.samples, ids, [p for (p,) in logps], len(ids) >= room and ids[-1] not in ends)
        for i, (ids, logps) in answers
    ]


def _connect(url: str, config: PretrainedConfig, longest_prompt: int) -> tuple[ServerClient, list[str], int]:
    """Return a client of a running server that fits the policy, the kinds of its layers, and its limit of tokens."""
    try:
        client = ServerClient(url, start_timeout=5.0, patience=_PATIENCE)
    except ServerUnavailableError as error:
        raise ServerUnavailableError(
            f"engine={url!r}: no vLLM server answers there. Start one with dc-trl serve, correct the URL, or "
            "give a scheme ('fp8') in its place to have one started."
        ) from error
    info, layers = client.get_server_info(), client.layers()
    try:
        require_loaded(client.weight_version(), client.base_url)
        with client.connection.reading("/server_info"):
            # No weights are sent, and the server may be in any number format.
            check_server(info, layers, scheme=None, config=config, max_length=longest_prompt + 1, weight_sync="none")
            limit = info["model_config"]["max_model_len"]
    except ServerError as error:
        raise ServerError(f"engine={url!r}: {error}") from error
    client.vocabulary = config.get_text_config().vocab_size
    return client, layer_kinds(layers), limit


@contextmanager
def _serving(
    policy: Policy, scheme: str, tokenizer: PreTrainedTokenizerBase, limit: int, settings: CalibrationSettings
) -> Iterator[VLLMServer]:
    """Serve the policy's present weights in a scheme, for the time of the block."""
    log = Path(settings.log_dir, f"vllm_server_{scheme}.log") if settings.log_dir is not None else None
    options, report = settings.serve_options, settings.report
    with temporary_folder("calibrate") as folder:
        checkpoint = folder / "checkpoint"
        CheckpointWriter(policy, scheme, tokenizer).write(policy_tensors(policy), checkpoint)
        with VLLMServer(checkpoint, max_model_len=limit, options=options, log_path=log, report=report) as server:
            yield server


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
