"""How a volume was made, told by its own metadata: where entries stand, and how one is added.

An entry is a JSON object. Each format says where it keeps a list of them: formats with attributes
under a key of our own, ``precomputed`` in the file ``provenance`` that cloud-volume and Igneous
know. What others have written there stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from beam_inference.config.fields import Json
from beam_inference.config.formats import ProvenancePlace, installed_formats
from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.volumes.conditional_writes import change_json
from beam_inference.volumes.detection import hint_at_neighbours, json_object, volume_at
from beam_inference.volumes.kvstores import LOCAL, open_kvstore

KEY = "beam_inference"
"""Name under which entries stand among the attributes of others."""


def in_attributes(file: str, *within: str) -> ProvenancePlace:
    """The place of formats with attributes: the key ``beam_inference`` among them.

    Args:
        file: the JSON file that holds the attributes.
        within: keys that lead from its object to the attributes; none where it is them.
    """

    def entries(content: Json) -> list[Json]:
        for key in within:
            content = content.get(key) or {}
            if not isinstance(content, dict):
                raise ValueError(f"its {key} are no JSON object")
        return list_of_objects(content.get(KEY, []), KEY)

    def with_entries(content: Json, entries: list[Json]) -> Json:
        return _with_value(content, (*within, KEY), entries)

    return ProvenancePlace(file, entries, with_entries)


def list_of_objects(value: object, name: str) -> list[Json]:
    """A value as a list of JSON objects. Raises ValueError where it is none."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return value
    raise ValueError(f"its {name} is no list of JSON objects")


def _with_value(content: Json, path: tuple[str, ...], value: object) -> Json:
    first, *rest = path
    inner = _with_value(content.get(first) or {}, tuple(rest), value) if rest else value
    return {**content, first: inner}


def read_provenance(url: str, storage: Storage = LOCAL) -> list[Json]:
    """The entries of a volume, in the order in which they were added; none where there are none.

    Args:
        url: URL of the volume.
        storage: how object stores are reached.

    Raises:
        VolumeError: no volume is there, or its metadata are damaged.
    """
    place = place_in(url, storage)
    if place is None:
        return []
    try:
        content = json_object(open_kvstore(url, storage), place.file, url)
    except VolumeError as error:
        raise VolumeError(
            f"{error}. That file tells how the volume was made: mend it, or remove it."
        ) from None
    return _entries(place, content, url)


def change_provenance(
    url: str, storage: Storage, change: Callable[[list[Json]], list[Json]]
) -> None:
    """Change the entries of a volume, such that what others write meanwhile is not lost.

    A format without a place for them is left as it is.

    Args:
        url: URL of the volume, which is there.
        storage: how object stores are reached.
        change: returns the changed entries; it may be called several times.

    Raises:
        VolumeError: no volume is there, or its metadata are damaged.
        WorkerFault: they cannot be written.
    """
    place = place_in(url, storage)
    if place is None:
        return

    def rewrite(content: Json) -> Json:
        before = _entries(place, content, url)
        after = change(list(before))
        return content if after == before else place.with_entries(content, after)

    change_json(open_kvstore(url, storage), place.file, url, rewrite, otherwise={})


def place_in(url: str, storage: Storage) -> ProvenancePlace | None:
    """Where the volume at a URL keeps entries; None if its format has no place for them.

    Raises:
        VolumeError: no volume is there, or its metadata are damaged.
    """
    stored = volume_at(url, storage)
    if stored is None:
        raise VolumeError(f"there is no volume at {url}{hint_at_neighbours(url)}")
    formats = [each for each in installed_formats() if each.kind == stored.driver]
    return next((each.provenance for each in formats if each.provenance is not None), None)


_MOST_LEVELS = 32
"""Levels of values inside values of an entry; those of jobs have some ten."""


def _check_levels(entries: list[Json]) -> None:
    level: list[Any] = list(entries)
    for _ in range(_MOST_LEVELS):
        level = [inner for value in level for inner in _inner_values(value)]
    if level:
        raise ValueError(f"its values are nested on more than {_MOST_LEVELS} levels")


def _inner_values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _entries(place: ProvenancePlace, content: Json, url: str) -> list[Json]:
    try:
        entries = place.entries(content)
        _check_levels(entries)
        return entries
    except ValueError as error:
        raise VolumeError(
            f"{url}/{place.file} cannot be understood: {error}. It should tell how the volume was "
            "made: mend it, or remove that part of it."
        ) from None
