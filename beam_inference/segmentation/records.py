"""What is known of a component, or of a part of one: an array of :data:`RECORD`; and its line in the table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

RECORD = np.dtype(
    [
        ("voxels", "<i8"),
        ("first", "<i8"),
        ("start", "<i8", (3,)),
        ("stop", "<i8", (3,)),
        ("sums", "<f8", (3,)),
    ]
)
"""Number of voxels; the first of them, as its position in the whole volume in C order; bounding
box, half-open, ZYX; sums of the voxels' z, y and x (whole numbers, exact to 2^53). Voxels are
counted from the volume's first.
"""

HEADER = "id,voxels,z_start,y_start,x_start,z_stop,y_stop,x_stop,z_nm,y_nm,x_nm\n"
"""Of the table: the box is half-open, in voxels; the centroid is the mean of the voxels' centres, in nanometres."""


def no_records(count: int) -> NDArray[np.void]:
    """Records of nothing, to which parts are added."""
    records = np.zeros(count, RECORD)
    records["first"] = np.iinfo(np.int64).max
    records["start"] = np.iinfo(np.int64).max
    return records


def add_parts(records: NDArray[np.void], which: NDArray[np.int64], parts: NDArray[np.void]) -> None:
    """Add parts to the components that they are parts of."""
    np.add.at(records["voxels"], which, parts["voxels"])
    np.minimum.at(records["first"], which, parts["first"])
    np.minimum.at(records["start"], which, parts["start"])
    np.maximum.at(records["stop"], which, parts["stop"])
    np.add.at(records["sums"], which, parts["sums"])


def table_lines(
    records: NDArray[np.void],
    ids: NDArray[np.int64],
    offset: Zyx,
    voxel_size_nm: VoxelSizeNm,
) -> str:
    """The lines of objects with these ids; ``offset`` is the volume's first voxel, ZYX."""
    centres = (records["sums"] / records["voxels"][:, None] + offset + 0.5) * voxel_size_nm
    whole = np.column_stack(
        [ids, records["voxels"], records["start"] + offset, records["stop"] + offset]
    )
    lines = (
        f"{','.join(map(str, numbers))},{z:.3f},{y:.3f},{x:.3f}\n"
        for numbers, (z, y, x) in zip(whole.tolist(), centres.tolist(), strict=True)
    )
    return "".join(lines)
