"""What two processes make of a fault that only one of them meets, and what is asked of a server again."""

import errno
import gc
import os

import pytest

from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.serving.errors import ServerError

from . import helpers
from .helpers import TWO_SHARDED, at_server, make_model, read_json, refuses, succeed
from .stub_server import completions, sampled, stub_server
from .vllm_server import requires_vllm


pytestmark = [requires_vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of two processes saw; one that waits for the other for good ends this with an error."""
    folder = tmp_path_factory.mktemp("faults")
    with stub_server() as server:
        succeed([*TWO_SHARDED, "-m", "tests.fault_worker", server.url, str(folder)], timeout=1200)
    first, second = read_json(folder / "seen.json")
    assert first == second
    return first | {"folder": folder}


@pytest.mark.long
def test_a_stream_that_breaks_on_one_process_is_an_error_on_both_and_hangs_neither(seen):
    (naming, start, update, reset, nccl, healthy), names = zip(*seen["ends"], strict=True)
    assert "/update_weight_version" in naming
    assert "/start_weight_update" in start
    assert "/update_weights" in update
    assert "/reset_prefix_cache" in reset
    assert "weight_sync='nccl'" in nccl
    assert healthy == "synchronized"
    # Weights that may have been sent in part have no name of weights that are whole.
    assert names[1:] == ("loading-NAME",) * 4 + ("NAME",)


@pytest.mark.long
def test_a_checkpoint_that_one_process_cannot_write_is_an_error_on_both_and_hangs_neither(seen):
    memory, disk, healthy = seen["writes"]
    assert "OutOfMemoryError: CUDA out of memory" in memory
    assert "weight_sync_dir=None" in disk
    assert healthy == "written"


@pytest.mark.long
def test_an_export_and_weights_that_fail_on_one_process_are_an_error_on_both_and_hang_neither(seen):
    export, weights = seen["files"]
    assert os.strerror(errno.ENOSPC) in export
    assert os.strerror(errno.ENOENT) in weights


@pytest.mark.long
def test_a_server_that_hangs_is_given_up_before_the_other_process_stops_waiting(seen):
    assert all(words in seen["hung"] for words in ("/v1/completions", "ddp_timeout", "same command"))


def make_trainer(url, output_dir, **options):
    return helpers.make_trainer(output_dir, make_model(64), **at_server(url) | options)


def test_first_requests_that_break_are_sent_again(tmp_path, no_pauses):
    paths = ("/v1/models", "/server_info", "/collective_rpc")
    with stub_server() as server:
        server.failures = dict.fromkeys(paths, 1)
        assert make_trainer(server.url, tmp_path).vllm_generation.vllm_client.model == "stub"
        assert server.failures == dict.fromkeys(paths, 0)


def test_tokens_are_read_without_the_garbage_collector(tmp_path):
    """It took more than half of the time in which 64 × 8,192 tokens are parsed, and two thirds of their unpickling."""
    collects = []
    with stub_server() as server:
        server.completes = lambda body: collects.append(gc.isenabled()) or sampled(body)
        make_trainer(server.url, tmp_path, max_steps=1).train()
    assert collects
    assert not any(collects)
    assert gc.isenabled()


def test_a_later_turn_asks_a_server_for_no_more_than_there_is_room_for(tmp_path):
    """vLLM refuses a request whose prompt and max_tokens exceed its context, which here is 4096 (TokenizeParams)."""
    with stub_server() as server:
        trainer = make_trainer(server.url, tmp_path, max_completion_length=8)
        server.completes = sampled
        first = trainer.vllm_generation.generate([[5] * 4088], None, 1)
        later = trainer.vllm_generation.generate([[5] * 4093, [5] * 4087], None, 1)
    assert len(first[1]) == 1
    assert len(later[1]) == 2
    asked = [(len(*body["prompt"]), body["max_tokens"]) for body in server.bodies]
    assert asked[0] == (4088, 8)
    assert sorted(asked[1:]) == [(4087, 8), (4093, 3)]


@pytest.mark.parametrize("asked", [None, {"ignore_eos": True}])
def test_what_a_server_samples_after_an_end_token_is_left_out_unless_it_was_asked_for(tmp_path, caplog, asked):
    """As TRL does for model.generate: both of the model's end tokens count, of which the tokenizer knows one."""
    model = make_model(64)
    model.generation_config.eos_token_id = [1, 30]
    rows = [[20, 1, 21, 22], [20, 30, 1], [20, 21, 1], [20, 21, 22, 23]]
    seen = []

    def reward(completion_ids, **kwargs):
        seen.extend(completion_ids)
        return [0.0, 1.0] * (len(completion_ids) // 2)

    with stub_server() as server:
        server.completes = lambda body: completions(body["prompt"] * 4, rows, None)
        fields = {"max_steps": 1, "max_completion_length": 4, "generation_kwargs": asked}
        helpers.make_trainer(tmp_path, model, reward, **at_server(server.url) | fields).train()
    kept = rows if asked else [[20, 1], [20, 30], [20, 21, 1], [20, 21, 22, 23]]
    assert seen == kept * (len(seen) // 4)
    assert ("after an end token" in caplog.text) is (asked is None)


def test_a_server_that_is_restarted_while_it_gets_weights_gets_them_again(tmp_path, caplog):
    """It names its weights twice, before and after it loads them: the third name is of the second load."""
    named = 0

    def restart(server, path):
        nonlocal named
        named += path == "/update_weight_version"
        if path == "/update_weight_version" and named == 3:
            server.failures, server.version = {path: 1}, "default"
            server.asked.clear()

    with stub_server() as server:
        server.completes = sampled
        server.before = restart
        trainer = make_trainer(server.url, tmp_path, max_steps=2)
        trainer.train()
    assert "broke during /update_weight_version" in caplog.text
    assert "/collective_rpc" in server.asked[: server.asked.index("/v1/completions")]
    assert server.version == trainer.vllm_generation.weight_version


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.5},
            ["http://127.0.0.1:9", "correct vllm_server_base_url"],
        ),
        ({"vllm_server_base_url": "127.0.0.1:8000"}, ["'127.0.0.1:8000' is not an address", "use http://HOST:PORT"]),
        ({"vllm_server_base_url": "http://127.0.0.1:8000/v1/"}, ["is not an address", "without /v1"]),
        ({"deployment_scheme": "fp8"}, ["deployment_scheme='fp8'", "not quantized", "set the scheme that it has"]),
        ({"vllm_max_model_length": 9999}, ["takes 4096 tokens", "9999"]),
    ],
    ids=["nobody", "address", "openai", "format", "length"],
)
def test_a_server_that_does_not_fit_is_refused(tmp_path, options, words):
    with stub_server() as server, refuses(ServerError, *words):
        make_trainer(server.url, tmp_path, **{"vllm_server_timeout": 60.0, "vllm_max_retries": 0} | options)


def test_a_full_disk_of_the_weights_is_named_with_what_they_take(tmp_path, monkeypatch):
    """The file system's own word, at the first byte of the weights of the second step."""
    (tmp_path / "sync").mkdir()
    left = tmp_path / "run" / "checkpoint-1"  # of a run that was left: not what this one has reached
    left.mkdir(parents=True)
    (left / "trainer_state.json").write_text("{}")
    with stub_server() as server:
        server.completes = sampled
        options = {"weight_sync_dir": str(tmp_path / "sync"), "vllm_max_retries": 0}
        trainer = make_trainer(server.url, tmp_path / "run", **options)
        write, written = CheckpointWriter.write, []

        def full(self, *args):
            written.append(args)
            if len(written) > 1:
                with open("/dev/full", "w", buffering=1) as disk:
                    disk.write("a weight\n")
            return write(self, *args)

        monkeypatch.setattr(CheckpointWriter, "write", full)
        named = f"weight_sync_dir='{options['weight_sync_dir']}'"
        with refuses(ServerError, named, os.strerror(errno.ENOSPC), "checkpoint-1'"):
            trainer.train()
        monkeypatch.undo()
        resumed = make_trainer(server.url, tmp_path / "run", max_steps=2)
        resumed.train(resume_from_checkpoint=str(left))
    assert resumed.state.global_step == 2
