"""The report of runs: what it says against the files it was made of, and what it leaves alone."""

import io
import json
import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from peft import LoraConfig
from PIL import Image
from trl import GRPOConfig

from dc_trl import DCGRPOConfig, DCGRPOTrainer, LambdaLoggingCallback
from dc_trl.command import report as report_command
from dc_trl.records.runs import read_history, read_run
from dc_trl.records.settings import changed_settings
from dc_trl.report import write_report
from dc_trl.report.panels import panels_of, plot_run, run_lines

from .helpers import (
    ROOT,
    Rollouts,
    distinct_characters,
    make_config,
    make_model,
    make_prompts,
    make_tokenizer,
    program,
)
from .test_html import Reader, require_self_contained


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
        "lagrangian/violation": lambda step: 0.001 * step - 0.002,
    } | metrics
    return [
        {"step": step} | {name: value(step) if callable(value) else value for name, value in usual.items()}
        for step in range(1, steps + 1)
    ]


def make_run(folder, rows=None, settings=None, summary=None):
    folder.mkdir(parents=True)
    rows = make_rows() if rows is None else rows
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in (("settings.json", settings), ("summary.json", summary)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    return folder


def make_summary(**overrides):
    return {
        "engine": "fp8",
        "constraint": "lagrangian",
        "seed": 3,
        "steps": 4,
        "before": {"reward": 0.25, "discrepancy": 0.0021, "greedy": 0.40625, "greedy_se": 0.0625, "problems": 64},
        "after": {"reward": 0.5, "discrepancy": 0.0019, "greedy": 0.75, "greedy_se": 0.054, "problems": 64},
        "lambda": 0.1234,
        "tokens": 12345,
        "seconds": 67.8,
    } | overrides


def read_report(path):
    reader = Reader(path.read_text(encoding="utf-8"))
    require_self_contained(reader)
    images = reader.all("img")
    assert all(image["alt"].strip() for image in images)
    assert len(images) == len(list(path.with_name(f"{path.stem}_figures").glob("*.png")))
    return reader


def row_of(reader, name):
    """Cells of the first row of this name: the summary stands above the settings."""
    return next(row for row in reader.rows if row[0] == name)[1:]


def test_the_report_of_a_run_says_what_its_files_say(tmp_path):
    make_run(tmp_path / "run", settings=SETTINGS, summary=make_summary())
    page, *figures = write_report([tmp_path / "run"], tmp_path / "out" / "report.html")
    reader = read_report(page)
    assert {figure.stem for figure in figures} == {
        *("reward", "deployed_accuracy", "discrepancy", "lambda", "k3_kl", "length", "learning_rate", "entropy")
    }
    for figure in figures:
        with Image.open(figure) as image:
            assert image.format == "PNG"
            assert image.width == 720
    expected = {
        "state": "finished",
        "optimizer steps": "4",
        "constraint": "lagrangian",
        "sampling engine": "fp8",
        "seed": "3",
        "held-out problems": "64",
        "greedy reward before": "0.406 ± 0.062",
        "greedy reward after": "0.750 ± 0.054",
        "sampled reward before": "0.250",
        "sampled reward after": "0.500",
        "discrepancy δ̄ before": "0.0021",
        "discrepancy δ̄ after": "0.0019",
        "tolerance ε": "0.002",
        "multiplier λ before": "0.101",
        "multiplier λ after": "0.1234",
        "tokens sampled and read": "12,345",
        "training seconds": "68",
    }
    assert {name: row_of(reader, name) for name in expected} == {name: [value] for name, value in expected.items()}
    assert {name: json.loads(row_of(reader, name)[0]) for name in SETTINGS if name != "seed"} == {
        name: value for name, value in SETTINGS.items() if name != "seed"
    }
    (reward,) = [image["alt"] for image in reader.all("img") if image["alt"].startswith("mean reward")]
    assert "0.1 at step 1, 0.4 at step 4" in reward


def test_runs_are_laid_over_one_another_with_what_differs_between_them(tmp_path):
    settings = SETTINGS | {"output_dir": "a", "constraint": "lagrangian"}
    first = make_run(tmp_path / "a", settings=settings, summary=make_summary())
    second = make_run(
        tmp_path / "b",
        rows=[row for row in make_rows(6) if row.pop("lagrangian/lambda") and row.pop("lagrangian/violation")],
        settings=SETTINGS | {"max_steps": 6, "length_decay": True},
        summary=make_summary(constraint="none", steps=6, **{"lambda": 0.1}),
    )
    reader = read_report(write_report([first, second], tmp_path / "report.html", "Two")[0])
    assert reader.texts["title"] == reader.texts["h1"] == ["Two"]
    assert row_of(reader, "optimizer steps") == ["4", "6"]
    assert row_of(reader, "multiplier λ after") == ["0.1234", "–"]  # a run without a constraint has no λ
    assert row_of(reader, "tolerance ε") == ["0.002", "–"]
    # Settings: "constraint" stands in the summary too.
    assert reader.rows.count(["constraint", "lagrangian", "none (default)"]) == 1
    assert row_of(reader, "max_steps") == ["4", "6"]
    assert row_of(reader, "length_decay") == ["–", "true"]  # no field of the configuration: its default is not known
    assert row_of(reader, "learning_rate") == ["0.1"]  # the same in all runs
    assert "output_dir" not in {row[0] for row in reader.rows}  # differs always, and the names tell as much
    alts = {image["alt"].split(" over ")[0]: image["alt"] for image in reader.all("img")}
    assert "a: " in alts["mean reward"]
    assert "b: " in alts["mean reward"]
    assert "b: " not in alts["multiplier λ"]


def test_seeds_of_one_setting_look_alike_and_are_averaged(tmp_path):
    runs = []
    for name, seed, constraint, greedy in (("a", 0, 0, 0.6), ("b", 0, 1, 0.5), ("c", 1, 0, 0.8)):
        settings = {"seed": seed, "output_dir": name} | ({"constraint": "none"} if constraint else {})
        after = {"greedy": greedy, "greedy_se": 0.01, "discrepancy": 0.001 * (seed + 1)}
        runs.append(make_run(tmp_path / name, settings=settings, summary=make_summary(after=after)))
    a, b, c = (line.style for line in run_lines([read_run(run) for run in runs]))
    assert a.colour == c.colour != b.colour
    assert a.line != c.line
    reader = read_report(write_report(runs, tmp_path / "report.html")[0])
    # (0.6 + 0.8)/2, and the standard error |0.8 − 0.6|/2; δ̄ likewise.
    assert row_of(reader, "a, c") == ["2", "0.700 ± 0.100", "0.0015 ± 0.0005"]


def test_a_killed_run_is_reported_as_far_as_it_came(tmp_path):
    run = make_run(tmp_path / "run", settings=SETTINGS)
    (run / "before.json").write_text(json.dumps(make_summary()["before"]))
    with open(run / "history.jsonl", "a") as file:
        file.write('{"step": 5, "reward": 0.9')
    reader = read_report(write_report([run], tmp_path / "report.html")[0])
    assert row_of(reader, "state") == ["going on, or stopped"]
    assert row_of(reader, "optimizer steps") == ["4"]
    assert row_of(reader, "greedy reward before") == ["0.406 ± 0.062"]
    names = {row[0] for row in reader.rows}
    assert "greedy reward after" not in names
    assert row_of(reader, "discrepancy δ̄ before") == ["0.0021"]
    assert row_of(reader, "discrepancy δ̄ after") == ["0.004"]  # of the last batch


def test_a_history_alone_is_enough(tmp_path):
    ends = [{"step": 3, "collapse/reward": 0.1}, {"step": 3, "train_runtime": 12.3}]
    run = make_run(tmp_path / "run", rows=[*make_rows(3), *ends])
    reader = read_report(write_report([run], tmp_path / "report.html")[0])
    assert row_of(reader, "state") == ["finished"]
    assert row_of(reader, "collapse alarms") == ["reward at step 3"]
    assert row_of(reader, "training seconds") == ["12"]
    assert row_of(reader, "multiplier λ after") == ["0.103"]
    assert "Settings" not in reader.texts["h2"]


def test_values_that_are_not_finite_are_counted_and_not_drawn(tmp_path):
    values = {1: 0.1, 2: math.nan, 3: math.inf, 4: None}
    run = make_run(tmp_path / "run", rows=make_rows(reward=values.get, grad_norm=math.nan))
    assert read_run(run).series("reward") == ([1], [0.1])
    reader = read_report(write_report([run], tmp_path / "report.html")[0])
    (caption,) = [text for text in reader.texts["figcaption"] if text.startswith("Mean reward")]
    assert caption.endswith("Not drawn because NaN or infinite: 2 values.")
    assert not (tmp_path / "report_figures" / "grad_norm.png").exists()  # nothing of it can be drawn


def test_the_tolerance_is_what_was_logged_else_what_the_violation_tells(tmp_path):
    automatic = {"lagrangian/tolerance": lambda step: None if step < 3 else 0.0007}
    logged = read_run(make_run(tmp_path / "new", rows=make_rows(**automatic, **{"lagrangian/violation": 5.0})))
    assert logged.tolerance() == ([3, 4], [0.0007, 0.0007])
    derived = read_run(make_run(tmp_path / "old"))
    assert derived.tolerance() == ([1, 2, 3, 4], [0.002] * 4)
    free = read_run(make_run(tmp_path / "free", rows=make_rows(**{"lagrangian/violation": None})))
    assert free.tolerance() == ([], [])
    reader = read_report(write_report([tmp_path / name for name in ("new", "old", "free")], tmp_path / "r.html")[0])
    assert row_of(reader, "tolerance ε") == ["0.0007", "0.002", "–"]


def test_benchmarks_have_panels_and_rows_of_their_own(tmp_path):
    rows = make_rows(2)
    for step, value in ((0, 0.25), (2, 0.5)):
        rows.append({"step": step, "eval_math/500 ü/avg@4": value, "eval_math/500 ü/avg@4_se": 0.02})
    run = make_run(tmp_path / "run", rows=rows)
    _, *figures = write_report([run], tmp_path / "report.html")
    assert "benchmark_math_500_ü_avg_4" in {figure.stem for figure in figures}
    reader = read_report(tmp_path / "report.html")
    assert row_of(reader, "math 500 ü avg@4 before") == ["0.250 ± 0.020"]
    assert row_of(reader, "math 500 ü avg@4 after") == ["0.500 ± 0.020"]


def test_bounds_surge_and_halvings_are_drawn_where_they_are(tmp_path):
    events = {
        "length_decay/surge_step": lambda step: 15 if step == 19 else None,
        "length_decay/period": lambda step: 27 if step == 19 else None,
        "length_decay/halvings": lambda step: step // 27 or None if step % 27 == 0 else None,
    }
    rows = make_rows(60, **events, **{"lagrangian/lambda": lambda step: min(0.3, 0.01 * step)})
    run = read_run(make_run(tmp_path / "run", rows=rows, settings={"lambda_max": 0.3}))
    figures = {panel.name: panel.figure(run_lines([run])) for panel in panels_of([run])}

    def verticals(name):
        lines = figures[name].axes[0].lines
        return [x[0] for x in (list(line.get_xdata()) for line in lines) if len(x) == 2 and x[0] == x[1]]

    assert verticals("length") == [15]
    assert verticals("learning_rate") == [27, 54, 15]
    assert figures["length"].axes[0].get_title("right") == "surge at step 15, halved every 27 steps"
    axes = figures["lambda"].axes[0]
    assert axes.get_title("right") == "bounds 0 and 0.3"
    assert [0.3, 0.3] in [list(line.get_ydata()) for line in axes.lines]


def test_a_curve_that_explodes_is_drawn_so_that_both_ends_are_seen(tmp_path):
    rows = make_rows(20, **{"discrepancy/k3_kl": lambda step: 1e-4 if step < 18 else 10.0})
    run = read_run(make_run(tmp_path / "run", rows=rows))
    scales = {panel.name: panel.figure(run_lines([run])).axes[0].get_yscale() for panel in panels_of([run])}
    assert scales["k3_kl"] == "log"
    assert scales["discrepancy"] == scales["reward"] == "linear"


@pytest.mark.parametrize("count", [1, 2, 12])
@pytest.mark.parametrize(
    "reward",
    [
        lambda step: 0.1 * step,
        lambda step: -1.25e-4 * step,
        lambda step: 3e-9 * step,  # an exponent
        lambda step: -4.5e8 * step,
        lambda step: 1 + 1e-7 * step,  # an offset
        lambda step: 123456.0,
    ],
)
def test_all_of_a_figure_is_within_it_and_nothing_covers_another(tmp_path, count, reward):
    rows = [row | {"step": 2503 * row["step"]} for row in make_rows(reward=reward)]
    runs = [read_run(make_run(tmp_path / f"run-{i}-with-a-long-name", rows)) for i in range(count)]
    figure = panels_of(runs)[0].figure(run_lines(runs))
    drawn = io.BytesIO()
    figure.savefig(drawn)
    pixels = np.asarray(Image.open(drawn).convert("L"))
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert edge.min() == 255  # nothing is cut off

    (axes,) = figure.axes
    inner = axes.get_window_extent()
    assert 0.1 * pixels.shape[1] < inner.x0 < 0.2 * pixels.shape[1]  # figures of one column line up
    low, high = axes.get_xlim()
    numbers = [
        tick.label1.get_window_extent() for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high
    ]
    (title,) = (text for text in axes.get_children() if isinstance(text, Text) and text.get_text() == "mean reward")
    exponent = axes.yaxis.get_offset_text()
    legends = [legend.get_window_extent() for legend in figure.legends]
    column = [*legends, axes.xaxis.label.get_window_extent(), Bbox.union(numbers), inner]  # upwards
    column += [text.get_window_extent() for text in (exponent, title) if text.get_text()]
    assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(column))
    assert inner.height > 0.6 * 2.8 * figure.dpi  # of the height of a figure without a legend


HOSTILE = ["<script>alert(1)<∕script>", "_hidden $\\frac{1", "x" * 120, "日本 & ünï"]


@pytest.mark.filterwarnings("ignore:Glyph")  # the figures' font has no Japanese; the tables are the browser's
def test_names_of_any_kind_are_names(tmp_path):
    runs = [make_run(tmp_path / name, settings={"seed": 0, "run_name": name}) for name in HOSTILE]
    page, *_ = write_report(runs, tmp_path / "report.html")
    reader = read_report(page)
    assert reader.rows[0] == ["", *HOSTILE]
    assert HOSTILE[0] not in page.read_text()
    lines = run_lines([read_run(run) for run in runs])
    figure = panels_of([line.run for line in lines])[0].figure(lines)
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown[:2] == HOSTILE[:2]
    assert len(shown[2]) < 60
    plot_run(read_history(runs[1] / "history.jsonl"), tmp_path / "run.png", HOSTILE[1])


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / parent / "run") for parent in ("a", "b")] + [make_run(tmp_path / "c")]
    reader = read_report(write_report(runs, tmp_path / "report.html")[0])
    assert reader.rows[0] == ["", "a/run", "b/run", "c"]


def test_a_report_is_made_anew_and_nothing_else_is_touched(tmp_path):
    run = make_run(tmp_path / "run")
    page = tmp_path / "report.html"
    write_report([run], page)
    note = tmp_path / "report_figures" / "note.png"
    note.write_text("mine")
    (run / "history.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    _, *figures = write_report([run], page)
    assert [figure.name for figure in figures] == ["reward.png"]
    assert sorted(path.name for path in page.with_name("report_figures").iterdir()) == ["note.png", "reward.png"]
    assert note.read_text() == "mine"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, r"run='.*run' is no directory: give the output_dir of a run\."),
        (lambda folder: folder.mkdir(), "has no history.jsonl: give the output_dir"),
        (lambda folder: make_run(folder, rows=[]), "history.jsonl is empty: wait until"),
        (lambda folder: (make_run(folder) / "history.jsonl").write_text("{}\n"), "line 1 has no step"),
        (lambda folder: (make_run(folder) / "history.jsonl").write_text("x\n{}\n"), "line 1 is not JSON"),
        (lambda folder: (make_run(folder) / "summary.json").write_text("{"), "summary.json is not JSON"),
        (lambda folder: (make_run(folder) / "before.json").write_text("[]"), "before.json holds no JSON object"),
        (lambda folder: (make_run(folder) / "history.jsonl").write_bytes(b"\xff\x00"), "history.jsonl is no text"),
        (lambda folder: (make_run(folder) / "history.jsonl").write_text('{"step": true}\n'), "line 1 has no step"),
        (lambda folder: (make_run(folder) / "history.jsonl").write_text("[" * 9999 + "\n"), "line 1 is not JSON"),
        (lambda folder: (make_run(folder) / "settings.json").write_bytes(b"\xff"), "settings.json is no text"),
        (lambda folder: (make_run(folder) / "settings.json").write_text("[]"), "settings.json holds no JSON object"),
        (lambda folder: make_run(folder, settings={"lambda_max": "x"}), "settings.json: lambda_max='x'"),
        (lambda folder: make_run(folder, summary={}), "summary.json lacks 'steps'"),
        (lambda folder: make_run(folder, summary=[]), "summary.json holds no JSON object"),
        (lambda folder: make_run(folder, summary=make_summary(steps="many")), "summary.json: steps='many'"),
        (lambda folder: make_run(folder, summary=make_summary(after="x")), "summary.json: after='x'"),
        (lambda folder: make_run(folder, summary=make_summary(before=[])), "summary.json: before="),
        (lambda folder: make_run(folder, summary=make_summary(after={"greedy": "x"})), "summary.json: greedy='x'"),
        (lambda folder: make_run(folder, summary=make_summary(seconds={})), "summary.json: seconds="),
        (lambda folder: (make_run(folder) / "before.json").write_text('{"greedy": "x"}'), "before.json: greedy='x'"),
    ],
)
def test_what_is_no_run_is_refused_before_anything_is_written(tmp_path, prepare, message):
    prepare(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        write_report([tmp_path / "run"], tmp_path / "new" / "report.html")
    assert not (tmp_path / "new").exists()


def test_what_stands_in_the_way_is_kept(tmp_path):
    run = make_run(tmp_path / "run")
    before = (run / "history.jsonl").read_bytes()
    with pytest.raises(ValueError, match="exists and is no report of runs: choose another file"):
        write_report([run], run / "history.jsonl")
    assert (run / "history.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="is a directory: give a file, for example"):
        write_report([run], run)
    (tmp_path / "report_figures").mkdir()
    (tmp_path / "report_figures" / "reward.png").write_text("mine")
    with pytest.raises(ValueError, match=r"needs '.*report_figures' for its figures, which holds something else"):
        write_report([run], tmp_path / "report.html")
    assert (tmp_path / "report_figures" / "reward.png").read_text() == "mine"
    with pytest.raises(ValueError, match="is given twice"):
        write_report([run, tmp_path / "." / "run"], tmp_path / "other.html")
    with pytest.raises(ValueError, match="give at least one"):
        write_report([], tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_without_an_output_the_page_is_in_the_run(tmp_path, capsys):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    for _ in range(2):  # the second call replaces the first one's page
        report_command.main([str(run)])
    assert {"report.html", "report_figures"} < {path.name for path in run.iterdir()}
    assert read_report(run / "report.html").texts["h1"] == ["Run run"]
    assert str(run / "report.html") in capsys.readouterr().out
    report_command.main([str(run), "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").exists()
    with pytest.raises(SystemExit, match="error: output is not set, and there are 2 runs: name the page"):
        report_command.main([str(run), str(other)])
    (other / "report.html").write_text("mine")
    with pytest.raises(SystemExit, match="exists and is no report of runs: choose another file"):
        report_command.main([str(other)])
    assert (other / "report.html").read_text() == "mine"
    with pytest.raises(SystemExit, match=r"error: .*none"):
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


def make_trainer(output_dir, callback=None, peft_config=None, **options):
    return DCGRPOTrainer(
        model=make_model(),
        reward_funcs=distinct_characters,
        args=make_config(output_dir, **options),
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
        rollout_func=Rollouts(),
        callbacks=[callback or LambdaLoggingCallback()],
        peft_config=peft_config,
    )


def test_a_trainer_leaves_what_a_report_needs_and_no_secret(tmp_path):
    peft = LoraConfig(r=3, target_modules=["q_proj", "v_proj"])
    callback = LambdaLoggingCallback({"dataset_name": "mine"})
    trainer = make_trainer(
        tmp_path / "run", callback, max_steps=2, lambda_init=0.25, peft_config=peft, run_name=SECRETS["run_name"]
    )
    trainer.args.hub_token = SECRET
    trainer.train()
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} >= {"history.jsonl", "settings.json", "run.png"}
    for path in run.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    settings = json.loads((run / "settings.json").read_text())
    assert "hub_token" not in settings
    assert settings["dataset_name"] == "mine"
    assert settings["lambda_init"] == 0.25
    assert settings["max_steps"] == 2
    assert "lambda_lr" not in settings  # left alone
    assert settings["peft"]["default"]["r"] == 3
    assert settings["peft"]["default"]["target_modules"] == ["q_proj", "v_proj"]
    reader = read_report(write_report([run], tmp_path / "report.html")[0])
    assert row_of(reader, "lambda_init") == ["0.25"]
    history = read_history(run / "history.jsonl")
    assert row_of(reader, "tolerance ε") == ["0.0037"]
    assert row_of(reader, "multiplier λ before") == [f"{history[0]['lagrangian/lambda']:.4g}"]

    # A second run in the same directory begins its own files and keeps the first one's.
    make_trainer(run, max_steps=1).train()
    assert json.loads((run / "settings.1.json").read_text()) == settings
    assert read_history(run / "history.1.jsonl") == history
    assert json.loads((run / "settings.json").read_text())["max_steps"] == 1


def test_a_resumed_run_keeps_its_settings(tmp_path):
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    settings = (tmp_path / "settings.json").read_bytes()
    resumed = make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert (tmp_path / "settings.json").read_bytes() == settings
    assert [row["step"] for row in read_history(tmp_path / "history.jsonl") if "loss" in row] == [1, 2]


def test_settings_are_json_without_secrets(tmp_path):
    args = make_config(tmp_path)
    for name, value in SECRETS.items():
        setattr(args, name, value)
    found = changed_settings(args)
    text = json.dumps(found)
    assert SECRET[3:] not in text
    assert "hub_token" not in found
    assert found["optim_args"] == "a=1,api_key=(hidden)"
    assert found["report_to"] == ["--api-key", "(hidden)", "--hf-token=(hidden)", "kept"]
    assert found["generation_kwargs"] == {"nested": [{"kept": 1}]}
    assert found["vllm_server_base_url"] == "http://127.0.0.1:8000/?&"
    assert found["run_name"] == "run (hidden)"
    assert found["lr_scheduler_type"] == "constant"


def test_settings_of_other_trainers_are_compared_with_the_same_defaults(tmp_path):
    args = GRPOConfig(str(tmp_path), epsilon=0.24, use_cpu=True, bf16=False, report_to="none")
    found = changed_settings(args, DCGRPOConfig)
    assert found["epsilon"] == 0.24
    assert "loss_type" not in found  # TRL's default is the recipe's
    assert found["vllm_importance_sampling_correction"]  # where TRL has it on and it has no effect


def test_the_script_writes_a_report_and_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run")
    script = program("report")

    def report(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        script.main()

    report(run, "--output", tmp_path / "report.html", "--title", "Mine")
    assert capsys.readouterr().out == f"wrote {tmp_path}/report.html, and 7 figures in {tmp_path}/report_figures\n"
    assert read_report(tmp_path / "report.html").texts["h1"] == ["Mine"]
    with pytest.raises(SystemExit, match=r"^error: run='.*nothing' is no directory"):
        report(tmp_path / "nothing", "--output", tmp_path / "other.html")


def test_a_number_too_large_to_draw_is_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "history.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": ' + "9" * 400 + "}\n")
    write_report([run], tmp_path / "report.html")
    assert read_run(run).series("reward").values == [0.5]


def test_a_report_needs_no_engine_and_no_trainer(tmp_path):
    """Of runs that differ in settings of TRL's too, and of one without a summary, whose seed is the default."""
    first = make_run(tmp_path / "a", settings={"max_steps": 4, "loss_type": "grpo"})
    second = make_run(tmp_path / "b", settings={"max_steps": 4, "beta": 0.1}, summary=make_summary())
    code = (
        "import sys; sys.argv = ['dc-trl', 'report', *sys.argv[1:]]; import runpy;"
        "runpy.run_module('dc_trl', run_name='__main__');"
        "import dc_trl.records.estimators, dc_trl.records.tables;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", code, str(first), str(second), "--output", str(tmp_path / "report.html")]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "matplotlib" in loaded
    heavy = {"torch", "trl", "transformers", "peft", "vllm", "accelerate", "datasets", "pandas", "pyarrow", "aiohttp"}
    assert not heavy & set(loaded)
    reader = read_report(tmp_path / "report.html")
    assert row_of(reader, "seed") == ["42", "3"]
    assert row_of(reader, "loss_type") == ["grpo", "dapo (default)"]
    assert row_of(reader, "beta") == ["0.0 (default)", "0.1"]
