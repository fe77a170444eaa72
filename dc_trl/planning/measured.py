"""The formulas against runs on this machine: a real model's sizes, operations, memory and steps."""

import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from accelerate.utils import compute_module_sizes
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOTrainer

from ..config import DCGRPOConfig
from ..data.arithmetic import arithmetic_dataset
from ..files import read_object
from ..quantization.checkpoint import CheckpointWriter
from ..quantization.tensors import policy_tensors
from ..trainer import DCGRPOTrainer
from .architecture import Architecture, architecture_of
from .deployed import checkpoint_bytes
from .flops import forward_flops, training_flops
from .lengths import Moments
from .memory import FLOAT32, MicroBatch, last_norm, layer_activations, trainer_memory


TINY = Path(__file__).parent.parent / "assets" / "tiny_qwen3"
SCHEMES = ("bf16", "fp8", "int8", "int4")


class Row(NamedTuple):
    """A number that was predicted, and the same measured."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1


def random_model(path: Path, **sizes: Any) -> PreTrainedModel:
    """A model of a configuration file with random weights in float32."""
    settings = read_object(path) | sizes
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


# --- sizes and operations


def size_rows(model: PreTrainedModel) -> list[Row]:
    """Parameters, and bytes of checkpoints that are really written."""
    sizes = architecture_of(model.config, "")
    rows = [
        Row("parameters", sizes.parameters, model.num_parameters()),
        Row("bytes of weights (accelerate)", 4 * sizes.parameters, _accelerate_bytes(model)),
    ]
    for scheme in SCHEMES:
        with tempfile.TemporaryDirectory(prefix="dc_trl-plan-") as folder:
            target = Path(folder, "checkpoint")
            CheckpointWriter(model, scheme).write(policy_tensors(model), target)
            rows.append(Row(f"bytes of the {scheme} checkpoint", checkpoint_bytes(sizes, scheme), written(target)))
    return rows


def _accelerate_bytes(model: PreTrainedModel) -> int:
    buffers = compute_module_sizes(model, buffers_only=True)[""]
    return compute_module_sizes(model)[""] - buffers


def written(checkpoint: Path) -> int:
    """Bytes of the tensors in a checkpoint, from its files' own headers."""
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        spans = (entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        total += sum(end - begin for begin, end in spans)
    return total


def flop_rows(model: PreTrainedModel, batch: int, tokens: int) -> list[Row]:
    """Operations that PyTorch counts, with attention that computes the scores of all pairs.

    Afterwards the model has no gradients, and transformers' default attention and experts.
    """
    _set_implementations(model, "eager", "eager")
    sizes = architecture_of(model.config, "")
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    sequence = Moments(tokens, tokens**2)
    with FlopCounterMode(display=False) as counter:
        loss = model(ids, use_cache=False).logits.sum()
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    model.zero_grad()
    _set_implementations(model, "sdpa", "grouped_mm")
    both = training_flops(sizes, sequence, tokens, checkpointing=False, fused_head=False, causal=False).total
    predicted = forward_flops(sizes, sequence, tokens, causal=False).total
    return [
        Row("FLOPs of a forward", batch * predicted, forward),
        Row("FLOPs of forward and backward", batch * both, forward + counter.get_total_flops()),
    ]


def _set_implementations(model: PreTrainedModel, attention: str, experts: str) -> None:
    """PyTorch's counter sees neither fused attention on a CPU nor grouped products of experts."""
    model.set_attn_implementation(attention)
    if architecture_of(model.config, "").has_experts:
        model.set_experts_implementation(experts)


def activation_rows(model: PreTrainedModel, batch: int, tokens: int, dtype: torch.dtype) -> list[Row]:
    """Bytes that autograd keeps for the layers of a model and the norm behind them, in float32 or BF16.

    Afterwards the model has this dtype.
    """
    model.to(dtype)
    sizes = architecture_of(model.config, "")
    held: dict[int, int] = {}
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no other storage takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(torch.zeros(batch, tokens, dtype=torch.long), use_cache=False)
    element = torch.finfo(dtype).bits // 8
    predicted = (sizes.layers * layer_activations(sizes, element) + last_norm(sizes, element)) * batch * tokens
    name = str(dtype).removeprefix("torch.")
    return [Row(f"bytes of activations, {name}", predicted, sum(held.values()))]


# --- this machine


@dataclass(frozen=True)
class Speed:
    """What this machine does in one process: matrix products of a model's shape, FLOP/s, and copies, bytes/s."""

    flops: float
    bandwidth: float


def measure_speed(hidden: int, intermediate: int, tokens: int, repetitions: int = 5) -> Speed:
    """Times products of (tokens, hidden) with (hidden, intermediate) in float32, and reads and writes of 64 MB."""
    left, right = torch.rand(tokens, hidden), torch.rand(hidden, intermediate)
    source, target = torch.rand(2**23), torch.empty(2**23)
    times = max(int(2e9 / (2 * tokens * hidden * intermediate)), 1)
    product, copied = [], []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(times):
            left @ right
        product.append((time.perf_counter() - start) / times)
        start = time.perf_counter()
        target.copy_(source)
        copied.append(time.perf_counter() - start)
    median = sorted(product)[repetitions // 2], sorted(copied)[repetitions // 2]
    return Speed(2 * tokens * hidden * intermediate / median[0], 2 * source.nbytes / median[1])


def _resident(key: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) * 1024


class StepClock(TrainerCallback):
    """Seconds of each optimizer step of a run, and the most memory that was resident, as Linux counts it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        if sys.platform == "linux":
            self.peak = max(self.peak, _resident("VmHWM"))


class Replay:
    """Rollout function: random completions of one length, which cost nothing to sample."""

    __name__ = "replay"

    def __init__(self, length: int):
        self._length = length

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list]:
        options = {"add_generation_prompt": True, "return_dict": True}
        ids = [trainer.processing_class.apply_chat_template(prompt, **options)["input_ids"] for prompt in prompts]
        generator = torch.Generator().manual_seed(0)
        shape = (len(prompts), self._length)
        return {
            "prompt_ids": ids,
            "completion_ids": torch.randint(10, 200, shape, generator=generator).tolist(),
            "logprobs": (-8 * torch.rand(shape, generator=generator)).tolist(),
        }


@dataclass(frozen=True)
class Measured:
    """A few optimizer steps of `DCGRPOTrainer` on replayed rollouts of one length.

    Args:
        seconds: of a step, the median without the first.
        peak: bytes resident at most, above those before the model was made; 0 where the system does not say.
        tokens: of a sequence, prompt and padding included.
    """

    seconds: float
    peak: int
    tokens: int


def run_steps(
    make: Callable[[], PreTrainedModel], batch: int, length: int, steps: int
) -> tuple[Measured, PreTrainedModel]:
    """Trains a model for some steps, in float32 on the CPU, gradients accumulated over one micro-batch.

    Args:
        make: gives the model.
        batch: completions of a step on each process.
        length: tokens of each completion.
        steps: optimizer steps; the first warms up.
    """
    before = _resident("VmRSS") if sys.platform == "linux" else 0
    model = make()
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    rows = arithmetic_dataset(256, 0, "train")
    clock = StepClock()
    with tempfile.TemporaryDirectory(prefix="dc_trl-plan-") as folder:
        config = DCGRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=batch,
            num_generations=4,
            max_completion_length=length,
            max_steps=steps,
            constraint="none",
            learning_rate=1e-6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1000,
        )
        trainer = DCGRPOTrainer(
            model,
            lambda completions, **kwargs: [float(index % 3) for index in range(len(completions))],
            config,
            train_dataset=rows,
            processing_class=tokenizer,
            rollout_func=Replay(length),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    timed = sorted(clock.seconds[1:])
    prompts = tokenizer.apply_chat_template(rows["prompt"][:], add_generation_prompt=True)["input_ids"]
    tokens = max(map(len, prompts)) + length
    return Measured(timed[len(timed) // 2], max(clock.peak - before, 0), tokens), model


def predicted_seconds(model: PreTrainedModel, batch: int, tokens: int, speed: Speed) -> float:
    """Of an optimizer step at this machine's measured speed: every token is scored, as TRL does on a CPU."""
    sizes = architecture_of(model.config, "")
    flops = training_flops(sizes, Moments(tokens, tokens**2), tokens, checkpointing=False, causal=False).total
    return batch * flops / speed.flops + 7 * 4 * sizes.parameters / speed.bandwidth


def missing_memory(sizes: Architecture, batch: int, tokens: int) -> str:
    """Why a run of some steps would not fit this machine's memory now; empty where it would."""
    micro = MicroBatch(batch, tokens, tokens, accumulated=False)
    needed = 1.1 * trainer_memory(sizes, "ddp", 1, micro, precision=FLOAT32, checkpointing=False).total + 1e9
    free = psutil.virtual_memory().available
    return "" if needed < free else f"steps need {needed / 1e9:.0f} GB, and {free / 1e9:.0f} are free"


def run_rows(make: Callable[[], PreTrainedModel], batch: int, length: int, steps: int) -> list[Row]:
    """Peak memory and seconds of real optimizer steps."""
    measured, model = run_steps(make, batch, length, steps)
    sizes = architecture_of(model.config, "")
    micro = MicroBatch(batch, measured.tokens, measured.tokens, accumulated=False)
    memory = trainer_memory(sizes, "ddp", 1, micro, precision=FLOAT32, checkpointing=False)
    speed = measure_speed(sizes.hidden, sizes.intermediate, batch * measured.tokens)
    seconds = predicted_seconds(model, batch, measured.tokens, speed)
    rows = [Row("seconds of a step", seconds, measured.seconds)]
    return [Row("peak bytes of a step", memory.total, measured.peak), *rows] if measured.peak else rows
