"""The output directory of a training run: locked, without another run, and writable."""

from contextlib import ExitStack
from pathlib import Path

from ..config import DCGRPOConfig
from ..files import lock_output
from ..hub.push import HubClient
from ..records.runs import DEPLOYMENT_FOLDER, HISTORY_FILE, SUMMARY_FILE, read_history
from ..run.manifest import checkpoints, resumable_checkpoint, set_aside_later


_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
# Files and folders that mark an output directory as one with a run.
_RUN_FILES = (HISTORY_FILE, SUMMARY_FILE, DEPLOYMENT_FOLDER, *_WEIGHTS, "checkpoint-*")


def holds_weights(folder: Path) -> bool:
    """Return whether a run has left its weights."""
    return any(path for name in _WEIGHTS for path in folder.glob(name))


def open_output(args: DCGRPOConfig, stack: ExitStack) -> str | None:
    """Lock the output directory until the stack is closed, and return the checkpoint to resume from.

    Raises:
        ValueError: the directory holds a run that is not resumed, another run writes to it, or it cannot be written.
        HubError: the Hub refuses the repository of a run that will be pushed.
    """
    output_dir = Path(args.output_dir)
    stack.enter_context(lock_output(output_dir))
    checkpoint = resumable_checkpoint(args.resume_from_checkpoint, output_dir)
    if anew := checkpoint is None and str(args.resume_from_checkpoint).lower() == "auto":
        set_aside_later(output_dir, None)
    # The checkpoint of another run is continued in a directory that holds none.
    if checkpoint is None or Path(checkpoint).resolve().parent != output_dir.resolve():
        _require_no_run(output_dir, anew)
    if args.push_to_hub:
        name = args.hub_model_id or output_dir.absolute().name
        HubClient(args).create_repo(name, private=args.hub_private_repo)
    return checkpoint


def _require_no_run(output_dir: Path, anew: bool) -> None:
    """Refuse a directory that holds a run; with `anew`, accept one that was killed before its first checkpoint."""
    found = {path.name for pattern in _RUN_FILES for path in output_dir.glob(pattern)}
    # A run that was killed before its first step ended is not worth keeping.
    if found <= {HISTORY_FILE}:
        history = read_history(output_dir / HISTORY_FILE) if HISTORY_FILE in found and not anew else []
        if not any(row["step"] > 0 for row in history):
            return
    has, remedy = "a run", "continue that run with --resume_from_checkpoint true"
    if not checkpoints(output_dir):
        has, remedy = "a run without a checkpoint", "remove that run"
    raise ValueError(f"output_dir={str(output_dir)!r} already holds {has}: choose another output_dir, or {remedy}.")
