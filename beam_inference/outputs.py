"""Output volumes: what a new one is to be, creating it, and whether an existing one can be continued."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from beam_inference.bounding_box import BoundingBox, Zyx
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.storage import Storage
from beam_inference.stores import LOCAL, kvstore_spec, one_line, open_kvstore, opened
from beam_inference.volumes import Volume, VoxelSizeNm, as_volume, detect_driver

_DRIVERS = {"precomputed": "neuroglancer_precomputed", "zarr3": "zarr3", "zarr2": "zarr"}


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What an output volume is.

    Attributes:
        url: where it lies.
        format: "precomputed", "zarr3" or "zarr2".
        dtype: name of the stored dtype.
        channels: number of channels; all channels of a voxel are in one block.
        bounds: its extent, ZYX; zarr arrays, which have no offset, start at 0.
        block_shape: ZYX.
        voxel_size_nm: ZYX.
        storage: how object stores are reached.
    """

    url: str
    format: str
    dtype: str
    channels: int
    bounds: BoundingBox
    block_shape: Zyx
    voxel_size_nm: VoxelSizeNm
    storage: Storage = LOCAL


def default_bounds(format: str, roi: BoundingBox) -> BoundingBox:
    """The extent of a new output: the ROI; for zarr, which has no offset, from 0 to the ROI's stop.

    Raises:
        ConfigError: a zarr output would have to start at a negative voxel.
    """
    if format == "precomputed":
        return roi
    if min(roi.start) < 0:
        raise ConfigError(
            f"output.format {format} cannot hold roi {roi}: a zarr array has no offset and starts at 0. "
            "Use format: precomputed, or an roi that starts at 0 or later."
        )
    return BoundingBox((0, 0, 0), roi.stop)


def open_output(spec: OutputSpec) -> Volume | None:
    """The existing output, opened for writing; None if nothing is there.

    Raises:
        VolumeError: something else is there, or a volume that differs from ``spec``.
    """
    driver = detect_driver(spec.url, spec.storage)
    if driver is None:
        return None
    if driver != _DRIVERS[spec.format]:
        raise VolumeError(
            f"the output {spec.url} exists as {driver}, the job says format: {spec.format}. "
            "Choose another output.path, or remove what is there."
        )
    volume = _open(spec, create=False)
    found = {
        "encoding": _encoding(volume),
        "dtype": volume.dtype.name,
        "channels": volume.channels,
        "block_shape": list(volume.block_shape),
        "voxel_size_nm": [float(f"{size:.6g}") for size in volume.voxel_size_nm or ()],
    }
    expected = {
        "encoding": "raw" if spec.format == "precomputed" else None,
        "dtype": spec.dtype,
        "channels": spec.channels,
        "block_shape": list(spec.block_shape),
        "voxel_size_nm": [float(f"{size:.6g}") for size in spec.voxel_size_nm],
    }
    differing = [f"{key} is {found[key]}, the job says {expected[key]}" for key in found if found[key] != expected[key]]
    if differing:
        raise VolumeError(
            f"the output {spec.url} exists and differs from the job: {'; '.join(differing)}. "
            "Choose another output.path, or change the job to agree with it."
        )
    return volume


def create_output(spec: OutputSpec) -> Volume:
    """Create the output's metadata, with no blocks yet. Racing launches create the same one.

    Raises:
        VolumeError: it cannot be created there.
    """
    if spec.format == "zarr2":
        # Before the array itself: what is killed in between has made no volume yet.
        attributes = {"_ARRAY_DIMENSIONS": list("czyx"), "dimension_units": _units(spec.voxel_size_nm)}
        try:
            open_kvstore(spec.url, spec.storage).write(".zattrs", json.dumps(attributes)).result()
        except (ValueError, OSError) as error:
            raise VolumeError(f"cannot create the output {spec.url}: {one_line(error)}") from None
    return _open(spec, create=True)


def _open(spec: OutputSpec, *, create: bool) -> Volume:
    # Zeros are written like any other value: a block is absent only if no chunk was written there.
    store = {
        "driver": _DRIVERS[spec.format],
        "kvstore": kvstore_spec(spec.url, spec.storage),
        "store_data_equal_to_fill_value": True,
        **(_metadata(spec) if create else {}),
    }
    try:
        volume = opened(
            lambda context: ts.open(store, read=True, write=True, open=True, create=create, context=context),
            spec.storage,
        )
        return as_volume(spec.url, volume)
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot {'create' if create else 'open'} the output {spec.url}: {one_line(error)}") from None


def _encoding(volume: Volume) -> str | None:
    """Of a precomputed volume; a lossy one would not read back as it was written."""
    codec = volume.store.codec.to_json()
    return str(codec["encoding"]) if codec.get("driver") == "neuroglancer_precomputed" else None


def _units(voxel_size_nm: VoxelSizeNm) -> list[str | None]:
    return [None, *(f"{size:.9g} nm" for size in voxel_size_nm)]


def _metadata(spec: OutputSpec) -> dict[str, Any]:
    """The driver's metadata of a new volume."""
    shape, block = spec.bounds.shape, spec.block_shape
    if spec.format == "precomputed":
        return {
            "multiscale_metadata": {"type": "image", "data_type": spec.dtype, "num_channels": spec.channels},
            "scale_metadata": {
                "size": list(shape[::-1]),
                "voxel_offset": list(spec.bounds.start[::-1]),
                "resolution": list(spec.voxel_size_nm[::-1]),
                "chunk_size": list(block[::-1]),
                "encoding": "raw",
            },
        }
    extent = [spec.channels, *spec.bounds.stop]
    if spec.format == "zarr3":
        return {
            "metadata": {
                "shape": extent,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [spec.channels, *block]}},
                "data_type": spec.dtype,
                "dimension_names": list("czyx"),
                "codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}],
            },
            "schema": {"dimension_units": _units(spec.voxel_size_nm)},
        }
    return {
        "metadata": {
            "shape": extent,
            "chunks": [spec.channels, *block],
            "dtype": np.dtype(spec.dtype).str,
            "dimension_separator": "/",
            "fill_value": 0,
        },
    }
