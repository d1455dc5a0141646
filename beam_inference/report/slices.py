"""Three planes of bounded size through input and output: a window, in strides if large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.errors import PermanentReadError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid, largest_block_cover
from beam_inference.geometry.zyx import Zyx, ceil_div, triple
from beam_inference.job.records import Receipt
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.report.seam_profile import has_variation
from beam_inference.volumes.kvstores import TRANSFER_SECONDS
from beam_inference.volumes.volume import Volume

PIXELS = 300
"""Most pixels of a plane on each of its axes."""
CHANNELS = 12
"""Most channels of the output that are shown."""
_DECODED_BYTES = 384 * 2**20
_CHUNKS = 1024


@dataclass(frozen=True, slots=True)
class Plane:
    """A plane of the ROI.

    Attributes:
        axis: that it is perpendicular to.
        box: one voxel thick; a window of the ROI where all of it would be too much to read.
        steps: of how many voxels one was read, on the axes of rows and columns.
        source: the first input channel, (rows, columns); NaN where it could not be read.
        output: (channels, rows, columns), as stored; NaN where no finished chunk is.
    """

    axis: int
    box: BoundingBox
    steps: tuple[int, int]
    source: NDArray[np.float32]
    output: NDArray[np.float32]

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of rows and columns."""
        rows, columns = (axis for axis in range(3) if axis != self.axis)
        return rows, columns


def place_to_show(grid: ChunkGrid, receipts: Sequence[Receipt]) -> Zyx:
    """Centre of the ROI, or of the finished chunk with contents that is nearest to it."""
    centre = centre_of(grid.roi)
    boxes = [grid.core_box(r.chunk) for r in receipts if has_variation(r)] or [
        grid.core_box(r.chunk) for r in receipts
    ]
    if not boxes or any(box.contains(_voxel(centre)) for box in boxes):
        return centre
    return min(map(centre_of, boxes), key=lambda place: math.dist(place, centre))


def read_planes(
    job: ResolvedJob, state: State, place: Zyx, source: Volume | None, output: Volume | None
) -> list[Plane]:
    """Read the xy, xz and yz planes through a place; a volume that is None is all missing.

    Raises:
        WorkerFault: the state folder cannot be read.
    """
    return [_read_plane(job, state.of(job), axis, place, source, output) for axis in range(3)]


def _read_plane(
    job: ResolvedJob,
    state: State,
    axis: int,
    place: Zyx,
    source: Volume | None,
    output: Volume | None,
) -> Plane:
    grid = job.plan.chunks
    channels = min(CHANNELS, job.config.output_channels)
    box = window(job, axis, place)
    rows, columns = (each for each in range(3) if each != axis)
    steps = [1, 1, 1]
    for each in (rows, columns):
        steps[each] = ceil_div(box.shape[each], PIXELS)
    shape = (1, *(ceil_div(n, step) for n, step in zip(box.shape, steps, strict=True)))
    tiles = list(_tiles(grid, box))
    finished = {receipt.chunk for receipt in state.read_receipts([chunk for chunk, _ in tiles])}
    pictures = (
        (source, np.full(shape, np.nan, np.float32), tiles),
        (
            output,
            np.full((channels, *shape[1:]), np.nan, np.float32),
            [t for t in tiles if t[0] in finished],
        ),
    )
    for volume, picture, held_tiles in pictures:
        if volume is not None:
            _fill(picture, volume, [tile for _, tile in held_tiles], box, steps)
    dropped = [np.squeeze(picture, axis + 1) for _, picture, _ in pictures]
    return Plane(axis, box, (steps[rows], steps[columns]), dropped[0][0], dropped[1])


def window(job: ResolvedJob, axis: int, place: Zyx) -> BoundingBox:
    """Plane through a place, its longer side halved until few enough bytes are read."""
    roi = job.plan.chunks.roi
    chunk = job.plan.chunks.chunk_shape
    extent = [1 if each == axis else n for each, n in enumerate(roi.shape)]

    def decoded_bytes() -> int:
        shape = (extent[0], extent[1], extent[2])
        read = shape
        if job.to_output is not None:
            read = triple(map(int, job.to_output.source_shape(shape)))
        output = job.config.output
        written = math.prod(largest_block_cover(shape, output.block_shape, job.output_bounds.shape))
        itemsize = np.dtype(output.dtype).itemsize
        return job.input_bytes(read) + written * job.config.output_channels * itemsize

    def chunk_count() -> int:
        return math.prod(ceil_div(n, c) + 1 for n, c in zip(extent, chunk, strict=True))

    while max(extent) > 1 and (decoded_bytes() > _DECODED_BYTES or chunk_count() > 2 * _CHUNKS):
        longest = extent.index(max(extent))
        extent[longest] = ceil_div(extent[longest], 2)
    starts = [
        max(roi.start[each], min(place[each] - n // 2, roi.stop[each] - n))
        for each, n in enumerate(extent)
    ]
    stops = [start + n for start, n in zip(starts, extent, strict=True)]
    return BoundingBox((starts[0], starts[1], starts[2]), (stops[0], stops[1], stops[2]))


def _tiles(grid: ChunkGrid, box: BoundingBox) -> Iterator[tuple[int, BoundingBox]]:
    """The chunks that a box touches, each with what it has of it."""
    positions = [
        range((a - start) // c, (b - 1 - start) // c + 1)
        for a, b, start, c in zip(
            box.start, box.stop, grid.roi.start, grid.chunk_shape, strict=True
        )
    ]
    for position in product(*positions):
        chunk = grid.index(position)
        yield chunk, grid.core_box(chunk).intersection(box)


def _fill(
    picture: NDArray[np.float32],
    volume: Volume,
    tiles: Sequence[BoundingBox],
    box: BoundingBox,
    steps: Sequence[int],
) -> None:
    """Read voxels of some tiles of a box, in strides, into a picture; unreadable tiles stay."""
    under_way = []
    for tile in tiles:
        where = []
        wanted = []
        for start, stop, origin, step in zip(tile.start, tile.stop, box.start, steps, strict=True):
            first = ceil_div(start - origin, step)
            last = ceil_div(stop - origin, step)
            where.append(slice(first, last))
            wanted.append(slice(origin + first * step, stop, step))
        if all(part.stop > part.start for part in where):
            with suppress(PermanentReadError):
                under_way.append((where, volume.begin_sampling(len(picture), wanted)))
    for where, reading in under_way:
        try:
            picture[(slice(None), *where)] = reading.result(timeout=TRANSFER_SECONDS)
        except (ValueError, OSError):
            continue  # a corrupt block, say: quarantined chunks are about such


def histograms(
    planes: Sequence[Plane], bins: int = 64
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Histograms of the output voxels on planes, by channel: edges of bins, and shares of voxels.

    Whole numbers fall into bins of equally many of them. Nothing where nothing is finished there.
    """
    values = np.concatenate(
        [plane.output.reshape(len(plane.output), -1) for plane in planes], axis=1
    )
    values = values[:, ~np.isnan(values).any(axis=0)].astype(np.float64)
    histograms = []
    for channel in values if values.size else ():
        low = float(channel.min())
        high = float(channel.max())
        if (channel == np.rint(channel)).all():
            width = -(-(high - low + 1) // bins)
            edges = low - 0.5 + width * np.arange(-(-(high - low + 1) // width) + 1)
        else:
            edges = np.linspace(low, high if high > low else low + 1, bins + 1)
        histograms.append((edges, np.histogram(channel, edges)[0] / len(channel)))
    return histograms


def centre_of(box: BoundingBox) -> Zyx:
    """The voxel in the middle of a box."""
    z, y, x = ((a + b) // 2 for a, b in zip(box.start, box.stop, strict=True))
    return (z, y, x)


def _voxel(point: Zyx) -> BoundingBox:
    z, y, x = point
    return BoundingBox(point, (z + 1, y + 1, x + 1))


def missing_share(planes: Sequence[Plane], of: str) -> float:
    """Share of the pixels of all planes that are missing, of "source" or "output"."""
    missing: list[AnyArray] = [
        np.isnan(plane.source if of == "source" else plane.output[0]).reshape(-1)
        for plane in planes
    ]
    return float(np.concatenate(missing).mean())
