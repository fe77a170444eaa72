"""One of two hosts whose colocated engines share a directory for weights: `-m tests.colocate_worker FOLDER`."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from accelerate import Accelerator
from trl.generation.vllm_generation import VLLMGeneration

from dc_trl.sampling.vllm_backends import ColocateGeneration

from .helpers import make_model, make_tokenizer


def main() -> None:
    root = Path(sys.argv[1])
    layers: list = []  # in which TRL looks for BitsAndBytes: QLoRA's are not the engine's
    # Without the engine, which would read what is written here.
    VLLMGeneration._init_vllm = lambda self: layers.extend(self.model.named_modules())
    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.is_local_main_process) == (2, True)
    generation = ColocateGeneration.__new__(ColocateGeneration)
    generation.model, generation.processing_class = make_model(), make_tokenizer()
    generation.accelerator = accelerator
    generation.deployment_scheme, generation.weight_sync_dir, generation._syncs = "fp8", str(root), 0
    generation._beside, generation._dist = False, SimpleNamespace(is_fsdp=False, is_zero3=False)
    generation._init_vllm()
    assert not layers
    generation._write_checkpoint()
    checkpoint = generation.checkpoint
    folders = sorted(root.glob("dc_trl-sync-*"))
    assert len(folders) == 3, folders
    assert (root / "dc_trl-sync-elsewhere_run-0").is_dir(), "another host's, whose lock need not be seen here"
    assert (checkpoint / "model.safetensors").is_file()
    accelerator.wait_for_everyone()
    print(checkpoint.parent)
    time.sleep(1)  # see scripts/train.py: gloo's thread lets go of the last gather
    accelerator.end_training()


if __name__ == "__main__":
    main()
