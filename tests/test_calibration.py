"""Calibration: its statistics against brute force, its engines against plain forwards, its script as it is run."""

import json
import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from dc_trl.calibration import calibrate, comparison
from dc_trl.calibration.comparison import batch_tolerance, measure_engine
from dc_trl.calibration.result import CalibrationSettings
from dc_trl.calibration.rollouts import EngineSample, Rollout, _from_server, sample_rollouts, train_logps
from dc_trl.command import call
from dc_trl.command.problems import DataArguments, draw_prompts
from dc_trl.sampling.engine_names import EngineSpec
from dc_trl.sampling.replica import Replica
from dc_trl.serving.client import ServerClient

from .helpers import (
    TINY_MODEL,
    as_words,
    make_model,
    make_trainer,
    plain_logps,
    refuses,
    write_rows,
)
from .stub_server import completions, stub_server
from .vllm_server import requires_vllm


def random_rollouts():
    """Three rollouts of each of four prompts, whose log-probabilities differ by noise."""
    rng = random.Random(0)
    rollouts, train = [], []
    for prompt in range(4):
        for _ in range(3):
            length = rng.randint(1, 9)
            infer = [-rng.uniform(0.01, 4.0) for _ in range(length)]
            train.append(torch.tensor([min(b + rng.gauss(0, 0.2), 0.0) for b in infer], dtype=torch.float32))
            rollouts.append(Rollout(prompt, [rng.randrange(40, 90) for _ in infer], infer, length == 9))
    return rollouts, train


def measure(engine, rollouts, train, prompts=4, **settings):
    return measure_engine(
        EngineSample(engine, "fp8", rollouts, ["fp8"]), train, prompts, CalibrationSettings(**settings)
    )


@pytest.fixture(scope="module")
def measured():
    rollouts, train = random_rollouts()
    return rollouts, train, measure("replica:fp8", rollouts, train, batch_prompts=2)


def pairs(rollouts, train):
    """(rollout number, prompt, position, a, b) of the scored tokens, in plain Python."""
    return [
        (number, rollout.prompt, position, a, b)
        for number, (rollout, logps) in enumerate(zip(rollouts, train, strict=True))
        for position, (a, b) in enumerate(zip(logps.tolist(), rollout.logps, strict=True))
    ]


def test_counts_and_means_are_those_of_plain_loops(measured):
    rollouts, train, result = measured
    tokens = pairs(rollouts, train)
    delta = [abs(math.exp(a) - math.exp(b)) for *_, a, b in tokens]
    assert (result.prompts, result.completions) == (4, 12)
    assert result.tokens == len(tokens)
    assert result.truncated == sum(len(rollout.ids) == 9 for rollout in rollouts)
    by_rollout = {}
    for (number, *_), value in zip(tokens, delta, strict=True):
        by_rollout.setdefault(number, []).append(value)
    means = [statistics.fmean(values) for values in by_rollout.values()]
    assert result.estimates["discrepancy"].value == pytest.approx(statistics.fmean(means))
    assert result.estimates["k3_kl"].value == pytest.approx(
        statistics.fmean(math.exp(a - b) - (a - b) - 1 for *_, a, b in tokens), rel=1e-5
    )
    probabilities = [[math.exp(value) for value in side] for side in zip(*(pair[3:] for pair in tokens), strict=True)]
    assert result.pearson == pytest.approx(statistics.correlation(*probabilities))
    assert result.percentiles["90"] == pytest.approx(statistics.quantiles(delta, n=10, method="inclusive")[-1])


def test_standard_errors_are_clustered_by_prompt(measured):
    rollouts, train, result = measured
    tokens = pairs(rollouts, train)
    kl = [(p, math.exp(a - b) - (a - b) - 1) for _, p, _, a, b in tokens]
    mean = result.estimates["k3_kl"].value
    residuals = [sum(value - mean for p, value in kl if p == prompt) for prompt in range(4)]
    expected = math.sqrt(4 / 3 * sum(value**2 for value in residuals)) / len(tokens)
    assert result.estimates["k3_kl"].standard_error == pytest.approx(expected)


def test_token_reduction_and_other_measures():
    rollouts, train = random_rollouts()
    tokens = pairs(rollouts, train)
    for name, delta in {
        "prob_ratio": [abs(math.exp(a - b) - 1) for *_, a, b in tokens],
        "log_prob": [abs(a - b) for *_, a, b in tokens],
    }.items():
        result = measure("fp8", rollouts, train, measure=name, reduction="token", batch_prompts=2)
        assert result.estimates["discrepancy"].value == pytest.approx(statistics.fmean(delta)), name


def test_what_is_not_known_is_noted():
    rollouts, train = random_rollouts()
    train[0][0] = math.nan
    found = measure("fp8", rollouts, train, batch_prompts=2)
    assert math.isnan(found.estimates["discrepancy"].value)
    assert any("weights of this model" in note for note in found.notes)
    rollouts, train = random_rollouts()  # of which some are cut off at nine tokens
    for most, is_noted in ((9, False), (64, True)):
        notes = measure("fp8", rollouts, train, batch_prompts=2, max_tokens=most).notes
        assert any("cut off at 9 tokens" in note for note in notes) == is_noted


def test_tolerance_by_hand():
    # A batch of one prompt has δ̄ 0.001 or 0.003, equally often: mean 0.002. Of the two, which are two independent
    # batches, the standard deviation is 0.001·√2, and t with one degree of freedom is 12.706205.
    tolerance = batch_tolerance(np.array([0.001, 0.003]), np.ones(2), batch_prompts=1)
    assert tolerance.value == pytest.approx(0.002 + 12.706205 * 0.001 * math.sqrt(2) * math.sqrt(3 / 2), rel=0.03)
    assert tolerance.value == pytest.approx(tolerance.batch_mean + 12.706205 * math.sqrt(3) * tolerance.batch_std)
    # With n prompts a batch, the standard deviation is divided by √n, and 1,000 prompts are 1,000/n batches.
    values = np.random.default_rng(0).lognormal(-6, 0.8, 1000)
    for prompts in (4, 64, 1000):
        error = values.std(ddof=1) * math.sqrt(1 / prompts + 1 / 1000)
        expected = values.mean() + 1.962341 * error  # t with 999 degrees of freedom
        assert batch_tolerance(values, np.ones(1000), prompts).value == pytest.approx(expected, abs=0.12 * error)


def test_interval_of_the_tolerance_is_the_rule_applied_to_resampled_prompts(monkeypatch):
    monkeypatch.setattr(comparison, "RESAMPLES", 50)
    monkeypatch.setattr(comparison, "BATCHES", 40)
    numerators, denominators = np.array([0.001, 0.004, 0.002]), np.array([1.0, 2.0, 3.0])
    found = batch_tolerance(numerators, denominators, 5, seed=3)
    rng = np.random.default_rng(3)
    batches, draws = rng.multinomial(5, [1 / 3] * 3, 40), rng.integers(3, size=(50, 3))

    def proposed(numerators, denominators):
        observed = [(row @ numerators) / (row @ denominators) for row in batches]
        # t with 2 degrees of freedom; 3/5 of a batch; the variance over 2, not over 3.
        return np.mean(observed) + 4.302653 * math.sqrt(1 + 5 / 3) * math.sqrt(3 / 2) * np.std(observed, ddof=1)

    tolerances = [proposed(numerators[draw], denominators[draw]) for draw in draws]
    assert [found.low, found.high] == pytest.approx(np.quantile(tolerances, [0.025, 0.975]).tolist())
    assert found.value == pytest.approx(proposed(numerators, denominators))


# --- engines and scoring ---------------------------------------------------------------------------------------------


def test_what_a_server_samples_after_an_end_token_is_left_out():
    with stub_server() as stub:
        stub.completes = lambda body: completions(body["prompt"] * 2, [[20, 1, 21], [20, 21, 22]], None)
        settings = CalibrationSettings(samples=2, max_tokens=3)
        found = _from_server(ServerClient(stub.url), [1], [[5], [6]], 3, settings)
    assert [(each.ids, len(each.logps), each.truncated) for each in found] == [
        ([20, 1], 2, False),
        ([20, 21, 22], 3, True),
    ] * 2


def test_replica_returns_what_an_independent_forward_finds(tokenizer):
    model = make_model()
    prompts = [tokenizer(text)["input_ids"] for text in ("12+34=", "5*6=", "9-8=7;")]
    settings = CalibrationSettings(samples=3, max_tokens=12, temperature=0.7, seed=5, replica_batch=4, progress=False)
    engine = EngineSpec.parse("replica:int4")
    before = torch.random.get_rng_state()
    sample = sample_rollouts(engine, model, tokenizer, prompts, settings)
    rollouts = sample.rollouts
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (sample.engine, sample.precision) == ("replica:int4", "int4")
    assert [rollout.prompt for rollout in rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    replica = Replica(model, "int4")
    for rollout in rollouts:
        assert rollout.truncated == (rollout.ids[-1] != tokenizer.eos_token_id)
        expected = plain_logps(replica.model, prompts[rollout.prompt], rollout.ids, 0.7)
        # Both run in bfloat16, one token after the other here and all at once there.
        assert torch.tensor(rollout.logps).exp().sub(expected.exp()).abs().max() < 0.02
    assert sample_rollouts(engine, model, tokenizer, prompts, settings) == sample
    assert sample_rollouts(engine, model, tokenizer, prompts, replace(settings, seed=6)) != sample


@pytest.mark.parametrize("batch_tokens", [1, 40])
def test_scores_are_those_of_a_plain_forward(batch_tokens):
    model = make_model().train()
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 200) for _ in range(length)] for length in (3, 8, 1)]
    rollouts = [Rollout(i % 3, [rng.randrange(10, 200) for _ in range(i)], [-1.0] * i, False) for i in range(1, 9)]
    settings = CalibrationSettings(temperature=0.7, bf16=False, batch_tokens=batch_tokens, progress=False)
    found = train_logps(model, prompts, rollouts, settings)
    for rollout, values in zip(rollouts, found, strict=True):
        assert values.shape == (len(rollout.ids),)
        expected = plain_logps(model, prompts[rollout.prompt], rollout.ids, 0.7)
        torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)
    assert model.training
    assert "forward" not in vars(model)  # nothing of ours is left on the model


@pytest.mark.parametrize("bf16", [False, True])
def test_scores_are_those_of_trl_trainer(tmp_path, bf16):
    trainer = make_trainer(tmp_path, kind=GRPOTrainer, bf16=bf16, constraint="none", temperature=0.8)
    prompt, ids = [20, 21, 22], [30, 31, 32, 33]
    with torch.no_grad():
        tokens = torch.tensor([prompt + ids])
        expected, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model.eval(), tokens, torch.ones_like(tokens), len(ids)
        )
    rollouts = [Rollout(0, ids, [0.0] * 4, False)]
    settings = CalibrationSettings(temperature=0.8, bf16=bf16, progress=False)
    (found,) = train_logps(make_model(), [prompt], rollouts, settings)
    assert torch.equal(found, expected[0].float())


@pytest.mark.parametrize(
    ("engines", "prompts", "words"),
    [
        ([], ["1+1=", "2+2="], ["engines", "'fp8'"]),
        (["replica:fp8"], ["one"], ["prompts", "are 1,"]),
        (["replica:fp8"], ["1" * 300, "2"], ["engine='replica:fp8'", "256", "max_prompt_length"]),
    ],
)
def test_wrong_arguments_are_refused(tokenizer, engines, prompts, words):
    with refuses(ValueError, *words):
        calibrate(make_model(), tokenizer, engines, prompts, progress=False)


# --- results ---------------------------------------------------------------------------------------------------------


class Saved(dict):
    """An object of a saved calibration, whose fields are attributes too."""

    __getattr__ = dict.__getitem__


def saved(output):
    """The calibration in a directory."""
    return json.loads((output / "calibration.json").read_text(), object_hook=Saved)


def script(output, *words, **options):
    """Calibrates with the tiny model and a small sample; returns what it kept of each engine."""
    usual = {"model": TINY_MODEL, "prompts": 8, "samples": 2, "max_tokens": 24, "seed": 0, "output": output}
    call("calibrate", [*as_words(usual | options), "--engine", *words])
    return saved(output).engines


def test_script_prints_and_keeps_what_it_measured(tmp_path, capsys):
    output = tmp_path / "out"
    script(output, "replica:fp8", "replica:bf16")
    shown = capsys.readouterr().out
    calibration = saved(output)
    for engine in calibration.engines:
        assert f"discrepancy_tolerance: {engine.tolerance.value:#.3g}" in shown
        assert engine.engine in shown
        assert (engine.completions, engine.prompts) == (16, 8)
    fp8, bf16 = calibration.engines
    assert bf16.estimates["k3_kl"].value < fp8.estimates["k3_kl"].value
    assert bf16.estimates["discrepancy"].value < fp8.estimates["discrepancy"].value
    assert calibration.settings["prompts_from"] == "arithmetic"
    with refuses(SystemExit, f"output='{output}'", "--overwrite"):
        script(output, "replica:fp8")
    assert saved(output) == calibration
    (other,) = script(output, "replica:int8", "--overwrite", "--no_split")
    assert other.engine == "replica:int8"


def test_prompts_are_drawn_from_files(tmp_path, tokenizer, capsys):
    def draw(count=128, seed=0, **fields):
        return draw_prompts(DataArguments(**fields), tokenizer, count, seed)

    questions = [f"{n}+{n}=?" for n in range(10, 20)]
    bare = write_rows(tmp_path / "prompts.jsonl", ({"question": question} for question in questions))
    file = {"dataset_name": bare, "prompt_column": "question", "answer_column": "question"}
    drawn = draw(4, **file)
    assert drawn == draw(4, **file) != draw(4, seed=1, **file)
    asked = [message["content"] for (message,) in drawn]
    assert len(set(asked)) == 4
    assert set(asked) < set(questions)
    assert sorted(m["content"] for (m,) in draw(**file, instruction="Go.")) == [f"{q}\n\nGo." for q in questions]
    assert "prompts=128: there are 10," in capsys.readouterr().out
    assert len(draw(5)) == 5


@pytest.mark.parametrize(
    "options", [{"dataset_name": "missing.jsonl"}, {"model": "no/such/model"}], ids=lambda options: next(iter(options))
)
def test_script_refuses_wrong_input(tmp_path, options):
    with refuses(SystemExit, "error: ", *options.values()):
        script(tmp_path / "out", "replica:fp8", **options)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.long
@requires_vllm
def test_script_measures_a_running_fp8_server(tmp_path, fp8_server, capsys):
    server, replica = script(tmp_path / "out", fp8_server.url, "replica:bf16", prompts=16)
    assert server.engine == fp8_server.url
    assert "Fp8" in server.precision
    assert server.completions == 32
    assert 0.0005 < server.estimates["discrepancy"].value < 0.01
    assert server.estimates["discrepancy"].value > replica.estimates["discrepancy"].value
    assert server.pearson > 0.99
    assert server.tolerance.low <= server.tolerance.value <= server.tolerance.high
    assert f"discrepancy_tolerance: {server.tolerance.value:#.3g}" in capsys.readouterr().out
    # The server's weights were quantized from float32. To a policy of bfloat16 weights they are other weights, and
    # which of the two FP8 schemes comes nearer to them is chance.
    split = server.diagnosis.split
    assert server.diagnosis.scheme in ("fp8", "fp8_block")
    assert split.unexplained.value > 0.5 * split.whole.value
    (server,) = script(tmp_path / "out", fp8_server.url, "--overwrite", prompts=16, train_dtype="mixed")
    split = server.diagnosis.split
    assert server.diagnosis.scheme == "fp8"
    assert split.unexplained.value < 0.2 * split.whole.value


@pytest.mark.long
@requires_vllm
def test_an_fp8_kv_cache_is_a_cause_of_its_own_and_known_to_the_last_bit(tmp_path):
    (server,) = script(tmp_path / "out", "fp8+fp8_kv", prompts=16, train_dtype="mixed")
    split = server.diagnosis.split
    assert server.diagnosis.scheme == "fp8+fp8_kv"
    assert split.shares["KV cache"].value > 0.2 * split.whole.value
    assert split.unexplained.value < 0.05 * split.whole.value
