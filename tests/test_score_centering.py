"""Score centering: the gradient against autograd over the whole vocabulary, and in training."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dc_trl.constraint.corrections import CORRECTIONS
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.rollouts.replica import Replica
from dc_trl.rollouts.score_centering import ScoreCentering

from .helpers import TINY_MODEL, distinct_characters, logged, make_config, make_model, make_trainer


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


def test_the_centred_score_has_the_mean_zero_under_the_sampler(policy, batch):
    """By the definition: the scores of all words, each minus the mean, weighted by the sampler's probabilities."""
    ids, mask = batch
    replica = Replica(policy, "int2")
    centering = ScoreCentering(policy, replica)
    log_p = log_softmax(policy, ids, mask, 1.0)
    centre = centering(ids, mask, WIDTH, torch.ones(3))
    with torch.no_grad():
        q = log_softmax(replica.model, ids, mask, 1.0).exp()
    plain = gradients(policy, (q[0, 2] * log_p[0, 2]).sum())
    mean = gradients(policy, (q[0, 2] * (log_p[0, 2] - centre.score[0, 2])).sum())
    assert plain.norm() > 1e-3
    assert mean.norm() < 1e-5 * max(1.0, plain.norm())


def trained(tmp_path, **options):
    options = {"deployment_scheme": "int2", "max_steps": 1, "optim": "sgd", "learning_rate": 1.0} | options
    options |= {"length_aware_batches": False, "constraint": "none", "max_grad_norm": 0.0}
    trainer = make_trainer(tmp_path, **options)
    batches = []
    policy_loss = trainer.policy_loss
    trainer.policy_loss = lambda model, inputs: (batches.append(dict(inputs)), policy_loss(model, inputs))[1]
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    moved = [a - b.detach() for a, b in zip(before, trainer.model.parameters(), strict=True)]
    return trainer, batches, torch.cat([each.flatten() for each in moved])  # lr 1: the gradient


@pytest.mark.parametrize(
    ("loss_type", "correction"),
    [("grpo", "none"), ("dapo", "token_truncate"), ("dr_grpo", "icepop"), ("bnpo", "none"), ("cispo", "ppo_clip")],
)
def test_a_step_is_that_of_the_formula(tmp_path, loss_type, correction):
    """policy loss = −(w·A·log p of the sampled token − A·Σ_v w(v)·q(v)·log p(v)), by each loss's own mean."""
    options = {"loss_type": loss_type, "rollout_correction": correction, "steps_per_generation": 1}
    trainer, (batch,), gradient = trained(tmp_path, score_centering=True, **options)
    model = make_model()
    replica = Replica(model, "int2")
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    log_p = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1].log_softmax(-1)
    with torch.no_grad():
        replica_logits = replica.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        q, p = replica_logits[:, -width - 1 : -1].float().log_softmax(-1).exp(), log_p.exp()
        sign = batch["advantages"].sign().view(-1, 1, 1).expand_as(p)
        weights = WEIGHTS[correction](p / q, p, q, sign)
    at = batch["completion_ids"].unsqueeze(-1)
    of_sampled = (weights.gather(-1, at) * log_p.gather(-1, at)).squeeze(-1)
    terms = -batch["advantages"].unsqueeze(1) * (of_sampled - (weights * q * log_p).sum(-1))
    scored = batch["completion_mask"]
    lengths = scored.sum(-1)
    loss = {
        "grpo": ((terms * scored).sum(-1) / lengths).mean(),
        "dapo": (terms * scored).sum() / lengths.sum(),
        "cispo": trainer.args.epsilon * (terms * scored).sum() / lengths.sum(),  # its bound of the ratio, which is 1
        "bnpo": (terms * scored).sum() / lengths.sum(),
        "dr_grpo": (terms * scored).sum() / (len(scored) * trainer.args.max_completion_length),
    }[loss_type]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=2e-3 * expected.abs().max().item())
    assert logged(trainer, "discrepancy/drift_tv")[0] > 0


def test_a_split_beside_it_changes_nothing(tmp_path):
    """The split's forward comes between the loss's own and the mean score, which is that of the loss's own."""
    _, _, alone = trained(tmp_path / "alone", score_centering=True)
    _, _, split = trained(tmp_path / "split", score_centering=True, discrepancy_split=True)
    assert torch.equal(alone, split)


def test_a_sampler_that_is_the_policy_has_no_drift(tmp_path):
    """The policy trains as deployed: the mean score under itself is 0, and the step that of GRPO."""
    options = {"train_through_quantization": True, "steps_per_generation": 1}
    _, _, plain = trained(tmp_path / "plain", **options)
    trainer, _, centred = trained(tmp_path / "centred", score_centering=True, **options)
    assert logged(trainer, "discrepancy/drift_tv")[0] < 1e-5
    torch.testing.assert_close(centred, plain, rtol=1e-3, atol=1e-4 * plain.abs().max().item())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"deployment_scheme": None}, "reads the whole distribution"),
        ({"use_vllm": True, "deployment_scheme": "fp8"}, "use_vllm=True"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence'"),
        ({"beta": 0.04}, "beta=0.04"),
        ({"num_iterations": 2}, "num_iterations=2"),
        ({"rollout_correction": "geometric_mask"}, "rollout_correction='geometric_mask'"),
        ({"top_p": 0.9}, "top_p=1.0"),
        ({"loss_type": "vespo", "rollout_correction": "icepop"}, "loss_type='vespo'"),
    ],
)
def test_what_cannot_be_centred_is_refused(tmp_path, fields, words):
    settings = {"recipe": "trl", "deployment_scheme": "int2", "score_centering": True}
    with pytest.raises(ValueError, match=words):
        make_config(tmp_path, **settings | fields)


def test_the_shipped_model_trains_with_it(tmp_path):
    trainer = make_trainer(
        tmp_path,
        AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32),
        reward=lambda completions, **kwargs: distinct_characters([each[0]["content"] for each in completions]),
        train_dataset=arithmetic_dataset(96, 0, "train"),
        deployment_scheme="int3",
        score_centering=True,
        constraint="static",
        constraint_form="log_ratio",
        rollout_correction="token_truncate",
        weight_sync_steps=3,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_completion_length=24,
        learning_rate=1e-3,
    )
    trainer.train()
    drift = logged(trainer, "discrepancy/drift_tv")
    assert len(drift) == 3
    assert drift[0] < drift[2]  # with the age of the sampler's weights
