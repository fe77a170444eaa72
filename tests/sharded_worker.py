"""Writes a checkpoint from weights that FSDP2 has sharded over two processes: `-m tests.sharded_worker FOLDER`."""

import sys
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import fully_shard
from trl.generation.vllm_generation import VLLMGeneration

from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.rollouts.vllm_backends import deployed_tensors

from .helpers import make_model, make_tokenizer


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    model = make_model(64)
    writer = CheckpointWriter(model, "fp8", make_tokenizer())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert next(model.parameters()).to_local().numel() < next(model.parameters()).numel()
    # What VLLMGeneration knows of a run under FSDP2; it is built by hand because accelerate has no FSDP on a CPU.
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model = model
    generation.accelerator = SimpleNamespace(device=torch.device("cpu"))
    generation._dist = SimpleNamespace(is_fsdp=True, fsdp_version=2, is_zero3=False)
    tensors = deployed_tensors(generation)
    if rank == 0:
        writer.write(tensors, sys.argv[1])
    for _ in tensors:
        pass
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
