"""What a run keeps for its readers: sampled completions, and when and on what it was started."""

import itertools
import json
import math
import re
from datetime import UTC, datetime

import pytest
import torch
import trl
from hypothesis import given, settings
from hypothesis import strategies as st

from dc_trl import HistoryCallback
from dc_trl.hub.push import run_files
from dc_trl.records.runs import read_run
from dc_trl.records.samples import (
    MOST_MOMENTS,
    Moment,
    Sample,
    SampleRecord,
    choose_samples,
    read_samples,
    readable,
    shortened,
    three_moments,
)
from dc_trl.records.started import read_starts
from dc_trl.report import write_report
from dc_trl.report.tables import start_facts

from . import helpers
from .helpers import Rollouts, distinct_characters, make_prompts
from .html_reader import Reader, require_self_contained
from .test_report import make_run, row_of


def make_trainer(folder, **options):
    return helpers.make_trainer(folder, rollout_func=Rollouts(), callbacks=[HistoryCallback()], **options)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5, 1.0, 0.0], {"first": "a", "best": "b", "worst": "c"}),
        ([1.0, 0.0, 1.0], {"first, best": "a", "worst": "b"}),
        ([2.0, 0.5, 1.0], {"first, best": "a", "worst": "b"}),
        ([math.nan, 0.5, 0.75], {"first": "a", "best": "c", "worst": "b"}),
        ([math.nan] * 3, {"first": "a"}),
        ([1.0], {"first, best, worst": "a"}),
        ([], {}),
    ],
)
def test_first_best_and_worst(rewards, expected):
    texts = ["a", "b", "c"][: len(rewards)]
    samples = choose_samples([f"prompt of {text}" for text in texts], texts, rewards)
    assert {sample.which: sample.completion for sample in samples} == expected
    for sample in samples:
        reward = rewards[texts.index(sample.completion)]
        assert sample.prompt == f"prompt of {sample.completion}"
        assert sample.reward is None if math.isnan(reward) else sample.reward == reward


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 200), st.integers(0, 199))
def test_moments_are_few_and_spread_over_the_run(tmp_path_factory, steps, resumed_at):
    folder = tmp_path_factory.mktemp("run")
    record = SampleRecord(folder)
    for step in range(1, steps + 1):
        record.add(step, [Sample("first", "p", str(step), 0.0)])
        if step == resumed_at:
            record = SampleRecord(folder, step)
    moments = read_samples(folder)
    found = [moment.step for moment in moments]
    assert all(moment.samples[0].completion == str(moment.step) for moment in moments)
    assert len(found) <= MOST_MOMENTS
    assert (found[0], found[-1]) == (1, steps)
    # No gap is larger than a quarter of the run, once there are four steps.
    assert max([b - a for a, b in itertools.pairwise(found)], default=0) <= max(1, math.ceil(steps / 4) + 1)
    first, *middle, last = [moment.step for moment in three_moments(moments)] * (1 if steps > 1 else 2)
    assert (first, last) == (1, steps)
    assert all(abs(step - (1 + steps) / 2) <= max(1, steps / 4) for step in middle)


def test_a_resumed_record_drops_what_is_made_again(tmp_path):
    record = SampleRecord(tmp_path)
    for step in (1, 2, 3, 4):
        record.add(step, [Sample("first", "p", "before", None)])
    SampleRecord(tmp_path, step=2).add(3, [Sample("first", "p", "after", None)])
    assert [(moment.step, moment.samples[0].completion) for moment in read_samples(tmp_path)] == [
        (1, "before"),
        (2, "before"),
        (3, "after"),
    ]


def test_the_file_of_an_earlier_version_is_read(tmp_path):
    sample = {"which": "first", "prompt": "p", "completion": "c", "reward": 0.5}
    moments = [{"log": 0, "step": 3, "samples": [sample]}]  # it counted the logs
    (tmp_path / "completions.json").write_text(json.dumps({"moments": moments}))
    assert read_samples(tmp_path) == [Moment(3, [Sample("first", "p", "c", 0.5)])]


def test_messages_and_long_texts_are_readable():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    assert readable(messages[2:]) == "tool: 3"
    user, assistant, _ = readable(messages).splitlines()
    assert json.loads(user.removeprefix("user: "))["content"] == [
        {"type": "image", "image": "(object)"},
        {"type": "text", "text": "What?"},
    ]
    assert json.loads(assistant.removeprefix("assistant: "))["tool_calls"] == [call]
    assert readable("as it is") == shortened("as it is") == "as it is"
    text = shortened("a" * 3000 + "b" * 3000)
    assert text.startswith("a" * 2000 + "\n")
    assert text.endswith("\n" + "b" * 2000)
    assert "2,000 characters left out" in text


def test_a_run_keeps_completions_with_their_rewards(tmp_path):
    make_trainer(tmp_path, max_steps=3).train()
    moments = read_samples(tmp_path)
    assert [moment.step for moment in moments] == [1, 2, 3]
    prompts = {readable(prompt) for prompt in make_prompts()["prompt"]}
    history = {row["step"]: row for row in read_run(tmp_path).history if "loss" in row}
    for moment in moments:
        by_name = {name: sample for sample in moment.samples for name in sample.which.split(", ")}
        assert set(by_name) == {"first", "best", "worst"}
        for sample in moment.samples:
            assert sample.prompt in prompts
            assert sample.reward == pytest.approx(distinct_characters([sample.completion])[0])
        mean = history[moment.step]["reward"]
        assert by_name["worst"].reward <= mean <= by_name["best"].reward
    # Prompts may be private.
    assert not {"completions.json", "starts.json"} & set(run_files(tmp_path))

    # Another run in the same directory keeps the first one's, under the number of its history.
    make_trainer(tmp_path, max_steps=1).train()
    assert [moment.step for moment in read_samples(tmp_path)] == [1]
    assert len(json.loads((tmp_path / "completions.1.json").read_text())["moments"]) == 3
    assert (tmp_path / "history.1.jsonl").is_file()
    assert (tmp_path / "starts.1.json").is_file()


def test_an_evaluation_is_not_what_is_shown_of_a_training_step(tmp_path):
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "steps_per_generation": 2}
    make_trainer(tmp_path, eval_dataset=make_prompts(), **options).train()
    first, second = read_samples(tmp_path)
    assert first.samples == second.samples  # one generation batch, with an evaluation in between


def test_a_run_says_when_and_on_what_it_was_started(tmp_path):
    before = datetime.now(UTC).replace(microsecond=0)
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    (start,) = read_starts(tmp_path)
    assert before <= datetime.fromisoformat(start["date"]) <= datetime.now(UTC)
    assert (start["step"], start["processes"]) == (0, 1)
    assert start["versions"]["trl"] == trl.__version__
    assert start["versions"]["torch"] == torch.__version__
    assert "core" in start["device"]
    resumed = make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [row["step"] for row in read_starts(tmp_path)] == [0, 1]
    assert [moment.step for moment in read_samples(tmp_path)] == [1, 2]


def test_facts_of_starts():
    old = {"date": "2026-01-02T23:30:00-01:00", "step": 0, "device": "A100", "processes": 8, "versions": {"trl": "1"}}
    new = {"date": "2026-01-04T05:06:07+00:00", "step": 40, "device": "H100", "processes": 1, "versions": {}}
    assert start_facts([old, new]) == {
        "started": "2026-01-03 00:30 UTC, 8 × A100, trl 1",
        "resumed at step 40": "2026-01-04 05:06 UTC, H100",
    }
    assert start_facts([]) == {}


@pytest.mark.parametrize("name", ["completions.json", "starts.json"])
@pytest.mark.parametrize("content", ["{", '{"moments": 1}', '{"moments": [{"log": 0, "step": 1, "samples": [{}]}]}'])
def test_a_file_that_no_run_wrote_is_named(tmp_path, name, content):
    make_run(tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        read_run(tmp_path / "run")


def test_completions_in_a_report_are_text(tmp_path):
    hostile = "<script>alert(1)</script>{{ 7 * 7 }}{% raw %}\x00\ud800 </div>"
    run = make_run(tmp_path / "run", settings={"model_name_or_path": "some/model"})
    record = SampleRecord(run)
    for step in (1, 2, 3, 4):
        best = Sample("first, best", hostile, f"answer {step}\n{hostile}", 1.0)
        record.add(step, [best, Sample("worst", "a prompt", "", None)])
    text = write_report(run, tmp_path / "report.html").read_text()
    reader = Reader(text)
    require_self_contained(reader)
    assert reader.texts["h3"] == ["Step 1", "Step 2", "Step 4"]
    assert reader.texts["h4"] == ["first, best: reward 1.000", "worst: no reward"] * 3
    shown = [part for part in reader.texts["div"] if "alert(1)" in part]
    assert len(shown) == 6
    assert all("<script>alert(1)</script>{{ 7 * 7 }}{% raw %}" in part for part in shown)
    assert sum(part.strip() == "(empty)" for part in reader.texts["div"]) == 3
    assert row_of(reader, "model") == ["some/model"]
    assert "started" not in {row[0] for row in reader.rows}  # a run of an earlier version
