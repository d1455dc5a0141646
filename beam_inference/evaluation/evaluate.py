"""Judge a volume by labels: what may be asked, the job, and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

from beam_inference.beam.stage_runner import StageOutcome, check_place, run_stages
from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage, check_writable
from beam_inference.errors import AlignmentError, ConfigError, VolumeError
from beam_inference.evaluation.map_scores import Bins, MapScores, score_map
from beam_inference.evaluation.object_scores import (
    ClassDice,
    ObjectScores,
    WorstObject,
    score_classes,
    score_objects,
    worst_objects,
)
from beam_inference.evaluation.plans import EvaluationPlan, Kind
from beam_inference.evaluation.stages import boxes_of, evaluation_stages
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.job.stage_job import StageJob
from beam_inference.job.stage_records import StageRecords, stage_job
from beam_inference.job.stage_witnesses import check_witnesses
from beam_inference.job.unfinished import warn_if_unfinished
from beam_inference.segmentation.numbering import WitnessedStage
from beam_inference.segmentation.scratch import Scratch
from beam_inference.segmentation.thresholds import check_threshold
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.kvstores import LOCAL, url_of
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import Volume

_CHUNK_SIDE = 192
_MOST_VOXELS = 2**31
_MAP_DTYPES = ("uint8", "uint16", "float16", "float32", "float64")
_ID_DTYPES = ("uint32", "uint64")


@dataclass(frozen=True, slots=True)
class Place:
    """A place to look at: its box, ZYX; voxels that are judged there, and those that are wrong."""

    box: BoundingBox
    judged: int
    wrong: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well a volume agrees with labels; what does not belong to its kind is None or empty.

    Attributes:
        output: URL of the volume that was judged; scale and channel: of it.
        labels: URL of the labels; labels_scale: of them.
        kind: what the volume holds: "objects", "classes" or "map".
        box: the voxels that both volumes have, ZYX.
        voxel_size_nm: ZYX; None where the volume does not say.
        judged: voxels whose label is not ignored.
        objects: scores of objects.
        split: labels that were split most; merged: segments that merge most.
        classes: Dice coefficient of each class; dice: that of all classes but 0 together.
        map: scores of a map.
        places: cells with the most voxels that are wrong, the worst first. A voxel of objects is
            right if its label and its segment overlap most with each other.
    """

    output: str
    scale: int
    channel: int
    labels: str
    labels_scale: int
    kind: Kind
    box: BoundingBox
    voxel_size_nm: VoxelSizeNm | None
    judged: int
    objects: ObjectScores | None
    split: Sequence[WorstObject]
    merged: Sequence[WorstObject]
    classes: Sequence[ClassDice]
    dice: float | None
    map: MapScores | None
    places: Sequence[Place]

    def as_json(self) -> Json:
        """All of it as JSON values."""
        values: Json = asdict(self)
        if self.objects is not None:
            values["objects"] |= {
                "variation_of_information": self.objects.variation_of_information,
                "adapted_rand_error": self.objects.adapted_rand_error,
            }
        return values


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """An evaluation, and how far it is.

    Attributes:
        evaluation: None unless all chunks are done.
        outcome: how the stages ended.
    """

    evaluation: Evaluation | None
    outcome: StageOutcome


def evaluate(
    output: str,
    labels: str,
    *,
    kind: Kind | None = None,
    scale: int = 0,
    labels_scale: int = 0,
    channel: int | None = None,
    ignore: Sequence[int] = (),
    positive: Sequence[int] = (),
    thresholds: Sequence[float] = (),
    value_range: tuple[float, float] = (0.0, 1.0),
    cell_shape: Zyx = (64, 64, 64),
    chunk_shape: Zyx | None = None,
    worst: int = 20,
    state: str | None = None,
    storage: Storage = LOCAL,
    flags: Sequence[str] = (),
) -> EvaluationResult:
    """Judge a volume by labels, as if both were in memory.

    Called again after an interruption, it continues. A complete evaluation leaves nothing behind,
    so the next one reads the volumes again.

    Args:
        output: path or URL of the volume that is judged.
        labels: path or URL of the labels; what both volumes have is judged.
        kind: what the output holds; None: by its dtype, where that is clear.
        scale: number of the output's scale.
        labels_scale: number of the labels' scale.
        channel: channel of the output; may be left out where there is one.
        ignore: labels whose voxels are not judged.
        positive: labels that a map should find; none: all but 0.
        thresholds: at which a map is scored, in stored units; by default the middle of its range.
            The first one decides which voxels are wrong.
        value_range: range of a map of floats, over which bins are spread.
        cell_shape: shape of the places that are ranked, ZYX.
        chunk_shape: unit of work, ZYX, a multiple of ``cell_shape``; None: about 192 on a side.
        worst: how many objects and places are listed.
        state: path or URL of a folder for records while it is under way; by default the output's.
        storage: how object stores are reached.
        flags: Beam's flags.

    Raises:
        UserError: the volume cannot be judged so.
    """
    plan = plan_evaluation(
        output,
        labels,
        kind=kind,
        scale=scale,
        labels_scale=labels_scale,
        channel=channel,
        ignore=ignore,
        positive=positive,
        thresholds=thresholds,
        value_range=value_range,
        cell_shape=cell_shape,
        chunk_shape=chunk_shape,
        worst=worst,
        storage=storage,
    )
    return run_evaluation(plan, plan.output if state is None else url_of(state), flags)


def plan_evaluation(
    output: str,
    labels: str,
    *,
    kind: Kind | None,
    scale: int,
    labels_scale: int,
    channel: int | None,
    ignore: Sequence[int],
    positive: Sequence[int],
    thresholds: Sequence[float],
    value_range: tuple[float, float],
    cell_shape: Zyx,
    chunk_shape: Zyx | None,
    worst: int,
    storage: Storage,
) -> EvaluationPlan:
    """Plan an evaluation; nothing is created. Arguments and errors are those of `evaluate`."""
    output = url_of(output)
    labels = url_of(labels)
    judged = open_volume(output, scale=scale, storage=storage)
    truth = open_volume(labels, scale=labels_scale, storage=storage)
    channel = _choose_channel(judged, channel)
    kind = _choose_kind(judged, kind)
    _check_labels(truth)
    if kind != "map" and (thresholds or positive):
        raise ConfigError(
            f"--threshold and --positive are for maps, and {output} is judged as {kind}: leave "
            "them out, or give --as map"
        )
    grid = _plan_grid(judged, truth, cell_shape, chunk_shape)
    return EvaluationPlan(
        output=output,
        scale=scale,
        channel=channel,
        labels=labels,
        labels_scale=labels_scale,
        kind=kind,
        ignore=tuple(sorted(set(ignore))),
        positive=tuple(sorted(set(positive))),
        thresholds=_choose_thresholds(judged, thresholds, value_range) if kind == "map" else (),
        bins=_choose_bins(judged, value_range) if kind == "map" else Bins("uint8", 0.0, 255.0),
        grid=grid,
        cell_shape=cell_shape,
        worst=worst,
        storage=storage,
        making=warn_if_unfinished(output, storage),
    )


def run_evaluation(plan: EvaluationPlan, state: str, flags: Sequence[str]) -> EvaluationResult:
    """Do what is missing of an evaluation; its records are removed once it is complete.

    Args:
        plan: the plan.
        state: URL of a folder, whose state folder holds the records.
        flags: Beam's flags.

    Raises:
        UserError: the folder cannot be written, or not be reached by the workers.
    """
    evaluations, outcome = run_evaluations([plan], plan.description, state, flags)
    return EvaluationResult(evaluations[0] if evaluations else None, outcome)


def run_evaluations(
    plans: Sequence[EvaluationPlan], description: Json, state: str, flags: Sequence[str]
) -> tuple[list[Evaluation], StageOutcome]:
    """Do what is missing of evaluations of several outputs by the same labels, all at once.

    Args:
        plans: plans that differ in their output.
        description: everything that determines what is counted.
        state: URL of a folder, whose state folder holds the records.
        flags: Beam's flags.

    Returns:
        The evaluations, none unless all chunks are done; and how the stages ended.

    Raises:
        UserError: the folder cannot be written, or not be reached by the workers.
    """
    storage = plans[0].storage
    check_writable(state)
    check_place(flags, [state, *(url for plan in plans for url in (plan.output, plan.labels))])
    job = stage_job("evaluate", description, state, storage, ())
    scratch_url = f"{job.state_url}/evaluate_scratch/{job.fingerprint[:16]}"
    # Any number of evaluations of a volume may be under way.
    job = replace(job, kind=f"evaluate/{job.fingerprint[:16]}")
    plans = [
        replace(plan, scratch_url=f"{scratch_url}/{number}") for number, plan in enumerate(plans)
    ]
    job = replace(job, stages=evaluation_stages(*plans))
    StageRecords(job).begin()
    check_witnesses(job, [each for each in job.stages if isinstance(each, WitnessedStage)], state)
    tasks = sum(stage.count for stage in job.stages)
    outcome = run_stages(job, flags, len(plans) * plans[0].grid.roi.size / tasks)
    if not outcome.is_complete:
        return [], outcome
    evaluations = [read_evaluation(plan) for plan in plans]
    _forget(job, scratch_url)
    return evaluations, outcome


def read_evaluation(plan: EvaluationPlan) -> Evaluation:
    """Score what the stages have counted.

    Raises:
        VolumeError: no voxel is judged.
    """
    scratch = plan.scratch()
    result = scratch.read("result", 0)
    found = scratch.read("places", 0)["places"]
    is_map = plan.kind == "map"
    judged = int(result["histograms"].sum() if is_map else result["table"]["voxels"].sum())
    if not judged:
        raise VolumeError(
            f"no voxel of {plan.grid.roi} is judged: all labels of {plan.labels} there are among "
            f"those to ignore, {', '.join(map(str, plan.ignore))}"
        )
    is_objects = plan.kind == "objects"
    classes, dice = score_classes(result["table"]) if plan.kind == "classes" else ([], None)
    return Evaluation(
        output=plan.output,
        scale=plan.scale,
        channel=plan.channel,
        labels=plan.labels,
        labels_scale=plan.labels_scale,
        kind=plan.kind,
        box=plan.grid.roi,
        voxel_size_nm=plan.open_output().voxel_size_nm,
        judged=judged,
        objects=score_objects(result["table"]) if is_objects else None,
        split=worst_objects(result["table"], "label", plan.worst) if is_objects else [],
        merged=worst_objects(result["table"], "segment", plan.worst) if is_objects else [],
        classes=classes,
        dice=dice,
        map=(
            score_map(result["histograms"], result["at"], plan.thresholds, plan.bins)
            if is_map
            else None
        ),
        places=[
            Place(box, int(place["judged"]), int(place["wrong"]))
            for box, place in zip(boxes_of(found), found, strict=True)
        ],
    )


def _forget(job: StageJob, scratch_url: str) -> None:
    """Remove the records of an evaluation: the volumes may be others when it is asked for again."""
    # first what says that files are there
    delete_folder(job.state_url, job.storage, f"{job.kind}/")
    Scratch(scratch_url, job.storage).delete()


def _choose_channel(volume: Volume, channel: int | None) -> int:
    if channel is None and volume.channels > 1:
        raise ConfigError(
            f"{volume.url} has the channels 0 … {volume.channels - 1}: say which with --channel"
        )
    if channel is not None and channel >= volume.channels:
        raise ConfigError(
            f"--channel {channel}: {volume.url} has the channels 0 … {volume.channels - 1}"
        )
    return channel or 0


def _choose_kind(volume: Volume, kind: Kind | None) -> Kind:
    if kind is None:
        kind = _guess_kind(volume)
    if kind == "map" and volume.dtype.name not in _MAP_DTYPES:
        raise ConfigError(
            f"--as map: {volume.url} holds {volume.dtype}; maps are {', '.join(_MAP_DTYPES)}"
        )
    if kind != "map" and volume.dtype.kind not in "iu":
        raise ConfigError(
            f"--as {kind}: {volume.url} holds {volume.dtype}; {kind} are numbered by integers"
        )
    return kind


def _guess_kind(volume: Volume) -> Kind:
    if volume.dtype.name in _ID_DTYPES or volume.precomputed_type == "segmentation":
        return "objects"
    if volume.dtype.kind not in "iu":
        return "map"
    raise ConfigError(
        f"{volume.url} holds {volume.dtype}, which may be ids, classes or a map: say which with "
        "--as objects, --as classes or --as map"
    )


def _check_labels(volume: Volume) -> None:
    if volume.channels > 1:
        raise ConfigError(f"{volume.url} has {volume.channels} channels: labels have one")
    if volume.dtype.kind not in "iu":
        raise ConfigError(f"{volume.url} holds {volume.dtype}: labels are integers")


def _plan_grid(
    judged: Volume, truth: Volume, cell_shape: Zyx, chunk_shape: Zyx | None
) -> ChunkGrid:
    sizes = (judged.voxel_size_nm, truth.voxel_size_nm)
    if None not in sizes and not zyx.is_same_size(*cast(tuple[VoxelSizeNm, VoxelSizeNm], sizes)):
        raise VolumeError(
            f"the voxels of {judged.url} are {sizes[0]} nm, those of {truth.url} {sizes[1]} nm "
            "(z, y, x): choose scales of one size with --scale and --labels-scale"
        )
    box = judged.bounds.intersection(truth.bounds)
    if not box.size:
        raise VolumeError(
            f"{judged.url} {judged.bounds} and {truth.url} {truth.bounds} have no voxel in common: "
            "is one of them placed elsewhere?"
        )
    usual = zyx.triple(size * max(1, _CHUNK_SIDE // size) for size in cell_shape)
    chunk_shape = chunk_shape or usual
    if any(n % cell for n, cell in zip(chunk_shape, cell_shape, strict=True)):
        raise AlignmentError(
            f"--chunk_shape {zyx.as_flag(chunk_shape)} is not a multiple of --cell_shape "
            f"{zyx.as_flag(cell_shape)}, the places that are ranked. Nearest above: "
            f"{zyx.as_flag(zyx.round_up_each(chunk_shape, cell_shape))}."
        )
    if math.prod(zyx.minimum(chunk_shape, box.shape)) >= _MOST_VOXELS:
        raise ConfigError(
            f"chunks of {zyx.as_flag(chunk_shape)} voxels: they must have fewer than 2^31"
        )
    return ChunkGrid(box, chunk_shape)


def _choose_thresholds(
    volume: Volume, thresholds: Sequence[float], value_range: tuple[float, float]
) -> tuple[float, ...]:
    for threshold in thresholds:
        check_threshold("--threshold", threshold, volume.dtype, volume.url)
    if thresholds:
        return tuple(thresholds)
    low, high = value_range
    is_float = volume.dtype.kind not in "iu"
    return ((low + high) / 2 if is_float else 2.0 ** (8 * volume.dtype.itemsize - 1),)


def _choose_bins(volume: Volume, value_range: tuple[float, float]) -> Bins:
    low, high = value_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"--range {low:g},{high:g}: two numbers are needed, the lower one first")
    return Bins(volume.dtype.name, low, high)
