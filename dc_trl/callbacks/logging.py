"""What a run writes of itself while it trains: settings, history, figure, progress."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import ProgressCallback
from transformers.utils import logging

from ..config import DCGRPOConfig
from ..files import set_aside, write_text
from ..records.runs import FIGURE_FILE, HISTORY_FILE, SETTINGS_FILE, read_history
from ..records.samples import SAMPLES_FILE
from ..records.settings import changed_settings, json_value
from ..records.started import STARTS_FILE, cpu_name, record_start
from ..report.panels import plot_run
from ..trainers.samples import HistoryKeeper


logger = logging.get_logger(__name__)


def training_settings(args: Any, model: nn.Module | None, further: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is made with: the model, its adapter, `further` settings, and arguments that are not the defaults.

    Other `TrainingArguments` are compared with `DCGRPOConfig`'s defaults too, so that runs of several trainers can be
    compared.
    """
    found = dict(further)
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    if name and "model_name_or_path" not in found:
        found["model_name_or_path"] = json_value(name)
    if isinstance(model, PeftModel):
        found["peft"] = {adapter: changed_settings(config) for adapter, config in model.peft_config.items()}
    return found | changed_settings(args, DCGRPOConfig)


def device_name(device: torch.device) -> str:
    """Name of what a process trains on: the processor's with its cores, or the accelerator's."""
    if device.type == "cpu":
        return cpu_name()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


class LambdaLoggingCallback(HistoryKeeper):
    """Keeps the run's settings and history in the output directory, λ and discrepancy above all, and a figure of them.

    When training begins, `settings.json` gets what differs from `DCGRPOConfig`'s defaults, without tokens and keys.
    Every log of the trainer (λ, violation, discrepancy, reward, …: the same values that go to the trackers of
    `report_to`) becomes one line of `history.jsonl`. `starts.json` says when and on what the run was started, and a
    [`~dc_trl.DCGRPOTrainer`] adds a few of its completions as `completions.json`. At every save and at the end of
    training, `run.png` shows reward, δ̄ with its tolerance, and λ. A resumed run keeps its settings and continues the
    history from its checkpoint; a new run in the same directory keeps the old files as `history.1.jsonl`,
    `settings.1.json`, and so on.

    Args:
        settings (`Mapping[str, Any]`, *optional*): what else made the run, such as its data set and rewards, for
            `settings.json`: JSON values, no secrets.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None):
        self._settings = settings or {}
        self._history: Path | None = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            settings = self._open(args.output_dir, state.global_step).with_name(SETTINGS_FILE)
            record_start(settings.parent, state.global_step, device_name(args.device), args.world_size)
            if not settings.exists():
                found = training_settings(args, model, self._settings)
                write_text(settings, json.dumps(found, indent=2, ensure_ascii=False) + "\n")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        history = self._history or self._open(args.output_dir, state.global_step)
        row: dict[str, Any] = {"step": state.global_step}
        row |= {name: value for name, value in (logs or {}).items() if value is None or isinstance(value, int | float)}
        with open(history, "a") as file:
            file.write(json.dumps(row) + "\n")

    def on_save(self, args, state, control, **kwargs):
        # Before the first log there is nothing to draw: a run that ends there is saved all the same.
        if state.is_world_process_zero and self._history is not None and self._history.exists():
            plot_run(read_history(self._history), self._history.with_name(FIGURE_FILE), self._history.parent.name)

    on_train_end = on_save

    def _open(self, output_dir: str, step: int) -> Path:
        history = Path(output_dir, HISTORY_FILE)
        history.parent.mkdir(parents=True, exist_ok=True)
        if history.exists() and step > 0:
            # Steps after the checkpoint are about to be made again.
            kept = [row for row in read_history(history) if row["step"] <= step]
            write_text(history, "".join(f"{json.dumps(row)}\n" for row in kept))
        elif step == 0 and (self._history is None or _holds_training(history)):
            names = (HISTORY_FILE, SETTINGS_FILE, STARTS_FILE, SAMPLES_FILE)
            earlier = [file for file in map(history.with_name, names) if file.exists()]
            for file, kept_as in zip(earlier, set_aside(earlier), strict=True):
                logger.warning(f"{file} belongs to an earlier run and is kept as {kept_as.name}.")
        self._history = history
        return history


def _holds_training(history: Path) -> bool:
    """Whether steps are in it, not only what was measured before the first one."""
    return history.exists() and any(row["step"] > 0 for row in read_history(history))


class ConstraintProgressCallback(ProgressCallback):
    """Transformers' progress bar, with reward, δ̄ and λ on it in place of a printed line for every log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        shown = {"reward": "reward", "δ̄": "discrepancy/mean", "λ": "lagrangian/lambda"}
        values = {label: f"{logs[name]:.4g}" for label, name in shown.items() if logs.get(name) is not None}
        if values:
            self.training_bar.set_postfix(values)
