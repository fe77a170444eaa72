"""What the doctor tries, each in a process of its own: `python -m dc_trl.command.doctor_checks EVENTS CHECK SETUP`.

CHECK and SETUP are JSON, see `doctor.Check` and `doctor.Setup`. EVENTS is a file that gets a line of JSON for each
part of what a check has found, and one for its end. The end of the standard input, that is, of the doctor, ends the
process.
Libraries are imported where they are used: a check must say what it can where others are missing or broken.
"""

import json
import math
import os
import pkgutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from ..files import append_json
from ..settings.command_line import leave_on_sigterm
from .doctor import Check, Setup


Found = Iterator[dict[str, Any]]
_PROMPTS, _GENERATIONS, _TOKENS = 4, 4, 24
# With this rate the tiny model has δ̄ 0.3 to the weights of one step before, and 0.001 to 0.02 to the present ones.
_LEARNING_RATE, _STALE = 1e-3, 0.1


def devices(setup: Setup, scheme: None) -> Found:
    """Describe cores, memory, PyTorch's build and the devices that it finds, and compute a number on one of them."""
    import torch

    cpu = torch.backends.cpu.get_cpu_capability()  # the instructions by which vLLM chooses its kernels
    yield {"processor": f"{cpu}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.1f} GB"}
    yield {"torch built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else torch.version.hip or "CPU"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield {f"GPU {index}": f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 1e9:.0f} GB"}
    name = device_of(setup)
    torch.ones(1, device=name).item()
    yield {"computes on": name}


def device_of(setup: Setup) -> str:
    """Return the device that is asked for, or the accelerator that PyTorch finds, or the CPU."""
    import torch

    return setup.device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")


def server(setup: Setup, scheme: str) -> Found:
    """Train two steps whose completions a vLLM server samples; it takes the new weights between them."""
    import torch

    from ..serving.server import serve, vllm_version

    # The policy shares the device with the server here.
    share = ["--gpu-memory-utilization", "0.5"] if torch.cuda.is_available() else []
    options = [*share, *setup.serve_options]
    with serve(setup.model, scheme, max_model_len=256, log_path=setup.log, options=options) as running:
        yield {"vLLM": vllm_version()}
        yield from step(setup, scheme, use_vllm=True, vllm_mode="server", vllm_server_base_url=running.url)


def step(setup: Setup, scheme: str, **options: Any) -> Found:
    """Train two steps whose completions the in-process replica samples, or the engine that the options name."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..config import DCGRPOConfig
    from ..trainer import DCGRPOTrainer

    policy = AutoModelForCausalLM.from_pretrained(setup.model, dtype="float32")
    device = device_of(setup)
    config = DCGRPOConfig(
        tempfile.mkdtemp(),  # within the doctor's folder, which it removes
        deployment_scheme=scheme,
        use_cpu=device == "cpu",
        bf16=device.startswith("cuda"),
        gradient_checkpointing=False,
        per_device_train_batch_size=_PROMPTS * _GENERATIONS,
        num_generations=_GENERATIONS,
        max_completion_length=_TOKENS,
        max_steps=2,
        learning_rate=_LEARNING_RATE,
        lr_scheduler_type="constant",
        save_strategy="no",
        export_run=False,
        report_to="none",
        logging_steps=1,
        **options,
    )
    trainer = DCGRPOTrainer(
        policy,
        lambda completions, **kwargs: [float(number % 7) for number in range(len(completions))],
        config,
        train_dataset=Dataset.from_dict({"prompt": [f"{17 * n + 5}+{29 * n + 11}=" for n in range(_PROMPTS)]}),
        processing_class=AutoTokenizer.from_pretrained(setup.model, padding_side="left"),
    )
    trainer.train()
    first, second = (row for row in trainer.state.log_history if "loss" in row)
    before, after = first["discrepancy/mean"], second["discrepancy/mean"]
    yield {"δ̄": f"{before:.1e}", "after new weights": f"{after:.1e}", "step": f"{second['step_time']:.2f} s"}
    if not all(math.isfinite(row[name]) for row in (first, second) for name in ("loss", "grad_norm")):
        raise RuntimeError("loss or gradient norm is not finite")
    if not after <= max(_STALE, 5 * before):
        raise RuntimeError(f"the engine seems to sample with old weights: δ̄ is {after:.1e} after {before:.1e}")


def main() -> None:
    events, check, setup = Path(sys.argv[1]), Check(*json.loads(sys.argv[2])), Setup(*json.loads(sys.argv[3]))

    def wait_for_the_doctor() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing ever comes
        os.kill(os.getpid(), signal.SIGTERM)

    leave_on_sigterm()
    threading.Thread(target=wait_for_the_doctor, daemon=True).start()
    end = {"status": "passed", "reason": ""}
    try:
        for found in pkgutil.resolve_name(check.probe)(setup, check.scheme):
            append_json(events, {"found": found})
    except Exception as error:
        traceback.print_exc()
        end = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    append_json(events, end)


if __name__ == "__main__":
    main()
