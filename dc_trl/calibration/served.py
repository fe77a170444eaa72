"""Whether a vLLM server serves the weights of a deployed checkpoint: by its own hashes, or by log-probabilities."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..quantization.contract import digest
from ..rollouts.neutral_sampling import SERVER_DEFAULTS
from ..rollouts.replica import Replica
from ..serving.answers import require_rollout
from ..serving.connection import Connection
from .causes import disturb
from .scoring import completion_log_probs


# Layers of vLLM that hold several layers of a checkpoint, one below the other.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PROMPTS = [f"Write down the number {number} in words, and the sum of its digits." for number in range(17, 800, 49)]
_TOKENS = 32  # of each completion
_PASSES = 4  # each with another order of sums


def compare_hashes(hashes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Compare the hashes of vLLM's `/weight_checker` (0.32) with the tensors of a checkpoint, both by name.

    vLLM fuses layers, transposes matrices for some kernels and pads the vocabulary. Other kernels have layouts of
    their own, and with tensor parallelism each process holds a part.

    Returns:
        Names of parameters that hold other bytes, and names that cannot be compared. A parameter can be if it is a
        vector, or if that of another layer is found in one of the layouts.
    """
    unlike, known, compared = dict[str, bool](), set[str](), set[str]()
    for key, hashed in hashes.items():
        name = key.rpartition(":")[2]  # after the process's ranks
        fused = next((each for each in _FUSED if f".{each}." in name), None)
        parts = [name] if fused is None else [name.replace(fused, part) for part in _FUSED[fused]]
        unlike[name] = False  # whether it certainly holds other bytes
        if tensors.keys() >= set(parts):
            compared.update(parts)
            whole = torch.cat([tensors[part] for part in parts])
            layouts = [whole]
            if whole.ndim == 2:
                layouts += [whole.t(), torch.cat([whole, whole.new_zeros(-len(whole) % 64, whole.shape[1])])]
            unlike[name] = whole.ndim == 1
            if hashed in map(digest, layouts):
                del unlike[name]
                known.add(_without_numbers(name))
    other = [name for name, certain in unlike.items() if certain or _without_numbers(name) in known]
    return other, sorted(unlike.keys() - set(other) | tensors.keys() - compared)


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)


def compare_probabilities(
    connection: Connection, replica: Replica, tokenizer: PreTrainedTokenizerBase
) -> tuple[float, float, int]:
    """Compare what a server says of its completions of fixed prompts with the deployed forward of a checkpoint.

    Args:
        connection: with the server.
        replica: of the checkpoint; its layers add up in another order from now on.
        tokenizer: of the checkpoint.

    Returns:
        The mean |Δp| of the sampled tokens; its floor, which is the largest one of the replica to itself with another
        order of sums (see `causes`); and the number of tokens.

    Raises:
        ServerError: the server did not answer, or sampled tokens that the checkpoint's model does not have.
    """
    with connection.reading("/v1/models"):
        body = {"model": connection.get("/v1/models")["data"][0]["id"], **SERVER_DEFAULTS, "max_tokens": _TOKENS}
    # At this temperature all kinds of log-probabilities that a server may be set to are the same.
    body |= {"temperature": 1.0, "logprobs": 0, "return_token_ids": True}
    bodies = [body | {"prompt": tokenizer(text)["input_ids"], "seed": seed} for seed, text in enumerate(_PROMPTS)]
    answers = zip(bodies, connection.post_all("/v1/completions", bodies), strict=True)
    vocabulary = replica.model.config.get_text_config().vocab_size
    choices = [require_rollout(*pair, connection.url, vocabulary)[0] for pair in answers]
    served = torch.tensor([logp for choice in choices for logp in choice["logprobs"]["token_logprobs"]]).exp()
    rows = [(sent["prompt"], choice["token_ids"]) for sent, choice in zip(bodies, choices, strict=True)]
    own = _probabilities(replica, rows)
    disturb(replica.model, seed=0)  # differently in each pass
    floor = max((_probabilities(replica, rows) - own).abs().mean().item() for _ in range(_PASSES))
    return (served - own).abs().mean().item(), floor, len(own)


def _probabilities(replica: Replica, rows: list[tuple[list[int], list[int]]]) -> Tensor:
    """Return the probabilities of the completions' tokens, one row after another, shape (tokens,), float32."""
    found = [
        completion_log_probs(replica.model, prompt, ids).gather(1, torch.tensor(ids)[:, None]) for prompt, ids in rows
    ]
    return torch.cat(found).exp().squeeze(1)
