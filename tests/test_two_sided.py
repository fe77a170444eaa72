"""The two-sided forms: the divergence of the policy from its quantized self, and the gradient through both."""

import pytest
import torch

from dc_trl import DCGRPOTrainer
from dc_trl.quantization.deployed_forward import DeployedForward
from dc_trl.quantization.fake_quantize import fake_quantize_weight
from dc_trl.quantization.schemes import quantized_weights, resolve_scheme
from dc_trl.quantization.two_sided import TwoSidedDivergence

from .helpers import make_experts, make_model, make_trainer


IDS = torch.arange(24).view(2, 12) * 7 % 200 + 10
WIDTH = 8  # of the completions, at the end
MAKERS = {"dense": make_model, "experts": make_experts}


def log_probs_of_sampled(model, temperature):
    logits = model(input_ids=IDS).logits[:, -WIDTH - 1 : -1]
    logps = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return logps, logps.gather(2, IDS[:, -WIDTH:].unsqueeze(2)).squeeze(2)


def by_two_models(model, quantized, kind, temperature):
    """The divergence of two models, written out."""
    logps, of_sampled = log_probs_of_sampled(model, temperature)
    quantized_logps, quantized_of_sampled = log_probs_of_sampled(quantized, temperature)
    if kind == "l1":
        return (quantized_of_sampled.exp() - of_sampled.exp()).abs()
    return (quantized_logps.exp() * (quantized_logps - logps)).sum(-1)


def divergence_of(model, kind, temperature, scheme="int4_g32"):
    """By the class under test, in float64 so that differences can be taken, for weights alone."""
    deployed = DeployedForward(model, scheme, activations=False, compute=False)
    divergence = TwoSidedDivergence(model, deployed, kind, temperature)
    _, train_logps = log_probs_of_sampled(model, temperature)
    return divergence(train_logps, lambda: log_probs_of_sampled(model, temperature)[1])


def round_trips(model, scheme="int4_g32"):
    """Δ of each parameter: its deployed value minus itself."""
    args, quantized = resolve_scheme(scheme, model).weights, quantized_weights(model)
    with torch.no_grad():
        return {
            name: (fake_quantize_weight(weight, args) if name in quantized else weight).bfloat16().double() - weight
            for name, weight in model.named_parameters()
        }


def moved(model, by):
    """A copy of the model with weights that are moved by given amounts."""
    copy = type(model)(model.config).double().eval()
    copy.load_state_dict(model.state_dict())
    copy.set_experts_implementation("eager")
    with torch.no_grad():
        for name, weight in copy.named_parameters():
            weight += by[name]
    return copy


@pytest.mark.parametrize("kind", ["kl", "l1"])
@pytest.mark.parametrize("architecture", MAKERS)
def test_the_gradient_is_that_of_moving_both_policies_together(kind, architecture):
    """Central differences along a random direction, with Δ held fixed; the value by two separate models."""
    temperature = 0.7
    model = MAKERS[architecture]().double().eval()
    model.set_experts_implementation("eager")  # the only one in float64
    delta = round_trips(model)
    divergence = divergence_of(model, kind, temperature)
    expected = by_two_models(model, moved(model, delta), kind, temperature)
    torch.testing.assert_close(divergence.double(), expected, rtol=1e-4, atol=1e-7)
    assert divergence.mean() > 1e-4  # int4 does something
    divergence.sum().backward()

    torch.manual_seed(1)
    direction = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}
    step = 3e-5  # transformers computes norms and softmaxes in float32

    def at(distance):
        here = {name: distance * value for name, value in direction.items()}
        there = {name: delta[name] + value for name, value in here.items()}
        return by_two_models(moved(model, here), moved(model, there), kind, temperature).sum().item()

    difference = (at(step) - at(-step)) / (2 * step)
    slope = sum((weight.grad * direction[name]).sum().item() for name, weight in model.named_parameters())
    assert slope == pytest.approx(difference, rel=3e-3, abs=1e-3)


def test_the_trainer_adds_lambda_times_the_mean_divergence(tmp_path):
    """Against a trainer without the term: losses differ by λ·D̄, and the first step's gradients by λ·∇D̄."""

    def trained(**settings):
        gradients = {}

        class Recording(DCGRPOTrainer):
            def training_step(self, model, inputs, num_items_in_batch):
                loss = super().training_step(model, inputs, num_items_in_batch)
                if not gradients:
                    gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})
                return loss

        settings |= {"deployment_scheme": "int4_g32", "gradient_checkpointing": True}
        trainer = make_trainer(tmp_path / "run", kind=Recording, max_steps=2, **settings)
        trainer.train()
        return gradients, trainer

    plain, _ = trained(constraint="none")
    once, _ = trained(constraint="static", constraint_form="two_sided_kl", lambda_init=0.4)
    twice, trainer = trained(constraint="static", constraint_form="two_sided_kl", lambda_init=0.8)
    terms = [once[name] - plain[name] for name in plain]
    assert torch.stack([term.norm() for term in terms]).norm() > 1e-4
    for name, term in zip(plain, terms, strict=True):  # linear in λ
        torch.testing.assert_close(twice[name] - plain[name], 2 * term, rtol=1e-3, atol=1e-6)
    history = trainer.state.log_history[0]
    assert "lagrangian/penalty_mean" not in history
    assert history["lagrangian/constraint_loss"] > 0


def test_the_divergence_follows_the_weights(tmp_path):
    """Against the replica, which is quantized anew before each batch: both compare with the same quantized weights.

    The fused optimizer, the default, moves parameters without PyTorch's counting it.
    """
    form = {"constraint": "static", "constraint_form": "two_sided_l1", "deployment_scheme": "int4_g32"}
    trainer = make_trainer(tmp_path / "run", optim="adamw_torch_fused", max_steps=5, **form)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "lagrangian/constraint_loss" in entry]
    assert len(steps) == 5
    for step in steps:
        assert step["lagrangian/constraint_loss"] == pytest.approx(step["discrepancy/probs_diff_mean"], rel=1e-3)


def test_checkpointing_does_not_change_the_gradient():
    """The recomputed layers of the plain forward compute plainly, and those of the deployed one as deployed."""
    gradients = []
    for checkpointing in (False, True):
        model = make_model().train()
        deployed = DeployedForward(model, "fp8")
        if checkpointing:
            model.gradient_checkpointing_enable()
        divergence = TwoSidedDivergence(model, deployed, "kl")
        _, train_logps = log_probs_of_sampled(model, 1.0)
        divergence(train_logps, lambda model=model: log_probs_of_sampled(model, 1.0)[1]).sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-4, atol=1e-6)
