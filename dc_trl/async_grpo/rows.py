"""Converts between AsyncGRPO's packed row of tokens and the constraint's matrix with one row for each trajectory."""

import torch
from torch import Tensor


class Trajectories:
    """The assignment of M tokens to B trajectories of at most T tokens each.

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
        """Return values of the tokens, shape (M,), as a matrix (B, T) with zeros after the end of each trajectory."""
        matrix = values.new_zeros(self._shape)
        matrix[self._row, self._column] = values
        return matrix

    def flat(self, matrix: Tensor) -> Tensor:
        """Return a matrix of shape (B, T) as values of the tokens, shape (M,); the inverse of `matrix`."""
        return matrix[self._row, self._column]
