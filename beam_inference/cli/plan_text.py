"""What ``plan`` and ``pyramid`` print: the size and cost of a job, for people or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from rich.console import Console
from rich.table import Table

from beam_inference.cli.terminal import table_console
from beam_inference.cli.text import format_hours, format_shape, format_voxel_size
from beam_inference.config.fields import Json
from beam_inference.config.inference import Gaussian, Inference
from beam_inference.config.job import OUTPUT
from beam_inference.config.volumes import Mask
from beam_inference.environment import format_bytes
from beam_inference.geometry.chunk_shape import busiest_worker
from beam_inference.geometry.exact_sums import largest_rounding
from beam_inference.geometry.plan import InferencePlan, Strategy
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.launch.cost import (
    Estimate,
    Measured,
    Totals,
    chunk_seconds,
    job_totals,
)
from beam_inference.launch.output_pyramid import add_pyramids
from beam_inference.launch.planned_job import NetworkNeeds, PlannedJob, PlannedOutput
from beam_inference.launch.stored_size import StoredSize

if TYPE_CHECKING:
    from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
    from beam_inference.pyramid.pyramid import Pyramid
    from beam_inference.volumes.input_volume import InputVolume

Row: TypeAlias = tuple[str, str]
"""A heading and a line; further lines of the same subject have an empty heading."""


def print_plan(
    job: PlannedJob,
    pyramids: Mapping[str, Pyramid],
    stored: StoredSize | None,
    place: Place = THIS_PROCESS,
    undecided: Sequence[str] = (),
    *,
    as_json: bool = False,
) -> None:
    """Print the size of a job: boxes, counts, bytes, objects, memory, pyramids, and strategies.

    Args:
        job: the job.
        pyramids: those of its outputs that are to be made.
        stored: what it takes in its store; None if no chunk of it is done.
        place: where its workers run.
        undecided: keys of ``inference`` that a worker is to decide.
        as_json: print JSON.
    """
    if as_json:
        _print_json(plan_values(job, pyramids, stored, place, undecided))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for heading, line in [
        *_volume_rows(job),
        *_mask_rows(job),
        *_geometry_rows(job),
        *_precision_rows(job),
        *_undecided_rows(undecided),
        *_storage_rows(job),
        *_pyramids_rows(job, pyramids),
        *_stored_rows(stored),
        *_memory_rows(job, place),
    ]:
        table.add_row(heading, line)
    console = table_console(110)
    console.print(table)
    console.print()
    console.print(_strategies_table(job))


def _volume_rows(job: PlannedJob) -> Iterator[Row]:
    plan = job.plan
    yield "input", f"{plan.volume}, {job.input.channels} channel(s) of {job.input.dtype.name}"
    if job.input.whole is not None:
        yield "", f"read as if it ended there; {job.input.whole} is stored"
    resampling = job.input.resampling
    if resampling is not None:
        own, made = (
            format_voxel_size(each.voxel_size_nm) for each in (job.input.stored, job.input)
        )
        orders = ", ".join(map(str, resampling.orders))
        yield "", f"resampled from {resampling.source}, voxels of {own} nm,"
        yield "", f"to voxels of {made} nm, by splines of the orders {orders} (z, y, x)"
    for number, further in enumerate(job.input.further):
        yield from _further_input_rows(f"inputs.{number}", further.volume)
    if job.to_output is not None:
        size = format_voxel_size(job.output.voxel_size_nm)
        orders = ", ".join(map(str, job.to_output.orders))
        yield "", "the network's answers are resampled to the output's voxels,"
        yield "", f"{job.to_output.target}, of {size} nm, by splines of the orders {orders}"
    yield "roi", f"{job.roi}, {job.roi.size:,} voxels"
    if plan.chunks.roi != job.roi:
        yield "", f"with background around it in whole blocks, {plan.chunks.roi}"
    yield "domain", f"{plan.lattice.domain}, what the patch lattice tiles"
    if job.config.roi is not None and job.config.roi.domain is not None:
        yield "", "inside it, a later launch may enlarge the roi"
    for key, each in job.outputs.items():
        spec = each.spec
        head = job.config.by_output[key].output.head
        what = "" if head is None else f"head {head}, "
        yield (
            _name("output", key),
            f"{spec.bounds}, {what}{spec.channels} channel(s) of {spec.dtype}, {spec.format}",
        )
        yield "", "exists already" if each.exists else "will be created"
    for key, each in job.previews.items():
        text = f"{each.spec.bounds}, {each.spec.dtype}, blocks of "
        yield _name("preview", job.config.previews[key]), text + format_shape(each.spec.block_shape)


def _further_input_rows(name: str, volume: InputVolume) -> Iterator[Row]:
    yield name, f"{volume.url}, {volume.channels} channel(s) of {volume.stored.dtype.name}"
    resampling = volume.resampling
    if resampling is not None:
        own = format_voxel_size(volume.stored.voxel_size_nm)
        orders = ", ".join(map(str, resampling.orders))
        yield "", f"resampled from {resampling.source}, voxels of {own} nm,"
        yield "", f"to those of the input, by splines of the orders {orders} (z, y, x)"


def _precision_rows(job: PlannedJob) -> Iterator[Row]:
    if job.config.inference.precision == "int8":
        from beam_inference.engines.trial import TOLERANCES
        from beam_inference.worker.trial import boxes_to_calibrate

        count = len(boxes_to_calibrate(job.plan))
        yield (
            "precision",
            f"int8, calibrated by the first launch on {count} patch(es) of the input, and refused "
            f"if it is off float32 by more than {TOLERANCES['int8']:g} of the range (root mean "
            "square over a patch)",
        )


def _undecided_rows(undecided: Sequence[str]) -> Iterator[Row]:
    """What a worker is to decide, and what the figures are of until then."""
    if undecided:
        yield "network", f"{', '.join(undecided)}: to be decided on a worker, by the first launch;"
        supposed = {"device": "the CPU", "engine": "PyTorch", "batch_size": "batches of 1"}
        yield "", f"figures here are those of {' and '.join(supposed[key] for key in undecided)}"


def _mask_rows(job: PlannedJob) -> Iterator[Row]:
    config = job.config
    for heading, mask in (("input mask", config.input.mask), ("output mask", config.mask)):
        if mask is not None:
            yield heading, f"{mask.path}{_kept_text(mask)}, elsewhere {mask.fill_value}"
    if config.mask is not None:
        yield "", "chunks wholly outside it cost nothing: the figures below are upper bounds"


def _kept_text(mask: Mask) -> str:
    """What a mask keeps, unless it is what any mask keeps: begins with a comma."""
    words = ["inverse"] if mask.inverse else []
    words += [
        f"{key} {value if key != 'equals' else ' or '.join(map(str, mask.equals or ()))}"
        for key, value in (("above", mask.above), ("below", mask.below), ("equals", mask.equals))
        if value is not None
    ]
    return "".join(f", {word}" for word in words)


def _geometry_rows(job: PlannedJob) -> Iterator[Row]:
    plan = job.plan
    chunks = plan.chunks
    lattice = plan.lattice
    yield (
        "chunks",
        f"{chunks.count:,} of {format_shape(chunks.chunk_shape)} voxels, "
        f"{format_shape(chunks.shape)} of them",
    )
    yield (
        "patches",
        f"{plan.totals.patch_count:,} of {format_shape(lattice.patch_shape)} voxels, "
        f"overlap {format_shape(lattice.patch_overlap)}{_unusual_blending(job.config.inference)}",
    )
    terms = lattice.most_patches
    bound = job.config.model.stated_bound
    if bound is None:  # a trial will find a power of two, up to twice the largest value
        rounding = f"{largest_rounding(2.0, terms):.1e} of the largest value"
    else:
        rounding = f"{largest_rounding(bound, terms):.1e}"
    yield (
        "sums",
        f"of at most {terms} patches a voxel, off by {rounding} at most; the same bits however the "
        "job is cut",
    )


def _unusual_blending(inference: Inference) -> str:
    """Lattice and blend weights where they are not the usual ones."""
    blend = inference.blend
    texts = []
    if inference.lattice != "stride":
        texts.append(f", lattice {inference.lattice}")
    if isinstance(blend, Gaussian):
        texts.append(f", blend gaussian {blend.gaussian:g}, floor {blend.floor}")
    elif blend != "bump":
        texts.append(f", blend {blend}")
    return "".join(texts)


def _storage_rows(job: PlannedJob) -> Iterator[Row]:
    whole = job_totals(job)
    shapes = [format_shape(each.spec.write_shape) for each in job.outputs.values()]
    yield (
        "read",
        f"{format_bytes(whole.read_bytes)}, halo re-reads included, before rounding to storage "
        "blocks",
    )
    yield (
        "written",
        f"{format_bytes(whole.written_bytes)} before compression, in {whole.blocks:,} blocks of "
        f"{' and '.join(dict.fromkeys(shapes))}",
    )
    objects = f"{whole.blocks:,} blocks + {whole.receipts:,} receipts"
    if whole.seam_files:
        objects += f" + at most {whole.seam_files:,} seam files"
    yield "objects", objects


def _pyramids_rows(job: PlannedJob, pyramids: Mapping[str, Pyramid]) -> Iterator[Row]:
    for key, single in job.config.by_output.items():
        if single.output.pyramid is not None:
            yield from _pyramid_rows(_name("pyramid", key), pyramids.get(key))


def _name(subject: str, output: str) -> str:
    """The heading of a line on an output."""
    return subject if output == OUTPUT else f"{subject} {output.removeprefix('outputs.')}"


def _pyramid_rows(heading: str, pyramid: Pyramid | None) -> Iterator[Row]:
    if pyramid is None:
        yield heading, "no scale: one block holds the output"
        return
    coarsest = format_shape(pyramid.scales[-1].bounds.shape)
    yield (
        heading,
        f"{len(pyramid.scales)} scales by {pyramid.method}, the coarsest {coarsest} voxels; once "
        "every chunk is done",
    )
    yield (
        "",
        f"{format_bytes(pyramid.size)} before compression, in {sum(pyramid.blocks):,} blocks + "
        f"{pyramid.count:,} records",
    )


def _stored_rows(stored: StoredSize | None) -> Iterator[Row]:
    """What the job takes in its store, and what this rests on."""
    if stored is None:
        yield "stored", "not known: it depends on the values, and no chunk of this job is done;"
        yield "", "after run --sample 0.02, plan tells it from the chunks of that sample"
        return
    yield (
        "stored",
        f"about {format_bytes(stored.stored_bytes)} in {stored.objects:,} objects, receipts "
        "included: by blocks of chunks that are done,",
    )
    for key, sample in stored.samples.items():
        name = "" if len(stored.samples) == 1 else f"{key}: "
        yield (
            "",
            f"{name}{sample.blocks} of {format_bytes(sample.decoded_bytes)} take "
            f"{format_bytes(sample.stored_bytes)} ({sample.ratio:.1%})",
        )


def _memory_rows(job: PlannedJob, place: Place) -> Iterator[Row]:
    memory = job.memory(place)
    yield (
        "memory",
        f"{format_bytes(memory.host_bytes)} per worker process with {place.threads_per_process} "
        "harness threads, for its chunks;",
    )
    depth = job.io_depth(place)
    if depth > 1:
        deepest = job.memory(place, io_depth=depth)
        yield (
            "",
            f"up to {format_bytes(deepest.host_bytes)} where stores are slow, and {depth} chunks "
            "are read ahead and written behind;",
        )
    yield "", "beside the libraries, the weights, and what the network itself allocates for a batch"
    if job.settings.device != "cpu":
        yield "", f"{format_bytes(memory.device_bytes)} on the GPU, likewise"


def _strategies_table(job: PlannedJob) -> Table:
    table = Table(title="strategies", title_justify="left", caption_justify="left")
    _add_columns(
        table,
        ("strategy", "patches", "patch voxels per voxel", "seam files", "at chunk borders"),
        left=("strategy", "at chunk borders"),
    )
    margin = format_shape(job.plan_in("crop").chunk_crop_margin)
    borders: dict[Strategy, str] = {
        "exchange": "exact",
        "recompute": "exact, the same bits",
        "crop": f"seams; margin {margin} cropped",
    }
    possible = list(map(job.plan_in, borders))
    for plan in possible:
        chosen = " (this job)" if plan.strategy == job.plan.strategy else ""
        table.add_row(
            plan.strategy + chosen,
            f"{plan.totals.patch_count:,}",
            f"{plan.totals.patch_voxels_per_voxel:.2f}",
            format_bytes(job_totals(job, plan).seam_bytes) if plan.totals.seam_voxels else "none",
            borders[plan.strategy],
        )
    fewest = min(possible, key=lambda plan: plan.totals.patch_count)
    table.caption = (
        f"fewest patches: {fewest.strategy}; seam files are written and read once, and then removed"
    )
    return table


def plan_values(
    job: PlannedJob,
    pyramids: Mapping[str, Pyramid],
    stored: StoredSize | None,
    place: Place = THIS_PROCESS,
    undecided: Sequence[str] = (),
) -> Json:
    """The size of a job, pyramids included, as JSON values.

    Bytes are decoded, but for those of ``compressed``, which is None if no chunk is done; shapes
    are ZYX.
    """
    plan = job.plan
    whole = add_pyramids(job_totals(job), pyramids.values())
    pyramid = pyramids.get(OUTPUT)
    memory = job.memory(place)
    return {
        "decided_on_worker": list(undecided),
        "roi": asdict(job.roi),
        "chunks": whole.chunks,
        "chunk_shape": plan.chunks.chunk_shape,
        "patches": whole.patches,
        "patch_voxels_per_voxel": plan.totals.patch_voxels_per_voxel,
        "read_bytes": whole.read_bytes + whole.seam_bytes,
        "written_bytes": whole.written_bytes + whole.seam_bytes,
        "stored_bytes": whole.stored_bytes,
        "objects": whole.write_requests,
        "compressed": None if stored is None else asdict(stored),
        "host_bytes_per_worker": memory.host_bytes,
        "device_bytes": memory.device_bytes,
        "outputs": {key: _output_values(each) for key, each in job.volumes.items()},
        "pyramid": None if pyramid is None else pyramid_values(pyramid),
        "further_pyramids": {
            key: pyramid_values(each) for key, each in pyramids.items() if key != OUTPUT
        },
        "strategies": {
            each.strategy: {
                "network_calls": each.totals.patch_count,
                "patch_voxels_per_voxel": each.totals.patch_voxels_per_voxel,
                "seam_bytes": job_totals(job, each).seam_bytes,
                "this_job": each.strategy == plan.strategy,
            }
            for each in map(job.plan_in, get_args(Strategy))
        },
    }


def _output_values(output: PlannedOutput) -> Json:
    spec = output.spec
    return {
        "url": spec.url,
        "channels": spec.channels,
        "dtype": spec.dtype,
        "format": spec.format,
        "block_shape": spec.write_shape,
        "exists": output.exists,
    }


def print_suggestions(
    job: PlannedJob,
    needs: NetworkNeeds,
    plans: Mapping[Strategy, InferencePlan | None],
    memory_bytes: int,
    workers: int,
    *,
    as_json: bool = False,
) -> None:
    """Print the best chunk shape by each strategy, and what a job of such chunks needs.

    Args:
        job: the job.
        needs: memory of its network, as far as it is known.
        plans: the best plan by each strategy; None if no chunk shape fits.
        memory_bytes: memory of one worker process that the plans may use.
        workers: number of worker processes.
        as_json: print JSON.
    """
    if as_json:
        _print_json(suggested_values(job, needs, plans, workers))
        return
    table = Table(
        title=f"best chunk shapes for {workers} worker process(es) of {format_bytes(memory_bytes)}",
        title_justify="left",
    )
    columns = (
        "strategy",
        "chunk_shape",
        "chunks",
        "patch voxels per voxel",
        "memory",
        "on device",
        "read",
        "written",
        "seam files",
        "objects",
        "busiest worker",
    )
    _add_columns(table, columns, left=("strategy", "chunk_shape"))
    for strategy, plan in plans.items():
        if plan is None:
            table.add_row(strategy, "none fits")
        else:
            table.add_row(strategy, *_suggestion_cells(job, needs, plan, workers))
    console = table_console(max(150, Console().width))
    console.print(table)
    console.print(_suggestion_notes(job, needs))


def _suggestion_cells(
    job: PlannedJob, needs: NetworkNeeds, plan: InferencePlan, workers: int
) -> Iterator[str]:
    """The cells of a row of the suggestions, without the strategy."""
    memory = job.memory_for(plan, plan.totals.extremes, THIS_PROCESS, needs)
    whole = job_totals(job, plan)
    yield format_shape(plan.chunks.chunk_shape)
    yield f"{plan.chunks.count:,}"
    yield f"{plan.totals.patch_voxels_per_voxel:.2f}"
    yield format_bytes(memory.host_bytes)
    yield format_bytes(memory.device_bytes)
    yield format_bytes(whole.read_bytes)
    yield format_bytes(whole.written_bytes)
    yield "none" if plan.exchange is None else format_bytes(whole.seam_bytes)
    yield f"{whole.blocks + whole.receipts + whole.seam_files:,}"
    yield f"{busiest_worker(plan, workers):.2f}"


def _suggestion_notes(job: PlannedJob, needs: NetworkNeeds) -> str:
    plan = job.plan
    least = plan.lattice.count * math.prod(plan.lattice.patch_shape) / plan.chunks.roi.size
    if needs.working_set_bytes:
        network = (
            f"with {format_bytes(needs.working_set_bytes)} that the network allocates for a "
            "batch, as measured here"
        )
    else:
        network = (
            "without what the network itself allocates for a batch; --calibrate measures it, where "
            "that can be done"
        )
    return (
        f"every patch once would be {least:.2f} patch voxels per voxel; busiest worker: its "
        "patches at worst, over an even share. Seam files are written and read once, and "
        f"removed. Memory is counted {network}."
    )


def suggested_values(
    job: PlannedJob,
    needs: NetworkNeeds,
    plans: Mapping[Strategy, InferencePlan | None],
    workers: int,
) -> Json:
    """The suggestions as JSON values, by strategy; None if no chunk shape fits."""
    return {
        strategy: None if plan is None else _suggestion_values(job, needs, plan, workers)
        for strategy, plan in plans.items()
    }


def _suggestion_values(
    job: PlannedJob, needs: NetworkNeeds, plan: InferencePlan, workers: int
) -> Json:
    memory = job.memory_for(plan, plan.totals.extremes, THIS_PROCESS, needs)
    return {
        "chunk_shape": plan.chunks.chunk_shape,
        "chunks": plan.chunks.count,
        "network_calls": plan.totals.patch_count,
        "patch_voxels_per_voxel": plan.totals.patch_voxels_per_voxel,
        "host_bytes_per_worker": memory.host_bytes,
        "seam_bytes": job_totals(job, plan).seam_bytes,
        "busiest_worker": busiest_worker(plan, workers),
    }


def print_estimates(
    job: PlannedJob,
    pyramids: Mapping[str, Pyramid],
    measured: Measured,
    whole: Totals,
    expected: Sequence[Estimate],
    stored: StoredSize | None,
    *,
    as_json: bool,
) -> None:
    """Print what was measured, and estimates of run time and, as far as prices are known, cost.

    Args:
        job: the job.
        pyramids: those of its outputs that are to be made.
        measured: speeds measured here.
        whole: size of the job, pyramid included.
        expected: the estimates, one per kind of worker.
        stored: what the job takes in its store; None if no chunk of it is done.
        as_json: print JSON, with all that ``plan`` prints.
    """
    per_chunk = chunk_seconds(measured, whole)
    speed = whole.voxels / whole.chunks / per_chunk
    if as_json:
        values = {
            "measured": asdict(measured),
            "seconds_per_chunk": per_chunk,
            "voxels_per_second_and_worker": speed,
            "estimates": [asdict(estimate) for estimate in expected],
        }
        _print_json(plan_values(job, pyramids, stored) | values)
        return
    print(
        f"measured here: {measured.call_seconds:.3g} s a call, reading "
        f"{1e-6 / measured.read_seconds:.0f} MB/s, writing "
        f"{1e-6 / measured.write_seconds:.0f} MB/s"
    )
    print(
        f"so {per_chunk:.3g} s a chunk, {speed / 1e6:.3g} Mvoxel/s for each worker like this "
        "machine"
    )
    for estimate in expected:
        print(_estimate_line(estimate))
    if pyramids:
        print("storage and request costs include the pyramid; hours do not")
    if expected[0].money_per_month:
        rests_on = "as it would take before compression: no chunk of this job is done"
        if stored is not None:
            blocks = sum(sample.blocks for sample in stored.samples.values())
            rests_on = f"as {blocks} of its blocks that are done are stored"
        print(f"keeping the output, {rests_on}: {expected[0].money_per_month:.2f} a month")


def _estimate_line(estimate: Estimate) -> str:
    line = (
        f"{estimate.workers} worker(s), {estimate.kind}: {format_hours(estimate.hours)}, at worst "
        f"{format_hours(estimate.hours_at_worst)}"
    )
    if estimate.interruptions:
        line += f", {estimate.interruptions:.3g} interruptions"
    if estimate.money:
        line += (
            f"; {estimate.money:.2f} in all, {estimate.money_per_billion_voxels:.3g} per 10^9 "
            "voxels"
        )
    return line


def print_pyramid(pyramid: Pyramid, *, as_json: bool = False) -> None:
    """Print the scales of a pyramid: sizes, voxel sizes, chunks, objects and bytes."""
    base = _base_values(pyramid)
    if as_json:
        _print_json(base | pyramid_values(pyramid))
        return
    table = Table(box=None, pad_edge=False)
    _add_columns(
        table,
        ("scale", "voxels z, y, x", "voxel size nm", "factor", "chunks", "objects", "bytes"),
        left=("scale",),
    )
    table.add_row(
        "base",
        format_shape(base["shape"]),
        format_voxel_size(base["voxel_size_nm"]),
        "",
        "",
        "",
        format_bytes(base["base_bytes"]),
    )
    for scale in pyramid_values(pyramid)["levels"]:
        table.add_row(
            scale["name"],
            format_shape(scale["shape"]),
            format_voxel_size(scale["voxel_size_nm"]),
            format_shape(scale["factor"]),
            f"{scale['chunks']:,}",
            f"{scale['blocks']:,}",
            format_bytes(scale["bytes"]),
        )
    console = table_console(110)
    console.print(
        f"{base['volume']}: {base['channels']} channel(s) of {base['dtype']}, by {pyramid.method}",
        soft_wrap=True,
    )
    console.print(table)
    console.print(
        "bytes are those before compression; a chunk takes "
        f"{format_bytes(base['chunk_bytes'])}, and {format_bytes(base['read_at_once_bytes'])} of "
        "what it reads"
    )


def pyramid_values(pyramid: Pyramid) -> Json:
    """The scales of a pyramid as JSON values: bytes are decoded, shapes and sizes ZYX."""
    base = pyramid.base
    voxel_bytes = base.channels * base.dtype.itemsize
    return {
        "method": pyramid.method,
        "levels": [
            {
                "name": scale.name,
                "shape": scale.bounds.shape,
                "voxel_size_nm": _coarser_voxel_size(base.voxel_size_nm, scale.total),
                "factor": scale.factor,
                "chunks": stage.count,
                "blocks": blocks,
                "bytes": scale.bounds.size * voxel_bytes,
            }
            for scale, stage, blocks in zip(
                pyramid.scales, pyramid.stages, pyramid.blocks, strict=True
            )
        ],
        "bytes": pyramid.size,
    }


def _base_values(pyramid: Pyramid) -> Json:
    """The volume that a pyramid is made from, and the memory that takes, as JSON values."""
    base = pyramid.base
    voxel_bytes = base.channels * base.dtype.itemsize
    return {
        "volume": base.url,
        "channels": base.channels,
        "dtype": base.dtype.name,
        "shape": base.bounds.shape,
        "voxel_size_nm": base.voxel_size_nm,
        "base_bytes": base.bounds.size * voxel_bytes,
        "chunk_bytes": (
            max(math.prod(stage.chunks.chunk_shape) for stage in pyramid.stages) * voxel_bytes
        ),
        "read_at_once_bytes": (
            max(
                math.prod(stage.part_shape) * math.prod(stage.scale.factor)
                for stage in pyramid.stages
            )
            * voxel_bytes
        ),
    }


def _coarser_voxel_size(base: VoxelSizeNm | None, factor: Zyx) -> VoxelSizeNm | None:
    if base is None:
        return None
    return (base[0] * factor[0], base[1] * factor[1], base[2] * factor[2])


def _add_columns(table: Table, headings: Sequence[str], left: Sequence[str]) -> None:
    """Add columns to a table: those in ``left`` are text, the others numbers."""
    for heading in headings:
        justify: Literal["left", "right"] = "left" if heading in left else "right"
        table.add_column(heading, justify=justify)


def _print_json(values: Json) -> None:
    print(json.dumps(values, indent=2))
