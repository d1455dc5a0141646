"""What is made of what: the values that all stages of a job share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from beam_inference.config.formats import OutputSpec
from beam_inference.config.storage import Storage
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx, ceil_div
from beam_inference.segmentation.scratch import Scratch


@dataclass(frozen=True, kw_only=True)
class LabelPlan:
    """Chunks whose labels become objects with ids, in a volume.

    Attributes:
        source: URL of the input. scale: which of its scales.
        grid: the chunks; they tile the whole volume.
        min_size: objects of fewer voxels are removed.
        output: the output.
        storage: how object stores are reached.
        input_bytes: of the input, for each voxel of the output.
        scratch_url: a folder that the stages have for themselves.
    """

    source: str
    scale: int
    grid: ChunkGrid
    min_size: int
    output: OutputSpec
    storage: Storage
    input_bytes: int
    scratch_url: str = ""
    kind: ClassVar[str]
    table_folder: ClassVar[str]
    working_bytes: ClassVar[int]
    more_memory: ClassVar[str] = ""

    @property
    def bytes_per_voxel(self) -> int:
        """Memory that a chunk takes while it is worked on: measured, see the commands' pages under docs/."""
        return self.working_bytes + self.input_bytes

    @property
    def table_url(self) -> str:
        """The folder of the table's parts, in the output's."""
        return f"{self.output.url}/{self.table_folder}"

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

    def row(self, z: int, y: int) -> int:
        """The number of a row of chunks along x."""
        return z * self.grid.shape[1] + y

    def planes_of(self, z: int) -> tuple[int, int]:
        """The planes of a slab of chunks, counted from the volume's first."""
        start, stop = self.grid.axis_interval(0, z)
        return start - self.grid.roi.start[0], stop - self.grid.roi.start[0]


@dataclass(frozen=True, kw_only=True)
class ComponentPlan(LabelPlan):
    """Connected components.

    Attributes:
        channel: of the input.
        threshold: voxels of this value or more are foreground; None: the input is a segmentation, 0
            is background.
        connectivity: 6, 18 or 26 neighbours.
    """

    channel: int
    threshold: float | None
    connectivity: int
    kind: ClassVar[str] = "components"
    table_folder: ClassVar[str] = "components"
    working_bytes: ClassVar[int] = 16

    def foreground(self, values: NDArray[Any]) -> NDArray[Any]:
        """What is labelled of the input's voxels: booleans, or a segmentation as it is. NaN is background."""
        return values if self.threshold is None else values >= self.threshold


@dataclass(frozen=True, kw_only=True)
class SegmentationPlan(LabelPlan):
    """Fragments of a watershed of affinities, agglomerated by mean affinity.

    Attributes:
        channels: of the input: the affinities along z, y and x.
        to_next: whether a voxel's affinities are those to the next voxels; else to the ones before.
        low: of lower affinity, voxels are not joined by the watershed. high: of this affinity or
            more, they always are.
        threshold: fragments are joined while their mean affinity is at least this.
        floats: whether affinities are no integers.
    """

    channels: Zyx
    to_next: bool
    low: float
    high: float
    threshold: float
    floats: bool
    kind: ClassVar[str] = "segment"
    table_folder: ClassVar[str] = "segments"
    working_bytes: ClassVar[int] = 48
    more_memory: ClassVar[str] = ", and 2.6 kB for each fragment in it"

    @property
    def levels(self) -> tuple[Zyx, ...]:
        """The shapes of the grids of chunks, of groups of 2 × 2 × 2 of them, of groups of those, … to one of all."""
        shapes = [self.grid.shape]
        while max(shapes[-1]) > 1:
            z, y, x = (ceil_div(n, 2) for n in shapes[-1])
            shapes.append((z, y, x))
        return tuple(shapes)
