"""Weights that FSDP2 has sharded over two processes: `-m tests.sharded_worker FOLDER`.

Log-probabilities among kept tokens with their gradient, and the refusal to deploy an adapter.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from trl.trainer.utils import add_fused_lm_head

from dc_trl.parts.kept_tokens import KeptHead, Named
from dc_trl.quantization.tensors import deployed_tensors
from dc_trl.sampling.named_tokens import KeptLogProb

from .helpers import make_model, shard


FOLDER = Path(sys.argv[1])


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


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.save(score_among_kept(shard(make_model(64))), FOLDER / f"kept_{accelerator.process_index}.pt")
    adapted = shard(get_peft_model(make_model(64), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)))
    try:
        deployed_tensors(accelerator, adapted, None)
    except ValueError as error:
        refusal = str(error)
    if accelerator.is_main_process:
        (FOLDER / "refusal").write_text(refusal)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
