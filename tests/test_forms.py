"""Forms of the constraint: the paper's, and that the trainer runs whichever it is given."""

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dc_trl.constraint.forms import form_of
from dc_trl.constraint.settings import ConstraintSettings
from dc_trl.sampled_tokens import SampledTokens

from .helpers import (
    ROOT,
    Rollouts,
    code_blocks,
    completion_logps,
    logged,
    make_model,
    make_trainer,
)


TRAIN = torch.tensor([[0.5, 0.2, 0.9], [0.25, 0.75, 0.5]]).log()
INFER = torch.tensor([[0.4, 0.2, 0.5], [0.50, 0.25, 0.5]]).log()
SCORED = torch.tensor([[True, True, False], [True, True, True]])
ADVANTAGES = torch.tensor([1.0, -1.0])
TOKENS = SampledTokens(TRAIN, INFER, SCORED, ADVANTAGES)


MEASURES = ["prob_diff", "prob_ratio", "log_prob"]


def signed(measure, p, q):
    return {"prob_diff": p - q, "prob_ratio": p / q - 1, "log_prob": (p / q).log()}[measure]


# What each form says that it follows the gradient of, on one softmax; `fixed` is p where the derivative is taken.
OBJECTIVES = {
    "injected": lambda measure, p, q, fixed: (p * signed(measure, fixed, q).abs()).sum(),
    "quadratic": lambda measure, p, q, fixed: signed(measure, p, q).square().sum() / 2,
    "log_ratio": lambda measure, p, q, fixed: (q * (p / q).log().square()).sum() / 2,
}
# Of a softmax over five actions: every probability is above e^-4 / 5 and so above the floor.
LOGITS = st.lists(st.floats(-2, 2), min_size=5, max_size=5).map(lambda values: torch.tensor(values).double())


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", OBJECTIVES)
@given(logits=LOGITS, engine=LOGITS)
def test_a_form_follows_the_gradient_of_its_objective(name, measure, logits, engine):
    q = engine.softmax(0)
    p = logits.softmax(0)
    form = form_of(ConstraintSettings(constraint="static", constraint_form=name, discrepancy_measure=measure))
    made = form(SampledTokens(p.log()[None], q.log()[None], torch.ones(1, 5).bool(), torch.zeros(1)))
    # The policy gradient, with all actions in place of samples: Σ_a π(a)·c(a)·∇log π(a), or with those of the engine.
    policy = logits.clone().requires_grad_()
    sampler = q if name == "log_ratio" else p
    (sampler * made[0] * policy.log_softmax(0)).sum().backward()

    def objective(at):
        return OBJECTIVES[name](measure, at.softmax(0), q, p)

    step = 1e-5
    differences = torch.stack(
        [(objective(logits + step * e) - objective(logits - step * e)) / (2 * step) for e in torch.eye(5).double()]
    )
    torch.testing.assert_close(policy.grad, differences, rtol=1e-5, atol=1e-7 * (1 + differences.abs().max().item()))


@given(logits=LOGITS, engine=LOGITS)
def test_the_centred_log_ratio_follows_the_gradient_of_its_variance(logits, engine):
    """What docs/concepts.md says of score centering beside it: E_q[c·(s − E_q[s])] = ∇ ½ Var_q[log π/q]."""
    q, policy = engine.softmax(0), logits.clone().requires_grad_()
    form = form_of(ConstraintSettings(constraint="static", constraint_form="log_ratio"))
    made = form(SampledTokens(logits.log_softmax(0)[None], q.log()[None], torch.ones(1, 5).bool(), torch.zeros(1)))[0]
    score = policy.log_softmax(0)
    ours = torch.autograd.grad((q * made * (score - (q * score).sum())).sum(), policy, retain_graph=True)[0]
    ratio = score - q.log()
    variance = (q * (ratio - (q * ratio).sum()).square()).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(variance / 2, policy)[0])


def test_the_coefficients_of_rare_tokens_are_bounded():
    """What divides is at least 1e-3, and the logarithm at most 20: π = 3e-4 and 1, q = 1e-4 and e^-30."""
    tokens = SampledTokens(
        torch.tensor([[3e-4, 1.0]]).log(),
        torch.tensor([[math.log(1e-4), -30.0]]),
        torch.ones(1, 2).bool(),
        torch.zeros(1),
    )

    def penalty(name, measure):
        form = form_of(ConstraintSettings(constraint="static", constraint_form=name, discrepancy_measure=measure))
        return form(tokens)[0].tolist()

    assert penalty("quadratic", "prob_ratio") == pytest.approx([2 / 1e-3, (math.exp(20) - 1) / 1e-3], rel=1e-4)
    assert penalty("quadratic", "log_prob") == pytest.approx([math.log(3) / 1e-3, 20.0], rel=1e-4)
    assert penalty("log_ratio", "prob_diff") == pytest.approx([math.log(3), 20.0], rel=1e-4)


def test_level_and_margin_of_a_signed_form():
    settings = {"constraint_form": "quadratic"}
    by_token = form_of(ConstraintSettings(constraint="static", **settings, discrepancy_margin=0.1001))
    torch.testing.assert_close(by_token(TOKENS), torch.tensor([[0.0, 0, 0], [-0.25, 0.5, 0.0]]))
    settings |= {"discrepancy_level": "sequence", "discrepancy_margin": 0.1}  # δ of the trajectories is 0.05 and 0.25
    by_trajectory = form_of(ConstraintSettings(constraint="static", **settings))
    expected = torch.tensor([[0.0] * 3, [0.25 / 3] * 3])
    torch.testing.assert_close(by_trajectory(TOKENS), expected)


# --- a function of one's own


@pytest.fixture
def own_form(tmp_path, monkeypatch):
    """The module of docs/corrections.md, where Python finds it."""
    *_, source = code_blocks((ROOT / "docs" / "corrections.md").read_text(), "python")
    (tmp_path / "my_form.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_form", raising=False)


def test_the_form_of_the_page_trains(own_form, tmp_path, seen_by_the_loss):
    settings = {"constraint": "static", "constraint_form": "my_form:complete", "lambda_init": 0.5, "max_steps": 1}
    trainer = make_trainer(tmp_path / "run", rollout_func=Rollouts(), **settings)
    trainer.train()
    (inputs,) = seen_by_the_loss
    assert not inputs["advantages"].requires_grad  # the page's form does not detach what it reads
    train = completion_logps(make_model(), inputs)
    infer = inputs["sampling_per_token_logps"]
    mask = inputs["completion_mask"].bool()
    gap = train.exp() - infer.exp()
    expected = (gap.abs() + gap.sign() * train.exp())[mask].mean().item()
    assert logged(trainer, "lagrangian/penalty_mean")[0] == pytest.approx(0.5 * expected, rel=1e-3)
