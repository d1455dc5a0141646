"""The worst boxes of an evaluation as small volumes for annotators, and the record of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Frozen, Json, Natural, Url, describe_fault
from beam_inference.config.formats import OutputSpec, get_format, installed_formats
from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.conversion.blocks import default_block_shape
from beam_inference.conversion.file_conversion import plan_file_conversion
from beam_inference.conversion.options import ConversionOptions
from beam_inference.conversion.protocol import FREE, Read, SourceInfo
from beam_inference.conversion.stored_files import StoredFile
from beam_inference.conversion.targets import FILE_FORMATS
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.foreign_text import shorten_text
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.training.config import (
    BoxConfig,
    SplitConfig,
    TrainingConfig,
    VolumeConfig,
    load_training,
)
from beam_inference.volumes.kvstores import read_file
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import check_output, create_output
from beam_inference.volumes.volume import Volume

RECORD_FILE = "boxes.json"
_NO_VOXEL_SIZE: VoxelSizeNm = (1.0, 1.0, 1.0)
"""Stands where no volume states its voxel size."""


class _Foreign(BaseModel):
    """A part of a file of which only some keys matter here."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class JudgedPlace(_Foreign):
    """A place of an evaluation."""

    box: BoxConfig
    judged: Natural
    wrong: Natural


class JudgedVolumes(_Foreign):
    """What matters here of an evaluation that was printed as JSON."""

    output: Url
    scale: Natural
    channel: Natural
    labels: Url
    labels_scale: Natural
    places: list[JudgedPlace]


class BoxRecord(Frozen):
    """A box that was exported.

    Attributes:
        name: name of its folder.
        core: the place that was judged; only its labels count.
        box: what was exported: the place and the context around it.
        judged: voxels of the place that were judged; wrong: those that were wrong.
        labels_sha256: hash of the labels that were exported.
    """

    name: Annotated[str, Field(pattern=r"^box_[0-9]{4}$")]
    core: BoxConfig
    box: BoxConfig
    judged: Natural
    wrong: Natural
    labels_sha256: str


class JudgedVolume(Frozen):
    """What tells a volume of a training from its others.

    Attributes:
        image: URL of its image; scale: of that.
        labels: URL of its labels; labels_scale: of these.
        name: its name in the split.
    """

    image: Url
    scale: Natural
    labels: Url
    labels_scale: Natural
    name: str

    @staticmethod
    def of(volume: VolumeConfig) -> JudgedVolume:
        """What tells a volume of a training."""
        return JudgedVolume(
            image=volume.image,
            scale=volume.scale,
            labels=volume.labels,
            labels_scale=volume.labels_scale,
            name=volume.name,
        )


class BoxesRecord(Frozen):
    """Boxes that were exported.

    It goes with them to annotators, and what comes back may be anybody's: it names the volume and
    the split, so that another training is noticed, but nothing that is trained with or run.

    Attributes:
        volume: the volume of the training in which the boxes are.
        split: how the training's volumes are split.
        format: format of the small volumes.
        boxes: the worst first.
    """

    volume: JudgedVolume
    split: SplitConfig
    format: str
    boxes: list[BoxRecord]


@dataclass(frozen=True, slots=True)
class Export:
    """Boxes that were exported.

    Attributes:
        record: the boxes.
        left_out: places that are not all of the training set.
    """

    record: BoxesRecord
    left_out: int


def load_evaluation(path: Path) -> JudgedVolumes:
    """Read what ``evaluate --json`` printed; of several thresholds, the best one.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    return _parse(_read_json(path), JudgedVolumes, f"{path} is not what evaluate --json prints")


def load_boxes(folder: Path) -> BoxesRecord:
    """Read the record of the boxes in a folder.

    Raises:
        ConfigError: there is none, or it cannot be understood.
    """
    path = folder / RECORD_FILE
    return _parse(_read_json(path), BoxesRecord, f"{path} is not what boxes wrote")


def _read_json(path: Path) -> Any:
    try:
        values = parse_json(read_file(path.absolute().as_uri()))
    except (VolumeError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {shorten_text(str(error))}") from None
    return _best_threshold(values) if isinstance(values, dict) else values


def _best_threshold(values: Json) -> object:
    """The evaluation of the best threshold of several; any other value as it is."""
    listed = values.get("thresholds")
    best = values.get("best")
    if not isinstance(listed, list) or not isinstance(best, dict):
        return values
    wanted = best.get("variation_of_information")
    volumes = [each for each in listed if isinstance(each, dict)]
    return next((each for each in volumes if each.get("threshold") == wanted), values)


Parsed = TypeVar("Parsed", bound=BaseModel)


def _parse(values: object, kind: type[Parsed], complaint: str) -> Parsed:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{complaint}: {describe_fault(error)}") from None


def export_boxes(
    folder: Path,
    evaluation: JudgedVolumes,
    training: Path,
    *,
    context: Zyx = (0, 0, 0),
    most: int = 10,
    format: str = "precomputed",
    image: str | None = None,
) -> Export:
    """Export the worst places as small volumes: image, labels and prediction of each.

    A place is exported only if all its voxels are of the training set: in another set, what an
    annotator corrects could not be trained with, and would not be chosen blindly any more.

    Args:
        folder: where the boxes are written; it must be empty or absent.
        evaluation: what was judged, and its places.
        training: path of the training file: its volumes and its split.
        context: voxels around each place that are exported, too, ZYX.
        most: how many boxes are exported.
        format: format of the small volumes.
        image: URL of the training's image, where its labels are not those that were judged.

    Raises:
        UserError: something cannot be read, or no place can be exported.
    """
    config = load_training(training)
    entry = _find_volume(config, evaluation, image)
    _check_format(format)
    volumes = _open_volumes(entry, evaluation, config.storage)
    split = config.definite_split
    bounds = volumes["image"].bounds
    for volume in volumes.values():
        bounds = bounds.intersection(volume.bounds)
    chosen = [
        place
        for place in evaluation.places
        if bounds.contains(place.box.box) and split.contains("train", place.box.box, entry.name)
    ]
    left_out = len(evaluation.places) - len(chosen)
    if not chosen:
        raise ConfigError(
            f"none of the {len(evaluation.places)} places lies in the training set alone: blocks "
            f"of the split are {list(split.block_shape)} voxels. Have evaluate list more places "
            "(--worst), or smaller ones (--cell_shape)."
        )
    boxes = [place.box.box.grow(context).intersection(bounds) for place in chosen[:most]]
    _check_room(boxes, config.patch_shape)
    _make_empty(folder)
    records = []
    for number, (place, box) in enumerate(zip(chosen, boxes, strict=False), 1):
        name = f"box_{number:04d}"
        labels = _write_box(folder / name, box, volumes, format)
        records.append(
            BoxRecord(
                name=name,
                core=BoxConfig.of(place.box.box.intersection(box)),
                box=BoxConfig.of(box),
                judged=place.judged,
                wrong=place.wrong,
                labels_sha256=hash_labels(labels),
            )
        )
    record = BoxesRecord(
        volume=JudgedVolume.of(entry),
        split=SplitConfig(**asdict(split)),
        format=format,
        boxes=records,
    )
    (folder / RECORD_FILE).write_text(
        record.model_dump_json(indent=1, exclude_defaults=True), encoding="utf-8"
    )
    return Export(record, left_out)


def hash_labels(labels: AnyArray) -> str:
    """A hash of labels that does not depend on their dtype."""
    return hashlib.sha256(np.ascontiguousarray(labels, np.uint64).tobytes()).hexdigest()


def _find_volume(
    config: TrainingConfig, evaluation: JudgedVolumes, image: str | None
) -> VolumeConfig:
    """The volume of a training whose labels were judged. Raises ConfigError."""
    if image is not None:
        found = [each for each in config.volumes if each.image == image]
    elif len(config.volumes) == 1:
        found = config.volumes
    else:
        found = [each for each in config.volumes if each.labels == evaluation.labels]
    if not found:
        listed = ", ".join(each.image for each in config.volumes)
        raise ConfigError(
            f"the training has no volume with the labels {evaluation.labels}: say which of its "
            f"images was judged, with --image ({listed})"
        )
    return found[0]


def _check_format(format: str) -> None:
    known = [*(each.name for each in installed_formats()), *FILE_FORMATS]
    if format not in known:
        raise ConfigError(f"--format {format}: expected one of {', '.join(known)}")


def _open_volumes(
    entry: VolumeConfig, evaluation: JudgedVolumes, storage: Storage
) -> dict[str, Volume]:
    volumes = {
        "image": open_volume(entry.image, scale=entry.scale, storage=storage),
        "labels": open_volume(evaluation.labels, scale=evaluation.labels_scale, storage=storage),
        "prediction": open_volume(
            evaluation.output,
            scale=evaluation.scale,
            channel=[evaluation.channel],
            storage=storage,
        ),
    }
    image = volumes["image"]
    for volume in volumes.values():
        sizes = (image.voxel_size_nm, volume.voxel_size_nm)
        if sizes[0] and sizes[1] and not zyx.is_same_size(sizes[0], sizes[1]):
            raise VolumeError(
                f"the voxels of {image.url} are {list(sizes[0])} nm, those of {volume.url} "
                f"{list(sizes[1])} nm (z, y, x): places of one are none of the other"
            )
    return volumes


def _check_room(boxes: Sequence[BoundingBox], patch_shape: Zyx) -> None:
    """Refuse boxes in which no patch of the training fits. Raises ConfigError."""
    for box in boxes:
        if any(n < patch for n, patch in zip(box.shape, patch_shape, strict=True)):
            raise ConfigError(
                f"the box {box} has no room for a patch of the training, {list(patch_shape)} "
                "voxels: give more --context, or have evaluate rank larger places (--cell_shape)"
            )


def _make_empty(folder: Path) -> None:
    """Make a folder that is empty. Raises StateError."""
    if folder.is_symlink() and not folder.exists():
        raise StateError(
            f"{folder} is a link that leads nowhere: remove it, or choose another folder"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StateError(
            f"{folder} is not empty, and may hold what annotators have corrected: choose another "
            "folder, or remove it yourself"
        )
    folder.mkdir(parents=True, exist_ok=True)


def _write_box(folder: Path, box: BoundingBox, volumes: dict[str, Volume], format: str) -> AnyArray:
    """Write image, labels and prediction of a box; returns its labels (Z, Y, X)."""
    folder.mkdir()
    sizes = [each.voxel_size_nm for each in volumes.values() if each.voxel_size_nm is not None]
    voxel_size_nm = sizes[0] if sizes else _NO_VOXEL_SIZE
    cutouts = {name: volume.read(box) for name, volume in volumes.items()}
    for name, values in cutouts.items():
        path = box_path(folder, name, format)
        if format in FILE_FORMATS:
            _write_file(path, values, box, voxel_size_nm, format)
        else:
            starts_at_zero = not get_format(format).has_offset
            place = box.translate(zyx.negative(box.start)) if starts_at_zero else box
            write_blocks(path, values, place, voxel_size_nm, format, labels=name == "labels")
    labels: AnyArray = cutouts["labels"][0]
    return labels


def box_path(folder: Path, name: str, format: str) -> Path:
    """The path of a small volume in the folder of its box.

    Args:
        folder: the folder.
        name: "image", "labels" or "prediction".
        format: format of the volume.
    """
    suffixes = FILE_FORMATS[format].suffixes if format in FILE_FORMATS else ()
    return folder / f"{name}{suffixes[0] if suffixes else ''}"


def write_blocks(
    path: Path,
    values: AnyArray,
    box: BoundingBox,
    voxel_size_nm: VoxelSizeNm,
    format: str,
    *,
    labels: bool,
) -> None:
    """Write a small volume of blocks, at once.

    Args:
        path: its folder.
        values: (channels, Z, Y, X).
        box: where its voxels lie.
        voxel_size_nm: ZYX.
        format: an installed format.
        labels: whether values are names of objects.
    """
    dtype = values.dtype.name
    encoding = get_format(format).usual_encoding(dtype, len(values), labels=labels)
    spec = OutputSpec(
        url=path.absolute().as_uri(),
        format=format,
        dtype=dtype,
        channels=len(values),
        bounds=box,
        block_shape=default_block_shape(box.shape, voxel_size_nm),
        voxel_size_nm=voxel_size_nm,
        encoding=encoding,
        labels=labels,
    )
    check_output(spec)
    create_output(spec).write(box, values)


def _write_file(
    path: Path, values: AnyArray, box: BoundingBox, voxel_size_nm: VoxelSizeNm, format: str
) -> None:
    info = SourceInfo(box, len(values), values.dtype.name, voxel_size_nm, FREE)
    options = ConversionOptions(drop=("offset", "voxel-size"))
    source = _Cutout(info, values)
    plan_file_conversion(source, "", str(path), box, format, options).run()


@dataclass(frozen=True, slots=True)
class _Cutout:
    """Voxels in memory, as the source of a conversion."""

    info: SourceInfo
    values: AnyArray

    @property
    def identity(self) -> Json:
        """Nothing: a single file is written at once, and never continued."""
        return {}

    @property
    def files(self) -> Sequence[StoredFile]:
        """None."""
        return []

    def open(self) -> Read:
        """Return a function that takes voxels of a box."""

        def read(box: BoundingBox) -> AnyArray:
            part: AnyArray = self.values[(slice(None), *box.slices_in(self.info.bounds))]
            return part

        return read
