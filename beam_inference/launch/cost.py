"""Estimates of a job's run time and cost, from measurements and the user's prices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from beam_inference.config.fields import Model
from beam_inference.geometry import zyx
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.seam_sums import most_seam_files, seam_bytes
from beam_inference.launch.planned_job import PlannedJob
from beam_inference.launch.simulation import Workload, forecast
from beam_inference.volumes.input_volume import InputVolume

Price = Annotated[float, Field(ge=0)]


class Prices(Model):
    """Prices in one currency, as in ``templates/prices.yaml``. All are 0 by default."""

    worker_hour: Price = Field(
        0.0, description="one worker process, on demand: its share of the machine, GPU included"
    )
    interruptible_worker_hour: Price | None = Field(
        None, description="the same where the provider may take it back"
    )
    interruptions_per_hour: Price = Field(
        0.05, description="how often an interruptible worker is taken back"
    )
    startup_seconds: Price = Field(180.0, description="from asking for a worker to its first chunk")
    million_writes: Price = Field(0.0, description="a million write requests of the object store")
    million_reads: Price = Field(0.0, description="a million read requests")
    gib_month: Price = Field(0.0, description="keeping one GiB of output for a month")


WorkerKind = Literal["on demand", "interruptible"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Times that were measured on one machine.

    Attributes:
        call_seconds: of a network call, a full batch, including the blending of its result.
        read_seconds: per byte of the input, decoded.
        write_seconds: per byte of the output before compression.
        seam_write_seconds: per byte of seam files.
        seam_read_seconds: per byte of seam files, including their addition.
        cores: CPU cores that the network shares with all other work of a process; None if it has a
            device of its own.
    """

    call_seconds: float
    read_seconds: float
    write_seconds: float
    seam_write_seconds: float = 0.0
    seam_read_seconds: float = 0.0
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes, objects and requests of a whole job.

    Attributes:
        chunks: of the output.
        patches: that are computed.
        calls: network calls of full batches that this takes.
        voxels: of the output.
        read_bytes: of the input, decoded, as often as it is read.
        written_bytes: of the output before compression.
        shared_bytes: part of ``written_bytes`` that the second stage of an exchange writes.
        seam_bytes: of the seam files that the first stage writes and the second one reads.
        stored_bytes: that are kept, including those of a pyramid: before compression, unless a
            sample of the output tells more.
        read_requests: to the object store.
        write_requests: to the object store; one for each object.
        blocks: storage blocks of the output without a pyramid, one object each.
        receipts: of chunks, in both stages of an exchange.
        seam_files: upper bound of their number.
    """

    chunks: int
    patches: int
    calls: int
    voxels: int
    read_bytes: float
    written_bytes: float
    shared_bytes: float
    seam_bytes: float
    stored_bytes: float
    read_requests: int
    write_requests: int
    blocks: int = 0
    receipts: int = 0
    seam_files: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected time and cost of a job.

    Attributes:
        workers: processes at a time.
        kind: "on demand" or "interruptible".
        hours: the median of simulated runs.
        hours_at_worst: the 95th percentile of simulated runs.
        interruptions: mean number of workers that are lost.
        money: for workers and requests.
        money_per_billion_voxels: of output.
        money_per_month: for keeping the output.
    """

    workers: int
    kind: WorkerKind
    hours: float
    hours_at_worst: float
    interruptions: float
    money: float
    money_per_billion_voxels: float
    money_per_month: float


def chunk_seconds(measured: Measured, totals: Totals) -> float:
    """Seconds of an average chunk on one worker.

    Some chunks are read and written while others are computed. Where this needs cores of the
    network, it takes its share of them. The second stage of an exchange computes nothing.
    """
    computing = measured.call_seconds * totals.calls
    moving = (
        measured.read_seconds * totals.read_bytes
        + measured.seam_write_seconds * totals.seam_bytes
        + measured.write_seconds * (totals.written_bytes - totals.shared_bytes)
    )
    shared = 0.0 if measured.cores is None else moving / measured.cores
    merging = (
        measured.seam_read_seconds * totals.seam_bytes
        + measured.write_seconds * totals.shared_bytes
    )
    return (max(computing + shared, moving) + merging) / totals.chunks


def estimates(
    measured: Measured,
    totals: Totals,
    prices: Prices,
    workers: int,
    variation: float,
    kept_bytes: float | None = None,
) -> list[Estimate]:
    """Estimates for workers on demand and, where they have a price, for interruptible ones.

    Args:
        measured: times on a machine like those of the workers.
        totals: of the job.
        prices: of workers, requests and storage.
        workers: processes at a time.
        variation: standard deviation of a chunk's seconds, relative to their mean.
        kept_bytes: what the job takes in its store; None to count bytes before compression.
    """
    if kept_bytes is not None:
        totals = replace(totals, stored_bytes=kept_bytes)
    per_chunk = chunk_seconds(measured, totals)
    expected = [_estimate(totals, prices, workers, per_chunk, variation, "on demand")]
    if prices.interruptible_worker_hour is not None:
        expected.append(_estimate(totals, prices, workers, per_chunk, variation, "interruptible"))
    return expected


def _estimate(
    totals: Totals,
    prices: Prices,
    workers: int,
    seconds_per_chunk: float,
    variation: float,
    kind: WorkerKind,
) -> Estimate:
    worker_hour = prices.worker_hour
    interruptions_per_hour = 0.0
    if kind == "interruptible":
        worker_hour = prices.interruptible_worker_hour or 0.0
        interruptions_per_hour = prices.interruptions_per_hour
    work = Workload(
        chunks=totals.chunks,
        seconds_per_chunk=seconds_per_chunk,
        variation=variation,
        workers=workers,
        startup_seconds=prices.startup_seconds,
        interruptions_per_hour=interruptions_per_hour,
    )
    expected = forecast(work)
    requests = (
        prices.million_reads * totals.read_requests / 1e6
        + prices.million_writes * totals.write_requests / 1e6
    )
    money = worker_hour * expected.worker_seconds / 3600 + requests
    return Estimate(
        workers=workers,
        kind=kind,
        hours=expected.seconds / 3600,
        hours_at_worst=expected.seconds_at_worst / 3600,
        interruptions=expected.interruptions,
        money=money,
        money_per_billion_voxels=money / totals.voxels * 1e9,
        money_per_month=prices.gib_month * totals.stored_bytes / 2**30,
    )


def job_totals(
    job: PlannedJob, plan: InferencePlan | None = None, batch_size: int | None = None
) -> Totals:
    """Totals of a job without its pyramid.

    Args:
        job: the job.
        plan: another geometry for the job; None for its own.
        batch_size: patches per network call; None for what the job file tells.
    """
    plan = plan or job.plan
    batch_size = batch_size or job.default_needs.batch_size
    specs = [output.spec for output in job.outputs.values()]
    previews = [preview.spec for preview in job.previews.values()]
    output_voxel_bytes = sum(spec.channels * np.dtype(spec.dtype).itemsize for spec in specs)
    network_channels = job.config.model.output_channels
    written = plan.chunks.roi.size * output_voxel_bytes
    blocks = sum(ChunkGrid(plan.chunks.roi, spec.write_shape).count for spec in specs)
    blocks += sum(ChunkGrid(spec.bounds, spec.write_shape).count for spec in previews)
    kept = written + sum(
        spec.bounds.size * spec.channels * np.dtype(spec.dtype).itemsize for spec in previews
    )
    receipts = plan.chunks.count + plan.totals.owners
    seam_files = most_seam_files(plan.totals, network_channels)
    return Totals(
        chunks=plan.chunks.count,
        patches=plan.totals.patch_count,
        calls=plan.totals.calls(batch_size),
        voxels=plan.chunks.roi.size,
        read_bytes=_read_bytes(plan, job.input),
        written_bytes=written,
        shared_bytes=plan.totals.shared_voxels * output_voxel_bytes,
        seam_bytes=seam_bytes(plan.totals, network_channels),
        stored_bytes=kept,
        read_requests=sum(_blocks_read(plan, each) for each in job.input.volumes)
        + receipts
        + seam_files,
        write_requests=blocks + receipts + seam_files,
        blocks=blocks,
        receipts=receipts,
        seam_files=seam_files,
    )


def _read_bytes(plan: InferencePlan, volume: InputVolume) -> float:
    """Bytes of the stored values that are read; estimated by the largest chunk where resampled."""
    return sum(_own_read_bytes(plan, each) for each in volume.volumes)


def _own_read_bytes(plan: InferencePlan, volume: InputVolume) -> float:
    if volume.resampling is None:
        return plan.totals.input_voxels * volume.channels * volume.dtype.itemsize
    largest = zyx.minimum(plan.totals.extremes.input, volume.bounds.shape)
    return plan.totals.input_voxels * volume.own_decoded_bytes(largest) / math.prod(largest)


def _blocks_read(plan: InferencePlan, volume: InputVolume) -> int:
    """Estimate of the blocks of one input volume that are read.

    It is the expected number that all chunks' inputs touch if they lie anywhere on the blocks.
    """
    largest = plan.totals.extremes.input
    if volume.resampling is not None:
        largest = zyx.minimum(largest, volume.bounds.shape)
    extents = zip(largest, volume.stored_shape(largest), volume.read_shape, strict=True)
    per_voxel = math.prod((int(stored) + block - 1) / block / n for n, stored, block in extents)
    return round(plan.totals.input_voxels * per_voxel)
