"""Forms of the constraint: the paper's, and that the trainer runs whichever it is given."""

import pytest
import torch

from dc_trl import DCGRPOTrainer
from dc_trl.constraint.forms import Constrained, form_of, injected
from dc_trl.constraint.settings import ConstraintSettings
from dc_trl.constraint.statistics import BatchStatistics

from .helpers import Rollouts, distinct_characters, make_config, make_model, make_prompts


TRAIN = torch.tensor([[0.5, 0.2, 0.9], [0.25, 0.75, 0.5]]).log()
INFER = torch.tensor([[0.4, 0.2, 0.5], [0.50, 0.25, 0.5]]).log()
SCORED = torch.tensor([[True, True, False], [True, True, True]])
ADVANTAGES = torch.tensor([1.0, -1.0])


def test_the_papers_form_by_hand():
    made = injected()(TRAIN, INFER, SCORED, ADVANTAGES, 2.0)
    penalty = torch.tensor([[0.1, 0.0, 0.0], [0.25, 0.5, 0.0]])
    torch.testing.assert_close(made.penalty, penalty)
    torch.testing.assert_close(made.advantages, torch.tensor([[0.8, 1.0, 1.0], [-1.5, -2.0, -1.0]]))
    assert made.loss is None


def test_level_and_margin_by_hand():
    made = injected(level="sequence", margin=0.1)(TRAIN, INFER, SCORED, ADVANTAGES, 1.0)
    torch.testing.assert_close(made.penalty, torch.tensor([[0.0, 0.0, 0.0], [0.25, 0.25, 0.25]]))


def test_what_is_only_measured_has_no_form():
    assert form_of(ConstraintSettings(constraint="none")) is None
    made = form_of(ConstraintSettings(discrepancy_measure="log_prob"))(TRAIN, INFER, SCORED, ADVANTAGES, 1.0)
    torch.testing.assert_close(made.penalty[1], (TRAIN - INFER)[1].abs())


def test_statistics_of_micro_batches_and_processes_are_those_of_the_whole():
    delta = (TRAIN.exp() - INFER.exp()).abs()
    penalty = delta.where(SCORED & (delta > 0.1), 0.0)
    ranks = [BatchStatistics() for _ in range(2)]
    for row, rank in enumerate(ranks):
        for _ in range(2):  # each row twice
            rows = slice(row, row + 1)
            rank.add(TRAIN[rows], INFER[rows], SCORED[rows], delta[rows], penalty[rows])
    of_others: list[torch.Tensor] = []
    assert ranks[1].reduce(lambda local: of_others.append(local) or local) is not None
    report = ranks[0].reduce(lambda local: torch.cat([local, *of_others]))
    assert report.tokens == 10
    assert report.mean_discrepancy == pytest.approx((0.1 / 2 + 0.75 / 3) / 2)
    assert report.mean_penalty(0.5) == pytest.approx(0.5 * 2 * 0.75 / 10)
    assert report.penalized_fraction == pytest.approx(4 / 10)
    assert report.metrics()["probs_diff_max"] == pytest.approx(0.5)
    assert ranks[0].reduce(lambda local: local) is None  # it was all taken


def _squared_log_ratio(train_logps, infer_logps, scored, advantages, multiplier):
    """A form that acts through the loss alone."""
    gap = (train_logps - infer_logps).where(scored, 0.0)
    unmoved = advantages.unsqueeze(1).expand_as(gap)
    return Constrained(unmoved, torch.zeros_like(gap), multiplier * gap.square().sum() / scored.sum())


@pytest.mark.parametrize("steps_per_generation", [2, 4])  # with 4 the weights move within a generation batch
def test_a_term_of_the_loss_reaches_the_weights(tmp_path, tokenizer, steps_per_generation):
    def trained(form):
        """Losses and inputs of the first optimizer step, and the trainer."""
        trainer = DCGRPOTrainer(
            make_model(),
            distinct_characters,
            make_config(
                tmp_path / "run",
                constraint="static",
                lambda_init=0.5,
                gradient_accumulation_steps=2,
                steps_per_generation=steps_per_generation,
                max_steps=1,
            ),
            train_dataset=make_prompts(),
            processing_class=tokenizer,
            rollout_func=Rollouts(),
        )
        trainer.form = form
        seen = []
        compute_loss = trainer._compute_loss

        def spy(model, inputs):
            loss = compute_loss(model, inputs)
            seen.append((loss.item(), inputs))
            return loss

        trainer._compute_loss = spy
        trainer.train()
        return seen, trainer

    def unmoved(train_logps, infer_logps, scored, advantages, multiplier):
        return Constrained(advantages.unsqueeze(1).expand_as(infer_logps), torch.zeros_like(infer_logps))

    plain, without_term = trained(unmoved)
    constrained, with_term = trained(_squared_log_ratio)
    model = make_model()
    for (before, _), (after, batch) in zip(plain, constrained, strict=True):
        gap = _log_probabilities(model, batch) - batch["sampling_per_token_logps"]
        mean = gap[batch["completion_mask"].bool()].square().mean()
        # λ = 0.5, and each of the two accumulated micro-batches counts half.
        assert after - before == pytest.approx(0.5 * mean.item() / 2, rel=1e-4)
    names = [name for name, _ in without_term.model.named_parameters()]
    moved = dict(with_term.model.named_parameters())
    assert any(not torch.equal(without_term.model.get_parameter(name), moved[name]) for name in names)


def _log_probabilities(model, batch):
    """log π of the sampled tokens, shape (B, T), by transformers' own forward."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)
