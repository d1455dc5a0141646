"""What is made of what: the one value that all stages share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from beam_inference.grids import ChunkGrid
from beam_inference.outputs import OutputSpec
from beam_inference.segmentation.scratch import Scratch
from beam_inference.storage import Storage


@dataclass(frozen=True)
class Components:
    """What is made of what.

    Attributes:
        source: URL of the input. scale, channel: which of its scales and channels.
        threshold: voxels of this value or more are foreground; None: the input is a segmentation, 0 is background.
        connectivity: 6, 18 or 26 neighbours.
        min_size: components of fewer voxels are removed.
        grid: the chunks; they tile the whole volume.
        output: the output.
        storage: how object stores are reached.
        input_itemsize: bytes of an input voxel.
        scratch_url: a folder that the stages have for themselves.
    """

    source: str
    scale: int
    channel: int
    threshold: float | None
    connectivity: int
    min_size: int
    grid: ChunkGrid
    output: OutputSpec
    storage: Storage
    input_itemsize: int
    scratch_url: str = ""

    @property
    def table_url(self) -> str:
        """The folder of the table's parts, in the output's."""
        return f"{self.output.url}/components"

    def scratch(self) -> Scratch:
        """The arrays that stages leave for one another."""
        return Scratch(self.scratch_url, self.storage)

    def scratch_labels(self) -> OutputSpec:
        """The volume of the chunks' own labels."""
        return OutputSpec(
            url=f"{self.scratch_url}/labels",
            format="precomputed",
            encoding="compressed_segmentation",
            dtype="uint32",
            channels=1,
            bounds=self.grid.roi,
            block_shape=self.output.block_shape,
            voxel_size_nm=self.output.voxel_size_nm,
            storage=self.storage,
        )

    def foreground(self, values: NDArray[Any]) -> NDArray[Any]:
        """What is labelled of the input's voxels: booleans, or a segmentation as it is. NaN is background."""
        return values if self.threshold is None else values >= self.threshold

    def row(self, z: int, y: int) -> int:
        """The number of a row of chunks along x."""
        return z * self.grid.shape[1] + y

    def planes_of(self, z: int) -> tuple[int, int]:
        """The planes of a slab of chunks, counted from the volume's first."""
        start, stop = self.grid.axis_interval(0, z)
        return start - self.grid.roi.start[0], stop - self.grid.roi.start[0]
