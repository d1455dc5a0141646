"""Make a volume of labels: connected components, or a segmentation of affinities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from beam_inference.beam.stage_runner import StageOutcome, run_stages
from beam_inference.config.fields import Json
from beam_inference.config.formats import get_format, multiscale_formats
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError, StateError
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.ownership import refuse_owned
from beam_inference.job.provenance import record_command
from beam_inference.job.replacement import Replacement, plan_replacement
from beam_inference.job.stage_job import StageJob
from beam_inference.job.stage_records import StageRecords, begun_names, stage_job
from beam_inference.job.stage_witnesses import check_witnesses
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import (
    NoScaleNeeded,
    Pyramid,
    PyramidResult,
    begun_folders,
    plan_pyramid,
    run_pyramid,
)
from beam_inference.segmentation.component_job import plan_components
from beam_inference.segmentation.component_stages import component_stages
from beam_inference.segmentation.degenerate import degenerate_warning
from beam_inference.segmentation.layout import Layout
from beam_inference.segmentation.numbering import Stage, WitnessedStage
from beam_inference.segmentation.plans import ComponentPlan, LabelPlan, SegmentationPlan
from beam_inference.segmentation.segment_job import plan_segmentation
from beam_inference.segmentation.segment_stages import segment_stages
from beam_inference.segmentation.series import (
    SERIES_FILE,
    Series,
    volume_name,
    write_thresholds,
)
from beam_inference.segmentation.table import check_labels, count_of
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.outputs import create_output


@dataclass(frozen=True, slots=True)
class LabelResult:
    """A volume of labels, and how far it is.

    Attributes:
        url: URL of the volume.
        table_url: URL of the folder with the table of objects.
        objects: number of objects; None unless the volume is complete.
        outcome: how the stages ended.
        warning: words on a result that separates nothing: no object, or one of nearly all voxels;
            None for any other.
        pyramid: coarser scales, if they were to be made, the volume is complete, and one block does
            not hold it.
    """

    url: str
    table_url: str
    objects: int | None
    outcome: StageOutcome
    warning: str | None = None
    pyramid: PyramidResult | None = None

    @property
    def exit_code(self) -> int:
        """0 complete, 1 failed, 130 interrupted."""
        return self.outcome.exit_code if self.pyramid is None else self.pyramid.outcome.exit_code


def components(
    source: str,
    target: str,
    *,
    threshold: float | None,
    channel: int | None = None,
    connectivity: int = 6,
    min_size: int = 1,
    scale: int = 0,
    format: str = "precomputed",
    chunk_shape: Zyx | None = None,
    block_shape: Zyx | None = None,
    shard_shape: Zyx | None = None,
    pyramid: bool = False,
    overwrite: bool = False,
    storage: Storage = LOCAL,
    flags: Sequence[str] = (),
) -> LabelResult:
    """Label the connected components of a volume, as if all of it were in memory.

    Called again, it continues a job that was interrupted.

    Args:
        source: path or URL of the volume to read.
        target: path or URL of the volume to write.
        threshold: voxels of this value or more, in stored units, are foreground; None: the source
            is a segmentation, of which touching voxels with the same label are one component.
        channel: channel of the source; may be left out where there is one.
        connectivity: 6, 18 or 26 neighbours.
        min_size: components of fewer voxels are removed.
        scale: number of the source's scale.
        format: format of the target.
        chunk_shape: unit of work, ZYX; None: about 256 on a side.
        block_shape: ZYX; None for the source's.
        shard_shape: ZYX; None for one file a block.
        pyramid: whether to make coarser scales of the target, too.
        overwrite: whether to discard what was done for the target.
        storage: how object stores are reached.
        flags: Beam's flags.

    Returns:
        The target, and how far it is: chunks may have failed.

    Raises:
        UserError: the components cannot be made so.
    """
    plan = plan_components(
        source,
        target,
        threshold=threshold,
        channel=channel,
        scale=scale,
        connectivity=connectivity,
        min_size=min_size,
        layout=Layout(
            format=format,
            chunk_shape=chunk_shape,
            block_shape=block_shape,
            shard_shape=shard_shape,
        ),
        storage=storage,
        flags=flags,
        overwrite=overwrite,
    )
    return _make_all(plan, flags, overwrite=overwrite, pyramid=pyramid)


def segment(
    source: str,
    target: str,
    *,
    threshold: float,
    low: float,
    high: float,
    channels: Zyx = (0, 1, 2),
    to_next: bool = False,
    min_size: int = 1,
    scale: int = 0,
    format: str = "precomputed",
    chunk_shape: Zyx | None = None,
    block_shape: Zyx | None = None,
    shard_shape: Zyx | None = None,
    pyramid: bool = False,
    overwrite: bool = False,
    storage: Storage = LOCAL,
    flags: Sequence[str] = (),
) -> LabelResult:
    """Segment a volume of affinities, as if all of it were in memory.

    Called again, it continues a job that was interrupted.

    Args:
        source: path or URL of the affinities.
        target: path or URL of the volume to write.
        threshold: fragments are joined while their mean affinity, in stored units, is at least
            this.
        low: the watershed joins no voxels of a lower affinity.
        high: the watershed joins all voxels of this affinity or more.
        channels: channels of the source that hold the affinities along z, y and x.
        to_next: whether a voxel's affinities are to the next voxels; else to the previous ones.
        min_size: segments of fewer voxels are removed.
        scale: number of the source's scale.
        format: format of the target.
        chunk_shape: unit of work, ZYX; None: about 128 on a side.
        block_shape: ZYX; None for the source's.
        shard_shape: ZYX; None for one file a block.
        pyramid: whether to make coarser scales of the target, too.
        overwrite: whether to discard what was done for the target.
        storage: how object stores are reached.
        flags: Beam's flags.

    Returns:
        The target, and how far it is: chunks may have failed.

    Raises:
        UserError: the segmentation cannot be made so.
    """
    plan = plan_segmentation(
        source,
        target,
        threshold=threshold,
        low=low,
        high=high,
        channels=channels,
        to_next=to_next,
        scale=scale,
        min_size=min_size,
        layout=Layout(
            format=format,
            chunk_shape=chunk_shape,
            block_shape=block_shape,
            shard_shape=shard_shape,
        ),
        storage=storage,
        flags=flags,
        overwrite=overwrite,
    )
    return _make_all(plan, flags, overwrite=overwrite, pyramid=pyramid)


def _make_all(
    plan: LabelPlan, flags: Sequence[str], *, overwrite: bool, pyramid: bool
) -> LabelResult:
    if pyramid:
        check_holds_scales(plan)
    result = make_labels(plan, flags, overwrite=overwrite)
    if pyramid and result.outcome.is_complete:
        return replace(result, pyramid=make_coarser_scales(plan, flags))
    return result


def check_holds_scales(plan: LabelPlan) -> None:
    """Refuse coarser scales in a format that holds one scale.

    Raises:
        ConfigError: the plan's format does.
    """
    if not get_format(plan.output.format).is_multiscale:
        raise ConfigError(
            f"--pyramid: {plan.output.format} holds one scale; {multiscale_formats()} hold several"
        )


def make_labels(plan: LabelPlan, flags: Sequence[str], *, overwrite: bool = False) -> LabelResult:
    """Make what is missing of a planned volume of labels.

    Args:
        plan: a :class:`ComponentPlan` or a :class:`SegmentationPlan`.
        flags: Beam's flags.
        overwrite: whether to discard what was done for the target.

    Raises:
        StateError: something else was begun there.
    """
    (result,) = _make_volumes(plan.output.url, plan.description, [plan], flags, overwrite=overwrite)
    return result


def make_series(
    series: Series, flags: Sequence[str], *, overwrite: bool = False
) -> list[LabelResult]:
    """Make what is missing of segmentations at several thresholds, from one watershed.

    Args:
        series: the plans.
        flags: Beam's flags.
        overwrite: whether to discard what was done for the folder.

    Returns:
        The volumes, in the order of thresholds; all have the same outcome.

    Raises:
        StateError: something else was begun there.
    """
    results = _make_volumes(
        series.url, series.description, series.plans, flags, overwrite=overwrite
    )
    if results[0].outcome.is_complete:
        write_thresholds(series)
    return results


def _make_volumes(
    url: str,
    description: Json,
    plans: Sequence[LabelPlan],
    flags: Sequence[str],
    *,
    overwrite: bool,
) -> list[LabelResult]:
    """Make the volumes of plans that share their first stages; their records are at a URL."""
    first = plans[0]
    plans = _with_scratch(url, description, plans)
    job = stage_job(first.kind, description, url, first.storage, _stages(plans))
    if overwrite:
        _plan_replacement(job, url, first).remove()
    else:
        _check_no_other_labels(job, {url, *(plan.output.url for plan in plans)})
    StageRecords(job).begin()
    _check_what_is_written(job, url, plans)
    for plan in plans:
        create_output(plan.output)
        record_command(job.kind, job, plan.output, plan.source, _how(plan))
    tasks = sum(stage.count for stage in job.stages)
    outcome = run_stages(job, flags, len(plans) * first.grid.roi.size / tasks)
    if outcome.is_complete:
        for plan in plans:
            check_labels(plan)
    return [_result(plan, outcome) for plan in plans]


def _check_what_is_written(job: StageJob, url: str, plans: Sequence[LabelPlan]) -> None:
    """Compare what an earlier launch wrote: with the tables, once they are, or with the scratch.

    Raises:
        UserError: something was changed, or removed, since.
    """
    *_, table, _clean = job.stages
    if len(job.done_chunks(table, range(table.count))) == table.count:
        for plan in plans:
            check_labels(plan)
    else:
        check_witnesses(job, [each for each in job.stages if isinstance(each, WitnessedStage)], url)


def _result(plan: LabelPlan, outcome: StageOutcome) -> LabelResult:
    objects = count_of(plan) if outcome.is_complete else None
    warning = None if objects is None else degenerate_warning(plan, objects)
    return LabelResult(plan.output.url, plan.table_url, objects, outcome, warning)


def label_jobs(made: LabelPlan | Series, *, pyramid: bool) -> list[StageJob]:
    """All that a command makes in stages; coarser scales only once their volume is there.

    Args:
        made: the plan of a volume, or of several.
        pyramid: whether coarser scales are wanted, too.
    """
    plans = made.plans if isinstance(made, Series) else (made,)
    url = made.url if isinstance(made, Series) else made.output.url
    first = plans[0]
    stages = _stages(_with_scratch(url, made.description, plans))
    jobs = [stage_job(first.kind, made.description, url, first.storage, stages)]
    if pyramid:
        scales = [_plan_scales(plan) for plan in plans if volume_at(plan.output.url, plan.storage)]
        jobs += [each.job() for each in scales if each is not None]
    return jobs


def _with_scratch(url: str, description: Json, plans: Sequence[LabelPlan]) -> list[LabelPlan]:
    """Plans whose records are at a URL, with the folder for files between their stages."""
    first = plans[0]
    job = stage_job(first.kind, description, url, first.storage, ())
    # In the state folder, but not in the job's own: that is listed to find out what is done.
    scratch_url = f"{job.state_url}/{first.kind}_scratch/{job.fingerprint[:16]}"
    return [replace(plan, scratch_url=scratch_url) for plan in plans]


def _how(plan: LabelPlan) -> Json:
    """What the volume's metadata tell of the way that it is made, without its source's place."""
    description = plan.description
    source = {key: value for key, value in description["input"].items() if key != "path"}
    parts = {key: value for key, value in description.items() if key not in ("input", "output")}
    return {"input": source, **parts}


def _stages(plans: Sequence[LabelPlan]) -> tuple[Stage, ...]:
    first = plans[0]
    if isinstance(first, ComponentPlan):
        return component_stages(first)
    return segment_stages(*cast(Sequence[SegmentationPlan], plans))


_KINDS: tuple[type[LabelPlan], ...] = (ComponentPlan, SegmentationPlan)


def _plan_replacement(job: StageJob, url: str, plan: LabelPlan) -> Replacement:
    """Find out what is removed at a URL: a volume, or those of a series, and what belongs to them.

    Args:
        job: what will be made there.
        url: the URL.
        plan: the plan of a volume there, or of one in its folder.
    """
    volumes = _earlier_volumes(job)
    for name in volumes:  # raises if anything else lies in their folders, which are removed whole
        _plan_removal(job, f"{url}/{name}", plan, [])
    return _plan_removal(job, url, plan, [SERIES_FILE, *(f"{name}/" for name in volumes)])


def _plan_removal(job: StageJob, url: str, plan: LabelPlan, further: Sequence[str]) -> Replacement:
    """Find out what is removed at a URL: its volume, tables, coarser scales and records."""
    tables = [f"{kind.table_folder}/" for kind in _KINDS]
    begun = begun_names(job, replace(plan.output, url=url))
    scales = begun_folders(url, plan.storage)
    return plan_replacement(url, plan.storage, [*tables, *begun, *scales, *further])


def _earlier_volumes(job: StageJob) -> list[str]:
    """Names of the volumes of the series that was begun where a job is to write; none if none was.

    Raises:
        StateError: the state folder cannot be read.
    """
    earlier = StageRecords(replace(job, kind=SegmentationPlan.kind)).earlier_job()
    thresholds = [] if earlier is None else earlier.description.get("threshold")
    return [volume_name(each) for each in thresholds] if isinstance(thresholds, list) else []


def _check_no_other_labels(job: StageJob, urls: Iterable[str]) -> None:
    """Refuse a target with labels of another kind, or of another origin. Raises StateError."""
    for kind in (plan.kind for plan in _KINDS if plan.kind != job.kind):
        if StageRecords(replace(job, kind=kind)).earlier_job() is not None:
            raise StateError(
                f"{job.state_url}/{kind} holds records of {kind}: what it has made "
                "there would be mixed with this. Use another target, or pass --overwrite to make "
                "everything again."
            )
    if StageRecords(job).earlier_job() is not None:
        return
    for url in urls:
        if volume_at(url, job.storage) is not None:
            raise StateError(
                f"{url} holds a volume that no {job.kind} has begun: its voxels would "
                "be mixed with the new ones. Use another target, or pass --overwrite to replace it."
            )
        refuse_owned(url, job.storage)


def make_coarser_scales(plan: LabelPlan, flags: Sequence[str]) -> PyramidResult | None:
    """Make the coarser scales of a complete volume of labels, by mode.

    Returns:
        The scales; None if one block holds the volume.
    """
    pyramid = _plan_scales(plan)
    return None if pyramid is None else run_pyramid(pyramid, flags)


def _plan_scales(plan: LabelPlan) -> Pyramid | None:
    """Plan the pyramid of an output that exists; None if it can hold none, or is one block."""
    if not get_format(plan.output.format).is_multiscale:
        return None
    try:
        return plan_pyramid(multiscale_volume(plan.output.url, plan.storage), "mode")
    except NoScaleNeeded:
        return None
