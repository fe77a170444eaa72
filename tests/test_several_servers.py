"""Training on two real vLLM servers: one weight version at each batch, and a batch that survives one of them."""

import time
from threading import Thread

import httpx
import pytest
from transformers import TrainerCallback

from dc_trl.serving.server import VLLMServer

from . import helpers
from .gaps import PROMPTS, mean_gap
from .helpers import TINY_MODEL, assert_finite, at_server, distinct_characters, logged, tiny_model
from .stub_server import Router, stub_server
from .vllm_server import complete, engine_processes, requires_vllm, wait_until_gone


pytestmark = [requires_vllm, pytest.mark.long]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers of the shipped model in BF16, which start at the same time."""
    folder = tmp_path_factory.mktemp("servers")
    # On AMX, oneDNN's products in bfloat16 depend on the number of rows, so on how the prompts are distributed.
    options = {"max_model_len": 256, "environment": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}}
    both = [VLLMServer(TINY_MODEL, log_path=folder / f"log-{number}", **options) for number in range(2)]
    threads = [Thread(target=server.start) for server in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield both
    for server in both:
        server.stop()


def make_trainer(servers, output_dir, reward=None, **options):
    fields = at_server(None) | {"vllm_server_base_urls": [server.url for server in servers]}
    fields |= {"vllm_server_timeout": 120.0, "vllm_request_timeout": 120.0, "max_completion_length": 100}
    fields |= {"generation_kwargs": {"ignore_eos": True}, "learning_rate": 3e-3, "per_device_train_batch_size": 16}
    return helpers.make_trainer(output_dir, tiny_model(), reward, **fields | options)


def version_of(server):
    return httpx.get(f"{server.url}/weight_info", timeout=30).json()["weight_version"]


class Watch(TrainerCallback):
    """What the servers hold at the end of each step, and what is done there."""

    def __init__(self, trainer, servers, killed, **actions):
        self.trainer, self.servers, self.killed, self.actions = trainer, servers, killed, actions
        self.versions, self.answered = [], []

    def on_step_end(self, args, state, control, **kwargs):
        client = self.trainer.vllm_generation.vllm_client
        # A killed process has its id, and its sockets, until the kernel is done with it.
        killed = {None, *(process.pid for process in self.killed)}
        living = [server for server in self.servers if server.pid not in killed]
        self.versions.append({version_of(server) for server in living})
        assert self.versions[-1] == {self.trainer.vllm_generation.weight_version}
        self.answered.append([server.answered for server in client.servers])
        self.actions.get(f"after_{state.global_step}", lambda: None)()


def kill_in_next_rollout(trainer, number, server):
    """Kills a server when a prompt of the next rollout is at its engine, which is stopped: it cannot have answered."""
    connection = trainer.vllm_generation.vllm_client.servers[number].connection
    request = connection.arequest
    processes = engine_processes(server)

    def kill():
        time.sleep(0.5)
        for process in processes:
            process.kill()

    def send(method, path, **kwargs):
        if path == "/v1/completions":
            connection.arequest = request
            for process in processes[1:]:
                process.suspend()
            Thread(target=kill).start()
        return request(method, path, **kwargs)

    connection.arequest = send
    return processes


def test_a_run_loses_a_server_in_a_rollout_and_takes_it_up_again(servers, tmp_path, caplog):
    trainer = make_trainer(servers, tmp_path, max_steps=6)
    untrained = tiny_model()
    gone = []

    def restart():
        servers[1].stop()
        wait_until_gone(gone)
        servers[1].start()
        assert version_of(servers[1]) == "default"
        # The first request of a server takes it seconds, in which the other one would answer its prompts.
        complete(servers[1].url, PROMPTS[:1], max_tokens=8)

    kill = lambda: gone.extend(kill_in_next_rollout(trainer, 1, servers[1]))  # noqa: E731
    watch = Watch(trainer, servers, gone, after_2=kill, after_4=restart)
    trainer.add_callback(watch)
    trainer.train()
    assert trainer.state.global_step == 6
    assert_finite(trainer)
    assert len(set.union(*watch.versions)) == 6
    # 4 prompts a batch, of the same expected length: two for each, and all for the one that is left.
    assert watch.answered == [[2, 2], [4, 4], [8, 4], [12, 4], [14, 6], [16, 8]]
    assert logged(trainer, "completions/mean_length") == [100] * 6
    assert f"{servers[1].url} gets no prompts" in caplog.text
    assert f"vLLM at {servers[1].url} is back" in caplog.text
    # Both hold what was trained; with the weights that the restarted one was started with, batches would be far off.
    for server in servers:
        trainer.vllm_generation.sync_weights()
        served = complete(server.url, PROMPTS, max_tokens=32, ignore_eos=True)
        assert 3 * mean_gap(served, trainer.model, "bf16") < mean_gap(served, untrained, "bf16")
    stale = mean_gap(complete(servers[0].url, PROMPTS, max_tokens=64, ignore_eos=True), untrained, "bf16")
    assert max(logged(trainer, "discrepancy/mean")) < stale / 3


def test_a_router_before_them_gives_the_same_completions(servers, tmp_path, caplog):
    runs = []
    with stub_server(Router([server.url for server in servers])) as router:
        foreign = {"url": f"{servers[1].url}/update_weight_version", "json": {"new_version": "another run's"}}
        # In the second rollout, of four prompts.
        router.before = lambda *_: len(router.sessions) == 6 and httpx.post(**foreign)
        for fields in ({}, {"vllm_server_base_url": router.url}):
            seen = []

            def reward(completions, seen=seen, **kwargs):
                seen.append(completions)
                return distinct_characters(completions)

            trainer = make_trainer(servers, tmp_path, reward, max_steps=3, **fields)
            trainer.train()
            runs.append(seen)
    assert runs[0] == runs[1]
    assert f"{servers[1].url} lost" in caplog.text
    assert len(router.sessions) == 16  # with the second rollout again
    assert {version_of(server) for server in servers} == {trainer.vllm_generation.weight_version}
