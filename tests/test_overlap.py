"""Sampling beside training: which batch is sampled when, by which weights, and what is left of it after a kill."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerCallback

from dc_trl.run.manifest import checkpoint_defect
from dc_trl.sampling.overlap import AHEAD_FILE, LookAhead
from dc_trl.sampling.rollout_ahead import BackgroundRollout
from dc_trl.serving.completions import EndToken, ended
from dc_trl.serving.errors import ServerError

from . import helpers
from .helpers import (
    MISALIGNED,
    TWO_PROCESSES,
    On,
    Watch,
    assert_same_weights,
    at_server,
    distinct_characters,
    load_script,
    logged,
    make_model,
    make_prompts,
    read_json,
    refuses,
    succeed,
    tiny_model,
    untimed,
    untimed_rows,
)
from .vllm_server import requires_vllm


standing_in = load_script("benchmarks/standin_server").standing_in


def make_trainer(url, output_dir, *callbacks, prompts=16, **options):
    options = at_server(url) | {"vllm_server_timeout": 2.0, "rollout_overlap": True, "max_steps": 4} | options
    options |= {"train_dataset": make_prompts(prompts), "eval_dataset": make_prompts(52).select([50, 51])}
    return helpers.make_trainer(output_dir, make_model(64), callbacks=list(callbacks), **options)


def rollouts(server):
    return [request for request in server.asked if request.path == "/v1/completions"]


# --- the batch that follows -----------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 8), st.lists(st.integers(1, 6), min_size=1, max_size=20), st.integers(0, 12))
def test_what_follows_is_known_and_nothing_is_lost(size, distance, counts, other):
    """Beside the same iterator read plainly; a second one begins anew, though the first was not read to its end."""
    ahead = LookAhead(distance)
    for length in (size, other):
        whole = list(range(length))
        iterator, handed_out = iter(whole), []
        for count in counts:
            first = len(handed_out)
            taken = ahead.take(iterator, count)
            assert taken == whole[first : first + count]
            for index in range(len(taken) + distance):
                assert ahead[index] == (whole[first + index] if first + index < length else None)
            handed_out += taken
        assert handed_out == whole[: sum(counts)]


class Order:
    """A reward that keeps the prompts of the generation batches, in the order in which they are trained on."""

    __name__ = "order"

    def __init__(self):
        self.trained = []

    def __call__(self, prompts, completions, **kwargs):
        self.trained.append(prompts)
        return distinct_characters(completions)


@requires_vllm
@pytest.mark.parametrize(
    ("options", "ages", "batches"),
    [
        # 3 prompts, so that an epoch ends after 3 batches, and the next begins without one ahead.
        ({"num_train_epochs": 2, "max_steps": -1, "prompts": 3}, [0, 1, 1, 0, 1, 1], 6),
        # Two batches an optimizer step, of which the first one was begun in the step before; the log has their mean.
        ({"max_steps": 3, "steps_per_generation": 1, "gradient_accumulation_steps": 2}, [0, 0.5, 0.5], 6),
        # Steps and batches out of line: 4 micro-batches a batch, 3 a step.
        ({"max_steps": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 3}, [0, 1, 1], 3),
        ({"max_steps": 6, "weight_sync_steps": 2}, [0, 1, 2, 1, 2, 1], 6),
    ],
    ids=["epochs", "two-batches", "out-of-line", "lag"],
)
def test_each_batch_is_sampled_once_one_ahead_in_the_order_of_training(tmp_path, options, ages, batches):
    plain, order = Order(), Order()
    with standing_in(shortest=1) as server:
        make_trainer(server.url, tmp_path / "without", reward=plain, **options | {"rollout_overlap": False}).train()
        server.asked.clear()
        trainer = make_trainer(server.url, tmp_path / "with", reward=order, **options)
        trainer.train()
        # Nothing is sampled that is not trained on; all of it in the order of a run that samples when it trains.
        decode = trainer.processing_class.decode
        sampled = [decode(prompt) for request in rollouts(server) for prompt in request.prompts]
    assert order.trained == plain.trained
    per_batch = len(set(order.trained[0]))  # prompts, each of which is a request, all at once
    assert [sorted(sampled[i : i + per_batch]) for i in range(0, len(sampled), per_batch)] == [
        sorted(set(batch)) for batch in order.trained
    ]
    assert len(sampled) == batches * per_batch
    # Neither a load nor another rollout beside a rollout.
    for request in server.asked:
        assert request.others < (per_batch if request in rollouts(server) else 1)
    assert logged(trainer, "sync/age") == ages


def weights(requests):
    """Numbers of the weights that requests were answered with, all of one run."""
    runs, numbers = zip(*(request.version.rpartition("-")[::2] for request in requests), strict=True)
    assert len(set(runs)) == 1
    return [int(number) for number in numbers]


@requires_vllm
def test_the_server_samples_with_the_weights_from_before_the_batch_that_trains(tmp_path):
    with standing_in(shortest=1) as server:
        trainer = make_trainer(server.url, tmp_path, max_steps=5)
        trainer.train()
    # Batch 0 and 1 by the first weights, batch 2 by those of step 1, and so on; the last step has none to begin.
    assert weights(rollouts(server)) == [1, 1, 2, 3, 4]
    assert logged(trainer, "sync/count") == [1, 2, 3, 4, 4]


@requires_vllm
@pytest.mark.parametrize(("options", "ages"), [({}, [0, 1, 1, 1, 1]), ({"weight_sync_steps": 2}, [0, 1, 2, 1, 2])])
def test_the_lag_is_that_of_the_weights_that_sampled_ahead(tmp_path, options, ages):
    """Of the batch that trains, also where newer weights have gone to the server for the batch ahead."""
    fields = {"constraint": "none", "discrepancy_split": True, "learning_rate": 1e-2, "max_steps": 5} | options
    with standing_in(shortest=1) as server:
        trainer = make_trainer(server.url, tmp_path, **fields)
        watch = Watch(trainer)
        trainer.train()
    assert [tokens.age for _, tokens in watch.tokens] == ages
    lags = watch.compared_lags(make_model(64), 2e-5)
    assert len(lags) == 4
    assert min(lag.abs().max() for lag in lags) > 0.01


@requires_vllm
def test_without_a_lag_the_samples_are_those_of_a_synchronous_run(tmp_path):
    """With a learning rate of 0 all weights are the same, and so is everything that is logged.

    To rounding: the seeds of the batch ahead are drawn before TRL shuffles the batch at hand, so its rows have another
    order.
    """
    options = {"learning_rate": 0.0, "constraint": "none", "max_steps": 6}
    with standing_in(shortest=1) as server:
        logs = []
        for overlap in (False, True):
            trainer = make_trainer(server.url, tmp_path / str(overlap), rollout_overlap=overlap, **options)
            trainer.train()
            logs.append([{k: v for k, v in row.items() if not k.startswith("sync/")} for row in untimed_rows(trainer)])
    assert [pytest.approx(row, rel=1e-5, abs=1e-6) for row in logs[0]] == logs[1]


@requires_vllm
def test_an_evaluation_waits_for_the_batch_ahead_and_leaves_it_as_it_was(tmp_path):
    options = {"max_steps": 6, "weight_sync_steps": 3}
    with standing_in(shortest=1, seconds=0.1) as server:
        plain = make_trainer(server.url, tmp_path / "plain", **options)
        plain.train()
        server.asked.clear()
        trainer = make_trainer(server.url, tmp_path / "evaluated", **options)
        trainer.add_callback(On("on_step_end", lambda *_, **__: trainer.deployed_completion_ids([[20, 21, 22]])))
        trainer.train()
        evaluations = [request for request in rollouts(server) if request.prompts == [[20, 21, 22]]]
    assert max(request.others for request in server.asked) == 0
    assert len({request.version for request in evaluations}) == 6  # the present weights of each step
    assert untimed_rows(trainer) == untimed_rows(plain)


@requires_vllm
def test_several_servers_sample_ahead_together_with_one_version(tmp_path):
    options = {"max_steps": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    options |= {"save_steps": 2}
    with standing_in(shortest=1, seconds=0.05) as one, standing_in(shortest=1, seconds=0.05) as other:
        urls = {"vllm_server_base_url": None, "vllm_server_base_urls": [one.url, other.url]}
        whole = make_trainer(None, tmp_path / "whole", **options | urls)
        whole.train()
        versions = [set(weights(rollouts(server))) for server in (one, other)]
        resumed = make_trainer(None, tmp_path / "resumed", **options | urls)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert versions == [{1, 2, 3}] * 2
    assert logged(whole, "sync/age") == [0, 1, 1, 1]
    assert untimed_rows(resumed, 2) == untimed_rows(whole, 2)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@requires_vllm
@pytest.mark.parametrize(
    ("options", "step", "started"),
    [
        ({}, 1, 2),
        ({"weight_sync_steps": 3}, 2, 3),
        # Within a generation batch, which has two prompts.
        (MISALIGNED, 3, 6),
    ],
    ids=["first", "lag", "within"],
)
def test_a_resumed_run_goes_on_with_the_batch_that_was_sampled_ahead(tmp_path, options, step, started):
    """`started` are the prompts that were sampled by then, those of the batch ahead among them."""
    options = {"max_steps": 6, "save_steps": 1, "lambda_lr": 0.5} | options
    options |= {"constraint_target": "lag", "constraint_form": "log_ratio", "learning_rate": 1e-2}
    with standing_in(shortest=1, seconds=0.05) as server:
        whole = make_trainer(server.url, tmp_path / "whole", **options)
        whole.train()
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        assert checkpoint_defect(checkpoint) is None
        asked = len(rollouts(server))
        resumed = make_trainer(server.url, tmp_path / "resumed", **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        asked_again = len(rollouts(server)) - asked
    assert untimed_rows(resumed, step) == untimed_rows(whole, step)
    assert max(logged(resumed, "discrepancy/lag_mean")) > 1e-4
    assert asked_again == asked - started
    assert_same_weights(resumed.model, whole.model)
    (checkpoint / "rollouts_ahead.json").unlink()
    assert "rollouts_ahead.json" in checkpoint_defect(checkpoint)


@requires_vllm
def test_a_batch_ahead_that_does_not_fit_is_dropped_with_a_word(tmp_path, caplog):
    options = {"max_steps": 4, "save_steps": 2}
    with standing_in(shortest=1) as server:
        make_trainer(server.url, tmp_path, **options).train()
        checkpoint = str(tmp_path / "checkpoint-2")
        for changed, words in (
            ({"temperature": 0.7}, "other prompts or settings"),
            ({"rollout_overlap": False}, "rollout_overlap=True, which this run does not use"),
        ):
            caplog.clear()
            server.asked.clear()
            make_trainer(server.url, tmp_path / "other", **changed).train(checkpoint)
            assert words in caplog.text
            assert len(rollouts(server)) == 2
            weights(rollouts(server))  # of weights that no run holds any more, none sampled


def test_experts_are_read_as_they_were_written(tmp_path):
    routes = [np.arange(12, dtype=np.uint16).reshape(3, 2, 2), None]

    class Client:
        routed_experts = routes

        def generate(self, **asked):
            return {"completion_ids": [ended([5, 6]), [], [5, 6]]}

    asked = {"prompts": [[1, 2, 3], [4]], "generation_kwargs": {"stop": ["a"]}}
    rollout = BackgroundRollout(asked)
    rollout.start(Client())
    rollout.save(tmp_path / "file.json")
    read = BackgroundRollout.load(tmp_path / "file.json")
    assert read.answers(asked | {"generation_kwargs": {"stop": ("a",)}})
    assert np.array_equal(read.routed_experts[0], routes[0])
    assert read.routed_experts[0].dtype == np.uint16
    assert read.routed_experts[1] is None
    assert read.output == {"completion_ids": [[5, 6], [], [5, 6]]}
    kinds = [[type(token) for token in ids] for ids in read.output["completion_ids"]]
    assert kinds == [[int, EndToken], [], [int, int]]


@requires_vllm
@pytest.mark.long
def test_two_processes_resumed_by_two_and_by_one(tmp_path):
    fields = {"max_steps": 5, "save_steps": 1, "deployment_scheme": "bf16", "lambda_lr": 0.5}
    fields |= {"rollout_overlap": True}
    names = ("whole", "resumed")
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    with standing_in(shortest=1, seconds=0.05) as server:
        runs = [fields | {"output_dir": str(tmp_path / name), "per_device_train_batch_size": 4} for name in names]
        runs[1]["resume_from_checkpoint"] = checkpoint
        words = [json.dumps(run | {"server": server.url}) for run in runs]
        succeed([*TWO_PROCESSES, "-m", "tests.worker", *words])
        # A batch is two prompts, each of them a request: beside it is neither another batch nor a load.
        assert all(request.others < (2 if request in rollouts(server) else 1) for request in server.asked)
        fields |= at_server(server.url) | {"per_device_train_batch_size": 8}
        by_one = helpers.make_trainer(tmp_path / "one", tiny_model(), **fields)
        by_one.train(resume_from_checkpoint=checkpoint)
    logs = [read_json(tmp_path / name / "logs.json") for name in names]
    assert all(log["kind"] == "DistributedType.MULTI_CPU" and len(set(log["lambda"])) == 1 for log in logs)
    whole, resumed = (untimed(log["rows"]) for log in logs)
    assert [row["sync/age"] for row in whole] == [0, 1, 1, 1, 1]
    assert resumed == whole
    # One process takes up the batch of both. What it samples later follows from weights with other roundings.
    of_one, of_two = (rows[2] for rows in (untimed(by_one.state.log_history), whole))
    assert of_one == pytest.approx(of_two, rel=1e-4, abs=1e-6)


# --- faults ---------------------------------------------------------------------------------------------------------


class GoDown(TrainerCallback):
    """The server is lost while it samples the batch ahead, however slow this machine is."""

    def __init__(self, server, step):
        self._server, self._step = server, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._server.seconds = 30.0

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._server.down = True


@requires_vllm
def test_a_server_lost_while_it_samples_ahead_ends_the_run_as_when_it_is_asked(tmp_path):
    options = {"vllm_max_retries": 0, "max_steps": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    with standing_in(shortest=1) as server:
        trainer = make_trainer(server.url, tmp_path, GoDown(server, 2), **options)
        with pytest.raises(
            ServerError, match=r"broke during /(v1/completions|weight_info) .*resume_from_checkpoint=.*checkpoint-3'"
        ):
            trainer.train()
        # The step on the batch at hand was made; the lost batch is asked for again, with the weights of its turn.
        checkpoint = tmp_path / "checkpoint-3"
        assert read_json(checkpoint / "dc_grpo_state.json")["rollout_ahead"]["weights_of_step"] == 2
        assert BackgroundRollout.load(checkpoint / AHEAD_FILE).output is None
        server.down, server.seconds = False, 0.0
        resumed = make_trainer(server.url, tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert logged(resumed, "sync/age") == [0, 1, 1, 1, 1, 1]


@requires_vllm
def test_a_lost_batch_is_sampled_anew_where_an_evaluation_has_brought_other_weights(tmp_path):
    options = {"vllm_max_retries": 0, "max_steps": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 2}

    def evaluated(state, **kwargs):
        if state.global_step == 3:
            server.down = False
            trainer.deployed_completion_ids([[20, 21, 22]])

    with standing_in(shortest=1) as server:
        trainer = make_trainer(server.url, tmp_path, GoDown(server, 2), On("on_step_end", evaluated), **options)
        with refuses(ServerError, "checkpoint-3'"):
            trainer.train()
        checkpoint = tmp_path / "checkpoint-3"
        assert read_json(checkpoint / "dc_grpo_state.json")["rollout_ahead"] is None
        resumed = make_trainer(server.url, tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert logged(resumed, "sync/age") == [0, 1, 1, 0, 1, 1]


class Ready(TrainerCallback):
    """A step that ends when the batch ahead, one request, has been sampled; then the server may go down."""

    def __init__(self, server, down_after=None):
        self._server, self._down_after = server, down_after
        self._asked = len(rollouts(server))

    def on_step_end(self, args, state, control, **kwargs):
        end = time.monotonic() + 120
        while len(rollouts(self._server)) - self._asked < min(state.global_step + 1, state.max_steps):
            assert time.monotonic() < end
            time.sleep(0.01)
        self._server.down = state.global_step == self._down_after


@requires_vllm
def test_a_sync_that_fails_before_the_next_batch_keeps_the_one_that_was_sampled(tmp_path):
    options = {"vllm_max_retries": 0, "max_steps": 5}
    with standing_in(shortest=1) as server:
        whole = make_trainer(server.url, tmp_path / "whole", **options)
        whole.train()
        broken = make_trainer(server.url, tmp_path / "broken", Ready(server, down_after=2), **options)
        with refuses(ServerError, "resume_from_checkpoint=", "checkpoint-2'"):
            broken.train()
        server.down = False
        resumed = make_trainer(server.url, tmp_path / "broken", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-2"))
    assert logged(resumed, "sync/age") == [0, 1, 1, 1, 1]
    assert untimed_rows(resumed, 2) == untimed_rows(whole, 2)


@requires_vllm
def test_a_training_that_stops_early_leaves_nothing_to_the_next(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    with standing_in(shortest=1) as server:
        trainer = make_trainer(server.url, tmp_path, ready := Ready(server), stop := Stop(), max_steps=4)
        trainer.train()
        assert len(rollouts(server)) == 3  # one that nobody trains on
        trainer.remove_callback(stop)
        trainer.remove_callback(ready)
        server.asked.clear()
        trainer.train()
        assert len(rollouts(server)) == 4
    assert logged(trainer, "sync/age") == [0, 1, 1, 1]
