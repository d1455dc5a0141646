"""What the commands print of several volumes: a line for some of them, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from beam_inference.cli.status_text import outcome_values, status_values, verification_values
from beam_inference.config.fields import Json

if TYPE_CHECKING:
    from beam_inference.config.cohort import Cohort
    from beam_inference.job.status import JobStatus
    from beam_inference.job.verification import VerifyReport
    from beam_inference.launch.cohort import CohortOutcome
    from beam_inference.launch.launched_cohort import VolumesAnswers
    from beam_inference.launch.planned_cohort import PlannedCohort, PlannedVolume

_LISTED_VOLUMES = 20
"""Most volumes that are listed one by one."""


def cohort_outcome_values(outcome: CohortOutcome, cohort: Cohort) -> Json:
    """The outcome of a launch of several volumes as JSON values."""
    return {
        "volumes": {
            name: outcome_values(each, cohort.of(name)) for name, each in outcome.volumes.items()
        },
        "quarantined_volumes": dict(outcome.faults),
        "complete_volumes": outcome.complete,
        "chunks": outcome.chunks,
        "done": outcome.done,
        "seconds": outcome.seconds,
        "error": outcome.error,
        "state": cohort.state_url,
    }


def print_cohort_outcome(outcome: CohortOutcome, command: str) -> None:
    """Print the outcome of a launch of several volumes, and what to do next.

    Args:
        outcome: the outcome.
        command: the command that does what is missing.
    """
    if outcome.error:
        print(f"the launch ended early: {outcome.error}")
    count = len(outcome.volumes) + len(outcome.faults)
    print(
        f"{outcome.complete} of {count} volumes complete; {outcome.done} of {outcome.chunks} "
        f"chunks done, in {outcome.seconds:.1f} s"
    )
    _print_lines(
        f"volume {name}: {each.done} of {each.chunks} chunks done, {len(each.quarantined)} "
        "quarantined"
        + "".join(f"; chunk {record.chunk}: {record.cause}" for record in each.quarantined[:1])
        for name, each in outcome.volumes.items()
        if each.missing_of_job
    )
    _print_faults(outcome.faults)
    if outcome.complete < count:
        print(f"to do what is missing: {command}")
    else:
        print("complete")


def _print_faults(faults: Mapping[str, str]) -> None:
    _print_lines(f"quarantined: volume {name}: {cause}" for name, cause in faults.items())


def print_troubles(troubles: Mapping[str, str]) -> None:
    """Print why something cannot be said of volumes, by their names."""
    _print_lines(f"wrong: volume {name}: {trouble}" for name, trouble in troubles.items())


def _print_lines(lines: Iterable[str]) -> None:
    """Print the first of some lines, and how many more there are."""
    listed = list(lines)
    for line in listed[:_LISTED_VOLUMES]:
        print(line)
    if len(listed) > _LISTED_VOLUMES:
        print(f"… and {len(listed) - _LISTED_VOLUMES} more; --json lists all")


def cohort_status_values(told: VolumesAnswers[JobStatus]) -> Json:
    """The progress of several volumes as JSON values; None for those that were not begun."""
    known = [status for status in told.answers.values() if status is not None]
    return {
        "volumes": {
            name: None if status is None else status_values(status, None, None)
            for name, status in told.answers.items()
        },
        "quarantined_volumes": dict(told.faults),
        "wrong_volumes": dict(told.troubles),
        "complete_volumes": sum(
            status is not None and status.done == status.planned
            for status in told.expected.values()
        ),
        "chunks": sum(status.planned for status in known),
        "done": sum(status.done for status in known),
        "missing": sum(status.missing for status in known),
        "quarantined": sum(status.quarantined for status in known),
    }


def print_cohort_status(told: VolumesAnswers[JobStatus]) -> None:
    """Print the progress of several volumes: together, and of each that is not complete."""
    values = cohort_status_values(told)
    counts = (
        f"{values['complete_volumes']} of {len(told.answers)} volumes complete; "
        f"{values['done']:,} of {values['chunks']:,} chunks done, {values['missing']:,} missing"
    )
    print(counts + (f", {values['quarantined']:,} quarantined" * bool(values["quarantined"])))
    _print_lines(
        f"volume {name}: "
        + (
            "not begun"
            if status is None
            else f"{status.done:,} of {status.planned:,} chunks done, {status.quarantined:,} "
            "quarantined"
        )
        for name, status in told.expected.items()
        if status is None or status.done < status.planned
    )
    for name, status in told.answers.items():
        _print_lines(f"wrong: volume {name}: {line}" for line in (status.damaged if status else ()))
    print_troubles(told.troubles)
    _print_faults(told.faults)


def cohort_verification_values(told: VolumesAnswers[VerifyReport], *, deep: bool) -> Json:
    """The result of a verification of several volumes as JSON values.

    Args:
        told: what was found. Volumes that the last launch could not open are not complete,
            whatever an earlier one has made.
        deep: whether every chunk was read back.
    """
    return {
        "complete": _count_complete(told) == len(told.answers),
        "deep": deep,
        "quarantined_volumes": dict(told.faults),
        "wrong_volumes": dict(told.troubles),
        "volumes": {
            name: None if report is None else verification_values(report, None, deep=deep)
            for name, report in told.answers.items()
        },
    }


def _count_complete(told: VolumesAnswers[VerifyReport]) -> int:
    return sum(report is not None and report.complete for report in told.expected.values())


def print_cohort_verification(told: VolumesAnswers[VerifyReport], *, deep: bool) -> None:
    """Print the result of a verification of several volumes.

    Args:
        told: as :func:`cohort_verification_values` takes it.
        deep: as before.
    """
    known = [report for report in told.answers.values() if report is not None]
    complete = _count_complete(told)
    volumes = len(told.answers)
    done = sum(report.receipts for report in known)
    count = sum(report.chunks for report in known)
    print(f"{complete} of {volumes} volumes complete; {done} of {count} chunks have a receipt")
    _print_lines(
        f"volume {name}: " + ("not launched" if report is None else _describe_verification(report))
        for name, report in told.expected.items()
        if report is None or not report.complete
    )
    print_troubles(told.troubles)
    _print_faults(told.faults)
    if complete == volumes:
        print("complete" + (", and every chunk reads back as it was written" if deep else ""))
    else:
        print("not complete")


def _describe_verification(report: VerifyReport) -> str:
    wrong: Sequence[str] = report.wrong
    first = f", the first wrong one: {wrong[0]}" if wrong else ""
    return (
        f"{report.receipts} of {report.chunks} chunks have a receipt, {len(wrong)} wrong, "
        f"{len(report.quarantined)} quarantined{first}"
    )


def size_values(size: PlannedVolume) -> Json:
    """The size of a volume as JSON values."""
    return {
        "roi": {"start": size.roi.start, "stop": size.roi.stop},
        "chunks": size.chunks,
        "network_calls": size.patches,
        "voxels": size.roi.size,
        "host_bytes_per_worker": size.host_bytes,
        "output": size.output,
        "output_exists": size.output_exists,
    }


def size_text(size: PlannedVolume) -> str:
    """The size of a volume in a few words."""
    return (
        f"{size.roi}, {size.chunks:,} chunks, {size.patches:,} patches, to "
        f"{size.output}{' (there)' if size.output_exists else ''}"
    )


def cohort_plan_values(planned: PlannedCohort) -> Json:
    """The size of a job of several volumes as JSON values."""
    return {
        "volumes": {name: size_values(each) for name, each in planned.volumes.items()},
        "quarantined_volumes": dict(planned.faults),
        "chunks": sum(each.chunks for each in planned.volumes.values()),
        "network_calls": sum(each.patches for each in planned.volumes.values()),
        "voxels": sum(each.roi.size for each in planned.volumes.values()),
        "host_bytes_per_worker": planned.host_bytes,
    }


def print_cohort_plan(planned: PlannedCohort) -> None:
    """Print the size of a job of several volumes, and of each volume."""
    values = cohort_plan_values(planned)
    print(
        f"{len(planned.volumes)} volumes, {values['voxels'] / 1e6:,.1f} Mvoxel, "
        f"{values['chunks']:,} chunks, {values['network_calls']:,} patches; at most "
        f"{values['host_bytes_per_worker'] / 2**20:,.0f} MiB in a worker process, without what the "
        "network itself allocates"
    )
    _print_lines(f"volume {name}: {size_text(each)}" for name, each in planned.volumes.items())
    _print_faults(planned.faults)
