"""`OverlappedSampler`: the next generation batch is sampled beside training.

When training takes up a generation batch, the server gets the present weights and begins to sample the next batch
while this one is scored and trained on. Each batch is thus sampled with the weights from before the steps on the
previous one, and is one generation batch old when it is trained on. The first batch of an epoch is not sampled ahead.
"""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from .lagging import SAMPLER_FOLDER, LaggingSampler
from .rollout_ahead import OverlappedGeneration


AHEAD_FILE = "rollouts_ahead.json"  # of a checkpoint: the batch of all processes that was sampled beside training

logger = get_logger(__name__)


class OverlappedSampler(LaggingSampler):
    """A sampler whose server samples the next generation batch while the present one trains.

    Args:
        trainer, truncates: see `Sampler`.
        engine: server that can sample ahead.
        distance: number of micro-batches that one generation batch is used for.
    """

    _engine: OverlappedGeneration
    _versions = 2  # of the batch that trains and of the one ahead

    def __init__(self, trainer: Any, engine: OverlappedGeneration, truncates: bool, distance: int):
        super().__init__(trainer, engine, truncates)
        self._look_ahead = LookAhead(distance)
        self._distance = distance
        self._first_of_step = 0  # micro-batches that were done at the beginning of the present optimizer step
        self._ahead_of: int | None = None  # the step whose weights sample the batch ahead; None if there is none
        self._claimed = False  # whether the present batch was sampled ahead
        self._sampler_step = 0  # the step whose weights have sampled the present batch

    # --- the next batch ---------------------------------------------------------------------------------------------

    def look_ahead(self, batches, count):
        self._first_of_step = self._trainer._step
        return iter(self._look_ahead.take(batches, count))

    def _next_prompts(self) -> list[list[int]] | None:
        """Return token ids of the next generation batch of this epoch; None if no next one is trained on."""
        trainer = self._trainer
        index = trainer._step - self._first_of_step + self._distance
        if trainer.state.global_step + index // trainer.args.gradient_accumulation_steps >= trainer.state.max_steps:
            return None
        rows = self._look_ahead[index]
        return None if rows is None else trainer._tokenize_prompts([row["prompt"] for row in rows])[0]

    # --- take up a batch and begin the next one ---------------------------------------------------------------------

    def begin_batch(self, prompts):
        if self._trainer.model.training and self._ahead_of is not None:
            with self._trainer.clock.part("waiting"):
                self._take_up(prompts, self._ahead_of)
        super().begin_batch(prompts)

    def _take_up(self, prompts: list, sampler_step: int) -> None:
        """Wait for the batch ahead, and claim it if it is the one that training needs now."""
        prompt_ids = self._trainer._tokenize_prompts(prompts)[0]
        claim = self._engine.claim(prompt_ids, self._trainer.num_generations)
        self._ahead_of = None
        self._claimed = claim is not None
        if claim is not None:
            self._ahead_of, self._sampler_step = sampler_step, sampler_step
            self._log_overlap(*claim)
        else:
            logger.warning(
                "The generation batch that was sampled ahead has other prompts or settings than the run needs now: it "
                "is discarded, and a new one is sampled."
            )

    def _bring_weights(self, training):
        if not (training and self._claimed):  # a claimed batch is sampled already
            super()._bring_weights(training)

    def turn(self, of_trl, prompt_ids):
        begin = time.perf_counter()
        output = super().turn(of_trl, prompt_ids)
        if self._trainer.model.training:
            if not self._claimed:
                self._sampler_step = self._begun_with()
                self._log_overlap(seconds := time.perf_counter() - begin, seconds)
            self._claimed = False
            self._begin_next()
        return output

    def _begin_next(self) -> None:
        """Make the server sample the next batch with the weights that are due."""
        prompt_ids = self._next_prompts()
        if prompt_ids is None:
            self._engine.drop()
            self._ahead_of = None
            return
        self.bring_weights(training=True)  # on failure the present batch is not lost, and can be saved
        self._engine.begin(prompt_ids, self._trainer.num_generations)
        self._ahead_of = self._begun_with()

    def _begun_with(self) -> int:
        """Return the step of the weights with which the server samples the batch ahead."""
        return self._trainer.state.global_step - super()._age()

    def _age(self):
        return self._trainer.state.global_step - self._sampler_step

    def _log_overlap(self, seconds: float, waited: float) -> None:
        self._trainer.add_metric("overlap/sampling_seconds", seconds)
        self._trainer.add_metric("overlap/waiting_seconds", waited)
        self._trainer.add_metric("overlap/hidden_fraction", max(0.0, 1 - waited / seconds))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder):
        """Save as `LaggingSampler.save` does, with the batch ahead once it is sampled.

        If that batch could not be sampled, the resumed run samples it, with the weights of its turn while they are
        there: an evaluation may have brought newer ones.
        """
        state, files = super().save(folder), (Path(folder, AHEAD_FILE), Path(folder, SAMPLER_FOLDER))
        if self._ahead_of is not None and self._engine.save_ahead(*files, held=self._held == self._ahead_of):
            state["rollout_ahead"] = {"weights_of_step": self._ahead_of, "engine": self._engine_name}
        return state

    @property
    def _samples_ahead(self):
        return self._ahead_of is not None

    def _load_ahead(self, folder, state):
        if state["engine"] != self._engine_name or not self._knows(state["weights_of_step"]):
            super()._load_ahead(folder, state)
            return
        self._ahead_of = state["weights_of_step"]
        if self._engine.load_ahead(Path(folder, AHEAD_FILE), Path(folder, SAMPLER_FOLDER)):
            self._held = self._ahead_of

    def start_again(self):
        super().start_again()
        self._ahead_of = None
        self._engine.drop()


class LookAhead:
    """Returns the micro-batches of an iterator, and reads some of those that follow in advance.

    It never looks beyond the end of the iterator; another iterator is another epoch and begins anew.

    Args:
        distance: number of micro-batches that are read beyond those that were returned, at least 1.
    """

    def __init__(self, distance: int):
        self._distance = distance
        self._iterator: Iterator[Any] | None = None
        self._known: list[Any] = []  # micro-batches that were returned last, and those that follow
        self._returned = 0  # number of those that were returned last

    def take(self, iterator: Iterator[Any], count: int) -> list[Any]:
        """Return the next `count` micro-batches of the iterator, or fewer at its end."""
        if iterator is not self._iterator:
            self._iterator, self._known, self._returned = iterator, [], 0
        del self._known[: self._returned]
        self._known += islice(iterator, max(0, count + self._distance - len(self._known)))
        taken = self._known[:count]
        self._returned = len(taken)
        return taken

    def __getitem__(self, index: int) -> Any | None:
        """Return a micro-batch, counted from the first one returned last; None where the iterator ended before it.

        `index` may be at most `distance` beyond those that were returned last.
        """
        return self._known[index] if index < len(self._known) else None
