"""How long a patch, a read and a write take here: measured before a launch, on the job's own network, input and store.

Nothing of the job is created: what is written to time the store is one object beside the output, and is removed.
"""

from __future__ import annotations

import logging
import math
import shutil
import statistics
import time
import uuid
from collections.abc import Callable

import numpy as np

from beam_inference.bounding_box import BoundingBox
from beam_inference.chunk_inference import AS_COMPUTED, Encoding, infer_chunk
from beam_inference.cost import Measured, Totals
from beam_inference.grids import ChunkGrid
from beam_inference.job_parts import cutout, normalization
from beam_inference.plan import ChunkWork, InferencePlan
from beam_inference.predictors import Predictor
from beam_inference.predictors.contract import without_blank
from beam_inference.stores import TRANSFER_SECONDS, delete_folder, local_folder, open_kvstore, persistently
from beam_inference.survey import Survey

logger = logging.getLogger(__name__)

REPEATS = 3
FEW_PATCHES = (2, 2, 2)
"""Per axis, of the piece that is computed: enough for patches to overlap on all axes; more, to fill large batches."""


def calibrate(found: Survey, predictor: Predictor) -> Measured:
    """Read, compute and write a piece of the chunk in the middle of the job, some times each; the medians.

    Raises:
        BeamInferenceError: the input cannot be read, the network fails, or the store cannot be written.
    """
    job, plan = found.job, found.job.plan
    lattice = plan.lattice
    batch_size = job.config.inference.patches_per_call
    counts = [min(few, axis.count) for few, axis in zip(FEW_PATCHES, lattice.axes, strict=True)]
    for axis in (2, 1, 0):  # as many as fill a batch
        others = math.prod(counts) // counts[axis]
        counts[axis] = max(counts[axis], min(lattice.axes[axis].count, -(-batch_size // others)))
    first = [(axis.count - count) // 2 for axis, count in zip(lattice.axes, counts, strict=True)]
    low = lattice.patch_box((first[0], first[1], first[2]))
    high = lattice.patch_box((first[0] + counts[0] - 1, first[1] + counts[1] - 1, first[2] + counts[2] - 1))
    box = BoundingBox(low.start, high.stop)
    z, y, x = (range(a, a + n) for a, n in zip(first, counts, strict=True))
    work = ChunkWork(0, box, box.grow(plan.crop_margin), lattice, (z, y, x), plan.crop_margin)
    patches = cutout(job.config, found.input, work.input_box)
    if (patches == patches[:, :1, :1, :1]).all():
        logger.warning("the middle of the ROI is one value throughout: timing noise; blank patches will take no time")
    patches = without_blank(patches)
    reading = _median(lambda: cutout(job.config, found.input, work.input_box))
    output = job.config.output
    encoding = AS_COMPUTED if job.config.postprocess else Encoding(np.dtype(output.dtype), output.value_range)
    computing = _median(
        lambda: infer_chunk(
            patches,
            work,
            predictor,
            normalization(job.config, found.input.dtype),
            job.config.model.output_channels,
            batch_size,
            encoding,
        )
    )
    content = np.random.default_rng(0).bytes(
        min(2**24, int(np.prod(plan.block_shape)) * found.output.channels * encoding.dtype.itemsize)
    )
    return Measured(
        call_seconds=computing / -(-work.patch_count // batch_size),
        read_seconds=reading / (patches.size * found.input.dtype.itemsize),
        write_seconds=_writing(found, content) / len(content),
    )


def totals(found: Survey) -> Totals:
    """What the plan says of the whole job."""
    job, plan = found.job, found.job.plan
    itemsize = np.dtype(job.config.output.dtype).itemsize
    seams = plan.seam_voxels * found.job.config.model.output_channels * 4
    stored = plan.chunks.roi.size * found.output.channels * itemsize
    receipts, seam_files = plan.chunks.count + plan.owners, plan.seam_files
    return Totals(
        chunks=plan.chunks.count,
        calls=plan.calls(job.config.inference.patches_per_call),
        patches=plan.patch_count,
        voxels=plan.chunks.roi.size,
        read_bytes=plan.input_voxels * job.input_channels * np.dtype(job.input_dtype).itemsize + seams,
        written_bytes=stored + seams,
        stored_bytes=stored,
        read_requests=_blocks_read(plan, job.input_block_shape) + receipts + seam_files,
        write_requests=blocks_written(plan) + receipts + seam_files,
    )


def blocks_written(plan: InferencePlan) -> int:
    """Storage blocks of the output, one object each."""
    return ChunkGrid(plan.chunks.roi, plan.block_shape).count


def _blocks_read(plan: InferencePlan, block_shape: tuple[int, int, int]) -> int:
    """Blocks of the input that are read, about: those that all chunks' inputs touch, wherever they lie."""
    per_voxel = np.prod([(n + b - 1) / b / n for n, b in zip(plan.extremes.input, block_shape, strict=True)])
    return round(plan.input_voxels * float(per_voxel))


def _writing(found: Survey, content: bytes) -> float:
    url = f"{found.job.config.output.path.rstrip('/')}-calibration-{uuid.uuid4().hex[:8]}"
    store = open_kvstore(url, found.job.config.storage)

    def write() -> None:
        store.write("block", content).result(timeout=TRANSFER_SECONDS)

    try:
        return _median(lambda: persistently("write", url, write))
    finally:
        delete_folder(store, url)
        folder = local_folder(url)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _median(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
