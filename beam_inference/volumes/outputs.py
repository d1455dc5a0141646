"""Output volumes: what a new one is to be, creating it, and whether an existing one can be continued."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, ceil_div
from beam_inference.volumes import ome_zarr
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import LOCAL, kvstore_spec, one_line, open_kvstore, opened
from beam_inference.volumes.opening import as_volume
from beam_inference.volumes.sharding import precomputed_sharding
from beam_inference.volumes.volume import Volume

_DRIVERS = {
    "precomputed": "neuroglancer_precomputed",
    "zarr3": "zarr3",
    "zarr2": "zarr",
    "n5": "n5",
    "ome_zarr": "zarr3",
    "ome_zarr_0.4": "zarr",
}
LOSSY = ("jpeg",)
"""Encodings whose voxels do not read back as they were written."""
_JPEG_QUALITY = 95
_LABEL_BLOCK = (8, 8, 8)
FINEST = "0"
"""Path of the finest array in an OME-Zarr group."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What an output volume is.

    Attributes:
        url: where it lies.
        format: "precomputed", "zarr3", "zarr2", "n5", or a group of arrays: "ome_zarr" (0.5, zarr
            v3), "ome_zarr_0.4".
        dtype: name of the stored dtype.
        channels: number of channels; all channels of a voxel are in one block.
        bounds: its extent, ZYX; only precomputed volumes have an offset, others start at 0.
        block_shape: ZYX, what is read at once.
        voxel_size_nm: ZYX.
        storage: how object stores are reached.
        encoding: of precomputed blocks: "raw", "jpeg", "png", or "compressed_segmentation" for
            uint32 and uint64.
        shard_shape: ZYX, a file of many blocks, for precomputed, zarr3 and ome_zarr; None for a
            file a block.
        labels: whether values are names of objects, which readers colour, and never average.
    """

    url: str
    format: str
    dtype: str
    channels: int
    bounds: BoundingBox
    block_shape: Zyx
    voxel_size_nm: VoxelSizeNm
    storage: Storage = LOCAL
    encoding: str = "raw"
    shard_shape: Zyx | None = None
    labels: bool = False

    @property
    def write_shape(self) -> Zyx:
        """The unit of writing, ZYX: a shard where there are any, else a block."""
        return self.shard_shape or self.block_shape


def default_bounds(format: str, roi: BoundingBox) -> BoundingBox:
    """The extent of a new output: the ROI; for all but precomputed, which have no offset, from 0 to the ROI's stop.

    Raises:
        ConfigError: such an output would have to start at a negative voxel.
    """
    if format == "precomputed":
        return roi
    if min(roi.start) < 0:
        raise ConfigError(
            f"output.format {format} cannot hold roi {roi}: such an array has no offset and starts "
            "at 0. Use format: precomputed, or an roi that starts at 0 or later."
        )
    return BoundingBox((0, 0, 0), roi.stop)


def open_output(spec: OutputSpec, *, keep_blank: bool = True) -> Volume | None:
    """The existing output, opened for writing; None if nothing is there.

    Without ``keep_blank`` blocks of zeros that are written through it are absent, and those of
    before are deleted.

    Raises:
        VolumeError: something else is there, or a volume that differs from ``spec``.
    """
    found = volume_at(spec.url, spec.storage)
    if found is None:
        return None
    if found.driver != (
        spec.format if spec.format.startswith("ome_zarr") else _DRIVERS[spec.format]
    ):
        raise VolumeError(
            f"the output {spec.url} exists as {found.driver}, the job says format: {spec.format}. "
            "Choose another output.path, or remove what is there."
        )
    volume = _open(spec, create=False, keep_blank=keep_blank)
    there = {
        "encoding": _encoding(volume),
        "dtype": volume.dtype.name,
        "channels": volume.channels,
        "block_shape": list(volume.read_shape),
        "shard_shape": (
            list(volume.block_shape) if volume.block_shape != volume.read_shape else None
        ),
        "voxel_size_nm": [float(f"{size:.6g}") for size in volume.voxel_size_nm or ()],
    }
    expected = {
        "encoding": spec.encoding if spec.format == "precomputed" else None,
        "dtype": spec.dtype,
        "channels": spec.channels,
        "block_shape": list(spec.block_shape),
        "shard_shape": _clipped_shard(spec, volume),
        "voxel_size_nm": [float(f"{size:.6g}") for size in spec.voxel_size_nm],
    }
    differing = [
        f"{key} is {there[key]}, the job says {expected[key]}"
        for key in there
        if there[key] != expected[key]
    ]
    if differing:
        raise VolumeError(
            f"the output {spec.url} exists and differs from the job: {'; '.join(differing)}. "
            "Choose another output.path, or change the job to agree with it."
        )
    return volume


def _clipped_shard(spec: OutputSpec, volume: Volume) -> list[int] | None:
    """What a volume says of its shards: those of precomputed volumes end with the volume's last block."""
    shape = list(spec.write_shape)
    if spec.format == "precomputed":
        extents = zip(shape, volume.bounds.shape, spec.block_shape, strict=True)
        shape = [min(shard, ceil_div(extent, block) * block) for shard, extent, block in extents]
    return shape if shape != list(spec.block_shape) else None


def create_output(spec: OutputSpec) -> Volume:
    """Create the output's metadata, with no blocks yet. Racing launches create the same one.

    Raises:
        VolumeError: it cannot be created there.
        AlignmentError: a precomputed volume cannot have such shards.
    """
    # before the array itself: what is killed in between has made no volume yet
    for key, value in _files(spec).items():
        _write_json(spec, key, value)
    volume = _open(spec, create=True)
    # after it: a group never names an array that is not there
    for key, value in _group_files(spec).items():
        _write_json(spec, key, value)
    return volume


def check_output(spec: OutputSpec) -> None:
    """Refuse what cannot be created, before anything is.

    Raises:
        AlignmentError: a precomputed volume cannot have such shards.
    """
    _metadata(spec)


def _write_json(spec: OutputSpec, key: str, value: dict[str, Any]) -> None:
    try:
        open_kvstore(spec.url, spec.storage).write(key, json.dumps(value)).result()
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot create the output {spec.url}: {one_line(error)}") from None


def _open(spec: OutputSpec, *, create: bool, keep_blank: bool = True) -> Volume:
    # Zeros are written like any other value: a block is absent only if no chunk was written there.
    url = f"{spec.url.rstrip('/')}/{FINEST}" if spec.format.startswith("ome_zarr") else spec.url
    store = {
        "driver": _DRIVERS[spec.format],
        "kvstore": kvstore_spec(url, spec.storage),
        "store_data_equal_to_fill_value": keep_blank,
        **(_metadata(spec) if create else {}),
    }
    try:
        volume = opened(
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


def _encoding(volume: Volume) -> str | None:
    """Of a precomputed volume."""
    codec = volume.store.codec.to_json()
    return str(codec["encoding"]) if codec.get("driver") == "neuroglancer_precomputed" else None


def _units(voxel_size_nm: VoxelSizeNm) -> list[str | None]:
    return [None, *(f"{size:.9g} nm" for size in voxel_size_nm)]


def _files(spec: OutputSpec) -> dict[str, dict[str, Any]]:
    """Files beside the driver's own metadata: zarr v2 has no place for names and units but its attributes."""
    names = {"_ARRAY_DIMENSIONS": list("czyx"), "dimension_units": _units(spec.voxel_size_nm)}
    if spec.format == "zarr2":
        return {".zattrs": names}
    return {f"{FINEST}/.zattrs": names} if spec.format == "ome_zarr_0.4" else {}


def _group_files(spec: OutputSpec) -> dict[str, dict[str, Any]]:
    """Of an OME-Zarr group: that it is one, and what is in it."""
    name = spec.url.rstrip("/").rpartition("/")[2]
    scales = [(FINEST, spec.voxel_size_nm, (0.0, 0.0, 0.0))]
    if spec.format == "ome_zarr":
        attributes = ome_zarr.attributes("0.5", name, scales, labels=spec.labels)
        return {"zarr.json": {"zarr_format": 3, "node_type": "group", "attributes": attributes}}
    if spec.format == "ome_zarr_0.4":
        attributes = ome_zarr.attributes("0.4", name, scales, labels=spec.labels)
        return {".zattrs": attributes, ".zgroup": {"zarr_format": 2}}
    return {}


def _metadata(spec: OutputSpec) -> dict[str, Any]:
    """The driver's metadata of a new volume."""
    block = spec.block_shape
    driver = _DRIVERS[spec.format]
    if driver == "neuroglancer_precomputed":
        return {"multiscale_metadata": _multiscale(spec), "scale_metadata": _scale(spec)}
    extent = [spec.channels, *spec.bounds.stop]
    if driver == "zarr3":
        codecs: list[dict[str, Any]] = [
            {"name": "bytes"},
            {"name": "zstd", "configuration": {"level": 1}},
        ]
        if spec.shard_shape:
            inner = {"chunk_shape": [spec.channels, *block], "codecs": codecs}
            codecs = [{"name": "sharding_indexed", "configuration": inner}]
        grid = {
            "name": "regular",
            "configuration": {"chunk_shape": [spec.channels, *spec.write_shape]},
        }
        return {
            "metadata": {
                "shape": extent,
                "chunk_grid": grid,
                "data_type": spec.dtype,
                "dimension_names": list("czyx"),
                "codecs": codecs,
            },
            "schema": {"dimension_units": _units(spec.voxel_size_nm)},
        }
    if driver == "n5":
        return {
            "metadata": {
                "dimensions": extent[::-1],
                "blockSize": [*block[::-1], spec.channels],
                "dataType": spec.dtype,
                "compression": {"type": "zstd", "level": 1},
                "axes": list("xyzc"),
                "units": ["nm", "nm", "nm", ""],
                "resolution": [*spec.voxel_size_nm[::-1], 1.0],
            },
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


def _multiscale(spec: OutputSpec) -> dict[str, Any]:
    kind = "segmentation" if spec.labels else "image"
    return {"type": kind, "data_type": spec.dtype, "num_channels": spec.channels}


def _scale(spec: OutputSpec) -> dict[str, Any]:
    """The scale of a precomputed volume."""
    scale = {
        "size": list(spec.bounds.shape[::-1]),
        "voxel_offset": list(spec.bounds.start[::-1]),
        "resolution": list(spec.voxel_size_nm[::-1]),
        "chunk_size": list(spec.block_shape[::-1]),
        "encoding": spec.encoding,
    }
    if spec.encoding == "jpeg":
        scale["jpeg_quality"] = _JPEG_QUALITY
    if spec.encoding == "compressed_segmentation":
        scale["compressed_segmentation_block_size"] = list(_LABEL_BLOCK)
    if spec.shard_shape:
        scale["sharding"] = precomputed_sharding(
            spec.bounds.shape, spec.block_shape, spec.shard_shape
        )
    return scale
