"""What a Trainer callback should do around a constrained run."""

import json
import os
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .deployment.checkpoint import CheckpointWriter
from .report import FIGURE_FILE, HISTORY_FILE, plot_run, read_history
from .trainer import DCGRPOTrainer


DEPLOYMENT_FOLDER = "deployment"

logger = logging.get_logger(__name__)


class DeploymentCheckpointCallback(TrainerCallback):
    """Keeps the policy as it is deployed: what `vllm serve` takes, in the scheme that the run samples in.

    At each save it goes to `deployment` within the checkpoint, at the end of training to `deployment` in the output
    directory. It is the checkpoint that a server is synchronized with (`weight_sync="checkpoint"`), byte for byte.

    Args:
        trainer (`DCGRPOTrainer`): the trainer of the run.
    """

    def __init__(self, trainer: DCGRPOTrainer):
        self._trainer = trainer
        self._writer: CheckpointWriter | None = None

    def _write(self, folder: Path) -> None:
        trainer = self._trainer
        tensors = trainer.deployed_tensors()
        if trainer.accelerator.is_main_process:
            if self._writer is None:
                policy = trainer.accelerator.unwrap_model(trainer.model)
                scheme = trainer.args.deployment_scheme or "bf16"
                self._writer = CheckpointWriter(policy, scheme, trainer.processing_class)
            self._writer.write(tensors, folder)
        for _ in tensors:
            pass  # take part in gathering

    def on_save(self, args, state, control, **kwargs):
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._write(checkpoint / DEPLOYMENT_FOLDER)

    def on_train_end(self, args, state, control, **kwargs):
        self._write(Path(args.output_dir, DEPLOYMENT_FOLDER))


class LambdaLoggingCallback(TrainerCallback):
    """Keeps the run's history, λ and discrepancy above all, in a file and a figure in the output directory.

    Every log of the trainer (λ, violation, discrepancy, reward, …: the same values that go to the trackers of
    `report_to`) becomes one line of `history.jsonl`. At every save and at the end of training, `run.png` shows reward,
    δ̄ with its tolerance, and λ. A resumed run continues the file from its checkpoint; a new run in the same directory
    keeps the old file as `history.1.jsonl`, and so on.
    """

    def __init__(self) -> None:
        self._history: Path | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._open(args.output_dir, state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        history = self._history or self._open(args.output_dir, state.global_step)
        row: dict[str, Any] = {"step": state.global_step}
        row |= {name: value for name, value in (logs or {}).items() if value is None or isinstance(value, int | float)}
        with open(history, "a") as file:
            file.write(json.dumps(row) + "\n")

    def on_save(self, args, state, control, **kwargs):
        self._draw(state)

    def on_train_end(self, args, state, control, **kwargs):
        self._draw(state)

    def _draw(self, state) -> None:
        if state.is_world_process_zero and self._history is not None:
            plot_run(read_history(self._history), self._history.with_name(FIGURE_FILE), self._history.parent.name)

    def _open(self, output_dir: str, step: int) -> Path:
        history = Path(output_dir, HISTORY_FILE)
        history.parent.mkdir(parents=True, exist_ok=True)
        if history.exists() and step > 0:
            # Steps after the checkpoint are about to be made again.
            kept = [row for row in read_history(history) if row["step"] <= step]
            partial = history.with_suffix(".tmp")
            partial.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
            os.replace(partial, history)
        elif history.exists() and self._history is None:
            number = 1
            while (old := history.with_suffix(f".{number}.jsonl")).exists():
                number += 1
            history.rename(old)
            logger.warning(f"{history} belongs to an earlier run and is kept as {old.name}.")
        self._history = history
        return history


class ConstraintProgressCallback(ProgressCallback):
    """Transformers' progress bar, with reward, δ̄ and λ on it in place of a printed line for every log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        shown = {"reward": "reward", "δ̄": "discrepancy/mean", "λ": "lagrangian/lambda"}
        values = {label: f"{logs[name]:.4g}" for label, name in shown.items() if logs.get(name) is not None}
        if values:
            self.training_bar.set_postfix(values)
