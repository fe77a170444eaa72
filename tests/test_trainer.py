"""The trainer against TRL's own, against hand-made penalties, and on rollouts that engines should not return."""

import math

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from dc_trl import DCGRPOTrainer, HistoryCallback, mismatch_metrics
from dc_trl.constraint.lagrangian import AUTO_BATCHES
from dc_trl.parts.part import Part
from dc_trl.sampling.replica import Replica

from . import helpers
from .helpers import (
    ALIGNED,
    MISALIGNED,
    TINY_MODEL,
    ByStep,
    Rollouts,
    assert_finite,
    assert_same_weights,
    completion_logps,
    distinct_characters,
    logged,
    make_model,
    make_prompts,
    read_rows,
    refuses,
    steps_of,
    untimed_rows,
)
from .stub_server import stub_server
from .vllm_server import requires_vllm


def make_trainer(output_dir, rollouts=None, **options):
    return helpers.make_trainer(output_dir, rollout_func=rollouts, **options)


def train(output_dir, rollouts=None, **options):
    trainer = make_trainer(output_dir, rollouts, **options)
    trainer.train()
    return trainer


# --- against TRL


@pytest.mark.parametrize("steps", [ALIGNED, MISALIGNED, {**MISALIGNED, "num_iterations": 2}])
@pytest.mark.parametrize("engine", ["model.generate", "rollouts"])
def test_without_constraint_losses_and_weights_are_trls(tmp_path, steps, engine):
    fields = {"constraint": "none", "max_steps": 6, "length_aware_batches": False} | steps
    ours, theirs = (
        train(tmp_path, Rollouts() if engine == "rollouts" else None, kind=kind, **fields)
        for kind in (DCGRPOTrainer, GRPOTrainer)
    )
    for name in ("loss", "grad_norm"):
        assert logged(ours, name) == logged(theirs, name)
    assert_same_weights(ours.model, theirs.model)
    assert ("discrepancy/mean" in ours.state.log_history[0]) == (engine == "rollouts")
    assert not logged(ours, "lagrangian/lambda")


@pytest.mark.parametrize("steps", [ALIGNED, MISALIGNED])
def test_no_forward_pass_that_trl_would_not_make(tmp_path, steps):
    calls = {DCGRPOTrainer: [], GRPOTrainer: []}
    for kind, of_kind in calls.items():
        trainer = make_trainer(tmp_path, Rollouts(), kind=kind, **steps)
        trainer.model.model.register_forward_hook(lambda *args, of_kind=of_kind: of_kind.append(1))
        trainer.train()
    assert len(calls[DCGRPOTrainer]) == len(calls[GRPOTrainer]) > 0


# --- the penalty


@pytest.mark.parametrize(
    "fields", [MISALIGNED | {"max_steps": 4}, ALIGNED | {"gradient_accumulation_steps": 4, "max_steps": 1}]
)
def test_delta_is_taken_once_at_the_weights_that_sampled(tmp_path, seen_by_the_loss, fields):
    """Two passes over a generation batch, in several optimizer steps and in one."""
    trainer = train(tmp_path, Rollouts(), learning_rate=0.1, num_iterations=2, **fields)
    assert trainer.state.global_step == fields["max_steps"]
    assert len(seen_by_the_loss) == 4
    for before, after in zip(seen_by_the_loss[:2], seen_by_the_loss[2:], strict=True):
        torch.testing.assert_close(before["advantages"], after["advantages"], atol=1e-6, rtol=0)


# --- the multiplier


@pytest.mark.parametrize(
    ("steps", "max_steps", "iterations"),
    [
        (ALIGNED, 3, 3),
        ({**MISALIGNED, "num_iterations": 2}, 8, 2),
        # Two generation batches for each optimizer step.
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2}, 2, 4),
    ],
)
def test_one_update_for_each_generation_batch(tmp_path, monkeypatch, steps, max_steps, iterations):
    fields = {"max_steps": max_steps, "lambda_lr": 0.2, "discrepancy_tolerance": 0.2} | steps
    trainer = make_trainer(tmp_path, rollouts := Rollouts(), **fields)
    seen, update = [], trainer.lagrange_multiplier.update
    monkeypatch.setattr(trainer.lagrange_multiplier, "update", lambda mean: seen.append(mean) or update(mean))
    trainer.train()
    assert rollouts.calls == iterations == len(seen)
    expected = 0.1
    for mean in seen:
        expected = min(max(expected + 0.2 * (mean - 0.2), 0.0), 1.0)
    assert trainer.lagrange_multiplier.value == pytest.approx(expected)


def test_automatic_tolerance_is_taken_from_the_first_batches(tmp_path):
    fields = {"discrepancy_tolerance": "auto", "max_steps": AUTO_BATCHES + 3}
    trainer = train(tmp_path, Rollouts(), **fields, **ALIGNED)
    means = logged(trainer, "discrepancy/mean")
    # t with 9 degrees of freedom is 2.262157; √(1 + 1/10)
    expected = np.mean(means[:AUTO_BATCHES]) + 2.262157 * math.sqrt(1.1) * np.std(means[:AUTO_BATCHES], ddof=1)
    assert logged(trainer, "lagrangian/tolerance") == pytest.approx([expected] * 3)
    violations = logged(trainer, "lagrangian/violation")
    assert violations == pytest.approx([mean - expected for mean in means[AUTO_BATCHES:]])
    lambdas = logged(trainer, "lagrangian/lambda")
    assert lambdas[: AUTO_BATCHES + 1] == [0.1] * (AUTO_BATCHES + 1)
    assert lambdas[AUTO_BATCHES + 1] == pytest.approx(max(0.1 + violations[0], 0.0))
    assert trainer.lagrange_multiplier.tolerance == pytest.approx(expected)


@pytest.mark.parametrize(("reduction", "steps"), [("sequence", ALIGNED), ("token", MISALIGNED)])
def test_metrics_cover_the_whole_generation_batch(tmp_path, seen_by_the_loss, reduction, steps):
    fields = {"max_steps": 2, "learning_rate": 0.0, "batch_reduction": reduction} | steps
    trainer = train(tmp_path, Rollouts(), **fields)
    slices = seen_by_the_loss[:2]

    def whole(parts):
        return torch.nn.utils.rnn.pad_sequence([row for part in parts for row in part], batch_first=True)

    of_policy = whole(completion_logps(trainer.model, inputs) for inputs in slices)
    infer, mask = (whole(each[name] for each in slices) for name in ("sampling_per_token_logps", "completion_mask"))
    row = trainer.state.log_history[0]
    expected = mismatch_metrics(of_policy, infer, mask.bool())
    assert {name: row[f"discrepancy/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    gap = (of_policy.exp() - infer.exp()).abs() * mask
    mean = gap.sum() / mask.sum() if reduction == "token" else (gap.sum(1) / mask.sum(1)).mean()
    assert row["discrepancy/mean"] == pytest.approx(mean.item(), rel=1e-5)
    assert row["lagrangian/penalized_fraction"] == 1.0
    assert row["lagrangian/penalty_mean"] == pytest.approx(0.1 * (gap.sum() / mask.sum()).item(), rel=1e-5)


def test_tokens_that_come_again_at_the_same_weights_count_once(tmp_path):
    """Two passes over a generation batch within one optimizer step, against one pass."""
    fields = {"learning_rate": 0.0, "batch_reduction": "token", "steps_per_generation": 2}
    once, twice = (
        train(tmp_path, Rollouts(), gradient_accumulation_steps=2 * passes, num_iterations=passes, **fields)
        for passes in (1, 2)
    )
    for name in ("discrepancy/mean", "discrepancy/kl", "lagrangian/lambda"):
        assert logged(once, name) == logged(twice, name) != []


EVALUATED = {"eval_steps": 1, "per_device_eval_batch_size": 4}


def test_evaluation_measures_and_moves_nothing(tmp_path):
    trainer = train(tmp_path, Rollouts(), max_steps=2, lambda_lr=0.5, eval_dataset=make_prompts(6), **EVALUATED)
    for name in ("mean", "kl", "k3_kl", "chi2_seq", "probs_pearson", "ess", "probs_diff_max"):
        first, _ = logged(trainer, f"eval_discrepancy/{name}")
        assert math.isfinite(first)
    values, means = logged(trainer, "lagrangian/lambda"), logged(trainer, "discrepancy/mean")
    assert values[1] == pytest.approx(values[0] + 0.5 * (means[0] - 0.0037))
    # The second evaluation is measured with the λ of then, and leaves it.
    before = trainer.lagrange_multiplier.state_dict()
    metrics = trainer.evaluate()
    assert metrics["eval_lagrangian/lambda"] == before["value"]
    assert trainer.lagrange_multiplier.state_dict() == before


def test_an_evaluation_between_two_passes_over_a_batch_is_measured(tmp_path):
    fields = MISALIGNED | EVALUATED | {"num_iterations": 2, "max_steps": 4, "eval_dataset": make_prompts(2)}
    trainer = train(tmp_path, Rollouts(), **fields)
    assert len(logged(trainer, "eval_discrepancy/mean")) == 4
    # Of the one generation batch, whose second pass counts nothing.
    assert len(logged(trainer, "discrepancy/mean")) == 1


def test_evaluation_weighs_tokens_not_batches(tmp_path, seen_by_the_loss):
    fields = {"constraint": "none", "per_device_eval_batch_size": 4, "eval_dataset": make_prompts(3)}
    trainer = make_trainer(tmp_path, Rollouts(), **fields)
    metrics = trainer.evaluate()
    assert len(seen_by_the_loss) == 3
    total = count = 0.0
    for inputs in seen_by_the_loss:
        delta = completion_logps(trainer.model, inputs).exp() - inputs["sampling_per_token_logps"].exp()
        gap = delta.abs() * inputs["completion_mask"]
        total, count = total + gap.sum().item(), count + inputs["completion_mask"].sum().item()
    assert metrics["eval_discrepancy/probs_diff_mean"] == pytest.approx(total / count, rel=1e-5)


# --- rollouts that engines should not return


def nan_tokens(call, completions, logprobs):
    for row in logprobs[::2]:
        row[0] = math.nan if call % 2 else None


def all_nan(call, completions, logprobs):
    for row in logprobs:
        row[:] = [math.nan] * len(row)


def empty_completions(call, completions, logprobs):
    for index in (0, 3):
        completions[index], logprobs[index] = [], []


def never_ended(call, completions, logprobs):
    for completion in completions:
        completion[-1] = 50


@pytest.mark.parametrize(
    ("edit", "steps", "level"),
    [
        (nan_tokens, ALIGNED, "token"),
        (all_nan, MISALIGNED, "sequence"),
        (empty_completions, ALIGNED, "sequence"),
        (never_ended, MISALIGNED, "token"),
    ],
)
def test_bad_rollouts_never_reach_lambda_or_loss(tmp_path, edit, steps, level):
    fields = {"mask_truncated_completions": edit is never_ended, "discrepancy_level": level} | steps
    trainer = train(tmp_path, Rollouts(edit=edit), **fields)
    assert_finite(trainer)
    assert math.isfinite(trainer.lagrange_multiplier.value)
    if edit in (all_nan, never_ended):
        # Nothing was measured: nothing is logged, and λ stays where it was.
        assert not logged(trainer, "discrepancy/mean")
        assert trainer.lagrange_multiplier.value == 0.1


@pytest.mark.parametrize("steps", [ALIGNED, MISALIGNED])
def test_a_batch_without_a_measurement_leaves_lambda_where_the_last_one_put_it(tmp_path, steps):
    """The second of three batches has no log-probabilities: λ moves by δ̄ of the first and of the third."""
    edit = lambda call, *rows: all_nan(call, *rows) if call == 1 else None  # noqa: E731
    max_steps = 3 * 2 // steps["gradient_accumulation_steps"]
    trainer = train(tmp_path, Rollouts(edit=edit), max_steps=max_steps, lambda_lr=0.5, lambda_max=9.0, **steps)
    first, third = logged(trainer, "discrepancy/mean")
    assert min(first, third) > 0.05
    assert trainer.lagrange_multiplier.value == pytest.approx(0.1 + 0.5 * (first + third - 2 * 0.0037))


@pytest.mark.parametrize("value", [0.5, -9999.0, math.inf, -math.inf, "x"])
def test_log_probabilities_that_none_can_be_are_refused_of_a_rollout_func(tmp_path, value):
    """By the bounds of a server's; TRL and the constraint would train on all of them."""
    for edit, words in (
        (lambda call, ids, logps: logps[1].__setitem__(0, value), ["completion 1", "in nats"]),
        (lambda call, ids, logps: logps[2].append(-1.0), ["completion 2", "for "]),
        (
            lambda call, ids, logps: logps[0].__setitem__(slice(None), [0.5] * len(ids[0])),
            ["completion 0", "logarithms"],
        ),
    ):
        with refuses(ValueError, "rollout_func", *words):
            train(tmp_path, Rollouts(edit=edit), max_steps=1)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda output: None, ["NoneType", "dictionary"]),
        (lambda output: output["completion_ids"][1].__setitem__(0, 262), ["completion 1", "vocabulary of 262"]),
        (lambda output: output["completion_ids"][1].__setitem__(0, -3), ["completion 1", "vocabulary"]),
        (lambda output: output["completion_ids"][1].__setitem__(0, 20.5), ["completion 1", "vocabulary"]),
        (lambda output: output["completion_ids"].__setitem__(1, torch.tensor([20, 1])), ["completion 1", "Tensor"]),
    ],
)
def test_what_is_no_rollout_is_refused_of_a_rollout_func(tmp_path, edit, words):
    class Wrong(Rollouts):
        def __call__(self, prompts, trainer):
            output = super().__call__(prompts, trainer)
            edit(output)
            return None if "NoneType" in words else output

    with refuses(ValueError, "rollout_func", *words):
        train(tmp_path, Wrong(), max_steps=1)


def filled_by_hand(prompts, trainer):
    """What an engine with empty completions comes to: an end token there that the environment has written."""
    output = Rollouts(edit=empty_completions)(prompts, trainer)
    output["env_mask"] = [[1] * len(ids) or [0] for ids in output["completion_ids"]]
    output["completion_ids"] = [ids or [1] for ids in output["completion_ids"]]
    output["logprobs"] = [values or [-0.5] for values in output["logprobs"]]
    return output


@pytest.mark.parametrize("returns", ["rollouts with a mask", "an engine"])
def test_what_fills_an_empty_completion_is_outside_the_loss(tmp_path, seen_by_the_loss, monkeypatch, returns):
    def rollouts(prompts, trainer):
        output = Rollouts(edit=empty_completions)(prompts, trainer)
        if returns == "rollouts with a mask":
            output["env_mask"] = [[1] * len(ids) for ids in output["completion_ids"]]
        return output

    fields = {"constraint": "none", "max_steps": 2, "length_aware_batches": False}
    theirs = train(tmp_path, filled_by_hand, kind=GRPOTrainer, **fields)
    if returns == "an engine":

        def generate(self, prompt_ids, *args, **kwargs):
            output = rollouts([""] * len(prompt_ids), theirs)
            return output["completion_ids"], output["logprobs"]

        monkeypatch.setattr(Replica, "generate", generate)
        fields["deployment_scheme"] = "bf16"
    ours = train(tmp_path, None if returns == "an engine" else rollouts, **fields)
    masks = [inputs["completion_mask"] * inputs["tool_mask"] for inputs in seen_by_the_loss]
    half = len(masks) // 2
    assert [mask.tolist() for mask in masks[half:]] == [mask.tolist() for mask in masks[:half]] != []
    assert all(mask[row].sum() == 0 for mask in masks for row in (0, 3))
    # What is outside the loss moves no weight.
    assert logged(ours, "loss") == logged(theirs, "loss")
    assert_same_weights(ours.model, theirs.model)


def test_tokens_without_log_probability_carry_no_penalty(tmp_path, seen_by_the_loss):
    for kind, edit in ((GRPOTrainer, None), (DCGRPOTrainer, nan_tokens)):
        train(tmp_path, Rollouts(edit=edit), kind=kind, max_steps=1, length_aware_batches=False)
    theirs, inputs = seen_by_the_loss
    missing = inputs["sampling_per_token_logps"].isnan()
    assert missing.any()
    plain = theirs["advantages"].unsqueeze(1).expand_as(missing)
    torch.testing.assert_close(inputs["advantages"][missing], plain[missing], atol=1e-6, rtol=0)


def test_a_rollout_function_without_log_probabilities_is_named(tmp_path, caplog):
    def rollouts(prompts, trainer):
        return Rollouts()(prompts, trainer) | {"logprobs": None}

    with refuses(ValueError, "constraint='lagrangian'", "logprobs=None", "constraint='none'"):
        train(tmp_path, rollouts)
    train(tmp_path, rollouts, recipe="trl")
    assert "The mismatch is not measured: rollout_func returns no logprobs" in caplog.text


# --- everything that GRPOTrainer takes


def test_an_adapter_on_one_of_tied_embeddings_makes_no_mismatch(tmp_path):
    adapter = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    fields = {"deployment_scheme": "bf16", "max_steps": 4, "learning_rate": 3e-2}
    trainer = train(tmp_path, peft_config=adapter, **fields)
    # Before the first step an adapter changes nothing.
    first, *_, last = logged(trainer, "discrepancy/mean")
    assert last < 3 * first
    trainer.save_deployment(tmp_path / "deployed")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "deployed", dtype=torch.float32)
    tokens = torch.arange(10, 200).view(2, -1)
    with torch.no_grad():
        models = (trainer.model, exported, make_model())
        own, theirs, untrained = (model.eval()(input_ids=tokens).logits.softmax(-1) for model in models)
    assert (own - theirs).abs().max() < (own - untrained).abs().max() / 10


@requires_vllm
@pytest.mark.parametrize(
    ("mode", "remedy"), [("server", "use vllm_mode='colocate' with deployment_scheme"), ("colocate", "'bf16'")]
)
def test_an_adapter_on_one_of_tied_embeddings_is_refused_where_vllm_has_one_matrix(tmp_path, mode, remedy):
    adapter = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    with (
        stub_server() as server,
        pytest.raises(ValueError, match=rf"tie_word_embeddings=True.*(?i:{remedy}).*ensure_weight_tying=True"),
    ):
        make_trainer(tmp_path, peft_config=adapter, use_vllm=True, vllm_mode=mode, vllm_server_base_url=server.url)


def test_where_nothing_can_be_measured_a_warning_says_so_and_what_measures(tmp_path, monkeypatch, caplog):
    """Without an argument object, model.generate samples as in TRL, and says nothing of its tokens."""
    monkeypatch.chdir(tmp_path)
    trainer = DCGRPOTrainer(str(TINY_MODEL), distinct_characters, None, make_prompts(2))
    assert (trainer.replica, trainer.args.constraint) == (None, "none")
    (warned,) = (record.message for record in caplog.records if "not be measured" in record.message)
    assert "deployment_scheme='bf16'" in warned


# --- a trainer that trains again


@pytest.mark.parametrize("step", [1, 2])
def test_resuming_in_a_used_trainer_is_resuming_in_a_new_one(tmp_path, step):
    """Step 1 lies within a generation batch, whose rest is in the checkpoint; step 2 between two."""
    fields = {"save_steps": 1, "max_steps": 3, "lambda_lr": 0.5, **MISALIGNED}
    used = train(tmp_path, ByStep(), **fields)  # ends within the second generation batch
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    new = make_trainer(tmp_path, rollouts := ByStep(), **fields)
    rows = []
    for trainer in (used, new):
        trainer.train(resume_from_checkpoint=checkpoint)
        rows.append(untimed_rows(trainer, after=step))
    assert rollouts.steps == [2]
    assert rows[0] == rows[1]
    assert used.lagrange_multiplier.state_dict() == new.lagrange_multiplier.state_dict()


def test_a_second_training_starts_from_its_own_rollouts_and_lambda(tmp_path):
    fields = {"lambda_lr": 0.5, "dual_window": 2, "callbacks": [HistoryCallback()], **MISALIGNED}
    trainer = train(tmp_path, rollouts := ByStep(), **fields)
    assert trainer.lagrange_multiplier.value != 0.1
    first, rollouts.steps = rollouts.steps, []
    trainer.train()
    assert rollouts.steps == first == [0, 2]
    assert logged(trainer, "lagrangian/lambda")[0] == 0.1
    # Its history is its own too.
    for name in ("history.1.jsonl", "history.jsonl"):
        assert steps_of(read_rows(tmp_path / name)) == [1, 2, 3]


class BreaksOnce(Part):
    """Ends the first training within its first optimizer step, at a micro-batch."""

    at = 0

    def loss(self, compute, inputs):
        loss, self.at = compute(inputs), self.at - 1
        if self.at == 0:
            raise KeyError("a bug")
        return loss


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_second_training_counts_no_token_of_one_that_broke(tmp_path, micro_batch):
    """No weight has moved: the first batch of the second training is that of a new trainer."""
    means = []
    for at in (0, micro_batch):
        trainer = make_trainer(tmp_path, ByStep(), max_steps=1, **ALIGNED)
        trainer.parts.append(part := BreaksOnce(trainer))
        part.at = at
        if at:
            with pytest.raises(KeyError):
                trainer.train()
        trainer.train()
        means.append(logged(trainer, "discrepancy/mean") + logged(trainer, "discrepancy/kl"))
    assert means[1] == pytest.approx(means[0], rel=1e-5)


# --- the gradient that the penalty makes


def token_gradients(tmp_path, monkeypatch, **fields):
    """Gradient of the loss by each log π_train of one batch, and what the loss read."""
    logps = []
    forward = GRPOTrainer._get_per_token_logps_and_entropies

    def keep(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        if outputs[0].requires_grad:
            outputs[0].retain_grad()
            logps.append(outputs[0])
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", keep)
        train(tmp_path, Rollouts(), max_steps=1, learning_rate=0.0, constraint="static", **fields)
    (values,) = logps
    return values.detach(), values.grad


@pytest.mark.parametrize(
    "fields",
    [
        *({"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo", "cispo")),
        {"loss_type": "cispo", "importance_sampling_level": "sequence"},
    ],
)
def test_the_gradient_of_the_penalty_is_each_tokens_own(tmp_path, monkeypatch, seen_by_the_loss, fields):
    """On the weights that sampled every ratio is 1: without penalty a token's gradient is −Â times its share."""
    fields = fields | {"epsilon_high": 5.0}  # CISPO's bound on the ratio
    margin = 0.1  # so that some tokens carry nothing
    _, without = token_gradients(tmp_path, monkeypatch, lambda_init=0.0, **fields)
    plain = seen_by_the_loss[-1]
    fields |= {"lambda_init": 0.5, "discrepancy_margin": margin}
    values, found = token_gradients(tmp_path, monkeypatch, **fields)
    delta = (values.exp() - plain["sampling_per_token_logps"].exp()).abs()
    penalty = 0.5 * delta * (delta > margin) * plain["completion_mask"]
    share = -without / plain["advantages"]
    assert (plain["advantages"].abs() > 1e-3).all()
    assert 0 < (penalty > 0).sum() < plain["completion_mask"].sum()
    torch.testing.assert_close(found - without, share * penalty, rtol=1e-3, atol=1e-8)
