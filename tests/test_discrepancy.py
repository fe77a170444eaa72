"""Measures, penalties, reductions and metrics against numbers computed by hand, brute force, and properties."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dc_trl import mismatch_metrics, token_discrepancy
from dc_trl.constraint.discrepancy import discrepancy_penalty, discrepancy_sums
from dc_trl.constraint.metrics import METRICS, mismatch_sums
from dc_trl.sampled_tokens import scored_tokens


# Two trajectories of three and two tokens: probabilities under the training and the sampling engine.
TRAIN = torch.tensor([[0.5, 0.25, 0.8], [0.1, 0.4, 0.9]])
INFER = torch.tensor([[0.4, 0.50, 0.8], [0.2, 0.1, 0.3]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
DELTAS = {
    "prob_diff": [[0.1, 0.25, 0.0], [0.1, 0.3, 0.6]],
    "prob_ratio": [[0.25, 0.5, 0.0], [0.5, 3.0, 2.0]],
    "log_prob": [
        [math.log(1.25), math.log(2), 0.0],
        [math.log(2), math.log(4), math.log(3)],
    ],
}


@pytest.mark.parametrize("measure", DELTAS)
def test_measures_by_hand(measure):
    delta = token_discrepancy(TRAIN.log(), INFER.log(), measure)
    torch.testing.assert_close(delta, torch.tensor(DELTAS[measure]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_is_exactly_at_the_margin_is_not_penalised(level):
    delta = torch.tensor([[0.5, 0.75, 0.25], [0.75, 0.75, 0.75]])  # binary fractions, with means of 0.5 and 0.75
    penalty = discrepancy_penalty(delta, torch.ones(2, 3).bool(), level, margin=0.5)
    assert penalty.tolist() == [[0.0, 0.75 if level == "token" else 0.0, 0.0], [0.75] * 3]


def test_a_gap_of_16_bit_log_probabilities_is_not_rounded_to_16_bits():
    train, infer = torch.tensor([-0.5]), torch.tensor([-0.5078125])  # which bfloat16 holds exactly
    delta = token_discrepancy(train.bfloat16(), infer.bfloat16())
    assert delta.dtype == torch.float32
    assert delta.item() == pytest.approx(math.exp(-0.5) - math.exp(-0.5078125), rel=1e-4)
    assert token_discrepancy(train.double(), infer.bfloat16()).dtype == torch.float64


def brute_force_metrics(train, infer, mask):
    """The formulas of the docstring, token by token, in Python."""
    pairs = [
        [(a, b) for a, b, m in zip(*row, strict=True) if m and math.isfinite(a) and math.isfinite(b)]
        for row in zip(train.tolist(), infer.tolist(), mask.tolist(), strict=True)
    ]
    pairs = [row for row in pairs if row]
    tokens = [pair for row in pairs for pair in row]
    mean, exp = statistics.fmean, math.exp
    gaps = [abs(exp(a) - exp(b)) for a, b in tokens]
    log_ppl = [mean(b - a for a, b in row) for row in pairs]
    weights = [exp(a - b) for a, b in tokens]
    p, q = [exp(a) for a, _ in tokens], [exp(b) for _, b in tokens]
    clamp = lambda value: max(-20.0, min(20.0, value))  # noqa: E731
    return {
        "kl": mean(b - a for a, b in tokens),
        "k3_kl": mean(exp(a - b) - (a - b) - 1 for a, b in tokens),
        "log_ppl_diff": mean(log_ppl),
        "log_ppl_abs_diff": mean(map(abs, log_ppl)),
        "ppl_ratio": mean(map(exp, log_ppl)),
        "chi2_token": mean(exp(2 * clamp(a - b)) for a, b in tokens) - 1,
        "chi2_seq": mean(exp(2 * clamp(sum(a - b for a, b in row))) for row in pairs) - 1,
        "probs_diff_mean": mean(gaps),
        "probs_diff_max": max(gaps),
        "probs_diff_std": statistics.stdev(gaps),
        "probs_pearson": statistics.correlation(p, q),
        "ess": 1 / mean((w / mean(weights)) ** 2 for w in weights),
    }


@pytest.mark.parametrize("seed", range(2))
def test_metrics_against_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    train = -torch.rand(6, 9, generator=generator, dtype=torch.float64) * 5
    infer = (train + 0.5 * torch.randn(6, 9, generator=generator, dtype=torch.float64)).clamp(max=0)
    mask = torch.rand(6, 9, generator=generator) < 0.7
    mask[2] = False
    infer[0, 0] = math.nan
    expected = brute_force_metrics(train, infer, mask)
    assert list(expected) == list(METRICS)
    assert mismatch_metrics(train, infer, mask) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_metrics_are_exact_for_small_gaps_in_float32():
    # k3 and χ² of gaps near 1e-4 vanish in float32 arithmetic; the sums are taken in float64.
    train = torch.linspace(-0.5, -0.4, 4).unsqueeze(0)
    infer = train + torch.tensor([1e-4, -1e-4, 1e-4, -1e-4])
    expected = brute_force_metrics(train.double(), infer.double(), torch.ones(1, 4))
    metrics = mismatch_metrics(train, infer, torch.ones(1, 4))
    assert metrics["k3_kl"] == pytest.approx(expected["k3_kl"], rel=1e-6)


def test_chi2_is_clamped():
    train, infer = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-50.0, -50.0]])
    metrics = mismatch_metrics(train, infer, torch.ones(1, 2))
    assert metrics["chi2_token"] == pytest.approx(math.exp(40), rel=1e-9)
    assert metrics["chi2_seq"] == pytest.approx(math.exp(40), rel=1e-9)


log_probabilities = st.lists(st.floats(-15, 0), min_size=6, max_size=6).map(lambda v: torch.tensor(v).view(2, 3))
masks = st.lists(st.booleans(), min_size=6, max_size=6).map(lambda v: torch.tensor(v).view(2, 3))
measures = st.sampled_from(["prob_diff", "prob_ratio", "log_prob"])


@given(log_probabilities, log_probabilities, measures)
def test_no_gradient_flows_through_delta(train, infer, measure):
    train = train.clone().requires_grad_()
    delta = token_discrepancy(train, infer, measure)
    assert not delta.requires_grad
    (train.sum() - delta.sum()).backward()
    torch.testing.assert_close(train.grad, torch.ones(2, 3))


@settings(max_examples=50)
@given(
    log_probabilities,
    log_probabilities,
    masks,
    st.sampled_from([0.0, -3.0, 7.0, math.nan, math.inf, -math.inf]),
    st.sampled_from(["token", "sequence"]),
)
def test_masked_positions_have_no_influence(train, infer, mask, garbage, level):
    def everything(a, b):
        delta = token_discrepancy(a, b)
        scored = scored_tokens(mask, a, b, delta)
        penalty = discrepancy_penalty(delta, scored, level, 0.01)
        by_sequence, by_token = (discrepancy_sums(delta, scored, r) for r in ("sequence", "token"))
        sums = mismatch_sums(a, b, mask)
        return penalty, [value.item() for value in (*by_sequence.values(), *by_token.values(), *sums.values())]

    penalty, values = everything(train, infer)
    filled = everything(train.where(mask, garbage), infer.where(mask, garbage))
    torch.testing.assert_close(filled[0], penalty)
    assert filled[1] == values
    assert (penalty[~mask] == 0).all()
