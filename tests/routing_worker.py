"""Routing replay in two processes: `-m tests.routing_worker FOLDER`. Each writes what it saw into the folder."""

import json
import math
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from dc_trl.parts.routing_replay import OWN_CHOICE, RoutingReplay

from .helpers import at_server, logged, make_experts, make_prompts, make_trainer, shard
from .stub_server import completions, stub_server


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
    fields |= {"deployment_scheme": "fp8", "learning_rate": 0.0, "constraint": "none"}
    trainer = make_trainer(folder, make_experts(), routing_replay=routing_replay, **fields)
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    names = ("discrepancy/k3_kl", "routing/flipped_fraction", "routing/replayed_fraction", "num_tokens")
    return {name: logged(trainer, name) for name in names}


def mean_gap_at(routes: torch.Tensor, prompts: list[list[int]], tokens: list[list[int]]) -> float:
    """Return δ̄ of completions to which a `stub_server` gives −1 a token, with a policy at given experts."""
    policy = make_experts().eval()
    replay = RoutingReplay(policy)
    replay.start(routes)
    ids, completions = (
        torch.tensor(rows) for rows in ([[*p, *t] for p, t in zip(prompts, tokens, strict=True)], tokens)
    )
    with torch.no_grad():
        logits = policy(input_ids=ids).logits[:, len(prompts[0]) - 1 : -1]
    probs = logits.softmax(-1).gather(2, completions.unsqueeze(2))
    return (probs - math.exp(-1)).abs().mean().item()


def served(accelerator, folder: Path) -> None:
    """The main process asks the server for all completions; each process gets the routes of its own ones."""
    tokens = [[40 + number, 50, 51, 52, 53, 54, 55, 1] for number in range(8)]
    routes = torch.arange(8 * 11 * 2).view(8, 11, 2, 1) % 7 + torch.arange(2)
    with stub_server() as server:
        server.routes = True
        groups = iter((slice(0, 4), slice(4, 8)))  # a request for each of two prompts

        def completes(body):
            group = next(groups)
            return completions(body["prompt"] * 4, tokens[group], routes[group].byte().numpy())

        server.completes = completes
        url = broadcast_object_list([server.url])[0]
        options = at_server(url) | {"routing_replay": True, "max_steps": 1}
        trainer = make_trainer(folder, make_experts(), train_dataset=make_prompts(8), **options)
        trainer.train()
        accelerator.wait_for_everyone()  # the server is the main process's
        if accelerator.is_main_process:
            given = torch.cat([routes, torch.full((8, 1, 2, 2), OWN_CHOICE)], 1).to(torch.int16)
            prompts = [body["prompt"][0] for body in server.bodies for _ in range(4)]
            gap = mean_gap_at(given, prompts, tokens)
            assert abs(logged(trainer, "discrepancy/mean")[0] / gap - 1) < 1e-4


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    foreign(make_experts(32), folder, sharded=False)
    foreign(make_experts(32), folder, sharded=True)
    served(accelerator, folder / "served")
    logs = {str(replay): train(folder / f"run-{replay}", replay) for replay in (False, True)}
    folder.joinpath(f"logs-{accelerator.process_index}.json").write_text(json.dumps(logs))
    time.sleep(1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
