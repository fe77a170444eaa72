"""Validates a server's answers to rollout requests before anything that was sampled is used."""

import base64
import io
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .errors import ServerAnswerError, ServerUnavailableError


# Reasons with which vLLM finishes a completion. "abort" and "error" mark completions that it did not finish.
_FINISH_REASONS = ("stop", "length", "repetition", "tool_calls")
_LOWEST = -1e4  # vLLM writes −9999 for anything lower
_HIGHEST = 1e-4  # of a log-probability, allowing for rounding
_LARGEST_SUM = 1.01  # largest sum of the probabilities at one position, allowing for rounding
_TOKEN_PREFIX = "token_id:"


class Bounds(NamedTuple):
    """Upper bounds of a server's answers; None if unknown.

    Args:
        vocabulary: token ids are below this number.
        context: largest number of tokens of a prompt and its completion together.
    """

    vocabulary: int | None = None
    context: int | None = None


UNKNOWN = Bounds()


def require_rollout(
    request: dict[str, Any], answer: dict[str, Any], where: str, bounds: Bounds = UNKNOWN
) -> list[dict[str, Any]]:
    """Return the completions in a server's answer, in the order of the prompts, if the answer fits the request.

    These are checked: the number of completions and their indices, the echoed prompts, the token ids and their number,
    the finish reason, the log-probability of each token, and experts if present. Completions whose indices are out
    of order are sorted.

    Args:
        request: body that was sent, to /v1/completions or /v1/chat/completions with `return_token_ids`, or to
            /inference/v1/generate.
        answer: JSON object that the server returned.
        where: the server's address, for messages.
        bounds: known bounds of the server's answers.

    Returns:
        The entries of `choices`, prompts × `n` in number, with their experts as arrays.

    Raises:
        ServerAnswerError: the answer does not fit the request; the message says why.
        ServerUnavailableError: a log-probability is NaN, or the server broke off a completion.
    """
    sampling = request.get("sampling_params", request)
    prompts = _prompts(request)
    n = sampling.get("n", 1)
    reader = _Reader(where, sampling, bounds, named=request.get("return_tokens_as_token_ids", "token_ids" in request))
    choices = reader.in_order(answer.get("choices"), n * len(prompts))
    for number, choice in enumerate(choices):
        # TRL reads each prompt from its first completion.
        echoed = choice.get("prompt_token_ids")
        prompt = prompts[number // n]
        if request.get("return_token_ids") and prompt is not None:
            if echoed is None and number % n == 0:
                reader.refuse(f"choice {number} does not say which prompt it completes")
            if echoed is not None and echoed != prompt:
                reader.refuse(f"choice {number} completes the prompt {_short(echoed)} instead of {_short(prompt)}")
        reader.read(f"choice {number}", choice, prompt)
    return choices


def _prompts(request: dict[str, Any]) -> Sequence[list[int] | None]:
    """Return the token ids of the prompts of a request; None for a prompt given as text or messages."""
    prompts = request.get("prompt", request.get("token_ids"))
    if prompts is None or isinstance(prompts, str):
        return [None]
    if isinstance(prompts[0], int):
        return [prompts]
    return [None if isinstance(prompt, str) else prompt for prompt in prompts]


class _Reader:
    """Reads the completions of one answer, and refuses an answer that does not fit the request."""

    def __init__(self, where: str, sampling: dict[str, Any], bounds: Bounds, named: bool):
        self._where = where
        self._longest = sampling.get("max_tokens")
        # In a chat request `logprobs` is a boolean, and `top_logprobs` is the number.
        self._named_tokens: int | None = sampling.get("top_logprobs", sampling.get("logprobs"))
        self._bounds = bounds
        self._checked_names: set[str] = set()  # names of vocabulary tokens that were already checked
        self._named = named  # whether tokens are named by their ids

    def refuse(self, what: str) -> NoReturn:
        raise ServerAnswerError(
            f"vLLM at {self._where} did not answer what it was asked: {what}. The whole answer is discarded: check "
            "the server at this address and its version."
        )

    def in_order(self, choices: Any, count: int) -> list[dict[str, Any]]:
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            self.refuse(f"its choices are {_short(choices)}")
        if len(choices) != count:
            self.refuse(f"it has {len(choices)} choices where {count} were requested")
        indices = [choice.get("index") for choice in choices]
        if not _are_integers(indices) or sorted(indices) != list(range(count)):
            self.refuse(f"the indices of its {count} choices are {_short(indices)}")
        return sorted(choices, key=lambda choice: choice["index"])

    def read(self, name: str, choice: dict[str, Any], prompt: list[int] | None) -> None:
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not _are_integers(ids):
            self.refuse(f"the token_ids of {name} are {_short(ids)}")
        vocabulary = self._bounds.vocabulary or 2**31
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            out = next(token for token in ids if not 0 <= token < vocabulary)
            self.refuse(f"{name} has the token {_short(out)}, and the vocabulary has {vocabulary} tokens")
        if self._longest is not None and len(ids) > self._longest:
            self.refuse(f"{name} has {len(ids)} tokens where max_tokens is {self._longest}")
        self._read_end(name, choice.get("finish_reason"), ids, prompt)
        if self._named_tokens is not None:
            self._read_logprobs(name, choice.get("logprobs"), ids)
        if choice.get("routed_experts") is not None:
            choice["routed_experts"] = self._read_routes(name, choice["routed_experts"], ids, prompt)

    def _read_end(self, name: str, reason: Any, ids: list[int], prompt: list[int] | None) -> None:
        if reason in ("abort", "error"):
            raise ServerUnavailableError(f"vLLM at {self._where} broke off {name} (finish_reason {reason!r})")
        if reason not in _FINISH_REASONS:
            self.refuse(f"the finish_reason of {name} is {_short(reason)}")
        if reason != "length" or self._longest is None:
            return
        full = self._bounds.context is None or prompt is None or len(prompt) + len(ids) >= self._bounds.context
        if len(ids) < self._longest and (not full or not ids):
            self.refuse(f"{name} ends with finish_reason 'length' after {len(ids)} of {self._longest} tokens")

    def _read_routes(self, name: str, text: Any, ids: list[int], prompt: list[int] | None) -> np.ndarray:
        """Return an array that vLLM sent as an .npy file in base64."""
        try:
            routes = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        except (ValueError, TypeError, OSError, EOFError) as error:
            self.refuse(f"the routed_experts of {name} cannot be read ({error})")
        if routes.ndim != 3 or routes.dtype.kind not in "ui" or (routes.size and routes.min() < 0):
            self.refuse(f"the routed_experts of {name} have the dtype {routes.dtype} and the shape {routes.shape}")
        if prompt is not None and len(routes) != len(prompt) + len(ids) - 1:
            self.refuse(f"the routed_experts of {name} cover {len(routes)} tokens, not {len(prompt) + len(ids) - 1}")
        return routes

    def _read_logprobs(self, name: str, logprobs: Any, ids: list[int]) -> None:
        tokens, values, tops = self._columns(name, logprobs)
        for column, entries in (("tokens", tokens), ("token_logprobs", values), ("top_logprobs", tops)):
            if not isinstance(entries, list) or len(entries) != len(ids):
                count = len(entries) if isinstance(entries, list) else 0
                self.refuse(f"{name} has {count} {column} for {len(ids)} tokens")
        names = list(map(_TOKEN_PREFIX.__add__, map(str, ids)))
        if self._named and tokens != names:
            place = next(place for place, pair in enumerate(zip(tokens, names, strict=True)) if pair[0] != pair[1])
            self.refuse(f"log-probability {place} of {name} belongs to {_short(tokens[place])}, not {names[place]}")
        self._require_log_probs(name, values)
        if self._named and not _hold_only_sampled(names, values, tops):
            self._read_named(name, names, values, tops)

    def _columns(self, name: str, logprobs: Any) -> tuple[Any, Any, Any]:
        """Return tokens, log-probabilities, and most probable tokens in the format of /v1/completions."""
        if not isinstance(logprobs, dict):
            self.refuse(f"the logprobs of {name} are {_short(logprobs)}")
        if "content" not in logprobs:
            return logprobs.get("tokens"), logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
        entries = logprobs["content"]
        try:
            tops = [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries]
            return [entry["token"] for entry in entries], [entry["logprob"] for entry in entries], tops
        except (LookupError, TypeError) as error:
            self.refuse(f"the logprobs of {name} cannot be read ({type(error).__name__}: {error})")

    def _read_named(self, name: str, names: list[str], values: list[float], tops: list[Any]) -> None:
        """Check the most probable tokens at each position; the sampled one may be among them or not."""
        vocabulary = self._bounds.vocabulary or 2**31
        limit = vocabulary if self._named_tokens in (None, -1) else self._named_tokens + 1
        tops = [{} if top is None else top for top in tops]
        for place, top in enumerate(tops):
            if not isinstance(top, dict) or len(top) > limit:
                self.refuse(f"the top_logprobs of {name} at token {place} are {_short(top)}")
        of_sampled = list(map(dict.get, tops, names, values))
        if of_sampled != values:
            place = next(place for place, value in enumerate(of_sampled) if value != values[place])
            both = f"{values[place]} and {_short(of_sampled[place])}"
            self.refuse(f"{name} has two log-probabilities of token {place}: {both}")
        new = set(chain.from_iterable(tops)) - self._checked_names
        for token in new:
            number = token.removeprefix(_TOKEN_PREFIX)
            known = token.startswith(_TOKEN_PREFIX) and len(number) <= 10 and number.isdecimal()
            if not known or str(int(number)) != number or int(number) >= vocabulary:
                self.refuse(f"{name} names the token {_short(token)}")
        self._checked_names |= new
        every = list(chain.from_iterable(map(dict.values, tops)))
        self._require_log_probs(name, every)
        places = np.repeat(np.arange(len(tops)), list(map(len, tops)))
        totals = np.bincount(places, np.exp(np.array(every, np.float64)))
        if len(totals) and totals.max() > _LARGEST_SUM:
            self.refuse(f"the probabilities at token {totals.argmax()} of {name} add up to {totals.max():.3g}")

    def _require_log_probs(self, name: str, values: list[Any]) -> None:
        kinds = set(map(type, values))
        if not kinds <= {float, int}:
            kind = next(value for value in values if type(value) not in (float, int))
            self.refuse(f"a log-probability of {name} is {_short(kind)}")
        # A sum is NaN if one of its terms is, or if they contain infinities of both signs.
        if (kinds != {float} or math.isnan(sum(values))) and any(value != value for value in values):
            raise ServerUnavailableError(f"vLLM at {self._where} returned log-probabilities that are NaN")
        if values and not (min(values) >= _LOWEST and max(values) <= _HIGHEST):
            out = next(value for value in values if not _LOWEST <= value <= _HIGHEST)
            self.refuse(f"a log-probability of {name} is {_short(out)}")


def _hold_only_sampled(names: list[str], values: list[float], tops: list[Any]) -> bool:
    """Return whether each position holds only the log-probability of the sampled token."""
    if not set(map(type, tops)) <= {dict}:
        return False
    return sum(map(len, tops)) == len(tops) and list(map(dict.get, tops, names)) == values


def _are_integers(values: list[Any]) -> bool:
    """Return whether all values are integers; booleans, which Python counts as integers, are not."""
    return set(map(type, values)) <= {int}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
