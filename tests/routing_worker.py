"""Routing replay in two processes: `-m tests.routing_worker FOLDER`. Each writes what it saw into the folder."""

import json
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from dc_trl import DCGRPOTrainer
from dc_trl.rollouts.routing import RoutingReplay

from .helpers import distinct_characters, logged, make_config, make_experts, make_prompts, make_tokenizer


def shard(model):
    """As accelerate's FSDP2, which runs on no CPU; recomputes the layers' activations."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    fully_shard(model, mesh=mesh)
    router = model.model.layers[0].mlp.gate.weight
    assert router.to_local().numel() < router.numel()


def foreign(model, folder: Path, sharded: bool) -> None:
    """A forward and a backward pass at experts that nobody would choose."""
    replay = RoutingReplay(model)
    if sharded:
        shard(model)
    ids = torch.arange(10, 34).view(2, 12)
    routes = torch.stack(
        [torch.arange(2 * 12 * 2).view(2, 12, 2) % 8, torch.arange(2 * 12 * 2).view(2, 12, 2) % 7], -1
    )
    routes[..., 1] += routes[..., 1] >= routes[..., 0]  # two experts of a token are not the same
    replay.start(routes.to(torch.int16))
    logits = model(input_ids=ids).logits
    logits.log_softmax(-1)[..., 20].mean().backward()
    gradient = model.model.layers[0].mlp.gate.weight.grad
    values = {"logits": logits.detach(), "gradient": gradient.full_tensor() if sharded else gradient}
    torch.save(values, folder / ("sharded.pt" if sharded else "whole.pt"))


def train(folder: Path, routing_replay: bool) -> dict[str, list[float]]:
    """Under DDP, with micro-batches and chunks of them, and log π_train of before the optimizer steps."""
    fields = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    fields |= {"gradient_checkpointing": True, "ddp_find_unused_parameters": True, "max_steps": 2}
    config = make_config(
        folder, deployment_scheme="fp8", routing_replay=routing_replay, learning_rate=0.0, constraint="none", **fields
    )
    trainer = DCGRPOTrainer(
        make_experts(), distinct_characters, config, train_dataset=make_prompts(), processing_class=make_tokenizer()
    )
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    names = ("discrepancy/k3_kl", "routing/flipped_fraction", "routing/replayed_fraction", "num_tokens")
    return {name: logged(trainer, name) for name in names}


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    foreign(make_experts(32), folder, sharded=False)
    foreign(make_experts(32), folder, sharded=True)
    logs = {str(replay): train(folder / f"run-{replay}", replay) for replay in (False, True)}
    folder.joinpath(f"logs-{accelerator.process_index}.json").write_text(json.dumps(logs))
    time.sleep(1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
