"""Measures how long a patch, a read and a write take on this machine, before a launch.

The job's own network, input and store are used. Nothing of the job is created: to time the store,
objects are written to a folder beside the output, which is removed.
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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from beam_inference.arrays import AnyArray
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
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    local_folder,
    open_kvstore,
    retry_request,
)
from beam_inference.worker.chunk_inference import ChunkInference
from beam_inference.worker.seam_files import SeamFiles

logger = logging.getLogger(__name__)

REPEATS = 3
"""Repetitions of a measurement at least, after a first one that does not count."""

LEAST_SECONDS = 3.0
"""Least time for which calls are repeated: a machine's speed drifts within seconds."""

FEW_PATCHES = (2, 2, 2)
"""Patches per axis, ZYX, of the piece that is computed; more if a batch needs more.

So patches overlap on all axes.
"""

SHORT_SECONDS = 5.0
"""A whole chunk is computed instead of a piece if it is expected to take no longer than this.

It includes all that a chunk needs beside calls.
"""

MOST_WRITTEN_BYTES = 2**24
"""Bytes at most of the object that is written to time the store."""


def calibrate(job: PlannedJob, trial: NetworkTrial) -> Measured:
    """Read, compute and write a chunk in the middle of the job, or a piece of it, repeatedly.

    Args:
        job: the job, its input opened.
        trial: its network, loaded.

    Returns:
        The medians.

    Raises:
        BeamInferenceError: the input cannot be read, the network fails, or the store cannot be
            written.
    """
    calls = _Calls(job, trial)
    work, array = _choose_work(job, calls)
    call_seconds = calls.measure(work, array, LEAST_SECONDS)
    reading = _median_seconds(lambda: calls.read(work))
    seams = _measure_seams(job) if job.plan.totals.seam_pairs else _SeamSeconds(0.0, 0.0)
    return Measured(
        call_seconds=call_seconds,
        read_seconds=reading / job.input.decoded_bytes(work.input_box.shape),
        write_seconds=_write_seconds(job),
        seam_write_seconds=seams.write,
        seam_read_seconds=seams.read,
        cores=usable_cores() if trial.config.inference.device == "cpu" else None,
    )


@dataclass(frozen=True)
class _Calls:
    """Times network calls of a job, including the blending of their results."""

    job: PlannedJob
    trial: NetworkTrial

    @property
    def batch_size(self) -> int:
        return self.trial.config.inference.batch_size

    @cached_property
    def encoding(self) -> Encoding:
        config = self.trial.config
        is_split = bool(config.outputs) or config.output.head is not None
        plan = self.job.plan
        is_resampled = plan.to_output is not None
        if config.postprocess or is_split or is_resampled or plan.exchange is not None:
            return AS_COMPUTED
        return Encoding(np.dtype(config.output.dtype), config.output.value_range)

    def read(self, work: ChunkWork) -> AnyArray:
        return cutout(self.trial.config, self.job.input, work.input_box)

    def measure(self, work: ChunkWork, array: AnyArray, least_seconds: float) -> float:
        """Measure the seconds of a call.

        Args:
            work: the patches.
            array: its input; values are changed where a patch is one value throughout.
            least_seconds: time for which it is repeated at least.
        """
        array = without_blank(array)
        uniform_patches = 0

        def infer() -> None:
            nonlocal uniform_patches
            inference = ChunkInference(
                self.trial.predictor,
                normalization(self.trial.config, self.job.input.values_dtype),
                self.trial.config.model.output_channels,
                self.batch_size,
                1.0,  # whatever it is, the time is the same
                window=self.trial.config.inference.window,
            )
            chunk_input = inference.start_upload(array, work.input_box)
            uniform_patches = inference.infer(chunk_input, work, self.encoding).uniform_patches

        seconds = _median_seconds(infer, least_seconds)
        return seconds / max(1, ceil_div(work.patch_count - uniform_patches, self.batch_size))


def _choose_work(job: PlannedJob, calls: _Calls) -> tuple[ChunkWork, AnyArray]:
    """The chunk in the middle of the job if it is short, or else a piece; and its input."""
    piece = _piece(job.plan, calls.batch_size)
    array = calls.read(piece)
    if (array == array[:, :1, :1, :1]).all():
        logger.warning(
            "the middle of the ROI has a single value: timing random noise instead; blank "
            "patches will take no time"
        )
    chunk = _middle_chunk(job.plan)
    calls_per_chunk = ceil_div(chunk.patch_count, calls.batch_size)
    if calls.measure(piece, array, least_seconds=0) * calls_per_chunk <= SHORT_SECONDS:
        return chunk, calls.read(chunk)
    return piece, array


def _piece(plan: InferencePlan, batch_size: int) -> ChunkWork:
    """The work for :data:`FEW_PATCHES` in the middle of the job, and the voxels they cover."""
    lattice = plan.lattice
    counts = [min(few, axis.count) for few, axis in zip(FEW_PATCHES, lattice.axes, strict=True)]
    for axis in (2, 1, 0):  # as many as fill a batch
        others = math.prod(counts) // counts[axis]
        needed = min(lattice.axes[axis].count, ceil_div(batch_size, others))
        counts[axis] = max(counts[axis], needed)
    first = [(axis.count - count) // 2 for axis, count in zip(lattice.axes, counts, strict=True)]
    z, y, x = (range(a, a + n) for a, n in zip(first, counts, strict=True))
    start = lattice.patch_box((z[0], y[0], x[0])).start
    stop = lattice.patch_box((z[-1], y[-1], x[-1])).stop
    return ChunkWork.of_patches(0, BoundingBox(start, stop), lattice, (z, y, x), plan.crop_margin)


def _middle_chunk(plan: InferencePlan) -> ChunkWork:
    """The work for the chunk in the middle of the job."""
    z, y, x = (n // 2 for n in plan.chunks.shape)
    index = plan.chunks.index((z, y, x))
    owned = None if plan.exchange is None else plan.exchange.owned_work(index)
    return owned or plan.work(index)


@contextmanager
def _scratch_folder(job: PlannedJob) -> Iterator[tuple[str, Any]]:
    """The URL and the store of a folder beside the output, which is removed in the end."""
    storage = job.config.storage
    url = f"{job.config.output.path.rstrip('/')}-calibration-{uuid.uuid4().hex[:8]}"
    store = open_kvstore(url, storage)
    try:
        yield url, store
    finally:
        delete_folder(url, storage)
        folder = local_folder(url)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _write_seconds(job: PlannedJob) -> float:
    """Seconds to write a byte, in an object as large as a storage block of the output."""
    voxel_bytes = job.output.channels * np.dtype(job.output.dtype).itemsize
    size = min(MOST_WRITTEN_BYTES, math.prod(job.output.write_shape) * voxel_bytes)
    content = np.random.default_rng(0).bytes(size)
    with _scratch_folder(job) as (url, store):

        def write() -> None:
            store.write("block", content).result(timeout=TRANSFER_SECONDS)

        return _median_seconds(lambda: retry_request("write", url, write)) / len(content)


@dataclass(frozen=True, slots=True)
class _SeamSeconds:
    """Seconds per byte of a seam file: to write it; to read it and add it up."""

    write: float
    read: float


def _measure_seams(job: PlannedJob) -> _SeamSeconds:
    """Time a seam file of average size."""
    totals = job.plan.totals
    side = max(1, round((totals.seam_voxels / totals.seam_pairs) ** (1 / 3)))
    shape = (side, side, side)
    channels = job.config.model.output_channels
    sums = np.random.default_rng(0).random((channels, *shape), np.float32)
    total = np.zeros_like(sums)
    with _scratch_folder(job) as (url, _):
        files = SeamFiles(url, job.config.storage, "calibration")

        def add_up() -> None:
            parts = files.read(0, [(0, [shape])], channels)
            assert parts is not None
            np.add(total, parts[0][0], out=total)

        writing = _median_seconds(lambda: files.write(0, 0, [sums]))
        return _SeamSeconds(writing / sums.nbytes, _median_seconds(add_up) / sums.nbytes)


def _median_seconds(action: Callable[[], object], least_seconds: float = 0) -> float:
    """Median time of an action, without that of the first repetition."""
    times: list[float] = []
    while len(times) <= REPEATS or sum(times) < least_seconds:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
