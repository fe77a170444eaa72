"""The ends of completions: what follows an end token is left out; one that TRL needs is added, and enters no loss."""

import math
from functools import wraps

from transformers.utils import logging

from ..serving.completions import EndToken, require_log_probs, require_tokens


logger = logging.get_logger(__name__)


class UnsampledToken(int):
    """Id of a token that is not known to have been sampled by an engine.

    TRL splits and joins completions as lists of ids, which keep this type.
    """


def without_rest(completion_ids, logprobs, ends):
    """Leave out what follows the first of `ends` in each completion, as TRL does where the model itself generates."""
    lengths = [min((ids.index(end) + 1 for end in ends if end in ids), default=len(ids)) for ids in completion_ids]
    if [*map(len, completion_ids)] == lengths:
        return completion_ids, logprobs
    logger.warning_once(
        f"The engine has sampled on after an end token (of {ends}), which is left out: start it with the tokenizer "
        "and the generation_config of the model that is trained."
    )
    cut = [[row[:length] for row, length in zip(rows, lengths, strict=True)] for rows in (completion_ids, logprobs)]
    return tuple(cut)


def with_ends(completion_ids, logprobs, ends):
    """Give an end token to empty completions, and to those that the engine ended with another token or a text.

    It has no log-probability, and `sampled_only` excludes it from the loss. TRL reads the last token of every
    completion, and takes those that end with none of `ends` for cut off; the first of these is given.
    """
    missing = [len(ids) == 0 or (isinstance(ids[-1], EndToken) and ids[-1] not in ends) for ids in completion_ids]
    if not any(missing):
        return completion_ids, logprobs
    if logprobs is not None:
        logprobs = [[*values, math.nan] if lacks else values for values, lacks in zip(logprobs, missing, strict=True)]
    added = UnsampledToken(ends[0])
    return [[*ids, added] if lacks else ids for ids, lacks in zip(completion_ids, missing, strict=True)], logprobs


def sampled_only(completion_ids, tool_mask):
    """Return TRL's mask of the tokens that the model wrote, with 0 at tokens of `with_ends`; None if all count."""
    if tool_mask is None:  # then one turn, which such a token ends
        if not any(isinstance(ids[-1], UnsampledToken) for ids in completion_ids):
            return None
        tool_mask = [[1] * len(ids) for ids in completion_ids]
    # The mask of an environment knows nothing of such a token.
    return [
        [0 if isinstance(token, UnsampledToken) else counts for token, counts in zip(ids, [*mask, 0], strict=False)]
        for ids, mask in zip(completion_ids, tool_mask, strict=True)
    ]


def checked_rollouts(rollout_func):
    """Return a `rollout_func` for TRL that refuses wrong log-probabilities, and ends empty completions.

    Its `ValueError` names the completion, what is wrong and the remedy.
    """

    @wraps(rollout_func)
    def rollout(prompts, trainer):
        output = rollout_func(prompts, trainer)
        if not isinstance(output, dict):
            raise ValueError(
                f"rollout_func returned a {type(output).__name__}: return a dictionary of prompt_ids, completion_ids "
                "and logprobs."
            )
        if not {"completion_ids", "logprobs"} <= output.keys():
            return output  # TRL's error names the missing keys
        completion_ids, logprobs = output["completion_ids"], output["logprobs"]
        limits = trainer._limits  # None with images
        for number, ids in enumerate(completion_ids):
            require_tokens(ids, limits and limits.tokens, f"rollout_func: completion {number}")
        masks = output.get("env_mask") or [[1] * len(ids) for ids in completion_ids]
        for number, (ids, values) in enumerate(zip(completion_ids, logprobs or (), strict=logprobs is not None)):
            outside = {at for at, of_policy in enumerate(masks[number]) if not of_policy}  # nobody has sampled these
            sampled = [math.nan if value is None or at in outside else value for at, value in enumerate(values)]
            try:
                require_log_probs(sampled, len(ids))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"rollout_func: completion {number} has {error}: return the log-probability of each sampled "
                    "token, in nats and at most 0, or NaN where it is not known."
                ) from error
        filled = with_ends(completion_ids, logprobs, [trainer._tokenizer.eos_token_id])
        return output | dict(zip(("completion_ids", "logprobs"), filled, strict=True))

    return rollout
