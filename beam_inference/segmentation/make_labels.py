"""Run the stages of a job of labels, components or a segmentation, from start to exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from beam_inference.beam.stage_runner import (
    StageRecords,
    run_stages,
    stage_job,
)
from beam_inference.beam.stages import StageJob
from beam_inference.config.formats import get_format, multiscale_formats
from beam_inference.errors import COMPLETE, ConfigError, StateError
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import (
    NoScaleNeeded,
    Pyramid,
    plan_pyramid,
    remove_scales,
    run_pyramid,
)
from beam_inference.segmentation.layout import memory_gib
from beam_inference.segmentation.numbering import Stage
from beam_inference.segmentation.plans import ComponentPlan, LabelPlan, SegmentationPlan
from beam_inference.segmentation.table import count_of
from beam_inference.volumes.kvstores import delete_folder, open_kvstore
from beam_inference.volumes.outputs import create_output

Work = TypeVar("Work", bound=LabelPlan)


def make_labels(
    plan: Work,
    description: dict[str, Any],
    stages: Callable[[Work], tuple[Stage, ...]],
    flags: Sequence[str],
    again: str,
    *,
    overwrite: bool,
    pyramid: bool,
) -> int:
    """Make what was planned, or what is missing of it, and say what it came to; returns the exit code.

    ``flags`` are Beam's, ``again`` is the command that goes on, ``pyramid`` whether coarser levels
    are made as well. The scratch folder is in the output's state folder, but not among the records
    of what is done, which are listed.

    Raises:
        UserError: it cannot be done as asked.
    """
    if pyramid and not get_format(plan.output.format).is_multiscale:
        raise ConfigError(
            f"--pyramid: {plan.output.format} holds one scale; {multiscale_formats()} hold several"
        )
    job = stage_job(plan.kind, description, plan.output.url, plan.storage, ())
    plan = replace(plan, scratch_url=f"{job.state_url}/{plan.kind}_scratch/{job.fingerprint[:16]}")
    job = replace(job, stages=stages(plan))
    if not overwrite:
        _refuse_another_kind(job)
    StageRecords(job).begin(overwrite=overwrite)
    create_output(plan.output)
    if overwrite:
        _forget(job, plan)
    grid = plan.grid
    print(
        f"{grid.count} chunks, {memory_gib(plan):.2g} GiB for each that is under "
        f"way{plan.more_memory}",
        flush=True,
    )
    outcome = run_stages(job, flags, grid.roi.size / sum(task.count for task in job.stages))
    done = outcome.exit_code == COMPLETE
    made = (
        f"{count_of(plan)} {plan.table_folder} in {plan.output.url}, listed in {plan.table_url}"
        if done
        else ""
    )
    print(outcome.summary(made, again))
    return _coarser(plan, flags, again) if done and pyramid else outcome.exit_code


_KINDS: tuple[type[LabelPlan], ...] = (ComponentPlan, SegmentationPlan)


def _refuse_another_kind(job: StageJob) -> None:
    for other in _KINDS:
        if (
            other.kind != job.kind
            and StageRecords(replace(job, kind=other.kind)).earlier_job() is not None
        ):
            raise StateError(
                f"{job.state_url}/{other.kind} holds records of {other.kind}: what it has made "
                "there would be mixed with this. Use another target, or pass --overwrite to make "
                "everything anew."
            )


def _forget(job: StageJob, plan: LabelPlan) -> None:
    """Remove what is made of the output's voxels, by either kind of job: tables, coarser levels, scratch files."""
    state, output = (open_kvstore(url, plan.storage) for url in (job.state_url, plan.output.url))
    for each in _KINDS:
        if each.kind != job.kind:
            delete_folder(state, job.state_url, f"{each.kind}/")
        delete_folder(state, job.state_url, f"{each.kind}_scratch/")
        delete_folder(output, plan.output.url, f"{each.table_folder}/")
    if (levels := _levels(plan)) is not None:
        remove_scales(levels.job())


def _levels(plan: LabelPlan) -> Pyramid | None:
    """The pyramid of the output, which is there; None if it has no place for one, or is one block."""
    if not get_format(plan.output.format).is_multiscale:
        return None
    try:
        return plan_pyramid(multiscale_volume(plan.output.url, plan.storage), "mode")
    except NoScaleNeeded:
        return None


def _coarser(plan: LabelPlan, flags: Sequence[str], again: str) -> int:
    planned = _levels(plan)
    if planned is None:
        return COMPLETE
    outcome = run_pyramid(planned, flags).outcome
    print(outcome.summary(f"{len(planned.scales)} coarser levels", again))
    return outcome.exit_code
