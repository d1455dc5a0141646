"""What commands print for people: plans, outcomes and verifications."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from beam_inference.bounding_box import Zyx
from beam_inference.config import JobConfig
from beam_inference.stores import local_folder
from beam_inference.survey import Place, Survey, default_state_url
from beam_inference.verification import VerifyReport

if TYPE_CHECKING:
    from beam_inference.runner import JobOutcome
    from beam_inference.status import JobStatus

_NAMED_CHUNKS = 10


def print_plan(survey: Survey) -> None:
    """What a job comes to: boxes, counts, redundancy of each seam mode, bytes, objects, memory."""
    job, output = survey.job, survey.output
    plan, config = job.plan, job.config
    console = Console(width=110, highlight=False)
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_row("input", f"{plan.volume}, {job.input_channels} channel(s) of {job.input_dtype}")
    facts.add_row("roi", f"{plan.chunks.roi}, {plan.chunks.roi.size:,} voxels")
    facts.add_row("domain", f"{plan.lattice.domain}, what the patch lattice tiles")
    facts.add_row("output", f"{output.bounds}, {output.channels} channel(s) of {output.dtype}, {output.format}")
    facts.add_row("", "exists already" if survey.output_exists else "will be created")
    chunk = plan.chunks.chunk_shape
    facts.add_row("chunks", f"{plan.chunks.count:,} of {_by(chunk)} voxels, {_by(plan.chunks.shape)} of them")
    patch = plan.lattice.patch_shape
    facts.add_row("patches", f"{plan.patch_count:,} of {_by(patch)} voxels, overlap {_by(plan.lattice.patch_overlap)}")
    read = plan.input_voxels * job.input_channels * _itemsize(job.input_dtype)
    facts.add_row("read", f"{_bytes(read)}, halo re-reads included, before rounding to storage blocks")
    written = plan.chunks.roi.size * output.channels * _itemsize(output.dtype)
    blocks = math.prod(-(-n // b) for n, b in zip(plan.chunks.roi.shape, output.block_shape, strict=True))
    facts.add_row("written", f"{_bytes(written)} before compression, in {blocks:,} blocks of {_by(output.block_shape)}")
    facts.add_row("objects", f"{blocks:,} blocks + {plan.chunks.count:,} receipts")
    place = Place()
    memory = survey.memory(place)
    threads = f"{place.threads_per_process} harness threads"
    facts.add_row("memory", f"{_bytes(memory.host_bytes)} per worker process with {threads}, for its chunks;")
    facts.add_row("", "beside the libraries, the weights, and what the network itself allocates for a batch")
    if config.inference.device == "cuda":
        facts.add_row("", f"{_bytes(memory.device_bytes)} on the GPU, likewise")
    console.print(facts)
    console.print()
    console.print(_seams_table(survey))


def _seams_table(survey: Survey) -> Table:
    job = survey.job
    plan, inference = job.plan, job.config.inference
    margin = inference.chunk_crop_margin or inference.patch_overlap
    recompute = replace(plan, seams="recompute", chunk_crop_margin=(0, 0, 0))
    crop = replace(plan, seams="crop", chunk_crop_margin=margin)
    floor = plan.lattice.count * math.prod(plan.lattice.patch_shape) / plan.chunks.roi.size
    table = Table(title="seam modes", title_justify="left")
    for column in ("seams", "network calls", "patch voxels per output voxel", "at chunk borders"):
        table.add_column(column, justify="left" if column in ("seams", "at chunk borders") else "right")
    for mode, border in ((recompute, "exact"), (crop, f"seams; margin {_by(margin)} cropped")):
        chosen = " (this job)" if mode.seams == plan.seams else ""
        table.add_row(mode.seams + chosen, f"{mode.patch_count:,}", f"{mode.patch_voxels_per_voxel:.2f}", border)
    table.add_row("every patch once", f"{plan.lattice.count:,}", f"{floor:.2f}", "the floor, for comparison")
    return table


def print_outcome(outcome: JobOutcome, config: JobConfig, words: Sequence[str]) -> None:
    """What a launch came to, and what to do next; ``words`` are the command that was given."""
    state, again = default_state_url(config), _without_chunks(words)
    if not config.job.resume:
        again += ["--set", "job.resume=true"]  # what is done is not to be done anew
    if outcome.staged_at:
        print(f"staged at {outcome.staged_at}: whoever launches it runs the job; see how far it is with status")
        return
    if outcome.error:
        print(f"the launch ended early: {outcome.error}")
    print(f"{outcome.done} of {outcome.chunks} chunks done, in {outcome.seconds:.1f} s", end="")
    if outcome.summary:
        print(f" ({outcome.summary.done} by this launch)", end="")
    print()
    for record in outcome.quarantined[:_NAMED_CHUNKS]:
        print(f"quarantined: chunk {record.chunk} {record.box.box()}: {record.cause}")
    if len(outcome.quarantined) > _NAMED_CHUNKS:
        print(f"… and {len(outcome.quarantined) - _NAMED_CHUNKS} more")
    if outcome.quarantined:
        folder = local_folder(state)
        file = f"{folder or state}/quarantine.jsonl"
        print(f"to do them again: {shlex.join([*again, '--chunks', file])}")
    if outcome.missing:
        print(f"{outcome.missing} chunks are missing; to do what is missing: {shlex.join(again)}")
    if not outcome.missing_of_job:
        print(f"complete: {config.output.path}")
    elif outcome.done == outcome.chunks:
        print(f"the chosen chunks are done; {outcome.missing_of_job} others of the job are not: {shlex.join(again)}")


def _without_chunks(words: Sequence[str]) -> list[str]:
    """A command without --chunks and --overwrite: what does the rest of the job."""
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before != "--chunks" and word.partition("=")[0] not in ("--chunks", "--overwrite"):
            kept.append(word)
    return kept


def print_verification(report: VerifyReport, *, deep: bool) -> None:
    """What verification found."""
    print(f"{report.receipts} of {report.chunks} chunks have a receipt")
    for line in report.wrong[:_NAMED_CHUNKS]:
        print(f"wrong: {line}")
    if len(report.wrong) > _NAMED_CHUNKS:
        print(f"… and {len(report.wrong) - _NAMED_CHUNKS} more that are wrong")
    for record in report.quarantined[:_NAMED_CHUNKS]:
        print(f"quarantined: chunk {record.chunk} {record.box.box()}: {record.cause}")
    if report.missing_count:
        more = " …" if report.missing_count > len(report.missing) else ""
        print(f"missing: {report.missing_count} chunks: {', '.join(map(str, report.missing))}{more}")
    if report.complete:
        print("complete" + (", and every chunk reads back as it was written" if deep else ""))
    else:
        print("not complete")


def print_status(status: JobStatus) -> None:
    """How far a job is, in a few lines."""
    done = status.done / status.planned
    print(f"{status.done:,} of {status.planned:,} chunks done ({done:.1%}), {status.missing:,} missing", end="")
    print(f", {status.quarantined:,} quarantined" if status.quarantined else "")
    if not status.missing:
        print("nothing is missing" if status.quarantined else "complete; verify reads it back")
    elif status.rate is None:
        since = f"; the latest chunk looked at was finished {status.latest:%Y-%m-%d %H:%M} UTC" if status.latest else ""
        print(f"no chunk was finished in the last five minutes{since}")
    else:
        speed = f"{status.rate:.3g} chunks/s, {status.rate * status.voxels_per_chunk / 1e6:.3g} Mvoxel/s"
        left = timedelta(seconds=round(status.seconds_left or 0))
        print(f"{speed}, by {status.workers} or more worker processes; {left} left at this rate")


def _itemsize(dtype: str) -> int:
    import numpy as np

    return np.dtype(dtype).itemsize


def _by(shape: Zyx) -> str:
    return "×".join(map(str, shape))


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} PiB"
