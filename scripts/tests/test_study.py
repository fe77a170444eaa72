"""The study: which runs it makes, what is kept of them, and what it calls a difference."""

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
import yaml
from comparisons import SIGNIFICANCE, confidence_interval, holm, paired_t_test, sign_flip_p_value
from early_signs import (
    CHANGES,
    Judged,
    alarms_table,
    auc,
    changes_table,
    first_change,
    share_above,
    signs_table,
    threshold,
)
from figures import draw_mismatch, draw_sweep
from first_order import DIRECTIONS, first_order, sampled_batch
from hypothesis import given
from hypothesis import strategies as st
from lines import line_of, merged, read_lines, write_lines
from sweeps import SWEEPS, cell_name, load_study
from tables import comparison_table, controls_of, lines_of_sweeps, pairs_table, panels_table, setting_of

from dc_trl import DCGRPOTrainer
from dc_trl.command.arguments import RunArguments
from dc_trl.constraint.settings import ConstraintSettings
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.files import read_yaml
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.records.tables import markdown_table
from dc_trl.sampled_tokens import SampledTokens
from tests.helpers import ROOT, TINY_MODEL, load_script, make_config, refuses, succeed, takes_minutes


asynchronous = load_script("study/asynchronous")
counting = load_script("study/counting")
own_forms = load_script("study/own_forms")
sequences = load_script("study/sequences")
sums = load_script("study/sums")
sorting = load_script("sorting")
word_lists = load_script("study/word_lists")


# --- what is more than noise


def test_a_paired_t_test_by_hand():
    """Differences 1 to 5: mean 3, standard error √(2.5/5), t = 4.243 with 4 degrees of freedom, p = 0.0132 (table)."""
    test = paired_t_test([1.0, 2.0, 3.0, 4.0, 5.0])
    assert test.value == 3.0
    assert test.standard_error == pytest.approx(math.sqrt(0.5))
    assert test.p_value == pytest.approx(0.01324, abs=1e-5)
    # At the two-sided 5 % quantile of t with 4 degrees of freedom, 2.776, p is 0.05.
    at_quantile = paired_t_test([2.776 * math.sqrt(0.5) + shift for shift in (-2, -1, 0, 1, 2)])
    assert at_quantile.p_value == pytest.approx(0.05, abs=1e-4)


def test_seeds_that_do_not_differ_are_a_comparison_that_counts():
    test = paired_t_test([0.0, 0.0, 0.0])
    assert test == (0.0, 0.0, 1.0)
    assert paired_t_test([0.2]) == (0.2, None, None)
    assert paired_t_test([0.25, 0.25, 0.25]) == (0.25, 0.0, None)
    assert holm([test.p_value, 0.01, test.p_value]) == [1.0, 0.03, 1.0]


def test_an_interval_by_hand():
    """Mean 3 and standard error √(2.5/5) as above; the 97.5 % quantile of t with 4 degrees of freedom is 2.776."""
    assert confidence_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(
        (3 - 2.776 * math.sqrt(0.5), 3 + 2.776 * math.sqrt(0.5)), abs=1e-3
    )
    assert confidence_interval([0.2]) is None


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7))
def test_sign_flips_are_counted(differences):
    """The share of all choices of signs whose sum is as far from 0 as the observed one."""
    signed = product(*((difference, -difference) for difference in differences))
    sums = [sum(each) for each in signed]
    expected = sum(abs(each) >= abs(sum(differences)) for each in sums) / len(sums)
    assert sign_flip_p_value([float(d) for d in differences]) == pytest.approx(expected)


def test_sign_flips_of_a_single_seed():
    assert sign_flip_p_value([0.2]) is None


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, None, 0.005]) == [0.03, 0.06, 0.06, None, 0.02]


@given(st.lists(st.floats(0, 1), max_size=5))
def test_holm_rejects_what_the_closed_test_rejects(p_values):
    """Its corrected p is the largest of Bonferroni's over the sets of hypotheses that the hypothesis is in."""
    expected = [
        max(
            min(1.0, len(group) * min(p_values[i] for i in group))
            for size in range(1, len(p_values) + 1)
            for group in combinations(range(len(p_values)), size)
            if index in group
        )
        for index in range(len(p_values))
    ]
    assert holm(p_values) == pytest.approx(expected)


# --- what is run


@pytest.fixture
def study_folder(tmp_path):
    """A study of two sweeps that share a cell."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "base.yaml").write_text("learning_rate: 1.0e-4\nmax_steps: 24\nconstraint: none\n")
    (folder / "first.yaml").write_text(
        "fixed: {weight_sync_steps: 8}\n"
        "list: {GRPO: {}, TIS: {rollout_correction: token_truncate}}\nseeds: [0, 1, 2]\n"
    )
    (folder / "second.yaml").write_text("grid: {weight_sync_steps: [1, 8], learning_rate: [1e-4]}\nseeds: [0, 3]\n")
    return folder


def test_a_run_that_two_sweeps_ask_for_is_made_once(study_folder, tmp_path):
    study = load_study(study_folder)
    jobs = study.jobs(tmp_path)
    assert len(jobs) == 3 * 2 + 2 * 2 - 1
    assert len({job.folder for job in jobs}) == len(jobs)
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)  # something of each cell comes early
    lagging = [job for job in jobs if job.cell == {"weight_sync_steps": 8}]
    assert [job.seed for job in lagging] == [0, 1, 2, 3]
    for job in jobs:
        base = {"learning_rate": 1e-4, "max_steps": 24, "constraint": "none"}
        own = {"seed": job.seed, "output_dir": str(job.folder)}
        assert {name: value for name, value in job.settings.items() if name != "learning_rate"} == {
            name: value for name, value in (base | job.cell | own).items() if name != "learning_rate"
        }
        assert float(job.settings["learning_rate"]) == 1e-4


def test_some_sweeps_and_other_seeds(study_folder, tmp_path):
    study = load_study(study_folder, ["second"], [7])
    assert [(sweep.name, sweep.seeds) for sweep in study.sweeps] == [("second", (7,))]
    assert {job.seed for job in study.jobs(tmp_path)} == {7}
    with refuses(ValueError, "sweep='third'", "first, second"):
        load_study(study_folder, ["third"])


def test_numbers_that_yaml_reads_as_texts_name_the_same_cell():
    assert cell_name({"b": "3e-4", "a": 1}) == cell_name({"a": 1.0, "b": 0.0003}) == "a=1,b=0.0003"
    assert cell_name({}) == "base"


# --- what is kept of a run


def a_run(accuracies=(0.4, 0.5, 0.6, 0.7), steps=24):
    """A history as a run writes it: a log for each step, and evaluations at the ends of quarters."""
    history = [{"step": step, "reward": step / steps, "discrepancy/k3_kl": 0.01} for step in range(1, steps + 1)]
    history += [
        {"step": (quarter + 1) * steps // 4, "eval_greedy_reward": value, "eval_reward": value / 2}
        for quarter, value in enumerate(accuracies)
    ]
    history.append({"step": 0, "eval_greedy_reward": 0.1})
    return history, {"steps": steps, "seconds": 12.34}


def test_the_line_of_a_run():
    line = line_of(*a_run(), {"weight_sync_steps": 8}, 3)
    assert line.key == ("weight_sync_steps=8", 3)
    assert line.evaluations["greedy"] == {0: 0.1, 6: 0.4, 12: 0.5, 18: 0.6, 24: 0.7}
    assert "trained_greedy" not in line.evaluations
    assert line.last("greedy") == pytest.approx((0.5 + 0.6 + 0.7) / 3)  # the last three; step 0 is before training
    assert line.last("greedy", 1) == 0.7
    assert line.last("trained_greedy") is None
    assert line.curves["reward"] == [float(f"{statistics.fmean([k, k + 1]) / 24:.5g}") for k in range(1, 24, 2)]
    assert line.end("reward") == pytest.approx((21.5 + 23.5) / 2 / 24, rel=1e-4)
    assert line.end("lambda") is None
    assert line.steps_to_half == 12  # the moving average of a straight line is the line
    assert line.seconds == 12.3
    assert line.alarms == {}


def test_a_line_has_kinds_of_problems_and_the_alarm():
    history, summary = a_run(steps=60)
    for row in history[:60]:
        row |= {"accuracy/upward": 0.5, "discrepancy/lag_k3_kl": 0.02, "reward": 0.8 if row["step"] <= 30 else 0.1}
    line = line_of(history, summary, {}, 0)
    assert line.curves["accuracy/upward"] == [0.5] * 12
    assert line.curves["lag_k3"] == [0.02] * 12
    # The median of ten logs is 0.45 at step 35, lower afterwards, and has to be low for ten logs.
    assert line.alarms == {"reward": 44}


def test_parts_of_a_run_in_which_nothing_was_measured():
    """A generation batch that lasts for five steps of 24 leaves no value in seven of twelve parts."""
    whole, summary = a_run()
    history = [row for row in whole if "discrepancy/k3_kl" not in row or row["step"] % 5 == 1]
    line = line_of(history, summary, {}, 0)
    measured = [1, None, 6, None, None, 11, None, 16, None, None, 21, None]
    assert line.curves["reward"] == [None if step is None else float(f"{step / 24:.5g}") for step in measured]
    assert line.end("reward") == pytest.approx(21 / 24, rel=1e-4)
    without = [row for row in history if row["step"] < 21]
    assert line_of(without, summary, {}, 0).end("reward") is None


def test_lines_are_read_as_they_were_written(tmp_path):
    lines = [line_of(*a_run(), {"weight_sync_steps": k}, seed) for k in (8, 1) for seed in (1, 0)]
    write_lines(tmp_path / "lines.jsonl", lines)
    found = read_lines(tmp_path / "lines.jsonl")
    assert found == sorted(lines, key=lambda line: line.key)
    again = line_of(*a_run((0.1, 0.1, 0.1, 0.1)), {"weight_sync_steps": 8}, 0)
    both = merged(found, [again])
    assert len(both) == 4
    assert again in both


# --- what is shown


def lines_of(study, accuracy):
    """Lines of all runs of a study, with the accuracy that a function of variant's name and seed says."""
    lines = {}
    for sweep in study.sweeps:
        for variant in sweep.variants:
            for seed in sweep.seeds:
                value = accuracy(variant.name, seed)
                line = line_of(*a_run((value,) * 4), study.cell(sweep, variant), seed)
                lines[line.key] = line
    return list(lines.values())


def test_a_table_compares_seed_by_seed(study_folder):
    study = load_study(study_folder, ["first"])
    better = {0: 0.20, 1: 0.25, 2: 0.15}
    lines = lines_of(study, lambda name, seed: 0.1 * seed + (better[seed] if name == "TIS" else 0.0))
    (found,) = lines_of_sweeps(study, lines)
    (comparison,) = found.comparisons().values()
    assert comparison.value == pytest.approx(0.2)
    assert comparison.standard_error == pytest.approx(0.05 / math.sqrt(3))
    assert comparison.p_value == pytest.approx(0.0202, abs=1e-4)  # t = 6.93 with 2 degrees of freedom
    head, rows = found.table()
    of_tis = dict(zip(head, rows[1], strict=True))
    assert (of_tis["variant"], of_tis["seeds"]) == ("TIS", "3")
    assert of_tis["difference, points"] == "+20.0 ± 2.9"
    assert of_tis["p"] == "0.02 *"
    assert dict(zip(head, rows[0], strict=True))["difference, points"] == "–"


def test_two_studies_of_a_sweep_are_compared_by_welch(study_folder):
    """GRPO ends at 0.3, 0.5 here and at 0.2, 0.2 there, TIS at 0.5 everywhere."""
    study = load_study(study_folder, ["first"], [0, 1])
    here = lines_of(study, lambda name, seed: 0.5 if name == "TIS" else 0.3 + 0.2 * seed)
    there = lines_of(study, lambda name, seed: 0.5 if name == "TIS" else 0.2)
    (found,), (compared,) = (lines_of_sweeps(study, lines) for lines in (here, there))
    head, rows = comparison_table(found, compared)
    grpo, tis = (dict(zip(head, row, strict=True)) for row in rows)
    # The error is √(0.02 / 2) = 0.1 and t is 2 with one degree of freedom: p = 1 − 2 arctan(2) / π, times 2 by Holm.
    assert grpo["difference, points"] == "+20.0 ± 10.0"
    assert grpo["p"] == f"{2 * (1 - 2 * math.atan(2) / math.pi):.2g}"
    assert (grpo["seeds"], grpo["greedy, %"], grpo["greedy, %, compared"]) == ("2", "40.0 ± 10.0", "20.0 ± 0.0")
    assert (tis["difference, points"], tis["p"]) == ("+0.0 ± 0.0", "1")
    (nothing,) = lines_of_sweeps(study, [])
    _, rows = comparison_table(found, nothing)
    assert rows[0] == ["GRPO", "2", "40.0 ± 10.0", "0", "–", "–", "–"]


def test_a_sweep_over_two_numbers_and_a_field(study_folder, tmp_path):
    """At age k a run ends at 0.6 less 0.01·k, twice that at the higher rate; seed 1 ends 0.1 higher than seed 0."""
    grid = {"learning_rate": [1e-4, 3e-4], "weight_sync_steps": [1, 8], "deployment_scheme": ["int4", "bf16"]}
    (study_folder / "map.yaml").write_text(json.dumps({"seeds": [0, 1], "grid": grid}))
    study = load_study(study_folder, ["map"])
    (sweep,) = study.sweeps
    assert sweep.axes == (("learning_rate", "weight_sync_steps"), ("deployment_scheme",))

    def accuracy(name, seed):
        return 0.6 + 0.1 * seed - 0.01 * (8 if "steps=8" in name else 1) * (2 if "0.0003" in name else 1)

    lines, alone = lines_of(study, accuracy), "deployment_scheme=bf16,weight_sync_steps=1"
    (found,) = lines_of_sweeps(study, [line for line in lines if line.key != (alone, 1)])
    head, rows = panels_table(found)
    assert head[2:5] == ["weight_sync_steps 1, %", "weight_sync_steps 8, %", "8 less 1, points"]
    assert [row[:5] for row in rows] == [
        ["int4", "0.0001", "64.0 ± 5.0", "57.0 ± 5.0", "-7.0 ± 0.0"],
        ["int4", "0.0003", "63.0 ± 5.0", "49.0 ± 5.0", "-14.0 ± 0.0"],
        ["bf16", "0.0001", "59.0", "57.0 ± 5.0", "-7.0"],
        ["bf16", "0.0003", "63.0 ± 5.0", "49.0 ± 5.0", "-14.0 ± 0.0"],
    ]
    draw_sweep(found, 24, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 5000


def test_pairs_of_all_sweeps_are_corrected_together(study_folder):
    """GRPO ends at 0.1·seed. TIS gains 0.2, 0.25 and 0.15; the lag of the other sweep has one seed in common."""
    with open(study_folder / "first.yaml", "a") as file:
        file.write("pairs: [[TIS, GRPO], [GRPO, TIS]]\n")
    gains = {0: 0.20, 1: 0.25, 2: 0.15}
    study = load_study(study_folder)
    lines = lines_of(study, lambda name, seed: 0.1 * seed + (gains.get(seed, 0.0) if name == "TIS" else 0.0))
    head, rows = pairs_table(lines_of_sweeps(study, lines))
    first, second = (dict(zip(head, row, strict=True)) for row in rows)
    assert (first["sweep"], first["first"], first["second"], first["seeds"]) == ("first", "TIS", "GRPO", "3")
    assert first["difference, points"] == "+20.0 ± 2.9"
    reach = 100 * 4.3027 * 0.05 / math.sqrt(3)  # t with 2 degrees of freedom
    assert first["95 % interval"] == f"{20 - reach:+.1f} to {20 + reach:+.1f}"
    assert (first["p (t)"], first["p (sign flips)"], first["p (sign flips, corrected)"]) == ("0.02", "0.25", "0.5")
    assert second["difference, points"] == "-20.0 ± 2.9"
    (study_folder / "third.yaml").write_text(
        "fixed: {weight_sync_steps: 8}\nown_family: true\npairs: [[TIS, GRPO]]\n"
        "list: {GRPO: {}, TIS: {rollout_correction: token_truncate}}\nseeds: [0, 1, 2]\n"
    )
    _, rows = pairs_table(lines_of_sweeps(load_study(study_folder), lines))
    assert [(row[0], row[-1]) for row in rows] == [("first", "0.5"), ("first", "0.5"), ("third", "0.25")]
    with open(study_folder / "second.yaml", "a") as file:
        file.write("pairs: [[TIS, GRPO]]\n")
    with refuses(ValueError, "second.yaml", "pairs='TIS'"):
        load_study(study_folder)


def test_runs_that_are_missing_are_said_to_be(study_folder):
    study = load_study(study_folder, ["first"])
    lines = [line for line in lines_of(study, lambda name, seed: 0.5) if "rollout" not in line.key[0]]
    (found,) = lines_of_sweeps(study, lines)
    assert found.comparisons() == {}
    _, rows = found.table()
    assert rows[1][:3] == ["TIS", "0", "–"]


def test_a_runs_control_is_grpo_in_step_in_the_same_setting():
    def line(accuracy, seed=0, **cell):
        return line_of(*a_run((accuracy,) * 4), cell, seed)

    fast, sorting = {"learning_rate": 0.0003}, {"learning_rate": 0.0003, "model_name_or_path": "sorts"}
    lagging = line(0.9, weight_sync_steps=8, rollout_correction="ppo_clip", **fast)
    of_int2 = line(0.2, deployment_scheme="int2")
    lines = [line(0.4, **fast), line(0.5, seed=1, **fast), lagging, line(0.7), of_int2]
    lines += [line(0.05, **sorting), line(0.3, weight_sync_steps=8, **sorting)]  # before training it was 0.1
    assert setting_of(lagging) == fast
    assert setting_of(of_int2) == {}  # a number format makes mismatch, so int2 is compared with the base's
    assert controls_of(lines) == {
        "learning_rate=0.0003": {0: pytest.approx(0.4), 1: pytest.approx(0.5)},
        "base": {0: pytest.approx(0.7)},
    }


def test_a_variant_is_compared_with_grpo_in_step_seed_by_seed(study_folder):
    """The sweep's reference lags; GRPO in step is a cell of another sweep."""
    study = load_study(study_folder, ["first"])
    better = {0: 0.1, 1: 0.1, 2: 0.3}
    lines = lines_of(study, lambda name, seed: 0.1 * seed + 0.2 + (better[seed] if name == "TIS" else 0.0))
    in_step = [line_of(*a_run((0.1 * seed + gain,) * 4), {}, seed) for seed, gain in ((0, 0.4), (1, 0.5), (9, 0.0))]
    (found,) = lines_of_sweeps(study, lines + in_step)
    head, rows = found.table()
    # TIS: 0.3 − 0.4 and 0.4 − 0.6, whose mean is −0.15 and whose error is 0.05; seeds 2 and 9 have no pair.
    assert [dict(zip(head, row, strict=True))["to GRPO in step"] for row in rows] == ["-25.0 ± 5.0", "-15.0 ± 5.0"]
    (alone,) = lines_of_sweeps(study, lines)
    assert {dict(zip(head, row, strict=True))["to GRPO in step"] for row in alone.table()[1]} == {"–"}


def test_figures_of_some_runs_and_of_none(study_folder, tmp_path):
    study = load_study(study_folder, ["first"])
    lines = lines_of(study, lambda name, seed: 0.5)
    for number, some in enumerate((lines, lines[:1], [])):
        (found,) = lines_of_sweeps(study, some)
        draw_sweep(found, 24, tmp_path / f"sweep{number}.png")
        draw_mismatch(some, tmp_path / f"mismatch{number}.png")
        assert (tmp_path / f"mismatch{number}.png").stat().st_size > 5000


# --- a correction that the package does not have


def test_the_decoupled_weights_by_hand():
    """p_s / q is 4, 4, ½ and p / p_s is 1.5, 1.5, 1.1: the clip masks the token that its advantage pushes away."""
    sampler = torch.tensor([[0.1, 0.1, 0.4]])
    lagged, train = sampler * torch.tensor([4, 4, 0.5]), sampler * torch.tensor([6, 6, 0.55])
    advantages, mask = torch.tensor([[1.0, -1.0, 1.0]]), torch.ones(1, 3)
    tokens = SampledTokens.of(train.log(), sampler.log(), mask, advantages, lagged.log())
    assert torch.allclose(own_forms.decoupled(tokens), torch.tensor([[0.0, 2 * 1.5, 0.5 * 1.1]]))


# --- where each form pushes


@pytest.fixture(scope="module")
def lagging(tmp_path_factory, tokenizer):
    """A trainer of the tiny model two steps ahead of its sampler, and batches of both."""
    folder = tmp_path_factory.mktemp("first_order")
    config = make_config(
        folder,
        deployment_scheme="fp8",
        constraint="none",
        per_device_train_batch_size=16,
        max_completion_length=24,
        max_steps=3,
        weight_sync_steps=8,
        learning_rate=1e-3,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = DCGRPOTrainer(
        str(TINY_MODEL), arithmetic_reward, config, train_dataset=arithmetic_dataset(64, 0, "train")
    )
    trainer.train()
    trainer.model.eval()
    rows = list(arithmetic_dataset(8, 1, "train"))
    batch = sampled_batch(trainer, rows, by_policy=False, completions=4)
    contexts = sampled_batch(trainer, rows, by_policy=True, completions=2)
    return trainer, batch, contexts


def test_a_batch_is_what_the_sampler_gave(lagging):
    trainer, batch, contexts = lagging
    assert batch.ids.shape == batch.attended.shape == (32, batch.scored.shape[1] + 1)
    assert (batch.infer_logps[~batch.scored] == 0).all()
    groups = batch.rewards.view(8, 4)
    assert torch.allclose(batch.advantages.view(8, 4).mean(1), torch.zeros(8), atol=1e-5)
    assert set(groups.flatten().tolist()) <= {0.0, 1.0}
    # The sampler's own forward over the whole completion gives the log-probabilities that it sampled with.
    with torch.no_grad():
        logits = trainer.replica.model(input_ids=batch.ids, attention_mask=batch.attended).logits[:, :-1].float()
    again = logits.log_softmax(-1).gather(2, batch.ids[:, 1:, None]).squeeze(2)
    assert (again - batch.infer_logps)[batch.scored].abs().median() < 1e-3
    lengths = contexts.scored.sum(1)
    assert (lengths >= 1).all()
    assert (lengths <= 24).all()


@pytest.fixture
def one_direction(monkeypatch):
    monkeypatch.setattr("first_order.DIRECTIONS", {"log_ratio": DIRECTIONS["log_ratio"]})


def test_changes_along_a_form_are_those_of_autograd(lagging, one_direction):
    """The derivative of KL(π ‖ q) along the step, by autograd at the start, is what the small step finds."""
    trainer, batch, contexts = lagging
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    found = first_order(trainer, batch, contexts, follows=False)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    parameters = list(trainer.model.parameters())

    def log_probs(model):
        logits = model(input_ids=contexts.ids, attention_mask=contexts.attended).logits[:, :-1]
        return logits[contexts.scored].double().log_softmax(-1)

    with torch.no_grad():
        sampler = log_probs(trainer.replica.model)
    log_policy = log_probs(trainer.model)
    kl = (log_policy.exp() * (log_policy - sampler)).sum(1).mean()
    slope_of_kl = torch.autograd.grad(kl, parameters)
    # The step along the log ratio, written out once more.
    logits = trainer.model(input_ids=batch.ids, attention_mask=batch.attended).logits[:, :-1].float()
    logps = logits.log_softmax(-1).gather(2, batch.ids[:, 1:, None]).squeeze(2)
    ratio = (logps.detach() - batch.infer_logps)[batch.scored]
    pulled = -(ratio * logps[batch.scored]).mean()
    moments = trainer.optimizer.state
    step = [
        gradient / (moments[parameter]["exp_avg_sq"].sqrt() + 1e-8)
        for parameter, gradient in zip(parameters, torch.autograd.grad(pulled, parameters), strict=True)
    ]
    by_autograd = sum((slope * part).sum() for slope, part in zip(slope_of_kl, step, strict=True)).item()
    with torch.no_grad():
        scale = 1e-3 / torch.stack([part.norm() for part in step]).norm().item()
        for parameter, part in zip(parameters, step, strict=True):
            parameter += scale * part
        moved = (log_probs(trainer.model).exp() - log_policy.exp()).abs().sum(1).mean().item() / 2
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(before[name])
    assert found["log_ratio"][1] == pytest.approx(by_autograd * scale / moved, rel=0.1)
    assert found["log_ratio"][1] < 0


def test_a_sampler_that_follows_is_put_back(lagging, one_direction):
    trainer, batch, contexts = lagging
    before = {name: tensor.clone() for name, tensor in trainer.replica.model.state_dict().items()}
    first_order(trainer, batch, contexts, follows=True)
    after = trainer.replica.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- the second task


@pytest.mark.parametrize("lengths", [sorting.SHORT, sorting.LONG])
def test_digits_are_sorted_step_by_step(lengths):
    problems = sorting.sorting_problems(200, 3, "train", lengths)
    assert problems == sorting.sorting_problems(200, 3, "train", lengths)
    for problem in problems:
        digits = problem.question.removeprefix("sort ")
        assert lengths[0] <= len(digits) <= lengths[1]
        assert problem.answer == "".join(sorted(digits))
        *steps, box = problem.solution.split(";")
        assert box == f"\\boxed{{{problem.answer}}}"
        left = digits
        for step in steps:
            assert step == f"{left}>{min(left)}"
            left = left.replace(min(left), "", 1)
        assert left == ""
    assert arithmetic_reward([problem.solution for problem in problems], [p.answer for p in problems]) == [1.0] * 200


def test_counting_on_is_graded_up_to_the_first_mistake():
    texts = ["1235 1236", "1235 1237 1238", "", "1236", "1235 1236 ", " ".join(map(str, range(1235, 1251)))]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    start = ["1234"] * len(texts)
    assert counting.right_successors(completions, start) == [2 / 16, 1 / 16, 0, 0, 2 / 16, 1]
    assert counting.counts_on(texts, start) == [1, 0, 0, 0, 0, 1]


def test_taught_and_held_out_numbers_to_count_on_from_are_different_ones():
    taught, held_out = (counting.counting_problems(4096, 2, split) for split in ("train", "held_out"))
    assert held_out == counting.counting_problems(4096, 2, "held_out")
    assert len({problem.question for problem in held_out}) == 4096
    assert {problem.question for problem in taught}.isdisjoint(problem.question for problem in held_out)
    assert counting.counts_on([each.solution for each in taught], [each.answer for each in taught]) == [1.0] * 4096
    terms = [len(each.solution.split()) for each in taught]
    assert statistics.fmean(terms) == pytest.approx(1 / 0.6, rel=0.05)  # of the geometric distribution


# --- the real model's task


def test_the_word_that_is_asked_for():
    problems = word_lists.word_list_problems(300, 1)
    assert problems == word_lists.word_list_problems(300, 1)
    assert len({problem["prompt"] for problem in problems}) == 300
    for problem in problems:
        question, listed = problem["prompt"].split("? ")
        words = listed.split(", ")
        assert problem["answer"] == (words[0] if "first" in question else words[3])
    assert {"first" in problem["prompt"] for problem in problems} == {True, False}


def test_the_reward_of_the_word_that_is_asked_for():
    prompt = [{"role": "user", "content": "What is the last word of this list? cow, egg, cat, pen"}]
    graded = {
        "pen": 1.0,
        'The last word of this list is "Pen."': 1.0,
        "egg": 0.2,
        "The last word of cow, egg, cat, pen is pen.": 0.2,  # it names them all
        "pencil": 0.0,
        "": 0.0,
    }
    turns = [[{"role": "assistant", "content": text}] for text in graded]
    rewards = word_lists.names_the_word(prompts=[prompt] * 6, completions=turns, answer=["pen"] * 6)
    assert rewards == list(graded.values())


# --- the registered study


def test_every_run_has_a_folder_that_can_be_made(tmp_path):
    jobs = load_study().jobs(tmp_path)
    folders = {job.folder for job in jobs}
    assert len(folders) == len(jobs)
    for folder in folders:
        folder.mkdir(parents=True)


def test_every_cell_is_a_configuration(tmp_path):
    """One for each set of names and choices: cells that differ in numbers alone are alike to what refuses them."""
    cells = {}
    for sweep in load_study().sweeps:
        assert len(sweep.seeds) >= (3 if sweep.name == "server" else 5)
        for variant in sweep.variants:
            cell = sweep.configuration(variant) | {"use_cpu": True}  # where tests run
            cells[str(sorted((name, re.sub(r"[\d.e-]+", "", str(value))) for name, value in cell.items()))] = cell
    assert len(cells) > 10
    for cell in cells.values():
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(cell))
        RunArguments.parse(["--config", str(config)])  # refuses what contradicts itself


def test_sequences_have_no_constant_answer_and_are_logged_by_kind():
    problems = sequences.sequence_problems(1100, 0)
    assert max(Counter(problem["answer"] for problem in problems).values()) < 0.02 * len(problems)
    for problem in problems:
        a, b, c, d, last = map(int, [*problem["prompt"].rstrip(",").split(", "), problem["answer"]])
        assert b - a == c - b == d - c == last - d
        assert (b > a) == (problem["kind"] == "upward")
    logged = {}
    rewards = sequences.continues_the_sequence(
        [" 12, 15", "12", "120", "no"], ["12"] * 4, ["upward", "downward", "downward", "downward"], logged.__setitem__
    )
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    assert logged == {"accuracy/upward": 1.0, "accuracy/downward": pytest.approx(1 / 3)}


def test_sums_have_no_constant_answer_and_two_kinds():
    problems = sums.sum_problems(1100, 0)
    assert max(Counter(problem["answer"] for problem in problems).values()) < 0.06 * len(problems)
    for problem in problems:
        solved = f"{problem['prompt']} {problem['answer']}".splitlines()
        assert len(solved) == 4
        for line in solved:
            a, sign, b, equals, c = line.split()
            assert int(c) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
            assert equals == "="
        assert (sign == "+") == (problem["kind"] == "sum")


def test_registered_runs_of_a_real_model_can_be_made(tmp_path):
    study = load_study(SWEEPS.with_name("real_lag"))
    assert all(len(sweep.seeds) >= 2 for sweep in study.sweeps)
    cells = {str(job.cell): job for job in study.jobs(tmp_path / "out")}  # whose seeds are alike
    for job in cells.values():
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(dict(study.base) | job.settings))
        RunArguments.parse(["--config", str(config)])


def test_the_page_is_what_its_raw_lines_say():
    """Every table of a sweep in scripts/study/RESULTS.md has values of columns of the table made again from
    docs/study.jsonl, that of the runs that were made twice those of docs/study_again.jsonl beside it, and those of the
    second part and of the asynchronous trainer those of their own lines. A section without such a table has the
    accuracies."""
    page = (ROOT / "scripts" / "study" / "RESULTS.md").read_text()
    found = lines_of_sweeps(load_study(), read_lines(ROOT / "docs" / "study.jsonl"))
    tables = {sweep.sweep.name: sweep.table() for sweep in found}
    (again,) = lines_of_sweeps(load_study(SWEEPS, ["headline"]), read_lines(ROOT / "docs" / "study_again.jsonl"))
    (once,) = (sweep for sweep in found if sweep.sweep.name == "headline")
    tables["headline, compared"] = comparison_table(again, once)
    second = SWEEPS.with_name("second_part")
    lines = [*read_lines(ROOT / "docs" / "study.jsonl"), *read_lines(second / "lines.jsonl")]
    asked = lines_of_sweeps(load_study(second), lines)
    shown = dict(re.findall(r"<!-- (.*?) -->\n\n((?:\|.*\n)+)", page + "\n"))
    made = [each for each in asked if any(each.lines.values())]
    tables |= {each.sweep.name: each.table() for each in made if each.sweep.pairs or each.sweep.name in shown}
    tables["pairs"] = pairs_table(asked)
    # A family of its own: its pairs are corrected among themselves.
    lag = lines_of_sweeps(load_study(second, ["confirmed_lag"]), read_lines(second / "confirmed_lag.jsonl"))
    tables |= {"confirmed_lag": lag[0].table(), "confirmed_lag, pairs": pairs_table(lag)}
    ten_seeds = [line for name in ("lag", "default") for line in read_lines(second / f"confirmed_{name}.jsonl")]
    tables["confirmed_default"] = lines_of_sweeps(load_study(second, ["confirmed_default"]), ten_seeds)[0].table()
    of_asynchronous = (ROOT / "scripts" / "study" / "asynchronous.jsonl").read_text().splitlines()
    tables["asynchronous"] = asynchronous.table([json.loads(line) for line in of_asynchronous])
    assert {"headline", "headline, compared"} <= shown.keys()
    for name, text in shown.items():
        head, rows = tables[name]
        columns = [head.index(cell.strip()) for cell in text.partition("\n")[0].strip("|").split("|")]
        chosen = [[row[column] for column in columns] for row in [head, *rows]]
        assert text.rstrip() == markdown_table(chosen[0], chosen[1:]).rstrip(), name
    for name in tables.keys() - shown.keys() - {"experts"}:  # of one seed, in the text of experts_moderate
        section = re.search(rf"^### {name}\n(.*?)(?=^##)", page, re.M | re.S)[1]
        head, rows = tables[name]
        for row in rows:
            assert row[head.index("greedy, %")] in section, (name, row[0])


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=40))
def test_signals_are_ranked_by_pairs_of_runs(found):
    runs = [Judged(value, loses, "") for value, loses in found]
    pairs = [(lost.value, kept.value) for lost in runs for kept in runs if lost.loses and not kept.loses]
    if not pairs:
        assert auc(runs) is None
        return
    assert auc(runs) == pytest.approx(statistics.fmean((a > b) + (a == b) / 2 for a, b in pairs))
    assert share_above(runs, threshold(runs), lost=False) <= 0.05


def test_changes_of_a_curve_by_hand():
    def line(**curves):
        return SimpleNamespace(curves=curves)

    fall = CHANGES["the reward falls by 30 % and 2 σ"]
    assert first_change(line(reward=[0.3, 0.5, None, 0.37, 0.35]), *fall) == 4
    assert first_change(line(reward=[0.3, 0.35, 0.22]), *fall) is None  # by 0.13, and 2 σ are 0.14
    assert first_change(line(reward=[0.9, 0.64]), *fall) is None  # by less than 30 %
    entropy = CHANGES["the entropy falls to a tenth of its first, and 0.02 nats"]
    assert first_change(line(entropy=[0.3, 0.021, 0.02]), *entropy) == 3
    assert first_change(line(reward=[0.3]), *entropy) is None


def test_the_alarm_is_counted_in_lost_runs_and_others():
    def line(end, alarms):
        return SimpleNamespace(
            evaluations={"greedy": {0: 0.4, 40: end}}, alarms=alarms, last=lambda name: end, key=("", 0), curves={}
        )

    lines = [line(0.1, {"reward": 25}), line(0.2, {"reward": 31, "mismatch": 20}), line(0.3, {}), line(0.9, {})]
    lines += [line(0.8, {"mismatch": 40}), line(0.1, None)]  # the last from before it was kept
    _, rows = alarms_table(lines)
    assert rows == [["mismatch", "1 of 3", "1 of 2", "20"], ["reward", "2 of 3", "0 of 2", "12"]]


def test_the_early_signs_on_the_page_are_what_the_raw_lines_say():
    study = ROOT / "scripts" / "study"
    lines = [*read_lines(ROOT / "docs" / "study.jsonl"), *read_lines(study / "second_part" / "lines.jsonl")]
    page = (study / "RESULTS.md").read_text()
    assert markdown_table(*signs_table(lines, lines)) in page
    assert markdown_table(*changes_table(lines)) in page


def test_the_page_of_the_real_model_is_what_its_raw_lines_say():
    """Its RESULTS.md has, for each cell of several seeds, greedy reward, reward of the last five steps and the
    number of runs that leave the trap, as they are made from the raw lines here; four runs in INT8 end in the trap."""
    page = (SWEEPS.with_name("real_model") / "RESULTS.md").read_text()
    rows = word_lists.word_list_problems(1024, 0)
    traps = {seed: word_lists.trap(rows, 128, seed) for seed in range(1, 6)}
    lines = read_lines(SWEEPS.with_name("real_model") / "lines.jsonl")
    cells = {}
    for line in lines:
        cells.setdefault(str(line.cell), []).append(line)
        windows = line.curves["reward"][-3:]  # of two, two and one of the twenty steps
        assert line.late_reward == pytest.approx((2 * windows[0] + 2 * windows[1] + windows[2]) / 5)
    for runs in cells.values():
        if len(runs) > 1:
            for values in ([run.last("greedy") for run in runs], [run.late_reward for run in runs]):
                error = statistics.stdev(values) / math.sqrt(len(values))
                assert f"{statistics.fmean(values) + 1e-9:.3f} ± {error:.3f}" in page  # 0.9975 is rounded up
    in_int8 = {run.seed: run.last("greedy") for run in cells["{'deployment_scheme': 'int8'}"]}
    assert [seed for seed in traps if abs(in_int8[seed] - traps[seed]) < 1e-5] == [1, 2, 3, 4]
    leave = {cell: sum(run.last("greedy") > traps[run.seed] + 0.1 for run in runs) for cell, runs in cells.items()}
    of_lags = SWEEPS.with_name("real_lag")
    (found,) = lines_of_sweeps(load_study(of_lags, ["map"]), read_lines(of_lags / "lines.jsonl"))
    assert markdown_table(*panels_table(found)) in page
    (found,) = lines_of_sweeps(load_study(of_lags, ["remedies"]), read_lines(of_lags / "lines.jsonl"))
    head, rows = found.table()
    shown = ["variant", "greedy, %", "difference, points", "last one, %", "sampled, %", "late reward, %", "entropy"]
    assert markdown_table(shown, [[row[head.index(name)] for name in shown] for row in rows]) in page
    head, rows = pairs_table([found])
    shown = ["first", "second", "difference, points", "95 % interval", "p (sign flips)", "p (sign flips, corrected)"]
    assert markdown_table(shown, [[row[head.index(name)] for name in shown] for row in rows]) in page
    stated = [int(count) for count in re.findall(r"^\| (?!\|).* \| (\d) \|$", page, re.M)]
    assert sorted(stated) == sorted([*leave.values(), leave["{}"]])  # GRPO in step stands in both tables


REMEDIES = {field.name for field in fields(ConstraintSettings)} - {"deployment_scheme"} | {
    "train_through_quantization"
}
LOG_RATIO = {"constraint": "static", "constraint_form": "log_ratio", "lambda_init": 0.5}
ALIGNED = {"train_through_quantization": True}


def better_than(remedy, lags):
    """By the setting in which a remedy was tried: the cells of this setting, with another remedy or none, that end
    above it with a p below 0.05, or without a p. Nothing is corrected for their number: that would tie more."""
    of_cells = {}
    for line in read_lines(ROOT / "docs" / "study.jsonl"):
        setting = {name: value for name, value in line.cell.items() if name not in REMEDIES}
        cells = of_cells.setdefault(cell_name(setting), {})
        key = cell_name({name: value for name, value in line.cell.items() if name in REMEDIES})
        cells.setdefault(key, {})[line.seed] = line.last("greedy")
    found = {}
    for setting, cells in of_cells.items():
        own = cells.get(cell_name(remedy))
        if own is None or ("weight_sync_steps" in setting) != lags:
            continue
        found[setting] = []
        for name, accuracies in cells.items():
            if pairs := [accuracies[seed] - own[seed] for seed in own if seed in accuracies]:
                test = paired_t_test(pairs)
                p_value = 0.0 if test.p_value is None else test.p_value
                if test.value > 0 and p_value < SIGNIFICANCE:
                    found[setting].append(name)
    return found


def test_what_each_recipe_sets_is_the_best_remedy_that_the_study_found_or_tied_with_it(tmp_path):
    lag, aligned, clip = (
        better_than(remedy, lags)
        for remedy, lags in ((LOG_RATIO, True), (ALIGNED, False), ({"rollout_correction": "ppo_clip"}, True))
    )
    assert len(lag) == 10
    assert len(aligned) == 3
    assert not any(lag.values())
    assert not any(aligned.values())
    # What is no recipe: PPO's clip ends below the log ratio at lag 8, lr 3e-4.
    assert cell_name(LOG_RATIO) in clip["learning_rate=0.0003,weight_sync_steps=8"]
    base = read_yaml(SWEEPS / "base.yaml")
    common = {
        "deployment_scheme": base["deployment_scheme"],
        "constraint": base["constraint"],
        "recipe": base["recipe"],
    }
    # The recipe pulls at the lag's own part, which the study's sweeps do not have: see confirmed_lag.yaml.
    pull_at_lag = LOG_RATIO | {"constraint_target": "lag"}
    for recipe, remedy in (("lag", pull_at_lag), ("format", ALIGNED)):
        of_recipe = make_config(tmp_path, deployment_scheme=base["deployment_scheme"], recipe=recipe).to_dict()
        of_cell = make_config(tmp_path, **common | remedy).to_dict()
        assert of_recipe | {"recipe": None} == of_cell | {"recipe": None}


@takes_minutes
def test_a_killed_study_goes_on_and_measures_both_policies(tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    base = read_yaml(SWEEPS / "base.yaml") | {
        "eval_size": 16,
        "max_steps": 12,
        "eval_steps": 6,
        "eval_delay": 6,
        "per_device_train_batch_size": 16,
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "small.yaml").write_text(
        "seeds: [0]\nlist: {GRPO: {}, log ratio: {constraint: static, constraint_form: log_ratio}}"
    )
    command = [sys.executable, "scripts/study/run.py", "--study", folder, "--jobs", "1", "--output", tmp_path / "out"]
    first = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert first.stdout is not None
    for line in first.stdout:
        if "done after" in line:  # the first of two jobs
            break
    first.send_signal(signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + 300
    while True:  # the job that was running ends first, and holds the folder until then
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        if "is in use by another study" not in done.stderr or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 of 2 jobs" in done.stdout
    lines = read_lines(tmp_path / "out" / "lines.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert list(line.evaluations["greedy"]) == [0, 6, 12]
        assert list(line.evaluations["trained_greedy"]) == [6, 12]
        assert len(line.curves["k3"]) == 12
    assert (tmp_path / "out" / "small.png").stat().st_size > 10_000
    assert len(list((tmp_path / "out").glob("*/seed-0/summary.json"))) == 2
    assert not list((tmp_path / "out").rglob("*.safetensors"))

    # Elsewhere, with the lines alone: no run is made again, and the table is the same.
    known = [*command[:-1], tmp_path / "other", "--known", tmp_path / "out" / "lines.jsonl"]
    succeed(known)
    assert not list((tmp_path / "other").glob("*/seed-*"))
    assert (tmp_path / "other" / "tables.md").read_text() == (tmp_path / "out" / "tables.md").read_text()
