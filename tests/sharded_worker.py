"""Writes checkpoints from weights that FSDP2 has sharded over two processes: `-m tests.sharded_worker FOLDER`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trl.generation.vllm_generation import VLLMGeneration

from dc_trl import DCGRPOTrainer
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.quantization.tensors import deployed_tensors

from .helpers import distinct_characters, make_config, make_model, make_prompts, make_tokenizer


FOLDER = Path(sys.argv[1])


def shard(model):
    """As accelerate's FSDP2, which runs on no CPU: computes in bfloat16, and recomputes the layers' activations."""
    options = {
        "mesh": torch.distributed.init_device_mesh("cpu", (2,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
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


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = shard(make_model(64))
    write(accelerator, model, FOLDER / "sharded")
    # After a forward pass FSDP2 keeps some weights gathered, rounded to what it computes in.
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7]]))
    assert any(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    write(accelerator, model, FOLDER / "after a forward pass")

    config = make_config(FOLDER / "run", deployment_scheme="fp8")
    policy, tokenizer = make_model(64), make_tokenizer()
    trainer = DCGRPOTrainer(
        policy, distinct_characters, config, train_dataset=make_prompts(), processing_class=tokenizer
    )
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
