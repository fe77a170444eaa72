"""Empty completions, which TRL cannot read: they are filled with a token that enters no loss."""

import math
from functools import wraps


class UnsampledToken(int):
    """Id of a token that is not known to have been sampled by an engine.

    TRL splits and joins completions as lists of ids, which keep this type.
    """


def fill_empty(completion_ids, logprobs, eos_token_id):
    """Give each empty completion an end token without a log-probability, which `sampled_only` excludes from the loss.

    TRL reads the last token of every completion, and an empty completion teaches nothing.
    """
    if all(len(ids) > 0 for ids in completion_ids):
        return completion_ids, logprobs
    if logprobs is not None:
        logprobs = [
            values if len(ids) > 0 else [math.nan] for ids, values in zip(completion_ids, logprobs, strict=True)
        ]
    return [ids if len(ids) > 0 else [UnsampledToken(eos_token_id)] for ids in completion_ids], logprobs


def sampled_only(completion_ids, tool_mask):
    """Return TRL's mask of the tokens that the model wrote, with 0 at tokens of `fill_empty`; None if all count.

    A token of `fill_empty` ends its completion: neither a tool nor a turn follows an empty answer.
    """
    filled = [isinstance(ids[-1], UnsampledToken) for ids in completion_ids]
    if not any(filled):
        return tool_mask
    if tool_mask is None:
        tool_mask = [[1] * len(ids) for ids in completion_ids]
    return [
        [*mask[: len(ids) - 1], 0] if empty else mask
        for ids, mask, empty in zip(completion_ids, tool_mask, filled, strict=True)
    ]


def with_nonempty_completions(rollout_func):
    """Return a `rollout_func` for TRL whose empty completions are filled by `fill_empty`."""

    @wraps(rollout_func)
    def rollout(prompts, trainer):
        output = rollout_func(prompts, trainer)
        if not {"completion_ids", "logprobs"} <= output.keys():
            return output  # TRL's error names the missing keys
        filled = fill_empty(output["completion_ids"], output["logprobs"], trainer._tokenizer.eos_token_id)
        return output | dict(zip(("completion_ids", "logprobs"), filled, strict=True))

    return rollout
