"""A signal ends the request that a run waits for: the last whole step is saved at once, and the run can go on."""

import os
import signal
import threading
import time
from contextlib import ExitStack

import pytest

from dc_trl.run.interruption import RunInterrupted, StopSignals
from dc_trl.run.manifest import checkpoint_defect

from . import helpers
from .helpers import assert_same_weights, at_server, make_model, refuses, untimed_rows
from .stub_server import sampled, stub_server
from .vllm_server import requires_vllm


pytestmark = requires_vllm


class Hang:
    """Has servers answer until they are asked for one thing often enough; then a signal comes, and they hang."""

    def __init__(self, servers, path, number):
        self._path, self._left = path, number
        self._lock = threading.Lock()
        for server in servers:
            server.completes = sampled
            server.before = self

    def __call__(self, server, path):
        with self._lock:
            if path != self._path or self._left == 0:
                return
            self._left -= 1
            if self._left > 0:
                return
        time.sleep(0.3)  # the request is on its way by now, and so is whoever waits for it
        os.kill(os.getpid(), signal.SIGTERM)
        server.ended.wait()


def make_trainer(servers, output_dir, **options):
    fields = at_server(servers[0].url)
    if len(servers) > 1:
        fields |= {"vllm_server_base_url": None, "vllm_server_base_urls": [server.url for server in servers]}
    return helpers.make_trainer(output_dir, make_model(64), **fields | {"max_steps": 5} | options)


@pytest.fixture
def stubs():
    with ExitStack() as stack:
        yield [stack.enter_context(stub_server()) for _ in range(2)]


# Servers, the request that hangs and the how manieth of them it is, and the settings of the run. A load takes one for
# each server, after one that looks at the layers when the trainer is made and one when it meets the server.
CASES = {
    "rollout": (1, "/v1/completions", 4, {}),
    "reload-of-several": (2, "/collective_rpc", 9, {}),
    "ahead-of-several": (2, "/v1/completions", 4, {"rollout_overlap": True}),
}


@pytest.mark.parametrize(("number", "path", "count", "options"), CASES.values(), ids=CASES)
def test_a_signal_ends_the_request_and_the_run_goes_on_as_if_nothing_had_been(
    tmp_path, stubs, number, path, count, options
):
    servers = stubs[:number]
    Hang(servers, path, count)
    trainer = make_trainer(servers, tmp_path / "run", **options)
    with StopSignals() as signals:
        trainer.add_callback(signals)
        with refuses(RunInterrupted, "resume_from_checkpoint=") as stopped:  # the server itself never answers
            trainer.train()
    assert stopped.value.exit_code == 143
    done = trainer.state.global_step
    assert 0 < done < 5
    checkpoint = tmp_path / "run" / f"checkpoint-{done}"
    assert checkpoint_defect(checkpoint) is None

    with ExitStack() as stack:
        others = [stack.enter_context(stub_server()) for _ in servers]
        for server in others:
            server.completes = sampled
        resumed = make_trainer(others, tmp_path / "run", **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        whole = make_trainer(others, tmp_path / "whole", **options)
        whole.train()
    rows = [untimed_rows(trainer, after=done) for trainer in (resumed, whole)]
    for row in rows[0] + rows[1]:
        row.pop("entropy")  # TRL's mean of it is not the same to the last bit each time
    assert rows[0] == rows[1]
    assert_same_weights(resumed.model, whole.model)
