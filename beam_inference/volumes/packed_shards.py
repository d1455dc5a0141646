"""Writes shards of precomputed volumes whose blocks are packed by gzip.

TensorStore packs the blocks of a shard at zlib's highest level and knows no other. That takes
several times as long as the levels chosen here, for a few bytes in a hundred. So blocks are packed
here, and TensorStore puts them into a shard.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping

import numpy as np
import tensorstore as ts

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.fields import Json
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.kvstores import KvStore
from beam_inference.volumes.sharding import numbered_blocks, shards_in

_FLOAT_LEVEL = 1
"""More does not make floating-point numbers smaller."""

_LEVEL = 4

_DRIVER = "neuroglancer_uint64_sharded"


def packs_shards(scale: Json | None) -> bool:
    """Whether shards of a scale are written here: arrays as they are, in gzip.

    Args:
        scale: the scale's metadata; None for a volume of another format.
    """
    sharding = (scale or {}).get("sharding")
    if scale is None or not sharding:
        return False
    is_packed = sharding.get("data_encoding") == "gzip" and sharding["hash"] == "identity"
    return bool(is_packed and scale["encoding"] == "raw")


def write_shards(
    store: KvStore,
    scale: Json,
    box: BoundingBox,
    array: AnyArray,
    *,
    keep_blank: bool,
    timeout: float,
) -> None:
    """Write a box of whole shards; each is replaced at once.

    Args:
        store: of the volume.
        scale: the scale's metadata, for which :func:`packs_shards` holds.
        box: what is written.
        array: the values of all of it (C, Z, Y, X), in the dtype of the volume.
        keep_blank: whether blocks of zeros are stored; if not, they are absent afterwards.
        timeout: seconds after which a write is given up.

    Raises:
        ValueError, OSError, TimeoutError: those of TensorStore.
    """
    for key, part in shards_in(scale, box):
        blocks = dict(_pack_blocks(scale, part, box, array, keep_blank=keep_blank))
        content = _make_shard(blocks, scale["sharding"]) if blocks else None
        store.write(key, content).result(timeout=timeout)


def _pack_blocks(
    scale: Json, part: BoundingBox, box: BoundingBox, array: AnyArray, *, keep_blank: bool
) -> Iterator[tuple[int, bytes]]:
    """Pack the blocks of a shard, each with its number; Neuroglancer's arrays have x fastest."""
    stored: AnyDtype = array.dtype.newbyteorder("<")
    level = _FLOAT_LEVEL if stored.kind == "f" else _LEVEL
    for number, block in numbered_blocks(scale, part):
        values = array[(slice(None), *block.slices_in(box))]
        if keep_blank or np.any(values):
            yield number, gzip.compress(np.asarray(values, stored).tobytes(), level, mtime=0)


def _make_shard(blocks: Mapping[int, bytes], sharding: Json) -> bytes:
    """Put packed blocks of one shard into a file."""
    memory = ts.Context()
    base = ts.KvStore.open("memory://", context=memory).result()
    # "raw", because the blocks are packed already
    packed = {
        "driver": _DRIVER,
        "base": "memory://",
        "metadata": {**sharding, "data_encoding": "raw"},
    }
    shards = ts.KvStore.open(packed, context=memory).result()
    with ts.Transaction() as transaction:
        for number, content in blocks.items():
            shards.with_transaction(transaction).write(number.to_bytes(8, "big"), content)
    (name,) = base.list().result()
    return base.read(name).result().value
