"""The small copies that are written beside outputs: means of cells, in few values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.errors import WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.parts import output_spec
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.operators.downsampling import mean
from beam_inference.operators.quantize import quantize
from beam_inference.volumes.outputs import open_output
from beam_inference.volumes.volume import Volume


@dataclass(frozen=True, slots=True)
class OpenPreview:
    """A preview of an output, open.

    Attributes:
        key: its key in the job file.
        source: the number of its output among those of the job.
        scale: voxels of the output along each side of a voxel, ZYX.
        value_range: what maps onto the full range of its dtype.
        volume: the volume.
    """

    key: str
    source: int
    scale: Zyx
    value_range: tuple[float, float]
    volume: Volume

    def box_of(self, box: BoundingBox) -> BoundingBox:
        """The voxels that are made of a box of the output, which has whole cells."""
        return box.coarsen(self.scale)

    def make(self, values: AnyArray, box: BoundingBox) -> AnyArray:
        """Make the voxels of a box of the output.

        A cell that the output's end cuts is the mean of what it has.

        Args:
            values: of the output, float32 (channels, Z, Y, X).
            box: where they lie; it has whole cells.

        Returns:
            Values (channels, Z, Y, X) of :meth:`box_of` it.
        """
        means = mean(values, box.start, self.scale)
        return quantize(means.astype(np.float32, copy=False), self.volume.dtype, self.value_range)


def open_previews(job: ResolvedJob) -> list[OpenPreview]:
    """Open the previews of a job's outputs.

    Raises:
        WorkerFault: one is gone.
    """
    config = job.config
    opened = []
    for key, output in config.previews.items():
        preview = config.by_output[output].output.preview
        value_range = config.by_output[output].preview_range
        assert preview is not None, "the output has this preview"
        assert value_range is not None, "a job without it was refused"
        spec = output_spec(job, key)
        volume = open_output(spec)
        if volume is None:
            raise WorkerFault(f"the preview {spec.url} is gone: it was there at launch")
        source = config.output_keys.index(output)
        opened.append(OpenPreview(key, source, preview.scale, value_range, volume))
    return opened
