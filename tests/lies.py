"""Answers of a server that lies, each by what is changed in an honest one; see tests/test_answers.py."""

import math
from copy import deepcopy


def change(path, value):
    """Has a lie put a value where a path leads to; a value that can be called is given what was there."""

    def lie(answer):
        at = answer
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value(at[path[-1]]) if callable(value) else value
        return answer

    return lie


def leave_out(path):
    def lie(answer):
        at = answer
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]
        return answer

    return lie


def of_choice(path, value, number=-1):
    return change(["choices", number, *path], value)


def swap_contents(answer):
    """The choices in another order, under indices as if they were in order."""
    first, *others = answer["choices"]
    answer["choices"] = [choice | {"index": index} for index, choice in enumerate([*others, first])]
    return answer


def more_tokens(count):
    """A completion of so many tokens more, whole in itself."""

    def lie(answer):
        choice = answer["choices"][-1]
        choice["token_ids"] += [30] * count
        logprobs = choice["logprobs"]
        logprobs["tokens"] += ["token_id:30"] * count
        logprobs["token_logprobs"] += [-1.0] * count
        logprobs["top_logprobs"] += [{"token_id:30": -1.0}] * count
        return answer

    return lie


def log_prob(value):
    """A log-probability in both places where it stands."""

    def lie(answer):
        logprobs = answer["choices"][-1]["logprobs"]
        logprobs["token_logprobs"][0] = value
        logprobs["top_logprobs"][0] = {logprobs["tokens"][0]: value}
        return answer

    return lie


def nothing(answer):
    return answer


def one_less(*columns):
    def lie(answer):
        logprobs = answer["choices"][-1]["logprobs"]
        for column in columns:
            logprobs[column].pop()
        return answer

    return lie


# Lies about what was sampled: whoever asks for token ids has to find them.
LIES = {
    # the answer as a whole
    "null": lambda answer: None,
    "a list": lambda answer: [answer],
    "nothing": lambda answer: {},
    "an error that calls itself a success": lambda answer: {"error": {"message": "out of memory", "code": 500}},
    # choices
    "choices null": change(["choices"], None),
    "choices empty": change(["choices"], []),
    "choices of null": change(["choices"], lambda choices: [None] * len(choices)),
    "one choice less": change(["choices"], lambda choices: choices[:-1]),
    "twice as many": change(["choices"], lambda choices: choices + deepcopy(choices)),
    # index
    "no index": leave_out(["choices", -1, "index"]),
    "index null": of_choice(["index"], None),
    "index a fraction": of_choice(["index"], 0.0),
    "index too high": of_choice(["index"], lambda index: index + 1),
    # whose prompt
    "another prompt": of_choice(["prompt_token_ids"], [77, 78], number=0),
    "one token of the prompt less": of_choice(["prompt_token_ids"], lambda ids: ids[:-1], number=0),
    "no prompt": leave_out(["choices", 0, "prompt_token_ids"]),
    "prompt null": of_choice(["prompt_token_ids"], None, number=0),
    # tokens
    "no tokens": leave_out(["choices", -1, "token_ids"]),
    "tokens null": of_choice(["token_ids"], None),
    "tokens as texts": of_choice(["token_ids"], lambda ids: [str(token) for token in ids]),
    "a token null": of_choice(["token_ids", 0], None),
    "a token true": of_choice(["token_ids", 0], True),
    "a token below 0": of_choice(["token_ids", 0], -1),
    "a token at the vocabulary's end": of_choice(["token_ids", 0], 262),
    "one token too many": lambda answer: more_tokens(9 - len(answer["choices"][-1]["token_ids"]))(answer),
    # how it ended
    "no reason for the end": leave_out(["choices", -1, "finish_reason"]),
    "reason null": of_choice(["finish_reason"], None),
    "reason a number": of_choice(["finish_reason"], 1),
    "reason a list": of_choice(["finish_reason"], ["stop"]),
    "reason unknown": of_choice(["finish_reason"], "tired"),
    "aborted": of_choice(["finish_reason"], "abort"),
    "failed": of_choice(["finish_reason"], "error"),
    "ended for its length too early": of_choice(["finish_reason"], "length"),
}

# Lies about log-probabilities: only whoever asks for these can find them.
LIES_OF_LOGPS = {
    "no logprobs": leave_out(["choices", -1, "logprobs"]),
    "logprobs null": of_choice(["logprobs"], None),
    "logprobs a list": of_choice(["logprobs"], [-1.0, -1.0]),
    "logprobs empty": of_choice(["logprobs"], {}),
    "logprobs as a chat has them": of_choice(["logprobs"], {"content": None}),
    "no values": leave_out(["choices", -1, "logprobs", "token_logprobs"]),
    "values null": of_choice(["logprobs", "token_logprobs"], None),
    "one value less": one_less("token_logprobs"),
    "one log-probability less, whole": one_less("token_logprobs", "tokens", "top_logprobs"),
    "one value more": of_choice(["logprobs", "token_logprobs"], lambda values: [*values, -1.0]),
    "a value null": of_choice(["logprobs", "token_logprobs", 0], None),
    "a value a text": log_prob("-1.0"),
    "a value true": log_prob(True),
    "a value NaN": log_prob(math.nan),
    "a value −∞": log_prob(-math.inf),
    "a value −1e308": log_prob(-1e308),
    "+5": log_prob(5.0),
    "+0.01": log_prob(0.01),
}

# Lies about whose log-probabilities these are: only whoever asks for tokens by their ids can find them.
LIES_OF_NAMES = {
    "of other tokens": of_choice(["logprobs", "tokens"], lambda names: ["token_id:3" for _ in names]),
    "of tokens by their text": of_choice(["logprobs", "tokens"], lambda names: ["a" for _ in names]),
    "no names": leave_out(["choices", -1, "logprobs", "tokens"]),
    "one name less": one_less("tokens"),
    "no most probable ones": leave_out(["choices", -1, "logprobs", "top_logprobs"]),
    "most probable ones one less": one_less("top_logprobs"),
    "two values of one token": of_choice(["logprobs", "top_logprobs", 0], lambda top: dict.fromkeys(top, -2.0)),
    "a most probable one of another name": of_choice(["logprobs", "top_logprobs", 0], {"a": -1.0}),
    "a most probable one beyond the vocabulary": of_choice(["logprobs", "top_logprobs", 0], {"token_id:99999": -1.0}),
    "a most probable one of endless number": of_choice(
        ["logprobs", "top_logprobs", 0], {f"token_id:{'9' * 5000}": -1.0}
    ),
    "most probable ones that were not asked for": of_choice(
        ["logprobs", "top_logprobs", 0], lambda top: top | {"token_id:3": -2.0, "token_id:4": -2.0}
    ),
}

# Only where an answer has several prompts.
LIES_OF_ORDER = {"choices in another order, as if they were not": swap_contents}

HONEST = {
    "as it is": nothing,
    "in another order, by its indices": change(["choices"], lambda choices: choices[::-1]),
    "an empty completion": change(
        ["choices", -1],
        lambda choice: choice | {"token_ids": [], "logprobs": {name: [] for name in choice["logprobs"]}},
    ),
    "a probability of 1, rounded": log_prob(1e-6),
    "a certainty written without a fraction": log_prob(0),
    "vLLM's lowest": log_prob(-9999.0),
    "what else vLLM says": lambda answer: answer | {"id": "cmpl-1", "usage": {"completion_tokens": 3}, "kv": None},
}
