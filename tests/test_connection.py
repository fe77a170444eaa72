"""What the answers of a server mean, and what is asked again: against a server that says what it is told to."""

import asyncio
import base64
import json
import math
import re
import time
from pathlib import Path

import pytest

from dc_trl.sampling.engine_names import Sampling
from dc_trl.sampling.seeded import Request, ServerEngine
from dc_trl.serving import connection as connection_module
from dc_trl.serving.background import abandon_requests, allow_requests, in_thread, pause
from dc_trl.serving.client import ServerClient, Weights
from dc_trl.serving.connection import Connection, Deadline, Patience, wait_until_up
from dc_trl.serving.errors import RequestAbandonedError, ServerError, ServerRefusedError, ServerUnavailableError

from .helpers import refuses
from .stub_server import completions, stub_server


COMPLETION = (200, json.dumps(completions([[5]], [[25, 1]], None)))


@pytest.fixture
def server():
    with stub_server() as stub:
        yield stub


@pytest.fixture
def pauses(monkeypatch):
    """Seconds that the process would have slept; it sleeps none."""
    seen: list[float] = []
    monkeypatch.setattr(connection_module, "pause", seen.append)
    return seen


@pytest.mark.parametrize(
    ("path", "says", "kind", "words"),
    [
        ("/v1/models", (401, "Unauthorized"), ServerError, ["VLLM_API_KEY"]),
        ("/weight_info", (404, "Not Found"), ServerRefusedError, ["/weight_info", "VLLM_SERVER_DEV_MODE=1"]),
        ("/v1/models", (400, "Out of range float values are not JSON compliant"), ServerUnavailableError, ["NaN"]),
        ("/v1/models", (503, "busy"), ServerUnavailableError, ["/v1/models (HTTP 503): busy"]),
        ("/v1/models", (408, "late"), ServerUnavailableError, ["/v1/models (HTTP 408): late"]),
        ("/v1/models", (400, "too long"), ServerRefusedError, ["/v1/models (HTTP 400): too long"]),
        ("/v1/models", (200, "<html>"), ServerUnavailableError, ["/v1/models", "'<html>'"]),
        ("/v1/models", (200, "[" * 100_000), ServerUnavailableError, ["/v1/models", "'[[["]),
        ("/v1/models", (500, "a\x1b[2J\x00\nb"), ServerUnavailableError, ["a\\x1b[2J\\x00 b"]),
    ],
)
def test_what_an_answer_means_is_the_same_for_threads_and_for_an_event_loop(server, path, says, kind, words):
    server.says = {path: says}
    connection = Connection(server.url)

    for request in (lambda: connection.get(path), lambda: asyncio.run(connection.arequest("GET", path))):
        with refuses(ServerError, server.url, *words) as error:
            request()
        assert type(error.value) is kind


def test_a_connection_that_breaks_and_a_server_that_is_silent(server):
    server.failures = {"/weight_info": 1}
    connection = Connection(server.url)
    with refuses(ServerUnavailableError, server.url, "/weight_info"):
        connection.get("/weight_info")
    with (
        connection.task(Deadline(2.0)),
        refuses(ServerUnavailableError, "/v1/completions within ", "request_timeout") as silent,
    ):
        connection.get("/v1/completions")
    assert float(re.search(r"within (\S+) s", str(silent.value))[1]) <= 2
    with connection.task(Deadline(0.0)), refuses(ServerUnavailableError, "within 0 s"):
        connection.get("/weight_info")
    assert connection.get("/weight_info") == {"weight_version": "default"}
    impatient = Connection(server.url, Patience(request_timeout=0.2, prefix="vllm_"))
    with refuses(ServerUnavailableError, "/v1/completions within 0.2 s", "vllm_request_timeout"):
        impatient.get("/v1/completions")


def test_a_user_with_a_password_is_read_from_netrc_unless_there_is_a_key(server, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    seen = []
    monkeypatch.setattr(
        server, "reply", lambda request, body: (seen.append(request.headers["Authorization"]), (200, "{}"))[1]
    )
    Connection(server.url).get("/version")
    monkeypatch.setenv("VLLM_API_KEY", "key")
    Connection(server.url).get("/version")
    assert seen == ["Basic " + base64.b64encode(b"me:hunter2").decode(), "Bearer key"]


def test_who_has_no_fields_of_a_run_is_told_of_none():
    with refuses(ServerError, "http://127.0.0.1:9", "correct the address") as refused:
        wait_until_up([Connection("http://127.0.0.1:9")], 0.0)
    assert "vllm_server_" not in str(refused.value)


def test_no_proxy_stands_before_a_server_on_this_machine(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("NO_PROXY", "example.org")
    server.says = {"/v1/completions": COMPLETION}
    engine = ServerEngine(server.url, max_retries=0)
    assert len(list(engine.sample([Request([5], 0)], Sampling(8)))) == 1


def test_what_failed_is_asked_again_once_the_server_is_up_and_what_was_refused_is_not(server, pauses):
    lines: list[str] = []
    connection = Connection(server.url, Patience(max_retries=3), lines.append)
    firsts = []

    def ask(first):
        firsts.append(first)
        return connection.get("/weight_info")

    server.failures = {"/weight_info": 2}
    assert connection.persist(ask) == {"weight_version": "default"}
    assert server.asked == ["/weight_info", "/health", "/weight_info", "/health", "/weight_info"]
    assert (firsts, pauses) == ([True, False, False], [2, 4])
    assert [line.rpartition("; ")[2] for line in lines] == ["try 2 of 4 follows", "try 3 of 4 follows"]

    server.says = {"/weight_info": (400, "never")}
    server.asked = []
    with refuses(ServerError, "never"):
        connection.persist(ask)
    assert server.asked == ["/weight_info"]

    server.says = {"/weight_info": (500, "ever")}
    server.asked = []
    pauses.clear()
    with refuses(ServerUnavailableError, "ever", "4 times: max_retries)"):
        connection.persist(ask)
    assert server.asked.count("/weight_info") == 4
    assert pauses == [2, 4, 8]


def test_completions_whose_connection_broke_are_asked_for_again(server):
    server.says = {"/v1/completions": COMPLETION}
    engine = ServerEngine(server.url, concurrency=2, max_retries=1)
    server.failures = {"/v1/completions": 1}
    completions = dict(engine.sample([Request([5], seed) for seed in range(4)], Sampling(8)))
    assert sorted(completions) == [0, 1, 2, 3]
    assert set(completions.values()) == {("7", 2, False)}
    assert server.asked.count("/v1/completions") == 5

    server.says["/v1/completions"] = (500, "out of memory")
    with refuses(ServerUnavailableError, "out of memory", "1 times: max_retries)"):
        list(ServerEngine(server.url, max_retries=0).sample([Request([5], 0)], Sampling(8)))


def test_no_sample_of_weights_that_came_later_is_handed_over(server):
    engine = ServerEngine(server.url, concurrency=1)

    def complete(body):
        if body["seed"] == 2:
            server.version = "loading-next"
        return json.loads(COMPLETION[1])

    server.completes = complete
    got = []
    with refuses(ServerError, server.url, "'default'", "'loading-next'"):
        got.extend(position for position, _ in engine.sample([Request([5], seed) for seed in range(6)], Sampling(8)))
    assert got == [0, 1]
    with refuses(ServerError, server.url, "'loading-next'", "start it anew"):
        ServerEngine(server.url)


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        (lambda server: server.says.update({"/collective_rpc": (500, "out of memory")}), "loading-new"),
        (lambda server: server.failures.update({"/collective_rpc": 1}), "loading-new"),
        (lambda server: server.says.update({"/reset_prefix_cache": (500, "no")}), "loading-new"),
        (lambda server: setattr(server, "version", "loading-other"), "loading-other"),  # another run's load has begun
        (lambda server: setattr(server, "version", "other"), "other"),
    ],
    ids=["fails", "breaks", "cache", "another-loads", "another-loaded"],
)
def test_a_load_that_does_not_end_well_leaves_no_name_of_whole_weights(server, monkeypatch, fault, left):
    client = ServerClient(server.url)
    seen, answer = [], server.answer

    def spy(path, body):
        if path == "/collective_rpc":
            seen.append(server.version)
            fault(server)
        return answer(path, body)

    client.hold(Weights("old", Path("folder")), reload=True)
    monkeypatch.setattr(server, "answer", spy)
    with pytest.raises(ServerUnavailableError):
        client.hold(Weights("new", Path("folder")), reload=True)
    assert seen == ["loading-new"]
    assert client.weight_version() == left


def test_abandoned_requests_end_and_none_begins_until_they_are_allowed_again(server):
    connection = Connection(server.url, Patience(max_retries=5), report=lambda line: None)
    asked = in_thread(lambda: connection.persist(lambda first: connection.get("/v1/completions")))
    while "/v1/completions" not in server.asked:
        time.sleep(0.01)
    try:
        abandon_requests()
        for ask in (lambda: asked.result(60), lambda: connection.get("/weight_info"), lambda: pause(math.inf)):
            with pytest.raises(RequestAbandonedError):
                ask()
    finally:
        allow_requests()
    assert connection.get("/weight_info") == {"weight_version": "default"}
