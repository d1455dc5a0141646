"""Checks, before the first chunk, that chunks and the output's storage blocks fit each other."""

from __future__ import annotations

from beam_inference.errors import AlignmentError
from beam_inference.geometry.bounding_box import AXES, BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx, ceil_div


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
    roi = chunks.roi
    chunk_shape = chunks.chunk_shape
    if not bounds.contains(roi):
        raise AlignmentError(
            f"roi {roi} is not inside the output's bounds {bounds} (z, y, x; stop exclusive)."
        )
    for axis, name in enumerate(AXES):
        block = block_shape[axis]
        chunk = chunk_shape[axis]
        origin = bounds.start[axis]
        if chunk % block:
            lower = chunk // block * block
            upper = ceil_div(chunk, block) * block
            fits = " or ".join(str(n) for n in (lower, upper) if n)
            raise AlignmentError(
                f"inference.chunk_shape {list(chunk_shape)} is not a multiple of the output's "
                f"block_shape {list(block_shape)} on {name}: two chunks would write into one "
                f"block. Nearest on {name}: {fits}."
            )
        lower = origin + (roi.start[axis] - origin) // block * block
        if lower != roi.start[axis]:
            inside = [
                n for n in (lower, lower + block) if volume.start[axis] <= n < volume.stop[axis]
            ]
            fits = " or ".join(map(str, inside)) or "none inside the input"
            raise AlignmentError(
                f"the ROI starts at {list(roi.start)}, which is not on the output's block grid on "
                f"{name} (blocks of {block} from {origin}): a block would be written in part. "
                f"Nearest starts on {name}: {fits}. Set roi.start, or output.bounds.start for a "
                "new precomputed output."
            )
        if (roi.stop[axis] - origin) % block and roi.stop[axis] != bounds.stop[axis]:
            lower = origin + (roi.stop[axis] - origin) // block * block
            upper = min(lower + block, bounds.stop[axis])
            inside = [n for n in (lower, upper) if roi.start[axis] < n <= volume.stop[axis]]
            fits = (
                " or ".join(map(str, inside))
                or "none inside the input; set output.bounds.stop to the roi's"
            )
            raise AlignmentError(
                f"roi.stop {list(roi.stop)} is not on the output's block grid on {name} (blocks of "
                f"{block} from {origin}, output ends at {bounds.stop[axis]}). Nearest stops on "
                f"{name}: {fits}."
            )
