"""The mismatch in a run of TRL's own trainer, which `MismatchCallback` reads."""

import pytest
from trl import GRPOTrainer

from dc_trl import MismatchCallback

from .helpers import MISALIGNED, Rollouts, logged, make_trainer, refuses


# TRL scores what it has sampled if a generation batch outlives an optimizer step, or with vLLM.
SHARED = {"constraint": "none", "recipe": "trl", "length_aware_batches": False}
SCORED = MISALIGNED | {"max_steps": 4}
NAMES = ("mean", "k3_kl", "kl", "ess", "log_ppl_abs_diff", "probs_diff_max", "probs_pearson", "chi2_seq")


def stock_trainer(tmp_path, **fields):
    trainer = make_trainer(tmp_path, kind=GRPOTrainer, rollout_func=Rollouts(), **SHARED | SCORED | fields)
    trainer.add_callback(MismatchCallback(trainer))
    return trainer


@pytest.mark.parametrize("accumulated", [1, 3], ids=["half a generation batch", "one and a half"])
def test_stock_trl_logs_what_our_trainer_measures(tmp_path, accumulated):
    """In the optimizer steps that begin a generation batch, or two."""
    steps = {"gradient_accumulation_steps": accumulated}
    stock = stock_trainer(tmp_path / "stock", **steps)
    stock.train()
    ours = make_trainer(tmp_path / "ours", rollout_func=Rollouts(), **SHARED, **SCORED | steps)
    ours.train()
    assert len(logged(stock, "discrepancy/mean")) == (2 if accumulated == 1 else 4)
    for name in NAMES:
        metric = f"discrepancy/{name}"
        assert logged(stock, metric) == pytest.approx(logged(ours, metric), rel=1e-6), metric
    # The callback has changed nothing of the training.
    assert logged(stock, "loss") == pytest.approx(logged(ours, "loss"), rel=1e-6)


def test_our_own_trainer_needs_no_callback(tmp_path):
    with refuses(ValueError, "DCGRPOTrainer", "MismatchCallback"):
        MismatchCallback(make_trainer(tmp_path, **SHARED))


def test_truncated_sampling_is_not_called_a_discrepancy(tmp_path):
    trainer = stock_trainer(tmp_path, top_p=0.9)
    trainer.train()
    assert logged(trainer, "discrepancy_truncated/mean")
    assert not logged(trainer, "discrepancy/mean")


def test_a_batch_that_trl_has_not_scored_says_how_it_would_be(tmp_path):
    trainer = stock_trainer(tmp_path, steps_per_generation=1)
    with refuses(ValueError, "vllm_importance_sampling_correction"):
        trainer.train()


def test_an_engine_without_log_probabilities_says_which_have_them(tmp_path):
    trainer = stock_trainer(tmp_path)
    trainer.rollout_func = lambda prompts, trainer: Rollouts()(prompts, trainer) | {"logprobs": None}
    with refuses(ValueError, "use_vllm", "deployment_scheme"):
        trainer.train()
