"""Seconds and peak memory of optimizer steps, of trainers that are measured in turns."""

import random
import statistics
import time
from pathlib import Path

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def resident() -> int:
    """Bytes: allocated on the GPU, or else resident in this process."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else _status("VmRSS")


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes: the most that `resident` has been since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


class StepClock(TrainerCallback):
    """Seconds and peak memory of the steps of one `train` call, from a step on."""

    def __init__(self, first: int = 0):
        self.first = first  # number of steps that are left out

    def on_train_begin(self, args, state, control, **kwargs):
        self.seconds, self.peak = 0.0, 0

    def on_step_begin(self, args, state, control, **kwargs):
        reset_peak()
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        if state.global_step <= self.first:
            return
        self.seconds += time.perf_counter() - self._start
        self.peak = max(self.peak, peak())


def ratios(ours: list[float], theirs: list[float], digits: int = 2) -> tuple[str, str]:
    """Median and quartiles of the ratios of two lists, measured in turns."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{middle:.{digits}f}", f"{low:.{digits}f} – {high:.{digits}f}"


def train_in_turns(
    trainers: dict[str, GRPOTrainer], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each repetition, and the median of the peak memory in bytes, by trainer; the first two warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    peaks: dict[str, list[int]] = {name: [] for name in trainers}
    for repetition in range(repetitions + 2):
        # The order changes, so that none of them always runs after the same one.
        for name in random.Random(repetition).sample(list(trainers), len(trainers)):
            trainers[name].train()
            if repetition >= 2:
                seconds[name].append(trainers[name].step_clock.seconds)
                peaks[name].append(trainers[name].step_clock.peak)
    return seconds, {name: statistics.median(values) for name, values in peaks.items()}
