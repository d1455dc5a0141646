"""The formats ``zarr2`` and ``zarr3``: one Zarr array."""

from __future__ import annotations

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.config.formats import Format, OutputSpec
from beam_inference.volumes.provenance import in_attributes

# Measured by benchmarks/storage.py: shuffled floating-point numbers take a sixth less.
_ZSTD: Json = {"name": "zstd", "configuration": {"level": 1}}
_SHUFFLED_ZSTD: Json = {
    "name": "blosc",
    "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "shuffle"},
}
_SHUFFLED_ZSTD_2: Json = {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1}
"""The same, as version 2 names it."""


def zarr3_metadata(spec: OutputSpec, compressor: Json | None = None) -> Json:
    """Metadata of a new array of Zarr version 3.

    Args:
        spec: what it is to be.
        compressor: codec of blocks, as Zarr's metadata name it; None for the one that its dtype is
            best stored by.
    """
    is_float = np.dtype(spec.dtype).kind == "f"
    codecs: list[Json] = [
        {"name": "bytes"},
        compressor or (_SHUFFLED_ZSTD if is_float else _ZSTD),
    ]
    if spec.shard_shape:
        inner = {
            "chunk_shape": spec.along_axes(spec.channels, spec.block_shape),
            "codecs": codecs,
        }
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    grid = {
        "name": "regular",
        "configuration": {"chunk_shape": spec.along_axes(spec.channels, spec.write_shape)},
    }
    return {
        "metadata": {
            "shape": spec.along_axes(spec.channels, spec.bounds.shape),
            "chunk_grid": grid,
            "data_type": spec.dtype,
            "dimension_names": list(spec.axes),
            "codecs": codecs,
        },
        "schema": {"dimension_units": _units(spec)},
    }


def zarr2_metadata(spec: OutputSpec) -> Json:
    """Metadata of a new array of Zarr version 2."""
    return {
        "metadata": {
            "shape": spec.along_axes(spec.channels, spec.bounds.shape),
            "chunks": spec.along_axes(spec.channels, spec.block_shape),
            "dtype": np.dtype(spec.dtype).str,
            "dimension_separator": "/",
            "compressor": _SHUFFLED_ZSTD_2,
            "fill_value": 0,
        },
    }


def zarr2_attributes(spec: OutputSpec) -> Json:
    """Attributes of an array of Zarr version 2, which has no other place for names and units."""
    return {"_ARRAY_DIMENSIONS": list(spec.axes), "dimension_units": _units(spec)}


def _units(spec: OutputSpec) -> list[str | None]:
    units = [None, *(f"{size:.9g} nm" for size in spec.voxel_size_nm)]
    return units[-len(spec.axes) :]


ZARR2 = Format(
    name="zarr2",
    driver="zarr",
    metadata=zarr2_metadata,
    markers=(".zarray",),
    array_files=lambda spec: {".zattrs": zarr2_attributes(spec)},
    viewer="zarr2",
    provenance=in_attributes(".zattrs"),
)

ZARR3 = Format(
    name="zarr3",
    driver="zarr3",
    metadata=zarr3_metadata,
    markers=("zarr.json",),
    suffixes=(".zarr",),
    has_shards=True,
    viewer="zarr3",
    provenance=in_attributes("zarr.json", "attributes"),
)
