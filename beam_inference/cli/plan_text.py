"""What a job, or a pyramid, will come to: for people, or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from beam_inference.geometry.chunk_shape import busiest_worker
from beam_inference.geometry.plan import InferencePlan, SeamMode
from beam_inference.geometry.seam_sums import most_seam_files
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.launch.cost import (
    Estimate,
    Measured,
    Totals,
    blocks_written,
    chunk_seconds,
    totals,
)
from beam_inference.launch.output_pyramid import with_pyramid
from beam_inference.launch.planned_job import NetworkNeeds, PlannedJob

if TYPE_CHECKING:
    from beam_inference.geometry.zyx import VoxelSizeNm
    from beam_inference.pyramid.pyramid import Pyramid


def print_plan(job: PlannedJob, pyramid: Pyramid | None, *, as_json: bool = False) -> None:
    """What a job comes to: boxes, counts, redundancy of each seam mode, bytes, objects, memory; and its pyramid."""
    if as_json:
        print(json.dumps(plan_values(job, pyramid), indent=2))
        return
    output = job.output
    plan = job.plan
    config = job.config
    console = Console(width=110, highlight=False)
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_row(
        "input", f"{plan.volume}, {job.input.channels} channel(s) of {job.input.dtype.name}"
    )
    facts.add_row("roi", f"{plan.chunks.roi}, {plan.chunks.roi.size:,} voxels")
    facts.add_row("domain", f"{plan.lattice.domain}, what the patch lattice tiles")
    facts.add_row(
        "output",
        f"{output.bounds}, {output.channels} channel(s) of {output.dtype}, {output.format}",
    )
    facts.add_row("", "exists already" if job.output_exists else "will be created")
    for name, mask in (("input mask", config.input.mask), ("output mask", config.mask)):
        if mask is not None:
            facts.add_row(
                name,
                f"{mask.path}{', inverse' if mask.inverse else ''}, elsewhere {mask.fill_value}",
            )
    if config.mask is not None:
        facts.add_row(
            "", "chunks wholly outside it cost nothing: the figures below are upper bounds"
        )
    chunk = plan.chunks.chunk_shape
    facts.add_row(
        "chunks", f"{plan.chunks.count:,} of {_by(chunk)} voxels, {_by(plan.chunks.shape)} of them"
    )
    patch = plan.lattice.patch_shape
    facts.add_row(
        "patches",
        f"{plan.totals.patch_count:,} of {_by(patch)} voxels, overlap {_by(plan.lattice.patch_overlap)}",
    )
    read = plan.totals.input_voxels * job.input.channels * _itemsize(job.input.dtype.name)
    facts.add_row(
        "read", f"{_bytes(read)}, halo re-reads included, before rounding to storage blocks"
    )
    written = plan.chunks.roi.size * output.channels * _itemsize(output.dtype)
    blocks = blocks_written(plan)
    facts.add_row(
        "written",
        f"{_bytes(written)} before compression, in {blocks:,} blocks of {_by(output.write_shape)}",
    )
    seam_files = most_seam_files(plan.totals, config.model.output_channels)
    objects = f"{blocks:,} blocks + {plan.chunks.count + plan.totals.owners:,} receipts"
    facts.add_row(
        "objects", objects + (f" + at most {seam_files:,} seam files" if seam_files else "")
    )
    if config.output.pyramid is not None:
        for heading, line in zip(("pyramid", "", ""), _pyramid_lines(pyramid), strict=False):
            facts.add_row(heading, line)
    place = Place()
    memory = job.memory(place)
    threads = f"{place.threads_per_process} harness threads"
    facts.add_row(
        "memory", f"{_bytes(memory.host_bytes)} per worker process with {threads}, for its chunks;"
    )
    facts.add_row(
        "", "beside the libraries, the weights, and what the network itself allocates for a batch"
    )
    if job.settings.device == "cuda":
        facts.add_row("", f"{_bytes(memory.device_bytes)} on the GPU, likewise")
    console.print(facts)
    console.print()
    console.print(_seams_table(job))


def _pyramid_lines(pyramid: Pyramid | None) -> list[str]:
    if pyramid is None:
        return ["no level: one block holds the output"]
    coarsest = _by(pyramid.levels[-1].bounds.shape)
    return [
        (
            f"{len(pyramid.levels)} levels by {pyramid.method}, the coarsest {coarsest} voxels; "
            "once every chunk is done"
        ),
        (
            f"{_bytes(pyramid.size)} before compression, in {sum(pyramid.blocks):,} blocks + "
            f"{pyramid.count:,} records"
        ),
    ]


def plan_values(job: PlannedJob, pyramid: Pyramid | None) -> dict[str, Any]:
    """The same as values for machines; bytes are decoded, shapes ZYX; what is stored includes the pyramid."""
    plan = job.plan
    whole = with_pyramid(totals(job), pyramid)
    memory = job.memory(Place())
    return {
        "roi": asdict(job.roi),
        "chunks": whole.chunks,
        "chunk_shape": plan.chunks.chunk_shape,
        "patches": whole.patches,
        "patch_voxels_per_voxel": plan.totals.patch_voxels_per_voxel,
        "read_bytes": whole.read_bytes + whole.seam_bytes,
        "written_bytes": whole.written_bytes + whole.seam_bytes,
        "stored_bytes": whole.stored_bytes,
        "objects": whole.write_requests,
        "host_bytes_per_worker": memory.host_bytes,
        "device_bytes": memory.device_bytes,
        "pyramid": pyramid and pyramid_values(pyramid),
        "seams": {
            mode.seams: {
                "network_calls": mode.totals.patch_count,
                "patch_voxels_per_voxel": mode.totals.patch_voxels_per_voxel,
                "seam_bytes": mode.totals.seam_voxels * job.config.model.output_channels * 4,
                "this_job": mode.seams == plan.seams,
            }
            for mode in map(job.plan_in, job.config.seam_modes)
        },
    }


def _seams_table(job: PlannedJob) -> Table:
    plan = job.plan
    exchange = job.plan_in("exchange")
    recompute = job.plan_in("recompute")
    crop = job.plan_in("crop")
    margin = crop.chunk_crop_margin
    table = Table(title="seam modes", title_justify="left")
    for column in (
        "seams",
        "network calls",
        "patch voxels per voxel",
        "seam files",
        "at chunk borders",
    ):
        table.add_column(
            column, justify="left" if column in ("seams", "at chunk borders") else "right"
        )
    borders = (
        (exchange, "exact to rounding"),
        (recompute, "exact"),
        (crop, f"seams; margin {_by(margin)} cropped"),
    )
    modes = [(mode, border) for mode, border in borders if mode.seams in job.config.seam_modes]
    for mode, border in modes:
        chosen = " (this job)" if mode.seams == plan.seams else ""
        calls = f"{mode.totals.patch_count:,}"
        redundancy = f"{mode.totals.patch_voxels_per_voxel:.2f}"
        files = (
            _bytes(mode.totals.seam_voxels * job.config.model.output_channels * 4)
            if mode.totals.seam_voxels
            else "none"
        )
        table.add_row(mode.seams + chosen, calls, redundancy, files, border)
    fewest = min((mode for mode, _ in modes), key=lambda mode: mode.totals.patch_count)
    table.caption = (
        f"fewest network calls: {fewest.seams}; seam files are written and read once, and then "
        "removed"
    )
    table.caption_justify = "left"
    return table


def print_suggestions(
    job: PlannedJob,
    needs: NetworkNeeds,
    plans: Mapping[SeamMode, InferencePlan | None],
    memory_bytes: int,
    workers: int,
    *,
    as_json: bool = False,
) -> None:
    """The best chunk shape in each seam mode, for so many workers of so much memory each, and what it comes to."""
    if as_json:
        print(json.dumps(suggested_values(job, needs, plans, workers), indent=2))
        return
    floor = (
        job.plan.lattice.count * math.prod(job.plan.lattice.patch_shape) / job.plan.chunks.roi.size
    )
    table = Table(
        title=f"best chunk shapes for {workers} worker process(es) of {_bytes(memory_bytes)}",
        title_justify="left",
    )
    columns = (
        "seams",
        "chunk_shape",
        "chunks",
        "patch voxels per voxel",
        "memory",
        "on device",
        "read",
        "written",
    )
    for column in (*columns, "seam files", "objects", "busiest worker"):
        table.add_column(column, justify="left" if column in ("seams", "chunk_shape") else "right")
    itemsize = _itemsize(job.config.output.dtype)
    channels = job.output.channels
    for seams, plan in plans.items():
        if plan is None:
            table.add_row(seams, "none fits")
            continue
        memory = job.memory_for(plan, plan.totals.extremes, THIS_PROCESS, needs)
        blocks = blocks_written(plan)
        seam_files = most_seam_files(plan.totals, job.config.model.output_channels)
        read = plan.totals.input_voxels * job.input.channels * _itemsize(job.input.dtype.name)
        table.add_row(
            seams,
            _by(plan.chunks.chunk_shape),
            f"{plan.chunks.count:,}",
            f"{plan.totals.patch_voxels_per_voxel:.2f}",
            _bytes(memory.host_bytes),
            _bytes(memory.device_bytes),
            _bytes(read),
            _bytes(plan.chunks.roi.size * channels * itemsize),
            (
                _bytes(plan.totals.seam_voxels * job.config.model.output_channels * 4)
                if plan.exchange is not None
                else "none"
            ),
            f"{blocks + plan.chunks.count + plan.totals.owners + seam_files:,}",
            f"{busiest_worker(plan, workers):.2f}",
        )
    network = (
        f"with {_bytes(needs.working_set_bytes)} that the network allocates for a batch, as "
        "measured here"
    )
    if not needs.working_set_bytes:
        network = (
            "without what the network itself allocates for a batch; --calibrate measures it, where "
            "that can be done"
        )
    console = Console(width=max(150, Console().width), highlight=False)
    console.print(table)
    console.print(
        f"every patch once would be {floor:.2f} patch voxels per voxel; busiest worker: its "
        "patches at worst, over an even share. Seam files are written and read once, and "
        f"removed. Memory is counted {network}."
    )


def suggested_values(
    job: PlannedJob,
    needs: NetworkNeeds,
    plans: Mapping[SeamMode, InferencePlan | None],
    workers: int,
) -> dict[str, Any]:
    """The same as values for machines, by seam mode; null where no shape fits."""
    return {
        seams: (
            plan
            and {
                "chunk_shape": plan.chunks.chunk_shape,
                "chunks": plan.chunks.count,
                "network_calls": plan.totals.patch_count,
                "patch_voxels_per_voxel": plan.totals.patch_voxels_per_voxel,
                "host_bytes_per_worker": (
                    job.memory_for(plan, plan.totals.extremes, THIS_PROCESS, needs).host_bytes
                ),
                "seam_bytes": plan.totals.seam_voxels * job.config.model.output_channels * 4,
                "busiest_worker": busiest_worker(plan, workers),
            }
        )
        for seams, plan in plans.items()
    }


def print_estimates(
    job: PlannedJob,
    pyramid: Pyramid | None,
    measured: Measured,
    whole: Totals,
    expected: Sequence[Estimate],
    *,
    as_json: bool,
) -> None:
    """What was measured, and how long the job will take, and cost, as far as prices are known."""
    per_chunk = chunk_seconds(measured, whole)
    speed = whole.voxels / whole.chunks / per_chunk
    if as_json:
        values = {
            "measured": asdict(measured),
            "seconds_per_chunk": per_chunk,
            "voxels_per_second_and_worker": speed,
        }
        print(
            json.dumps(
                plan_values(job, pyramid) | values | {"estimates": [asdict(e) for e in expected]},
                indent=2,
            )
        )
        return
    print(
        f"measured here: {measured.call_seconds:.3g} s a call, reading "
        f"{1e-6 / measured.read_seconds:.0f} MB/s,",
        end="",
    )
    print(f" writing {1e-6 / measured.write_seconds:.0f} MB/s")
    print(
        f"so {per_chunk:.3g} s a chunk, {speed / 1e6:.3g} Mvoxel/s for each worker like this "
        "machine"
    )
    for each in expected:
        line = (
            f"{each.workers} worker(s), {each.kind}: {_hours(each.hours)}, at worst "
            f"{_hours(each.hours_at_worst)}"
        )
        if each.interruptions:
            line += f", {each.interruptions:.3g} interruptions"
        if each.money:
            line += (
                f"; {each.money:.2f} in all, {each.money_per_billion_voxels:.3g} per 10^9 voxels"
            )
        print(line)
    if pyramid is not None:
        print("the pyramid is in what is kept and in what requests cost, not in the hours")
    if expected[0].money_per_month:
        print(f"keeping the output, before compression: {expected[0].money_per_month:.2f} a month")


def _hours(hours: float) -> str:
    return f"{hours:.3g} h" if hours >= 0.1 else f"{3600 * hours:.3g} s"


def _itemsize(dtype: str) -> int:
    import numpy as np

    return np.dtype(dtype).itemsize


def print_pyramid(pyramid: Pyramid, *, as_json: bool = False) -> None:
    """The levels of a pyramid: sizes, voxel sizes, chunks, objects and bytes."""
    if as_json:
        print(json.dumps(_base_values(pyramid) | pyramid_values(pyramid), indent=2))
        return
    base = _base_values(pyramid)
    rows = Table(box=None, pad_edge=False)
    for heading in (
        "level",
        "voxels z, y, x",
        "voxel size nm",
        "factor",
        "chunks",
        "objects",
        "bytes",
    ):
        rows.add_column(heading, justify="left" if heading == "level" else "right")
    rows.add_row(
        "base",
        _by(base["shape"]),
        _sizes(base["voxel_size_nm"]),
        "",
        "",
        "",
        _bytes(base["base_bytes"]),
    )
    for level in pyramid_values(pyramid)["levels"]:
        rows.add_row(
            *(
                level["name"],
                _by(level["shape"]),
                _sizes(level["voxel_size_nm"]),
                _by(level["factor"]),
            ),
            *(f"{level['chunks']:,}", f"{level['blocks']:,}", _bytes(level["bytes"])),
        )
    console = Console(width=110, highlight=False)
    told = (
        f"{base['volume']}: {base['channels']} channel(s) of {base['dtype']}, by {pyramid.method}"
    )
    console.print(told, soft_wrap=True)
    console.print(rows)
    chunk = _bytes(base["chunk_bytes"])
    read = _bytes(base["read_at_once_bytes"])
    console.print(
        f"bytes are those before compression; a chunk takes {chunk}, and {read} of what it reads"
    )


def pyramid_values(pyramid: Pyramid) -> dict[str, Any]:
    """The levels of a pyramid as values for machines; bytes are decoded, shapes and sizes ZYX."""
    base = pyramid.base
    voxel = base.channels * base.dtype.itemsize
    return {
        "method": pyramid.method,
        "levels": [
            {
                "name": level.name,
                "shape": level.bounds.shape,
                "voxel_size_nm": base.voxel_size_nm and _times(base.voxel_size_nm, level.total),
                "factor": level.factor,
                "chunks": stage.count,
                "blocks": blocks,
                "bytes": level.bounds.size * voxel,
            }
            for level, stage, blocks in zip(
                pyramid.levels, pyramid.stages, pyramid.blocks, strict=True
            )
        ],
        "bytes": pyramid.size,
    }


def _base_values(pyramid: Pyramid) -> dict[str, Any]:
    """What a pyramid is made of, and what making it takes, likewise."""
    base = pyramid.base
    voxel = base.channels * base.dtype.itemsize
    return {
        "volume": base.url,
        "channels": base.channels,
        "dtype": base.dtype.name,
        "shape": base.bounds.shape,
        "voxel_size_nm": base.voxel_size_nm,
        "base_bytes": base.bounds.size * voxel,
        "chunk_bytes": (
            max(math.prod(stage.chunks.chunk_shape) for stage in pyramid.stages) * voxel
        ),
        "read_at_once_bytes": (
            max(math.prod(s.part_shape) * math.prod(s.level.factor) for s in pyramid.stages) * voxel
        ),
    }


def _times(sizes: VoxelSizeNm, factors: Zyx) -> tuple[float, ...]:
    return tuple(size * factor for size, factor in zip(sizes, factors, strict=True))


def _sizes(sizes: VoxelSizeNm | None) -> str:
    return "unknown" if sizes is None else " × ".join(f"{size:g}" for size in sizes)


def _by(shape: Zyx) -> str:
    return "×".join(map(str, shape))


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} PiB"
