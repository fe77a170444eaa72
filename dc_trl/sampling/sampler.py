"""`Sampler`: the engine that samples, with the weights that are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import transformers
from accelerate.logging import get_logger

from ..quantization.policy import unwrapped
from .empty_completions import with_ends, without_rest


# Imported only where a run samples with it.
if TYPE_CHECKING:
    from .replica import Replica
    from .versions import SamplerWeights


# Token ids of each completion of one turn, and their log-probabilities, if the engine returns any.
Completions: TypeAlias = tuple[list[list[int]], list[list[float]] | None]

logger = get_logger(__name__)


class Sampler:
    """The engine of a trainer, which samples each batch with the present weights; see `LaggingSampler`.

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

    age = 0
    lagged: SamplerWeights | None = None

    def __init__(self, trainer: Any, engine: Any, truncates: bool = False):
        self._trainer, self._engine = trainer, engine
        self.truncates = truncates
        self._held: int | None = None  # the step whose weights the engine holds

    @property
    def identity(self) -> tuple[str, str, str | None]:
        """Engine, version and KV-cache dtype that sample; the dtype is None where it is not known."""
        return ("transformers", transformers.__version__, None) if self._engine is None else self._engine.identity

    @property
    def replica(self) -> Replica | None:
        """The in-process engine; None where another one samples."""
        return None if self._trainer.use_vllm else self._engine

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
        """Log the step whose weights have sampled this number of completions, where it may be an earlier one."""

    def look_ahead(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        """Return the iterator from which training reads the next `count` micro-batches of prompts."""
        return batches

    # --- weights of the engine --------------------------------------------------------------------------------------

    def bring_weights(self, training: bool) -> None:
        """Load the weights that should sample into the engine: the present ones, or in training perhaps older ones."""
        if self._engine is None:
            return
        with self._trainer.clock.part("sync"):
            self._bring_weights(training)
            self._trainer._last_loaded_step = self._trainer.state.global_step  # TRL has no weights to load

    def _bring_weights(self, training: bool) -> None:
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
        """Save what a resumed run samples with beside the present weights, and return the state for `load` as JSON."""
        return {"weight_sync": None, "rollout_ahead": None}

    def load(self, folder: str, state: dict[str, Any]) -> None:
        """Sample on with what `save` saved."""
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
        self._held = None
