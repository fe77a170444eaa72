"""dc-trl doctor: what fails, hangs or is missing does not stop the rest, and the block holds nothing private."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dc_trl.command import doctor as run
from dc_trl.command import doctor_checks as smoke
from dc_trl.command.doctor import Check, Result, Setup, block, bottom_line, facts, plan_checks, run_checks

from .helpers import DEFAULT_SIGINT, ROOT, TINY_MODEL, refuses, takes_minutes
from .test_gate import diverged, saved
from .vllm_server import requires_vllm, wait_until_gone


SECRET = "hf_abcdefghijklmnop1234"


# --- what is published


def test_the_block_holds_nothing_private(monkeypatch):
    monkeypatch.setenv("HOME", "/data/people/alice")
    monkeypatch.setenv("MY_API_KEY", "open sesame 42")
    text = f"/data/people/alice/runs/x.py ('/home/bob/.cache'): /Users/carol/x, {socket.gethostname()} open sesame 42"
    text += f" {SECRET}\nhttps://user:pass@host.org/path ``` Bearer abcdef"
    results = [
        Result("device", "passed", 1.0, "", {"GPU 0": text, "note": text}),
        Result("server:fp8", "failed", 2.0, text, {"vLLM": text}),
    ]
    shown = block(results, {"packages": text}, text)
    cut = block([Result("device", "failed", 1.0, f"{'x' * 290} open sesame 42")], {}, "")
    assert "open" not in cut  # nor a part of a secret, where a long reason is cut
    private = ["alice", "/home/", "/Users/", "bob", "carol", "sesame", "hf_abc", "user:pass", "abcdef"]
    assert not [word for word in [*private, socket.gethostname()] if word in shown]
    assert shown.startswith("```text\n")
    assert shown.endswith("\n```")
    assert shown.count("```") == 2


def test_the_block_says_what_works_and_what_failed():
    results = [
        Result("device", "passed", 3.0),
        Result("step:fp8", "passed", 3.0),
        Result("server:fp8", "failed", 41.5, "ServerError: no kernel", {"vLLM": "0.31.0"}),
    ]
    shown = block(results, facts(), "runs/doctor.log")
    assert re.search(r"^packages: dc_trl .*torch \d", shown, re.MULTILINE)
    assert "\nserver:fp8: failed in 41.5 s: ServerError: no kernel; vLLM 0.31.0\n" in shown
    assert bottom_line(results) in shown
    assert bottom_line(results) == (
        "bottom line: trains with the replica in fp8; does not train with a vLLM server; failed: server:fp8"
    )
    assert "log: runs/doctor.log" in shown
    assert "log: runs/doctor.log" not in block(results[:1], {}, "runs/doctor.log")


# --- what it tries


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """The folder of what a check leaves behind in this process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def found_by(probe, scheme, model=TINY_MODEL):
    """All that a check finds, in this process."""
    found = {}
    for part in probe(Setup(str(model), "cpu", os.devnull), scheme):
        found |= part
    return found


def test_the_machine_is_described():
    found = found_by(smoke.devices, None)
    assert found["computes on"] == "cpu"
    assert re.search(r", \d+ cores, \d+\.\d GB$", found["processor"])


def test_a_step_trains_and_samples_with_the_new_weights():
    coarse, fine = (found_by(smoke.step, scheme) for scheme in ("int4", "bf16"))
    assert float(coarse["δ̄"]) > 3 * float(fine["δ̄"])
    assert float(fine["after new weights"]) < 0.05


def test_an_engine_that_keeps_old_weights_fails():
    with refuses(RuntimeError, "old weights"):
        list(smoke.step(Setup(str(TINY_MODEL), "cpu", os.devnull), "bf16", weight_sync_steps=2))


def test_numbers_that_are_not_finite_fail(tmp_path, monkeypatch):
    """Of the model, and after a step that float32 cannot hold: no comparison takes NaN for small."""
    monkeypatch.setattr(smoke, "_LEARNING_RATE", 1e38)
    with pytest.raises((ArithmeticError, RuntimeError)):
        found_by(smoke.step, "bf16")
    with refuses(ValueError, "norm.weight is not finite"):
        found_by(smoke.step, "bf16", saved(tmp_path / "model", diverged()))


# --- what goes wrong


def checks_of(*names, seconds=60.0):
    return [Check(name, f"tests.doctor_probes:{name}", seconds) for name in names]


@pytest.fixture
def at_root(monkeypatch, tmp_path):
    """A setup for probes of the tests, whose processes import them from here."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    yield Setup(str(TINY_MODEL), "cpu", str(tmp_path / "log"))
    assert not list((tmp_path / "temporary").iterdir())


def test_what_raises_or_crashes_is_reported_and_the_rest_goes_on(at_root):
    results = list(run_checks(checks_of("raises", "is_killed", "exits", "passes"), at_root))
    assert [result.status for result in results] == ["failed", "failed", "failed", "passed"]
    assert [result.reason for result in results[:3]] == [
        "LookupError: no kernel\nfor this, key=abcdefgh12345678",
        "its process ended with exit code -9",
        "its process ended with exit code 3",
    ]
    assert [result.found for result in results[:3]] == [{"litter": "made"}, {"start": 8.0}, {}]
    log = Path(at_root.log).read_text()
    assert "=== raises" in log
    assert 'raise LookupError("no kernel' in log


@pytest.mark.long
def test_what_hangs_is_ended(at_root, monkeypatch):
    """Also where it does not hear SIGTERM."""
    monkeypatch.setattr(run, "_GRACE", 3.0)
    results = list(run_checks([*checks_of("hangs", seconds=20.0), *checks_of("passes")], at_root))
    assert [result.status for result in results] == ["failed", "passed"]
    assert results[0].reason == "its process had not ended after 20 s"
    assert not psutil.pid_exists(results[0].found["process"])


# --- the whole


def doctor(folder, *words):
    """The script as a user starts it, in an empty directory."""
    command = [sys.executable, "-m", "dc_trl", "doctor", "--log", "doctor.log"]
    return subprocess.Popen(
        [*DEFAULT_SIGINT, *command, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def statuses_in(shown):
    """How each check ended, as the block says it."""
    lines = re.finditer(r"^(\S+): (passed|failed) in ", shown.partition("```text")[2], re.MULTILINE)
    return {line[1]: line[2] for line in lines}


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_it_leaves_nothing_running_when_it_is_stopped(tmp_path, how, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = doctor(tmp_path, "--no_servers")
    for line in process.stdout:
        if line.startswith("device: passed"):  # the next check is under way
            break
    family: list[psutil.Process] = []
    while not family:
        assert process.poll() is None
        time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    shown, _ = process.communicate(timeout=200)
    wait_until_gone(family)
    if how == signal.SIGINT:  # what a killed one leaves goes with the next run
        assert not list(temporary.iterdir())
        assert process.returncode == 130
        assert "stopped by Ctrl-C" in shown
        assert statuses_in(shown)["device"] == "passed"


@takes_minutes
@requires_vllm
def test_a_real_server(at_root, tmp_path, monkeypatch):
    """vLLM is more exact than the format, and has the new weights after the first step."""
    (check,) = (check for check in plan_checks(["int8"]) if check.name == "server:int8")
    (result,) = run_checks([check], at_root)
    assert result.status == "passed", result
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server, replica = result.found, found_by(smoke.step, "int8")
    for name in ("δ̄", "after new weights"):
        assert float(replica[name]) / 4 < float(server[name]) < 4 * float(replica[name])
