"""Problems without end, in an order that a seed decides."""

import itertools
from collections.abc import Iterator

import numpy as np
from datasets import Dataset, IterableDataset


def stream(dataset: Dataset, seed: int, epochs: int | None = None) -> IterableDataset:
    """The rows in a new random order every epoch, read as they are asked for.

    The order depends on ``seed`` and the number of rows alone. To go on where a run stopped, keep the stream's
    `state_dict()` and give it to `load_state_dict()` of a new one.

    Args:
        dataset: at least one row.
        seed: at least 0.
        epochs: passes over the rows, at least 1; None: without end.

    Raises:
        ValueError: an argument is out of range.
    """
    if len(dataset) == 0:
        raise ValueError("dataset is empty: it needs at least one row.")
    if seed < 0:
        raise ValueError(f"seed={seed} is invalid: use a whole number, at least 0.")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs={epochs} is invalid: use at least 1, or None for no end.")
    order = IterableDataset.from_generator(_order, gen_kwargs={"size": len(dataset), "seed": seed, "epochs": epochs})
    return order.map(lambda row: dataset[row["row"]], remove_columns="row", features=dataset.features)


def _order(size: int, seed: int, epochs: int | None) -> Iterator[dict[str, int]]:
    for epoch in itertools.count() if epochs is None else range(epochs):
        for row in np.random.default_rng([seed, epoch]).permutation(size):
            yield {"row": int(row)}
