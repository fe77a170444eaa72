"""The tokens of a packed row by trajectory: AsyncGRPO has them one after the other, the constraint as a matrix."""

import torch
from torch import Tensor


class Trajectories:
    """Which of M tokens belong to which of B trajectories, at most T tokens each.

    Args:
        segment_id: number of each token's trajectory, shape (M,), ascending from 0.
    """

    def __init__(self, segment_id: Tensor):
        counts = torch.bincount(segment_id)
        self._row = segment_id
        self._column = (
            torch.arange(len(segment_id), device=segment_id.device) - (counts.cumsum(0) - counts)[segment_id]
        )
        self._shape = (len(counts), int(counts.max()))

    def matrix(self, values: Tensor) -> Tensor:
        """Values of the tokens, shape (M,), as (B, T) with zeros after the end of each trajectory."""
        matrix = values.new_zeros(self._shape)
        matrix[self._row, self._column] = values
        return matrix

    def flat(self, matrix: Tensor) -> Tensor:
        """The inverse: shape (B, T) as (M,)."""
        return matrix[self._row, self._column]
