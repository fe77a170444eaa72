"""A server whose answer does not fit what was asked ends in a `ServerError`, whoever asks; honest answers are used."""

import base64
import io
import math
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from trl.generation.vllm_client import parse_logprobs

from dc_trl.sampling.engine_names import Sampling
from dc_trl.sampling.seeded import Request, ServerEngine
from dc_trl.serving.client import ServerClient, Weights
from dc_trl.serving.completions import require_rollout
from dc_trl.serving.connection import Patience
from dc_trl.serving.errors import ServerAnswerError, ServerError, ServerUnavailableError
from dc_trl.serving.several import ServerPool, meet_servers

from .helpers import refuses
from .stub_server import completions, stub_server
from .vllm_server import requires_vllm


pytestmark = requires_vllm
PROMPTS = [[11, 12, 13], [14, 15]]
TOKENS = [20, 21, 1]
ONCE = Patience(request_timeout=120.0, max_retries=0)


def honest(body):
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    count = len(prompts) * body.get("n", 1)
    each = [prompt for prompt in prompts for _ in range(body.get("n", 1))]
    return completions(each, [TOKENS[-1 - index % 3 :] for index in range(count)], None)


def of_last(**values):
    """The last choice with other values."""

    def edit(answer):
        answer["choices"][-1].update(values)
        return answer

    return edit


def of_logps(column, value):
    def edit(answer):
        answer["choices"][-1]["logprobs"][column][0] = value
        return answer

    return edit


def last_logprobs(answer):
    return answer["choices"][-1]["logprobs"]


def swap_contents(answer):
    """The choices in another order, under indices as if they were in order."""
    first, *others = answer["choices"]
    answer["choices"] = [choice | {"index": index} for index, choice in enumerate([*others, first])]
    return answer


EMPTY = {"token_ids": [], "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": []}}
WRONG = {
    "no choices": lambda answer: {"error": {"message": "out of memory"}},
    "one choice less": lambda answer: {"choices": answer["choices"][:-1]},
    "twice as many": lambda answer: {"choices": answer["choices"] + deepcopy(answer["choices"])},
    "index too high": of_last(index=7),
    "another prompt": of_last(prompt_token_ids=[77, 78]),
    "tokens null": of_last(token_ids=None),
    "a token below 0": of_last(token_ids=[-1, 21, 1]),
    "a token at the vocabulary's end": of_last(token_ids=[262, 21, 1]),
    "a token that is no whole number": of_last(token_ids=[20.5, 21, 1]),
    "more tokens than were asked for": of_last(token_ids=[20] * 500),
    "nothing at all": lambda answer: {"choices": [each | EMPTY for each in answer["choices"]]},
    "no text": of_last(text=None),
    "broken off": of_last(finish_reason="abort"),
}
WRONG_LOGPS = {
    "no logprobs": of_last(logprobs=None),
    "a value NaN": of_logps("token_logprobs", math.nan),
    "the value of a token that is never sampled": of_logps("token_logprobs", -9999.0),
    "a value above 0": of_logps("token_logprobs", 0.5),
    "a text": of_logps("token_logprobs", "-1.0"),
    "another token's, more probable": of_logps("top_logprobs", {"token_id:77": -0.1}),
    "two values": lambda answer: of_logps("top_logprobs", {last_logprobs(answer)["tokens"][0]: -0.1})(answer),
    "another token's": of_logps("tokens", "token_id:77"),
    "one more": lambda answer: (answer["choices"][-1]["logprobs"]["token_logprobs"].append(-1.0), answer)[1],
}


@pytest.fixture(scope="module")
def servers():
    with stub_server() as one, stub_server() as other:
        yield one, other


def by_client(one, other):
    client = ServerClient(one.url, patience=ONCE)
    client.vocabulary, client.weights = 262, Weights(one.version, None)
    return client.generate(PROMPTS, n=2, max_tokens=8)["completion_ids"]


def by_pool(one, other):
    def fits(client):
        client.vocabulary = 262

    urls = [one.url, other.url]
    pool = ServerPool(meet_servers(urls, fits=fits, patience=ONCE, report=lambda line: None))
    return pool.generate(PROMPTS, n=2, max_tokens=8)["completion_ids"]


def by_evaluation(one, other):
    engine = ServerEngine(one.url, max_retries=0, vocabulary=262)
    return [completion.tokens for _, completion in engine.sample([Request(PROMPTS[0], 0)], Sampling(8))]


WAYS = {
    "client": (by_client, WRONG | WRONG_LOGPS),
    "pool": (by_pool, WRONG | WRONG_LOGPS),
    "evaluation": (by_evaluation, WRONG),
}


def answering(edit):
    return lambda body: edit(honest(body))


@pytest.mark.parametrize("way", WAYS)
def test_no_wrong_answer_is_used(servers, way):
    ask, edits = WAYS[way]
    for name, edit in edits.items():
        for server in servers:
            server.completes = answering(edit)
        with pytest.raises(ServerError) as error:
            ask(*servers)
        assert any(server.url in str(error.value) for server in servers), name


@pytest.mark.parametrize("way", WAYS)
def test_honest_answers_are_used_in_their_order(servers, way):
    ask, _ = WAYS[way]
    for server in servers:
        server.completes = honest
    usual = ask(*servers)
    for server in servers:
        server.completes = answering(lambda answer: {"choices": answer["choices"][::-1]})
    assert ask(*servers) == usual


def test_an_answer_to_several_prompts_has_them_in_order():
    request = {"prompt": PROMPTS, "n": 2, "max_tokens": 8, "return_token_ids": True}
    assert len(require_rollout(request, honest(request), "here", 262)) == 4
    with refuses(ServerAnswerError, "here", "prompt"):
        require_rollout(request, swap_contents(honest(request)), "here", 262)


def test_an_answer_keeps_what_trl_reads_of_it_and_nothing_twice(servers):
    """Of 32 × 8 completions with 8,192 tokens, what repeats the sampled ones took 0.6 GB."""
    request = {"prompt": PROMPTS, "logprobs": 0, "return_tokens_as_token_ids": True}
    answer = honest(request)
    before = parse_logprobs([choice["logprobs"] for choice in deepcopy(answer)["choices"]])
    left = [choice["logprobs"] for choice in require_rollout(request, answer, "here", 262)]
    assert parse_logprobs(left) == before
    assert {entry for logprobs in left for entry in logprobs["top_logprobs"]} == {None}
    server, _ = servers
    server.completes = honest
    client = ServerClient(server.url, patience=ONCE)
    sampled, named = (client.generate(PROMPTS, max_tokens=8, logprobs=most) for most in (0, 2))
    assert sampled == named | {"logprob_token_ids": None}


def test_what_another_try_may_cure_is_tried_again(servers, monkeypatch):
    """NaN and what was broken off are faults of a moment; another format is none."""
    monkeypatch.setattr("dc_trl.serving.connection.pause", lambda seconds: None)
    server, _ = servers
    client = ServerClient(server.url, patience=ONCE._replace(max_retries=3), report=lambda line: None)
    for edit, tries in ((WRONG["broken off"], 4), (WRONG_LOGPS["a value NaN"], 4), (WRONG["no choices"], 1)):
        server.bodies.clear()
        server.completes = answering(edit)
        with pytest.raises(ServerUnavailableError if tries > 1 else ServerAnswerError):
            client.generate(PROMPTS[:1], n=2, max_tokens=8)
        assert len(server.bodies) == tries


def test_the_most_probable_tokens_are_read_too():
    """With k tokens named at each position, the sampled one is among them or beside them."""
    request = {"prompt": [[5]], "n": 1, "max_tokens": 8, "logprobs": 2, "return_token_ids": True}
    request["return_tokens_as_token_ids"] = True

    def answer(top):
        logprobs = {"tokens": ["token_id:9"], "token_logprobs": [-3.0], "top_logprobs": [top]}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [9], "prompt_token_ids": [5]}
        return {"choices": [choice | {"logprobs": logprobs}]}

    read = partial(require_rollout, request, where="here", vocabulary=10)
    for top in ({"token_id:1": -0.5, "token_id:2": -2.0}, {"token_id:9": -3.0}, None):
        read(answer=answer(top))
    for top in ({"token_id:1": 0.5}, [["token_id:1", -0.5]]):
        with pytest.raises(ServerAnswerError):
            read(answer=answer(top))
    with refuses(ServerUnavailableError, "NaN"):
        read(answer=answer({"token_id:1": math.nan}))


def test_experts_that_are_no_array_are_refused():
    np.lib.format.write_array_header_1_0(
        huge := io.BytesIO(), {"descr": "|u1", "fortran_order": False, "shape": (10**15, 1, 1)}
    )
    nested = b"\x93NUMPY\x01\x00\xe8\x03" + b"(" * 1000
    for content in (b"", b"PK\x03\x04", huge.getvalue(), nested):
        answer = honest({"prompt": [[5]]})
        answer["choices"][0]["routed_experts"] = base64.b64encode(content).decode()
        with refuses(ServerAnswerError, "here"):
            require_rollout({"prompt": [[5]]}, answer, "here")
    answer["choices"][0]["routed_experts"] = "?" * 8
    with refuses(ServerAnswerError, "here"):
        require_rollout({"prompt": [[5]]}, answer, "here")


def test_answers_about_the_server_in_another_format_are_refused(servers):
    server, _ = servers
    client = ServerClient(server.url)
    for path, text in {"/reset_prefix_cache": "{}", "/collective_rpc": "{}", "/weight_info": "[" * 100_000}.items():
        server.says = {path: (200, text)}
        with refuses(ServerError, server.url, path):
            client.hold(Weights(f"new-{len(path)}", Path("anywhere")), reload=True)
    server.says = {"/v1/models": (200, '{"data": [{"id": "a", "root": "a", "max_model_len": 1e400}]}')}
    with refuses(ServerError, server.url, "/v1/models"):
        ServerEngine(server.url)
    server.says = {}
