"""How a job stands: what run, status and verify tell, people in a few lines, programs as one JSON object."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from beam_inference.config.job import JobConfig
from beam_inference.job.records import QuarantineRecord
from beam_inference.job.state import default_state_url
from beam_inference.job.status import JobStatus
from beam_inference.job.verification import VerifyReport
from beam_inference.launch.output_pyramid import PyramidStatus, pyramid_told
from beam_inference.volumes.kvstores import local_folder

if TYPE_CHECKING:
    from beam_inference.launch.run_job import JobOutcome

_NAMED_CHUNKS = 10


def as_json(values: dict[str, Any]) -> str:
    """Values for programs, as one JSON object."""
    return json.dumps(values, indent=2)


def outcome_values(outcome: JobOutcome, config: JobConfig) -> dict[str, Any]:
    """What a launch came to."""
    return {
        "chunks": outcome.chunks,
        "done": outcome.done,
        "done_by_this_launch": outcome.summary and outcome.summary.done,
        "missing": outcome.missing,
        "missing_of_job": outcome.missing_of_job,
        "quarantined": len(outcome.quarantined),
        "quarantine": list(map(_record_values, outcome.quarantined)),
        "pyramid": (
            outcome.pyramid
            and pyramid_status_values(outcome.pyramid, waits=outcome.missing_of_job > 0)
        ),
        "seconds": outcome.seconds,
        "error": outcome.error,
        "staged_at": outcome.staged_at,
        "output": config.output.path,
        "state": default_state_url(config),
    }


def verification_values(
    report: VerifyReport, pyramid: PyramidStatus | None, *, deep: bool
) -> dict[str, Any]:
    """What verification found; of the missing chunks the first few are named."""
    return {
        "complete": report.complete and (pyramid is None or pyramid.complete),
        "deep": deep,
        "chunks": report.chunks,
        "done": report.receipts,
        "missing": report.missing_count,
        "first_missing": report.missing,
        "quarantined": len(report.quarantined),
        "quarantine": list(map(_record_values, report.quarantined)),
        "wrong": report.wrong,
        "pyramid": (
            pyramid and pyramid_status_values(pyramid, waits=report.receipts < report.chunks)
        ),
    }


def status_values(status: JobStatus, pyramid: PyramidStatus | None) -> dict[str, Any]:
    """How far a job is; null is what cannot be told, or what such a job does not have."""
    return {
        "chunks": status.planned,
        "done": status.done,
        "missing": status.missing,
        "quarantined": status.quarantined,
        "patches_computed": status.summed,
        "chunks_with_patches": status.owners,
        "in_first_stage": status.in_first_stage,
        "chunks_per_second": status.rate,
        "voxels_per_second": status.voxels_per_second,
        "workers": status.workers,
        "seconds_left": status.seconds_left,
        "latest": status.latest and status.latest.isoformat(),
        "pyramid": pyramid and pyramid_status_values(pyramid, waits=status.done < status.planned),
    }


def pyramid_status_values(status: PyramidStatus, *, waits: bool) -> dict[str, Any]:
    """How far a job's pyramid is; it ``waits`` while chunks of the job are not done."""
    return {"complete": status.complete and not waits, "waits": waits, **asdict(status)}


def _record_values(record: QuarantineRecord) -> dict[str, Any]:
    return record.model_dump(mode="json", include={"chunk", "box", "stage", "cause", "attempts"})


def print_outcome(
    outcome: JobOutcome, config: JobConfig, words: Sequence[str], view: Sequence[str]
) -> None:
    """What a launch came to, and what to do next; ``words`` are the command given, ``view`` the one to look at it."""
    state = default_state_url(config)
    again = _without_chunks(words)
    if not config.job.resume:
        again += ["--set", "job.resume=true"]  # what is done is not to be done anew
    if outcome.staged_at:
        print(
            f"staged at {outcome.staged_at}: whoever launches it runs the job; see how far it is "
            "with status"
        )
        return
    if outcome.error:
        print(f"the launch ended early: {outcome.error}")
    print(f"{outcome.done} of {outcome.chunks} chunks done, in {outcome.seconds:.1f} s", end="")
    if outcome.summary:
        print(f" ({outcome.summary.done} by this launch)", end="")
    print()
    for record in outcome.quarantined[:_NAMED_CHUNKS]:
        print(f"quarantined: chunk {record.chunk} {record.box}: {record.cause}")
    if len(outcome.quarantined) > _NAMED_CHUNKS:
        print(f"… and {len(outcome.quarantined) - _NAMED_CHUNKS} more")
    if outcome.quarantined:
        folder = local_folder(state)
        file = f"{folder or state}/quarantine.jsonl"
        print(f"to do them again: {shlex.join([*again, '--chunks', file])}")
    if outcome.missing:
        print(f"{outcome.missing} chunks are missing; to do what is missing: {shlex.join(again)}")
    if outcome.pyramid:
        print_pyramid_status(outcome.pyramid, waits=outcome.missing_of_job > 0)
    if outcome.pyramid and not outcome.missing_of_job and not outcome.pyramid.complete:
        print(f"to do what is missing of it: {shlex.join(again)}")
    elif not outcome.missing_of_job:
        print(f"complete: {config.output.path}; to look at it: {shlex.join(view)}")
    elif outcome.done == outcome.chunks:
        print(
            f"the chosen chunks are done; {outcome.missing_of_job} others of the job are not: "
            f"{shlex.join(again)}"
        )


def _without_chunks(words: Sequence[str]) -> list[str]:
    """A command without what chooses chunks, and without --overwrite: what does the rest of the job."""
    choosing = ("--chunks", "--sample", "--seed")
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        if before not in choosing and word.partition("=")[0] not in (*choosing, "--overwrite"):
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
        print(f"quarantined: chunk {record.chunk} {record.box}: {record.cause}")
    if report.missing_count:
        more = " …" if report.missing_count > len(report.missing) else ""
        print(
            f"missing: {report.missing_count} chunks: {', '.join(map(str, report.missing))}{more}"
        )
    if report.complete:
        print("complete" + (", and every chunk reads back as it was written" if deep else ""))
    else:
        print("not complete")


def print_status(status: JobStatus) -> None:
    """How far a job is, in a few lines."""
    done = status.done / status.planned
    print(
        f"{status.done:,} of {status.planned:,} chunks done ({done:.1%}), {status.missing:,} "
        "missing",
        end="",
    )
    print(f", {status.quarantined:,} quarantined" if status.quarantined else "")
    if status.summed is not None and status.missing:
        print(
            f"first stage: the patches of {status.summed:,} of {status.owners:,} chunks are "
            "computed"
        )
    if not status.missing:
        print(
            "nothing is left but what is quarantined; run --chunks does it again"
            if status.quarantined
            else "complete; verify reads it back"
        )
    elif status.rate is None:
        since = (
            f"; the latest chunk looked at was finished {status.latest:%Y-%m-%d %H:%M} UTC"
            if status.latest
            else ""
        )
        print(f"no chunk was finished in the last five minutes{since}")
    else:
        speed = f"{status.rate:.3g} chunks/s, {(status.voxels_per_second or 0) / 1e6:.3g} Mvoxel/s"
        left = timedelta(seconds=round(status.seconds_left or 0))
        stage = " of the first stage" if status.in_first_stage else ""
        print(
            f"{speed}, by {status.workers} or more worker processes; {left} left{stage} at this "
            "rate"
        )


def print_pyramid_status(status: PyramidStatus, *, waits: bool) -> None:
    """How far a job's pyramid is; it ``waits`` while chunks of the job are not done."""
    print(f"pyramid: {pyramid_told(status, waits=waits)}")
    if not waits:
        for line in status.failures:
            print(f"failed: {line}")
