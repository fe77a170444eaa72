"""Whole runs in processes of their own: killed and resumed, and of two hosts."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from .helpers import (
    MISALIGNED,
    ROOT,
    read_json,
    read_rows,
    steps_of,
)


# Several processes, each of which takes half a minute of an idle machine, and minutes of a busy one.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS = {
    "aligned": {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
    "reused": MISALIGNED | {"num_iterations": 2},
    # The checkpoint that is resumed, of step 3, holds the weights that sample, and falls between two optimizer steps
    # of one generation batch, as with the paper's mini-batches.
    "lagging, misaligned": {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "weight_sync_steps": 6},
}
COMPARED = ("loss", "grad_norm", "reward", "discrepancy/mean", "lagrangian/lambda", "learning_rate")


def worker(*runs):
    """Makes runs one after the other, in one process."""
    command = [sys.executable, "-m", "tests.worker", *map(json.dumps, runs)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def finished(*runs):
    """The logs of runs that come to their end."""
    done = worker(*runs)
    assert done.returncode == 0, done.stderr[-3000:]
    return [read_json(Path(run["output_dir"], "logs.json")) for run in runs]


def compared(rows):
    return [{name: row[name] for name in ("step", *COMPARED) if name in row} for row in rows if "loss" in row]


class Runs(NamedTuple):
    folder: Path  # of the run that was killed and resumed
    left: set[str]  # what was there when it was killed
    whole: dict  # logs of an uninterrupted run, and of the resumed one
    resumed: dict


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By the names of `STEPS`. Only a kill needs a process of its own."""
    fields = {"max_steps": 9, "save_steps": 3, "deployment_scheme": "fp8", "dual_window": 3}
    fields |= {"lambda_lr": 5.0, "lr_scheduler_type": "linear"}
    folders = {name: tmp_path_factory.mktemp("runs") for name in STEPS}

    def of(kind):
        return [fields | STEPS[name] | {"output_dir": str(folder / kind)} for name, folder in folders.items()]

    wholes, killed = finished(*of("whole")), of("resumed")
    assert [worker(run | {"kill_in_save": 6}).returncode for run in killed] == [-signal.SIGKILL] * len(STEPS)
    left = []
    for folder in (Path(run["output_dir"]) for run in killed):
        left.append({str(path.relative_to(folder)) for path in folder.rglob("*")})
        (folder / "checkpoint-99").mkdir()
    resumed = finished(*(run | {"resume_from_checkpoint": "true"} for run in killed))
    found = zip([folder / "resumed" for folder in folders.values()], left, wholes, resumed, strict=True)
    return dict(zip(STEPS, map(Runs._make, found), strict=True))


@pytest.mark.parametrize("steps", STEPS)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(runs, steps):
    folder, left, whole, resumed = runs[steps]
    # Neither the checkpoint that the kill cut short nor an empty folder is the newest one to go on from.
    assert "logs.json" not in left
    assert "checkpoint-6/model.safetensors" in left
    assert ("checkpoint-3/sampler" in left) == ("weight_sync_steps" in STEPS[steps])

    assert compared(resumed["rows"]) == compared(whole["rows"])
    assert resumed["lambda"] == whole["lambda"]
    assert len({row["lagrangian/lambda"] for row in whole["rows"] if "lagrangian/lambda" in row}) > 1
    # The history file is continued, not doubled: steps 4 to 6 of the killed run were made again.
    history = read_rows(folder / "history.jsonl")
    assert steps_of(history) == list(range(1, 10))
    assert compared(history) == compared(whole["rows"])
    assert (folder / "run.png").stat().st_size > 10_000


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
