"""Output volumes: creating a new one, and checking whether an existing one can be continued."""

from __future__ import annotations

import json

import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.formats import OutputSpec, get_format
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import kvstore_spec, one_line, open_kvstore, open_with
from beam_inference.volumes.opening import as_volume
from beam_inference.volumes.volume import Volume

LOSSY = ("jpeg",)
"""Encodings whose voxels do not read back as they were written."""


def default_bounds(format: str, roi: BoundingBox) -> BoundingBox:
    """The extent of a new output: the ROI, or from 0 to its stop in formats that have no offset.

    Raises:
        ConfigError: such an output would have to start at a negative voxel.
    """
    if get_format(format).has_offset:
        return roi
    if min(roi.start) < 0:
        raise ConfigError(
            f"output.format {format} cannot hold roi {roi}: such an array has no offset and starts "
            "at 0. Use format: precomputed, or an roi that starts at 0 or later."
        )
    return BoundingBox((0, 0, 0), roi.stop)


def open_output(spec: OutputSpec, *, keep_blank: bool = True) -> Volume | None:
    """Open the existing output for writing.

    Args:
        spec: what the output is to be.
        keep_blank: whether blocks of zeros are written like any other. If not, blocks of zeros that
            are written are absent, and those that were there before are deleted.

    Returns:
        The output; None if nothing is there.

    Raises:
        VolumeError: something else is there, or a volume that differs from ``spec``.
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
    _check_same(spec, volume)
    return volume


def _check_same(spec: OutputSpec, volume: Volume) -> None:
    has_encodings = bool(get_format(spec.format).encodings)
    is_sharded = volume.block_shape != volume.read_shape
    existing = {
        "encoding": volume.encoding if has_encodings else None,
        "dtype": volume.dtype.name,
        "channels": volume.channels,
        "block_shape": list(volume.read_shape),
        "shard_shape": list(volume.block_shape) if is_sharded else None,
        "voxel_size_nm": [float(f"{size:.6g}") for size in volume.voxel_size_nm or ()],
    }
    expected = {
        "encoding": spec.encoding if has_encodings else None,
        "dtype": spec.dtype,
        "channels": spec.channels,
        "block_shape": list(spec.block_shape),
        "shard_shape": _expected_shard(spec, volume),
        "voxel_size_nm": [float(f"{size:.6g}") for size in spec.voxel_size_nm],
    }
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
    return volume


def check_output(spec: OutputSpec) -> None:
    """Refuse what cannot be created, before anything is.

    Raises:
        AlignmentError: a precomputed volume cannot have such shards.
    """
    get_format(spec.format).metadata(spec)


def _write_json(spec: OutputSpec, key: str, value: Json) -> None:
    try:
        open_kvstore(spec.url, spec.storage).write(key, json.dumps(value)).result()
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot create the output {spec.url}: {one_line(error)}") from None


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
