"""The report of a run: what it says against the files it was made of, and what it leaves alone."""

import json
import math
import re
import sys

import pytest
from peft import LoraConfig

from dc_trl import HistoryCallback
from dc_trl.command import report as report_command
from dc_trl.records.figures import panels_of, plot_run, thinned
from dc_trl.records.page import facts_table, write_report
from dc_trl.records.runs import Run, changed_settings, read_history, read_run

from .helpers import ROOT, Rollouts, make_config, make_trainer, read_json, refuses, succeed, write_rows
from .html_reader import Reader, require_self_contained


SETTINGS = {"max_steps": 4, "learning_rate": 0.1, "discrepancy_tolerance": 0.002, "seed": 0}


def make_rows(steps=4, **metrics):
    """A history: each metric a function of the step, or one value for all."""
    usual = {
        "reward": lambda step: 0.1 * step,
        "reward_std": 0.05,
        "learning_rate": 0.1,
        "completions/mean_length": lambda step: 20 + step,
        "entropy": 0.5,
        "discrepancy/mean": lambda step: 0.001 * step,
        "discrepancy/k3_kl": 1e-4,
        "lagrangian/lambda": lambda step: 0.1 + 0.001 * step,
        "lagrangian/tolerance": 0.002,
    } | metrics
    return [
        {"step": step} | {name: value(step) if callable(value) else value for name, value in usual.items()}
        for step in range(1, steps + 1)
    ]


# Of a report that has one panel, as drawing takes long.
ONE_ROW = [{"step": 1, "reward": 0.5}]


def make_run(folder, rows=None, settings=None, summary=None):
    folder.mkdir(parents=True)
    write_rows(folder / "history.jsonl", make_rows() if rows is None else rows)
    for name, value in (("settings.json", settings), ("summary.json", summary)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    return folder


SUMMARY = {
    "engine": "fp8",
    "constraint": "lagrangian",
    "steps": 4,
    "before": {"reward": 0.25, "discrepancy": 0.0021, "greedy": 0.40625, "greedy_se": 0.0625, "problems": 64},
    "after": {"reward": 0.5, "discrepancy": 0.0019, "greedy": 0.75, "greedy_se": 0.054, "problems": 64},
    "lambda": 0.1234,
    "tokens": 12345,
    "seconds": 67.8,
}


def read_report(path):
    reader = Reader(path.read_text(encoding="utf-8"))
    require_self_contained(reader)
    images = reader.all("img")
    assert all(image["alt"].strip() for image in images)
    return reader


def report_of(run):
    return read_report(write_report(run, run.parent / "report.html"))


def figures_of(rows, **settings):
    """The figure of each panel of a run with these rows, by its metric."""
    run = Run("", rows, settings)
    return {panel.metric: panel.figure(run) for panel in panels_of(run)}


def row_of(reader, name):
    """Cells of the first row of this name: the summary stands above the settings."""
    return next(row for row in reader.rows if row[0] == name)[1:]


def test_the_report_of_a_run_says_what_its_files_say(tmp_path):
    measured = {"eval_greedy_reward": 0.40625, "eval_greedy_reward_se": 0.0625, "eval_reward": 0.25}
    rows = [{"step": 0} | measured, *make_rows(), {"step": 4, "eval_greedy_reward": 0.75, "eval_reward": 0.5}]
    make_run(tmp_path / "run", rows=rows, settings=SETTINGS, summary=SUMMARY)
    reader = read_report(write_report(tmp_path / "run", tmp_path / "out" / "report.html"))
    assert [image["alt"].partition(" over ")[0] for image in reader.all("img")] == [
        "mean reward",
        "held-out problems, greedy",
        "held-out problems, sampled",
        "discrepancy δ̄",
        "multiplier λ",
        "KL (k3), nats",
        "response length",
        "learning rate",
        "entropy, nats",
    ]
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "report.html"]
    expected = {
        "state": ["finished"],
        "optimizer steps": ["4"],
        "constraint": ["lagrangian"],
        "sampling engine": ["fp8"],
        "seed": ["0"],
        "greedy reward": ["0.406 ± 0.062", "0.75"],
        "sampled reward": ["0.25", "0.5"],
        "discrepancy δ̄": ["0.001", "0.004"],
        "tolerance ε": ["0.002"],
        "multiplier λ": ["0.101", "0.104"],
        "tokens sampled and read": ["12,345"],
        "training seconds": ["68"],
    }
    assert {name: row_of(reader, name) for name in expected} == expected
    assert {name: json.loads(row_of(reader, name)[0]) for name in SETTINGS} == SETTINGS
    assert "0.1 at step 1, 0.4 at step 4" in reader.all("img")[0]["alt"]


def test_a_killed_run_is_reported_as_far_as_it_came(tmp_path):
    run = make_run(tmp_path / "run", settings=SETTINGS)
    with open(run / "history.jsonl", "a") as file:
        file.write('{"step": 5, "reward": 0.9')
    reader = report_of(run)
    assert row_of(reader, "state") == ["going on, or stopped"]
    assert row_of(reader, "optimizer steps") == ["4"]
    assert row_of(reader, "discrepancy δ̄") == ["0.001", "0.004"]


def test_a_history_alone_is_enough(tmp_path):
    ends = [{"step": 3, "collapse/reward": 0.1}, {"step": 3, "train_runtime": 12.3}]
    run = make_run(tmp_path / "run", rows=[*make_rows(3), *ends])
    reader = report_of(run)
    assert row_of(reader, "state") == ["finished"]
    assert row_of(reader, "collapse alarms") == ["reward at step 3"]
    assert row_of(reader, "training seconds") == ["12"]
    assert row_of(reader, "multiplier λ") == ["0.101", "0.103"]
    with open(run / "history.jsonl", "a") as file:
        file.write('{"step": 4, "reward": 0.9}\n')  # it was resumed with more steps
    assert dict(facts_table(read_run(run)).rows)["state"] == "going on, or stopped"
    assert "Settings" not in reader.texts["h2"]


def test_lines_that_are_no_rows_are_left_out_and_said(tmp_path, caplog):
    run = make_run(tmp_path / "run")
    path = run / "history.jsonl"
    lines = path.read_text().splitlines()
    for bad in ("", "  ", '{"loss": 1.0}', "[]", '{"step": "2"}', '{"step": 1e400}', "{", "\0\0"):
        path.write_text("\n".join([lines[0], bad, *lines[1:]]) + "\n")
        caplog.clear()
        assert list(read_run(run).history) == make_rows()
        assert ("line 2 the first" in caplog.text) == bool(bad.strip())
    assert row_of(report_of(run), "optimizer steps") == ["4"]


@pytest.mark.timeout(400)
def test_a_long_run_is_reported_in_seconds_and_little_memory(tmp_path):
    """A tenth of 100,000 steps, whose columns take 100 MB more; the seconds are the process's own."""
    names = [f"metric_{number}" for number in range(40)] + ["reward", "entropy", "grad_norm", "discrepancy/mean"]
    names += ["discrepancy/k3_kl", "completions/mean_length", "learning_rate", "lagrangian/lambda"]
    rows = ({"step": step} | {name: math.sin(step * len(name)) for name in names} for step in range(1, 10_001))
    write_rows(tmp_path / "history.jsonl", [*rows, {"step": 10_000, "train_runtime": 1.0}])
    code = (
        "import re, sys, time; from dc_trl.records.page import write_report; began = time.process_time();"
        "write_report(*sys.argv[1:]); most = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read());"
        "print(time.process_time() - began, int(most[1]) / 2**10)"
    )
    done = succeed([sys.executable, "-c", code, str(tmp_path), str(tmp_path / "page.html")])
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 15
    assert megabytes < 250


def test_a_thinned_line_has_the_extremes_of_the_whole_one():
    values = [math.sin(place) * place for place in range(10_000)]
    x, y = thinned(range(10_000), by=values)
    assert len(x) <= 4 * 501
    assert x == sorted(x)
    assert all(values[place] == value for place, value in zip(x, y, strict=True))
    for start in range(0, 10_000, 500):
        part = [value for place, value in zip(x, y, strict=True) if start <= place < start + 500]
        assert (min(part), max(part)) == (min(values[start : start + 500]), max(values[start : start + 500]))
    assert thinned([1, 2], by=[3.0, 4.0]) == [[1, 2], [3.0, 4.0]]


def test_values_that_are_not_finite_are_not_drawn(tmp_path):
    values = {1: 0.1, 2: math.nan, 3: math.inf, 4: None, 5: int("9" * 400)}  # the last is too large to draw
    run = make_run(tmp_path / "run", rows=make_rows(5, reward=values.get, grad_norm=math.nan))
    assert read_run(run).series("reward") == ([1], [0.1])
    reader = report_of(run)
    assert not any("gradient" in text for text in reader.texts["figcaption"])  # nothing of it can be drawn


def test_benchmarks_have_panels_and_rows_of_their_own(tmp_path):
    rows = make_rows(2)
    for step, value in ((0, 0.25), (2, 0.5)):
        rows.append({"step": step, "eval_math/500 ü/avg@4": value, "eval_math/500 ü/avg@4_se": 0.02})
    run = make_run(tmp_path / "run", rows=rows)
    reader = report_of(run)
    assert any(image["alt"].startswith("math/500 ü avg@4 over") for image in reader.all("img"))
    assert row_of(reader, "math/500 ü avg@4") == ["0.250 ± 0.020", "0.500 ± 0.020"]


def test_what_the_page_on_collapsed_runs_looks_for_is_in_the_report():
    page = (ROOT / "docs" / "collapsed.md").read_text().partition("## Find the cause")[2].partition("\n## ")[0]
    columns = {
        name for cells in re.findall(r"^\| (.*?) \|", page, re.M) for name in re.findall(r"`([a-z_/]+)`", cells)
    }
    columns -= {"lambda_max"}  # a setting
    assert columns <= figures_of(make_rows(20, **dict.fromkeys(columns, float))).keys()
    assert len(columns) > 6


def test_the_surge_is_drawn_where_it_is(tmp_path):
    events = {
        "length_decay/surge_step": lambda step: 15 if step == 19 else None,
        "length_decay/period": lambda step: 27 if step == 19 else None,
    }
    rows = make_rows(60, **events)
    plot_run(rows, tmp_path / "run.png", "$\\frac{1 & ünï")  # text, not mathematics
    (axes,) = figures_of(rows)["completions/mean_length"].axes
    lines = (list(line.get_xdata()) for line in axes.lines)
    assert [x[0] for x in lines if len(x) == 2 and x[0] == x[1]] == [15]  # verticals
    assert axes.get_title("right") == "surge at step 15, halved every 27 steps"


@pytest.mark.parametrize(("target", "place"), [("all", "mean"), ("lag", "lag_mean")])
def test_the_parts_of_the_discrepancy_have_panels_and_the_tolerance_is_where_it_is_constrained(target, place):
    parts = {f"discrepancy/{name}": lambda step: 0.001 * step for name in ("engine_mean", "lag_mean")}
    rows = make_rows(9, **parts, **{"lagrangian/tolerance": lambda step: 0.002})
    figures = figures_of(rows, **SETTINGS, constraint_target=target)
    for name in ("mean", "engine_mean", "lag_mean"):
        (axes,) = figures[f"discrepancy/{name}"].axes
        assert ("ε 0.002" in [text.get_text() for text in axes.texts]) == (name == place)
        above = [path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths()]
        assert above == ([pytest.approx(0.009)] if name == place else [])  # filled from ε up to δ̄ of the last step


def test_a_tolerance_above_all_values_is_in_the_figure():
    rows = make_rows(9, **{"discrepancy/mean": 1e-5, "lagrangian/tolerance": 0.002})
    bottom, top = figures_of(rows)["discrepancy/mean"].axes[0].get_ylim()
    assert (bottom, top > 0.002) == (0, True)


@pytest.mark.parametrize(("multiplier", "note"), [(0.5, ""), (lambda step: 0.1 * step, "grows while δ̄ > ε (3 of 5 ")])
def test_the_figure_says_why_the_multiplier_moves(multiplier, note):
    moved = {"lagrangian/lambda": multiplier, "lagrangian/violation": lambda step: 0.001 * (step - 2.5)}
    title = figures_of(make_rows(5, **moved))["lagrangian/lambda"].axes[0].get_title("right")
    assert title.startswith(note)
    assert bool(title) == bool(note)


def test_a_rate_is_shown_where_tokens_are_worked_on(tmp_path):
    rows = make_rows(**{"time/generation": 2.0, "time/sync": 1.0, "time/loss": 1.0})
    reader = read_report(write_report(make_run(tmp_path / "run", rows, summary=SUMMARY), tmp_path / "r.html"))
    assert row_of(reader, "generation") == ["8.0", "50.0%", "1,543"]  # 12,345 tokens
    assert row_of(reader, "weight sync") == ["4.0", "25.0%", ""]
    assert row_of(reader, "all") == ["16.0", "100.0%", "772"]


def test_text_of_any_kind_stays_text(tmp_path):
    text = '"><img src=x onerror=alert(1)></style>&amp;{{ 7 * 7 }} <script>alert(1)<∕script> $\\frac{1 & ünï'
    run = make_run(tmp_path / "run", ONE_ROW, {"run_name": text})
    reader = read_report(write_report(run, tmp_path / "report.html", title=text))
    assert reader.texts["title"] == reader.texts["h1"] == [text]
    assert row_of(reader, "run_name") == [text]
    page = write_report(run, tmp_path / "report.html", title="a\x1b[2J\0").read_text()
    assert "a\\x1b[2J\\x00" in page
    assert not {"\x1b", "\0"} & set(page)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: folder.mkdir(), ["history.jsonl", "output_dir"]),
        (lambda folder: make_run(folder, rows=[]), ["history.jsonl", "logging_steps"]),
        (lambda folder: (make_run(folder) / "settings.json").write_bytes(b"\xff"), ["settings.json", "UTF-8"]),
    ],
)
def test_what_is_no_run_is_refused_before_anything_is_written(tmp_path, prepare, words):
    prepare(tmp_path / "run")
    with refuses(ValueError, *words):
        write_report(tmp_path / "run", tmp_path / "new" / "report.html")
    assert not (tmp_path / "new").exists()


def test_without_an_output_the_page_is_in_the_run(tmp_path, capsys):
    run = make_run(tmp_path / "run", ONE_ROW)
    (run / "report.html").write_text("an older page")
    report_command.main([str(run)])
    assert read_report(run / "report.html").texts["h1"] == ["Run run"]
    assert str(run / "report.html") in capsys.readouterr().out
    report_command.main([str(run), "--output", str(tmp_path / "page.html"), "--title", "Mine"])
    assert read_report(tmp_path / "page.html").texts["h1"] == ["Mine"]
    with refuses(SystemExit, "error:", "none"):
        report_command.main([str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


# --- settings of a real run ------------------------------------------------------------------------------------------

SECRET = "hf_" + "Secret0123456789" * 2
SECRETS = {
    "hub_token": SECRET,
    "generation_kwargs": {"api-key": SECRET, "nested": [{"Authorization": f"Bearer {SECRET}", "kept": 1}]},
    "vllm_server_base_url": f"http://user:{SECRET}@127.0.0.1:8000/?key={SECRET}&a=b",
    "run_name": f"run {SECRET}",
    "optim_args": f"a=1,api_key={SECRET[3:]}",
    "report_to": ["--api-key", SECRET[3:], f"--hf-token={SECRET[3:]}", "kept"],
}


def test_a_trainer_leaves_what_a_report_needs_and_no_secret(tmp_path):
    peft = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    callback = HistoryCallback({"dataset_name": "mine"})
    options = {"rollout_func": Rollouts(), "callbacks": [callback]}
    run = tmp_path / "run"
    trainer = make_trainer(
        run, max_steps=2, lambda_init=0.25, peft_config=peft, run_name=SECRETS["run_name"], **options
    )
    trainer.args.hub_token = SECRET
    trainer.train()
    assert {path.name for path in run.iterdir()} >= {"history.jsonl", "settings.json", "run.png"}
    for path in run.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    settings = read_json(run / "settings.json")
    assert not {"hub_token", "dual_window"} & settings.keys()  # the latter was left alone
    assert settings | {"dataset_name": "mine", "lambda_init": 0.25, "max_steps": 2} == settings
    adapter = settings["peft"]["default"]
    assert (adapter["r"], adapter["target_modules"]) == (3, ["q_proj", "v_proj"])
    reader = report_of(run)
    assert row_of(reader, "lambda_init") == ["0.25"]
    history = read_history(run / "history.jsonl")
    assert row_of(reader, "tolerance ε") == ["0.0037"]
    assert row_of(reader, "multiplier λ")[0] == f"{history[0]['lagrangian/lambda']:.4g}"


def test_settings_are_json_without_secrets(tmp_path):
    args = make_config(tmp_path)
    for name, value in SECRETS.items():
        setattr(args, name, value)
    found = changed_settings(args)
    assert SECRET[3:] not in json.dumps(found)
    assert "hub_token" not in found
    expected = {
        "optim_args": "a=1,api_key=(hidden)",
        "report_to": ["--api-key", "(hidden)", "--hf-token=(hidden)", "kept"],
        "generation_kwargs": {"nested": [{"kept": 1}]},
        "vllm_server_base_url": "http://127.0.0.1:8000/?&",
        "run_name": "run (hidden)",
        "lr_scheduler_type": "constant",
    }
    assert found | expected == found


def test_a_report_needs_no_engine_and_no_trainer(tmp_path):
    """A run without a summary has the default seed."""
    run = make_run(tmp_path / "a", ONE_ROW, {"max_steps": 4, "loss_type": "grpo"})
    code = (
        "import sys; sys.argv = ['dc-trl', 'report', *sys.argv[1:]]; import runpy;"
        "runpy.run_module('dc_trl', run_name='__main__');"
        "import dc_trl.records.estimators, dc_trl.records.tables;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", code, str(run), "--output", str(tmp_path / "report.html")]
    loaded = succeed(command).stdout.split()
    assert "matplotlib" in loaded
    heavy = {"torch", "trl", "transformers", "peft", "vllm", "accelerate", "datasets", "pandas", "pyarrow", "aiohttp"}
    assert not heavy & set(loaded)
    reader = read_report(tmp_path / "report.html")
    assert row_of(reader, "seed") == ["42"]
    assert row_of(reader, "loss_type") == ["grpo"]
