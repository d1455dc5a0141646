"""Paths as a volume's own metadata record them: without what names a person or opens a store.

Metadata travel with their volume, and anybody reads them. So a local path is recorded relative to
the volume, and one that would lead through somebody's home folder as its last name alone, behind
an ellipsis. URLs lose what follows ``?`` or ``#``.
"""

from __future__ import annotations

import getpass
import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from beam_inference.config.fields import Json
from beam_inference.config.job_file import absolute_path
from beam_inference.errors import StateError
from beam_inference.foreign_text import remove_credentials, shorten_text, shorten_value
from beam_inference.volumes.kvstores import local_folder

ELSEWHERE = "…/"
"""What a recorded path begins with if it does not say where its file lies."""

_HOMES = frozenset({"home", "homes", "users"})
"""Names, in lower case, of folders whose own folders are named after people."""

_OF_USERS = frozenset({"context", "aws_credentials", "user_project"})
"""Members of a TensorStore spec that say who opens it, and not what."""

_OF_PLACES = frozenset(
    {
        *("driver", "kvstore", "path", "bucket", "base_url", "aws_region", "base", "layers"),
        *("dtype", "rank", "domain", "transform", "schema", "field", "size", "start", "stop"),
        *("metadata", "metadata_key", "multiscale_metadata", "scale_metadata", "scale_index"),
        *("downsample_factors", "downsample_method", "recheck_cached_metadata"),
        "recheck_cached_data",
    }
)
"""Members of a TensorStore spec, of drivers of arrays and of stores, that a record may have.

They say what is read. Others say how: by which host, as whom, and whether anything is created.
"""


_REGION = re.compile(r"[a-z0-9-]*")


class RecordedPaths:
    """Paths as they are recorded in one volume, and as they are found from it again.

    Args:
        url: URL of the volume.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._folder = local_folder(self._url)

    def record_file(self, path: str) -> str:
        """A file's path or URL as it is recorded."""
        if path.startswith("file://"):
            path = unquote(urlsplit(path).path)
        return _bare(path) if "://" in path else self._relative(path)

    def record_volume(self, url: str) -> str:
        """A volume's URL as it is recorded, with the drivers that may follow after ``|``."""
        place, bar, drivers = url.partition("|")
        return self.record_file(place) + bar + drivers

    def record_spec(self, spec: Json) -> Json:
        """A TensorStore spec as it is recorded."""
        recorded = {
            key: self._record_member(value) for key, value in spec.items() if key not in _OF_USERS
        }
        path = spec.get("path")
        if spec.get("driver") == "file" and isinstance(path, str):
            recorded["path"] = self._relative(path) + ("/" if path.endswith("/") else "")
        return recorded

    def _record_member(self, value: object) -> object:
        if isinstance(value, dict):
            return self.record_spec(value)
        if isinstance(value, list):
            return [self._record_member(each) for each in value]
        if not isinstance(value, str) or not value.startswith("file://"):
            return _bare(value) if isinstance(value, str) and "://" in value else value
        if "|" in value:  # a string could not be told from other ones when it is read again
            path = unquote(urlsplit(value.partition("|")[0]).path)
            return ELSEWHERE + PurePosixPath(self._relative(path)).name
        return self.record_spec({"driver": "file", "path": unquote(urlsplit(value).path)})

    def _relative(self, path: str) -> str:
        """A local path relative to the volume, or its last name if it would name a person."""
        target = PurePosixPath(os.path.abspath(path))
        personal = _personal_parts(target)
        name = "unknown" if len(target.parts) - 1 in personal else target.name
        if self._folder is None:
            return ELSEWHERE + name
        volume = PurePosixPath(os.path.abspath(self._folder))
        shared = len(PurePosixPath(os.path.commonpath([volume, target])).parts)
        if any(number >= shared for number in personal):
            return ELSEWHERE + name
        return os.path.relpath(target, volume)

    def find_file(self, path: str, key: str) -> str:
        """The path or URL of a file that is recorded.

        Args:
            path: as it is recorded.
            key: the key of the job file that names it, for messages.

        Raises:
            StateError: the record does not say where it lies.
        """
        if path.startswith(ELSEWHERE):
            raise StateError(
                f"the record does not say where {key} lies, because that would have named a "
                f"person: it was called {shorten_text(path.removeprefix(ELSEWHERE))}. Say where "
                f"it is: --file {key}=PATH"
            )
        found = absolute_path(path, self._url if self._folder is None else self._folder)
        return found if "://" in found else os.path.normpath(found)

    def find_volume(self, path: str, key: str) -> str:
        """The URL of a volume that is recorded; see :meth:`find_file`."""
        place, bar, drivers = path.partition("|")
        found = self.find_file(place, key)
        return (found if "://" in found else Path(found).as_uri()) + bar + drivers

    def find_spec(self, spec: Json, key: str) -> Json:
        """A TensorStore spec that is recorded, with the places that it names; see above.

        Raises:
            StateError: it does not say where something lies, or says more than what is read.
        """
        other = sorted(set(spec) - _OF_PLACES) if "driver" in spec else []
        if other:
            raise StateError(
                f"the record opens {key} by {shorten_text(', '.join(other))} of a TensorStore "
                "spec, which a record may not say: it could send your credentials to a host of "
                f"its own, or have something created. Say where the volume is: --file {key}=PATH"
            )
        region = spec.get("aws_region", "")
        if not isinstance(region, str) or not _REGION.fullmatch(region):
            raise StateError(  # TensorStore makes a host's name of it
                f"the record opens {key} in the region {shorten_value(region)}, which is none: "
                f"say where the volume is: --file {key}=PATH"
            )
        found = {name: self._find_member(value, key) for name, value in spec.items()}
        path = spec.get("path")
        if spec.get("driver") == "file" and isinstance(path, str):
            found["path"] = self.find_file(path, key) + ("/" if path.endswith("/") else "")
        return found

    def _find_member(self, value: object, key: str) -> object:
        if isinstance(value, dict):
            return self.find_spec(value, key)
        if isinstance(value, list):
            return [self._find_member(each, key) for each in value]
        if isinstance(value, str) and value.startswith(ELSEWHERE):
            self.find_file(value, key)
        return value


def _bare(url: str) -> str:
    return remove_credentials(re.split("[?#]", url, maxsplit=1)[0])


def _personal_parts(path: PurePosixPath) -> list[int]:
    """Numbers of the parts of a path that are a user's name."""
    own = _own_names()
    parts = path.parts
    return [
        number
        for number, part in enumerate(parts)
        if part in own or (number > 0 and parts[number - 1].lower() in _HOMES)
    ]


def _own_names() -> set[str]:
    """Names of the user of this process."""
    names = set[str]()
    with suppress(KeyError, OSError):
        names.add(getpass.getuser())
    with suppress(RuntimeError):
        names.add(Path.home().name)
    return names - {""}
