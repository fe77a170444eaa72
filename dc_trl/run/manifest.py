"""Finds the checkpoint from which a run resumes, and describes what an incomplete one lacks.

The manifest of a checkpoint lists its files with their sizes and hashes. It is written last and marks a complete
checkpoint. The hashes find damage, not forgery: XXH3 is faster than any disk.
"""

import hashlib
import re
import shlex
from os import PathLike
from pathlib import Path

import xxhash
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..files import read_object, set_aside, sync_to_disk, write_json
from ..records.runs import DEPLOYMENT_FOLDER, STEP, TRAINER_STATE_FILE
from ..settings.fields import Range


STATE_FILE = "dc_grpo_state.json"
MANIFEST_FILE = "manifest.json"

logger = logging.get_logger(__name__)


def resumable_checkpoint(wanted: str | PathLike[str] | bool | None, output_dir: str | PathLike[str]) -> str | None:
    """Return the directory of the checkpoint that `resume_from_checkpoint` selects, or None.

    Args:
        wanted: directory of a checkpoint, or `True` or "true" for the newest complete one in `output_dir` (the log
            names the newer ones that are skipped). "auto" means the same, or none if none is complete. `None`,
            `False` and "false" select none.
        output_dir: output directory of the run.

    Raises:
        ValueError: no selected checkpoint is complete; the message says what is missing and the remedy.
    """
    word = str(wanted).lower()
    if word in ("none", "false"):
        return None
    if word not in ("true", "auto"):
        if (defect := checkpoint_defect(Path(str(wanted)))) is not None:
            raise ValueError(
                f"resume_from_checkpoint={str(wanted)!r} {defect}. Give another checkpoint, or true for the newest "
                "whole one in output_dir."
            )
        return str(wanted)
    passed_over: list[str] = []
    for folder in checkpoints(output_dir).values():
        defect = checkpoint_defect(folder)
        if defect is None:
            if passed_over:
                logger.warning(f"Resuming from {folder}. Passed over: {'; '.join(passed_over)}.")
            return str(folder)
        passed_over.append(f"{folder.name} {defect}")
    state = f"holds no whole checkpoint: {'; '.join(passed_over)}" if passed_over else "holds no checkpoint"
    if word == "auto":
        if passed_over:
            logger.warning(f"output_dir={str(output_dir)!r} {state}.")
        return None
    raise ValueError(
        f"resume_from_checkpoint=true, but output_dir={str(output_dir)!r} {state}. To start again, leave "
        "resume_from_checkpoint out and choose another output_dir, or use resume_from_checkpoint=auto."
    )


def set_aside_later(output_dir: str | PathLike[str], checkpoint: str | None) -> None:
    """Rename to `earlier-checkpoint-N` what is not of the run that goes on from a checkpoint, or begins (None)."""
    found = checkpoints(output_dir)
    begin = next((step for step, own in found.items() if checkpoint is not None and own.samefile(checkpoint)), -1)
    for folder in (folder for step, folder in found.items() if step > begin):
        set_aside([target := folder.with_name(f"earlier-{folder.name}")])
        logger.warning(f"{folder} belongs to an earlier run and is kept as {folder.rename(target).name}.")


def checkpoints(output_dir: str | PathLike[str]) -> dict[int, Path]:
    """Return the folders of an output directory that are named like checkpoints, by step, the newest first."""
    found = {
        int(match[1]): path
        for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)) and path.is_dir()
    }
    return dict(sorted(found.items(), reverse=True))


def step_of(checkpoint: str) -> int:
    """Return the optimizer step whose weights a checkpoint has."""
    return read_object(Path(checkpoint, TRAINER_STATE_FILE))["global_step"]


def checkpoint_defect(folder: Path, contents: bool = True) -> str | None:
    """Return why training cannot resume exactly from a checkpoint (a file is missing, cut short or damaged), or None.

    Of a checkpoint without a manifest (of another trainer), only the trainer's state and the optimizer are looked for.

    Args:
        folder: of the checkpoint.
        contents: whether to read all files, to compare their hashes with those of the manifest.
    """
    if not folder.is_dir():
        return "is not a directory"
    if not (folder / TRAINER_STATE_FILE).is_file():
        return f"holds no {TRAINER_STATE_FILE}: it is not a checkpoint, or its save was cut short"
    manifest = folder / MANIFEST_FILE
    if not manifest.is_file() and (folder / STATE_FILE).is_file():
        return f"holds no {MANIFEST_FILE}: its save was cut short"
    try:
        listed = read_object(manifest).get("files") if manifest.is_file() else {}
        progress = read_object(folder / TRAINER_STATE_FILE)
    except ValueError as error:
        return f"is damaged: {error}"
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        return f"holds a {MANIFEST_FILE} that lists no files: it was replaced"
    for name, entry in listed.items():
        if not (folder / name).is_file():
            return f"holds no {name}, which its {MANIFEST_FILE} lists"
        if (found := (folder / name).stat().st_size) != (size := entry.get("size")):
            return f"holds {name} with {found:,} bytes in place of {size}: it was cut short or replaced"
        # A manifest of an earlier release has no hashes.
        if contents and entry.get("xxh3", hashed := _hash(folder / name)) != hashed:
            return f"holds {name} with other contents than were saved (XXH3 {hashed}): it was damaged or replaced"
    step, steps = progress.get("global_step"), progress.get("max_steps")
    if not STEP.allows(steps) or not Range(least=0, most=steps or 0, whole=True).allows(step):
        return f"has come to global_step={step!r} of max_steps={steps!r}: its {TRAINER_STATE_FILE} was damaged"
    # DeepSpeed keeps its optimizer in the folder that the file `latest` names.
    if not any(folder.glob("optimizer*")) and not (folder / "latest").is_file():
        return (
            "holds no optimizer (save_only_model=true omits it): it cannot be continued, but a new run can start from "
            "its weights (model_name_or_path; an adapter has to be merged)"
        )
    return None


def way_back(output_dir: str, step: int) -> str:
    """Return how to go on with a run that has come to a step, from the newest whole checkpoint of its directory."""
    for saved, folder in checkpoints(output_dir).items():
        if checkpoint_defect(folder, contents=False) is None:
            command = f"the same command with --output_dir {shlex.quote(output_dir)} --resume_from_checkpoint true"
            up_to = "" if saved == step else f" up to step {saved}"
            call = f"trainer.train(resume_from_checkpoint={str(folder)!r})"
            return f"The run is saved{up_to}: go on with {call}, or in dc-trl train with {command}."
    lost = "No step had ended, so nothing is lost" if step == 0 else "There is no checkpoint"
    return f"{lost}: the same command begins again."


def write_manifest(folder: Path) -> None:
    """Write the manifest of a checkpoint, all of whose files are written: what resuming reads, with sizes and hashes.

    It returns once checkpoint and manifest are on the disk.
    """
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name != MANIFEST_FILE
        and not any(part == DEPLOYMENT_FOLDER or part.startswith(".") for part in path.relative_to(folder).parts[:-1])
    ]
    for path in [*files, *{path.parent for path in files}]:
        sync_to_disk(path)
    listed = {str(path.relative_to(folder)): {"size": path.stat().st_size, "xxh3": _hash(path)} for path in files}
    write_json(folder / MANIFEST_FILE, {"files": listed}, durable=True)
    sync_to_disk(folder.parent)  # this folder holds the checkpoint's own name


def _hash(path: Path) -> str:
    """Return the hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
