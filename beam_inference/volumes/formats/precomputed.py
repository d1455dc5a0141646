"""The format ``precomputed``: Neuroglancer's own, of one or more scales.

Specification: "Neuroglancer Precomputed volume format".
"""

from __future__ import annotations

from collections.abc import Sequence

from beam_inference.config.fields import LABEL_DTYPES, Json
from beam_inference.config.formats import Format, OutputSpec, ProvenancePlace
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.provenance import KEY, list_of_objects
from beam_inference.volumes.sharding import precomputed_sharding, shard_shapes

_JPEG_QUALITY = 95
_LABEL_BLOCK = (8, 8, 8)
_USUAL_BITS = 3
"""Shards hold at most two to this power blocks where none are asked for; see performance.md."""
_BY = "beam-inference"
"""Who made a step of processing; others write an address of mail there."""


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


def _usual_shards(shape: Zyx, block_shape: Zyx) -> list[Zyx]:
    """Shards of 1, 2, 4 or 8 blocks: few enough to be written at once, with few seams to pass on.

    A shard of one block is packed by gzip, too, which a block without a shard is not.
    """
    return shard_shapes(shape, block_shape)[: _USUAL_BITS + 1]


def _entries(content: Json) -> list[Json]:
    """Our entries in a file ``provenance``, each in the method of a step of processing."""
    methods = [step.get("method") for step in _steps(content)]
    return [
        entry
        for method in methods
        if isinstance(method, dict)
        for entry in list_of_objects([method[KEY]] if KEY in method else [], KEY)
    ]


def _with_entries(content: Json, entries: list[Json]) -> Json:
    """The file with other entries of ours, in the form that cloud-volume reads."""
    others = [step for step in _steps(content) if not _entries({"processing": [step]})]
    ours = [{"method": {"task": each.get("made_by"), KEY: each}, "by": _BY} for each in entries]
    sources = content.get("sources") or []
    if isinstance(sources, list):
        before = _sources(_entries(content))
        kept = [each for each in sources if each not in before]
        sources = [*kept, *(each for each in _sources(entries) if each not in kept)]
    return {
        "description": "",
        "owners": [],
        **content,
        "sources": sources,
        "processing": [*others, *ours],
    }


def _sources(entries: Sequence[Json]) -> list[str]:
    """The volumes that entries say theirs was made of, each once."""
    listed = [each.get("sources") for each in entries]
    sources = [source for each in listed if isinstance(each, list) for source in each]
    return list(dict.fromkeys(each for each in sources if isinstance(each, str)))


def _steps(content: Json) -> list[Json]:
    return list_of_objects(content.get("processing") or [], "processing")


PRECOMPUTED = Format(
    name="precomputed",
    driver="neuroglancer_precomputed",
    metadata=_metadata,
    markers=("info",),
    is_multiscale=True,
    has_offset=True,
    has_shards=True,
    clips_shards=True,
    usual_shards=_usual_shards,
    encodings={
        "jpeg": ("uint8",),
        "png": ("uint8",),
        "compressed_segmentation": LABEL_DTYPES,
    },
    label_encoding="compressed_segmentation",
    unread_dtypes=("int8", "int16"),
    viewer="precomputed",
    provenance=ProvenancePlace("provenance", _entries, _with_entries),
)
