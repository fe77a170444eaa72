"""What becomes of weights that FSDP2 has sharded over two processes: `-m tests.sharded_worker FOLDER`.

Checkpoints that are written from them, log-probabilities among kept tokens with their gradient, and gradients of one
process that are not finite.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import add_fused_lm_head

from dc_trl.parts.kept_tokens import KeptHead, Named
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.tensors import deployed_tensors
from dc_trl.run.soundness import DivergedError
from dc_trl.sampling.named_tokens import KeptLogProb

from .helpers import Rollouts, make_model, make_tokenizer, make_trainer


FOLDER = Path(sys.argv[1])


def shard(model, dtype=torch.bfloat16):
    """As accelerate's FSDP2, which runs on no CPU: computes in `dtype`, and recomputes the layers' activations."""
    options = {
        "mesh": torch.distributed.init_device_mesh("cpu", (2,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype),
    }
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for number, layer in enumerate(base.model.layers):
        base.model.layers[number] = fully_shard(checkpoint_wrapper(layer), **options)
    fully_shard(model, **options)
    parameter = next(model.parameters())
    assert parameter.to_local().numel() < parameter.numel()
    return model


def write(accelerator, model, folder: Path, gathered_by_trl=None) -> None:
    tensors = deployed_tensors(accelerator, model, gathered_by_trl)
    if accelerator.is_main_process:
        CheckpointWriter(model, "fp8", make_tokenizer()).write(tensors, folder)
    for _ in tensors:
        pass


def score_among_kept(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of six tokens among three each, and the gradient of their sum to the output head."""
    add_fused_lm_head(model)
    ids = torch.arange(20, 32).view(2, 6)
    sampled = ids[:, 3:]
    logprobs = [[KeptLogProb(0.0, torch.tensor([7, 8, token], dtype=torch.int32)) for token in row] for row in sampled]
    kept = Named.kept(logprobs, sampled.device)
    with KeptHead(model, kept, sampled, 1.0, False) as head:
        whole = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs[:, 2:]
    logps = head.log_probs(whole)
    logps.sum().backward()
    gradient = model.get_output_embeddings().weight.grad
    return logps.detach(), gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def spoiled(folder: Path, steps: range) -> dict:
    """Train with an infinite number in this process's shard of one gradient, at these steps of the last process."""
    options = {"max_steps": steps.stop - 1, "save_steps": 2, "rollout_func": Rollouts()}
    trainer = make_trainer(folder, make_model(64), **options)
    shard(trainer.model, torch.float32)
    trainer.accelerator.prepare_model = lambda model, **options: model  # accelerate has no FSDP2 on a CPU
    step, process = trainer.training_step, trainer.accelerator.process_index
    weights = []

    def training_step(model, *args):
        weights.append(sum(each.detach().full_tensor().double().sum() for each in model.parameters()).item())
        loss = step(model, *args)
        if trainer.state.global_step + 1 in steps and process == 1:
            next(model.parameters()).grad.to_local().fill_(math.inf)
        return loss

    trainer.training_step = training_step
    error = None
    try:
        trainer.train()
    except DivergedError as diverged:
        error = str(diverged)
    weights.append(sum(each.detach().full_tensor().double().sum() for each in trainer.model.parameters()).item())
    saved = sorted(path.name for path in folder.glob("checkpoint-*"))
    return {"weights": weights, "error": error, "saved": saved, "steps": trainer.state.global_step}


def main() -> None:
    accelerator = Accelerator(cpu=True)
    ends = [spoiled(FOLDER / "one", range(2, 3)), spoiled(FOLDER / "all", range(2, 9))]
    (FOLDER / f"ends_{accelerator.process_index}.json").write_text(json.dumps(ends))
    torch.save(score_among_kept(shard(make_model(64), torch.float32)), FOLDER / f"kept_{accelerator.process_index}.pt")
    model = shard(make_model(64))
    write(accelerator, model, FOLDER / "sharded")
    # After a forward pass FSDP2 keeps some weights gathered, rounded to what it computes in.
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7]]))
    assert any(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    write(accelerator, model, FOLDER / "after a forward pass")

    trainer = make_trainer(FOLDER / "run", make_model(64), deployment_scheme="fp8")
    shard(trainer.model)
    trainer.save_deployment(FOLDER / "by the trainer")

    adapted = shard(get_peft_model(make_model(64), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)))
    try:
        deployed_tensors(accelerator, adapted, None)
    except ValueError as error:
        refusal = str(error)
    if accelerator.is_main_process:
        (FOLDER / "refusal").write_text(refusal)
    # What VLLMGeneration knows of a run under FSDP2; it is built by hand because accelerate has no FSDP on a CPU.
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation.accelerator = adapted, accelerator
    generation._dist = SimpleNamespace(is_fsdp=True, fsdp_version=2, gather_params=lambda parameters: torch.no_grad())
    write(accelerator, adapted, FOLDER / "adapted", generation._iter_named_params)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
