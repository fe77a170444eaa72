"""The discrepancy split into what the weights did since they sampled (lag) and what the engine does, and remedies for
the former."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from dc_trl.constraint.metrics import BatchStatistics, batch_metrics
from dc_trl.constraint.settings import ConstraintSettings
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.sampled_tokens import SampledTokens
from dc_trl.sampling.versions import SamplerWeights

from .helpers import (
    MISALIGNED,
    PENALTIES,
    On,
    Watch,
    assert_same_run,
    assert_same_tensors,
    assert_same_weights,
    completion_logits,
    completion_logps,
    logged,
    make_model,
    make_trainer,
    read_json,
    tiny_model,
)


def tiny(tmp_path, **options):
    options = {
        "train_dataset": arithmetic_dataset(96, 0, "train"),
        "deployment_scheme": "int3",
        "per_device_train_batch_size": 16,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "weight_sync_steps": 3,
        "max_steps": 4,
        "constraint": "none",
    } | options
    return make_trainer(tmp_path, tiny_model(), **options)


def train(tmp_path, resume_from=None, **options):
    trainer = tiny(tmp_path, **options)
    trainer.train(resume_from)
    return trainer


# Where TRL scores a batch within the loss, and where it scores it as it is sampled.
SCORED = [
    pytest.param({}, id="in the loss"),
    pytest.param(MISALIGNED, id="as sampled"),
]

# --- the sums


@given(st.lists(st.tuples(*[st.floats(-6, 0)] * 3, st.booleans()), min_size=1, max_size=12), st.integers(0, 12))
def test_the_parts_are_measured_as_the_whole_is(rows, cut):
    """Each part by the formulas of the whole, from two micro-batches, over the tokens that count."""
    train, lagged, infer = (torch.tensor([[row[i] for row in rows]], dtype=torch.float64) for i in range(3))
    scored = torch.tensor([[row[3] for row in rows]])
    statistics = BatchStatistics(ConstraintSettings(batch_reduction="token"))
    for part in (slice(0, cut), slice(cut, None)):
        tokens = (train[:, part], infer[:, part], scored[:, part], torch.zeros(1), lagged[:, part])
        statistics.add(SampledTokens(*tokens))
    sums = statistics.reduce(lambda tensor: tensor)
    if not scored.any():
        assert sums["tokens"] == 0
        return
    metrics = batch_metrics(sums)
    for part, first, second in (("lag", train, lagged), ("engine", lagged, infer)):
        d = (first - second)[scored]
        expected = {
            "k3_kl": (d.exp() - d - 1).mean(),
            "mean": (first.exp() - second.exp())[scored].abs().mean(),
            "ess": d.exp().mean() ** 2 / d.exp().square().mean(),
        }
        for name, value in expected.items():
            tolerance = 1e-9 if name == "ess" else 1e-12
            assert metrics[f"discrepancy/{part}_{name}"] == pytest.approx(value.item(), abs=tolerance)


def test_the_lag_of_an_age_is_that_of_its_own_tokens():
    """δ of the lag: 0.2 and 0.1 of age 0, 0.4 and 0.3 of age 1, and 0.5 of a token of age 1 that is masked."""
    present = torch.tensor([[0.5, 0.5, 0.9], [0.6, 0.5, 0.9]])
    past = torch.tensor([[0.3, 0.4, 0.4], [0.2, 0.2, 0.4]])
    scored = torch.tensor([[True, True, False], [True, True, True]])
    tokens = SampledTokens(present.log(), present.log(), scored, torch.zeros(2), past.log(), torch.tensor([0, 1]))
    statistics = BatchStatistics(ConstraintSettings(batch_reduction="token"), ages=3)
    statistics.add(tokens, weights=torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]))
    metrics = batch_metrics(statistics.reduce(lambda tensor: tensor))
    assert metrics["discrepancy/lag_age0_mean"] == pytest.approx(0.15)
    assert metrics["discrepancy/lag_age1_mean"] == pytest.approx(0.35)
    assert "discrepancy/lag_age2_mean" not in metrics


# --- the measurement in training


OPTIONS = {
    "plain": {},
    "slices that share a step": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
    "TRL's slices": {"length_aware_batches": False},
    "aligned": {"train_through_quantization": True},
    "weights of the format": {"train_through_quantization": "weights"},
    "checkpointed activations": {"gradient_checkpointing": True},
    "bfloat16": {"bf16": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_lag_is_that_of_the_policys_forward_at_two_versions_of_its_weights(tmp_path, options):
    """Each token of four steps, by another copy of the model that loads the weights of the two steps."""
    trainer = tiny(tmp_path, discrepancy_split=True, **options)
    watch = Watch(trainer)
    trainer.train()
    tolerance = 0.2 if trainer.args.bf16 else 2e-5
    assert [tokens.age for _, tokens in watch.tokens[:: len(watch.tokens) // 4]] == [0, 1, 2, 0]
    for lag in watch.compared_lags(tiny_model(), tolerance):
        assert lag.abs().max() > 0.05


TWO_PASSES = {"num_iterations": 2, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("scored", [*SCORED, pytest.param(TWO_PASSES, id="two passes")])
def test_splitting_leaves_the_training_as_it_is(tmp_path, scored):
    plain = train(tmp_path / "plain", **scored)
    split = train(tmp_path / "split", discrepancy_split=True, **scored)
    assert_same_weights(plain.model, split.model)
    assert logged(plain, "discrepancy/mean") == logged(split, "discrepancy/mean")
    assert not any("engine_" in name for entry in plain.state.log_history for name in entry)
    ages, lag = logged(split, "sync/age"), logged(split, "discrepancy/lag_k3_kl")
    assert {0} < {*ages}
    assert [k3 > 1e-4 for k3 in lag] == [age > 0 for age in ages]
    assert [k3 == 0 for k3 in lag] == [age == 0 for age in ages]
    assert min(logged(split, "discrepancy/engine_k3_kl")) > 1e-4


def test_the_lag_of_a_second_training_is_its_own(tmp_path):
    """The first training has kept weights of a step of the same number."""
    trainer = tiny(tmp_path, discrepancy_split=True, max_steps=2)
    trainer.train()
    watch = Watch(trainer)
    trainer.train()
    assert [tokens.age for _, tokens in watch.tokens] == [0, 1]
    (lag,) = watch.compared_lags(tiny_model(), 2e-5)
    assert lag.abs().max() > 0.05


ENGINES = {
    "bf16": {"deployment_scheme": "bf16"},
    "fp8": {"deployment_scheme": "fp8"},
    "int3": {},
    "aligned": {"deployment_scheme": "fp8", "train_through_quantization": True},
    "mixed precision": {"deployment_scheme": "fp8", "bf16": True},
    "adapter": {"deployment_scheme": "fp8", "peft_config": LoraConfig(r=2, init_lora_weights=False)},
    "dropped groups": {"bf16": True, "drop_zero_std_groups": True, "num_generations": 2},
}


@pytest.mark.parametrize("scored", SCORED)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_weights_that_do_not_move_do_not_lag(tmp_path, engine, scored):
    """At a learning rate of 0, whatever the age, nothing is pulled at and nothing is masked, by any remedy."""
    options = engine | scored | {"learning_rate": 0.0, "per_device_train_batch_size": 8, "max_completion_length": 8}
    options["max_steps"] = 3
    grpo = train(tmp_path / "grpo", **options)
    pull = {"constraint": "static", "constraint_form": "log_ratio", "constraint_target": "lag"}
    clip = {"rollout_correction": "ppo_clip(1, 1)", "rollout_correction_target": "lag"}
    trainer = train(tmp_path / "remedies", **options, **pull, **clip)
    assert max(logged(trainer, "sync/age")) > 0
    for name in ("discrepancy/lag_mean", "discrepancy/lag_k3_kl", "correction/masked_fraction"):
        assert set(logged(trainer, name)) == {0.0}
    assert set(logged(trainer, "lagrangian/penalty_mean")) == {0.0}
    assert logged(trainer, "grad_norm") == logged(grpo, "grad_norm")


def test_dropout_would_be_taken_for_a_lag(tmp_path):
    adapter = LoraConfig(r=2, lora_dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout=0\.1 in '.*lora_dropout.*disable_dropout=True"):
        tiny(tmp_path, discrepancy_split=True, peft_config=adapter)
    tiny(tmp_path, discrepancy_split=True, peft_config=adapter, disable_dropout=True)
    tiny(tmp_path, discrepancy_split=True, peft_config=adapter, weight_sync_steps=1)
    with pytest.raises(ValueError, match=r"dropout=0\.2 in '.*self_attn.*attention_dropout=0 in model_init_kwargs"):
        make_trainer(
            tmp_path, make_model(attention_dropout=0.2), deployment_scheme="fp8", weight_sync_steps=3, recipe="lag"
        )


@pytest.mark.parametrize("fails_at", [0, 3, None], ids=["first", "fourth", "forward"])
def test_the_present_weights_are_back_however_it_ends(monkeypatch, fails_at):
    """A Ctrl-C or a full memory, while weights change places or while a batch is scored."""
    model = make_model(64)
    weights = SamplerWeights(model, 1)
    weights.keep(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    before = copy.deepcopy(model.state_dict())
    copy_, calls = torch.Tensor.copy_, []

    def interrupted(self, *args, **kwargs):
        calls.append(self)
        if len(calls) - 1 == fails_at:
            raise KeyboardInterrupt
        return copy_(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)

    def score():
        with weights.in_place(0):
            assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score()
    assert len(calls) > (fails_at or 0)
    assert_same_tensors(model.state_dict(), before)


# --- remedies


REMEDIES = {
    "form": {"constraint": "static", "constraint_form": "log_ratio", "lambda_init": 0.5, "lambda_max": 1.0},
    "multiplier": {"constraint": "lagrangian", "constraint_form": "log_ratio", "discrepancy_tolerance": 1e-4},
}


def test_a_sampler_in_step_is_not_pulled_at(tmp_path, caplog):
    """In a coarse format in step nothing lags: a pull at the lag leaves GRPO's weights, one at everything does not."""
    options = REMEDIES["form"] | {"weight_sync_steps": 1}
    grpo = train(tmp_path / "grpo", weight_sync_steps=1, max_steps=2)
    lag = train(tmp_path / "lag", constraint_target="lag", max_steps=2, **options)
    everything = train(tmp_path / "all", max_steps=2, **options)
    assert_same_weights(lag.model, grpo.model)
    embeddings = [trainer.model.get_input_embeddings().weight for trainer in (everything, grpo)]
    assert not torch.equal(*embeddings)
    assert sum("constraint_target='lag' acts on what the weights did" in text for text in caplog.messages) == 1


def test_dual_ascent_follows_the_part_that_is_constrained(tmp_path):
    tolerance = 1e-3
    options = REMEDIES["multiplier"] | {"discrepancy_tolerance": tolerance, "lambda_lr": 2.0}
    trainer = train(tmp_path, constraint_target="lag", **options)
    expected = trainer.args.lambda_init
    for value, mean, violation in zip(
        *(logged(trainer, name) for name in ("lagrangian/lambda", "discrepancy/lag_mean", "lagrangian/violation")),
        strict=True,
    ):
        assert value == pytest.approx(expected)
        assert violation == pytest.approx(mean - tolerance)
        expected = min(max(expected + 2.0 * (mean - tolerance), 0.0), 1.0)
    assert trainer.lagrange_multiplier.value == pytest.approx(expected)


def trajectory(values, mask):
    return ((values * mask).sum(1) / mask.sum(1)).unsqueeze(1).expand_as(values)


# Of the ratio, its logarithm, the advantages and the mask; the bounds make each of them act on this model.
WEIGHTS = {
    "token_truncate(0.9, 1.1)": lambda r, d, adv, mask: r.clamp(0.9, 1.1),
    "token_mask(0.9, 1.1)": lambda r, d, adv, mask: r * ((r >= 0.9) & (r <= 1.1)),
    "sequence_truncate(0.8, 1.2)": lambda r, d, adv, mask: (d * mask).sum(1, keepdim=True).exp().clamp(0.8, 1.2),
    "geometric_mask(0.99, 1.01)": lambda r, d, adv, mask: (trajectory(d, mask).exp() - 1).abs() <= 0.01,
    "ppo_clip(0.95, 1.05)": lambda r, d, adv, mask: r * ~(((adv > 0) & (r > 1.05)) | ((adv < 0) & (r < 0.95))) * mask,
}
CASES = [
    *(({"constraint": "static", "constraint_form": form, "lambda_init": 0.7}, "lag") for form in PENALTIES),
    *(({"rollout_correction": name}, part) for name in WEIGHTS for part in ("lag", "engine")),
    (
        {"constraint": "static", "constraint_form": "log_ratio", "lambda_init": 0.7}
        | {"rollout_correction": "icepop"},
        "lag",
    ),
]


@pytest.mark.parametrize(("fields", "part"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_the_gradient_of_a_step_is_that_of_the_formula(tmp_path, fields, part):
    """−⟨w·(Â − λ·c)·∇ log p⟩, of a mean over completions of means over tokens, from forwards of another copy."""
    options = {"constraint": "none", "loss_type": "grpo", "max_grad_norm": 0.0, "learning_rate": 1e-2} | fields
    options |= {f"{name}_target": part for name in fields if name in ("constraint", "rollout_correction")}
    options |= {"deployment_scheme": "int4_g32", "weight_sync_steps": 2, "max_steps": 2}
    trainer = make_trainer(tmp_path, make_model(64), **options)
    watch, gradients = Watch(trainer), []

    def keep(state, model, **kwargs):
        gradients[:] = [parameter.grad.clone() for parameter in model.parameters()]

    trainer.add_callback(On("on_pre_optimizer_step", keep))
    trainer.train()
    batch = watch.batches[-1]
    mask, advantages = batch["completion_mask"].float(), batch["advantages"].unsqueeze(1)
    assert watch.tokens[-1][1].age == 1
    model = make_model(64)
    model.load_state_dict(watch.weights[0])
    lagged = completion_logps(model, batch)
    model.load_state_dict(watch.weights[1])
    scores = completion_logits(model, batch).log_softmax(-1)
    present = scores.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    a, b = (present.detach(), lagged) if part == "lag" else (lagged, batch["sampling_per_token_logps"])
    penalised, weights = advantages.expand_as(mask), torch.ones_like(mask)
    if "constraint" in fields:
        penalised = advantages - 0.7 * PENALTIES[fields["constraint_form"]](a, b)
    if (name := fields.get("rollout_correction")) == "icepop":
        weights = (a - b).exp() * (((a - b).exp() >= 0.5) & ((a - b).exp() <= 5.0))
    elif name is not None:
        weights = WEIGHTS[name]((a - b).exp(), a - b, penalised, mask)
        assert (weights * mask - mask).abs().max() > 1e-3  # it acts
    loss = -((weights * penalised * present * mask).sum(1) / mask.sum(1)).mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item() + 1e-7)


# --- checkpoints


@pytest.mark.parametrize("scored", SCORED)
def test_a_resumed_run_measures_the_same_lag(tmp_path, scored):
    """Bit for bit, from between two synchronizations and from one; also by an evaluation that had other weights."""
    options = {
        "max_steps": 6,
        "save_steps": 1,
        "weight_sync_steps": 4,
        "eval_dataset": arithmetic_dataset(4, 0, "held_out"),
        "eval_steps": 3,
        "num_generations_eval": 1,
        "per_device_eval_batch_size": 4,
        "recipe": "lag",
        "constraint": None,
    } | scored
    whole = train(tmp_path / "whole", **options)
    for step in (1, 3, 5):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        kept = read_json(checkpoint / "dc_grpo_state.json")["weight_sync"]["kept"]
        assert (checkpoint / "lagged_rank0.safetensors").exists() == kept
        resumed = train(tmp_path / f"from {step}", str(checkpoint), **options)
        assert max(logged(resumed, "discrepancy/lag_k3_kl")) > 1e-4
        assert_same_run(resumed, whole, after=step)


def test_a_run_that_begins_to_split_synchronizes_first(tmp_path):
    """A checkpoint without the trainer's copy of the weights that sampled does not know what they gave."""
    options = {"save_steps": 1, "max_steps": 3}
    train(tmp_path / "whole", **options)
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    resumed = train(tmp_path / "resumed", checkpoint, discrepancy_split=True, **options)
    assert logged(resumed, "sync/age")[-2:] == [0, 1]
