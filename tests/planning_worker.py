"""What FSDP2 holds on a device between two micro-batches of an optimizer step: `-m tests.planning_worker FILE`."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .helpers import make_model


def gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of gradients that are held on this process, sharded or whole."""
    bytes_ = 0
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state") and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            for parameter in group.fsdp_params:
                held = [parameter.unsharded_accumulated_grad]
                if hasattr(parameter, "_unsharded_param"):
                    held.append(parameter._unsharded_param.grad)
                if parameter.sharded_param.grad is not None:
                    held.append(parameter.sharded_param.grad.to_local())
                bytes_ += sum(each.nbytes for each in held if each is not None)
    return bytes_


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model(64)
    bf16 = torch.bfloat16  # what accelerate sets for mixed_precision: bf16
    options = {
        "mesh": torch.distributed.init_device_mesh("cpu", (2,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    held = {}
    for name, reduce in (("accumulated", False), ("reduced", True)):
        model.zero_grad()
        model.set_requires_gradient_sync(reduce)  # what `accelerator.no_sync` does
        model(torch.arange(8)[None]).logits.sum().backward()
        held[name] = gradient_bytes(model)
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(held))
    accelerator.end_training()


if __name__ == "__main__":
    main()
