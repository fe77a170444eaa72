"""Trains through the deployed forward under FSDP2 and under DDP, in two processes: `-m tests.aligned_worker FOLDER`.

The main process writes the largest difference from one process, as shares of the largest value, to `gaps.json`.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from trl.trainer.utils import add_fused_lm_head

from dc_trl.quantization.deployed_forward import DeployedForward

from .helpers import make_experts, make_model, shard
from .test_deployed_forward import logps, small_batch


def make(experts: bool):
    model = make_experts(64) if experts else make_model(128)
    add_fused_lm_head(model)
    aligned = DeployedForward(model, "fp8")
    aligned.enabled = True
    return model


def values(model, policy, steps: int = 2) -> dict[str, torch.Tensor]:
    """Log-probabilities and gradients by name, of the last of some steps of SGD."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = logps(model, small_batch(), 8)
        outputs.mean().backward()
        optimizer.step()
    found = {"log-probabilities": outputs.detach()}
    for name, parameter in policy.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found[name.replace("_checkpoint_wrapped_module.", "")] = gradient
    return found


def main() -> None:
    accelerator = Accelerator(cpu=True)
    gaps = {}
    for experts in (False, True):
        model = make(experts)
        expected = values(model, model)
        model = shard(make(experts))
        sharded = values(model, model)
        model = make(experts)
        replicated = values(torch.nn.parallel.DistributedDataParallel(model), model)
        for kind, found in (("FSDP2", sharded), ("DDP", replicated)):
            assert found.keys() == expected.keys()
            gaps[f"{kind}, {experts=}"] = max(
                ((found[name] - value).abs().max() / value.abs().max()).item() for name, value in expected.items()
            )
    if accelerator.is_main_process:
        Path(sys.argv[1], "gaps.json").write_text(json.dumps(gaps))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
