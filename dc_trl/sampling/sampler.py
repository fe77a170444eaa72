"""`Sampler`: the engine that samples, and which weights it holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import transformers
from accelerate.logging import get_logger

from ..quantization.policy import unwrapped
from .empty_completions import with_ends, without_rest
from .versions import SamplerWeights, SyncSchedule


# Imported only where a run samples with it.
if TYPE_CHECKING:
    from .replica import Replica


SAMPLER_FOLDER = "sampler"  # of a checkpoint: the sampler's weights if they lag behind the trained ones

# Token ids of each completion of one turn, and their log-probabilities, if the engine returns any.
Completions: TypeAlias = tuple[list[list[int]], list[list[float]] | None]

logger = get_logger(__name__)


class Sampler:
    """The engine of a trainer, and the schedule of its weights.

    Args:
        trainer: trainer whose policy samples.
        engine: engine with its own copy of the weights, a `Replica` or a vLLM backend; None if the policy samples
            itself (`model.generate`) or a `rollout_func` does.
        truncates: whether top-p, top-k or min-p cut off what the engine samples.

    Attributes:
        age: optimizer steps from the weights that sampled the latest batch to the policy's; 0 in an evaluation.
        lagged (`SamplerWeights` or `None`): the weights that sample, where they may lag and something asks for the
            lag's part of the discrepancy.
    """

    _versions = 1  # of the weights, that batches which are still to be trained on were sampled with

    def __init__(self, trainer: Any, engine: Any, truncates: bool = False):
        self._trainer, self._engine = trainer, engine
        self.truncates = truncates
        self._schedule = SyncSchedule(trainer.args.weight_sync_steps)
        self._held: int | None = None  # the step whose weights the engine holds
        self._kept: TemporaryDirectory[str] | None = None  # the weights of training while an evaluation has others
        self.age = 0
        self.lagged: SamplerWeights | None = None
        if self.may_lag and trainer.args.split_by is not None:
            self.lagged = SamplerWeights(unwrapped(trainer.accelerator, trainer.model), self._versions)

    @property
    def identity(self) -> tuple[str, str, str | None]:
        """Engine, version and KV-cache dtype that sample; the dtype is None where it is not known."""
        return ("transformers", transformers.__version__, None) if self._engine is None else self._engine.identity

    @property
    def replica(self) -> Replica | None:
        """The in-process engine; None where another one samples."""
        return None if self._trainer.use_vllm else self._engine

    @property
    def may_lag(self) -> bool:
        """Whether rollouts of training may have weights from before the present step."""
        return self._trainer.args.may_lag

    # --- a batch ----------------------------------------------------------------------------------------------------

    def begin_batch(self, prompts: list) -> None:
        """Bring the weights that should sample these prompts."""
        self.bring_weights(self._trainer.model.training)

    def turn(self, of_trl: Callable[[], Completions], prompt_ids: list[list[int]]) -> Completions:
        """Return one turn of completions, of the replica or, by `of_trl`, of TRL's engine, by their ends."""
        trainer = self._trainer
        if self.replica is None:
            completion_ids, logprobs = of_trl()
            if trainer.use_vllm and not (trainer.args.generation_kwargs or {}).get("ignore_eos"):
                completion_ids, logprobs = without_rest(completion_ids, logprobs, trainer.eos_token_ids)
        else:
            completion_ids, logprobs = self.replica.generate(
                prompt_ids, trainer.generation_config, trainer.temperature, among_kept=self.truncates
            )
        tokenizer = trainer._tokenizer
        ends = [tokenizer.eos_token_id, *trainer.eos_token_ids, tokenizer.pad_token_id]  # as TRL reads them
        return with_ends(completion_ids, logprobs, ends)

    def end_batch(self, completions: int) -> None:
        """Log the step whose weights have sampled this number of completions."""
        if self._engine is None:
            return
        trainer, step = self._trainer, self._trainer.state.global_step
        training = trainer.model.training
        self.age = self._age() if training else 0
        if not (self.may_lag or trainer.args.split_by is not None):  # beside the lag's part, 0 says that there is none
            return
        trainer._pending_extra_logs["weights_of_step"].extend([step - self.age] * completions)
        if training:
            trainer.add_metric("sync/age", self.age)
            trainer.add_metric("sync/count", self._schedule.syncs)

    def sampling_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the policy has the weights that sampled the latest batch, which lag."""
        assert self.lagged is not None
        return self.lagged.in_place(self._trainer.state.global_step - self.age)

    def look_ahead(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """Return the iterator from which training reads the next `count` micro-batches of prompts."""
        return batches

    def _age(self) -> int:
        """Return the age of the weights of a generation batch of training, in optimizer steps."""
        return self._schedule.age(self._trainer.state.global_step)

    # --- weights of the engine --------------------------------------------------------------------------------------

    def bring_weights(self, training: bool) -> None:
        """Load the weights that should sample into the engine: the present ones, or in training perhaps older ones."""
        if self._engine is None:
            return
        with self._trainer.clock.part("sync"):
            self._bring_weights(training)
            self._trainer._last_loaded_step = self._trainer.state.global_step  # TRL has no weights to load

    def _bring_weights(self, training: bool) -> None:
        schedule, step = self._schedule, self._trainer.state.global_step
        lags = schedule.lags(step)
        if not (training and lags):
            if lags and self._kept is None:  # an evaluation, after which training goes on with its own weights
                self._kept = TemporaryDirectory(prefix="dc_trl-sampler-")
                self._engine.save_weights(Path(self._kept.name, SAMPLER_FOLDER))
            self._sync()
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

    def _sync(self) -> None:
        """Load the present weights into the engine."""
        trainer = self._trainer
        if not trainer.use_vllm:
            # Requantizing costs less than one decoding step; tracking changes of the weights would be less reliable.
            self._engine.sync(unwrapped(trainer.accelerator, trainer.model_wrapped))
        elif self._held != trainer.state.global_step:
            self._engine.sync_weights()
            for name, value in self._engine.last_sync.items():
                trainer.add_metric(f"sync/{name}", value, "train")
        self._held = trainer.state.global_step

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> dict[str, Any]:
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
        return {"weight_sync": weight_sync, "rollout_ahead": None}

    @property
    def _samples_ahead(self) -> bool:
        return False

    def _knows(self, step: int | None) -> bool:
        """Return whether the policy can have the weights of a step again, where something asks for the lag's part."""
        return self.lagged is None or step in self.lagged.steps

    def load(self, folder: str, state: dict[str, Any]) -> None:
        """Sample with the weights that `save` saved until new ones are due."""
        weights = state["weight_sync"]
        if self.lagged is not None:
            self.lagged.load(folder, state["num_processes"] == self._trainer.accelerator.num_processes)
        self._schedule = schedule = SyncSchedule(**weights["schedule"] | {"every": self._schedule.every})
        if not schedule.due(self._trainer.state.global_step):
            if weights["kept"] and weights["engine"] == self._engine_name and self._knows(schedule.step):
                self._engine.load_weights(Path(folder, SAMPLER_FOLDER))
                self._held = schedule.step
            else:
                schedule.step = None  # new weights are due
        if state["rollout_ahead"] is not None:
            self._load_ahead(folder, state["rollout_ahead"])

    def _load_ahead(self, folder: str, state: dict[str, Any]) -> None:
        logger.warning(
            f"{folder} holds a generation batch that was sampled ahead by {state['engine']!r} with "
            "rollout_overlap=True, which this run does not use, or cannot score without the weights that sampled it: "
            "it is discarded, and a new one is sampled."
        )

    def start_again(self) -> None:
        """Forget an earlier training of the same trainer; the engine holds weights of that training."""
        self._schedule, self._held = SyncSchedule(self._trainer.args.weight_sync_steps), None
        self._forget_kept()
        if self.lagged is not None:
            self.lagged.clear()

    @property
    def _engine_name(self) -> str:
        args = self._trainer.args
        beside = " adapter" if args.lora_deployment == "adapter" else ""
        return f"{'vllm' if self._trainer.use_vllm else 'replica'} {args.deployment_scheme}{beside}"
