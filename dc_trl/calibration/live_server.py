"""A live vLLM server against a checkpoint: by the hashes of its weights, or by completions that it samples.

For completions it is asked through its public endpoints, so it needs no development mode; a trainer is not asked at
all.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..quantization.contract import digest
from ..quantization.policy import Policy
from ..records.runs import DEPLOYMENT_FOLDER
from ..serving.connection import Connection
from ..settings.neutral_sampling import SERVER_DEFAULTS
from .causes import disturb
from .comparison import ScoredTokens, measure_engine
from .result import CalibrationSettings
from .rollouts import EngineSample, Rollout


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
    # TRL keeps the adapter that it began with within each checkpoint of the trained one, and writes it later.
    folders = {folder for folder in folders if folder.name != "ref" or folder.parent not in folders}
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
    floors = [_discrepancy_to_itself(policy, prompts, rollouts, train, settings) for _ in range(passes)]
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


@torch.no_grad()
def completion_log_probs(model: Policy, prompt: list[int], completion: list[int], bf16: bool = False) -> Tensor:
    """Return log-probabilities of the vocabulary at each token of a completion: (tokens, vocabulary), float32, nats.

    The forward reads prompt and completion as one row, under bfloat16 autocast with `bf16`. The result is on the CPU.
    """
    row = torch.tensor([prompt + completion], device=model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = model(input_ids=row, use_cache=False, logits_to_keep=len(completion) + 1).logits
    return logits[0, :-1].float().log_softmax(-1).cpu()


def _discrepancy_to_itself(
    policy: Policy,
    prompts: Sequence[list[int]],
    rollouts: Sequence[Rollout],
    train: Sequence[Tensor],
    settings: CalibrationSettings,
) -> float:
    """Return δ̄ between a policy whose layers add up in another order and `train`, what it scored before."""
    again = [
        _of_sampled(completion_log_probs(policy, prompts[each.prompt], each.ids, settings.bf16), each.ids)
        for each in rollouts
    ]
    scored = ScoredTokens(rollouts, again, train, len(prompts), settings.measure)
    total, count = scored.batch_discrepancy(settings.reduction)
    return float(total.sum() / count.sum())


def _of_sampled(log_p: Tensor, ids: list[int]) -> Tensor:
    return log_p.gather(1, torch.tensor(ids)[:, None]).squeeze(1)


# --- hashes of the weights


_REWRITTEN = ("weight_shape", "global_scale")  # vectors of which vLLM keeps another form
_OTHER_RANK = re.compile(r"\btp[1-9]")  # of tensor parallelism
# Layers of vLLM that hold several layers of a checkpoint, one below the other.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def compare_hashes(hashes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Compare the hashes of vLLM's `/weight_checker` (0.32) with the tensors of a checkpoint, both by name.

    vLLM fuses layers, transposes matrices for some kernels and pads the vocabulary. Other kernels have layouts of
    their own, and with tensor parallelism each process holds a part.

    Returns:
        Names of parameters that hold other bytes, and names that cannot be compared. A parameter can be if it is a
        vector, or if that of another layer is found in one of the layouts.
    """
    unlike, known, compared = dict[str, bool](), set[str](), set[str]()
    in_parts = any(_OTHER_RANK.search(key) for key in hashes)
    for key, hashed in hashes.items():
        name = key.rpartition(":")[2]  # after the process's ranks
        fused = next((each for each in _FUSED if f".{each}." in name), None)
        parts = [name] if fused is None else [name.replace(fused, part) for part in _FUSED[fused]]
        unlike[key] = False  # whether it certainly holds other bytes
        if tensors.keys() >= set(parts):
            compared.update(parts)
            whole = torch.cat([tensors[part] for part in parts])
            layouts = [whole]
            if whole.ndim == 2:
                layouts += [whole.t(), torch.cat([whole, whole.new_zeros(-len(whole) % 64, whole.shape[1])])]
            unlike[key] = whole.ndim == 1 and not in_parts and not name.endswith(_REWRITTEN)
            if hashed in map(digest, layouts):
                del unlike[key]
                known.add(_without_numbers(key))
    other = [key for key, certain in unlike.items() if certain or _without_numbers(key) in known]
    others, unknown = ({key.rpartition(":")[2]: None for key in keys} for keys in (other, unlike.keys() - set(other)))
    return list(others), sorted(unknown.keys() | tensors.keys() - compared)


def _without_numbers(key: str) -> str:
    return re.sub(r"\d+", "", key)
