"""Labelled progress bars of evaluations, in place of transformers' own."""

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers import ProgressCallback, Trainer


def progress_callbacks(trainer: Trainer) -> list[ProgressCallback]:
    """Return the callbacks that show progress bars; none with `disable_tqdm`."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ProgressCallback)]


@contextmanager
def evaluation_bar(trainer: Trainer, label: str, batches: int) -> Iterator[tqdm]:
    """Yield a bar with the remaining time in the main process of a trainer that shows bars, otherwise a hidden one.

    Args:
        trainer: trainer that evaluates.
        label: name of what is evaluated.
        batches: number of updates until the bar is full.
    """
    hidden = not (progress_callbacks(trainer) and trainer.is_world_process_zero())
    with tqdm(total=batches, desc=label, unit="batch", leave=False, dynamic_ncols=True, disable=hidden) as bar:
        yield bar
