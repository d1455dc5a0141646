"""The plans of label jobs: the values that all stages of a job share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Json
from beam_inference.config.formats import OutputSpec
from beam_inference.config.storage import Storage
from beam_inference.geometry import zyx
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.unfinished import Making
from beam_inference.segmentation.scratch import Scratch
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import Volume

_STAGES_VERSION = 5
"""Counts up when the files that stages write for one another change."""


@dataclass(frozen=True, kw_only=True)
class LabelPlan:
    """Plan of a volume of labels: objects with ids, which extend over many chunks.

    Attributes:
        source: URL of the input.
        scale: number of the input's scale.
        grid: the chunks; they tile the whole volume.
        min_size: objects of fewer voxels are removed.
        output: the output.
        storage: how object stores are reached.
        input_dtype: name of the input's dtype.
        making: how far a job has made the input, at the plan.
        scratch_url: a folder for the files that stages write for one another; named by
            :func:`~beam_inference.segmentation.make_labels.make_labels`.
    """

    source: str
    scale: int
    grid: ChunkGrid
    min_size: int
    output: OutputSpec
    storage: Storage
    input_dtype: str
    making: Making = field(default_factory=Making)
    scratch_url: str = ""
    kind: ClassVar[str]
    """Name of the job's folder among records."""
    table_folder: ClassVar[str]
    """Name of the table's folder in the output, and of the objects in messages."""
    working_bytes: ClassVar[int]
    """Memory for each voxel of a chunk besides the input: measured, see the pages under docs/."""
    more_memory: ClassVar[str] = ""
    """Words on further memory, for messages."""
    cause_of_all: ClassVar[str]
    """Words on how one object can come to fill the volume, for messages."""

    @property
    def description(self) -> Json:
        """Everything that determines the bytes that are written, as JSON values."""
        return {
            "input": {
                "path": self.source,
                "scale": self.scale,
                "dtype": self.input_dtype,
                **self.making.description,
            },
            "min_size": self.min_size,
            "bounds": [self.grid.roi.start, self.grid.roi.stop],
            "chunk_shape": self.grid.chunk_shape,
            "output": {
                "format": self.output.format,
                "dtype": self.output.dtype,
                "block_shape": self.output.block_shape,
                "shard_shape": self.output.shard_shape,
                "voxel_size_nm": self.output.voxel_size_nm,
            },
            "stages": _STAGES_VERSION,
        }

    @property
    def cause_of_nothing(self) -> str:
        """Words on how there can be no object, for messages."""
        raise NotImplementedError

    @property
    def bytes_per_voxel(self) -> int:
        """Memory for each voxel of a chunk while it is worked on."""
        return self.working_bytes + len(self.read_channels) * np.dtype(self.input_dtype).itemsize

    @property
    def chunk_memory_bytes(self) -> int:
        """Memory of the largest chunk, which each of a worker's threads needs."""
        shape = zyx.minimum(self.grid.chunk_shape, self.grid.roi.shape)
        return math.prod(shape) * self.bytes_per_voxel

    @property
    def read_channels(self) -> Sequence[int]:
        """Channels of the input that are read."""
        raise NotImplementedError

    def open_input(self) -> Volume:
        """Open the channels of the input that are read.

        Raises:
            WorkerFault: it holds values of another dtype than at the plan.
        """
        channels = list(self.read_channels)
        volume = open_volume(self.source, scale=self.scale, channel=channels, storage=self.storage)
        volume.check_dtype(self.input_dtype)
        return volume

    @property
    def table_url(self) -> str:
        """The folder of the table's parts, inside the output."""
        return f"{self.output.url}/{self.table_folder}"

    def scratch(self) -> Scratch:
        """The arrays that stages write for one another."""
        return Scratch(self.scratch_url, self.storage)

    def row(self, z: int, y: int) -> int:
        """The number of a row of chunks along x, by its position on the grid of chunks."""
        return z * self.grid.shape[1] + y

    def planes_of(self, z: int) -> tuple[int, int]:
        """The first plane of a slab of chunks and the one after its last, from the volume's first.

        Args:
            z: position of the slab on the grid of chunks.
        """
        start, stop = self.grid.axis_interval(0, z)
        return start - self.grid.roi.start[0], stop - self.grid.roi.start[0]


@dataclass(frozen=True, kw_only=True)
class ComponentPlan(LabelPlan):
    """Plan of a volume's connected components.

    Attributes:
        channel: channel of the input.
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
    cause_of_all: ClassVar[str] = "nearly every voxel is foreground, and touches the next"

    @property
    def description(self) -> Json:
        """Everything that determines the bytes that are written, as JSON values."""
        shared = super().description
        return shared | {
            "input": shared["input"] | {"channel": self.channel},
            "threshold": self.threshold,
            "connectivity": self.connectivity,
        }

    @property
    def read_channels(self) -> Sequence[int]:
        """The one channel."""
        return [self.channel]

    @property
    def cause_of_nothing(self) -> str:
        """Words on how there can be no object, for messages."""
        if self.threshold is None:
            return f"{self.source} has no label but 0"
        return f"no voxel of {self.source} is at least {self.threshold:g}"

    def foreground(self, values: AnyArray) -> AnyArray:
        """The foreground among the input's voxels as booleans; a segmentation as it is.

        NaN is background.
        """
        return values if self.threshold is None else values >= self.threshold


@dataclass(frozen=True, kw_only=True)
class SegmentationPlan(LabelPlan):
    """Plan of a segmentation: fragments of a watershed, agglomerated by mean affinity.

    Attributes:
        channels: channels of the input that hold the affinities along z, y and x.
        to_next: whether a voxel's affinities are to the next voxels; else to the previous ones.
        low: the watershed joins no voxels of a lower affinity.
        high: the watershed joins all voxels of this affinity or more.
        threshold: fragments are joined while their mean affinity is at least this.
        floats: whether affinities are floating-point numbers.
        name: name of the output among those at other thresholds, which share the scratch folder;
            empty where there is one.
    """

    channels: Zyx
    to_next: bool
    low: float
    high: float
    threshold: float
    floats: bool
    name: str = ""
    kind: ClassVar[str] = "segment"
    table_folder: ClassVar[str] = "segments"
    working_bytes: ClassVar[int] = 24
    more_memory: ClassVar[str] = ", and 2.6 kB for each fragment in it"
    cause_of_all: ClassVar[str] = "nearly all voxels were joined"

    @property
    def description(self) -> Json:
        """Everything that determines the bytes that are written, as JSON values."""
        shared = super().description
        return shared | {
            "input": shared["input"] | {"channels": self.channels, "to_next": self.to_next},
            "low": self.low,
            "high": self.high,
            "threshold": self.threshold,
        }

    @property
    def read_channels(self) -> Sequence[int]:
        """Those of the affinities."""
        return self.channels

    @property
    def cause_of_nothing(self) -> str:
        """Words on how there can be no object, for messages."""
        return f"no affinity of {self.source} is at least {self.low:g}"

    @property
    def tiers(self) -> tuple[Zyx, ...]:
        """Shapes of the grids on which regions are joined.

        The first is the grid of chunks, the next that of groups of 2 × 2 × 2 chunks, then that of
        groups of those, up to one group of all.
        """
        shapes = [self.grid.shape]
        while max(shapes[-1]) > 1:
            shapes.append(zyx.ceil_div_each(shapes[-1], (2, 2, 2)))
        return tuple(shapes)

    def joins(self) -> Scratch:
        """The arrays that stages write for one another which depend on the threshold."""
        url = f"{self.scratch_url}/{self.name}" if self.name else self.scratch_url
        return Scratch(url, self.storage)
