"""Bars of an evaluation that say what is evaluated, where transformers shows its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers import ProgressCallback, Trainer


def progress_callbacks(trainer: Trainer) -> list[ProgressCallback]:
    """The callbacks that show bars; none with `disable_tqdm`."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ProgressCallback)]


@contextmanager
def evaluation_bar(trainer: Trainer, label: str, batches: int) -> Iterator[tqdm]:
    """A bar with the time that is left, in the main process of a trainer that shows bars; else one that shows nothing.

    Args:
        trainer: that evaluates.
        label: what is evaluated.
        batches: how often the bar is to be updated.
    """
    hidden = not (progress_callbacks(trainer) and trainer.is_world_process_zero())
    with tqdm(total=batches, desc=label, unit="batch", leave=False, dynamic_ncols=True, disable=hidden) as bar:
        yield bar
