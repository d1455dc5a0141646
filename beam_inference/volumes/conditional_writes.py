"""Writes that happen only if nobody else has written meanwhile, in every kind of store.

Object stores have such writes. On local files, TensorStore's own would need its locks, which a
killed process can turn into damage: the lock file ``NAME.__lock`` becomes the new content without
being cut to its length, so the tail of a longer one that was left behind by SIGKILL ends up in
NAME. So TensorStore writes without locks here (each file appears whole, by a rename), and these
functions take care of the few writes that are conditional.
"""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from beam_inference.config.fields import Json
from beam_inference.config.json_text import parse_json
from beam_inference.errors import VolumeError, WorkerFault
from beam_inference.volumes.file_locks import hold_lock
from beam_inference.volumes.kvstores import PATIENCE_SECONDS, KvStore, local_folder, retry_request

_NOTHING = slice(0, 0)
"""Bytes to read of a file where only its generation matters: a damaged one may be of any length."""


def create_key(store: KvStore, key: str, url: str, value: str, *, durable: bool = True) -> bool:
    """Write a key that is absent, whole and durably, or leave it as it is.

    Args:
        store: the store at ``url``.
        key: the key.
        url: URL of the store.
        value: its content.
        durable: whether it must outlive a loss of power; each file takes some milliseconds.

    Returns:
        Whether this call has created it.

    Raises:
        ValueError, OSError: as TensorStore and the file system do.
    """
    folder = local_folder(url)
    if folder is None:
        present = store.read(key).result(timeout=PATIENCE_SECONDS)
        return present.state != "value" and _write(store, key, value, present.stamp.generation)
    return _create_file(Path(folder) / key, value, durable=durable)


def replace_value(store: KvStore, key: str, url: str, value: str, generation: bytes) -> bool:
    """Write a key that was read before, unless it was written since.

    Args:
        store: the store at ``url``.
        key: the key.
        url: URL of the store.
        value: its new content.
        generation: generation of the content that was read.

    Returns:
        Whether it was written.

    Raises:
        ValueError, OSError: as TensorStore and the file system do.
    """
    folder = local_folder(url)
    if folder is None:
        return _write(store, key, value, generation)
    with hold_lock(Path(folder) / f"{key}.guard", PATIENCE_SECONDS):
        present = store.read(key, byte_range=_NOTHING).result(timeout=PATIENCE_SECONDS)
        if present.stamp.generation != generation:
            return False
        store.write(key, value).result(timeout=PATIENCE_SECONDS)
        return True


def delete_value(store: KvStore, key: str, url: str, generation: bytes) -> bool:
    """Delete a key that was read before, unless it was written since.

    Args:
        store: the store at ``url``.
        key: the key.
        url: URL of the store.
        generation: generation of the content that was read.

    Returns:
        Whether it was deleted.

    Raises:
        ValueError, OSError: as TensorStore and the file system do.
    """
    folder = local_folder(url)
    if folder is None:
        return _write(store, key, None, generation)
    with hold_lock(Path(folder) / f"{key}.guard", PATIENCE_SECONDS):
        present = store.read(key, byte_range=_NOTHING).result(timeout=PATIENCE_SECONDS)
        if present.stamp.generation != generation:
            return False
        (Path(folder) / key).unlink(missing_ok=True)
        return True


def _write(store: KvStore, key: str, value: str | None, generation: bytes) -> bool:
    stamp = store.write(key, value, if_equal=generation).result(timeout=PATIENCE_SECONDS)
    return bool(stamp.generation)  # empty if another was faster


def _create_file(path: Path, value: str, *, durable: bool) -> bool:
    """Create a file by a link, which fails if there is one, also on network file systems."""
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
    try:
        with draft.open("x") as file:
            file.write(value)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            return False
        if durable:
            sync_folder(path.parent)
        return True
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a local folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_CHANGES = 100
"""How often a change that others were faster than is tried again."""


def change_json(
    store: KvStore,
    key: str,
    url: str,
    change: Callable[[Json], Json],
    otherwise: Json | None = None,
) -> None:
    """Change the JSON object in a key, such that what others write meanwhile is not lost.

    Args:
        store: the store at ``url``.
        key: the object's key.
        url: for messages.
        change: returns the changed object; it may be called several times.
        otherwise: what is changed, and written, where the key is absent; None if it must be there.

    Raises:
        WorkerFault: it cannot be done, or others write to it all the time.
        VolumeError: the key is absent and must be there, or holds no JSON object.
    """
    for _ in range(_CHANGES):
        result = retry_request(
            "read", f"{url}/{key}", lambda: store.read(key).result(timeout=PATIENCE_SECONDS)
        )
        is_there = result.state == "value"
        before = _object_in(result.value) if is_there else None
        if before is None and (is_there or otherwise is None):
            raise VolumeError(
                f"{url}/{key} is gone, or holds no JSON object: the volume's metadata are damaged"
            )
        # a copy: it may be changed in place
        after = change(dict(otherwise or {}) if before is None else parse_json(result.value))
        if after == before:
            return
        text = json.dumps(after)
        generation = result.stamp.generation if is_there else None

        def write(text: str = text, generation: bytes | None = generation) -> bool:
            if generation is None:
                return create_key(store, key, url, text)
            return replace_value(store, key, url, text, generation)

        if retry_request("write", f"{url}/{key}", write):
            return
        time.sleep(random.uniform(0, 0.2))
    raise WorkerFault(
        f"cannot change {url}/{key}: others have changed it {_CHANGES} times meanwhile. Try again "
        "later."
    )


def _object_in(text: bytes) -> Json | None:
    """The JSON object that a text holds; None if it holds none."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
