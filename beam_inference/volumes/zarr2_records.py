"""Bounds on the records that a zarr v2 array may say it holds.

TensorStore (0.1.86) makes an array of one record when it opens such an array. What does not fit
into memory ends the process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import tensorstore as ts

from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.volumes.kvstores import KvStore, open_with, read_key

_MOST_RECORD_BYTES = 2**20
_DRIVERS = ("zarr", "zarr2", "auto")


def check_records(spec: Any, name: str, storage: Storage) -> None:
    """Refuse an array whose values are records larger than any voxel.

    Args:
        spec: what TensorStore is to open, perhaps with other arrays inside.
        name: what it is called in messages.
        storage: how object stores are reached.

    Raises:
        VolumeError: it is such an array, or cannot be read.
        ValueError, OSError: as TensorStore, which cannot open its key-value store.
    """
    for array in _arrays(spec):
        store: KvStore = open_with(partial(_open_kvstore, array["kvstore"]), storage)
        if store.path and not store.path.endswith("/"):
            store += "/"
        key = array.get("metadata_key", ".zarray")
        text = read_key(store, key, name)
        size = 0 if text is None else _record_bytes(text)
        if size > _MOST_RECORD_BYTES:
            raise VolumeError(
                f"{name} says in {key} that each of its values is a record of {size} bytes: it is "
                "damaged, or no volume of numbers"
            )


def _open_kvstore(spec: Any, context: ts.Context) -> ts.Future[KvStore]:
    return ts.KvStore.open(spec, context=context)


def _arrays(spec: Any) -> Iterator[dict[str, Any]]:
    """The specs of zarr v2 arrays in a spec, also inside of stacks and the like."""
    if isinstance(spec, dict):
        if spec.get("driver") in _DRIVERS and "kvstore" in spec:
            yield spec
        for value in spec.values():
            yield from _arrays(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from _arrays(value)


def _record_bytes(text: bytes) -> int:
    """Bytes of a record by an array's metadata; 0 where TensorStore will find them damaged."""
    try:
        return _bytes_of(parse_json(text)["dtype"])
    except (ValueError, TypeError, KeyError, IndexError):
        return 0


def _bytes_of(dtype: Any) -> int:
    """Bytes of a value of a dtype, as NumPy describes dtypes in JSON."""
    if isinstance(dtype, str):
        digits = re.search(r"\d{1,18}$", dtype)
        return int(digits[0]) if digits else 1
    return sum(_bytes_of(field[1]) * math.prod(field[2] if field[2:] else ()) for field in dtype)
