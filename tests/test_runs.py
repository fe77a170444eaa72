"""Whole runs in processes of their own: killed and resumed, and divided among processes."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from .helpers import ROOT


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
