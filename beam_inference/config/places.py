"""The places that jobs read and write, and whether two of them are one under two names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote, urlsplit

from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import rename_paths


def real_place(url: str) -> str:
    """The one name of a place that has several: with links followed, and escapes decoded.

    Args:
        url: of a file or folder; the drivers of TensorStore that may follow do not count.
    """
    parts = urlsplit(url.partition("|")[0])
    path = unquote(parts.path).rstrip("/")
    if parts.scheme == "file":
        return os.path.realpath(path or "/")
    return f"{parts.scheme}://{parts.netloc}{path}"


@dataclass(frozen=True)
class Places:
    """The places that a job or a command reads and writes, as URLs.

    Attributes:
        read: volumes and files.
        written: volumes, files and state folders.
        is_added: whether what is written is added to a volume that is read.
    """

    read: tuple[str, ...]
    written: tuple[str, ...]
    is_added: bool = False

    def reads_of(self, other: Places) -> str | None:
        """The first place here that the other one writes, if there is one."""
        return _first_within(self.read, self._really_read, other)

    def writes_of(self, other: Places) -> str | None:
        """The first place that both write, if there is one."""
        return _first_within(self.written, self._really_written, other)

    @cached_property
    def _really_read(self) -> Sequence[str]:
        return [f"{real_place(url)}/" for url in self.read]

    @cached_property
    def _really_written(self) -> Sequence[str]:
        return [f"{real_place(url)}/" for url in self.written]


def _first_within(urls: Sequence[str], places: Sequence[str], other: Places) -> str | None:
    """The first URL whose place another one writes, or part of it, or what is around it."""
    for url, place in zip(urls, places, strict=True):
        written = other._really_written
        if any(place.startswith(each) or each.startswith(place) for each in written):
            return url
    return None


def places_of_job(job: JobConfig) -> Places:
    """The places that the job of one volume reads and writes."""
    places: dict[str, str] = {}

    def note(path: str, key: str) -> str:
        places[f"{key} {path}"] = path
        return path

    rename_paths(job, file=lambda path, _: path, volume=note)
    keys = set(_written_keys(job))
    read = [path for key, path in places.items() if key.partition(" ")[0] not in keys]
    written = [path for key, path in places.items() if key.partition(" ")[0] in keys]
    previews = [single.output.preview_path for single in job.by_output.values()]
    return Places(tuple(read), (*written, *(path for path in previews if path is not None)))


def _written_keys(job: JobConfig) -> Iterator[str]:
    yield "job.state_path"
    for key in ("output", *(f"outputs.{name}" for name in job.outputs)):
        yield f"{key}.path"
        yield f"{key}.preview.path"
