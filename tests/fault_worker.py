"""Faults that one of two processes meets, and what both make of them: `-m tests.fault_worker URL FOLDER`.

URL is a `StubServer`. NCCL does not run on a CPU: what stands for it reads the tensors as TRL's broadcast would. The
main process writes `seen.json` into the folder, with what each process saw.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import torch
from accelerate.utils import gather_object
from trl.generation import vllm_client

from dc_trl import DCGRPOTrainer
from dc_trl.quantization.checkpoint import CheckpointWriter
from dc_trl.serving.errors import ServerError

from .distribution_worker import Known
from .helpers import at_server, make_model, make_trainer


URL, FOLDER = sys.argv[1:] if __name__ == "__main__" else ("", "")
LIMIT = 40  # ddp_timeout, seconds; a tenth of it is the time that a busy machine has to end a request


def hung_rollout() -> str:
    """A run whose server never answers a rollout: how it ends."""
    fields = at_server(URL) | {"vllm_server_timeout": 5.0, "per_device_train_batch_size": 2, "ddp_timeout": LIMIT}
    fields |= {"top_k": 20}  # of which the server names the tokens
    trainer = make_trainer(FOLDER, make_model(64), **fields)
    try:
        trainer.train()
    except ServerError as error:
        return str(error)
    return "it trained"


class Stream:
    """Stands for NCCL's broadcast: takes the tensors, and breaks after some of them where it is told to."""

    def __init__(self):
        self.breaks_after: int | None = None
        self.taken: dict[str, torch.Tensor] = {}

    def __call__(self, iterator, group, src, post_iter_func) -> None:
        self.taken = {}
        for name, tensor in iterator:
            if len(self.taken) == self.breaks_after:
                raise RuntimeError("NCCL error: remote process exited")
            self.taken[name] = tensor.clone()


def sharded_trainer() -> DCGRPOTrainer:
    """The trainer of a run that FSDP2 has sharded, and that has moved nothing; it sends weights as on GPUs."""
    fields = at_server(URL) | {"per_device_train_batch_size": 4, "learning_rate": 0.0, "max_steps": 1}
    trainer = make_trainer(FOLDER, make_model(64), kind=Known, vllm_max_retries=0, **fields)
    trainer.train()
    trainer.vllm_generation.weight_sync = "nccl"
    return trainer


def broken_write(fault: Exception, tensors, *args) -> int:
    """Stands for `CheckpointWriter.write`: it fails after some of the weights."""
    for _ in range(3):
        next(tensors)
    raise fault


def broken_files(trainer) -> list[str]:
    """What an export to a full disk and weights that are gone end with."""
    write, ends = CheckpointWriter.write, []
    CheckpointWriter.write = partial(broken_write, OSError(28, "No space left on device"))
    for act in (trainer.save_deployment, trainer.vllm_generation.load_weights):
        try:
            act(Path(FOLDER, "gone"))
        except OSError as error:
            ends.append(str(error))
    CheckpointWriter.write = write
    return ends


def broken_writes(generation) -> list[str]:
    """What each of three checkpoints ended with, of which the process that writes fails in the first two."""
    write, ends = CheckpointWriter.write, []

    for fault in (torch.OutOfMemoryError("CUDA out of memory"), OSError(28, "No space left on device"), None):
        CheckpointWriter.write = write if fault is None else partial(broken_write, fault)
        generation._begin_version()
        try:
            generation._write()
            ends.append("written")
        except ServerError as error:
            ends.append(str(error))
    return ends


def broken_streams(generation) -> list[list[str]]:
    """A synchronization that fails before, in and after the stream, and one that does not.

    What each ended with, and what the server calls its weights then.
    """
    stream = vllm_client.packed_nccl_broadcast_producer = Stream()
    accelerator, ends = generation.accelerator, []
    for fault in ("/update_weight_version", "/start_weight_update", "/update_weights", "/reset_prefix_cache", 2, None):
        stream.breaks_after = fault if isinstance(fault, int) else None
        if isinstance(fault, str) and accelerator.is_main_process:
            httpx.post(f"{URL}/fail", json={"path": fault, "times": 1}, timeout=10)
        try:
            generation.sync_weights()
            end = "synchronized"
        except ServerError as error:
            end = str(error)
        accelerator.wait_for_everyone()
        version = httpx.get(f"{URL}/weight_info", timeout=10).json()["weight_version"]
        accelerator.wait_for_everyone()  # or the next synchronization would change it
        ends.append([end, version.replace(generation.weight_version, "NAME")])
    if accelerator.is_main_process:
        whole = dict(make_model(64).named_parameters())
        assert stream.taken.keys() == whole.keys()
        assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in stream.taken.items())
    return ends


def main() -> None:
    hung = hung_rollout()
    trainer = sharded_trainer()
    generation = trainer.vllm_generation
    ends, files = broken_streams(generation), broken_files(trainer)
    seen = gather_object([{"hung": hung, "ends": ends, "files": files, "writes": broken_writes(generation)}])
    if generation.accelerator.is_main_process:
        Path(FOLDER, "seen.json").write_text(json.dumps(seen))
    time.sleep(1)  # see scripts/train.py: gloo's thread lets go of the last gather
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
