"""Whole runs in processes of their own: killed and resumed, and divided among processes."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from .helpers import ROOT, TWO_PROCESSES


# Several processes, each of which takes half a minute of an idle machine, and minutes of a busy one.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS = {
    "aligned": {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
    "reused": {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 2},
    # The checkpoint that is resumed, of step 3, holds the weights that sample, and falls between two optimizer steps
    # of one generation batch, as with the paper's mini-batches.
    "lagging, misaligned": {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "weight_sync_steps": 6},
}
COMPARED = ("loss", "grad_norm", "reward", "discrepancy/mean", "lagrangian/lambda", "learning_rate")


def run(options, launcher=(), **kwargs):
    command = [*launcher, "-m", "tests.worker", json.dumps(options)]
    if not launcher:
        command.insert(0, sys.executable)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, **kwargs)


def finished(options, **kwargs):
    done = run(options, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    with open(os.path.join(options["output_dir"], "logs.json")) as file:
        return json.load(file)


def compared(rows):
    return [{name: row[name] for name in ("step", *COMPARED) if name in row} for row in rows if "loss" in row]


@pytest.mark.parametrize("steps", STEPS)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path, steps):
    options = {
        **STEPS[steps],
        "max_steps": 9,
        "save_strategy": "steps",
        "save_steps": 3,
        "deployment_scheme": "fp8",
        "dual_window": 3,
        "lambda_lr": 5.0,
        "lr_scheduler_type": "linear",
    }
    whole = finished(options | {"output_dir": str(tmp_path / "whole")})
    resumed = options | {"output_dir": str(tmp_path / "resumed")}
    assert run(resumed | {"kill_in_save": 6}).returncode == -signal.SIGKILL
    assert not (tmp_path / "resumed" / "logs.json").exists()
    # Neither the checkpoint that the kill cut short nor an empty folder is the newest one to go on from.
    assert (tmp_path / "resumed" / "checkpoint-6" / "model.safetensors").is_file()
    (tmp_path / "resumed" / "checkpoint-99").mkdir()
    assert (tmp_path / "resumed" / "checkpoint-3" / "sampler").exists() == ("weight_sync_steps" in options)
    logs = finished(resumed | {"resume_from_checkpoint": "true"})

    assert compared(logs["rows"]) == compared(whole["rows"])
    assert logs["lambda"] == whole["lambda"]
    assert len({row["lagrangian/lambda"] for row in whole["rows"] if "lagrangian/lambda" in row}) > 1
    # The history file is continued, not doubled: steps 4 to 6 of the killed run were made again.
    history = [json.loads(line) for line in (tmp_path / "resumed" / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history if "loss" in row] == list(range(1, 10))
    assert compared(history) == compared(whole["rows"])
    assert (tmp_path / "resumed" / "run.png").stat().st_size > 10_000


MINI_BATCHES = {"steps_per_generation": 2, "gradient_accumulation_steps": 1}
ACROSS_GROUPS = {"advantage_estimator": "rloo", "drop_zero_std_groups": True}


@pytest.mark.parametrize(
    ("reduction", "steps", "fields"),
    [
        ("token", MINI_BATCHES, ACROSS_GROUPS),
        ("sequence", {}, {"rollout_correction": "icepop"}),
    ],
)
def test_two_processes_equal_one(tmp_path, reduction, steps, fields):
    options = {"rollouts": True, "max_steps": 4, "batch_reduction": reduction, "lambda_lr": 0.5, **steps, **fields}
    # With mini-batches, which rollouts share one differs with the number of processes; the weights then stand still.
    options["learning_rate"] = 0.0 if steps else 1e-2
    one = finished(options | {"output_dir": str(tmp_path / "one"), "per_device_train_batch_size": 8})
    two = finished(
        options | {"output_dir": str(tmp_path / "two"), "per_device_train_batch_size": 4}, launcher=TWO_PROCESSES
    )
    assert two["kind"].endswith("MULTI_CPU")
    assert len(two["lambda"]) == 2
    assert two["lambda"][0] == two["lambda"][1] == pytest.approx(one["lambda"][0], rel=1e-5)
    metrics = [name for name in one["rows"][0] if name.startswith(("discrepancy/", "lagrangian/", "correction/"))]
    assert len(metrics) == (26 if "rollout_correction" in fields else 18)
    for single, double in zip(one["rows"], two["rows"], strict=True):
        if "discrepancy/mean" not in single:
            continue
        assert {m: double[m] for m in metrics} == pytest.approx({m: single[m] for m in metrics}, rel=1e-3, abs=1e-6)
        if not steps:
            assert double["loss"] == pytest.approx(single["loss"], rel=1e-3, abs=1e-5)


def test_two_processes_sample_from_their_replicas(tmp_path):
    options = {"max_steps": 3, "lambda_lr": 0.5}
    logs = {
        scheme: finished(
            options | {"output_dir": str(tmp_path / scheme), "deployment_scheme": scheme}, launcher=TWO_PROCESSES
        )
        for scheme in ("bf16", "int4")
    }
    for scheme in logs:
        assert logs[scheme]["lambda"][0] == logs[scheme]["lambda"][1]
        logs[scheme] = [row for row in logs[scheme]["rows"] if "discrepancy/mean" in row]
    # A replica that missed an update of the weights, on either process, would be further off than rounding.
    assert all(0 < row["discrepancy/probs_diff_max"] < 0.05 for row in logs["bf16"])
    for rounded, quantized in zip(logs["bf16"], logs["int4"], strict=True):
        assert quantized["discrepancy/mean"] > 2 * rounded["discrepancy/mean"]


def test_colocated_engines_of_two_hosts_share_a_directory(tmp_path):
    (tmp_path / "dc_trl-sync-elsewhere_run-0").mkdir()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.colocate_worker", tmp_path],
            cwd=ROOT,
            # As torchrun --nnodes 2 --nproc_per_node 1 sets it.
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [host.communicate(timeout=600) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], ended[0][1] + ended[1][1]
    assert len({output for output, _ in ended}) == 2
