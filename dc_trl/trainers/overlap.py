"""Sampling beside training: `rollouts.overlap` in the hooks of TRL's trainer.

When training takes up a generation batch, the server gets the present weights and begins to sample the next batch
while this one is scored and trained on. Each batch is thus sampled with the weights from before the steps on the
previous one, and is one generation batch old when it is trained on. The first batch of an epoch is not sampled ahead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers import ProcessorMixin
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from ..config import DCGRPOConfig
from ..resuming.checkpoints import AHEAD_FILE, SAMPLER_FOLDER
from ..rollouts.look_ahead import LookAhead
from .deployed import DeployedPolicyTrainer


# Imported only where a run overlaps.
if TYPE_CHECKING:
    from ..rollouts.overlap import OverlappedGeneration


logger = get_logger(__name__)


class OverlapTrainer(DeployedPolicyTrainer):
    """A trainer that samples beside training if `rollout_overlap` is set, and otherwise acts as its base class.

    Raises:
        ValueError: rollouts have several turns, or prompts have images.
    """

    vllm_generation: OverlappedGeneration  # if `rollout_overlap` is set

    # Defined by TRL
    _step: int  # number of micro-batches on which this object has trained

    _first_of_step = 0  # value of `_step` at the beginning of the present optimizer step
    _ahead_of: int | None = None  # the step whose weights sample the batch ahead; None if there is none
    _claimed = False  # whether the present batch was sampled ahead
    _sampler_step = 0  # the step whose weights have sampled the present batch
    sampling_seconds = 0.0  # duration of the sampling of all generation batches of training
    waiting_seconds = 0.0  # part of it during which training only waited

    def __init__(self, model, reward_funcs, args: DCGRPOConfig, *positional, **kwargs):
        if args.rollout_overlap:
            given = signature(GRPOTrainer).bind_partial(model, reward_funcs, args, *positional, **kwargs)
            _require_one_turn(given.arguments)
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._look_ahead = LookAhead(self._micro_batches_per_iteration)

    def _build_vllm(self):
        if self.args.rollout_overlap and isinstance(self.processing_class, ProcessorMixin):
            raise ValueError(
                "rollout_overlap=True samples text only, and the processing_class is a multimodal processor: pass its "
                "tokenizer, or set rollout_overlap=False."
            )
        return super()._build_vllm()

    @property
    def _micro_batches_per_iteration(self) -> int:
        return self.args.steps_per_generation * self.num_iterations

    # --- the next batch ----------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self.args.rollout_overlap:
            epoch_iterator = iter(self._look_ahead.take(epoch_iterator, num_batches))
            self._first_of_step = self._step
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _next_prompts(self) -> list[list[int]] | None:
        """Return token ids of the next generation batch of this epoch; None if no next one is trained on."""
        index = self._step - self._first_of_step + self._micro_batches_per_iteration
        if self.state.global_step + index // self.args.gradient_accumulation_steps >= self.state.max_steps:
            return None
        rows = self._look_ahead[index]
        return None if rows is None else self._tokenize_prompts([row["prompt"] for row in rows])[0]

    # --- take up a batch and begin the next one ---------------------------------------------------------------------

    def _generate(self, prompts):
        if self.args.rollout_overlap and self.model.training and self._ahead_of is not None:
            self._take_up(prompts, self._ahead_of)
        return super()._generate(prompts)

    def _take_up(self, prompts: list, sampler_step: int) -> None:
        """Wait for the batch ahead, and claim it if it is the one that training needs now."""
        prompt_ids, _, _ = self._tokenize_prompts(prompts)
        with profiling_context(self, "vLLM.wait"):
            claim = self.vllm_generation.claim(prompt_ids, self.num_generations)
        self._ahead_of = None
        self._claimed = claim.fits
        if claim.fits:
            self._ahead_of, self._sampler_step = sampler_step, sampler_step
            self._tell_overlap(claim.seconds, claim.waited)
        else:
            logger.warning(
                "The generation batch that was sampled ahead has other prompts or settings than the run needs now: it "
                "is discarded, and a new one is sampled."
            )

    def _bring_weights(self, training):
        if training and self._claimed:
            self._last_loaded_step = self.state.global_step  # it is sampled, so TRL must not sync either
        else:
            super()._bring_weights(training)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        begin = time.perf_counter()
        output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.args.rollout_overlap and self.model.training:
            if not self._claimed:
                self._sampler_step = self._begun_with()
                self._tell_overlap(seconds := time.perf_counter() - begin, seconds)
            self._claimed = False
            self._begin_next()
        return output

    def _begin_next(self) -> None:
        """Make the server sample the next batch with the weights that are due."""
        prompt_ids = self._next_prompts()
        if prompt_ids is None:
            self.vllm_generation.drop()
            self._ahead_of = None
            return
        self._bring_weights(training=True)  # on failure the present batch is not lost, and can be saved
        self.vllm_generation.begin(prompt_ids, self.num_generations)
        self._ahead_of = self._begun_with()

    def _begun_with(self) -> int:
        """Count a generation batch that the server samples now, and return the step whose weights it uses."""
        step = self.state.global_step
        return step - self._schedule.sampled(step)

    # --- metrics ----------------------------------------------------------------------------------------------------

    @property
    def _may_lag(self) -> bool:
        return self.args.rollout_overlap or super()._may_lag

    def _age_of_rollout(self) -> int:
        if self.args.rollout_overlap:
            return self.state.global_step - self._sampler_step
        return super()._age_of_rollout()

    def _tell_overlap(self, seconds: float, waited: float) -> None:
        self.sampling_seconds += seconds
        self.waiting_seconds += waited
        metrics = self._metrics["train"]
        metrics["overlap/sampling_seconds"].append(seconds)
        metrics["overlap/waiting_seconds"].append(waited)
        metrics["overlap/hidden_fraction"].append(max(0.0, 1 - waited / seconds))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save_ahead(self, folder: str) -> dict[str, Any] | None:
        """Save the batch ahead once it is sampled, and return the state for `_load_ahead`; None if there is none.

        If it could not be sampled, the resumed run samples it, with the weights of its turn.
        """
        if self._ahead_of is None:
            return None
        saved = self.vllm_generation.save_ahead(Path(folder, AHEAD_FILE), Path(folder, SAMPLER_FOLDER))
        if saved is None:
            return None
        return {"weights_of_step": self._ahead_of, "engine": self._engine_name, "saved": saved}

    def _load_ahead(self, folder: str, state: dict[str, Any]) -> None:
        """Restore the batch ahead that `_save_ahead` saved."""
        if self.args.rollout_overlap and state["engine"] == self._engine_name:
            self._ahead_of = state["weights_of_step"]
            if state.get("saved") == "request":  # older checkpoints do not have the key
                self.vllm_generation.load_weights(Path(folder, SAMPLER_FOLDER))
                self._held = self._ahead_of
            self.vllm_generation.load_ahead(Path(folder, AHEAD_FILE))
        else:
            logger.warning(
                f"{folder} holds a generation batch that was sampled ahead by {state['engine']!r} with "
                "rollout_overlap=True, which this run does not use: it is discarded, and a new one is sampled."
            )

    def _sampling_state(self):
        ahead = self.vllm_generation.ahead if self.args.rollout_overlap else None
        return super()._sampling_state() | {"ahead_of": self._ahead_of, "ahead": ahead}

    def _return_to_sampling_state(self, state):
        super()._return_to_sampling_state(state)
        if self.args.rollout_overlap:
            self.vllm_generation.drop()
            self._ahead_of, self.vllm_generation.ahead = state["ahead_of"], state["ahead"]

    def _drop_ahead(self) -> None:
        """Discard the batch that an earlier training of this object sampled ahead, and its times."""
        self._ahead_of = None
        self.sampling_seconds = self.waiting_seconds = 0.0
        if self.args.rollout_overlap:
            self.vllm_generation.drop()


def _require_one_turn(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of the trainer that need several dependent requests for one rollout.

    Raises:
        ValueError: an argument is refused; the message names it.
    """
    for name in ("tools", "environment_factory", "rollout_func"):
        if arguments.get(name):
            raise ValueError(
                f"rollout_overlap=True samples a generation batch by one request ahead of training, and {name} "
                f"asks the engine turn by turn: leave {name} out, or set rollout_overlap=False."
            )
