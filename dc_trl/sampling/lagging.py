"""`LaggingSampler`: the engine samples with earlier weights until newer ones are due."""

import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..quantization.policy import unwrapped
from .sampler import Sampler
from .versions import SamplerWeights, SyncSchedule


SAMPLER_FOLDER = "sampler"  # of a checkpoint: the sampler's weights if they lag behind the trained ones


class LaggingSampler(Sampler):
    """A sampler with a schedule of its weights, which logs their age.

    Args:
        trainer, engine, truncates: see `Sampler`.
    """

    _versions = 1  # of the weights, that batches which are still to be trained on were sampled with

    def __init__(self, trainer: Any, engine: Any, truncates: bool):
        super().__init__(trainer, engine, truncates)
        self._schedule = SyncSchedule(trainer.args.weight_sync_steps)
        self._kept: TemporaryDirectory[str] | None = None  # the weights of training while an evaluation has others
        if trainer.args.may_lag and trainer.args.split_by is not None:
            self.lagged = SamplerWeights(unwrapped(trainer.accelerator, trainer.model), self._versions)

    def end_batch(self, completions):
        trainer, step = self._trainer, self._trainer.state.global_step
        training = trainer.model.training
        self.age = self._age() if training else 0
        trainer._pending_extra_logs["weights_of_step"].extend([step - self.age] * completions)
        if training:
            trainer.add_metric("sync/age", self.age)
            trainer.add_metric("sync/count", self._schedule.syncs)

    def sampling_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the policy has the weights that sampled the latest batch, which lag."""
        assert self.lagged is not None
        return self.lagged.in_place(self._trainer.state.global_step - self.age)

    def _age(self) -> int:
        """Return the age of the weights of a generation batch of training, in optimizer steps."""
        return self._schedule.age(self._trainer.state.global_step)

    # --- weights of the engine --------------------------------------------------------------------------------------

    def _bring_weights(self, training):
        schedule, step = self._schedule, self._trainer.state.global_step
        lags = schedule.lags(step)
        if not (training and lags):
            if lags and self._kept is None:  # an evaluation, after which training goes on with its own weights
                self._kept = TemporaryDirectory(prefix="dc_trl-sampler-")
                self._engine.save_weights(Path(self._kept.name, SAMPLER_FOLDER))
            super()._bring_weights(training)
            if training:
                self._forget_kept()
                schedule.synced(step)
                if self.lagged is not None:
                    self.lagged.keep(step)
        elif self._kept is not None:
            self._engine.load_weights(Path(self._kept.name, SAMPLER_FOLDER))
            self._held = schedule.step
            self._forget_kept()

    def _forget_kept(self) -> None:
        if self._kept is not None:
            self._kept.cleanup()
            self._kept = None

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder):
        """Save the sampler's weights, unless new ones are due, and return the state for `load`, as JSON values."""
        schedule = self._schedule
        writes = self._trainer.args.should_save
        kept = schedule.every > 1 and not schedule.due(self._trainer.state.global_step)
        if kept and writes:
            if self._kept is None:
                self._engine.save_weights(Path(folder, SAMPLER_FOLDER))
            else:
                shutil.copytree(Path(self._kept.name, SAMPLER_FOLDER), Path(folder, SAMPLER_FOLDER))
        if self.lagged is not None and (kept or self._samples_ahead):
            self.lagged.save(folder, writes)
        weight_sync = {"schedule": asdict(schedule), "engine": self._engine_name, "kept": kept}
        return super().save(folder) | {"weight_sync": weight_sync}

    @property
    def _samples_ahead(self) -> bool:
        return False

    def _knows(self, step: int | None) -> bool:
        """Return whether the policy can have the weights of a step again, where something asks for the lag's part."""
        return self.lagged is None or step in self.lagged.steps

    def load(self, folder, state):
        """Sample with the weights that `save` saved until new ones are due."""
        if self.lagged is not None:
            self.lagged.load(folder, state["num_processes"] == self._trainer.accelerator.num_processes)
        if (weights := state["weight_sync"]) is not None:
            self._load_weights(folder, weights)
        super().load(folder, state)

    def _load_weights(self, folder: str, weights: dict[str, Any]) -> None:
        self._schedule = schedule = SyncSchedule(**weights["schedule"] | {"every": self._schedule.every})
        if not schedule.due(self._trainer.state.global_step):
            if weights["kept"] and weights["engine"] == self._engine_name and self._knows(schedule.step):
                self._engine.load_weights(Path(folder, SAMPLER_FOLDER))
                self._held = schedule.step
            else:
                schedule.step = None  # new weights are due

    @property
    def _engine_name(self) -> str:
        args = self._trainer.args
        beside = " adapter" if args.lora_deployment == "adapter" else ""
        return f"{'vllm' if self._trainer.use_vllm else 'replica'} {args.deployment_scheme}{beside}"

    def start_again(self):
        super().start_again()
        self._schedule = SyncSchedule(self._trainer.args.weight_sync_steps)
        self._forget_kept()
        if self.lagged is not None:
            self.lagged.clear()
