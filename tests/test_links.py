"""Nothing that is written goes through a link: planted at every name that a run and its reports have written."""

import errno
import os
from contextlib import suppress

import pytest

from dc_trl import DeploymentCheckpointCallback, HistoryCallback
from dc_trl.command.report import main as report
from dc_trl.command.train import train
from dc_trl.files import LOCK_FILE, append_json, lock_output, write_bytes, write_text

from .helpers import ROOT, On, Rollouts, make_trainer, refuses


WORDS = [
    *("--config", "configs/quickstart.yaml", "--max_steps", "2", "--eval_size", "8", "--disable_tqdm", "true"),
    *("--per_device_train_batch_size", "16", "--per_device_eval_batch_size", "16", "--max_completion_length", "8"),
    *("--save_steps", "1"),
]


def run(folder, *words):
    """What `dc-trl train` makes of it, as a text."""
    try:
        return str(train([*WORDS, "--output_dir", str(folder), *words]))
    except SystemExit as stopped:
        return str(stopped.code)


def plant(folder, names):
    """Makes links under these names to files outside; returns these files with their content."""
    outside = folder.parent / "outside"
    outside.mkdir()
    targets = {name: outside / str(number) for number, name in enumerate(names)}
    for name, target in targets.items():
        target.write_text("mine")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    return targets


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Names of all that a run with its report has left, or writes on the way."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    os.chdir(ROOT)
    assert run(folder) == "None"
    report([str(folder), "--output", str(folder / "report.html")])
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"history.jsonl", "model.safetensors", "run.png", "README.md", "deployment/model.safetensors"} <= left
    top = {name for name in left if "/" not in name}
    return sorted(top | {f".{name}.tmp" for name in top} | {".dc_trl.lock"})


@pytest.mark.long
def test_a_run_changes_nothing_that_a_link_in_its_folder_leads_to(names, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # All at once, in a run that goes on: nothing is refused for its name.
    run(tmp_path / "run", "--max_steps", "1")
    # These two are read before they are written, and refused where they are not what a run writes.
    for name in {*names} - {"history.jsonl", "summary.json"}:
        (tmp_path / "run" / name).unlink(missing_ok=True)
    rest = [name for name in names if name != ".dc_trl.lock" and not (tmp_path / "run" / name).exists()]
    targets = plant(tmp_path / "run", rest)
    assert run(tmp_path / "run", "--resume_from_checkpoint", "true") == "None"
    report([str(tmp_path / "run")])  # replaces the link of its name
    assert {name: target.read_text() for name, target in targets.items() if target.read_text() != "mine"} == {}


def test_links_to_folders_in_the_place_of_checkpoint_and_deployment_are_replaced(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    for name in ("checkpoint-1", "deployment"):
        (outside / name).mkdir(parents=True)
        (outside / name / "config.json").write_text("mine")
        (run / name).symlink_to(outside / name)
    trainer = make_trainer(run, deployment_scheme="fp8", max_steps=1, save_steps=1)
    trainer.add_callback(DeploymentCheckpointCallback(trainer))
    trainer.train()
    for name in ("checkpoint-1", "deployment"):
        assert (run / name / "model.safetensors").is_file()
        assert not (run / name).is_symlink()
        assert os.listdir(outside / name) == ["config.json"]
        assert (outside / name / "config.json").read_text() == "mine"
    assert {*os.listdir(run)} == {"README.md", "checkpoint-1", "deployment", "earlier-checkpoint-1"}


def test_an_output_directory_may_be_a_link(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    with lock_output(tmp_path / "run"):
        write_text(tmp_path / "run" / "a", "b")
    assert (tmp_path / "scratch" / "a").read_text() == "b"


@pytest.mark.parametrize("kind", ["symbolic", "dangling"])
def test_writers_replace_or_refuse(tmp_path, kind):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("mine")

    def plant_it(path):
        path.unlink(missing_ok=True)
        path.symlink_to(target if kind == "symbolic" else tmp_path / "nothing")

    plant_it(link)
    with refuses(OSError, link, "remove it"):
        append_json(link, "theirs")
    (tmp_path / "run").mkdir()
    plant_it(tmp_path / "run" / LOCK_FILE)
    with refuses(ValueError, f"output_dir='{tmp_path / 'run'}'", "remove it"), lock_output(tmp_path / "run"):
        pass
    plant_it(tmp_path / ".link.tmp")
    write_bytes(link, b"ours")
    assert link.read_bytes() == b"ours"
    assert not link.is_symlink()
    assert target.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


def test_a_disk_that_is_full_is_named_with_the_file_and_ends_nothing(small_disk, caplog):
    def fill(state, **kwargs):
        if state.global_step == 1:
            with suppress(OSError), open(small_disk / "filler", "ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

    trainer = make_trainer(
        small_disk / "run", rollout_func=Rollouts(), callbacks=[HistoryCallback(), On("on_step_begin", fill)]
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert any(os.strerror(errno.ENOSPC) in line and "history.jsonl" in line for line in caplog.messages)
