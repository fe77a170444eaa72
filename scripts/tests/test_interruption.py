"""Runs that get SIGINT or SIGTERM: real signals to real processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from dc_trl.run.manifest import checkpoint_defect
from tests.helpers import DEFAULT_SIGINT, ROOT, TWO_PROCESSES, load_script, read_json, read_rows, refuses


# Processes that import torch and TRL, or train, on a machine that may have other work.
LIMIT = 300
pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * LIMIT)]

OPTIONS = {
    "config": "configs/quickstart.yaml",
    "eval_size": 0,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    "max_completion_length": 16,
    "disable_tqdm": "true",
    "save_steps": 500,
    "max_steps": 400,
}


# A reward that waits at one step until it is told to go on.
HELD = """
import pathlib, time
HERE = pathlib.Path(__file__)
def reward(completions, trainer_state, **kwargs):
    if trainer_state.global_step == {step}:
        HERE.with_suffix(".waits").touch()
        while not HERE.with_suffix(".go").exists():
            time.sleep(0.01)
    return [float(len(completion)) for completion in completions]
"""


def arguments(**options):
    return [word for name, value in (OPTIONS | options).items() for word in (f"--{name}", str(value))]


class Run:
    """The training script in a process of its own, or in several, its output in a file."""

    def __init__(self, folder, launcher=(sys.executable,), **options):
        self.folder, self._output = folder, folder.with_suffix(".out")
        command = [*DEFAULT_SIGINT, *launcher, "scripts/train.py", *arguments(output_dir=folder, **options)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder.parent)])}
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)

    @property
    def output(self):
        return self._output.read_text()

    def wait_for(self, what):
        while not what():
            assert self.process.poll() is None, self.output[-3000:]
            time.sleep(0.05)

    def wait(self):
        return self.process.wait(LIMIT)

    def ranks(self):
        """The processes that train, by their rank."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # one that has just ended
                if "train.py" in " ".join(process.cmdline()):
                    found[process.environ().get("RANK")] = process
        return found

    def steps(self):
        path = self.folder / "history.jsonl"
        rows = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [row["step"] for row in map(json.loads, [row for row in rows if row.endswith("\n")]) if "loss" in row]


@contextmanager
def started(*args, **kwargs):
    run = Run(*args, **kwargs)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            for process in [*psutil.Process(run.process.pid).children(recursive=True), run.process]:
                process.kill()
            run.process.wait()


@pytest.fixture
def launch(monkeypatch):
    """The training script in this process."""
    script = load_script("train")
    monkeypatch.chdir(ROOT)

    def run(**options):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments(**options)])
        script.main()

    return run


def rows(folder):
    names = ("step", "loss", "grad_norm", "reward", "discrepancy/mean", "lagrangian/lambda")
    history = read_rows(folder / "history.jsonl")
    return [{name: row.get(name) for name in names} for row in history if "loss" in row]


def test_a_signal_loses_no_step(tmp_path, launch, monkeypatch):
    (tmp_path / "held_reward.py").write_text(HELD.format(step=2))
    monkeypatch.syspath_prepend(tmp_path)
    # The run stops between the two optimizer steps of a generation batch.
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-3, "max_steps": 8}
    options |= {"rewards": "held_reward.reward"}
    with started(tmp_path / "run", **options) as run:
        run.wait_for((tmp_path / "held_reward.waits").exists)
        with refuses(SystemExit, f"output_dir='{run.folder}'", f"process {run.process.pid} "):
            launch(output_dir=run.folder, **options)
        run.process.send_signal(signal.SIGTERM)
        run.wait_for(lambda: "SIGTERM: " in run.output)
        (tmp_path / "held_reward.go").touch()
        assert run.wait() == 128 + signal.SIGTERM
    assert run.steps() == [1, 2, 3]
    checkpoint = run.folder / "checkpoint-3"
    assert checkpoint_defect(checkpoint) is None
    assert f"resume_from_checkpoint='{checkpoint}'" in run.output
    assert "Traceback" not in run.output
    # It has not come to its end.
    left = {path.name for path in run.folder.iterdir()}
    assert left.isdisjoint({"summary.json", "deployment", "model.safetensors"})
    assert "train_runtime" not in (run.folder / "history.jsonl").read_text()

    launch(output_dir=run.folder, resume_from_checkpoint="auto", **options)
    launch(output_dir=tmp_path / "whole", **options)
    assert len(rows(run.folder)) == 8
    assert rows(run.folder) == rows(tmp_path / "whole")


def test_a_run_that_is_stopped_before_its_first_step_begins_again_by_the_same_command(tmp_path, launch):
    (tmp_path / "held_reward.py").write_text(HELD.format(step=0))
    with started(tmp_path / "run", eval_size=64, rewards="held_reward.reward") as run:
        run.wait_for((tmp_path / "held_reward.waits").exists)  # in the evaluation before the first step
        run.process.send_signal(signal.SIGINT)
        run.wait_for(lambda: "SIGINT: " in run.output)
        (tmp_path / "held_reward.go").touch()
        assert run.wait() == 130
    assert "Traceback" not in run.output
    assert "same command" in run.output.strip().splitlines()[-1]
    assert list(run.folder.iterdir()) == []
    # Nor does one that was killed there keep its directory.
    (run.folder / "history.jsonl").write_text('{"step": 0, "eval_reward": 0.5}\n')
    launch(output_dir=run.folder, eval_size=16, max_steps=1)
    summary = read_json(run.folder / "summary.json")
    assert {"greedy", "reward"} <= summary["before"].keys() & summary["after"].keys()
    with refuses(SystemExit, "already holds a run"):
        launch(output_dir=run.folder, eval_size=16, max_steps=1)
    # Nor is it replaced by another run's checkpoint.
    launch(output_dir=tmp_path / "other", max_steps=1, save_steps=1)
    with refuses(SystemExit, "already holds a run"):
        launch(output_dir=run.folder, max_steps=2, resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-1"))


def test_two_processes_stop_together_and_go_on_together(tmp_path):
    sizes = {"per_device_train_batch_size": 8}
    with started(tmp_path / "run", launcher=TWO_PROCESSES, **sizes) as run:
        run.wait_for(run.steps)
        ranks = run.ranks()
        assert {"0", "1"} <= set(ranks)
        ranks["1"].send_signal(signal.SIGINT)  # to one of them
        assert run.wait() == 1  # torchrun's own code
    assert len(re.findall(r"exitcode\s*: 130", run.output)) >= 1
    done = run.steps()[-1]
    assert checkpoint_defect(run.folder / f"checkpoint-{done}") is None
    assert (run.folder / f"checkpoint-{done}" / "rng_state_1.pth").is_file()
    assert run.output.count("SIGINT has ended") == 1

    (run.folder / "checkpoint-99999").mkdir()
    going_on = {"resume_from_checkpoint": "true", "max_steps": done + 2, **sizes}
    with started(run.folder, launcher=TWO_PROCESSES, **going_on) as resumed:
        assert resumed.wait() == 0, resumed.output[-3000:]
    assert resumed.steps() == list(range(1, done + 3))
    assert "checkpoint-99999 holds no trainer_state.json" in resumed.output


def test_the_launcher_passes_slurms_warning_on_where_it_is_told_to(tmp_path, monkeypatch):
    # As configs/slurm has it: SLURM signals every process of a step, the launcher among them.
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    with started(tmp_path / "run", launcher=TWO_PROCESSES, per_device_train_batch_size=8) as run:
        run.wait_for(run.steps)
        for process in [run.process, *run.ranks().values()]:
            process.send_signal(signal.SIGUSR1)
        assert run.wait() != 0
    assert run.output.count("SIGUSR1 has ended") == 1
    assert checkpoint_defect(run.folder / f"checkpoint-{run.steps()[-1]}") is None


# A reward that is lost, of all completions of a step at once.
LOST = """
def reward(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step < 24) + row % 2 / 10 for row in range(len(completions))]
"""


def test_the_way_back_from_a_collapse_is_said_once_by_two_processes(tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    options = {"collapse_alarm": "stop", "rewards": "lost.reward", "save_steps": 3, "save_strategy": "steps"}
    options |= {"per_device_train_batch_size": 8, "save_total_limit": 20, "max_steps": 60}
    with started(tmp_path / "run", launcher=TWO_PROCESSES, **options) as run:
        assert run.wait() == 1
    ends = re.findall("error: the collapse alarm stopped the run .*", run.output)
    assert len(ends) == 1
    assert re.search(r"resume_from_checkpoint='.*/checkpoint-\d+'", ends[0])


def test_a_finished_run_says_so_and_stays_as_it_is(tmp_path, launch, capsys):
    options = {"output_dir": tmp_path / "run", "max_steps": 2, "eval_size": 16, "resume_from_checkpoint": "auto"}
    options |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
    launch(**options)
    left = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    for _ in range(2):
        launch(**options)
        printed = capsys.readouterr().out
        assert f"The run in {tmp_path / 'run'} is finished" in printed
        assert "Serve it" not in printed
    changed = {path for path, at in left.items() if path.stat().st_mtime_ns != at}
    assert {path.name for path in changed if path.parent.name != "deployment"} <= {
        "history.jsonl",
        "run.png",
    }
    # Killed between the last step and the summary: the rest is made.
    for name in ("summary.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    launch(**options)
    assert read_json(tmp_path / "run" / "summary.json")["steps"] == 2
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_auto_begins_again_after_a_kill_within_the_first_save(tmp_path, launch):
    folder = tmp_path / "run"
    launch(output_dir=folder, max_steps=2, save_steps=2)
    for path in folder.iterdir():  # what a run has that is killed in the middle of its first save
        if path.name not in ("history.jsonl", "settings.json", "checkpoint-2"):
            path.unlink() if path.is_file() else shutil.rmtree(path)
    (folder / "checkpoint-2" / "manifest.json").unlink()
    options = {"output_dir": folder, "max_steps": 2, "save_steps": 2}
    with refuses(SystemExit, "already holds a run"):
        launch(**options)
    with refuses(SystemExit, "output_dir=", "checkpoint-2"):
        launch(resume_from_checkpoint="true", **options)
    launch(resume_from_checkpoint="auto", **options)
    assert checkpoint_defect(folder / "checkpoint-2") is None
    assert {"earlier-checkpoint-2", "history.1.jsonl", "summary.json"} <= {path.name for path in folder.iterdir()}
