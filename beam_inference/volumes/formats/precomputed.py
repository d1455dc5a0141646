"""The format ``precomputed``: Neuroglancer's own, of one or more scales.

Specification: "Neuroglancer Precomputed volume format".
"""

from __future__ import annotations

from beam_inference.config.fields import LABEL_DTYPES, Json
from beam_inference.config.formats import Format, OutputSpec
from beam_inference.volumes.sharding import precomputed_sharding

_JPEG_QUALITY = 95
_LABEL_BLOCK = (8, 8, 8)


def _metadata(spec: OutputSpec) -> Json:
    """Metadata of a new volume of one scale.

    Raises:
        AlignmentError: a precomputed volume cannot have such shards.
    """
    kind = "segmentation" if spec.labels else "image"
    return {
        "multiscale_metadata": {
            "type": kind,
            "data_type": spec.dtype,
            "num_channels": spec.channels,
        },
        "scale_metadata": _scale(spec),
    }


def _scale(spec: OutputSpec) -> Json:
    scale: Json = {
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


PRECOMPUTED = Format(
    name="precomputed",
    driver="neuroglancer_precomputed",
    metadata=_metadata,
    markers=("info",),
    is_multiscale=True,
    has_offset=True,
    has_shards=True,
    clips_shards=True,
    encodings={
        "jpeg": ("uint8",),
        "png": ("uint8",),
        "compressed_segmentation": LABEL_DTYPES,
    },
    unread_dtypes=("int8", "int16"),
    viewer="precomputed",
)
