"""The volumes in a group that is none itself: wells of a plate, labels, setups of BigDataViewer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from beam_inference.config.fields import Json
from beam_inference.config.json_text import parse_json
from beam_inference.errors import BeamInferenceError
from beam_inference.volumes.kvstores import KvStore, local_folder, read_key

_NAMES_IN_MESSAGE = 10
_DEEPEST = 5
_MOST_ENTRIES = 5000
"""Files and folders that are looked at for volumes."""
_MOST_WELLS = 32
"""Wells of a plate that are looked at: each costs requests, and a message names few images."""
_MOST_BYTES = 2**24
"""Bytes of metadata that are read to find volumes."""

_MOST_CHARACTERS = 200


def list_volumes(store: KvStore, url: str, attributes: Json) -> str:
    """Words that name the volumes in a group; empty where none is found.

    Args:
        store: where the group lies.
        url: its URL.
        attributes: the group's attributes.
    """
    names = list(islice(_volumes(store, url, attributes), _NAMES_IN_MESSAGE + 1))
    if not names:
        return ""
    more = ", …" if len(names) > _NAMES_IN_MESSAGE else ""
    return f"; it holds the volumes {', '.join(names[:_NAMES_IN_MESSAGE])}{more}"


def _volumes(store: KvStore, url: str, attributes: Json) -> Iterator[str]:
    ome = attributes.get("ome", attributes)
    if not isinstance(ome, dict):
        return iter(())
    if isinstance(ome.get("plate"), dict):
        return _wells(store, url, ome["plate"])
    if isinstance(ome.get("well"), dict):
        return _paths(ome["well"].get("images"))
    if isinstance(ome.get("labels"), list):
        return (name for name in ome["labels"] if _is_name(name))
    if "bioformats2raw.layout" in ome:
        return _images(store, url)
    folder = local_folder(url)
    return iter(()) if folder is None else _below(folder)


def _wells(store: KvStore, url: str, plate: Json) -> Iterator[str]:
    """The images of the wells of a plate, of which only so many are looked at."""
    for well in islice(_paths(plate.get("wells")), _MOST_WELLS):
        attributes = _attributes(store, url, well)
        ome = attributes.get("ome", attributes)
        described = ome.get("well") if isinstance(ome, dict) else None
        images = _paths(described.get("images")) if isinstance(described, dict) else iter(())
        yield from (f"{well}/{image}" for image in images)


def _images(store: KvStore, url: str) -> Iterator[str]:
    """The numbered images that bioformats2raw makes of a file."""
    for number in count():
        if not _attributes(store, url, str(number)):
            return
        yield str(number)


def _paths(entries: object) -> Iterator[str]:
    for entry in entries if isinstance(entries, list) else []:
        path = entry.get("path") if isinstance(entry, dict) else None
        if isinstance(path, str) and _is_name(path):
            yield path


def _is_name(path: object) -> bool:
    """Whether a path stays in its folder; it is shown, and read by."""
    return (
        isinstance(path, str)
        and 0 < len(path) <= _MOST_CHARACTERS
        and not {"", ".", ".."}.intersection(path.split("/"))
    )


def _attributes(store: KvStore, url: str, folder: str) -> Json:
    """The attributes of a group of Zarr, of either version; empty where there are none."""
    for key in (".zattrs", "zarr.json"):
        try:
            text = read_key(store, f"{folder}/{key}", url)
            value = None if text is None else parse_json(text)
        except (BeamInferenceError, ValueError):
            return {}
        if isinstance(value, dict):
            found = value.get("attributes") if key == "zarr.json" else value
            return found if isinstance(found, dict) else {}
    return {}


def _below(folder: Path) -> Iterator[str]:
    """The volumes in the folders below, in the order of their names."""
    looked_at = count()

    def walk(place: Path, depth: int) -> Iterator[str]:
        entries = sorted(
            (each for each in islice(os.scandir(place), _MOST_ENTRIES) if each.is_dir()),
            key=lambda each: each.name,
        )
        for entry in entries:
            if next(looked_at) > _MOST_ENTRIES:
                return
            below = Path(entry.path)
            if _is_volume(below):
                yield str(below.relative_to(folder))
            elif depth < _DEEPEST:
                yield from walk(below, depth + 1)

    try:
        yield from walk(folder, 1)
    except OSError:
        return


def _is_volume(folder: Path) -> bool:
    """Whether an array, an image of OME-Zarr or a precomputed volume lies in a folder."""
    if (folder / ".zarray").is_file() or (folder / "info").is_file():
        return True
    for name in ("zarr.json", ".zattrs", "attributes.json"):
        path = folder / name
        try:
            is_small_file = path.is_file() and path.stat().st_size <= _MOST_BYTES
            value = parse_json(path.read_bytes()) if is_small_file else None
        except (OSError, ValueError):
            continue
        if not isinstance(value, dict):
            continue
        attributes = value.get("attributes") if name == "zarr.json" else value
        ome = attributes.get("ome", attributes) if isinstance(attributes, dict) else {}
        is_array = value.get("node_type") == "array" or (
            name == "attributes.json" and "dimensions" in value
        )
        if is_array or (isinstance(ome, dict) and "multiscales" in ome):
            return True
    return False
