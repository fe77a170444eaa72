"""One look of `dc-trl watch`: it compares a live server with the newest checkpoint of any trainer.

The server is asked through its public endpoints, so it needs no development mode, and the trainer is not asked at all.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..records.runs import DEPLOYMENT_FOLDER
from ..serving.connection import Connection
from ..settings.neutral_sampling import SERVER_DEFAULTS
from .causes import disturb
from .comparison import ScoredTokens, measure_engine
from .result import CalibrationSettings
from .rollouts import EngineSample, Policy, Rollout
from .scoring import completion_log_probs


_CONFIGS = ("config.json", "adapter_config.json")
_SHARD = re.compile(r"-of-\d+\.safetensors$")
_PASSED_OVER = re.compile(rf"\.|{DEPLOYMENT_FOLDER}$")
_STEP = re.compile(r"(?:checkpoint-|global_step_)(\d+)")


class Checkpoint(NamedTuple):
    """A model, or an adapter, in Hugging Face's layout, as it is at the moment."""

    path: Path
    written: float  # time of the last change of its weights, seconds since 1970
    sizes: tuple[int, ...]  # of its files of weights, in bytes

    @property
    def step(self) -> int | None:
        """The optimizer step that the path names, as `checkpoint-20` or `global_step_20` do."""
        steps = _STEP.findall(str(self.path))
        return int(steps[-1]) if steps else None

    @property
    def is_adapter(self) -> bool:
        return (self.path / _CONFIGS[1]).is_file()


def newest_checkpoint(directory: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in a directory or below it; None if there is none yet.

    A checkpoint is complete if all of its safetensors files are, and its index, which is written last, names them.
    """
    folders = {file.parent for name in _CONFIGS for file in directory.rglob(name)}
    # `dc-trl train` keeps the quantized policy beside the one that it trains, and writes it under a hidden name first.
    folders = {folder for folder in folders if not any(map(_PASSED_OVER.match, folder.relative_to(directory).parts))}
    found = [checkpoint for folder in folders if (checkpoint := _complete(folder)) is not None]
    return max(found, key=lambda checkpoint: (checkpoint.written, checkpoint.step or 0), default=None)


def _complete(folder: Path) -> Checkpoint | None:
    files = sorted(folder.glob("*.safetensors"))
    in_parts = any(_SHARD.search(file.name) for file in files)
    if not files or (in_parts and not (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()):
        return None
    try:
        for file in files:
            with safe_open(file, framework="pt"):  # which refuses a file that ends too early
                pass
        stats = [file.stat() for file in files]
    except (OSError, SafetensorError):  # it is being written, or removed
        return None
    return Checkpoint(folder, max(stat.st_mtime for stat in stats), tuple(stat.st_size for stat in stats))


def look(
    connection: Connection,
    name: str,
    policy: Policy,
    prompts: Sequence[list[int]],
    named: int,
    settings: CalibrationSettings,
    passes: int = 1,
) -> dict[str, float]:
    """Compare a server with a policy on completions that the server samples at temperature 1, one of each prompt.

    Args:
        connection: connection to the server.
        name: name of the model on the server.
        policy: the policy in its training precision; its layers add up in another order from now on.
        prompts: token ids, at least two prompts.
        named: number of most probable tokens that the server names at each position, at least 1.
        settings: for `max_tokens`, `measure`, `reduction`, `bf16` and `seed`.
        passes: number of other orders of sums that are tried for the floor.

    Returns:
        By name: `discrepancy` (δ̄) and `k3_kl` (nats), each with `_low` and `_high` of its 95 % interval; `drift_tv`,
        the total variation ½ Σ|q − p| over the named tokens and all others as one, mean over the tokens; `top1_flips`,
        the share of tokens at which the most probable one differs; `floor`, δ̄ of the policy to itself with another
        order of sums, the largest of all passes; `pearson`, the correlation of the probabilities; number of `tokens`.

    Raises:
        ServerError: the server failed, or does not have the policy's vocabulary.
    """
    vocabulary = policy.config.get_text_config().vocab_size
    body = {"model": name, **SERVER_DEFAULTS, "max_tokens": settings.max_tokens, "temperature": 1.0}
    body |= {"logprobs": min(named, vocabulary), "return_token_ids": True, "return_tokens_as_token_ids": True}
    bodies = [body | {"prompt": ids, "seed": settings.seed + at} for at, ids in enumerate(prompts)]
    choices = connection.complete_all(bodies, vocabulary)
    rollouts, train, variation, flips = [], [], [], []
    for at, choice in enumerate(choices):
        ids, logprobs = choice["token_ids"], choice["logprobs"]
        rollouts.append(Rollout(at, ids, logprobs["token_logprobs"], choice["finish_reason"] == "length"))
        log_p = completion_log_probs(policy, prompts[at], ids, settings.bf16)
        train.append(_of_sampled(log_p, ids))
        for row, top in zip(log_p, logprobs["top_logprobs"], strict=True):
            tokens = [int(token.removeprefix("token_id:")) for token in top]
            q, p = torch.tensor(list(top.values())).exp(), row[tokens].exp()
            variation.append((((q - p).abs().sum() + (q.sum() - p.sum()).abs()) / 2).item())
            flips.append(tokens[int(q.argmax())] != int(row.argmax()))
    found = measure_engine(EngineSample(connection.url, "", rollouts, ()), train, len(prompts), settings)
    disturb(policy, settings.seed)  # differently in each pass
    floors = []
    for _ in range(passes):
        again = [
            _of_sampled(completion_log_probs(policy, prompts[each.prompt], each.ids, settings.bf16), each.ids)
            for each in rollouts
        ]
        scored = ScoredTokens(rollouts, again, train, len(prompts), settings.measure)
        total, count = scored.batch_discrepancy(settings.reduction)
        floors.append(float(total.sum() / count.sum()))
    numbers: dict[str, float] = {}
    for key, estimate in found.estimates.items():
        numbers |= {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}
    return numbers | {
        "drift_tv": sum(variation) / len(variation),
        "top1_flips": sum(flips) / len(flips),
        "floor": float(np.max(floors)),  # NaN if one is
        "pearson": found.pearson,
        "tokens": found.tokens,
    }


def _of_sampled(log_p: Tensor, ids: list[int]) -> Tensor:
    return log_p.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
