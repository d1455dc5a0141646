"""The volume from one side: what is known of its chunks, in the cells of a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import ceil_div

CELLS = 96
"""Largest number of cells on each side of the picture."""


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Chunks seen along z; or along y or x, if the grid is one chunk thick there and not along z.

    A cell is a column of chunks; in large grids, of some neighbouring ones.
    """

    grid: ChunkGrid

    @property
    def axis(self) -> int:
        """The axis that is looked along."""
        nz, ny, nx = self.grid.shape
        return 0 if nz == 1 or min(ny, nx) > 1 else 1 if ny == 1 else 2

    @property
    def plane(self) -> tuple[int, int]:
        """The axes of rows and columns."""
        rows, columns = (axis for axis in range(3) if axis != self.axis)
        return rows, columns

    @property
    def chunks_per_cell(self) -> tuple[int, int]:
        """Chunks in a cell, on the axes of rows and columns."""
        rows, columns = (ceil_div(self.grid.shape[axis], CELLS) for axis in self.plane)
        return rows, columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of cells."""
        rows, columns = (
            ceil_div(self.grid.shape[a], n)
            for a, n in zip(self.plane, self.chunks_per_cell, strict=True)
        )
        return rows, columns

    def cells(self, chunks: ArrayLike) -> NDArray[np.int64]:
        """The cell, counted row by row, in which each of some chunks is seen."""
        indices = np.asarray(chunks, np.int64)
        _, ny, nx = self.grid.shape
        position = (indices // (ny * nx), indices // nx % ny, indices % nx)
        row, column = (
            position[a] // n for a, n in zip(self.plane, self.chunks_per_cell, strict=True)
        )
        return np.asarray(row * self.shape[1] + column)

    def counts(self, chunks: ArrayLike) -> NDArray[np.int64]:
        """Number of the given chunks that are seen in each cell."""
        return np.bincount(self.cells(chunks), minlength=math.prod(self.shape)).reshape(self.shape)

    def totals(self) -> NDArray[np.int64]:
        """Number of chunks in each cell."""
        sides = [
            np.bincount(np.arange(self.grid.shape[axis]) // n)
            for axis, n in zip(self.plane, self.chunks_per_cell, strict=True)
        ]
        return np.multiply.outer(*sides) * self.grid.shape[self.axis]

    def means(self, chunks: Sequence[int], values: Sequence[float]) -> NDArray[np.float64]:
        """Mean of the values of some chunks in each cell; NaN where there is none."""
        sums = np.bincount(self.cells(chunks), values, minlength=math.prod(self.shape)).reshape(
            self.shape
        )
        counts = self.counts(chunks)
        return np.where(counts, sums / np.maximum(counts, 1), np.nan)

    def maxima(self, chunks: Sequence[int], values: Sequence[float]) -> NDArray[np.float64]:
        """The largest value of some chunks in each cell; NaN where there is none."""
        largest = np.full(math.prod(self.shape), -np.inf)
        np.maximum.at(largest, self.cells(chunks), np.asarray(values, float))
        largest[np.isneginf(largest)] = np.nan
        return largest.reshape(self.shape)
