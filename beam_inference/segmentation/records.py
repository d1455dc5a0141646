"""Records of objects and their parts, arrays of :data:`RECORD`, and their lines in the table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import StateError
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.segmentation.compiled import kernels

RECORD = np.dtype(
    [
        ("voxels", "<i8"),
        ("first", "<i8"),
        ("start", "<i8", (3,)),
        ("stop", "<i8", (3,)),
        ("sums", "<f8", (3,)),
    ]
)
"""Record of an object or a part of one. Coordinates count from the volume's first voxel, ZYX.

``voxels``: their number; ``first``: the first of them, as its place in the whole volume in C order;
``start`` and ``stop``: bounding box, half-open; ``sums``: sums of the voxels' z, y and x (whole
numbers, exact to 2^53).
"""

HEADER = "id,voxels,z_start,y_start,x_start,z_stop,y_stop,x_stop,z_nm,y_nm,x_nm\n"
"""Header of the table; boxes are half-open and in voxels, centroids are in nanometres."""


def no_records(count: int) -> NDArray[np.void]:
    """Records of objects without voxels, to which parts can be added."""
    records = np.zeros(count, RECORD)
    records["first"] = np.iinfo(np.int64).max
    records["start"] = np.iinfo(np.int64).max
    return records


def add_parts(records: NDArray[np.void], which: NDArray[np.int64], parts: NDArray[np.void]) -> None:
    """Add the records of parts to those of objects, in place.

    Args:
        records: of the objects.
        which: the place of each part's object.
        parts: records of the parts.

    Raises:
        StateError: these do not belong together: they were read from files.
    """
    is_one_each = parts.dtype == RECORD and parts.shape == which.shape
    if not is_one_each or (len(which) and not 0 <= which.min() <= which.max() < len(records)):
        raise StateError(  # the loop does not look at bounds
            "the records of objects in the scratch folder do not fit each other: it was changed. "
            "Give the command with --overwrite to start again"
        )
    fields = [array[name] for array in (records, parts) for name in RECORD.names or ()]
    kernels().add_parts(which, *fields)


def table_lines(
    records: NDArray[np.void],
    ids: NDArray[np.int64],
    offset: Zyx,
    voxel_size_nm: VoxelSizeNm,
) -> str:
    """The table's lines for some objects.

    Args:
        records: records of the objects.
        ids: their ids.
        offset: coordinates of the volume's first voxel, ZYX.
        voxel_size_nm: ZYX.
    """
    centres = (records["sums"] / records["voxels"][:, None] + offset + 0.5) * voxel_size_nm
    integers = np.column_stack(
        [ids, records["voxels"], records["start"] + offset, records["stop"] + offset]
    )
    # Columns, not rows: a list for each object would set off Python's garbage collection.
    columns = [*integers.T.tolist(), *centres.T.tolist()]
    return "".join(map(_LINE.__mod__, zip(*columns, strict=True)))


_LINE = ",".join(["%d"] * 8 + ["%.3f"] * 3) + "\n"
