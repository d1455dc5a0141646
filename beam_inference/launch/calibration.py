"""How long a patch, a read and a write take here: measured before a launch, on the job's own network, input and store.

Nothing of the job is created: what is written to time the store is one object beside the output,
    and is removed.
"""

from __future__ import annotations

import logging
import math
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.engines.trial import without_blank
from beam_inference.environment import usable_cores
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.zyx import ceil_div
from beam_inference.job.parts import cutout, normalization
from beam_inference.launch.cost import Measured
from beam_inference.launch.engine_trial import NetworkTrial
from beam_inference.launch.planned_job import PlannedJob
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    delete_folder,
    local_folder,
    open_kvstore,
    persistently,
)
from beam_inference.worker.chunk_inference import ChunkInference
from beam_inference.worker.seam_files import SeamFiles

logger = logging.getLogger(__name__)

REPEATS = 3
LEAST_SECONDS = 3.0
"""A measurement is repeated for so long at least: a machine's speed drifts within seconds."""

FEW_PATCHES = (2, 2, 2)
"""Per axis, of the piece that is computed: enough for patches to overlap on all axes; more, to fill large batches."""

SHORT_SECONDS = 5.0
"""A whole chunk is computed instead if it takes no longer, as the piece foretells: with all there is beside calls."""


def calibrate(job: PlannedJob, trial: NetworkTrial) -> Measured:
    """Read, compute and write a chunk in the middle of the job, or a piece there, some times each; the medians.

    Raises:
        BeamInferenceError: the input cannot be read, the network fails, or the store cannot be
            written.
    """
    plan = job.plan
    config = trial.config
    predictor = trial.predictor
    batch_size = config.inference.batch_size
    output = config.output
    encodes = not config.postprocess and plan.exchange is None
    encoding = Encoding(np.dtype(output.dtype), output.value_range) if encodes else AS_COMPUTED

    def computing(work: ChunkWork, patches: NDArray[Any], least_seconds: float) -> float:
        """Seconds a call."""
        patches = without_blank(patches)
        normalize = normalization(config, job.input.dtype)
        channels = config.model.output_channels
        known = 0

        def infer() -> None:
            nonlocal known
            inference = ChunkInference(predictor, normalize, channels, batch_size, encoding)
            cutout = inference.start_upload(patches, work.input_box)
            known = inference.infer(cutout, work).uniform_patches

        seconds = _median(infer, least_seconds)
        return seconds / max(1, _calls(work.patch_count - known, batch_size))

    work = _piece(plan, batch_size)
    chunk = _middle_chunk(plan)
    patches = cutout(config, job.input, work.input_box)
    if (patches == patches[:, :1, :1, :1]).all():
        logger.warning(
            "the middle of the ROI is one value throughout: timing noise; blank patches will take "
            "no time"
        )
    if computing(work, patches, 0) * _calls(chunk.patch_count, batch_size) <= SHORT_SECONDS:
        work = chunk
        patches = cutout(config, job.input, chunk.input_box)
    call_seconds = computing(work, patches, LEAST_SECONDS)
    reading = _median(lambda: cutout(config, job.input, work.input_box))
    content = np.random.default_rng(0).bytes(
        min(
            2**24,
            int(np.prod(plan.block_shape)) * job.output.channels * np.dtype(output.dtype).itemsize,
        )
    )
    seam_writing, seam_reading = _seams(job) if plan.totals.seam_pairs else (0.0, 0.0)
    return Measured(
        call_seconds=call_seconds,
        read_seconds=reading / (patches.size * job.input.dtype.itemsize),
        write_seconds=_writing(job, content) / len(content),
        seam_write_seconds=seam_writing,
        seam_read_seconds=seam_reading,
        cores=usable_cores() if config.inference.device == "cpu" else None,
    )


def _piece(plan: InferencePlan, batch_size: int) -> ChunkWork:
    """:data:`FEW_PATCHES` in the middle of the job, and what they cover."""
    lattice = plan.lattice
    counts = [min(few, axis.count) for few, axis in zip(FEW_PATCHES, lattice.axes, strict=True)]
    for axis in (2, 1, 0):  # as many as fill a batch
        others = math.prod(counts) // counts[axis]
        counts[axis] = max(
            counts[axis], min(lattice.axes[axis].count, ceil_div(batch_size, others))
        )
    first = [(axis.count - count) // 2 for axis, count in zip(lattice.axes, counts, strict=True)]
    z, y, x = (range(a, a + n) for a, n in zip(first, counts, strict=True))
    low = lattice.patch_box((z[0], y[0], x[0]))
    high = lattice.patch_box((z[-1], y[-1], x[-1]))
    box = BoundingBox(low.start, high.stop)
    return ChunkWork(0, box, box.grow(plan.crop_margin), lattice, (z, y, x), plan.crop_margin)


def _middle_chunk(plan: InferencePlan) -> ChunkWork:
    """What a chunk in the middle of the job computes."""
    z, y, x = (n // 2 for n in plan.chunks.shape)
    index = plan.chunks.index((z, y, x))
    owned = None if plan.exchange is None else plan.exchange.owned_work(index)
    return owned or plan.work(index)


def _calls(patches: int, batch_size: int) -> int:
    return ceil_div(patches, batch_size)


@contextmanager
def _scratch(job: PlannedJob) -> Iterator[tuple[str, Any]]:
    """A folder beside the output: its URL and its store. It is removed in the end."""
    storage = job.config.storage
    url = f"{job.config.output.path.rstrip('/')}-calibration-{uuid.uuid4().hex[:8]}"
    store = open_kvstore(url, storage)
    try:
        yield url, store
    finally:
        delete_folder(store, url)
        folder = local_folder(url)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _writing(job: PlannedJob, content: bytes) -> float:
    """Seconds to write an object of the content."""
    with _scratch(job) as (url, store):

        def write() -> None:
            store.write("block", content).result(timeout=TRANSFER_SECONDS)

        return _median(lambda: persistently("write", url, write))


def _seams(job: PlannedJob) -> tuple[float, float]:
    """Seconds a byte to write sums, and to read them and add them up: of as many as go between chunks on average."""
    plan = job.plan
    side = max(1, round((plan.totals.seam_voxels / plan.totals.seam_pairs) ** (1 / 3)))
    shape = (side, side, side)
    channels = job.config.model.output_channels
    sums = np.random.default_rng(0).random((channels, *shape), np.float32)
    total = np.zeros_like(sums)
    with _scratch(job) as (url, _):
        files = SeamFiles(url, job.config.storage, "calibration")

        def add_up() -> None:
            parts = files.read(0, [(0, [shape])], channels)
            assert parts is not None
            np.add(total, parts[0][0], out=total)

        writing = _median(lambda: files.write(0, 0, [sums]))
        return writing / sums.nbytes, _median(add_up) / sums.nbytes


def _median(action: Callable[[], object], least_seconds: float = 0) -> float:
    times: list[float] = []
    while len(times) <= REPEATS or sum(times) < least_seconds:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
