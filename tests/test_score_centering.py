"""Score centering: the gradient against autograd over the whole vocabulary, and in training."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import add_fused_lm_head

from dc_trl.constraint.corrections import CORRECTIONS
from dc_trl.parts import kept_tokens
from dc_trl.parts.kept_tokens import Named
from dc_trl.parts.score_centering import ScoreCentering
from dc_trl.sampling.named_tokens import KeptLogProb, NamedLogProb
from dc_trl.sampling.replica import Replica

from .helpers import completion_logits, logged, make_model, make_trainer


WORDS = 12
PADDING, WIDTH = 2, 5


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return make_model(vocab_size=WORDS).eval()


@pytest.fixture
def batch():
    """Three rows, the second one with a shorter prompt."""
    ids = torch.randint(0, WORDS, (3, 4 + WIDTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


def log_softmax(model, ids, mask, temperature):
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -WIDTH - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)


def gradients(model, value):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)])


WEIGHTS = {
    "none": lambda r, p, q, sign: torch.ones_like(r),
    "token_truncate": lambda r, p, q, sign: r.clamp(0, 2),
    "icepop": lambda r, p, q, sign: r * ((r >= 0.5) & (r <= 5)),
    "ppo_clip": lambda r, p, q, sign: r.clamp(max=20) * ~(((sign > 0) & (r > 1.24)) | ((sign < 0) & (r < 0.76))),
    "tv_mask": lambda r, p, q, sign: r.clamp(max=20) * ((p - q) * sign <= 0.2),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("scheme", ["int2", "fp8"])
def test_the_mean_score_is_that_of_a_sum_over_the_vocabulary(policy, batch, name, scheme):
    ids, mask = batch
    temperature = 0.7
    replica = Replica(policy, scheme)
    correction = None if name == "none" else CORRECTIONS[name]
    centering = ScoreCentering(policy, replica, temperature, correction)
    advantages = torch.tensor([1.0, -1.0, 0.5])
    log_p = log_softmax(policy, ids, mask, temperature)  # which the hook sees
    centre = centering(ids, mask, WIDTH, advantages)
    with torch.no_grad():
        q = log_softmax(replica.model, ids, mask, temperature).exp()
        p = log_p.exp()
        weights = WEIGHTS[name](p / q, p, q, advantages.sign().view(3, 1, 1).expand_as(p))
    direct = (weights * q * log_p).sum(-1)
    torch.testing.assert_close(centre.score, direct, rtol=1e-4, atol=1e-5)
    coefficients = torch.randn(3, WIDTH)
    ours, theirs = (gradients(policy, (coefficients * each).sum()) for each in (centre.score, direct))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(centre.drift[..., 0], (q - p).abs().sum(-1) / 2, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(centre.drift[..., 1], (q - p).norm(dim=-1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8"])
def test_the_mean_is_that_of_the_policy_as_it_is_trained(policy, batch, scheme, in_float32):
    """Float32 weights under autocast in bfloat16: p by TRL's own log-probability of each word, and E_q[s] = q − p."""
    ids, mask = batch
    replica = Replica(policy, scheme)
    add_fused_lm_head(policy, temperature=0.7, cast_lm_head_to_fp32=in_float32)
    centering = ScoreCentering(policy, replica, 0.7, in_float32=in_float32)
    columns, states = slice(-WIDTH - 1, -1), []
    policy.base_model.register_forward_hook(lambda module, inputs, output: states.append(output.last_hidden_state))
    with torch.autocast("cpu", torch.bfloat16):
        of_words = [
            policy(input_ids=ids, attention_mask=mask, shift_labels=torch.full_like(ids, word), fused_lm_head=True)
            for word in range(WORDS)
        ]
    log_p = torch.stack([output.log_probs[:, columns] for output in of_words], dim=-1)
    centre = centering(ids, mask, WIDTH, torch.ones(3))
    with torch.no_grad():
        q, p = log_softmax(replica.model, ids, mask, 0.7).exp(), log_p.exp()
    torch.testing.assert_close(centre.score, (q * log_p).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(centre.drift[..., 1], (q - p).norm(dim=-1), rtol=1e-3, atol=1e-5)
    gradient = torch.autograd.grad(centre.score.sum(), states[-1])[0][:, columns]
    weight = policy.lm_head.weight if in_float32 else policy.lm_head.weight.bfloat16().float()
    mean = (q - p) @ weight / 0.7
    assert (gradient - mean).norm() < 0.01 * mean.norm()


def named_tokens(log_q, tokens):
    """`Named` with these tokens of each position, shape (B, T, n), as vLLM would name them."""
    rows = zip(tokens.int(), log_q.gather(-1, tokens), strict=True)
    return Named.most_probable(
        [[NamedLogProb(0.0, *of) for of in zip(*row, strict=True)] for row in rows], torch.device("cpu")
    )


CORRECTED = {
    "none": lambda r, low, high: torch.ones_like(r),
    "token_truncate": lambda r, low, high: r.clamp(max=high),
    "icepop": lambda r, low, high: r * ((r >= low) & (r <= high)),
}


@pytest.mark.parametrize("name", CORRECTED)
@pytest.mark.parametrize("top_k", [1, 3, WORDS])
def test_the_most_probable_tokens_and_a_tail_are_the_papers_sum_over_them(policy, batch, name, top_k):
    """Σ_H sg(m(v) − α·p(v)) log p(v), with m = w·q and α = ρ·w(1/ρ); the rest is ρ·w·Σ_v p·∇log p = 0."""
    ids, mask = batch
    replica = Replica(policy, "int2")
    correction = None if name == "none" else CORRECTIONS[name]
    by_replica = ScoreCentering(policy, replica, correction=correction, top_k=top_k)
    by_vllm = ScoreCentering(policy, None, correction=correction)
    log_p = log_softmax(policy, ids, mask, 1.0)
    weight = lambda r: CORRECTED[name](r, 0.5, 5.0 if name == "icepop" else 2.0)  # noqa: E731
    with torch.no_grad():
        q, p = log_softmax(replica.model, ids, mask, 1.0).exp(), log_p.exp()
        heads = q.topk(top_k).indices
        of_head = torch.zeros_like(q).scatter(-1, heads, 1.0)
        rho = (1 - (q * of_head).sum(-1)).clamp(min=0) / (1 - (p * of_head).sum(-1)).clamp(min=1e-6)
        alpha = rho * weight(1 / rho.clamp(min=1e-30))
        coefficients = (weight(p / q) * q - alpha.unsqueeze(-1) * p) * of_head
    centres = (
        by_replica(ids, mask, WIDTH, torch.ones(3)),
        by_vllm(ids, mask, WIDTH, torch.ones(3), named=named_tokens(q.log(), heads)),
    )
    factors = torch.randn(3, WIDTH)
    direct = (coefficients * log_p).sum(-1)
    scores = (centre.score for centre in centres)
    theirs, *ours = (gradients(policy, (factors * each).sum()) for each in (direct, *scores))
    assert theirs.norm() > 1e-3
    for each in ours:
        torch.testing.assert_close(each, theirs, rtol=1e-3, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), sharpness=st.floats(0.1, 6.0), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_the_centred_score_of_any_sampler_has_the_mean_zero(seed, sharpness, temperature):
    """In double precision, by what an engine names: E_q[∇ log p] − ∇ C = 0 to 1e-6."""
    torch.manual_seed(seed)
    policy = make_model(vocab_size=WORDS).double().eval()
    ids = torch.randint(0, WORDS, (2, 3 + WIDTH))
    mask = torch.ones_like(ids)
    log_q = (sharpness * torch.randn(2, WIDTH, WORDS, dtype=torch.double)).log_softmax(-1)
    centering = ScoreCentering(policy, None, temperature)
    log_p = (policy(input_ids=ids).logits[:, -WIDTH - 1 : -1] / temperature).log_softmax(-1)
    every = torch.stack([torch.stack([torch.randperm(WORDS) for _ in range(WIDTH)]) for _ in range(2)])
    centre = centering(ids, mask, WIDTH, torch.ones(2), named=named_tokens(log_q.float(), every))
    factors = torch.randn(2, WIDTH, dtype=torch.double)
    plain = gradients(policy, (factors * (log_q.exp() * log_p).sum(-1)).sum())
    mean = gradients(policy, (factors * ((log_q.exp() * log_p).sum(-1) - centre.score)).sum())
    assert mean.norm() < 1e-6 * max(1.0, plain.norm())


@pytest.mark.parametrize("by_vllm", [False, True])
def test_under_truncated_sampling_both_distributions_are_those_of_the_kept_tokens(policy, batch, by_vllm, monkeypatch):
    ids, mask = batch
    monkeypatch.setattr(kept_tokens, "_TILE", 4 * WORDS)  # four positions at a time: the tiles cut through rows
    replica = Replica(policy, "int2")
    centering = ScoreCentering(policy, None if by_vllm else replica, correction=CORRECTIONS["token_truncate"])
    log_p = log_softmax(policy, ids, mask, 1.0)
    with torch.no_grad():
        log_q = log_softmax(replica.model, ids, mask, 1.0)
    sets = [[log_q[row, at].topk(1 + (row + at) % 4).indices for at in range(WIDTH)] for row in range(3)]
    sets[2][1] = torch.arange(WORDS)  # nothing is truncated here
    support = torch.stack(
        [torch.stack([torch.zeros(WORDS).index_fill(0, kept, 1.0) for kept in row]) for row in sets]
    ).bool()
    of_kept = log_q.masked_fill(~support, -torch.inf).log_softmax(-1)
    if not by_vllm:
        sets[2][1] = torch.arange(0)  # so says an engine that does not name its tokens
    named = [
        [KeptLogProb(0.0, kept.int(), logps=logps[kept]) for kept, logps in zip(*row, strict=True)]
        for row in zip(sets, of_kept, strict=True)
    ]
    device = torch.device("cpu")
    most_probable = Named.most_probable(named, device) if by_vllm else None
    centre = centering(ids, mask, WIDTH, torch.ones(3), Named.kept(named, device), most_probable)
    kept_p = log_p.masked_fill(~support, -torch.inf).log_softmax(-1).where(support, 0.0)
    q = of_kept.exp()
    weights = (kept_p.detach().exp() / q.clamp(min=1e-30)).clamp(max=2)
    direct = (weights * q * kept_p).sum(-1)
    torch.testing.assert_close(centre.score, direct, rtol=1e-3, atol=1e-4)
    factors = torch.randn(3, WIDTH)
    ours, theirs = (gradients(policy, (factors * each).sum()) for each in (centre.score, direct))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def trained(tmp_path, **options):
    options = {"deployment_scheme": "int2", "max_steps": 1, "optim": "sgd", "learning_rate": 1.0} | options
    options |= {"length_aware_batches": False, "constraint": "none", "max_grad_norm": 0.0}
    trainer = make_trainer(tmp_path, **options)
    before = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
    trainer.train()
    after = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    return trainer, before - after  # lr 1: the gradient


def support_of(batch):
    """Which tokens of the vocabulary truncated sampling kept, shape (B, T, V); all where it does not say."""
    support = torch.ones(*batch["completion_ids"].shape, 262, dtype=torch.bool)
    if "kept_ids" in batch:
        for row, (ids, counts) in enumerate(zip(batch["kept_ids"], batch["kept_counts"], strict=True)):
            for at, kept in enumerate(ids[ids >= 0].split(counts.tolist())):
                if len(kept):
                    support[row, at] = torch.zeros(262).index_fill(0, kept.long(), 1.0).bool()
    return support


@pytest.mark.parametrize(
    ("loss_type", "correction", "fields"),
    [
        ("grpo", "none", {}),
        ("dapo", "token_truncate", {}),
        ("dr_grpo", "icepop", {}),
        ("bnpo", "none", {}),
        ("cispo", "ppo_clip", {}),
        ("grpo", "token_truncate", {"top_k": 5}),
    ],
)
def test_a_step_is_that_of_the_formula(tmp_path, seen_by_the_loss, loss_type, correction, fields):
    """policy loss = −(w·A·log p of the sampled token − A·Σ_v w(v)·q(v)·log p(v)), by each loss's own mean.

    Under truncated sampling both distributions are those of the kept tokens.
    """
    options = {"loss_type": loss_type, "rollout_correction": correction, "steps_per_generation": 1} | fields
    trainer, gradient = trained(tmp_path, score_centering=True, **options)
    (batch,), model = seen_by_the_loss, make_model()
    dropped = ~support_of(batch)
    assert dropped.any() == bool(fields)
    log_p = completion_logits(model, batch).masked_fill(dropped, -torch.inf).log_softmax(-1).masked_fill(dropped, 0.0)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        of_replica = completion_logits(Replica(model, "int2").model, batch, position_ids=positions).float()
        q, p = of_replica.masked_fill(dropped, -torch.inf).log_softmax(-1).exp(), log_p.exp()
        sign = batch["advantages"].sign().view(-1, 1, 1).expand_as(p)
        weights = WEIGHTS[correction](p / q.clamp(min=1e-30), p, q, sign)
    at = batch["completion_ids"].unsqueeze(-1)
    of_sampled = (weights.gather(-1, at) * log_p.gather(-1, at)).squeeze(-1)
    scored = batch["completion_mask"]
    terms = -batch["advantages"].unsqueeze(1) * (of_sampled - (weights * q * log_p).sum(-1)) * scored
    loss = {
        "grpo": (terms.sum(-1) / scored.sum(-1)).mean(),
        "dapo": terms.sum() / scored.sum(),
        "cispo": trainer.args.epsilon * terms.sum() / scored.sum(),  # its bound of the ratio, which is 1
        "bnpo": terms.sum() / scored.sum(),
        "dr_grpo": terms.sum() / (len(scored) * trainer.args.max_completion_length),
    }[loss_type]
    expected = gradients(model, loss)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=2e-3 * expected.abs().max().item())
    assert logged(trainer, "discrepancy/drift_tv")[0] > 0


def test_a_split_beside_it_changes_nothing(tmp_path):
    """The split's forward comes between the loss's own and the mean score, which is that of the loss's own."""
    _, alone = trained(tmp_path / "alone", score_centering=True)
    _, split = trained(tmp_path / "split", score_centering=True, discrepancy_split=True)
    assert torch.equal(alone, split)


def test_all_tokens_named_are_the_whole_vocabulary_and_one_is_not(tmp_path):
    exact, named, one = (
        trained(tmp_path / str(top_k), score_centering=True, score_centering_top_k=top_k)[1]
        for top_k in (None, 10**6, 1)
    )
    torch.testing.assert_close(named, exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item())
    assert (one - exact).norm() > 1e-2 * exact.norm()


def test_a_sampler_that_is_the_policy_has_no_drift(tmp_path):
    """The policy trains as deployed: the mean score under itself is 0, and the step that of GRPO."""
    options = {"train_through_quantization": True, "steps_per_generation": 1}
    _, plain = trained(tmp_path / "plain", **options)
    trainer, centred = trained(tmp_path / "centred", score_centering=True, **options)
    assert logged(trainer, "discrepancy/drift_tv")[0] < 1e-5
    torch.testing.assert_close(centred, plain, rtol=1e-3, atol=1e-4 * plain.abs().max().item())
