"""What a run shows from its first line to its last: bars, units, seconds, and what its summary compares."""

import ast
import logging

import pytest
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer

from dc_trl import HistoryCallback
from dc_trl.callbacks.before_and_after import BeforeAndAfter
from dc_trl.command.arguments import WatchArguments
from dc_trl.command.build import add_callbacks
from dc_trl.command.finish import summarize
from dc_trl.records.page import outcome_table
from dc_trl.records.runs import Run, outcome, read_history, read_run
from dc_trl.records.verdict import verdict_of

from .helpers import On, make_prompts, make_trainer, read_json


def trained(output_dir, held_out=2, between=False, reward=None, **fields):
    """A trainer that was trained, and its summary."""
    trainer = make_trainer(
        output_dir,
        reward=reward,
        train_dataset=make_prompts(2),  # an epoch of two steps, as scripts/train.py sizes it
        eval_dataset=make_prompts(held_out),
        callbacks=[HistoryCallback()],
        **{"deployment_scheme": "fp8", "max_steps": 2, "save_steps": 2} | fields,
    )
    trainer.add_callback(BeforeAndAfter(trainer, between))
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    summarize(trainer)
    return trainer, read_json(output_dir / "summary.json")


def printed(capsys, words):
    """The first line of the output that has these words."""
    return next(line for line in capsys.readouterr().out.splitlines() if words in line)


def zero_or_one(completions, **kwargs):
    return [float(len(completion) % 2) for completion in completions]


def below_zero(completions, **kwargs):
    return [None if len(completion) % 3 == 0 else -len(completion) / 8 for completion in completions]


def test_the_greedy_reward_is_the_weighted_sum_in_table_report_and_card(tmp_path, capsys):
    rewards = {"reward": [zero_or_one, below_zero], "reward_weights": [1.0, 0.5]}
    trainer, summary = trained(tmp_path, max_steps=1, **rewards)
    greedy = f"{summary['after']['greedy']:.3f} ±"
    assert greedy in printed(capsys, "greedy reward")
    measured = {row[0]: row[1:] for row in outcome_table(read_run(tmp_path)).rows}
    assert measured["greedy reward"][1].startswith(greedy)
    trainer.create_model_card()
    assert greedy in (tmp_path / "README.md").read_text()


def test_the_last_steps_are_logged_where_an_evaluation_follows_them(tmp_path):
    """TRL's last log takes the metrics of the evaluation, if the model has been evaluated after the last step."""
    rewards = {}
    for steps in (1, 10):
        folder = tmp_path / str(steps)
        trainer, _ = trained(folder, reward=zero_or_one, max_steps=3, logging_steps=steps)
        run = read_run(folder)
        rewards[steps] = run.series("reward")
        assert run.steps == 3
        seconds = sum(value for row in run.history for name, value in row.items() if name.startswith("time/"))
        (whole,) = run.series("train_runtime").values
        # The clock starts before transformers' own, whose figure is rounded, and no second counts for two parts.
        assert whole - 1e-3 <= seconds <= sum(trainer.clock.seconds().values()) + 1e-6
    assert rewards[1].steps == [1, 2, 3]
    assert rewards[10] == ([3], [pytest.approx(sum(rewards[1].values) / 3)])
    assert not any("Nothing was learned" in line or "not measured" in line for line in verdict_of(run).lines)


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_printed_log_has_trls_metrics_and_few_of_ours(tmp_path, capsys, disable_tqdm):
    """History and trackers have all."""
    tracked = []
    fields = {"max_steps": 1, "disable_tqdm": disable_tqdm}
    tracker = On("on_log", lambda state, logs, **_: tracked.append(dict(logs)))
    make_trainer(tmp_path / "trl", kind=GRPOTrainer, **fields).train()
    ours = make_trainer(tmp_path / "ours", deployment_scheme="fp8", callbacks=[HistoryCallback(), tracker], **fields)
    ours.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'loss'")]
    by_trl, by_ours = (ast.literal_eval(line).keys() for line in lines)
    assert by_ours - by_trl == {"discrepancy/mean", "discrepancy/k3_kl", "lagrangian/lambda"}
    assert by_trl <= by_ours
    assert {"discrepancy/ess", "lagrangian/violation", "time/loss"} <= tracked[0].keys()
    assert tracked[0].keys() | {"step"} == read_history(tmp_path / "ours" / "history.jsonl")[0].keys()


def test_an_evaluation_of_before_is_not_shown_as_after(tmp_path, capsys):
    """Its step is named where the run has measured nothing later."""
    calls = []

    def at_first(completions, **kwargs):
        calls.append(completions)
        return [1.0 if len(calls) == 1 else None] * len(completions)

    _, summary = trained(tmp_path, reward=at_first)
    assert "reward" in summary["before"]
    assert "reward" not in summary["after"]
    assert "discrepancy" in summary["after"]
    cells = printed(capsys, "sampled reward").split("│")
    assert [cell.strip() for cell in cells[2:4]] == ["1", ""]
    going_on = Run("", [{"step": 0, "eval_reward": 0.5}, {"step": 4, "eval_reward": 0.25}, {"step": 9, "reward": 0.5}])
    assert outcome(going_on) == [["sampled reward", "0.5", "0.25 (step 4)"]]


def test_bars_say_what_is_evaluated(tmp_path, capsys):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    transformers_logging.get_logger("transformers.generation.utils").warning_once.__func__.cache_clear()
    transformers_logging.add_handler(handler)
    try:
        trained(tmp_path, save_steps=1, disable_tqdm=False)
        assert "greedy, 1 of 1" in capsys.readouterr().err
        trainer, summary = trained(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    finally:
        transformers_logging.remove_handler(handler)
    assert summary["seconds"] == sum(trainer.clock.seconds().values()) > 0
    assert "held-out" not in capsys.readouterr().err
    assert not [text for text in records if "prefill_chunk_size" in text]  # generation gets one configuration


def test_a_run_that_is_resumed_after_its_last_step_says_the_same(tmp_path):
    _, whole = trained(tmp_path)
    assert {"greedy", "greedy_se", "reward", "discrepancy"} == whole["before"].keys()
    (tmp_path / "summary.json").unlink()  # killed before it was written
    _, resumed = trained(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed["before"] == whole["before"]
    assert resumed["after"]["greedy"] == pytest.approx(whole["after"]["greedy"])
    assert resumed["lambda"] == whole["lambda"]


def test_a_single_held_out_problem_has_no_standard_error(tmp_path, capsys):
    _, run = trained(tmp_path, held_out=1)
    assert "greedy_se" not in run["after"]
    row = printed(capsys, "greedy reward")
    assert "±" not in row
    assert f"{run['after']['greedy']:.4g}" in row


def test_greedy_completions_are_measured_in_between_where_that_is_asked_for(tmp_path):
    for between in (False, True):
        folder = tmp_path / str(between)
        folder.mkdir()
        _, summary = trained(folder, between=between, eval_steps=1, per_device_eval_batch_size=8)
        run = read_run(folder)
        greedy = run.series("eval_greedy_reward").by_step()
        assert list(greedy) == ([0, 1, 2] if between else [0, 2])
        assert (greedy[0], greedy[2]) == (summary["before"]["greedy"], summary["after"]["greedy"])


def test_a_run_has_one_bar_which_says_when_it_evaluates(tmp_path, capsys):
    fields = {"deployment_scheme": "fp8", "max_steps": 2, "save_steps": 500, "disable_tqdm": False}
    held_out = {"eval_dataset": make_prompts(8), "per_device_eval_batch_size": 4}
    trainer = make_trainer(tmp_path, **fields, **held_out)
    trainer.add_callback(BeforeAndAfter(trainer))
    try:
        add_callbacks(trainer, WatchArguments())
        capsys.readouterr()
        trainer.train()
    finally:
        transformers_logging.enable_progress_bar()
    shown = capsys.readouterr().err
    for text in ("held-out problems, 2 of ", "held-out problems, greedy, 2 of 2: 100%", "2/2 ", "reward=", "λ="):
        assert text in shown
    assert "\x1b[A" not in shown  # what moves up from a bar below another one
    assert all("held-out" in part or "/2 [" in part for part in shown.split("\r") if "%|" in part)
