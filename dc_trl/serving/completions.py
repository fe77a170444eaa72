"""Checks a server's answers to rollout requests before anything that was sampled is used."""

import base64
import io
import math
from tokenize import TokenError
from typing import Any

import numpy as np

from .errors import ServerAnswerError, ServerUnavailableError


_LOWEST, _HIGHEST = -1e4, 1e-4  # of a log-probability: vLLM writes −9999 for anything lower, and rounds
_LEAST = math.log(2.0**-149)  # of a sampled token: in float32 anything lower has the probability 0
# What an answer in another format raises where it is read; the later ones too deep JSON, or the header of an array.
MALFORMED: tuple[type[Exception], ...] = (LookupError, TypeError, ValueError, AttributeError)
MALFORMED += (RecursionError, MemoryError, SyntaxError, TokenError, OverflowError)


class EndToken(int):
    """Id of a token with which an engine has ended a completion by itself, whichever token it is.

    TRL splits and joins completions as lists of ids, which keep this type.
    """


def ended(ids: list[int]) -> list[int]:
    """Return a completion that its engine has ended."""
    return [*ids[:-1], *map(EndToken, ids[-1:])]


def require_tokens(ids: Any, vocabulary: int | None, what: str) -> None:
    """Refuse what is no list of token ids below `vocabulary`, None if that is unknown, by a `ValueError`."""
    if not isinstance(ids, list):
        raise ValueError(f"{what} is a {type(ids).__name__}, and no list of tokens")
    every = np.asarray(ids or [0])
    if every.dtype.kind != "i" or every.ndim != 1 or not 0 <= every.min() <= every.max() < (vocabulary or 2**31):
        raise ValueError(f"{what} has a token that is not in the vocabulary of {vocabulary}")


def require_log_probs(values: Any, count: int | None = None, lowest: float = _LEAST) -> None:
    """Refuse what cannot be log-probabilities of tokens, in nats; NaN may be among them.

    Args:
        values: numbers; those of `count` sampled tokens.
        count: number of tokens, None for any.
        lowest: least log-probability.

    Raises:
        ValueError: there are more or fewer, or one is no number, above 0 or below `lowest`.
    """
    every = np.asarray(values, np.float64)
    if count is not None and every.shape != (count,):
        raise ValueError(f"log-probabilities of shape {every.shape} for {count} tokens")
    known = every[~np.isnan(every)]
    if known.size and not lowest <= known.min() <= known.max() <= _HIGHEST:
        are = ", as probabilities do, whose logarithms are needed" if 0 <= known.min() <= known.max() <= 1 else ""
        raise ValueError(f"log-probabilities reach from {known.min():.3g} to {known.max():.3g}{are}")


def require_rollout(
    request: dict[str, Any], answer: dict[str, Any], where: str, vocabulary: int | None = None
) -> list[dict[str, Any]]:
    """Return the completions in a server's answer, in the order of the prompts, if the answer fits the request.

    Number and lengths of the completions, the echoed prompts, the token ids, the log-probabilities and the experts'
    shape are checked, because a wrong one would be trained on without a sign.

    These are the entries of `choices`, prompts × `n` in number, with their experts as arrays; `vocabulary` is a bound
    below which all token ids are, and `where` the server's address, for messages.

    Raises:
        ServerAnswerError: the answer does not fit the request; the message says why.
        ServerUnavailableError: a log-probability is NaN, or the server broke off a completion.
    """
    prompts, n = request["prompt"], request.get("n", 1)
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n * len(prompts))):
            raise ValueError(f"it has {len(choices)} choices where {n * len(prompts)} were requested")
        for number, choice in enumerate(choices):
            prompt, echoed = prompts[number // n], choice.get("prompt_token_ids")
            # TRL reads each prompt from its first completion.
            echoes = request.get("return_token_ids") and (echoed is not None or number % n == 0)
            if not isinstance(prompt, str) and echoes and echoed != prompt:
                raise ValueError(f"choice {number} completes the prompt {str(echoed)[:60]}")
            if choice["finish_reason"] in (None, "abort", "error"):
                raise ServerUnavailableError(f"vLLM at {where} broke off choice {number}")
            ids = choice["token_ids"]
            require_tokens(ids, vocabulary, f"choice {number}")
            if not isinstance(choice.get("text", ""), str):
                raise ValueError(f"choice {number} has the text {choice['text']!r}")
            if len(ids) > request.get("max_tokens", len(ids)):
                raise ValueError(f"choice {number} has {len(ids)} tokens where {request['max_tokens']} were allowed")
            if request.get("logprobs") is not None:
                named = request.get("return_tokens_as_token_ids", False)
                only = named and request["logprobs"] == 0
                _require_logps(choice["logprobs"], ids, named, only)
                if only:  # the same numbers again, in a dictionary for each token
                    choice["logprobs"]["top_logprobs"] = [None] * len(ids)
            if choice["finish_reason"] == "stop":
                choice["token_ids"] = ended(ids)
            if choice.get("routed_experts") is not None:
                choice["routed_experts"] = _routes(choice["routed_experts"], ids, prompt)
        if not any(choice["token_ids"] for choice in choices):
            raise ValueError("all completions are empty, without the token that ends them")
    except MALFORMED as error:
        raise ServerAnswerError(
            f"vLLM at {where} did not answer what it was asked ({type(error).__name__}: {error}). The whole answer is "
            "discarded: check the server at this address and its version."
        ) from error
    except ArithmeticError as error:
        raise ServerUnavailableError(f"vLLM at {where} returned {error}") from error
    return choices


def _require_logps(logprobs: dict[str, Any], ids: list[int], named: bool, only: bool) -> None:
    """Refuse log-probabilities that are not those of a completion's tokens, and of these `only` if no others are."""
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    tops = [top or {} for top in logprobs["top_logprobs"]]
    if named and tokens != [f"token_id:{token}" for token in ids]:
        raise ValueError("log-probabilities belong to other tokens than the sampled ones")
    others = [value for top in tops for value in top.values()]
    every = np.asarray([*values, *others] or [0.0])
    if every.dtype.kind not in "fi":
        raise ValueError(f"log-probabilities that are no numbers: {str(values)[:60]}")
    if np.isnan(every).any():
        raise ArithmeticError("log-probabilities that are NaN")
    require_log_probs(values, len(ids))
    require_log_probs(others, lowest=_LOWEST)
    for token, value, top in zip(tokens, values, tops, strict=True):
        if top.get(token, value) != value or (only and top.keys() - {token}):
            raise ValueError(f"{token} has the log-probability {value}, and top_logprobs say {str(top)[:60]}")


def _routes(text: str, ids: list[int], prompt: list[int] | str) -> np.ndarray:
    """Return an array that vLLM sent as an .npy file in base64."""
    routes = np.lib.format.read_array(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    if routes.ndim != 3 or (not isinstance(prompt, str) and len(routes) != len(prompt) + len(ids) - 1):
        raise ValueError(f"the routed experts of {len(ids)} tokens have the shape {routes.shape}")
    return routes
