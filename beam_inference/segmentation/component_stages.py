"""The stages that make components of a volume, each begun once the one before it is complete.

========  =====================  =====================================================================================
stage     is done for            what it does
========  =====================  =====================================================================================
label     each chunk             labels it alone; labels, records, and faces at seams, to the scratch folder
match     each chunk             which labels on both sides of its seams are one, as pairs
unite     all at once            \
number    a row of chunks (x)     > ids of the whole volume, see :mod:`~beam_inference.segmentation.numbering`
deliver   all at once            /
relabel   each chunk             the output
tabulate  a slab of chunks (yx)  the table's parts
clean     all at once            removes the scratch folder
========  =====================  =====================================================================================
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.segmentation.labelling import Faces, equivalences, label_chunk
from beam_inference.segmentation.numbering import (
    DoChunk,
    Stage,
    faces_after,
    ids_of,
    leave_chunk,
    leave_pairs,
    numbering,
)
from beam_inference.segmentation.plans import Components, Labelling
from beam_inference.segmentation.scratch import Arrays
from beam_inference.segmentation.table import tabulate
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output


def component_stages(work: Components) -> tuple[Stage, ...]:
    """All stages, in their order."""
    return (
        Stage("label", work.grid.count, partial(label, work)),
        Stage("match", work.grid.count, partial(match, work)),
        *numbering(work),
        Stage("relabel", work.grid.count, partial(relabel, work)),
        Stage("tabulate", work.grid.shape[0], partial(tabulate, work)),
        Stage("clean", 1, partial(clean, work)),
    )


def label(work: Components) -> DoChunk:
    """Label each chunk alone."""
    source = open_volume(
        work.source, scale=work.scale, channel=[work.channel], storage=work.storage
    )
    labels = create_output(work.scratch_labels())
    scratch = work.scratch()

    def do(index: int) -> None:
        core = work.grid.core_box(index)
        values = np.ascontiguousarray(work.foreground(source.read(core)[0]))
        chunk, faces = label_chunk(values, core, work.grid, index, work.connectivity, work.min_size)
        labels.write(core, chunk.labels[np.newaxis])
        leave_chunk(work, scratch, index, chunk, _named(faces))

    return do


def _named(faces: Faces) -> dict[str, NDArray[Any]]:
    planes = {f"first{axis}": plane for axis, plane in enumerate(faces.first)}
    return (
        planes
        | {f"last{axis}": plane for axis, plane in enumerate(faces.last)}
        | {"values": faces.values}
    )


def _faces(named: Arrays) -> Faces:
    first, last = (tuple(named[f"{side}{axis}"] for axis in range(3)) for side in ("first", "last"))
    return Faces(first, last, named["values"])


def match(work: Components) -> DoChunk:
    """Find, at the seams after a chunk, which labels are one."""
    scratch = work.scratch()
    grid = work.grid

    def do(index: int) -> None:
        faces = {step: _faces(named) for step, named in faces_after(work, scratch, index).items()}
        pairs = equivalences(faces, grid.core_box(index).shape, work.connectivity)
        leave_pairs(work, scratch, index, pairs, len(faces[0, 0, 0].values))

    return do


def relabel(work: Labelling) -> DoChunk:
    """Write the output."""
    labels = create_output(work.scratch_labels())
    output = create_output(work.output)
    scratch = work.scratch()

    def do(index: int) -> None:
        core = work.grid.core_box(index)
        output.write(core, ids_of(scratch, index).astype(output.dtype)[labels.read(core)])

    return do


def clean(work: Labelling) -> DoChunk:
    """Remove the scratch folder."""
    scratch = work.scratch()
    return lambda _: scratch.delete()
