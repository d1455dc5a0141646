"""What a job will take and cost: from what was measured, and from prices that the user gives. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Annotated

import numpy as np
from pydantic import Field

from beam_inference.config.fields import Model
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.seam_sums import most_seam_files
from beam_inference.launch.planned_job import PlannedJob
from beam_inference.launch.simulation import Workload, simulate_many

Price = Annotated[float, Field(ge=0)]


class Prices(Model):
    """What things cost, in one currency, as in ``templates/prices.yaml``. All are 0 unless given."""

    worker_hour: Price = Field(
        0.0, description="one worker process, on demand: its share of the machine, GPU included"
    )
    interruptible_worker_hour: Price | None = Field(
        None, description="the same, as the provider may take it back"
    )
    interruptions_per_hour: Price = Field(
        0.05, description="how often an interruptible worker is taken back"
    )
    startup_seconds: Price = Field(180.0, description="from asking for a worker to its first chunk")
    million_writes: Price = Field(0.0, description="a million write requests of the object store")
    million_reads: Price = Field(0.0, description="a million read requests")
    gib_month: Price = Field(0.0, description="keeping one GiB of output for a month")


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found by trying, on one machine.

    Attributes:
        call_seconds: of a network call, a full batch, with the blending of what it gives.
        read_seconds, write_seconds: per byte, of the input decoded and of the output as it is
            before compression.
        seam_write_seconds, seam_read_seconds: per byte of seam files; to read them is also to add
            them up.
        cores: which the network shares with all else that a worker does; None if it has a device of
            its own.
    """

    call_seconds: float
    read_seconds: float
    write_seconds: float
    seam_write_seconds: float = 0.0
    seam_read_seconds: float = 0.0
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """What the plan says of the whole job.

    Attributes:
        chunks, voxels: of the output. patches: to compute, in so many ``calls`` of full batches.
        read_bytes: of the input, decoded, halo re-reads included.
        written_bytes: of the output; of these ``shared_bytes`` are put together in the second stage
            of an exchange.
        seam_bytes: that are written in the first one, and read in the second.
        stored_bytes: that are kept, a pyramid's included.
        read_requests, write_requests: of the object store, receipts included.
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


@dataclass(frozen=True, slots=True)
class Estimate:
    """How a job goes on so many workers.

    Attributes:
        workers: at a time. kind: "on demand" or "interruptible".
        hours, hours_at_worst: the median and the 95th percentile of simulated runs.
        interruptions: on average.
        money: workers and requests; what keeping the output costs is ``money_per_month``.
        money_per_billion_voxels: of output.
    """

    workers: int
    kind: str
    hours: float
    hours_at_worst: float
    interruptions: float
    money: float
    money_per_billion_voxels: float
    money_per_month: float


def chunk_seconds(measured: Measured, totals: Totals) -> float:
    """Seconds of an average chunk on one worker: reading and writing go on beside the computing of others.

    Where they share cores with it they take their part of these. The second stage of an exchange
    computes nothing.
    """
    computing = measured.call_seconds * totals.calls
    moving = (
        measured.read_seconds * totals.read_bytes + measured.seam_write_seconds * totals.seam_bytes
    )
    moving += measured.write_seconds * (totals.written_bytes - totals.shared_bytes)
    shared = 0.0 if measured.cores is None else moving / measured.cores
    merging = (
        measured.seam_read_seconds * totals.seam_bytes
        + measured.write_seconds * totals.shared_bytes
    )
    return (max(computing + shared, moving) + merging) / totals.chunks


def estimates(
    measured: Measured, totals: Totals, prices: Prices, workers: int, variation: float
) -> list[Estimate]:
    """What to expect on demand and, where there is a price for it, of interruptible workers."""
    kinds = [("on demand", prices.worker_hour, 0.0)]
    if prices.interruptible_worker_hour is not None:
        kinds.append(
            ("interruptible", prices.interruptible_worker_hour, prices.interruptions_per_hour)
        )
    requests = (
        prices.million_reads * totals.read_requests / 1e6
        + prices.million_writes * totals.write_requests / 1e6
    )
    found = []
    for kind, price, interruptions in kinds:
        work = Workload(
            totals.chunks,
            chunk_seconds(measured, totals),
            variation,
            workers,
            prices.startup_seconds,
            interruptions,
        )
        runs = simulate_many(work)
        money = price * mean(run.worker_seconds for run in runs) / 3600 + requests
        found.append(
            Estimate(
                workers=workers,
                kind=kind,
                hours=runs[len(runs) // 2].seconds / 3600,
                hours_at_worst=runs[len(runs) * 95 // 100].seconds / 3600,
                interruptions=mean(run.interruptions for run in runs),
                money=money,
                money_per_billion_voxels=money / totals.voxels * 1e9,
                money_per_month=prices.gib_month * totals.stored_bytes / 2**30,
            )
        )
    return found


def totals(job: PlannedJob, batch_size: int | None = None) -> Totals:
    """What the plan says of the whole job."""
    plan = job.plan
    itemsize = np.dtype(job.config.output.dtype).itemsize
    written = plan.chunks.roi.size * job.output.channels * itemsize
    receipts = plan.chunks.count + plan.totals.owners
    seam_files = most_seam_files(plan.totals, job.config.model.output_channels)
    return Totals(
        chunks=plan.chunks.count,
        calls=plan.totals.calls(batch_size or job.assumed_needs.batch_size),
        patches=plan.totals.patch_count,
        voxels=plan.chunks.roi.size,
        read_bytes=plan.totals.input_voxels * job.input.channels * job.input.dtype.itemsize,
        written_bytes=written,
        shared_bytes=plan.totals.shared_voxels * job.output.channels * itemsize,
        seam_bytes=plan.totals.seam_voxels * job.config.model.output_channels * 4,
        stored_bytes=written,
        read_requests=_blocks_read(plan, job.input.read_shape) + receipts + seam_files,
        write_requests=blocks_written(plan) + receipts + seam_files,
    )


def blocks_written(plan: InferencePlan) -> int:
    """Storage blocks of the output, one object each."""
    return ChunkGrid(plan.chunks.roi, plan.block_shape).count


def _blocks_read(plan: InferencePlan, block_shape: tuple[int, int, int]) -> int:
    """Blocks of the input that are read, about: those that all chunks' inputs touch, wherever they lie."""
    per_voxel = np.prod(
        [(n + b - 1) / b / n for n, b in zip(plan.totals.extremes.input, block_shape, strict=True)]
    )
    return round(plan.totals.input_voxels * float(per_voxel))
