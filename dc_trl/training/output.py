"""The output directory of a training run: locked, without another run, writable, and large enough."""

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from peft import PeftModel
from torch import Tensor

from ..config import DCGRPOConfig
from ..files import lock_output, write_bytes
from ..hub.push import HubClient
from ..quantization.policy import empty_copy, unwrapped
from ..quantization.schemes import quantized_weights, resolve_scheme
from ..records.runs import (
    BASELINE_FILE,
    DEPLOYMENT_FOLDER,
    HISTORY_FILE,
    SUMMARY_FILE,
    read_baseline,
    read_history,
    read_summary,
)
from ..records.samples import read_samples
from ..records.started import read_starts
from ..resuming.checkpoints import checkpoints, resumable_checkpoint
from ..settings.paths import NEWEST_OR_NONE
from ..trainer import DCGRPOTrainer


# The weights that a finished run leaves.
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
# Files and folders that mark an output directory as one with a run.
_RUN_FILES = (HISTORY_FILE, BASELINE_FILE, SUMMARY_FILE, DEPLOYMENT_FOLDER, *_WEIGHTS, "checkpoint-*", "last-good-*")


def holds_weights(folder: Path) -> bool:
    """Return whether a run has left its weights."""
    return any(path for name in _WEIGHTS for path in folder.glob(name))


def open_output(args: DCGRPOConfig, stack: ExitStack) -> str | None:
    """Lock the output directory until the stack is closed, and return the checkpoint to resume from.

    Raises:
        ValueError: the directory holds a run that is not resumed, another run is writing to it, or it cannot be
            written; or the Hub refuses the repository of a run that will be pushed.
    """
    output_dir = Path(args.output_dir)
    stack.enter_context(lock_output(output_dir))
    checkpoint = resumable_checkpoint(args.resume_from_checkpoint, output_dir, args.checkpoint_hashes)
    if checkpoint is None:
        _require_no_run(output_dir, anew=str(args.resume_from_checkpoint).lower() == NEWEST_OR_NONE)
    else:  # damaged records are refused before the model is loaded
        for read in (read_starts, read_samples, read_baseline, read_summary):
            read(output_dir)
        if (output_dir / HISTORY_FILE).exists():
            read_history(output_dir / HISTORY_FILE)
    _require_writable(output_dir)
    if args.push_to_hub:
        name = args.hub_model_id or output_dir.absolute().name
        HubClient.of(args).create_repo(name, private=args.hub_private_repo)
    return checkpoint


def _require_no_run(output_dir: Path, anew: bool) -> None:
    """Refuse a directory that holds a run; with `anew`, accept one that was killed before its first checkpoint."""
    found = {path.name for pattern in _RUN_FILES for path in output_dir.glob(pattern)}
    # A run that was killed before its first step ended is not worth keeping.
    if found <= {HISTORY_FILE, BASELINE_FILE}:
        history = read_history(output_dir / HISTORY_FILE) if HISTORY_FILE in found and not anew else []
        if not any(row["step"] > 0 for row in history):
            return
    has, remedy = "a run", "continue that run with --resume_from_checkpoint true"
    if not checkpoints(output_dir):
        has, remedy = "a run without a checkpoint", "remove that run"
    raise ValueError(f"output_dir={str(output_dir)!r} already holds {has}: choose another output_dir, or {remedy}.")


def _require_writable(output_dir: Path) -> None:
    """Refuse a directory that cannot be written, by writing a megabyte: only that shows a full disk."""
    probe = output_dir / ".write-probe"
    try:
        write_bytes(probe, bytes(1 << 20), durable=True)
    except OSError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} cannot be written ({error.strerror}): choose another one."
        ) from error
    finally:
        probe.unlink(missing_ok=True)


def require_space(trainer: DCGRPOTrainer) -> None:
    """Refuse to train if the disk cannot hold the files of the run; only a lower bound is counted here.

    Raises:
        ValueError: there is too little space; the message names the free and the needed bytes.
    """
    args, policy = trainer.args, unwrapped(trainer.accelerator, trainer.model)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    # Only the adapter of a PEFT model is saved.
    saved = trained if isinstance(policy, PeftModel) else list(policy.parameters())
    parts = {"the model": _bytes(saved)}
    if args.save_strategy != "no":
        parts["a checkpoint"] = _bytes(saved) + 2 * _bytes(trained)  # the weights again, and two moments
    if args.exports_deployment:
        architecture = empty_copy(policy)
        architecture.tie_weights()
        weights = resolve_scheme(args.deployment_scheme, architecture).weights
        quantized = sum(weight.numel() for weight in quantized_weights(architecture).values())
        others = architecture.num_parameters() - quantized
        # Without the scales.
        parts["the deployment"] = quantized * (16 if weights is None else weights.num_bits) // 8 + 2 * others
    free, needed = shutil.disk_usage(args.output_dir).free, sum(parts.values())
    if free < needed:
        listed = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items())
        raise ValueError(
            f"output_dir={args.output_dir!r} has {free / 1e9:.2f} GB free and the run needs {needed / 1e9:.2f} GB "
            f"({listed}): free some space, or choose another output_dir."
        )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
