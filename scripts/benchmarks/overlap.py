"""What rollout_overlap gains, with a server that takes a given part of the time that training takes.

python scripts/benchmarks/overlap.py

The server is standin_server.py beside this file, a process that sleeps: on two cores a real server and training would
only take turns. All else is real: the run, HTTP, the weights that go to the server as a checkpoint at every step. The
seconds that the server sleeps are set from those that training takes without them, measured in the same run.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.records.tables import print_table
from dc_trl.settings.command_line import OptionParser


class StepSeconds(TrainerCallback):
    """Seconds of each optimizer step of one `train` call, all that it waits for among them."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self._start)


@contextmanager
def server() -> Iterator[str]:
    """Address of a stand-in server in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("standin_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(completion)) % 7) for completion in completions]


def make_trainer(args: argparse.Namespace, url: str, output_dir: str, overlap: bool) -> DCGRPOTrainer:
    trainer = DCGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward,
        DCGRPOConfig(
            output_dir,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            deployment_scheme="bf16",
            recipe="paper",
            constraint="none",
            rollout_overlap=overlap,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=False,
            per_device_train_batch_size=args.batch_size,
            max_completion_length=args.completion_length,
            max_steps=args.steps,
            learning_rate=1e-6,
            save_strategy="no",
            export_run=False,
            report_to="none",
            disable_tqdm=True,
            logging_steps=1000,
        ),
        train_dataset=arithmetic_dataset(args.steps * args.batch_size // 8, 0, "train"),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        callbacks=[StepSeconds()],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def steps_of(trainer: DCGRPOTrainer) -> list[float]:
    """Seconds of the steps of one more training, but for the first, which has no batch ahead of it."""
    trainer.train()
    (clock,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, StepSeconds))
    return clock.seconds[1:]


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--model", default="dc_trl/assets/tiny_qwen3")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--completion_length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help="of each training")
    parser.add_argument("--repetitions", type=int, default=3, help="of each training, in turns")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="sampling over training")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    rows = []
    with server() as url, tempfile.TemporaryDirectory() as output_dir:
        waits, overlaps = (make_trainer(args, url, output_dir, overlap) for overlap in (False, True))
        steps_of(waits)  # warms up
        for share in args.shares:
            turns = [turn(waits, overlaps, url, share) for _ in range(args.repetitions)]
            alone, before, after, hidden = (statistics.median(column) for column in zip(*turns, strict=True))
            ratios = sorted(overlapped / synchronous for _, synchronous, overlapped, _ in turns)
            cells = [f"{share:g}", f"{alone:.2f}", f"{before:.2f}", f"{after:.2f}", f"{statistics.median(ratios):.2f}"]
            best = max(share, 1) / (1 + share)
            rows.append([*cells, f"{ratios[0]:.2f} – {ratios[-1]:.2f}", f"{best:.2f}", f"{hidden:.0%}"])
    title = (
        f"rollout_overlap, {args.repetitions} x {args.steps} steps, medians, without the first step of each training"
    )
    head = ["sampling / training", "training s", "step s", "overlapped s", "ratio", "range", "at best", "hidden"]
    print_table(head, rows, title)


def turn(waits: DCGRPOTrainer, overlaps: DCGRPOTrainer, url: str, share: float) -> tuple[float, ...]:
    """Seconds of a step without sampling, with it, and with it beside training; the hidden share of sampling.

    The server sleeps as long as a step took just before: the machine may be busy with something else.
    """
    sleep(url, 0.0)
    training = statistics.median(steps_of(waits))
    sleep(url, share * training)
    synchronous, overlapped = (statistics.median(steps_of(trainer)) for trainer in (waits, overlaps))
    metrics = overlaps._metrics["train"]
    waited, sampled = (sum(metrics[f"overlap/{part}_seconds"]) for part in ("waiting", "sampling"))
    return training, synchronous, overlapped, 1 - waited / sampled


def sleep(url: str, seconds: float) -> None:
    httpx.post(f"{url}/sleep", json={"seconds": seconds}).raise_for_status()


if __name__ == "__main__":
    main()
