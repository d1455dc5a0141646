"""Output volumes: creating a new one, and checking whether an existing one can be continued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.formats import OutputSpec, get_format, offset_formats
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import ConfigError, VolumeError, WorkerFault
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import Origin, pad_to_zero
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.conditional_writes import change_json
from beam_inference.volumes.detection import StoredVolume, volume_at
from beam_inference.volumes.kvstores import kvstore_spec, one_line, open_kvstore, open_with
from beam_inference.volumes.ome_zarr import GroupScale
from beam_inference.volumes.opening import as_volume, open_source
from beam_inference.volumes.sharding import stored_shard_shape
from beam_inference.volumes.volume import Volume

_UNIT_DIGITS = 1e-5
"""Relative error of a voxel size that TensorStore has written as the unit of an axis."""

LOSSY = ("jpeg",)
"""Encodings whose voxels do not read back as they were written."""


def default_bounds(format: str, box: BoundingBox, padding: str) -> BoundingBox:
    """The extent of a new output that holds a box, and nothing else.

    Args:
        format: name of its format.
        box: the voxels that will be written.
        padding: how a user can have the box padded to voxel 0, for messages.

    Raises:
        ConfigError: such an array starts at voxel 0, and the box does not.
    """
    if get_format(format).has_offset or not any(box.start):
        return box
    message = (
        f"the voxels {box} (z, y, x; stop exclusive) do not start at 0, as {format} volumes do, "
        f"which state no offset. Write one of {offset_formats()}, which do"
    )
    padded = pad_to_zero(box)
    if padded is None:
        raise ConfigError(f"{message}.")
    share = 100 * box.size / padded.size
    raise ConfigError(
        f"{message}; or {padding}, so that {padded} is written, of which these voxels are "
        f"{share:.2g} % and the others are zero."
    )


def open_output(spec: OutputSpec, *, keep_blank: bool = True) -> Volume | None:
    """Open the existing output for writing.

    Args:
        spec: what the output is.
        keep_blank: whether blocks of zeros are written like any other. If not, blocks of zeros that
            are written are absent, and those that were there before are deleted.

    Returns:
        The output; None if nothing is there.

    Raises:
        VolumeError: something else is there, or a volume that differs from ``spec``.
    """
    volume = find_output(spec, keep_blank=keep_blank)
    if volume is not None and volume.bounds != spec.bounds:
        raise VolumeError(
            f"the output {spec.url} has the bounds {volume.bounds}, and the job's has "
            f"{spec.bounds}: its metadata were changed, or it is another volume. Put it back, or "
            "choose another output.path."
        )
    return volume


def find_output(spec: OutputSpec, *, keep_blank: bool = True) -> Volume | None:
    """Open the existing output for writing, whatever its bounds; see :func:`open_output`.

    Raises:
        VolumeError: something else is there, or a volume that differs from ``spec`` but for its
            bounds.
    """
    stored = volume_at(spec.url, spec.storage)
    if stored is None:
        return None
    if stored.driver != get_format(spec.format).kind:
        raise VolumeError(
            f"the output {spec.url} exists as {stored.driver}, the job says format: {spec.format}. "
            "Choose another output.path, or remove what is there."
        )
    volume = _open(spec, create=False, keep_blank=keep_blank)
    entry = _entry_in(stored, spec)
    if entry is not None:
        volume = volume.place_at(entry.origin)
    _check_same(spec, volume, entry)
    return volume


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How the blocks of a volume are stored.

    Attributes:
        encoding: of each block, see :class:`~beam_inference.config.formats.OutputSpec`.
        shard_shape: ZYX; None for a file a block.
    """

    encoding: str
    shard_shape: Zyx | None


def stored_layout(url: str, format: str, storage: Storage) -> BlockLayout | None:
    """How the blocks of an existing volume are stored; None if there is none of that format.

    Raises:
        VolumeError: it cannot be opened.
    """
    stored = volume_at(url, storage)
    if stored is None or stored.driver != get_format(format).kind:
        return None
    volume = open_source(VolumeSource(url, storage=storage), check_blocks=False)
    shard_shape = volume.block_shape if volume.block_shape != volume.read_shape else None
    scale = volume.precomputed_scale
    if scale is not None and scale.get("sharding"):
        shard_shape = stored_shard_shape(scale)
    return BlockLayout(volume.encoding or "raw", shard_shape)


def _entry_in(stored: StoredVolume, spec: OutputSpec) -> GroupScale | None:
    """The entry of an existing output's array in its group; None if it is in none."""
    path = get_format(spec.format).array_path
    listed = [each.group_scale for each in stored.scales if each.group_scale is not None]
    return next((each for each in listed if each.path == path), None)


def _check_same(spec: OutputSpec, volume: Volume, entry: GroupScale | None) -> None:
    """Refuse a volume that differs from a spec in more than its bounds.

    Args:
        spec: what the output is to be.
        volume: what is there.
        entry: of the volume's array in its group; None if it is in none.
    """
    has_encodings = bool(get_format(spec.format).encodings)
    is_sharded = volume.block_shape != volume.read_shape
    existing: dict[str, object] = {
        "encoding": volume.encoding if has_encodings else None,
        "dtype": volume.dtype.name,
        "channels": volume.channels,
        "block_shape": list(volume.read_shape),
        "shard_shape": list(volume.block_shape) if is_sharded else None,
        "voxel_size_nm": _stated_size(volume.voxel_size_nm or (), spec),
        "channel_axis": "always" if volume.has_channel_axis else "auto",
    }
    expected: dict[str, object] = {
        "encoding": spec.encoding if has_encodings else None,
        "dtype": spec.dtype,
        "channels": spec.channels,
        "block_shape": list(spec.block_shape),
        "shard_shape": _expected_shard(spec, volume),
        "voxel_size_nm": list(spec.voxel_size_nm),
        "channel_axis": spec.channel_axis,
    }
    if entry is not None:
        existing["the group's axes"] = [axis.lower() for axis in entry.axes]
        existing["the group's voxel_size_nm"] = _stated_size(entry.voxel_size_nm[-3:], spec)
        expected["the group's axes"] = list("czyx" if volume.has_channel_axis else "zyx")
        expected["the group's voxel_size_nm"] = list(spec.voxel_size_nm)
    if spec.channel_axis == "auto":  # a volume that was begun keeps the axes that it has
        del existing["channel_axis"]
    differing = [
        f"{key} is {existing[key]}, the job says {expected[key]}"
        for key in existing
        if existing[key] != expected[key]
    ]
    if differing:
        raise VolumeError(
            f"the output {spec.url} exists and differs from the job: {'; '.join(differing)}. "
            "Choose another output.path, or change the job to agree with it."
        )


def _stated_size(stated: Sequence[float | None], spec: OutputSpec) -> list[float | None]:
    """A voxel size that is stated; the wanted one if it is that, as far as units have digits."""
    same = len(stated) == 3 and all(
        a is not None and math.isclose(a, b, rel_tol=_UNIT_DIGITS)
        for a, b in zip(stated, spec.voxel_size_nm, strict=True)
    )
    return list(spec.voxel_size_nm if same else stated)


def _expected_shard(spec: OutputSpec, volume: Volume) -> list[int] | None:
    """The shape that a volume should state for its shards; None for a file a block."""
    shape = spec.write_shape
    if get_format(spec.format).clips_shards:
        blocks = zyx.ceil_div_each(volume.bounds.shape, spec.block_shape)
        shape = zyx.minimum(shape, zyx.multiply(blocks, spec.block_shape))
    return list(shape) if shape != spec.block_shape else None


def create_output(spec: OutputSpec) -> Volume:
    """Create the output's metadata, with no blocks yet. Racing launches create the same one.

    Raises:
        VolumeError: it cannot be created there.
        AlignmentError: a precomputed volume cannot have such shards.
    """
    format = get_format(spec.format)
    # before the array itself: what is killed in between has made no volume yet
    for key, value in format.array_files(spec).items():
        _write_json(spec, key, value)
    volume = _open(spec, create=True)
    # after it: a group never names an array that is not there
    for key, value in format.group_files(spec).items():
        _write_json(spec, key, value)
    return volume.place_at(Origin(spec.bounds.start, spec.rest)) if format.group else volume


def check_output(spec: OutputSpec) -> None:
    """Refuse what cannot be created, before anything is.

    Raises:
        AlignmentError: a precomputed volume cannot have such shards.
    """
    get_format(spec.format).metadata(spec)


def _write_json(spec: OutputSpec, key: str, value: Json) -> None:
    """Write metadata beside attributes of others, which stay."""

    def change(before: Json) -> Json:
        attributes = before.get("attributes")
        if isinstance(attributes, dict) and "attributes" in value:
            return {**before, **value, "attributes": {**attributes, **value["attributes"]}}
        return {**before, **value}

    try:
        change_json(open_kvstore(spec.url, spec.storage), key, spec.url, change, otherwise={})
    except WorkerFault as error:
        raise VolumeError(f"cannot create the output {spec.url}: {error}") from None


def _open(spec: OutputSpec, *, create: bool, keep_blank: bool = True) -> Volume:
    # Zeros are written like any other value: a block is absent only if no chunk was written there.
    format = get_format(spec.format)
    url = f"{spec.url.rstrip('/')}/{format.array_path}" if format.array_path else spec.url
    store = {
        "driver": format.driver,
        "kvstore": kvstore_spec(url, spec.storage),
        "store_data_equal_to_fill_value": keep_blank,
        **(format.metadata(spec) if create else {}),
    }
    try:
        volume = open_with(
            lambda context: ts.open(
                store, read=True, write=True, open=True, create=create, context=context
            ),
            spec.storage,
        )
        return as_volume(spec.url, volume)
    except (ValueError, OSError) as error:
        raise VolumeError(
            f"cannot {'create' if create else 'open'} the output {spec.url}: {one_line(error)}"
        ) from None
