"""Buckets and objects of Cloud Storage in memory: generations, preconditions, listings; no HTTP."""

from __future__ import annotations

import base64
import hashlib
import itertools
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import google_crc32c

Query = Mapping[str, str]
Json = dict[str, Any]

KEPT_PROPERTIES = (
    "contentType",
    "contentEncoding",
    "cacheControl",
    "contentDisposition",
    "contentLanguage",
    "metadata",
)


class GcsError(Exception):
    """What the server answers instead of doing what was asked."""

    def __init__(self, status: int, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.status = status
        self.reason = reason


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Content:
    """Bytes and their checksums."""

    data: bytes
    crc32c: str
    md5: str

    @classmethod
    def of(cls, data: bytes, claimed: Json | None = None) -> Content:
        """Raise unless the bytes that arrived have the checksums that the client claims."""
        crc32c = _base64(google_crc32c.value(data).to_bytes(4, "big"))
        md5 = _base64(hashlib.md5(data).digest())
        for key, value in (("crc32c", crc32c), ("md5Hash", md5)):
            if claimed and claimed.get(key) not in (None, value):
                raise GcsError(
                    400,
                    "invalid",
                    f"Provided {key} {claimed[key]} does not match the data's {value}",
                )
        return cls(data, crc32c, md5)


@dataclass(frozen=True)
class StoredObject:
    """One generation of an object."""

    content: Content
    generation: int
    properties: Json = field(default_factory=dict)
    metageneration: int = 1
    created: str = field(default_factory=_now)
    updated: str = field(default_factory=_now)

    @property
    def data(self) -> bytes:
        """The bytes."""
        return self.content.data

    def resource(self, bucket: str, name: str) -> Json:
        """What the JSON API tells about it."""
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{self.generation}",
            "name": name,
            "bucket": bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "crc32c": self.content.crc32c,
            "md5Hash": self.content.md5,
            "etag": _base64(f"{self.generation}/{self.metageneration}".encode()),
            "timeCreated": self.created,
            "updated": self.updated,
            **self.properties,
        }


def kept_properties(resource: Json) -> Json:
    """The part of a resource sent by a client that an object keeps."""
    return {key: resource[key] for key in KEPT_PROPERTIES if resource.get(key) is not None}


def check_preconditions(
    found: StoredObject | None, query: Query, *, prefix: str = "if", reading: bool = False
) -> None:
    """Raise unless ifGenerationMatch and the other conditions hold.

    An object that does not exist has generation 0.
    """
    values = {
        "Generation": found.generation if found else 0,
        "Metageneration": found.metageneration if found else 0,
    }
    for what, value in values.items():
        wanted = query.get(f"{prefix}{what}Match")
        unwanted = query.get(f"{prefix}{what}NotMatch")
        if wanted is not None and int(wanted) != value:
            raise GcsError(
                412, "conditionNotMet", f"{prefix}{what}Match={wanted}, but it is {value}"
            )
        if unwanted is not None and int(unwanted) == value:
            raise GcsError(
                304 if reading else 412, "conditionNotMet", f"{prefix}{what}NotMatch={unwanted}"
            )


class ObjectStore:
    """All buckets; every method is atomic."""

    def __init__(self, buckets: Iterable[str]) -> None:
        self.buckets: dict[str, dict[str, StoredObject]] = {name: {} for name in buckets}
        self._lock = threading.RLock()
        self._generations = itertools.count(int(time.time() * 1e6))

    def objects(self, bucket: str) -> dict[str, StoredObject]:
        """Those of one bucket, by name."""
        if bucket not in self.buckets:
            raise GcsError(404, "notFound", f"The specified bucket does not exist: {bucket}")
        return self.buckets[bucket]

    def create_bucket(self, name: str) -> None:
        """Makes an empty bucket."""
        with self._lock:
            if name in self.buckets:
                raise GcsError(409, "conflict", f"You already own the bucket {name}")
            self.buckets[name] = {}

    def check(self, bucket: str, name: str, query: Query) -> None:
        """Raises where a write would be refused now."""
        with self._lock:
            check_preconditions(self.objects(bucket).get(name), query)

    def write(
        self, bucket: str, name: str, content: Content, claimed: Json, query: Query
    ) -> StoredObject:
        """Stores a new generation of an object."""
        with self._lock:
            self.check(bucket, name, query)
            made = StoredObject(content, next(self._generations), kept_properties(claimed))
            self.objects(bucket)[name] = made
        return made

    def read(self, bucket: str, name: str, query: Query) -> StoredObject:
        """The live object, or the generation asked for where that is the live one."""
        with self._lock:
            found = self._existing(bucket, name, query.get("generation"))
        check_preconditions(found, query, reading=True)
        return found

    def delete(self, bucket: str, name: str, query: Query) -> None:
        """Removes an object."""
        with self._lock:
            check_preconditions(self._existing(bucket, name, query.get("generation")), query)
            del self.objects(bucket)[name]

    def patch(self, bucket: str, name: str, changes: Json, query: Query) -> StoredObject:
        """Changes an object's metadata, not its generation."""
        with self._lock:
            found = self._existing(bucket, name, query.get("generation"))
            check_preconditions(found, query)
            properties = {**found.properties, **kept_properties(changes)}
            changed = replace(
                found,
                properties=properties,
                metageneration=found.metageneration + 1,
                updated=_now(),
            )
            self.objects(bucket)[name] = changed
        return changed

    def copy(
        self, source: tuple[str, str], target: tuple[str, str], changes: Json, query: Query
    ) -> StoredObject:
        """Copies an object, within a bucket or between two."""
        with self._lock:
            found = self._existing(*source, query.get("sourceGeneration"))
            check_preconditions(found, query, prefix="ifSource")
            return self.write(
                *target, found.content, {**found.properties, **kept_properties(changes)}, query
            )

    def compose(self, bucket: str, name: str, order: Json, query: Query) -> StoredObject:
        """Writes the concatenation of up to 32 objects of the same bucket."""
        sources = order.get("sourceObjects", [])
        if not 1 <= len(sources) <= 32:
            raise GcsError(
                400,
                "invalid",
                f"The number of source components must be 1 to 32, not {len(sources)}",
            )
        with self._lock:
            found = []
            for source in sources:
                found.append(self._existing(bucket, source["name"], source.get("generation")))
                check_preconditions(found[-1], source.get("objectPreconditions", {}))
            content = Content.of(b"".join(part.data for part in found))
            return self.write(bucket, name, content, order.get("destination", {}), query)

    def list(self, bucket: str, query: Query) -> Json:
        """One page of a bucket's objects, those below a delimiter as prefixes."""
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        start = query.get("startOffset", "")
        end = query.get("endOffset", "")
        limit = min(int(query.get("maxResults", 1000)), 1000)
        with self._lock:
            found = dict(self.objects(bucket))
        entries: dict[str, Json | None] = {}  # None: a prefix
        names = sorted(
            name
            for name in found
            if name.startswith(prefix) and name >= start and (not end or name < end)
        )
        for name in names:
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            entry = prefix + head + cut if cut else name
            if entry <= query.get("pageToken", "") or entry in entries:
                continue
            if len(entries) == limit:
                return self._page(entries, next_token=max(entries))
            entries[entry] = None if cut else found[name].resource(bucket, name)
        return self._page(entries)

    def _existing(self, bucket: str, name: str, generation: str | None) -> StoredObject:
        found = self.objects(bucket).get(name)
        if found is None or (generation is not None and int(generation) != found.generation):
            raise GcsError(404, "notFound", f"No such object: {bucket}/{name}")
        return found

    @staticmethod
    def _page(entries: Mapping[str, Json | None], next_token: str = "") -> Json:
        page: Json = {"kind": "storage#objects"}
        if items := [entry for entry in entries.values() if entry]:
            page["items"] = items
        if prefixes := [name for name, entry in entries.items() if not entry]:
            page["prefixes"] = prefixes
        if next_token:
            page["nextPageToken"] = next_token
        return page
