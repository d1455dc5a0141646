r"""The stages that make components of a volume, each begun once the one before it is complete.

========  ===================  ====================================================================
stage     is done for          and does
========  ===================  ====================================================================
label     each chunk           labels it alone; writes labels, records, and faces at seams
match     each chunk           finds labels on both sides of its seams that are one, as pairs
unite     all at once          \
number    a row of chunks (x)   > ids of the whole volume, see
deliver   all at once          /  :mod:`~beam_inference.segmentation.numbering`
relabel   each chunk           writes the output
tabulate  a slab of chunks     writes parts of the table
clean     all at once          removes the scratch folder
========  ===================  ====================================================================
"""

from __future__ import annotations

from functools import partial

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.job.stage_witnesses import Testimony
from beam_inference.segmentation.labelling import Faces, equivalences, label_chunk
from beam_inference.segmentation.numbering import (
    DoChunk,
    Stage,
    WitnessedStage,
    faces_after,
    hear_ids,
    ids_of,
    numbering_stages,
    save_chunk,
    save_pairs,
    write_ids,
)
from beam_inference.segmentation.plans import ComponentPlan, LabelPlan
from beam_inference.segmentation.table import LINES_PER_PART, tabulate
from beam_inference.volumes.outputs import create_output
from beam_inference.volumes.packed_arrays import Arrays


def component_stages(
    plan: ComponentPlan, lines_per_part: int = LINES_PER_PART
) -> tuple[Stage, ...]:
    """All stages, in their order; ``lines_per_part`` are the lines of a part of the table."""
    return (
        Stage("label", plan.grid.count, partial(label, plan)),
        Stage("match", plan.grid.count, partial(match, plan)),
        *numbering_stages(plan),
        WitnessedStage(
            "relabel", plan.grid.count, partial(relabel, plan), partial(hear_relabelled, plan)
        ),
        Stage("tabulate", plan.grid.shape[0], partial(tabulate, plan, lines_per_part)),
        Stage("clean", 1, partial(clean, plan)),
    )


def label(plan: ComponentPlan) -> DoChunk:
    """Make the worker that labels each chunk alone."""
    source = plan.open_input()
    scratch = plan.scratch()

    def do(index: int) -> None:
        core = plan.grid.core_box(index)
        values = np.ascontiguousarray(plan.foreground(source.read(core)[0]))
        chunk, faces = label_chunk(values, core, plan.grid, index, plan.connectivity, plan.min_size)
        save_chunk(plan, scratch, index, chunk, _face_arrays(faces))

    return do


def _face_arrays(faces: Faces) -> dict[str, AnyArray]:
    planes = {f"first{axis}": plane for axis, plane in enumerate(faces.first)}
    return (
        planes
        | {f"last{axis}": plane for axis, plane in enumerate(faces.last)}
        | {"values": faces.values}
    )


def _faces(arrays: Arrays) -> Faces:
    return Faces(
        first=tuple(arrays[f"first{axis}"] for axis in range(3)),
        last=tuple(arrays[f"last{axis}"] for axis in range(3)),
        values=arrays["values"],
    )


def match(plan: ComponentPlan) -> DoChunk:
    """Make the worker that finds labels which are one across the seams after a chunk."""
    scratch = plan.scratch()
    grid = plan.grid

    def do(index: int) -> None:
        faces = {step: _faces(arrays) for step, arrays in faces_after(plan, scratch, index).items()}
        pairs = equivalences(faces, grid.core_box(index).shape, plan.connectivity)
        save_pairs(plan, scratch, index, pairs, len(faces[0, 0, 0].values))

    return do


def relabel(plan: LabelPlan) -> DoChunk:
    """Make the worker that writes the output."""
    output = create_output(plan.output)
    scratch = plan.scratch()
    return lambda index: write_ids(plan, scratch, output, index, ids_of(scratch, index))


def hear_relabelled(plan: LabelPlan) -> Testimony:
    """Make the function that compares a chunk of the output with what is written there."""
    scratch = plan.scratch()
    return hear_ids(plan, scratch, partial(ids_of, scratch))


def clean(plan: LabelPlan) -> DoChunk:
    """Make the worker that removes the scratch folder."""
    scratch = plan.scratch()
    return lambda _: scratch.delete()
