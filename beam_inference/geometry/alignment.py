"""Checks, before the first chunk, that chunks and the output's storage blocks fit each other."""

from __future__ import annotations

from beam_inference.errors import AlignmentError
from beam_inference.geometry.bounding_box import AXES, BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx, round_down, round_up


def check_alignment(
    chunks: ChunkGrid, block_shape: Zyx, bounds: BoundingBox, volume: BoundingBox
) -> None:
    """Check that every storage block of the output is written, whole, by exactly one chunk.

    Args:
        chunks: the chunk grid over the ROI.
        block_shape: voxels that one write replaces, ZYX.
        bounds: the output's extent, at whose start its blocks start.
        volume: the input's extent, which the ROI cannot leave.

    Raises:
        AlignmentError: the ROI leaves the output or cuts a block, or the chunk shape is no multiple
            of the block shape; the message names the nearest values that fit.
    """
    if not bounds.contains(chunks.roi):
        raise AlignmentError(
            f"roi {chunks.roi} is not inside the output's bounds {bounds} (z, y, x; stop "
            "exclusive)."
        )
    for axis in range(3):
        _check_chunk_shape(chunks.chunk_shape, block_shape, axis)
        _check_start(chunks.roi, block_shape[axis], bounds, volume, axis)
        _check_stop(chunks.roi, block_shape[axis], bounds, volume, axis)


def is_aligned(chunks: ChunkGrid, block_shape: Zyx, bounds: BoundingBox) -> bool:
    """Whether every storage block of an output is written, whole, by exactly one chunk."""
    try:
        check_alignment(chunks, block_shape, bounds, bounds)
    except AlignmentError:
        return False
    return True


def _check_chunk_shape(chunk_shape: Zyx, block_shape: Zyx, axis: int) -> None:
    chunk = chunk_shape[axis]
    block = block_shape[axis]
    if chunk % block == 0:
        return
    name = AXES[axis]
    nearest = [n for n in (round_down(chunk, block), round_up(chunk, block)) if n]
    raise AlignmentError(
        f"inference.chunk_shape {list(chunk_shape)} is not a multiple of the output's "
        f"block_shape {list(block_shape)} on {name}: two chunks would write into one "
        f"block. Nearest on {name}: {_alternatives(nearest)}."
    )


def _check_start(
    roi: BoundingBox, block: int, bounds: BoundingBox, volume: BoundingBox, axis: int
) -> None:
    start = roi.start[axis]
    origin = bounds.start[axis]
    lower = origin + round_down(start - origin, block)
    if lower == start:
        return
    name = AXES[axis]
    nearest = [n for n in (lower, lower + block) if volume.start[axis] <= n < volume.stop[axis]]
    raise AlignmentError(
        f"the ROI starts at {list(roi.start)}, which is not on the output's block grid on "
        f"{name} (blocks of {block} from {origin}): a block would be written in part. "
        f"Nearest starts on {name}: {_alternatives(nearest) or 'none inside the input'}. "
        "Set roi.start, or output.bounds.start for a new output that starts at any voxel."
    )


def _check_stop(
    roi: BoundingBox, block: int, bounds: BoundingBox, volume: BoundingBox, axis: int
) -> None:
    stop = roi.stop[axis]
    origin = bounds.start[axis]
    if (stop - origin) % block == 0 or stop == bounds.stop[axis]:
        return
    name = AXES[axis]
    lower = origin + round_down(stop - origin, block)
    upper = min(lower + block, bounds.stop[axis])
    nearest = [n for n in (lower, upper) if roi.start[axis] < n <= volume.stop[axis]]
    none = "none inside the input; set output.bounds.stop to the roi's"
    raise AlignmentError(
        f"roi.stop {list(roi.stop)} is not on the output's block grid on {name} (blocks of "
        f"{block} from {origin}, output ends at {bounds.stop[axis]}). Nearest stops on "
        f"{name}: {_alternatives(nearest) or none}."
    )


def _alternatives(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
