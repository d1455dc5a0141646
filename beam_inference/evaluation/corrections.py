"""Labels that annotators have corrected in small volumes, back as volumes of a training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import yaml

from beam_inference.arrays import AnyArray
from beam_inference.conversion.find_source import find_source
from beam_inference.conversion.protocol import AXES_TURNED, SourceInfo
from beam_inference.environment import available_memory
from beam_inference.errors import ConfigError, StateError, VolumeError, WorkerFault
from beam_inference.evaluation.boxes import (
    RECORD_FILE,
    BoxesRecord,
    BoxRecord,
    JudgedVolume,
    box_path,
    hash_labels,
    load_boxes,
    write_blocks,
)
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.replacement import plan_replacement
from beam_inference.training.config import (
    SplitConfig,
    TrainingConfig,
    VolumeConfig,
    load_training,
)
from beam_inference.training.results import WEIGHTS
from beam_inference.volumes.kvstores import LOCAL, refuse_link
from beam_inference.volumes.opening import open_volume

_CORRECTED = "corrected"
_FORMAT = "precomputed"
_LARGEST_UINT32 = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Corrections:
    """What was taken back.

    Attributes:
        training: path of the training file that was written.
        taken: names of the boxes whose labels were corrected.
        unchanged: names of those that are as they were exported, and were left out.
        weights: path of the weights that the training begins with; None for random ones.
    """

    training: Path
    taken: Sequence[str]
    unchanged: Sequence[str]
    weights: str | None


_BYTES_PER_VOXEL = 16
"""Of a box: its labels as they are stored and as they are kept, and what is hashed of them."""


def take_corrections(folder: Path, training: Path, to: Path, *, weight: float = 1.0) -> Corrections:
    """Take corrected labels back: as volumes of a further training, in the same split.

    The labels keep their place and the name of their volume, so each block stays in the set that it
    is in. Only labels of the places that were judged count, not those of the context around them;
    and there, labels of earlier volumes do not count any more.

    Args:
        folder: what :func:`~beam_inference.evaluation.boxes.export_boxes` wrote, with labels
            corrected in place. Others may have had it: all but the labels is from the training.
        training: path of the training file that the boxes were exported for.
        to: path of the training file that is written; the results go to a folder of its name.
        weight: how often samples come from corrected boxes, per place, compared with others.

    Raises:
        UserError: labels cannot be read, or do not fit their box; none were corrected; the boxes
            are not of this training; or a place that is to be written is a link.
    """
    record = load_boxes(folder)
    earlier = load_training(training)
    judged = _find_judged(folder, record, training, earlier)
    output = to.absolute().with_suffix("")
    if os.path.lexists(to) or str(output) == earlier.output or to.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{to}: expected the name of a new YAML file. Its results go to {output}, which must "
            "not be those of the earlier training."
        )
    image = open_volume(judged.image, scale=judged.scale, storage=earlier.storage)
    _check_boxes(folder, record, image.bounds)
    labels = {box.name: _read_labels(folder, box, record.format) for box in record.boxes}
    corrected = [box for box in record.boxes if hash_labels(labels[box.name]) != box.labels_sha256]
    if not corrected:
        raise ConfigError(
            f"the labels of all {len(record.boxes)} boxes in {folder} are as they were exported: "
            "correct them in place, under the same names"
        )
    targets = {box.name: folder / _CORRECTED / box.name for box in corrected}
    for target in targets.values():
        _refuse_links(target)
    for box in corrected:
        target = targets[box.name]
        plan_replacement(target.absolute().as_uri(), LOCAL).remove()
        values = labels[box.name][None]
        size = image.voxel_size_nm or (1.0, 1.0, 1.0)
        write_blocks(target, values, box.box.box, size, _FORMAT, labels=True)
    weights = Path(earlier.output) / WEIGHTS
    changed = {
        "volumes": [
            *(_without(each, judged, corrected) for each in earlier.volumes),
            *(_corrected_volume(judged, targets[box.name], box, weight) for box in corrected),
        ],
        "output": str(output),
        # written out: the default follows from the patch shape, which somebody may change
        "split": earlier.split.model_copy(
            update={"block_shape": earlier.definite_split.block_shape}
        ),
        "network": earlier.network.model_copy(
            update={"weights": str(weights) if weights.exists() else earlier.network.weights}
        ),
    }
    config = earlier.model_copy(update=changed)
    _write_training(to, config)
    return Corrections(
        training=to,
        taken=[box.name for box in corrected],
        unchanged=[box.name for box in record.boxes if box not in corrected],
        weights=config.network.weights,
    )


def _find_judged(
    folder: Path, record: BoxesRecord, training: Path, config: TrainingConfig
) -> VolumeConfig:
    """The volume of a training in which boxes are.

    Raises:
        StateError: boxes may be in other sets of this training than of the one that they were
            exported for.
    """
    split = SplitConfig(**asdict(config.definite_split))
    found = [each for each in config.volumes if JudgedVolume.of(each) == record.volume]
    if split != record.split or not found:
        raise StateError(
            f"the boxes in {folder} were not exported for {training} as it is: its split, or the "
            f"volume {record.volume.image} with the name {record.volume.name!r}, is another one. "
            "Boxes could be of the validation or test set now. Write what it said, name the "
            "training file that it was, or export boxes again."
        )
    if len({box.name for box in record.boxes}) < len(record.boxes):
        raise StateError(f"{folder / RECORD_FILE} lists a box twice: export boxes again")
    for box in record.boxes:
        core = box.core.box
        is_trained = config.definite_split.contains("train", core, found[0].name)
        if not box.box.box.contains(core) or not is_trained:
            raise StateError(
                f"{folder / RECORD_FILE} says that {box.name} was judged in {core}, which "
                f"is not inside of its box, {box.box.box}, or not of the training set alone: it "
                "was changed since. Export boxes again."
            )
    return found[0]


def _check_boxes(folder: Path, record: BoxesRecord, bounds: BoundingBox) -> None:
    """Refuse boxes that do not lie in the image, or do not fit into memory. Raises StateError."""
    memory = available_memory()
    for box in record.boxes:
        needed = _BYTES_PER_VOXEL * box.box.box.size
        if not bounds.contains(box.box.box):
            raise StateError(
                f"{folder / RECORD_FILE} says that {box.name} is {box.box.box}, which is not in "
                f"the image, {bounds}: it was changed since. Export boxes again."
            )
        if memory is not None and needed > memory:
            raise StateError(
                f"{box.name}, {box.box.box}, takes {needed:,} bytes of memory, and {memory:,} are "
                "available: export smaller boxes."
            )


def _refuse_links(target: Path) -> None:
    """Refuse a link where a corrected volume is written. Raises StateError."""
    try:
        refuse_link(target.absolute().as_uri())
    except WorkerFault as error:  # nothing runs yet: it is the user's to mend
        raise StateError(str(error)) from None


def _shows(volume: VolumeConfig, judged: VolumeConfig) -> bool:
    """Whether a volume of a training has the image of another one."""
    return (volume.image, volume.scale) == (judged.image, judged.scale)


def _read_labels(folder: Path, box: BoxRecord, format: str) -> AnyArray:
    """Labels of a box (Z, Y, X), uint32 or uint64. Raises VolumeError."""
    path = box_path(folder / box.name, "labels", format)
    source = find_source(f"{path}/*.png" if format == "png" else str(path), None, 0, LOCAL)
    info = source.info
    if info.bounds.shape != box.box.box.shape or info.channels != 1:
        raise VolumeError(
            f"{path} has {info.channels} channels of {list(info.bounds.shape)} voxels; expected "
            f"one of {list(box.box.box.shape)} (z, y, x), as it was exported"
        )
    _check_place(info, box.box.box, path)
    labels = source.open()(info.bounds)[0]
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        raise VolumeError(
            f"{path} holds {labels.dtype} from {labels.min()} on; labels are integers from 0 on"
        )
    dtype = np.uint32 if labels.max() <= _LARGEST_UINT32 else np.uint64
    kept: AnyArray = labels.astype(dtype)
    return kept


def _check_place(info: SourceInfo, box: BoundingBox, path: Path) -> None:
    """Refuse labels that say that they lie elsewhere than their box, or otherwise.

    Some formats, and many programs, state no place: such labels begin at 0.
    """
    if info.bounds.start not in (box.start, (0, 0, 0)):
        raise VolumeError(
            f"{path} begins at {list(info.bounds.start)}; expected {list(box.start)} (z, y, x), as "
            "it was exported. Are these the labels of another box? Put them into its folder."
        )
    if AXES_TURNED in info.notes:
        raise VolumeError(
            f"{path} says that its axes are turned or flipped in space, and was exported as they "
            "are in the volume: its labels would be taken mirrored. Save them in the orientation "
            "of the image beside them."
        )


def _without(
    volume: VolumeConfig, judged: VolumeConfig, corrected: Sequence[BoxRecord]
) -> VolumeConfig:
    """An earlier volume of the training, whose labels do not count where others are better now."""
    if not _shows(volume, judged):
        return volume
    reach = None if volume.within is None else volume.within.box
    cores = [
        box.core for box in corrected if reach is None or reach.intersection(box.core.box).size
    ]
    return volume.model_copy(update={"without": [*volume.without, *cores]})


def _corrected_volume(
    judged: VolumeConfig, labels: Path, box: BoxRecord, weight: float
) -> VolumeConfig:
    """The volume of a training whose labels are those of a corrected box."""
    return judged.model_copy(
        update={
            "labels": labels.absolute().as_uri(),
            "labels_scale": 0,
            "within": box.core,
            "without": [],
            "weight": weight,
        }
    )


def _write_training(to: Path, config: TrainingConfig) -> None:
    """Write a new training file with what was said, and no defaults."""
    values = config.model_dump(mode="json", exclude_unset=True)
    with to.open("x", encoding="utf-8") as file:
        file.write(yaml.safe_dump(values, sort_keys=False))
