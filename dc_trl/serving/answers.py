"""Checks a server's answers to rollout requests before anything that was sampled is used."""

import base64
import io
from typing import Any

import numpy as np

from .errors import ServerAnswerError, ServerUnavailableError


# What an answer in another format raises where it is read.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)


def require_rollout(
    request: dict[str, Any], answer: dict[str, Any], where: str, vocabulary: int | None = None
) -> list[dict[str, Any]]:
    """Return the completions in a server's answer in their order, if the answer fits the request.

    The number of completions, the token ids and the log-probabilities are checked, because a wrong one would be
    trained on without a sign.

    Args:
        request: body that was sent to /v1/completions with `return_token_ids`, with a single prompt.
        answer: JSON object that the server returned.
        where: the server's address, for messages.
        vocabulary: bound below which all token ids of the model are; None if it is unknown.

    Returns:
        The `n` entries of `choices`, with their experts as arrays.

    Raises:
        ServerAnswerError: the answer does not fit the request; the message says why.
        ServerUnavailableError: a log-probability is NaN, or the server broke off a completion.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != request.get("n", 1):
            raise ValueError(f"it has {len(choices)} completions where {request.get('n', 1)} were requested")
        for choice in choices:
            if choice["finish_reason"] in (None, "abort", "error"):
                raise ServerUnavailableError(f"vLLM at {where} broke off a completion")
            ids = choice["token_ids"]
            if not all(0 <= token < (vocabulary or 2**31) for token in ids):
                raise ValueError(f"a completion has a token that is not in the vocabulary of {vocabulary}")
            if request.get("logprobs") is not None:
                values = np.array(choice["logprobs"]["token_logprobs"], np.float64)
                if len(values) != len(ids):
                    raise ValueError(f"{len(values)} log-probabilities for {len(ids)} tokens")
                if not (values <= 1e-4).all():  # vLLM rounds; no comparison with NaN is true
                    raise ServerUnavailableError(f"vLLM at {where} returned log-probabilities that are NaN or above 0")
            if choice.get("routed_experts") is not None:  # an .npy file in base64
                file = io.BytesIO(base64.b64decode(choice["routed_experts"]))
                choice["routed_experts"] = np.load(file, allow_pickle=False)
    except MALFORMED as error:
        raise ServerAnswerError(
            f"vLLM at {where} did not answer what it was asked ({type(error).__name__}: {error}). The whole answer is "
            "discarded: check the server at this address and its version."
        ) from error
    return choices
