"""What the checks do. Each probe yields what it has found so far, by name, and raises what went wrong.

Libraries are imported where they are used: a probe must say what it can where others are missing or broken.
"""

import gc
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..records.started import processor_name, usable_cores
from .checks import LeftOut, Setup


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..calibration.rollouts import EngineSample
    from ..calibration.settings import CalibrationSettings

Found = Iterator[dict[str, Any]]
SHARED_MEMORY = Path("/dev/shm")
_NOISE = 0.3  # of a weight's standard deviation, well above what any served scheme rounds away
_KERNEL_ERROR = 0.02  # relative; a product in bfloat16 has 0.002


# --- the machine -----------------------------------------------------------------------------------------------------


def devices(setup: Setup, scheme: None) -> Found:
    """Cores and memory, PyTorch's build, and the devices that it finds."""
    import torch

    cores = usable_cores()
    yield {"load": psutil.getloadavg()[0]}
    yield {"cores": cores, "threads": torch.get_num_threads(), "memory_gb": psutil.virtual_memory().total / 1e9}
    yield {"cpu": f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"}
    if SHARED_MEMORY.is_dir():
        yield {"shared_memory_gb": psutil.disk_usage(str(SHARED_MEMORY)).total / 1e9}
    build = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "no CUDA, no ROCm"
    )
    yield {"build": build}
    driver = _nvidia_driver()
    if driver is not None:
        yield {"driver": driver}
    yield {"devices": [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []}
    if torch.version.cuda and not torch.cuda.is_available():
        yield {"note": "this PyTorch is built for CUDA and finds no GPU that it can use"}
    if driver is not None and not torch.version.cuda:
        yield {"note": "nvidia-smi finds a driver, and this PyTorch is built without CUDA"}
    name = device_of(setup)
    torch.ones(1, device=name).item()  # it can be used
    yield {"device": name}


def _nvidia_driver() -> str | None:
    """Version of NVIDIA's driver; None where there is no nvidia-smi, or it does not work."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def _gpu(index: int) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    kind = gpu.gcnArchName if torch.version.hip else f"compute capability {gpu.major}.{gpu.minor}"
    return f"{gpu.name}, {kind}, {gpu.total_memory / 1e9:.0f} GB"


def device_of(setup: Setup) -> str:
    """The device that the probes compute on: the user's, or the accelerator that PyTorch finds, or the CPU."""
    import torch

    return setup.device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")


def load_libraries(setup: Setup, scheme: None) -> Found:
    """Imports what all further probes need: the first import takes longest, and finds versions that do not fit."""
    from ..calibration import measure
    from ..serving import server
    from ..trainer import DCGRPOTrainer

    yield {"imported": [module.__name__ for module in (measure, server)] + [DCGRPOTrainer.__name__]}


# --- kernels of PyTorch ----------------------------------------------------------------------------------------------


def kernel(setup: Setup, scheme: str) -> Found:
    """One product in the scheme's numbers by PyTorch, next to the same in float64."""
    import torch

    device = device_of(setup)
    generator = torch.Generator().manual_seed(setup.seed)
    rows, weights = (torch.randn(shape, generator=generator).to(device) for shape in ((64, 256), (512, 256)))
    try:
        product, exact = _products()[scheme](rows, weights)
        error = ((product.cpu().double() - exact).norm() / exact.norm()).item()
    except torch.AcceleratorError:
        raise  # the device is of no use to this process any more
    except (RuntimeError, ValueError, TypeError) as refusal:
        words = str(refusal).strip().splitlines()
        raise LeftOut(
            f"PyTorch has no such product on {device}: {words[0] if words else type(refusal).__name__}"
        ) from None
    yield {"relative_error": error}
    if not error < _KERNEL_ERROR:
        raise RuntimeError(f"the product is off by {error:.1%}, and rounding allows {_KERNEL_ERROR:.0%}")


def _products() -> dict[str, Callable[["torch.Tensor", "torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]]]:
    """Of rows and weights, shapes (64, 256) and (512, 256): their product in a scheme, and in float64 on the CPU."""
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.cpu().double() @ b.cpu().double().t()

    def bf16(rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = rows.bfloat16(), weights.bfloat16()
        return a @ b.t(), exact(a, b)

    def fp8(rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = [each.abs().amax(1, keepdim=True) / 448 for each in (rows, weights)]  # of a token, of a channel
        a, b = ((each / s).to(torch.float8_e4m3fn) for each, s in zip((rows, weights), scales, strict=True))
        by_row = ScalingType.RowWise
        product = scaled_mm(a, b.t(), scales[0], by_row, scales[1].t(), by_row, output_dtype=torch.bfloat16)
        return product, exact(a.float() * scales[0], b.float() * scales[1])

    def int8(rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ((each * 20).round().clamp(-127, 127).to(torch.int8) for each in (rows, weights))
        return torch.ops.aten._int_mm(a, b.t()), exact(a, b)

    return {"bf16": bf16, "fp8": fp8, "int8": int8}


# --- the model -------------------------------------------------------------------------------------------------------


def load_model(setup: Setup) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The policy in bfloat16 on its device, as a run with `bf16: true` has it, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16).to(device_of(setup)).eval()
    return policy, AutoTokenizer.from_pretrained(setup.model, padding_side="left")


def model(setup: Setup, scheme: None) -> Found:
    """Loads the model once, which downloads one of the Hub, and has it compute."""
    import torch

    from ..quantization.schemes import quantized_weights

    policy, _ = load_model(setup)
    config = policy.config.get_text_config()
    widths = {size for weight in quantized_weights(policy).values() for size in weight.shape[-2:]}
    yield {
        "architecture": type(policy).__name__,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "multiple_of": max(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if not any(size % step for size in widths)),
    }
    with torch.no_grad():
        logits = policy(torch.tensor([[2, 3, 4]], device=policy.device)).logits
    if not logits.isfinite().all():
        raise RuntimeError("the model computes logits that are not finite")


def require_fit(policy: "PreTrainedModel", scheme: str) -> None:
    """Leaves a scheme out that the shapes of the model do not allow, on whatever machine."""
    from ..quantization.schemes import resolve_scheme

    try:
        resolve_scheme(scheme, policy)
    except ValueError as error:
        raise LeftOut(f"shape: {error}") from None


# --- engines ---------------------------------------------------------------------------------------------------------


def prompts_of(setup: Setup, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """The same few prompts everywhere, as token ids."""
    texts = [f"{17 * number + 5}+{29 * number + 11}=" for number in range(setup.prompts)]
    if tokenizer.chat_template is None:
        return [tokenizer(text)["input_ids"] for text in texts]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def calibration_settings(setup: Setup) -> "CalibrationSettings":
    from ..calibration.settings import CalibrationSettings

    return CalibrationSettings(
        samples=setup.samples,
        max_tokens=setup.tokens,
        batch_prompts=setup.prompts,
        seed=setup.seed,
        split=False,
        progress=False,
    )


def mismatch(
    sample: "EngineSample",
    policy: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[list[int]],
    settings: "CalibrationSettings",
) -> dict[str, Any]:
    """δ̄ with its interval, and KL (k3), of what an engine sampled against the policy."""
    from ..calibration.mismatch import measure_engine
    from ..calibration.scoring import train_logps

    train = train_logps(policy, prompts, sample.rollouts, settings)
    measured = measure_engine(sample, train, len(prompts), settings)
    delta, k3 = measured.estimates["discrepancy"], measured.estimates["k3_kl"]
    return {"discrepancy": delta.value, "interval": [delta.low, delta.high], "k3": k3.value, "tokens": measured.tokens}


def replica(setup: Setup, scheme: str) -> Found:
    """Samples with the replica, measures it against the policy, and times how new weights get to it."""
    from ..calibration.rollouts import sample_rollouts
    from ..rollouts.engines import EngineSpec
    from ..rollouts.replica import Replica

    policy, tokenizer = load_model(setup)
    require_fit(policy, scheme)
    prompts, settings = prompts_of(setup, tokenizer), calibration_settings(setup)
    start = time.perf_counter()
    sample = sample_rollouts(EngineSpec.parse(f"replica:{scheme}"), policy, tokenizer, prompts, settings)
    yield {"sampling_seconds": time.perf_counter() - start}
    yield mismatch(sample, policy, tokenizer, prompts, settings)
    engine = Replica(policy, scheme)

    def sync() -> None:
        engine.sync(policy)
        wait_for_device(policy.device)

    yield {"sync_seconds": median_seconds(sync, setup.repetitions)}


def server(setup: Setup, scheme: str) -> Found:
    """Starts a vLLM server in a scheme, samples, measures, and gives it other weights, which it has to sample with."""
    import torch

    from ..calibration.rollouts import sample_rollouts
    from ..quantization.checkpoint import CheckpointWriter
    from ..quantization.tensors import policy_tensors
    from ..rollouts.engines import EngineSpec
    from ..serving.client import ServerClient
    from ..serving.guard import temporary_folder
    from ..serving.server import serve, vllm_version

    policy, tokenizer = load_model(setup)
    require_fit(policy, scheme)
    prompts, settings = prompts_of(setup, tokenizer), calibration_settings(setup)
    length = max(map(len, prompts)) + setup.tokens
    # The policy shares the device with the server here.
    share = ["--gpu-memory-utilization", "0.5"] if torch.cuda.is_available() else []
    options, log = [*share, *setup.serve_options], Path(setup.log)
    begin = log.stat().st_size if log.exists() else 0
    start = time.perf_counter()
    with serve(setup.model, scheme, max_model_len=length, log_path=log, options=options) as running:
        yield {"vllm": vllm_version(), "start_seconds": time.perf_counter() - start}
        yield {"kernels": chosen_kernels(log.read_bytes()[begin:].decode(errors="replace"))}
        spec = EngineSpec.parse(running.url)
        start = time.perf_counter()
        sample = sample_rollouts(spec, policy, tokenizer, prompts, settings)
        yield {"sampling_seconds": time.perf_counter() - start, "format": sample.precision.partition(", served as")[0]}
        if scheme not in sample.schemes:
            raise RuntimeError(f"vLLM's layers are {sample.precision}, and {scheme} was asked for")
        yield mismatch(sample, policy, tokenizer, prompts, settings)

        trained = add_noise(policy, setup.seed)
        client = ServerClient(running.url)
        writer = CheckpointWriter(policy, scheme, tokenizer)
        memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with temporary_folder("reload", memory) as folder:
            checkpoint = folder / "checkpoint"

            def write() -> None:
                shutil.rmtree(checkpoint, ignore_errors=True)
                writer.write(policy_tensors(trained), checkpoint)

            yield {"write_seconds": median_seconds(write, setup.repetitions)}
            reload = median_seconds(lambda: client.load_checkpoint(str(checkpoint), "doctor"), setup.repetitions)
            yield {"reload_seconds": reload}
        sample = sample_rollouts(spec, trained, tokenizer, prompts, settings)
        new, old = (mismatch(sample, each, tokenizer, prompts, settings)["discrepancy"] for each in (trained, policy))
        yield {"after_reload": new, "to_old_weights": old}
        if not new < old:
            raise RuntimeError(
                f"after new weights were loaded, the server's samples are nearer to the old ones: δ̄ is {new:.2e} to "
                f"the new weights and {old:.2e} to the old ones"
            )


def chosen_kernels(log: str) -> list[str]:
    """Kernels that vLLM says in its log that it has chosen."""
    linear = re.findall(r"(?:Selected|Using) (\w*Kernel) for (\w+)", log)
    attention = re.findall(r"Using (\w+) attention backend|Using AttentionBackendEnum\.(\w+) backend", log)
    names = [f"{kernel} for {method}" for kernel, method in linear]
    return list(dict.fromkeys([*names, *("".join(found) + " attention" for found in attention)]))


def add_noise(policy: "PreTrainedModel", seed: int) -> "PreTrainedModel":
    """A copy of the policy with other weights in its matrices, as if it had been trained."""
    import copy

    import torch

    trained = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(_NOISE * parameter.std() * noise)
    return trained


# --- training --------------------------------------------------------------------------------------------------------


def step(setup: Setup, scheme: None) -> Found:
    """Seconds of an optimizer step with the constraint over those without, in turns, on the same rollouts."""
    from .stepping import make_trainer

    seconds: dict[str, list[float]] = {"lagrangian": [], "none": []}
    with tempfile.TemporaryDirectory(prefix="dc_trl-doctor-") as folder:
        policies = {name: make_trainer(*load_model(setup), name, folder, device_of(setup)) for name in seconds}
        for turn in range(setup.turns + 2):
            # The order changes, so that neither always runs after the other.
            for name in sorted(seconds, reverse=bool(turn % 2)):
                trainer, clock = policies[name]
                trainer.train()
                if turn >= 2:  # the first two warm up
                    seconds[name].append(clock.seconds)
            if turn > 2:
                ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
                yield {
                    "step_seconds": statistics.median(seconds["none"]),
                    "ratio": statistics.median(seconds["lagrangian"]) / statistics.median(seconds["none"]),
                    "interval_of_turns": median_interval(ratios),
                    "turns": len(ratios),
                }


def release_memory() -> None:
    """Gives back what the last check held."""
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def wait_for_device(device: "torch.device") -> None:
    """Waits until the device has done what it was given."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def median_interval(values: list[float]) -> list[float]:
    """95 % interval of a median, or more, from the order of the values alone; of fewer than 6, the whole range.

    The k-th smallest and the k-th largest value miss the median with the probability that fewer than k of n fair coins
    show heads, or fewer than k tails.
    """
    ordered, missed, k = sorted(values), 0.0, 0
    while k < (len(values) - 1) // 2 and missed + 2 * math.comb(len(values), k) / 2 ** len(values) <= 0.05:
        missed += 2 * math.comb(len(values), k) / 2 ** len(values)
        k += 1
    return [ordered[max(k, 1) - 1], ordered[-max(k, 1)]]


def median_seconds(action: Callable[[], Any], repetitions: int) -> float:
    """Median time of an action, after once to warm up."""
    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
