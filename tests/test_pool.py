"""Several servers in place of one: how prompts are spread, and what becomes of them when a server fails."""

from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import product

import pytest
import torch

from dc_trl.sampling.vllm_backends import connect
from dc_trl.serving.client import RolloutSeeds, ServerClient, Weights
from dc_trl.serving.connection import Patience
from dc_trl.serving.errors import ServerError
from dc_trl.serving.several import RoutedServers, ServerPool, meet_servers

from . import helpers
from .helpers import at_server, make_model, refuses
from .stub_server import Router, sampled, stub_server


# --- the pool, against servers whose completions are a function of prompt and seed

PROMPTS = [[3, 4], [5], [6, 7, 8], [9, 9, 9, 9], [10, 11], [12]]


@pytest.fixture
def stubs():
    with ExitStack() as stack:
        servers = [stack.enter_context(stub_server()) for _ in range(3)]
        for server in servers:
            server.completes = sampled
        yield servers


@pytest.fixture
def lines():
    return []


def make_pool(stubs, lines, fits=lambda client: None, router=None, **patience):
    waits = Patience(**{"server_timeout": 60.0, "prefix": "vllm_"} | patience)
    urls = [stub.url for stub in stubs]
    servers = meet_servers(urls, fits=fits, start_timeout=60.0, patience=waits, report=lines.append)
    return ServerPool(servers) if router is None else RoutedServers(router.url, servers)


@pytest.fixture
def weights(tmp_path):
    return [Weights(f"run-{number}", tmp_path / f"run-{number}") for number in range(5)]


def generate(pool, seed=0, **options):
    torch.manual_seed(seed)
    return pool.generate(PROMPTS, **{"n": 3, "max_tokens": 8, "logprobs": 0} | options)


def expected_rollout(seed=0):
    """What a single server says, by TRL's own client, to the same seeds."""
    with stub_server() as one, stub_server() as other:
        one.completes = other.completes = sampled
        pool = make_pool([one, other], [])
        other.failures = {"/v1/completions": 10**6, "/health": 10**6}
        return generate(pool, seed)


def test_a_rollout_comes_whole_and_in_order_whoever_sampled_it(stubs, lines, weights):
    pool = make_pool(stubs, lines)
    pool.load(weights[0])
    output = generate(pool)
    assert output["prompt_ids"] == PROMPTS
    assert len(output["completion_ids"]) == 3 * len(PROMPTS)
    assert output == expected_rollout()
    asked = [[body["prompt"][0] for body in stub.bodies] for stub in stubs]
    assert sorted(prompt for of in asked for prompt in of) == sorted(PROMPTS)
    assert all(len(of) == 2 for of in asked)  # as many for each
    assert [server.answered for server in pool.servers] == [2, 2, 2]
    assert lines == []


def test_seeds_belong_to_the_prompts_of_a_batch_and_differ(stubs, lines):
    pool = make_pool(stubs, lines)
    seeds = []
    for seed in (0, 0, 1):
        generate(pool, seed)
        of = {tuple(body["prompt"][0]): body["seed"] for stub in stubs for body in stub.bodies}
        assert len(set(of.values())) == len(PROMPTS)
        seeds.append(of)
        for stub in stubs:
            stub.bodies.clear()
    assert seeds[0] == seeds[1]
    assert not set(seeds[0].values()) & set(seeds[2].values())
    before = torch.get_rng_state()
    pool.generate(PROMPTS, temperature=0.0)  # greedy: nothing is drawn
    pool.generate(PROMPTS, generation_kwargs={"seed": 7})  # the user's word
    assert torch.equal(torch.get_rng_state(), before)
    said = [body.get("seed") for stub in stubs for body in stub.bodies]
    assert Counter(said) == {None: len(PROMPTS), 7: len(PROMPTS)}


def test_one_server_gets_the_seeds_that_several_get_also_when_it_is_asked_again(stubs, lines, no_pauses):
    client = ServerClient(stubs[0].url, patience=Patience(max_retries=2), report=lines.append)
    assert generate(client) == expected_rollout()
    stubs[0].failures = {"/v1/completions": 2}
    assert generate(client) == expected_rollout()
    assert generate(client, 1) == expected_rollout(1) != expected_rollout()
    torch.manual_seed(0)
    client.seeds.draw()  # by whoever knows the rollout before it is sampled
    assert generate(client, 1) == expected_rollout()


def test_all_servers_hold_the_weights_before_the_first_prompt_goes_out(stubs, lines, weights):
    pool = make_pool(stubs, lines)
    for each in weights[:3]:
        pool.load(each)
        assert {stub.version for stub in stubs} == {each.version}
        stubs[1].version = "another run's"  # somebody loads other weights in between
        generate(pool)
        assert {stub.version for stub in stubs} == {each.version}
    for stub in stubs:
        loads = [number for number, path in enumerate(stub.asked) if path == "/update_weight_version"]
        first_prompt = stub.asked.index("/v1/completions")
        assert loads[0] < first_prompt
    # Each sampled is followed by a look at the version that it was sampled with.
    assert all(stub.asked.count("/weight_info") > stub.asked.count("/v1/completions") for stub in stubs)


def test_the_prompts_of_a_server_that_fails_go_to_the_others_with_their_seeds(stubs, lines, weights):
    pool = make_pool(stubs, lines)
    pool.load(weights[0])
    stubs[0].failures = {"/v1/completions": 10**6}
    assert generate(pool) == expected_rollout()
    assert [server.lost is not None for server in pool.servers] == [True, False, False]
    (line,) = lines
    assert stubs[0].url in line
    assert "/v1/completions" in line
    seeds = {}
    for stub in stubs:
        for body in stub.bodies:
            assert seeds.setdefault(tuple(body["prompt"][0]), body["seed"]) == body["seed"]


def test_a_lost_server_takes_prompts_again_once_it_has_loaded_the_present_weights(stubs, lines, weights):
    fits = []
    pool = make_pool(stubs, lines, fits=lambda client: fits.append(client.base_url))
    pool.load(weights[0])
    away = stubs[2]
    away.failures = {"/health": 3}
    generate(pool)
    pool.load(weights[1])
    generate(pool)  # still away
    assert away.failures == {"/health": 0}
    assert away.version == weights[0].version
    assert Counter(fits)[away.url] == 2  # when it was met, and before it got the weights
    away.failures, away.asked = {}, []
    for stub in stubs:
        stub.bodies.clear()
    assert generate(pool, 3) == expected_rollout(3)
    assert away.version == weights[1].version
    assert away.asked.index("/collective_rpc") < away.asked.index("/v1/completions")
    assert Counter(fits)[away.url] == 3  # it may have been started anew, with other options
    assert len(away.bodies) > 0
    assert len(lines) == 2  # once each
    assert f"vLLM at {away.url} gets no prompts" in lines[0]
    assert f"vLLM at {away.url} is back" in lines[1]


def test_weights_that_change_in_a_rollout_make_its_completions_void(stubs, lines, weights):
    pool = make_pool(stubs, lines)
    pool.load(weights[0])
    changed = stubs[1]

    def steal(body):
        changed.version = "another run's"
        changed.completes = sampled
        return sampled(body)

    changed.completes = steal
    assert generate(pool) == expected_rollout()
    (line,) = lines
    assert changed.url in line
    assert "weights" in line
    assert pool.servers[1].answered == 0
    generate(pool)
    assert changed.version == weights[0].version  # it was loaded again
    assert pool.servers[1].lost is None


def test_when_all_are_lost_they_are_tried_again(stubs, lines, weights, no_pauses):
    pool = make_pool(stubs, lines, max_retries=2)
    for stub in stubs:
        stub.says = {"/v1/completions": (400, "too long")}
    with refuses(ServerError, "/v1/completions (HTTP 400): too long"):  # in one try
        generate(pool)
    for stub in stubs:
        stub.says = {}
        stub.bodies.clear()
    pool.load(weights[0])
    for stub in stubs[1:]:
        stub.failures = {"/v1/completions": 3}

    def once(body):
        """The only prompt that is answered in the first try."""
        stubs[0].completes = sampled
        stubs[0].failures = {"/v1/completions": 1}
        return sampled(body)

    stubs[0].completes = once
    assert generate(pool) == expected_rollout()
    assert any("try 2 of 3 follows" in line for line in lines)
    counts = Counter(tuple(body["prompt"][0]) for body in stubs[0].bodies)
    assert min(counts.values()) == 1
    for stub in stubs:
        stub.failures = {"/v1/completions": 10**6}
    with refuses(ServerError, "3 times: vllm_max_retries", *(stub.url for stub in stubs)):
        generate(pool)


# What a server may come back with: the path that tells it, a part of the usual answer, and what is in its place.
OTHERS = """
scheme | /collective_rpc | [""] | ["(q): QKVParallelLinear(quant=CompressedTensorsW8A8Int8)"] | W8A8Int8
depth | /collective_rpc | [""] | ["(0-3): 4 x Layer()"] | 4 x Layer
KV cache | /server_info | "cache_dtype": "auto" | "cache_dtype": "bfloat16" | bfloat16
log-probabilities | /server_info | processed_logprobs | raw_logprobs | raw_logprobs
context | /server_info | 4096 | 2048 | 2048
model | /server_info | "revision": null | "revision": "other" | other
vLLM | /version | 0.31 | 0.32 | 0.32
"""
OTHERS = {name: words for name, *words in (row.split(" | ") for row in OTHERS.strip().splitlines())}


@pytest.mark.parametrize(
    ("setting", "other"),
    [*(("one", other) for other in OTHERS), *product(["pool", "router"], ["scheme", "context"])],
)
def test_a_server_that_comes_back_as_another_one_is_not_used(
    stubs, weights, no_pauses, tmp_path, caplog, setting, other
):
    path, usual, changed, word = OTHERS[other]
    urls = [stub.url for stub in stubs]
    with stub_server(Router(urls)) as router:
        first = {"one": urls[0], "pool": None, "router": router.url}[setting]
        fields = {} if setting == "one" else {"vllm_server_base_urls": urls}
        args = helpers.make_config(tmp_path, **at_server(first) | fields)
        model = make_model(64)
        for synchronizes in (True, False):
            stubs[0].says = {}
            client = connect(args, model.config, "checkpoint", 0)
            client.load(weights[0])
            generate(client)
            stubs[0].bodies.clear()
            stubs[0].says = {path: (200, stubs[0].answer(path, {})[1].replace(usual, changed))}
            ask = partial(client.load, weights[1])
            if not synchronizes:
                stubs[0].version, ask = "default", partial(generate, client)
            if setting == "pool":
                ask()
                generate(client)
                assert len(stubs[1].bodies) > 0
                assert word in caplog.text
                assert f"{stubs[0].url} gets no prompts" in caplog.text
            else:
                with refuses(ServerError, stubs[0].url, word, "options"):
                    ask()
            assert stubs[0].bodies == []


# --- a router before the servers


def test_weights_that_change_behind_a_router_make_its_whole_rollout_void(stubs, lines, weights, no_pauses):
    with stub_server(Router([stub.url for stub in stubs])) as router:
        client = make_pool(stubs, lines, router=router, max_retries=2)
        client.load(weights[0])
        router.before = lambda *_: len(router.sessions) == 4 and setattr(stubs[1], "version", "another run's")
        assert generate(client) == expected_rollout()
    assert {stub.version for stub in stubs} == {weights[0].version}
    assert len(router.sessions) == 2 * len(set(router.sessions)) == 2 * len(PROMPTS)
    assert stubs[1].url in lines[0]
    assert "weights" in lines[0]
    assert [stub.asked.count("/collective_rpc") for stub in stubs] == [2, 2, 2]  # all were loaded again


@pytest.mark.parametrize("passes", [True, False])
def test_servers_behind_a_router_that_are_not_in_the_list_end_the_rollout(stubs, lines, weights, passes):
    with stub_server(Router([stub.url for stub in stubs])) as router:
        if not passes:  # a router of which nothing can be known
            router.says = dict.fromkeys(("/weight_info", "/list_workers"), (404, "Not Found"))
        client = make_pool(stubs[:2], lines, router=router, max_retries=2)
        client.load(weights[0])
        words = ["weights 'default'", repr(weights[0].version)] if passes else ["GET /weight_info"]
        with refuses(ServerError, router.url, "vllm_server_base_url", *words):
            generate(client)


def test_a_single_address_that_spreads_sessions_is_known_for_a_router(stubs, lines, weights):
    """As a router with a hash of the session does, which sends requests without one to the same server."""
    with stub_server(Router([stub.url for stub in stubs])) as router:
        router.pick = lambda headers: stubs[int(headers.get("X-Session-ID", "0"), 16) % 3].url
        client = ServerClient(router.url, report=lines.append)
        client.load(weights[0])
        assert {stub.version for stub in stubs} == {weights[0].version, "default"}
        with refuses(ServerError, router.url, "'default'", "vllm_server_base_urls"):
            generate(client)


@pytest.mark.parametrize("routed", [False, True])
def test_prompts_with_images_are_refused(stubs, lines, routed):
    pool = make_pool(stubs, lines, router=stubs[0] if routed else None)
    with refuses(ServerError, "images", "vllm_server_base_url"):
        pool.image_features([None, ["image"]])


def test_the_turns_of_a_conversation_have_one_session():
    seeds = RolloutSeeds()

    def sessions(*prompts):
        return [request["session_id"] for request in seeds.requests({"prompt": list(prompts), "temperature": 0.0})]

    first = sessions([1, 2], [1, 2, 3], [4])
    assert len(set(first)) == 3
    assert sessions([1, 2, 3, 9], [1, 2, 8], [1, 2, 7]) == [first[1], first[0], first[0]]
    assert sessions([1, 2, 8, 8]) == [first[0]]
    assert sessions([1, 2, 3], [4])[1] not in first  # the conversation of 4 had ended


def test_servers_that_would_get_no_weights_are_refused(stubs, tmp_path):
    stubs[0].says = {"/list_workers": (200, '{"urls": ["http://a:1@0", "http://a:1@1", "http://b:1", "http://c:1"]}')}
    one, *others = [stub.url for stub in stubs]
    for fields in ({}, {"vllm_server_base_urls": others}):
        with refuses(ServerError, f"{one} is a router with 3 servers, and {len(fields) + 1}", "vllm_server_base_urls"):
            helpers.make_trainer(tmp_path, make_model(64), **at_server(one) | fields)


# --- the trainer


def make_trainer(output_dir, urls, **options):
    fields = at_server(None) | {"vllm_server_base_urls": urls, "vllm_server_timeout": 60.0} | options
    return helpers.make_trainer(output_dir, make_model(64), **fields)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_runs_sample_the_same(stubs, tmp_path, overlap):
    runs = []
    for number in range(2):
        trainer = make_trainer(
            tmp_path / str(number),
            [stub.url for stub in stubs],
            max_steps=3,
            per_device_train_batch_size=16,
            rollout_overlap=overlap,
        )
        trainer.train()
        assert [server.lost for server in trainer.vllm_generation.vllm_client.servers] == [None] * 3
        runs.append(sorted((body["prompt"][0], body["seed"]) for stub in stubs for body in stub.bodies))
        for stub in stubs:
            stub.bodies.clear()
    assert runs[0] == runs[1]
    assert len({seed for _, seed in runs[0]}) == len(runs[0]) == 12


def test_each_server_that_does_not_fit_or_is_not_up_is_named_when_the_trainer_is_built(stubs, tmp_path):
    text = stubs[1].answer("/server_info", {})[1].replace("processed_logprobs", "raw_logprobs")
    stubs[1].says = {"/server_info": (200, text)}
    words = [f"{stubs[1].url}: ", "--logprobs-mode raw_logprobs", "http://127.0.0.1:9 "]
    with refuses(ServerError, *words) as refused:
        make_trainer(tmp_path, [*(stub.url for stub in stubs), "http://127.0.0.1:9"], vllm_server_timeout=5.0)
    assert stubs[0].url not in str(refused.value)
