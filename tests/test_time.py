"""Where the time of a run goes: disjoint parts that add up to the time of the training, in trainer and report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dc_trl import HistoryCallback
from dc_trl.callbacks.before_and_after import BeforeAndAfter
from dc_trl.command.finish import summarize
from dc_trl.records.clock import PREFIX, PartsClock
from dc_trl.records.page import time_table, write_report
from dc_trl.records.runs import read_run

from . import helpers
from .helpers import (
    Rollouts,
    distinct_characters,
    logged,
    read_json,
)
from .html_reader import Reader


class FakeTime:
    """A clock that goes on only when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


# --- the clock

NAMED = ["generation", "sync", "loss", "evaluation"]
# A program: seconds that pass, or a part with a program in it.
programs = st.recursive(
    st.integers(0, 9).map(float),
    lambda inner: st.tuples(st.sampled_from(NAMED), st.lists(inner, max_size=4)),
    max_leaves=20,
)


def run_program(clock, fake, program):
    if isinstance(program, float):
        fake.spend(program)
        return
    name, steps = program
    with clock.part(name):
        for step in steps:
            run_program(clock, fake, step)


def own_seconds(program, part="other"):
    """Pairs of part and seconds, by the definition: what passes within a part and within no part in it."""
    if isinstance(program, float):
        yield part, program
        return
    name, steps = program
    for step in steps:
        yield from own_seconds(step, part if part == "evaluation" else name)


@given(st.lists(programs, max_size=6))
def test_parts_are_disjoint_and_add_up(steps):
    fake = FakeTime()
    clock = PartsClock(fake)
    fake.spend(3.0)  # before the start nothing counts
    clock.start()
    start = fake.now
    for step in steps:
        run_program(clock, fake, step)
    clock.stop()
    wall = fake.now - start
    fake.spend(5.0)
    expected = {}
    for step in steps:
        for part, seconds in own_seconds(step):
            expected[part] = expected.get(part, 0.0) + seconds
    found = clock.seconds()
    assert {part: seconds for part, seconds in found.items() if seconds} == {p: s for p, s in expected.items() if s}
    assert sum(found.values()) == wall


# --- the trainer


def make_trainer(tmp_path, fake=None, reward=None, rollouts=None, **fields):
    options = {"rollout_func": rollouts or Rollouts(), "callbacks": [HistoryCallback()]} | fields
    trainer = helpers.make_trainer(tmp_path, None, reward, **options)
    if fake is not None:
        trainer.clock = PartsClock(fake)
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])  # with 1, TRL computes old log-probs
def test_each_part_gets_what_was_spent_in_it(tmp_path, accumulation):
    fake = FakeTime()

    def reward(completions, **kwargs):
        fake.spend(5)
        return distinct_characters(completions)

    class SlowRollouts(Rollouts):
        def __call__(self, prompts, trainer):
            fake.spend(7)
            return super().__call__(prompts, trainer)

    trainer = make_trainer(
        tmp_path,
        fake,
        reward,
        SlowRollouts(),
        max_steps=4,
        steps_per_generation=2,
        gradient_accumulation_steps=accumulation,
        save_steps=4,
    )
    forwards = []

    def forward(module, args, output):
        forwards.append(trainer.clock.present)
        fake.spend(11)

    trainer.model.register_forward_hook(forward)
    optimizer = trainer.create_optimizer()
    optimizer.register_step_pre_hook(lambda *_: fake.spend(13))
    trainer.train()
    batches = 4 * accumulation // 2
    expected = {"reward": 5 * batches, "generation": 7 * batches, "optimizer": 13 * 4}
    # The two micro-batches of a generation batch are scored one by one before the loss.
    expected |= {"loss": 11 * 4 * accumulation} | ({"logps": 11 * 2 * batches} if accumulation == 1 else {})
    found = {part: seconds for part, seconds in trainer.clock.seconds().items() if seconds}
    assert found == expected
    assert set(forwards) == ({"loss", "logps"} if accumulation == 1 else {"loss"})
    # The log says the same, step by step.
    for part, seconds in expected.items():
        assert sum(logged(trainer, f"{PREFIX}{part}")) == seconds


def test_a_resumed_run_goes_on_counting(tmp_path):
    make_trainer(tmp_path, max_steps=2, save_steps=1).train()
    saved = read_json(tmp_path / "checkpoint-1" / "dc_grpo_state.json")["seconds"]
    assert saved["loss"] > 0
    fake = FakeTime()
    resumed = make_trainer(tmp_path, fake, max_steps=2)
    resumed.add_callback(BeforeAndAfter(resumed))
    resumed.model.register_forward_hook(lambda *_: fake.spend(11))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    seconds = resumed.clock.seconds()
    assert seconds["loss"] == pytest.approx(saved["loss"] + 11)
    assert sum(seconds.values()) == pytest.approx(sum(saved.values()) + 11)
    # The history of the first step stays, and the second one's is of this session.
    assert [row[f"{PREFIX}loss"] for row in read_run(tmp_path).history if row["step"] == 2 and "loss" in row] == [11]
    # Called again without a checkpoint it is a new run.
    resumed.train()
    assert resumed.clock.seconds()["loss"] == 11 * 2


# --- summary and report


def test_summary_and_report_say_where_the_time_went(tmp_path):
    fake = FakeTime()

    def reward(completions, **kwargs):
        fake.spend(30)
        return distinct_characters(completions)

    trainer = make_trainer(tmp_path / "run", fake, reward)
    trainer.model.register_forward_hook(lambda *_: fake.spend(10))
    trainer.add_callback(BeforeAndAfter(trainer))
    trainer.train()
    tokens = trainer.state.num_input_tokens_seen
    unfinished = time_table(read_run(tmp_path / "run")).rows
    summarize(trainer)
    page = write_report(tmp_path / "run", tmp_path / "page.html").read_text(encoding="utf-8")
    for rows in (unfinished, Reader(page).rows):
        cells = [row[1:] for row in rows]
        assert ["90.0", "75.0%", ""] in cells  # the reward works on no tokens
        assert ["30.0", "25.0%", f"{tokens / 30:,.0f}"] in cells
