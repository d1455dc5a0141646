"""A format: a Zarr array whose blocks are compressed by Blosc, which shuffles bytes first.

TensorStore writes it, so the format is one value. Volumes of it are read as what they are, Zarr
arrays of version 3.
"""

from __future__ import annotations

from beam_inference.config.fields import Json
from beam_inference.config.formats import Format, OutputSpec
from beam_inference.volumes.formats.zarr import zarr3_metadata

_BLOSC: Json = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle"},
}


def _metadata(spec: OutputSpec) -> Json:
    """What TensorStore creates the array from, beside driver and place."""
    return zarr3_metadata(spec, compressor=_BLOSC)


ZARR3_BLOSC = Format(
    name="zarr3_blosc",
    driver="zarr3",
    metadata=_metadata,
    markers=("zarr.json",),
    has_shards=True,
    viewer="zarr3",
)
