"""A server that lies is not believed: each lie ends in a `ServerError`, whoever asks, and honest answers are used."""

import asyncio
import json
import math
from functools import cache, partial

import aiohttp
import pytest

from dc_trl.async_grpo.worker import CheckedRolloutLoop, CheckedRolloutWorker
from dc_trl.rollouts.sampling import Request, Sampling
from dc_trl.rollouts.server_engine import ServerEngine
from dc_trl.serving.answers import Bounds, require_rollout
from dc_trl.serving.client import ServerClient, Weights
from dc_trl.serving.connection import Deadline, Patience
from dc_trl.serving.errors import ServerAnswerError, ServerError, ServerUnavailableError
from dc_trl.serving.pool import ServerPool

from .lies import HONEST, LIES, LIES_OF_LOGPS, LIES_OF_NAMES, LIES_OF_ORDER
from .stub_server import completions, stub_server
from .vllm_server import requires_vllm


pytestmark = requires_vllm
PROMPTS = [[11, 12, 13], [14, 15]]
TOKENS = [20, 21, 1]
BOUNDS = Bounds(262, 4096)
ONCE = Patience(request_timeout=120.0, max_retries=0)


def honest(body):
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    count = len(prompts) * body.get("n", 1)
    each = [prompt for prompt in prompts for _ in range(body.get("n", 1))]
    return completions(each, [TOKENS[-1 - index % 3 :] for index in range(count)], None)


@pytest.fixture(scope="module")
def server():
    with stub_server() as stub:
        yield stub


@pytest.fixture(scope="module")
def other():
    with stub_server() as stub:
        yield stub


@cache
def client_of(url):
    client = ServerClient(url, patience=ONCE)
    client.bounds = BOUNDS
    return client


@cache
def pool_of(*urls):
    def fits(client):
        client.bounds = BOUNDS

    waits = {"start_timeout": 60.0, "patience": ONCE, "deadline": Deadline(600)}
    return ServerPool(urls, fits=fits, report=lambda line: None, **waits)


@cache
def engine_of(url):
    return ServerEngine(url, max_retries=0, vocabulary=262)


def by_client(server, other):
    client = client_of(server.url)
    client.weights = Weights(server.version, None)
    return client.generate(PROMPTS, n=2, max_tokens=8)["completion_ids"]


def by_pool(server, other):
    return pool_of(server.url, other.url).generate(PROMPTS, n=2, max_tokens=8)["completion_ids"]


def by_evaluation(server, other):
    engine = engine_of(server.url)
    return [completion.tokens for _, completion in engine.sample([Request(PROMPTS[0], 0)], Sampling(8))]


def by_async(server, other):
    """The worker's loop asks its server, without its process."""
    loop = CheckedRolloutLoop.__new__(CheckedRolloutLoop)
    loop._bounds, loop.vllm_server_url, loop.lora_name, loop.model_name = BOUNDS, server.url, None, "stub"
    loop.max_tokens, loop.temperature, loop.top_p, loop.top_k, loop.min_p = 8, 1.0, 1.0, 0, None
    loop.repetition_penalty, loop.request_timeout = 1.0, 20

    async def ask():
        async with aiohttp.ClientSession() as loop.session:
            return await loop._generate_one_turn(PROMPTS[0])

    return asyncio.run(ask())[0]


WAYS = {
    "client": (by_client, LIES | LIES_OF_LOGPS | LIES_OF_NAMES),
    "pool": (by_pool, LIES | LIES_OF_LOGPS | LIES_OF_NAMES),
    "evaluation": (by_evaluation, LIES),
    "async": (by_async, LIES | LIES_OF_LOGPS),
}


def answering(lie):
    return lambda body: lie(honest(body))


@pytest.mark.parametrize("way", WAYS)
def test_no_lie_is_believed(server, other, way):
    ask, lies = WAYS[way]
    believed, raw = [], {}
    for name, lie in lies.items():
        server.completes = other.completes = answering(lie)
        try:
            believed.append((name, ask(server, other)))
        except ServerError as error:
            if server.url not in str(error) and other.url not in str(error):
                believed.append((name, str(error)))  # nobody knows who lied
        except Exception as error:
            raw[name] = repr(error)
    assert (believed, raw) == ([], {})


def test_an_answer_to_several_prompts_has_them_in_order():
    request = {"prompt": PROMPTS, "n": 2, "max_tokens": 8, "return_token_ids": True}
    assert len(require_rollout(request, honest(request), "here", BOUNDS)) == 4
    for lie in LIES_OF_ORDER.values():
        with pytest.raises(ServerAnswerError, match="completes the prompt"):
            require_rollout(request, lie(honest(request)), "here", BOUNDS)


@pytest.mark.parametrize("way", WAYS)
def test_honest_answers_are_used_in_their_order(server, other, way):
    ask, _ = WAYS[way]
    server.completes = other.completes = answering(HONEST["as it is"])
    usual = ask(server, other)
    for name, edit in HONEST.items():
        server.completes = other.completes = answering(edit)
        found = ask(server, other)
        assert found == usual or name == "an empty completion", name


def test_what_another_try_may_cure_is_tried_again(server, other, monkeypatch):
    """NaN and what was broken off are faults of a moment; a lie is none."""
    monkeypatch.setattr("dc_trl.serving.connection.pause", lambda seconds: None)
    patient = ONCE._replace(max_retries=3)
    client = ServerClient(server.url, patience=patient, report=lambda line: None)
    for lie, tries in ((LIES["aborted"], 4), (LIES_OF_LOGPS["a value NaN"], 4), (LIES["choices null"], 1)):
        server.bodies.clear()
        server.completes = answering(lie)
        with pytest.raises(ServerUnavailableError if tries > 1 else ServerAnswerError):
            client.generate(PROMPTS[:1], n=2, max_tokens=8)
        assert len(server.bodies) == tries


def test_the_most_probable_tokens_are_read_too():
    """With k tokens named at each position, the sampled one is among them or beside them."""
    request = {"prompt": [[5]], "n": 1, "max_tokens": 8, "logprobs": 2, "return_token_ids": True}
    request["return_tokens_as_token_ids"] = True

    def answer(top, value=-3.0):
        logprobs = {"tokens": ["token_id:9"], "token_logprobs": [value], "top_logprobs": [top]}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [9], "prompt_token_ids": [5]}
        return {"choices": [choice | {"logprobs": logprobs}]}

    read = partial(require_rollout, request, where="here", bounds=Bounds(10))
    honest = [
        {"token_id:1": -0.5, "token_id:2": -2.0},
        {"token_id:1": -0.5, "token_id:2": -2.0, "token_id:9": -3.0},
        {"token_id:9": -3.0},
        None,
    ]
    for top in honest:
        read(answer=answer(top))
    lies = [
        {"token_id:1": -0.5, "token_id:2": -2.0, "token_id:3": -2.0, "token_id:9": -3.0},
        {"token_id:9": -2.0},
        {"token_id:1": -0.1, "token_id:2": -0.1},  # probabilities of 1.8
        {"token_id:10": -4.0},
        {"token_id:01": -4.0},
        {"token_id:1": None},
        [["token_id:1", -0.5]],
    ]
    for top in lies:
        with pytest.raises(ServerAnswerError):
            read(answer=answer(top))
    with pytest.raises(ServerUnavailableError, match="NaN"):
        read(answer=answer({"token_id:1": math.nan}))


@pytest.mark.parametrize(
    ("path", "answers"),
    [
        ("/v1/models", [[], {}, {"data": []}, {"data": [None]}]),
        ("/weight_info", [{}, None]),
        ("/server_info", [{}, {"vllm_config": {"model_config": 3}}]),
        ("/collective_rpc", [{}, {"results": []}, {"results": 3}]),
        ("/reset_prefix_cache", [{}, None]),
    ],
)
def test_lies_about_anything_else_are_errors_of_the_server_too(path, answers):
    with stub_server() as server, stub_server() as other:
        server.completes = other.completes = honest
        for answer in answers:
            server.says = {path: (200, json.dumps(answer))}

            def fits(client):
                with client.connection.reading("/server_info"):
                    assert client.get_server_info()["model_config"]["max_model_len"] == 4096
                client.layers()

            def one(fits=fits):
                client = ServerClient(server.url, patience=ONCE)
                fits(client)
                client.load(Weights("run-1", "/nowhere"))

            def several(fits=fits):
                waits = {"start_timeout": 60.0, "patience": ONCE, "deadline": Deadline(60)}
                ServerPool([server.url], fits=fits, report=lambda line: None, **waits).load(
                    Weights("run-1", "/nowhere")
                )

            for ask in (one, several):
                with pytest.raises(ServerError):
                    ask()


@pytest.mark.long
def test_a_lie_to_the_worker_of_asyncgrpo_is_an_error_of_the_trainer(server):
    """Through the worker's own process, which the trainer looks after."""
    from accelerate import PartialState
    from datasets import Dataset

    from .helpers import distinct_characters, make_tokenizer

    PartialState()  # TRL's logger wants it
    server.completes = answering(LIES["another prompt"])
    tokenizer = make_tokenizer()
    tokenizer.response_schema = {}  # TRL knows none for its template
    worker = CheckedRolloutWorker(
        vocabulary=262,
        model_name="stub",
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}] * 4),
        reward_funcs=[distinct_characters],
        processing_class=tokenizer,
        eos_token_ids=[1],
        num_generations=2,
        max_inflight_tasks=2,
        vllm_server_url=server.url,
        max_tokens=8,
    )
    worker.start()
    try:
        worker._failed_event.wait(60)
        with pytest.raises(ServerError, match="did not answer what it was asked: choice 0 completes the prompt"):
            worker.check_health(60)
    finally:
        worker.stop()
