import gc
import os
import subprocess


# Before torch is imported: tests run beside each other's subprocesses on few cores, and never reach a Hub.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
from hypothesis import settings


# Speed belongs in benchmarks: two cores that also serve a model are slow now and then.
settings.register_profile("dc_trl", deadline=None)
settings.load_profile("dc_trl")


@pytest.hookimpl(tryfirst=True)  # -m is read in the same hook
def pytest_collection_modifyitems(items):
    # `make test` runs those with the mark beside the others, one after the other: they share a server, and they count
    # processes and folders.
    for item in items:
        needs = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
        if "fp8_server" in item.fixturenames or any(reason.startswith("vLLM") for reason in needs):
            item.add_marker(pytest.mark.vllm)


def pytest_collection_finish():
    # Imported where tests are collected: the process that hands them to others needs no engine, which takes seconds.
    import torch

    torch.set_num_threads(1)
    # accelerate collects garbage whenever a training begins. In all that the tests import there is none, and looking
    # through it takes half a second each time, most of what a training of the tests takes.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer():
    from tests.helpers import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def fp8_server(tmp_path_factory):
    """The tiny model in FP8, served by dc-trl serve for the whole session; `url` is its address."""
    from tests.vllm_server import Serve

    server = Serve(tmp_path_factory.mktemp("fp8_server"), "--scheme", "fp8", "--max_model_len", "256")
    server.url = server.url()
    yield server
    server.end()


@pytest.fixture
def no_pauses(monkeypatch):
    """Nothing waits between two tries."""
    monkeypatch.setattr("dc_trl.serving.connection.pause", lambda seconds: None)


@pytest.fixture
def seen_by_the_loss(monkeypatch):
    """Inputs of every call of TRL's loss, as they are when it returns."""
    from trl import GRPOTrainer  # takes seconds

    inputs_seen = []
    compute_loss = GRPOTrainer._compute_loss

    def spy(self, model, inputs):
        loss = compute_loss(self, model, inputs)
        inputs_seen.append(dict(inputs))
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", spy)
    return inputs_seen


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a trainer may still hold it
