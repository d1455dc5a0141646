"""What ``run``, ``status`` and ``verify`` print: a few lines for people, or one JSON object."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from beam_inference.config.fields import Json
from beam_inference.errors import COMPLETE
from beam_inference.job.state import default_state_url
from beam_inference.volumes.kvstores import local_folder

if TYPE_CHECKING:
    from beam_inference.beam.stage_runner import StageOutcome
    from beam_inference.config.job import JobConfig
    from beam_inference.job.crew_records import SignOfLife
    from beam_inference.job.recomputed import Recomputation
    from beam_inference.job.records import QuarantineRecord
    from beam_inference.job.shards import Shard, ShardProgress
    from beam_inference.job.status import JobStatus
    from beam_inference.job.verification import VerifyReport
    from beam_inference.launch.output_pyramid import PyramidStatus
    from beam_inference.launch.run_job import JobOutcome, Redone

_LISTED_CHUNKS = 10
"""Most chunks that are listed one by one."""

_LISTED_WORKERS = 20
"""Most processes that are listed one by one."""


def as_json(values: Json) -> str:
    """The values as one JSON object."""
    return json.dumps(values, indent=2)


def outcome_values(outcome: JobOutcome, config: JobConfig) -> Json:
    """The outcome of a launch as JSON values."""
    return {
        "chunks": outcome.chunks,
        "done": outcome.done,
        "done_by_this_launch": None if outcome.summary is None else outcome.summary.done,
        "missing": outcome.missing,
        "missing_of_job": outcome.missing_of_job,
        "patches_beyond_bound": outcome.patches_beyond_bound,
        "quarantined": len(outcome.quarantined),
        "quarantine": list(map(_record_values, outcome.quarantined)),
        "pyramid": pyramid_status_values(outcome.pyramid, waits=outcome.missing_of_job > 0),
        "seconds": outcome.seconds,
        "error": outcome.error,
        "staged_at": outcome.staged_at,
        "shard": None if outcome.shard is None else str(outcome.shard),
        "redone": None if outcome.redone is None else asdict(outcome.redone),
        "output": config.output.path,
        "outputs": {key: each.output.path for key, each in config.by_output.items()},
        "state": default_state_url(config),
    }


def stage_values(outcome: StageOutcome | None) -> Json:
    """The outcome of a command in stages as JSON values; None for one that has no chunks."""
    if outcome is None:
        return dict.fromkeys(("chunks", "done", "seconds", "error")) | {
            "complete": True,
            "failures": [],
        }
    return {
        "complete": outcome.is_complete,
        "chunks": outcome.chunks,
        "done": outcome.done,
        "failures": outcome.failures,
        "seconds": outcome.seconds,
        "error": outcome.error,
    }


def verification_values(report: VerifyReport, pyramid: PyramidStatus | None, *, deep: bool) -> Json:
    """The result of a verification as JSON values; of the missing chunks the first few."""
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
        "patches_beyond_bound": report.patches_beyond_bound,
        "recomputed": None if report.recomputation is None else asdict(report.recomputation),
        "pyramid": pyramid_status_values(pyramid, waits=report.receipts < report.chunks),
    }


def status_values(
    status: JobStatus,
    pyramid: PyramidStatus | None,
    shards: ShardProgress | None,
    crew: Sequence[SignOfLife] = (),
) -> Json:
    """The progress of a job as JSON values; None for what is unknown or does not apply."""
    return {
        "chunks": status.planned,
        "done": status.done,
        "missing": status.missing,
        "quarantined": status.quarantined,
        "damaged": status.damaged,
        "patches_computed": status.summed,
        "chunks_with_patches": status.owners,
        "in_first_stage": status.in_first_stage,
        "chunks_per_second": status.rate,
        "voxels_per_second": status.voxels_per_second,
        "workers": status.workers,
        "seconds_left": status.seconds_left,
        "latest": None if status.latest is None else status.latest.isoformat(),
        "crew": [
            sign.model_dump(exclude={"beat"}) | {"chunks_per_second": sign.chunks_per_second}
            for sign in crew
        ],
        "shards": None if shards is None else asdict(shards),
        "pyramid": pyramid_status_values(pyramid, waits=status.done < status.planned),
    }


def pyramid_status_values(status: PyramidStatus | None, *, waits: bool) -> Json | None:
    """The progress of a job's pyramid as JSON values; None if it has none.

    Args:
        status: the progress.
        waits: whether chunks of the job are not done yet, so that the pyramid cannot be made.
    """
    if status is None:
        return None
    # A pyramid has scales; "levels" is the former name of the key.
    return {
        "complete": status.complete and not waits,
        "waits": waits,
        **asdict(status),
        "levels": status.scales,
    }


def _record_values(record: QuarantineRecord) -> Json:
    return record.model_dump(mode="json", include={"chunk", "box", "stage", "cause", "attempts"})


def print_outcome(
    outcome: JobOutcome,
    config: JobConfig,
    command_line: Sequence[str],
    view_command: Sequence[str],
) -> None:
    """Print the outcome of a launch, and what to do next.

    Args:
        outcome: the outcome.
        config: the job that was launched.
        command_line: the command that launched it.
        view_command: the command that shows its output.
    """
    if outcome.staged_at:
        print(
            f"staged at {outcome.staged_at}: whoever launches it runs the job; see how far it is "
            "with status"
        )
        return
    command = _command_for_the_rest(command_line, config)
    if outcome.shard is not None:
        _print_shard(outcome, outcome.shard, shlex.join(command))
        return
    if outcome.error:
        print(f"the launch ended early: {outcome.error}")
    done = f"{outcome.done} of {outcome.chunks} chunks done, in {outcome.seconds:.1f} s"
    if outcome.summary is not None:
        done += f" ({outcome.summary.done} by this launch)"
    print(done)
    if outcome.redone is not None:
        _print_redone(outcome.redone)
    _print_beyond_bound(outcome.patches_beyond_bound)
    _print_quarantined(outcome.quarantined)
    _print_what_to_do_again(outcome, config, command)
    if outcome.pyramid is not None:
        print_pyramid_status(outcome.pyramid, waits=outcome.missing_of_job > 0)
    _print_last_line(outcome, config, shlex.join(command), shlex.join(view_command))


def _print_shard(outcome: JobOutcome, shard: Shard, command: str) -> None:
    """Print how a shard went; what is not complete is the job, whose shards know nothing of it."""
    if outcome.error:
        print(f"the launch ended early: {outcome.error}")
    line = f"shard {shard}: {outcome.done} of {outcome.chunks} chunks done, in "
    line += f"{outcome.seconds:.1f} s"
    if outcome.summary is not None:
        line += f" ({outcome.summary.done + outcome.summary.summed} by this launch)"
    print(line)
    _print_beyond_bound(outcome.patches_beyond_bound)
    _print_quarantined(outcome.quarantined)
    if outcome.exit_code == COMPLETE:
        print("share done, job not complete; once all shards are done: beam-inference finish")
    else:
        print(f"share not done; to do what is missing of it: {command}")


def _print_redone(redone: Redone) -> None:
    """Print whether chunks that were done again have the values that they had."""
    if not redone.changed:
        print(f"{redone.chunks} chunks were done again, with the same values as before")
        return
    some = ", ".join(map(str, redone.changed[:_LISTED_CHUNKS]))
    more = " …" if len(redone.changed) > _LISTED_CHUNKS else ""
    print(
        f"{len(redone.changed)} of {redone.chunks} chunks that were done again have other values "
        f"than before: {some}{more}. Something that the job does not record has changed, such as "
        "the content of the input. Make again what was made of the former values, such as scales "
        "of a pyramid"
    )


def _print_beyond_bound(patches: int) -> None:
    """Print for how many patches the promise of equal bits does not hold, if there are any."""
    if patches:
        print(
            f"{patches} patches have values beyond what sums are exact for: the last bits there "
            "may be others if the job is cut or ordered otherwise. To have one result in any case, "
            "write a larger model.prediction_bound, and pass --overwrite"
        )


def _print_quarantined(records: Sequence[QuarantineRecord]) -> None:
    for record in records[:_LISTED_CHUNKS]:
        print(f"quarantined: chunk {record.chunk} {record.box}: {record.cause}")
    if len(records) > _LISTED_CHUNKS:
        print(f"… and {len(records) - _LISTED_CHUNKS} more")


def _print_what_to_do_again(outcome: JobOutcome, config: JobConfig, command: Sequence[str]) -> None:
    """Print the commands for quarantined and for missing chunks, if there are any."""
    if outcome.quarantined:
        state = default_state_url(config)
        file = f"{local_folder(state) or state}/quarantine.jsonl"
        print(f"to do them again: {shlex.join([*command, '--chunks', file])}")
    if outcome.missing:
        print(f"{outcome.missing} chunks are missing; to do what is missing: {shlex.join(command)}")


def _print_last_line(
    outcome: JobOutcome, config: JobConfig, command: str, view_command: str
) -> None:
    """Print whether the whole job is complete, and the next command."""
    if not outcome.missing_of_job:
        if outcome.pyramid is not None and not outcome.pyramid.complete:
            print(f"to do what is missing of it: {command}")
        else:
            paths = [each.output.path for each in config.by_output.values()]
            print(f"complete: {' and '.join(paths)}; to look at it: {view_command}")
    elif outcome.done == outcome.chunks:
        print(
            f"the chosen chunks are done; {outcome.missing_of_job} others of the job are not: "
            f"{command}"
        )


def _command_for_the_rest(command_line: Sequence[str], config: JobConfig) -> list[str]:
    """The command that does what is missing: without a choice of chunks, and nothing again."""
    choosing = ("--chunks", "--sample", "--seed")
    dropped = (*choosing, "--redo", "--overwrite")
    command = []
    for before, word in zip(["", *command_line], command_line, strict=False):
        if before not in choosing and word.partition("=")[0] not in dropped:
            command.append(word)
    if not config.job.resume:  # chunks that are done would be done again
        command += ["--set", "job.resume=true"]
    return command


def print_verification(report: VerifyReport, *, deep: bool) -> None:
    """Print the result of a verification."""
    print(f"{report.receipts} of {report.chunks} chunks have a receipt")
    print_some("wrong", report.wrong)
    if report.recomputation is not None:
        _print_recomputation(report.recomputation)
    _print_beyond_bound(report.patches_beyond_bound)
    _print_quarantined(report.quarantined)
    if report.missing_count:
        more = " …" if report.missing_count > len(report.missing) else ""
        print(
            f"missing: {report.missing_count} chunks: {', '.join(map(str, report.missing))}{more}"
        )
    if report.complete:
        print("complete" + (", and every chunk reads back as it was written" if deep else ""))
    else:
        print("not complete")


def _print_recomputation(recomputation: Recomputation) -> None:
    """Print how chunks that were computed again compare with the output."""
    print(
        f"{len(recomputation.chunks)} chunks computed again (--recompute {recomputation.share:g} "
        f"--seed {recomputation.seed}), {len(recomputation.different)} of them with other bits "
        "than the output"
    )
    print_some("different", recomputation.different)
    print_some(
        "undecided, as it was made by another engine or with smaller batches",
        recomputation.undecided,
    )


def print_some(word: str, lines: Sequence[str]) -> None:
    """Print the first of some lines, each with a word before it."""
    for line in lines[:_LISTED_CHUNKS]:
        print(f"{word}: {line}")
    if len(lines) > _LISTED_CHUNKS:
        print(f"… and {len(lines) - _LISTED_CHUNKS} more that are {word}; --json lists all")


def print_status(status: JobStatus) -> None:
    """Print the progress of a job in a few lines."""
    counts = (
        f"{status.done:,} of {status.planned:,} chunks done "
        f"({status.done / status.planned:.1%}), {status.missing:,} missing"
    )
    if status.quarantined:
        counts += f", {status.quarantined:,} quarantined"
    print(counts)
    for line in status.damaged[:_LISTED_CHUNKS]:
        print(f"wrong: {line}")
    if len(status.damaged) > _LISTED_CHUNKS:
        print(f"… and {len(status.damaged) - _LISTED_CHUNKS} more that are wrong")
    if status.summed is not None and status.missing:
        print(
            f"first stage: the patches of {status.summed:,} of {status.owners:,} chunks are "
            "computed"
        )
    print(_remaining_work(status))


def print_crew(crew: Sequence[SignOfLife]) -> None:
    """Print who works on a job, a line for each process."""
    for sign in crew[:_LISTED_WORKERS]:
        rate = sign.chunks_per_second
        speed = "" if rate is None else f", {rate:.3g} chunks/s"
        print(
            f"at work: {sign.host}:{sign.pid}, {sign.engine} on {sign.device}, launch "
            f"{sign.launch}: {sign.chunks:,} chunks{speed}"
        )
    if len(crew) > _LISTED_WORKERS:
        print(f"… and {len(crew) - _LISTED_WORKERS} more at work")


def _remaining_work(status: JobStatus) -> str:
    """The last line of the progress: what is left of the job, and for how long."""
    if status.damaged:
        return "run does the chunks of damaged receipts again; verify reads all receipts"
    if not status.missing:
        if status.quarantined:
            return "nothing is left but what is quarantined; run --chunks does it again"
        return "complete; verify reads it back"
    if status.rate is None:
        line = "no chunk was finished in the last five minutes"
        if status.latest is not None:
            line += f"; the last one known was finished {status.latest:%Y-%m-%d %H:%M} UTC"
        return line
    left = timedelta(seconds=round(status.seconds_left or 0))
    stage = " of the first stage" if status.in_first_stage else ""
    return (
        f"{status.rate:.3g} chunks/s, {(status.voxels_per_second or 0) / 1e6:.3g} Mvoxel/s, by "
        f"{status.workers} or more worker processes; {left} left{stage} at this rate"
    )


def print_pyramid_status(status: PyramidStatus, *, waits: bool) -> None:
    """Print the progress of a job's pyramid.

    Args:
        status: the progress.
        waits: whether chunks of the job are not done yet, so that the pyramid cannot be made.
    """
    from beam_inference.launch.output_pyramid import describe_pyramid_status

    print(f"pyramid: {describe_pyramid_status(status, waits=waits)}")
    if not waits:
        for line in status.failures:
            print(f"failed: {line}")
