"""Finds the checkpoint from which a run resumes, and describes what an incomplete one lacks."""

import json
import re
import sys
import zipfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..files import set_aside
from ..records.runs import TRAINER_STATE_FILE
from ..settings.paths import NEWEST_CHECKPOINT, NEWEST_OR_NONE, NO_CHECKPOINT
from .manifest import MANIFEST_FILE, files_of, manifest_defect


STATE_FILE = "dc_grpo_state.json"
SAMPLER_FOLDER = "sampler"  # the sampler's weights if they lag behind the trained ones
ROLLOUTS_FILE = "rollouts_rank{rank}.safetensors"
AHEAD_FILE = "rollouts_ahead.json"  # the batch of all processes that was sampled beside training

UNFINISHED = "unfinished"  # prefix of an incomplete checkpoint that a new run has renamed

_NAMED_BY_STEP = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
# Prefixes of the names under which transformers, PEFT, FSDP and DeepSpeed keep weights.
_WEIGHTS = ("model.safetensors", "pytorch_model", "adapter_model", "*/adapter_model", "latest")

Result = TypeVar("Result")

logger = logging.get_logger(__name__)


def on_main_process(action: Callable[[], Result]) -> Result:
    """Run an action on the main process; return its result, or raise its `ValueError`, on all processes."""
    outcome: list = [None, None]
    state = PartialState()
    if state.is_main_process:
        try:
            outcome[0] = action()
        except ValueError as error:
            outcome[1] = str(error)
    if state.num_processes > 1:
        broadcast_object_list(outcome)
    result, refusal = outcome
    if refusal is not None:
        raise ValueError(refusal)
    return result


def resumable_checkpoint(
    wanted: str | PathLike[str] | bool | None,
    output_dir: str | PathLike[str],
    hashes: bool = True,
) -> str | None:
    """Return the directory of the checkpoint that `resume_from_checkpoint` selects, or None.

    Args:
        wanted: directory of a checkpoint, or `True` or "true" for the newest complete one in `output_dir` (the log
            names the newer ones that are skipped). "auto" means the same, but selects none if none is complete;
            incomplete checkpoints are then renamed. `None`, `False` and "false" select none.
        output_dir: output directory of the run.
        hashes: whether files are read and compared with the hashes of the checkpoint's manifest.

    Raises:
        ValueError: no selected checkpoint is complete; the message says what is missing and the remedy.
    """
    if isinstance(wanted, bool):
        wanted = NEWEST_CHECKPOINT if wanted else NO_CHECKPOINT
    word = wanted.lower() if isinstance(wanted, str) else ""
    if wanted is None or word == NO_CHECKPOINT:
        return None
    if word not in (NEWEST_CHECKPOINT, NEWEST_OR_NONE):
        if (defect := checkpoint_defect(Path(wanted), hashes)) is not None:
            raise ValueError(
                f"resume_from_checkpoint={str(wanted)!r} {defect}. Give another checkpoint, or true for the newest "
                "whole one in output_dir."
            )
        return _chosen(Path(wanted))
    passed_over: dict[Path, str] = {}
    for folder in checkpoints(output_dir):
        defect = checkpoint_defect(folder, hashes)
        if defect is None:
            if passed_over:
                logger.warning(f"Going on from {folder}. Passed over: {'; '.join(passed_over.values())}.")
            return _chosen(folder)
        passed_over[folder] = f"{folder.name} {defect}"
    if word == NEWEST_OR_NONE:
        for folder, defect in passed_over.items():  # a new run would replace them or rotate them out
            target = folder.with_name(f"{UNFINISHED}-{folder.name}")
            set_aside([target])
            folder.rename(target)
            logger.warning(f"{defect}: it is kept as {target.name}, and the run starts again in {str(output_dir)!r}.")
        return None
    state = f"holds no whole checkpoint: {'; '.join(passed_over.values())}" if passed_over else "holds no checkpoint"
    raise ValueError(
        f"resume_from_checkpoint=true, but output_dir={str(output_dir)!r} {state}. To start again, leave "
        "resume_from_checkpoint out and choose another output_dir, or use resume_from_checkpoint=auto."
    )


def _chosen(folder: Path) -> str:
    if not (folder / MANIFEST_FILE).is_file():
        logger.warning_once(
            f"{folder} has no {MANIFEST_FILE}, because an earlier version or another trainer saved it: its files "
            "exist and can be read, but it is not known whether they are the ones that were saved."
        )
    return str(folder)


def checkpoints(output_dir: str | PathLike[str]) -> list[Path]:
    """Return the folders of an output directory that are named like checkpoints, the newest first."""
    return [path for _, path in sorted(numbered_folders(output_dir, PREFIX_CHECKPOINT_DIR).items(), reverse=True)]


def numbered_folders(output_dir: str | PathLike[str], prefix: str) -> dict[int, Path]:
    """Return the folders of an output directory that are named PREFIX-STEP, by step."""
    return {
        int(match[1]): path
        for path in Path(output_dir).glob(f"{prefix}-*")
        if (match := re.fullmatch(rf"{prefix}-(\d+)", path.name)) and path.is_dir()
    }


def checkpoint_defect(folder: Path, hashes: bool = True) -> str | None:
    """Return why training cannot resume exactly from a checkpoint (a file is missing, cut short or changed), or None.

    A manifest lists all files of a checkpoint. Without one, only what every trainer saves is looked for.

    Args:
        folder: directory of the checkpoint.
        hashes: whether files are read and compared with the hashes of the manifest. Otherwise, or if there are no
            hashes, headers and sizes are read.
    """
    if not folder.is_dir():
        return "does not exist" if not folder.exists() else "is not a directory"
    if not (folder / TRAINER_STATE_FILE).is_file():
        return f"holds no {TRAINER_STATE_FILE}: it is not a checkpoint, or its save was cut short"
    for file in files_of(folder):
        if (reason := _unreadable(file)) is not None:
            return f"holds {file.relative_to(folder)}, which {reason}"
    return _missing_file(folder) or manifest_defect(folder, hashes) or _wrong_step(folder) or _wrong_state(folder)


def _unreadable(file: Path) -> str | None:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                pass
        elif file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix in (".pt", ".pth", ".bin"):
            with zipfile.ZipFile(file):  # the format of torch.save, whose directory is at the end
                pass
    except (SafetensorError, ValueError, zipfile.BadZipFile):
        return "is empty" if file.stat().st_size == 0 else "is cut short or damaged"
    return None


def _missing_file(folder: Path) -> str | None:
    if not any(path for name in _WEIGHTS for path in folder.glob(f"{name}*")):
        return "holds no weights (model.safetensors, adapter_model.safetensors, …)"
    if not (folder / "latest").is_file():  # DeepSpeed keeps its optimizer in the folder that this file names
        for name, found in (("optimizer.pt", "optimizer*"), ("scheduler.pt", "scheduler.pt")):
            if not any(folder.glob(found)):
                return (
                    f"holds no {name} (save_only_model=true omits it): it cannot be continued, but a new run can "
                    "start from its weights (model_name_or_path; an adapter has to be merged)"
                )
    if _object(folder / STATE_FILE).get("manifest") and not (folder / MANIFEST_FILE).is_file():
        return f"holds no {MANIFEST_FILE}: its save was cut short"
    return None


def _wrong_step(folder: Path) -> str | None:
    step = _object(folder / TRAINER_STATE_FILE).get("global_step")
    if type(step) is not int:
        return f"holds {TRAINER_STATE_FILE}, which lacks 'global_step'"
    named = _NAMED_BY_STEP.fullmatch(folder.resolve().name)
    if named is not None and int(named[1]) != step:
        return f"holds {TRAINER_STATE_FILE} of step {step}: its name and its content are not of one checkpoint"
    return None


def _wrong_state(folder: Path) -> str | None:
    """Return what is impossible in the state of λ, which other trainers' checkpoints do not have."""
    state = _object(folder / STATE_FILE)
    if not state:
        return None
    multiplier = state.get("lagrange_multiplier")
    value = multiplier.get("value") if isinstance(multiplier, dict) else None
    low, high = state.get("lambda_bounds", (0.0, sys.float_info.max))  # absent in older checkpoints
    if not isinstance(value, int | float) or not low <= value <= high:  # NaN is refused, too
        return f"holds {STATE_FILE}, whose lambda={value!r} is not a number from lambda_min={low} to lambda_max={high}"
    return None


def _object(file: Path) -> dict:
    value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    return value if isinstance(value, dict) else {}
