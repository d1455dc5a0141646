"""Scales of precomputed volumes: their entries in the info file, and how a new one is opened.

TensorStore writes only scales that are listed, so each process that makes one gives it an info file
of its own, in memory, laid over the volume's store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry.zyx import Zyx
from beam_inference.pyramid.scale_geometry import PyramidScale
from beam_inference.volumes.detection import json_object
from beam_inference.volumes.kvstores import (
    kvstore_spec,
    one_line,
    open_kvstore,
    open_with,
)
from beam_inference.volumes.opening import as_volume
from beam_inference.volumes.volume import Volume

_KEPT = (
    "encoding",
    "chunk_sizes",
    "sharding",
    "compressed_segmentation_block_size",
    "jpeg_quality",
    "png_level",
)
"""Keys that a new scale has from the scale that it is made from."""
_KIND = ("@type", "type", "data_type", "num_channels")


def read_precomputed_codec(url: str, storage: Storage, base_number: int) -> PrecomputedCodec:
    """Read the info file of a volume, one of whose scales is the base."""
    info = json_object(open_kvstore(url, storage), "info", url)
    kind = {key: info[key] for key in _KIND if key in info}
    return PrecomputedCodec(
        json.dumps(kind | {"scales": [info["scales"][base_number]]}, sort_keys=True)
    )


@dataclass(frozen=True)
class PrecomputedCodec:
    """Entries of the info file; see :class:`~beam_inference.pyramid.multiscale.ScaleCodec`.

    Attributes:
        info: JSON text of the info file with one scale, the base.
    """

    info: str

    @property
    def metadata_file(self) -> str:
        """Key of the file that lists the scales."""
        return "info"

    @property
    def stale_files(self) -> Sequence[str]:
        """No file: nothing repeats the list."""
        return ()

    def description(self) -> Json:
        """The info file, as JSON values."""
        return {"info": json.loads(self.info)}

    def holds_labels(self, metadata: Json) -> bool:
        """Whether the info file's type is segmentation."""
        return bool(metadata.get("type") == "segmentation")

    def entries(self, metadata: Json) -> list[Json]:
        """Entries of the scales that are listed, finest first."""
        scales: list[Json] = metadata["scales"]
        return scales

    def with_entries(self, metadata: Json, entries: list[Json]) -> Json:
        """Info file that lists other entries."""
        return {**metadata, "scales": entries}

    def new_entry(self, scale: PyramidScale) -> Json:
        """Entry of a new scale, with the block shape, encoding and sharding of the base."""
        (base,) = json.loads(self.info)["scales"]
        sizes = [size * n for size, n in zip(base["resolution"], scale.total[::-1], strict=True)]
        resolution = [int(size) if float(size).is_integer() else size for size in sizes]
        return {
            **{key: base[key] for key in _KEPT if base.get(key) is not None},
            "chunk_sizes": base["chunk_sizes"][:1],
            "key": "_".join(f"{size:.9g}" for size in resolution),
            "resolution": resolution,
            "size": list(scale.bounds.shape[::-1]),
            "voxel_offset": list(scale.bounds.start[::-1]),
        }

    def folder(self, entry: Json) -> str:
        """Folder of a scale, relative to the volume."""
        return str(entry["key"])

    def voxel_volume(self, entry: Json) -> float:
        """Volume of a scale's voxels, in nm³."""
        x, y, z = entry["resolution"]
        return float(x * y * z)

    def is_same(self, entry: Json, other: Json) -> bool:
        """Whether two scales have voxels of one size."""
        return all(
            abs(a - b) < 1e-6 * max(a, b)
            for a, b in zip(entry["resolution"], other["resolution"], strict=True)
        )

    def block_shape(
        self,
        url: str,
        storage: Storage,
        scale: PyramidScale,
        base: Volume,  # noqa: ARG002
    ) -> Zyx:
        """Write unit of the storage in a new scale, ZYX; creates nothing.

        A shard holds as many blocks as its bits say, but they may lie differently in a small scale.
        """
        return self.open_scale(url, storage, scale).block_shape

    def open_scale(self, url: str, storage: Storage, scale: PyramidScale) -> Volume:
        """Open a new scale, over a list of scales in memory.

        Raises:
            VolumeError: TensorStore cannot write such a scale.
        """
        entry = self.new_entry(scale)
        info = json.dumps({**json.loads(self.info), "scales": [entry]})
        memory = f"memory://beam_inference/{hashlib.sha256(info.encode()).hexdigest()}/"
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {
                "driver": "kvstack",
                "layers": [
                    {"base": kvstore_spec(url, storage)},
                    {"exact": "info", "base": f"{memory}info"},
                ],
            },
            "scale_metadata": {"key": entry["key"]},
            # as in outputs: a block is absent only if no chunk was written
            "store_data_equal_to_fill_value": True,
        }
        try:
            own = open_with(lambda context: ts.KvStore.open(memory, context=context), storage)
            own.write("info", info).result()
            store = open_with(lambda context: ts.open(spec, open=True, context=context), storage)
        except (ValueError, OSError) as error:
            raise VolumeError(
                f"cannot write the scale {entry['key']} of {url}: {one_line(error)}"
            ) from None
        return as_volume(url, store)
