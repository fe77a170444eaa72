"""Ablations: what a sweep file means, how jobs are run, stopped and continued, and what is collected from them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dc_trl.ablation import jobs as ablation_jobs
from dc_trl.ablation.jobs import OutputLock, last_checkpoint, require_own_folders, run_jobs, status
from dc_trl.ablation.machine import choose_slots
from dc_trl.ablation.plan import load_sweep
from dc_trl.ablation.results import METRICS, Mean, collect, mean_over_seeds, show_mean, write_results
from dc_trl.ablation.sweep_figure import draw_sweep, mean_curve
from dc_trl.records.runs import Run
from dc_trl.training.check import check_configurations

from .helpers import ROOT


BASE = {"learning_rate": 1e-4, "max_steps": 4, "rewards": ["arithmetic"], "beta": 0.0}


@pytest.fixture
def sweep_file(tmp_path):
    """Writes a sweep file, with a base configuration beside it, and returns its path."""

    def write(text):
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
        (tmp_path / "sweep.yaml").write_text(text if "config:" in text else f"config: base.yaml\n{text}")
        return tmp_path / "sweep.yaml"

    return write


# What a sweep file means.


def test_a_grid_is_every_combination_with_every_seed(sweep_file, tmp_path):
    sweep = load_sweep(
        sweep_file(
            "fixed: {beta: 0.1}\ngrid:\n  learning_rate: [1e-6, 0.001]\n  rewards: [[math], null]\nseeds: [3, 5]"
        )
    )
    assert sweep.name == "sweep"
    assert [variant.name for variant in sweep.variants] == [
        'learning_rate=1e-6,rewards=["math"]',
        "learning_rate=1e-6,rewards=null",
        'learning_rate=0.001,rewards=["math"]',
        "learning_rate=0.001,rewards=null",
    ]
    jobs = sweep.jobs(tmp_path / "out")
    assert [job.seed for job in jobs] == [3, 3, 3, 3, 5, 5, 5, 5]
    assert [job.name for job in jobs[:2]] == [
        "learning_rate=1e-6,rewards=_math_/seed-3",
        "learning_rate=1e-6,rewards=null/seed-3",
    ]
    folder = tmp_path / "out" / "learning_rate=0.001,rewards=null" / "seed-5"
    assert jobs[-1].folder == folder
    assert jobs[-1].settings == {
        "learning_rate": 0.001,
        "max_steps": 4,
        "rewards": None,
        "beta": 0.1,
        "seed": 5,
        "output_dir": str(folder),
    }
    assert sweep.axis is None
    assert sweep.reference.name == sweep.variants[0].name


def test_a_list_names_its_variants(sweep_file):
    sweep = load_sweep(
        sweep_file("list:\n  as it is:\n  GRPO / none: {constraint: none, beta: 0.2}\nreference: GRPO / none\n"),
        overrides={"max_steps": 7},
        seeds=[9],
    )
    assert [variant.fields for variant in sweep.variants] == [{}, {"constraint": "none", "beta": 0.2}]
    assert [variant.folder for variant in sweep.variants] == ["as_it_is", "GRPO_none"]
    assert sweep.settings(sweep.variants[0]) == BASE | {"max_steps": 7}
    assert sweep.seeds == (9,)
    assert sweep.reference is sweep.variants[1]


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("grid: {beta: [0.1, 2e-1, 1]}", "beta"),
        ("grid: {beta: [0.1, 0.2], learning_rate: [1]}", None),
        ("grid: {log_completions: [true, false]}", None),
        ("list: {a: {}, b: {beta: 1}}", None),
        ("list: {a: {beta: 2}, b: {beta: 1}}", "beta"),
    ],
)
def test_one_number_that_tells_the_variants_apart_is_an_axis(sweep_file, text, axis):
    assert load_sweep(sweep_file(text)).axis == axis


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grid: {beta: 0.1}", ["beta=0.1", "list its values"]),
        ("grid: {beta: []}", ["beta=[]"]),
        ("grid: {}", ["no variant"]),
        ("fixed: {beta: 1}", ["grid", "list"]),
        ("grid: {beta: [1]}\nlist: {a: {}}", ["one of `grid`", "`list`"]),
        ("list: [a, b]", ["list=['a', 'b']"]),
        ("list: {a: 3}", ["a=3"]),
        ("gird: {beta: [1]}", ["'gird' is unknown"]),
        ("grid: {beta: [1, 2]}\nfixed: {beta: 1}", ["beta", "both fixed and swept"]),
        ("grid: {seed: [1, 2]}", ["seed", "`seeds`"]),
        ("grid: {beta: [1]}\nfixed: {output_dir: x}", ["output_dir", "--output"]),
        ("grid: {beta: [1]}\nseeds: []", ["seeds=[]"]),
        ("grid: {beta: [1]}\nseeds: [1, 1]", ["seeds=[1, 1]"]),
        ("grid: {beta: [1]}\nseeds: 3", ["seeds=3"]),
        ("grid: {beta: [1]}\nseeds: [0.5]", ["seeds=[0.5]"]),
        ("grid: {beta: [1]}\nreference: other", ["reference='other'", "beta=1"]),
        ("grid: {beta: [1]}\nmetrics: accuracy", ["metrics='accuracy'"]),
        ("grid: {beta: [1, 1]}", ["share the folder"]),
        ("list: {a b: {}, a/b: {beta: 1}}", ["'a b'", "'a/b'", "share the folder"]),
        ("list: {../x: {}, ..: {}}", ["cannot name a folder"]),
        (f"grid: {{instruction: [{'x' * 300}]}}", ["cannot name a folder", "`list`"]),
        ("list: {a: {}}\nlist: {b: {}}", ["'list' stands there twice"]),
        ("list:\n  a: {}\n  a: {beta: 1}", ["'a' stands there twice"]),
        ("grid: [", ["sweep.yaml cannot be read"]),
        ("config: [x]\ngrid: {beta: [1]}", ["config=['x']"]),
    ],
)
def test_a_sweep_file_that_contradicts_itself(sweep_file, text, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are the point
        load_sweep(sweep_file(text))
    assert all(word in str(error.value) for word in [*words, "sweep.yaml"])


def test_an_override_of_what_is_swept(sweep_file):
    file = sweep_file("list: {a: {}, b: {beta: 1}}")
    with pytest.raises(ValueError, match="beta is both fixed and swept"):
        load_sweep(file, overrides={"beta": 2})


def test_a_base_that_is_not_there(sweep_file):
    with pytest.raises(ValueError, match=r"config='nothing\.yaml' does not exist: .*quickstart"):
        load_sweep(sweep_file("config: nothing.yaml\ngrid: {beta: [1]}"))


# What the training script's parser says of it.


@pytest.fixture
def check(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    quickstart = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())

    def run(jobs=1, **fields):
        file = tmp_path / "variants.yaml"
        settings = quickstart | {"output_dir": str(tmp_path), "seed": 0}
        file.write_text(yaml.safe_dump({"base": settings, "mine": settings | fields}))
        check_configurations(file, jobs)

    return run


def test_fields_of_every_part_and_type_are_accepted(check, tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("def zero(completions, **kwargs):\n    return [0] * len(completions)")
    monkeypatch.syspath_prepend(tmp_path)
    check(
        learning_rate="1e-6",
        rewards=["rewards_of_mine.zero"],
        use_peft=True,
        lora_target_modules=["q_proj"],
        generation_kwargs={"do_sample": True},
        serve=None,
        vllm_request_timeout=5,
        env={"SOME_VARIABLE": "1"},
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"discrepancy_tolerence": 0.1}, ["discrepancy_tolerence", "did you mean discrepancy_tolerance"]),
        ({"zzz": 0.1}, ["zzz is no field"]),
        ({"discrepancy_tolerance": -1}, ["variant 'mine'", "discrepancy_tolerance=-1"]),
        ({"learning_rate": "fast"}, ["variant 'mine'", "learning_rate", "fast"]),
        ({"lr_scheduler_type": "wavy"}, ["variant 'mine'", "wavy"]),
        ({"rewards": ["nonsense"]}, ["variant 'mine'", "rewards='nonsense'"]),
        ({"model_name_or_path": "./nothing"}, ["variant 'mine'", "model_name_or_path='./nothing'"]),
        ({"serve": "auto"}, ["variant 'mine'", "serve='auto'"]),
        ({"constraint": "none", "discrepancy_margin": 0.1}, ["discrepancy_margin=0.1", "no effect"]),
    ],
)
def test_settings_that_the_training_script_refuses(check, fields, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are the point
        check(**fields)
    assert all(word in str(error.value) for word in words)


def test_jobs_do_not_share_a_vllm_server(check):
    fields = {"use_vllm": True, "vllm_mode": "server"}
    check(jobs=1, **fields)
    check(jobs=2, **fields, serve="auto")
    with pytest.raises(ValueError, match="--jobs 1"):
        check(jobs=2, **fields)


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "configs" / "sweeps").iterdir())])
def test_ready_sweeps(name, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    sweep = load_sweep(f"configs/sweeps/{name}")
    assert len(sweep.seeds) >= 3
    variants = {v.name: sweep.settings(v) | {"output_dir": str(tmp_path), "seed": 0} for v in sweep.variants}
    (tmp_path / "variants.yaml").write_text(yaml.safe_dump(variants))
    check_configurations(tmp_path / "variants.yaml", 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [{}, {}, {}, {}]),
        ({"threads": 2}, [{}, {}]),
        ({"jobs": 3}, [{}, {}, {}]),
        ({"launch": "accelerate launch"}, [{}]),
        ({"devices": "4,7"}, [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}]),
        ({"devices": "0+1,2+3", "jobs": 1}, [{"CUDA_VISIBLE_DEVICES": "0,1"}]),
        ({"devices": "0,1,2,3", "threads": 2}, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        ({"threads": 5}, "threads=5"),
        ({"threads": 0}, "threads=0"),
        ({"jobs": 3, "threads": 2}, "jobs=3"),
        ({"jobs": 0}, "jobs=0"),
        ({"devices": "0,0,0"}, [{"CUDA_VISIBLE_DEVICES": "0"}] * 3),
        ({"devices": "0+0"}, r"devices='0\+0'"),
        ({"devices": "0,"}, "devices='0,'"),
        ({"devices": "0", "jobs": 2}, "devices for 1"),
    ],
)
def test_never_more_threads_than_cores_nor_jobs_than_devices(sweep_file, monkeypatch, options, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    sweep = load_sweep(sweep_file("fixed: {use_cpu: true}\ngrid: {beta: [0.0, 0.1]}"))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            choose_slots(sweep, **options)
        return
    threads = {"OMP_NUM_THREADS": str(options.get("threads", 1))}
    assert choose_slots(sweep, **options) == [threads | slot for slot in expected]


# How jobs are run. A short script stands for the training script where only its process matters.

STAND_IN = """
import json, os, pathlib, sys, time, yaml
settings = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
folder = pathlib.Path(settings["output_dir"])
begin = time.time()
print("beta is", settings["beta"], *sys.argv[3:])
if settings["beta"] == "fails":
    sys.exit("it broke")
if settings["beta"] == "killed":
    os.kill(os.getpid(), 9)
(folder / "begun").touch()
time.sleep(settings.get("sleep", 0))
record = {"begin": begin, "end": time.time(), "slot": os.environ["SLOT"], "arguments": sys.argv[3:]}
(folder / "summary.json").write_text(json.dumps(record))
"""


def sweep_processes(folder):
    """Live processes that work for the sweep in this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.fixture
def stand_in(tmp_path):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def run(jobs, slots=2):
        lines = []
        with OutputLock(tmp_path / "out", lines.append) as lock:
            failures = run_jobs(
                jobs, [sys.executable, str(script)], [{"SLOT": str(n)} for n in range(slots)], lock, lines.append
            )
        return failures, lines

    return run


def test_jobs_share_the_slots(sweep_file, tmp_path, stand_in):
    jobs = load_sweep(sweep_file("fixed: {sleep: 0.3}\ngrid: {beta: [0, 1, 2]}\nseeds: [0, 1]")).jobs(tmp_path / "out")
    failures, _ = stand_in(jobs)
    assert failures == []
    ran = [json.loads((job.folder / "summary.json").read_text()) for job in jobs]
    assert {each["slot"] for each in ran} == {"0", "1"}
    for one in ran:
        others = [other for other in ran if other is not one and other["slot"] == one["slot"]]
        assert all(other["end"] <= one["begin"] or other["begin"] >= one["end"] for other in others)
    assert any(a["begin"] < b["begin"] < a["end"] for a in ran for b in ran)
    assert [status(job) for job in jobs] == ["done"] * 6

    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    _, lines = stand_in(jobs)
    assert lines == ["6 of 6 jobs are done already"]
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}


def test_a_failing_job_does_not_stop_the_others(sweep_file, tmp_path, stand_in):
    sweep = load_sweep(sweep_file("grid: {beta: [fails, 1, killed]}\nseeds: [0]"))
    jobs = sweep.jobs(tmp_path / "out")
    failures, _ = stand_in(jobs)
    found = {failure.job.variant.name: failure for failure in failures}
    assert found.keys() == {"beta=fails", "beta=killed"}
    assert found["beta=fails"].code == 1
    assert found["beta=fails"].last_lines == ["beta is fails", "it broke"]
    assert found["beta=killed"].code == 128 + signal.SIGKILL
    assert [status(job) for job in jobs] == ["start", "done", "start"]

    failures, _ = stand_in(jobs)  # tried again; the log keeps both attempts, the report has the last one
    assert [failure.last_lines for failure in failures if failure.code == 1] == [["beta is fails", "it broke"]]
    assert (jobs[0].folder / "train.log").read_text().count("it broke") == 2


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_jobs(sweep_file, tmp_path, stand_in, interruptible):
    jobs = load_sweep(sweep_file("fixed: {sleep: 600}\ngrid: {beta: [0, 1, 2]}\nseeds: [0]")).jobs(tmp_path / "out")

    def interrupt():
        while not all((job.folder / "begun").exists() for job in jobs[:2]):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        stand_in(jobs)
    assert sweep_processes(tmp_path / "out") == []
    assert [status(job) for job in jobs] == ["start again", "start again", "start"]
    OutputLock(tmp_path / "out", pytest.fail).__exit__()  # free at once


def test_one_sweep_at_a_time_in_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation_jobs, "_GRACE", -4.5)  # and five seconds more
    lines = []
    with OutputLock(tmp_path / "out", lines.append):
        with pytest.raises(ValueError, match=r"in use by another sweep.*--output"):
            OutputLock(tmp_path / "out", lines.append)
        assert len(lines) == 1
    with OutputLock(tmp_path / "out", lines.append):
        assert len(lines) == 1


def checkpoint(folder, step, max_steps=4):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"weight": torch.ones(1)}, path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": max_steps}))
    return path


def test_where_a_stopped_job_goes_on(sweep_file, tmp_path, stand_in):
    jobs = load_sweep(sweep_file("grid: {beta: [0, 1, 2]}\nseeds: [0]")).jobs(tmp_path / "out")
    settings = [{**job.settings, "output_dir": "elsewhere"} for job in jobs]
    for job, written in zip(jobs, settings, strict=True):
        job.folder.mkdir(parents=True)
        (job.folder / "config.yaml").write_text(yaml.safe_dump(written))
    usable = checkpoint(jobs[0].folder, 2)
    checkpoint(jobs[0].folder, 1)
    (checkpoint(jobs[0].folder, 3) / "trainer_state.json").unlink()  # killed while it saved
    (checkpoint(jobs[0].folder, 4) / "trainer_state.json").write_text('{"global_step": 4')
    checkpoint(jobs[1].folder, 4)  # killed after the last step
    (jobs[1].folder / "history.jsonl").write_text("old")
    require_own_folders(jobs)
    assert last_checkpoint(jobs[0].folder) == usable
    assert [status(job) for job in jobs] == ["resume from checkpoint-2", "start again", "start"]

    failures, _ = stand_in(jobs)
    assert failures == []
    arguments = [json.loads((job.folder / "summary.json").read_text())["arguments"] for job in jobs]
    assert arguments == [["--resume_from_checkpoint", str(usable)], [], []]
    aside = tmp_path / "out" / "beta=1" / "seed-0.unfinished-1"
    assert (aside / "history.jsonl").read_text() == "old"
    assert (aside / "checkpoint-4").is_dir()
    assert not (jobs[1].folder / "history.jsonl").exists()


def test_a_folder_of_other_settings_is_refused(sweep_file, tmp_path, stand_in):
    text = "fixed: {beta: %s, sleep: 0}\ngrid: {learning_rate: [%s]}\nseeds: [0]"
    stand_in(load_sweep(sweep_file(text % (0.5, "1e-6"))).jobs(tmp_path / "out"))
    same = load_sweep(sweep_file(text % ("5.0e-1", "1e-6, 2e-6"))).jobs(tmp_path / "out")
    require_own_folders(same)  # written differently, and with one variant more
    assert [status(job) for job in same] == ["done", "start"]
    with pytest.raises(ValueError, match=r"learning_rate=1e-6/seed-0 .*beta was 0\.5 and is now 0\.7.*--output"):
        require_own_folders(load_sweep(sweep_file(text % (0.7, "1e-6"))).jobs(tmp_path / "out"))
    with pytest.raises(ValueError, match="sleep was 0 and is now unset"):
        require_own_folders(
            load_sweep(sweep_file("fixed: {beta: 0.5}\ngrid: {learning_rate: [1e-6]}\nseeds: [0]")).jobs(
                tmp_path / "out"
            )
        )


def test_a_folder_of_something_else_is_refused(sweep_file, tmp_path):
    jobs = load_sweep(sweep_file("grid: {beta: [0]}\nseeds: [0]")).jobs(tmp_path / "out")
    jobs[0].folder.mkdir(parents=True)
    (jobs[0].folder / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not of a sweep.*--output"):
        require_own_folders(jobs)


# A whole sweep by the script, with the real training, killed and continued.


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_sweep_goes_on_with_the_same_command(tmp_path):
    settings = "max_steps=24 save_steps=8 eval_size=8 max_completion_length=16 per_device_train_batch_size=16"
    (tmp_path / "sweep.yaml").write_text(
        "config: configs/quickstart.yaml\nfixed: {per_device_eval_batch_size: 8}\n"
        "list: {GRPO: {constraint: none}, DC-GRPO: {}}\nseeds: [1]\n"
    )
    command = [
        sys.executable,
        "-m",
        "dc_trl",
        "ablate",
        str(tmp_path / "sweep.yaml"),
        "--output",
        str(tmp_path / "out"),
    ]
    command += ["--jobs", "1", "--set", *settings.split()]
    first = tmp_path / "out" / "GRPO" / "seed-1"
    with open(tmp_path / "killed.log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 400
        while last_checkpoint(first) is None:
            assert process.poll() is None, (tmp_path / "killed.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert sweep_processes(first)
    finally:
        process.kill()
        process.wait()
    assert not (first / "summary.json").exists()
    assert not (tmp_path / "out" / "DC-GRPO").exists()

    # At once: the second sweep waits until the first one's job has ended.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "GRPO/seed-1 resumed from checkpoint-" in done.stdout
    assert "DC-GRPO/seed-1 started\n" in done.stdout
    assert sweep_processes(first) == []
    history = [json.loads(line) for line in (first / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history if "loss" in row] == list(range(1, 25))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    for name, variant in zip(("GRPO", "DC-GRPO"), results["variants"], strict=True):
        summary = json.loads((tmp_path / "out" / name / "seed-1" / "summary.json").read_text())
        assert summary["steps"] == 24
        assert summary["constraint"] == {"GRPO": "none", "DC-GRPO": "lagrangian"}[name]
        assert summary["after"]["problems"] == 8
        assert variant["runs"]["1"]["accuracy"] == summary["after"]["greedy"]
    assert (tmp_path / "out" / "ablation.png").read_bytes()[:4] == b"\x89PNG"
    assert "| variant | GRPO | DC-GRPO |" in (tmp_path / "out" / "results.md").read_text()


# What is collected.


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_mean_and_standard_error(values):
    mean = mean_over_seeds(values)
    assert mean.value == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert mean.seeds == len(values)
    if len(values) == 1:
        assert mean.standard_error is None
    else:
        expected = np.std(values, ddof=1) / np.sqrt(len(values))
        assert mean.standard_error == pytest.approx(expected, rel=1e-6, abs=1e-6)


def write_run(job, greedy, discrepancies, **fields):
    """A run of 20 steps by hand; its values are those of `discrepancies`, repeated."""
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text(yaml.safe_dump(job.settings))
    after = {"discrepancy": 0.002}
    if greedy is not None:
        after |= {"greedy": greedy, "reward": 0.5, "problems": 8}
    summary = {"constraint": "lagrangian", "steps": 20, "after": after, "lambda": 0.25, "seconds": 50.0}
    (job.folder / "summary.json").write_text(json.dumps(summary | fields))
    rows = [{"step": 0, "eval_reward": 0.1}]
    for step in range(1, 21):
        value = discrepancies[step % len(discrepancies)]
        rows.append(
            {"step": step, "loss": 0.0, "reward": step / 20, "entropy": 0.5, "discrepancy/mean": value}
            | {"lagrangian/lambda": step / 100, "lagrangian/violation": value - 0.001, "discrepancy/kl": 3.0}
        )
        rows[-1] |= {"discrepancy/probs_diff_mean": value}
    rows.append({"step": 20, "eval_discrepancy/probs_diff_mean": 0.004})
    rows[10]["logged/once"] = 7.0
    (job.folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def collected(sweep_file, tmp_path):
    def make(text="grid: {beta: [0.0, 0.1, 0.2]}\nseeds: [0, 1, 2]"):
        sweep = load_sweep(sweep_file(text))
        jobs = sweep.jobs(tmp_path / "out")
        first, second, *_ = sweep.variants
        greedy = {(first, 0): 0.50, (first, 1): 0.60, (first, 2): 0.70, (second, 0): 0.54, (second, 1): 0.62}
        for job in jobs:
            if (job.variant, job.seed) in greedy:
                write_run(job, greedy[job.variant, job.seed], [0.001, 0.003])
        return collect(sweep, jobs)

    return make


def by_name(table):
    """Cells of a table by the names of its rows and columns."""
    head, rows = table
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_the_table_holds_what_a_calculator_gives(collected, tmp_path):
    results = collected()
    (_, means), (title, differences) = results.tables()
    assert means[0] == ["beta", "0.0", "0.1", "0.2"]
    cells = by_name(means)
    # 0.5, 0.6, 0.7: s = 0.1, s/√3 = 0.0577; 0.54, 0.62: s = 0.0566, s/√2 = 0.04.
    assert cells["greedy accuracy, %"] == {"0.0": "60.0 ± 5.8", "0.1": "58.0 ± 4.0", "0.2": "–"}
    assert cells["seeds"] == {"0.0": "3 of 3", "0.1": "2 of 3", "0.2": "0 of 3"}
    assert cells["δ̄ held out, 10⁻³"] == {"0.0": "2.00 ± 0.00", "0.1": "2.00 ± 0.00", "0.2": "–"}
    # The last tenth of 20 steps are steps 19 and 20: rewards 0.95 and 1.
    assert cells["reward, last tenth"]["0.0"] == "0.975 ± 0.000"
    assert cells["δ̄ in training, 10⁻³"]["0.0"] == "2.00 ± 0.00"
    assert cells["final λ"]["0.0"] == "0.250 ± 0.000"
    assert cells["training seconds"]["0.0"] == "50 ± 0"
    # On seeds 0 and 1, which both have: +0.04 and +0.02.
    assert "beta=0.0, paired by seed" in title
    assert by_name(differences)["greedy accuracy, %"] == {"0.1": "+3.0 ± 1.0", "0.2": "–"}

    markdown, values = write_results(results, tmp_path / "out")
    assert "| greedy accuracy, % | 60.0 ± 5.8 | 58.0 ± 4.0 | – |" in markdown.read_text()
    saved = json.loads(values.read_text())["variants"][1]
    assert saved["runs"].keys() == {"0", "1"}
    assert saved["means"]["accuracy"]["value"] == pytest.approx(0.58)
    assert saved["differences"]["accuracy"]["standard_error"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("mean", "shown"),
    [
        ((0.00134, 7.93e-05, 3), "0.001340 ± 0.000079"),
        ((1234.5, 67.8, 3), "1234 ± 68"),
        ((0.5, None, 1), "0.50"),
        ((-2.0, 0.0, 2), "-2.0 ± 0.0"),
        ((0.0, 0.0, 2), "0 ± 0"),
    ],
)
def test_a_metric_of_the_history_has_the_digits_that_its_error_allows(mean, shown):
    assert show_mean(Mean(*mean), "discrepancy/kl") == shown


def test_chosen_metrics_and_a_reference(collected):
    text = "grid: {beta: [0.0, 0.1, 0.2]}\nseeds: [0, 1, 2]\nmetrics: [accuracy, discrepancy/kl]\n"
    (_, means), (_, differences) = collected(f"{text}reference: beta=0.1").tables()
    # As many variants as columns: they go downwards.
    assert means[0] == ["beta", "seeds", "greedy accuracy, %", "discrepancy/kl"]
    assert means[1][0] == ["0.0", "3 of 3", "60.0 ± 5.8", "3.0 ± 0.0"]
    assert differences[0] == ["beta", "greedy accuracy, %", "discrepancy/kl"]
    assert differences[1][0] == ["0.0", "-3.0 ± 1.0", "+0 ± 0"]


def test_a_metric_that_no_run_has(collected):
    with pytest.raises(ValueError, match=r"'acuracy' is in no run.*accuracy"):
        collected("grid: {beta: [0.0, 0.1]}\nmetrics: [acuracy]")


def test_discrepancies_of_different_measures_are_not_subtracted(collected):
    results = collected("list: {a: {discrepancy_measure: prob_diff}, b: {discrepancy_measure: log_prob}}")
    _, b = results.sweep.variants
    assert results.mean(b, "discrepancy").value == pytest.approx(0.002)
    assert results.difference(b, "discrepancy") is None
    assert results.difference(b, "discrepancy/probs_diff_mean").value == pytest.approx(0)
    assert results.difference(b, "accuracy").value == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("summary.json", "[]", "holds no JSON object"),
        ("summary.json", "{", "is not JSON"),
        ("summary.json", "{}", "lacks 'steps'"),
        ("summary.json", '{"steps": 20, "after": {"greedy": "high"}}', "greedy='high'"),
        ("summary.json", '{"steps": 20, "after": {}, "lambda": "high"}', "lambda='high'"),
        ("settings.json", "[]", "holds no JSON object"),
    ],
)
def test_a_file_of_a_run_that_is_mistyped_is_named(sweep_file, tmp_path, file, content, words):
    sweep = load_sweep(sweep_file("list: {GRPO: {}}\nseeds: [0]"))
    jobs = sweep.jobs(tmp_path / "out")
    write_run(jobs[0], 0.5, [0.001])
    (jobs[0].folder / file).write_text(content)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the words are the point
        collect(sweep, jobs)
    assert str(jobs[0].folder / file) in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize("state", ['{"global_step": "3", "max_steps": 4}', "[]", "{}", "\xff"])
def test_a_checkpoint_whose_state_is_mistyped_is_not_taken(tmp_path, state):
    usable = checkpoint(tmp_path, 2)
    (checkpoint(tmp_path, 3) / "trainer_state.json").write_text(state, encoding="latin1")
    assert last_checkpoint(tmp_path) == usable


def test_a_sweep_file_that_is_no_text(sweep_file):
    file = sweep_file("grid: {beta: [1]}")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"sweep\.yaml is no text in UTF-8"):
        load_sweep(file)


def test_a_run_without_constraint_or_held_out_problems(sweep_file, tmp_path):
    sweep = load_sweep(sweep_file("list: {GRPO: {}}\nseeds: [0]"))
    jobs = sweep.jobs(tmp_path / "out")
    write_run(jobs[0], None, [0.001], constraint="none")
    results = collect(sweep, jobs)
    assert results.mean(sweep.variants[0], "lambda") is None
    assert results.mean(sweep.variants[0], "accuracy") is None
    assert results.mean(sweep.variants[0], "held_out_discrepancy") is None
    assert results.mean(sweep.variants[0], "logged/once").value == 7.0
    assert results.mean(sweep.variants[0], "reward") == (0.975, None, 1)
    assert len(results.tables()) == 1


def test_curves_are_means_over_the_steps_that_all_runs_have():
    runs = [
        Run("", [{"step": step, "loss": value} for step, value in enumerate(values)])
        for values in ([1.0, 2.0, 3.0, 4.0], [3.0, 6.0, 5.0])
    ]
    steps, means = mean_curve(runs, "loss", window=1)
    assert steps == [0, 1, 2]
    assert [mean.value for mean in means] == [2.0, 4.0, 4.0]
    assert [mean.standard_error for mean in means] == pytest.approx([1.0, 2.0, 1.0])
    _, smoothed = mean_curve(runs[:1], "loss", window=3)
    assert [mean.value for mean in smoothed] == [1.5, 2.0, 3.0, 3.5]
    assert mean_curve(runs, "nothing", window=1) == ([], [])


@pytest.mark.parametrize(
    "text",
    [
        "grid: {beta: [0.01, 0.1, 1]}\nseeds: [0, 1, 2]",
        "grid: {beta: [0, 1], learning_rate: [1, 2]}\nseeds: [0, 1]",
        "list: {a: {discrepancy_measure: prob_diff}, b: {discrepancy_measure: log_prob}}",
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_figure_is_drawn(collected, tmp_path, text):
    (path,) = draw_sweep(collected(text), tmp_path)
    assert path.stat().st_size > 20_000


def test_nothing_has_ended_yet(sweep_file, tmp_path):
    sweep = load_sweep(sweep_file("grid: {beta: [0.0, 0.1]}"))
    results = collect(sweep, sweep.jobs(tmp_path / "out"))
    assert draw_sweep(results, tmp_path) == []
    assert results.tables()[0][1][1] == [
        ["seeds", "0 of 3", "0 of 3"],
        *([m.label, "–", "–"] for m in METRICS.values()),
    ]
