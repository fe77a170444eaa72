"""The page of the algorithm: its class does what `DCGRPOTrainer` does."""

import pytest
import torch

from .helpers import (
    ALIGNED,
    MISALIGNED,
    ROOT,
    Rollouts,
    assert_same_weights,
    code_blocks,
    logged,
    make_model,
    make_trainer,
)


@pytest.mark.parametrize("steps", [ALIGNED, MISALIGNED])
def test_the_class_of_the_page_trains_as_ours(tmp_path, steps):
    blocks = code_blocks((ROOT / "docs" / "CONTRIBUTING.md").read_text(), "python")
    (source,) = (block for block in blocks if "OnePageDCGRPO" in block)
    exec(source, page := {})
    fields = {"constraint": "lagrangian", "length_aware_batches": False, "max_steps": 4} | steps
    ours = make_trainer(tmp_path / "ours", rollout_func=Rollouts(), **fields)
    ours.train()
    theirs = make_trainer(tmp_path / "page", kind=page["OnePageDCGRPO"], rollout_func=Rollouts(), **fields)
    theirs.lambda_, theirs.lambda_lr = ours.args.lambda_init, ours.args.lambda_lr
    theirs.train()
    for name in ("loss", "grad_norm", "lagrangian/lambda", "discrepancy/mean"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-12), name
    assert logged(ours, "lagrangian/lambda")[0] != logged(ours, "lagrangian/lambda")[-1]
    assert ours.lagrange_multiplier.value == pytest.approx(theirs.lambda_, rel=1e-12)
    assert_same_weights(ours.model, theirs.model)
    assert any(
        not torch.equal(one, other)
        for one, other in zip(ours.model.parameters(), make_model().parameters(), strict=True)
    )
