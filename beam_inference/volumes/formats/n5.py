"""The format ``n5``: one N5 array."""

from __future__ import annotations

from beam_inference.config.fields import Json
from beam_inference.config.formats import Format, OutputSpec
from beam_inference.volumes.provenance import in_attributes


def _metadata(spec: OutputSpec) -> Json:
    """Attributes of a new array, whose axes are listed x first."""
    return {
        "metadata": {
            "dimensions": [*spec.bounds.shape[::-1], spec.channels],
            "blockSize": [*spec.block_shape[::-1], spec.channels],
            "dataType": spec.dtype,
            "compression": {"type": "zstd", "level": 1},
            "axes": list("xyzc"),
            "units": ["nm", "nm", "nm", ""],
            "resolution": [*spec.voxel_size_nm[::-1], 1.0],
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
