"""Forwards that share prompts: against those of TRL's rows."""

import pytest
import torch

from tests.helpers import Rollouts, load_script, make_trainer


shared_prompts = load_script("study/shared_prompts")


def rows_of(seed):
    """Twelve completions of three prompts, in any order and of any length, with TRL's padding on both sides."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 260, (3, 9), generator=generator)
    prompt_mask = (torch.arange(9) >= torch.tensor([[0], [2], [8]])).long()
    rows = torch.randint(3, (12,), generator=generator)
    lengths = torch.randint(1, 6, (12, 1), generator=generator)
    completions = torch.randint(3, 260, (12, 5), generator=generator)
    mask = (torch.arange(5) < lengths).long()
    return torch.cat([ids[rows], completions], dim=1), torch.cat([prompt_mask[rows], mask], dim=1), mask


@pytest.mark.parametrize("seed", range(3))
def test_scores_and_gradients_are_those_of_separate_rows(tmp_path, monkeypatch, seed):
    trainer = make_trainer(tmp_path, rollout_func=Rollouts())
    ids, attention, mask = rows_of(seed)
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask

    def scores():
        trainer.model.zero_grad()
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, mask.shape[1], compute_entropy=True
        )
        (weights * logps).sum().backward()
        gradients = [weight.grad for weight in trainer.model.parameters()]
        return [logps.detach() * mask, entropies.detach() * mask, *gradients]

    expected = scores()
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: False)  # undone after the test
    trainer.parts.insert(0, shared_prompts.SharedPrompts(trainer))
    torch.testing.assert_close(scores(), expected, rtol=1e-4, atol=1e-5)
