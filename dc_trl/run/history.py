"""Writes settings, history and figure of a run while it trains."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import logging

from ..config import DCGRPOConfig
from ..files import append_json, read_text, set_aside, write_text
from ..quantization.policy import base_model
from ..records.runs import (
    DEPLOYMENT_FOLDER,
    ENDED,
    FIGURE_FILE,
    HISTORY_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    changed_settings,
    json_value,
    read_history,
)


logger = logging.get_logger(__name__)


class HistoryCallback(TrainerCallback):
    """Keeps settings and history of a run, with λ and discrepancy, and a figure of them in the output directory.

    [`~dc_trl.DCGRPOTrainer`] adds one itself if `export_run` is set, which one of yours replaces.

    When training begins, `settings.json` is written with the settings that differ from `DCGRPOConfig`'s defaults,
    without tokens and keys. Every log of the trainer (λ, violation, discrepancy, reward, …: the same values that
    `report_to` sends to trackers) becomes one line of `history.jsonl`. `run.png` shows reward, δ̄ with its tolerance,
    and λ. It is drawn at the end of training, and at a save if drawing takes less than a hundredth of the time.
    A row or a figure that cannot be written gives a warning, and training goes on.
    An evaluation before training is not kept.

    A resumed run continues the history from its checkpoint. A new run in the same directory renames the old files to
    `history.1.jsonl`, `settings.1.json`, `run.1.png`, `deployment.1/` and so on; the files of one run get the same
    number. A run that is resumed with other settings renames the old ones.

    Args:
        settings (`Mapping[str, Any]`, *optional*): further settings of the run for `settings.json`, such as its data
            set and rewards: JSON values without secrets.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None):
        self._settings = settings or {}
        self._history: Path | None = None  # history of the present or last training
        self._draws_from = 0.0  # seconds of the clock from which the next figure may be drawn

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if not state.is_world_process_zero:
            return
        self._history = Path(args.output_dir, HISTORY_FILE)
        self._history.parent.mkdir(parents=True, exist_ok=True)
        if state.global_step > 0:
            # Steps after the checkpoint will be repeated, and earlier logs of this object belong to another run.
            if self._history.exists():
                # What ended the run before has not ended it, even where no step is left.
                rows = [
                    row
                    for row in read_history(self._history)
                    if row["step"] <= state.global_step and not all(name.startswith((ENDED, "step")) for name in row)
                ]
                write_text(self._history, "".join(f"{json.dumps(row)}\n" for row in rows))
        else:
            names = [HISTORY_FILE, SETTINGS_FILE, FIGURE_FILE, SUMMARY_FILE, DEPLOYMENT_FOLDER]
            for file, kept in set_aside(self._history.with_name(name) for name in names).items():
                logger.warning(f"{file} belongs to an earlier run and is kept as {kept.name}.")
        found = dict(self._settings)
        if isinstance(model, PreTrainedModel | PeftModel) and (name := base_model(model).config.name_or_path):
            found.setdefault("model_name_or_path", json_value(name))
        if isinstance(model, PeftModel):
            found["peft"] = {adapter: changed_settings(config) for adapter, config in model.peft_config.items()}
        found |= changed_settings(args, DCGRPOConfig)
        settings, text = self._history.with_name(SETTINGS_FILE), json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        if not settings.is_file() or read_text(settings) != text:
            for file, kept in set_aside([settings]).items():
                logger.warning(f"The run goes on with other settings than those of {file}, now {kept.name}.")
            write_text(settings, text)

    def on_log(self, args, state, control, logs=None, **kwargs):
        # An evaluation alone does not begin a run, so the files of an earlier run stay as they are.
        if not state.is_world_process_zero or self._history is None:
            return
        row: dict[str, Any] = {"step": state.global_step}
        row |= {name: value for name, value in (logs or {}).items() if value is None or isinstance(value, int | float)}
        with _unless_it_fails():
            append_json(self._history, row)

    def ended(self, step: int, what: str) -> None:
        """Record what ends the run, on the main process."""
        if self._history is not None:
            with _unless_it_fails():
                append_json(self._history, {"step": step, f"{ENDED}{what}": 1.0})

    def on_save(self, args, state, control, **kwargs):
        # The end of the training draws, too.
        if time.monotonic() >= self._draws_from and not control.should_training_stop:
            self.on_train_end(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        # A run that ends before its first log is saved, but has nothing to draw.
        if not state.is_world_process_zero or self._history is None or not state.log_history:
            return
        began = time.monotonic()
        with _unless_it_fails():
            from ..records.figures import plot_run

            plot_run(state.log_history, self._history.with_name(FIGURE_FILE), self._history.parent.name)
        self._draws_from = time.monotonic() + 100 * (time.monotonic() - began)


@contextmanager
def _unless_it_fails() -> Iterator[None]:
    """Warn of an error of the block, which only records what a run does, and must not end it."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logger.warning(f"The run goes on without a part of its records: {error}")
