"""The format ``n5``: one N5 array."""

from __future__ import annotations

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.config.formats import Format, OutputSpec
from beam_inference.volumes.provenance import in_attributes

_ZSTD: Json = {"type": "zstd", "level": 1}
_SHUFFLED_ZSTD: Json = {"type": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1}


def _metadata(spec: OutputSpec) -> Json:
    """Attributes of a new array, whose axes are listed x first."""
    count = len(spec.axes)
    is_float = np.dtype(spec.dtype).kind == "f"
    return {
        "metadata": {
            "dimensions": spec.along_axes(spec.channels, spec.bounds.shape)[::-1],
            "blockSize": spec.along_axes(spec.channels, spec.block_shape)[::-1],
            "dataType": spec.dtype,
            "compression": _SHUFFLED_ZSTD if is_float else _ZSTD,
            "axes": list(spec.axes[::-1]),
            "units": ["nm", "nm", "nm", ""][:count],
            "resolution": [*spec.voxel_size_nm[::-1], 1.0][:count],
        },
    }


N5 = Format(
    name="n5",
    driver="n5",
    metadata=_metadata,
    markers=("attributes.json",),
    viewer="n5",
    provenance=in_attributes("attributes.json"),
)
