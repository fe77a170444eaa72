"""dc-trl doctor: what it finds is what others find, and what fails, hangs or is missing does not stop the rest."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dc_trl import calibrate
from dc_trl.doctor import probes
from dc_trl.doctor.block import Report, block, publishable
from dc_trl.doctor.checks import (
    DEFAULT_SCHEMES,
    KERNEL_SCHEMES,
    NO_VLLM,
    REPLICA_SCHEMES,
    SERVED_SCHEMES,
    Check,
    LeftOut,
    Result,
    Setup,
    plan_checks,
)
from dc_trl.doctor.command import main, make_parser
from dc_trl.doctor.run import ENDING, run_checks
from dc_trl.quantization.schemes import RESEARCH_BITS, SCHEMES
from dc_trl.serving.server import vllm_version

from .helpers import DEFAULT_SIGINT, ROOT, TINY_MODEL
from .vllm_server import alive, requires_vllm, wait_until_gone


SETUP = Setup(str(TINY_MODEL), "cpu", os.devnull, prompts=4, samples=4, tokens=12, repetitions=1, turns=3)
SECRET = "hf_abcdefghijklmnop1234"


def found_by(probe, scheme=None, setup=SETUP):
    """All that a probe finds, in this process."""
    found = {}
    for part in probe(setup, scheme):
        found |= part
    return found


# --- what is published


def report(results=(), **others):
    known = {
        "results": list(results),
        "seconds": 12.0,
        "minutes": 10.0,
        "model": "tiny",
        "log": "runs/doctor.log",
        "versions": {"torch": "2.13.0", "vllm": None},
        "system": "Linux",
        "variables": {},
    }
    return Report(**(known | others))


@pytest.fixture(scope="module")
def alice():
    """The environment of a user with a secret, and a home folder somewhere else than usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/data/people/alice")
        patch.setenv("USER", "alice")
        patch.setenv("LOGNAME", "alice")
        patch.setenv("MY_API_KEY", "open sesame 42")
        yield


PRIVATE = [
    "/data/people/alice/runs/x.py",
    "/data/people/alice",
    "/home/bob/.cache/thing",
    "/Users/carol/x",
    "/root/.netrc",
    "alice",
    "alice@somewhere",
    socket.gethostname(),
    "http://10.1.2.3:8000/v1",
    "open sesame 42",
    SECRET,
    "https://user:pass@host.org/path",
    "Bearer abcdef",
]
FORBIDDEN = re.compile(
    r"alice|/home/|/Users/|/root\b|bob|carol|10\.1\.2\.3|sesame|hf_abc|user:pass|abcdef|"
    rf"\b{re.escape(socket.gethostname())}\b"
)


@given(
    st.lists(st.sampled_from(PRIVATE), min_size=1, max_size=4),
    st.sampled_from([" ", ", ", "\n", " ('", "', '", " (", "): "]),
    st.sampled_from([field.name for field in fields(Report) if field.name not in ("seconds", "minutes")]),
)
def test_the_block_holds_nothing_private(alice, words, between, field):
    text = between.join(["", *words, ""])
    assert FORBIDDEN.search(text)
    of_device = {
        "load": 1.0,
        "cpu": text,
        "cores": 2,
        "memory_gb": 1.0,
        "build": text,
        "driver": text,
        "device": text,
        "note": text,
    }
    values = {
        "results": [
            Result("device", "passed", 1.0, "", of_device | {"devices": [text]}),
            Result("server:fp8", "failed", 2.0, text, {"format": text, "kernels": [text]}),
            Result("step", "left out", 0.0, text),
        ],
        "versions": {"torch": text},
        "variables": {"CUDA_VISIBLE_DEVICES": text},
    }
    shown = block(
        report(**{field: values.get(field, text)}) if field != "log" else report([values["results"][1]], log=text)
    )
    assert not FORBIDDEN.search(shown), shown
    assert shown.startswith("```text\n")
    assert shown.endswith("\n```")
    assert shown.count("```") == 2


def test_what_is_not_private_stays(alice):
    plain = "vLLM 0.31.0+cpu on 127.0.0.1:8000, driver 580.82.07, /dev/shm, /rooted/x, malice, cuda:0"
    assert publishable(plain) == plain
    assert publishable("see /data/people/alice/x.log") == "see ~/x.log"
    assert publishable("end ``` it") == "end ''' it"


def test_the_block_says_what_failed_and_what_was_left_out():
    results = [
        Result("import", "passed", 3.0),
        Result("server:fp8", "failed", 41.5, "ServerError: no kernel", {"start_seconds": 40.0}),
        Result("server:int8", "left out", reason=NO_VLLM),
        Result("server:int4", "left out", reason=NO_VLLM),
    ]
    lines = block(report(results)).splitlines()
    assert "1 passed, 1 failed, 2 left out" in lines[1]
    assert any(re.fullmatch(r"server:fp8 +failed +41\.5 +ServerError: no kernel", line) for line in lines)
    assert f"left out: server:int8, server:int4: {NO_VLLM}" in lines
    assert any("runs/doctor.log" in line for line in lines)
    assert "runs/doctor.log" not in block(report(results[:1]))


# --- what it measures


def test_the_names_are_those_of_the_schemes():
    assert SERVED_SCHEMES == SCHEMES
    assert set(REPLICA_SCHEMES) == set(RESEARCH_BITS)
    assert set(DEFAULT_SCHEMES) <= set(SCHEMES)


@pytest.mark.parametrize("scheme", KERNEL_SCHEMES)
def test_kernels_of_this_cpu_compute(scheme):
    error = found_by(probes.kernel, scheme)["relative_error"]
    assert error == 0 if scheme == "int8" else 0 < error < 0.01


def test_a_device_without_the_kernel_is_left_out():
    """The meta device has none of numbers: its product cannot be read."""
    with pytest.raises(LeftOut, match="PyTorch has no such product on meta: "):
        found_by(probes.kernel, "fp8", Setup(str(TINY_MODEL), "meta", os.devnull))


def test_the_replicas_mismatch_is_that_of_a_calibration(tokenizer):
    found = found_by(probes.replica, "fp8")
    policy = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.bfloat16)
    texts = [f"{17 * number + 5}+{29 * number + 11}=" for number in range(4)]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    sizes = {"samples": 4, "max_tokens": 12, "batch_prompts": 4}
    (engine,) = calibrate(policy, tokenizer, ["replica:fp8"], prompts, **sizes, split=False, progress=False).engines
    delta = engine.estimates["discrepancy"]
    assert found["discrepancy"] == delta.value > 1e-4
    assert found["interval"] == [delta.low, delta.high]
    assert found["k3"] == engine.estimates["k3_kl"].value
    assert found["tokens"] == engine.tokens
    assert found["sync_seconds"] > 0


def test_the_step_is_timed_with_and_without_the_constraint(caplog):
    found = found_by(probes.step)
    low, high = found["interval_of_turns"]
    assert 0 < low <= high
    assert 0.2 < found["ratio"] < 5
    assert found["turns"] == 3
    assert not [record for record in caplog.records if "discrepancy/k3_kl" in record.message]  # rollouts are near


@pytest.mark.parametrize(("count", "k"), [(3, 1), (6, 1), (8, 1), (9, 2), (10, 2), (20, 6)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(count, k):
    """The ranks k of tables of the sign test at 5 %, two-sided; fewer than 6 values have none."""
    values = random.Random(0).sample([float(number) for number in range(count)], count)
    assert probes.median_interval(values) == [k - 1, count - k]


def test_a_scheme_that_the_shapes_do_not_allow_is_left_out(tmp_path, tokenizer):
    from .helpers import make_model

    make_model(96).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    small = Setup(str(tmp_path), "cpu", os.devnull)
    assert found_by(probes.model, None, small)["multiple_of"] == 16  # of 96, 192 and 48
    with pytest.raises(LeftOut, match=r"shape: .*groups of 128, which do not divide the 96 inputs"):
        found_by(probes.replica, "fp8_block", small)


def test_the_kernels_that_vllm_names_in_its_log():
    log = (
        "(EngineCore pid=1) INFO [__init__.py:727] Selected CutlassFP8ScaledMMLinearKernel for "
        "CompressedTensorsW8A8Fp8\n(EngineCore pid=1) INFO [x.py:1] Using MarlinLinearKernel for "
        "CompressedTensorsWNA16\n"
        "INFO Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8\n"
    )
    assert probes.chosen_kernels(log) == [
        "CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8",
        "MarlinLinearKernel for CompressedTensorsWNA16",
    ]


# --- what goes wrong


def checks_of(*names, seconds=60.0):
    return [Check(name, f"tests.doctor_probes:{name}", seconds, least=0.0) for name in names]


def between_others(name):
    """A check with a short limit, for a process that runs already, and another one after it."""
    return [*checks_of("passes"), *checks_of(name, seconds=3.0), *checks_of("passes")]


@pytest.fixture
def at_root(monkeypatch, tmp_path):
    """A setup for probes of the tests, whose processes import them from here; they leave their ids at its `model`."""
    monkeypatch.chdir(ROOT)
    return Setup(str(tmp_path / "ids"), "cpu", str(tmp_path / "log"))


def test_what_raises_or_crashes_is_reported_and_the_rest_goes_on(at_root):
    names = ["passes", "raises", "passes", "is_killed", "exits", "passes", "passes"]
    results = list(run_checks(checks_of(*names), at_root, 300))
    assert [result.status for result in results] == [
        *("passed", "failed", "passed", "failed", "failed", "passed", "passed")
    ]
    reasons = {result.name: result.reason for result in results}
    assert reasons["raises"] == "LookupError: no kernel for this, key=(hidden)"
    assert reasons["is_killed"].startswith("its process was ended by SIGKILL")
    assert reasons["exits"] == "its process ended with exit code 3"
    assert [result.found.get("start_seconds") for result in results if result.status == "failed"] == [7.0, 8.0, None]
    # After a failure a process is fresh, else it is the same.
    of = [result.found["architecture"] for result in results if result.name == "passes"]
    assert len(set(of)) == 3
    assert of[2] == of[3]
    log = Path(at_root.log).read_text()
    assert "=== raises" in log
    assert 'raise LookupError("no kernel' in log


@pytest.mark.long
def test_what_hangs_is_ended_with_all_that_it_started(at_root):
    results = list(run_checks(between_others("hangs"), at_root, 300))
    assert [result.status for result in results] == ["passed", "failed", "passed"]
    assert results[1].reason == "Timeout: it had not ended after 3 s"
    assert results[1].found == {"start_seconds": 9.0}
    ids = map(int, Path(at_root.model).read_text().split())
    assert not alive([psutil.Process(pid) for pid in ids if psutil.pid_exists(pid)])


@pytest.mark.long
def test_what_hangs_and_hears_no_signal_is_ended_too(at_root):
    results = list(run_checks(between_others("hangs_deaf"), at_root, 300))
    assert [result.status for result in results] == ["passed", "failed", "passed"]
    ids = map(int, Path(at_root.model).read_text().split())
    assert not alive([psutil.Process(pid) for pid in ids if psutil.pid_exists(pid)])


@pytest.mark.long
def test_what_there_is_no_time_for_is_left_out(at_root):
    results = list(run_checks(checks_of("hangs", "passes"), at_root, ENDING + 3.0))
    assert [result.status for result in results] == ["left out", "left out"]
    assert re.fullmatch(r"no time: it was stopped after \d s", results[0].reason)
    assert results[1].reason.startswith("no time: 0 s were left")


@pytest.mark.parametrize(
    ("asked", "visible", "seen"),
    [
        ("cuda:1", "4,7", "cuda of 7"),
        ("cuda:1", None, "cuda of 1"),
        (None, "GPU-a,GPU-b", "cuda of GPU-a"),
        ("cpu", "4,7", "cpu of 4,7"),
    ],
)
def test_of_several_gpus_the_checks_see_one(at_root, monkeypatch, asked, visible, seen):
    """Else transformers trains on all of them, by torch's DataParallel."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    checks = [Check("device", "tests.doctor_probes:two_gpus", 60, least=0.0), *checks_of("sees")]
    *_, result = run_checks(checks, replace(at_root, device=asked), 300)
    assert result.found["device"] == seen


def test_what_needs_what_did_not_pass_is_left_out(at_root):
    later = Check("later", "tests.doctor_probes:passes", 60, after=("raises",))
    *_, result = run_checks([*checks_of("raises"), later], at_root, 300)
    assert (result.status, result.reason) == ("left out", "it needs 'raises', which did not pass")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--schemes fp9", "schemes: 'fp9' is unknown"),
        ("--minutes 0", "minutes=0"),
        ("--seed -1", "seed=-1"),
        ("--log there", "log='there' exists already"),
        ("--log new.log --json there", "json='there' exists already"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_at_once(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("mine")
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(words.split())
    assert Path("there").read_text() == "mine"


def test_the_commands_of_the_page_are_understood():
    page = (ROOT / "docs" / "doctor.md").read_text()
    commands = re.findall(r"^dc-trl doctor ?(.*)$", page, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        make_parser().parse_args(command.split())
    for check in plan_checks(SCHEMES):
        kind = check.name.partition(":")[0]
        assert re.search(rf"^\| `{kind}(:SCHEME)?` \|", page, re.MULTILINE), kind


# --- the whole


def doctor(folder, *words, python=sys.executable):
    """The script as a user starts it, in an empty directory."""
    command = [python, "-m", "dc_trl", "doctor", "--log", "doctor.log", "--json", "doctor.json"]
    return subprocess.Popen(
        [*DEFAULT_SIGINT, *command, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def results_in(folder):
    found = json.loads((folder / "doctor.json").read_text())["results"]
    return {result["name"]: result for result in found}


@pytest.fixture
def without_vllm(tmp_path):
    """The interpreter of an environment with the installed packages, as links, but for vLLM."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", tmp_path / "venv"], check=True)
    (ours,) = {path for path in map(Path, sys.path) if (path / "trl").is_dir()}
    (theirs,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for path in ours.iterdir():
        if not path.name.lower().startswith("vllm"):
            (theirs / path.name).symlink_to(path)
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.mark.long
def test_pytorch_alone(tmp_path, without_vllm):
    """Real checks in an interpreter that has no vLLM: all that does not need it passes."""
    process = doctor(tmp_path, "--schemes", "fp8", "fp8_block", "int3", python=without_vllm)
    shown, _ = process.communicate(timeout=280)
    assert process.returncode == 0, shown
    results = results_in(tmp_path)
    left_out = {name: result["reason"] for name, result in results.items() if result["status"] == "left out"}
    assert left_out.keys() == {"kernel:fp8_block", "kernel:int3", "server:fp8", "server:fp8_block", "server:int3"}
    assert left_out["server:fp8"] == left_out["server:fp8_block"] == NO_VLLM
    assert {result["status"] for result in results.values()} == {"passed", "left out"}
    assert f"left out: server:fp8, server:fp8_block: {NO_VLLM}" in shown
    assert re.search(r"^absent .*\bvllm\b", shown, re.MULTILINE)
    assert str(Path.home()) not in shown.partition("```text")[2]
    # Three bits say less than eight.
    assert results["replica:int3"]["found"]["discrepancy"] > 3 * results["replica:fp8"]["found"]["discrepancy"]


@pytest.mark.long
def test_a_model_that_is_not_there_fails_and_the_machine_is_described(tmp_path):
    process = doctor(tmp_path, "--model", "nowhere/at_all", "--schemes", "fp8", "--no_servers")
    shown, _ = process.communicate(timeout=280)
    assert process.returncode == 1
    statuses = {name: result["status"] for name, result in results_in(tmp_path).items()}
    assert statuses == {
        **dict.fromkeys(("device", "kernel:fp8", "import"), "passed"),
        "model": "failed",
        **dict.fromkeys(("replica:fp8", "step", "server:fp8"), "left out"),
    }
    assert "it needs 'model', which did not pass" in shown
    assert "Traceback" in (tmp_path / "doctor.log").read_text()
    assert f"{os.cpu_count()} cores" in shown


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_it_leaves_nothing_behind_when_it_is_stopped(tmp_path, how):
    process = doctor(tmp_path, "--no_servers")
    for line in process.stdout:
        if line.startswith("kernel:int4"):  # the import is under way
            break
    time.sleep(0.5)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(how)
    shown, _ = process.communicate(timeout=60)
    wait_until_gone(family)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "stopped by Ctrl-C" in shown
        assert results_in(tmp_path)["kernel:fp8"]["status"] == "passed"


@pytest.mark.long
@pytest.mark.timeout(600)
@requires_vllm
def test_a_real_server(at_root):
    wanted = ["device", "import", "model", "replica:fp8", "server:fp8"]
    checks = [check for check in plan_checks(["fp8"]) if check.name in wanted]
    results = {result.name: result for result in run_checks(checks, replace(at_root, model=str(TINY_MODEL)), 540)}
    assert [(name, result.status) for name, result in results.items()] == [(name, "passed") for name in wanted]
    server, replica = (results[f"{kind}:fp8"].found for kind in ("server", "replica"))
    assert server["vllm"] == vllm_version()
    assert "Fp8" in server["format"]
    # One number format: alike but for the samples. New weights are far from the old ones.
    assert replica["discrepancy"] / 4 < server["discrepancy"] < 4 * replica["discrepancy"]
    assert server["after_reload"] < server["to_old_weights"] / 3
    assert min(server["reload_seconds"], server["write_seconds"]) > 0
    assert "up after" in block(report(results.values()))
