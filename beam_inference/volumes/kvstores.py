"""TensorStore's key-value stores by URL: how they are reached, and what their errors mean.

Local folders, ``gs://``, ``s3://`` and, read-only, ``http(s)://``. No key or token passes through
here: TensorStore takes credentials from where its drivers look for them (``storage.s3.credentials``
says which place).
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage, check_url
from beam_inference.environment import available_memory, set_variable
from beam_inference.errors import ConfigError, VolumeError, WorkerFault
from beam_inference.foreign_text import holds_credentials
from beam_inference.volumes.backoff import retry_with_backoff

Value = TypeVar("Value")

KvStore: TypeAlias = ts.KvStore
"""An open key-value store."""

LOCAL = Storage()
"""No settings: local files, and object stores as their own defaults reach them."""

MOST_SMALL_BYTES = 2**26
"""Of metadata, and of records of a state folder."""

MOST_PART_BYTES = 2**32
"""Of files between stages, which hold parts of chunks, and of networks."""

PATIENCE_SECONDS = 90
"""How long a store may take to answer a small request."""
TRANSFER_SECONDS = 3600
"""How long it may take to read or write a chunk's voxels, or a network's file."""

# TensorStore's own default, 32 attempts with up to 32 s between them, hides a dead endpoint for ten
# minutes.
_RETRIES = {"max_retries": 6, "initial_delay": "100ms", "max_delay": "8s"}


_TRANSIENT = (
    "ABORTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "CANCELLED",
    "INTERNAL",
    "UNKNOWN",
)


def storage_of_environment(
    storage: Storage, environment: Mapping[str, str] = os.environ
) -> Storage:
    """Settings completed by the variables that the stores' own tools know.

    ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, ``AWS_REGION`` and ``AWS_DEFAULT_REGION`` for S3,
    ``STORAGE_EMULATOR_HOST`` for Google Cloud Storage. What the job file says comes first.

    Raises:
        ConfigError: one of them carries credentials.
    """
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
        if holds_credentials(environment.get(name, "")):
            raise ConfigError(
                f"${name} holds credentials, and would be recorded with the job: take them out "
                "of it"
            )
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    s3 = {"endpoint": storage.s3.endpoint or endpoint, "region": storage.s3.region or region}
    gcs = {"endpoint": storage.gcs.endpoint or environment.get("STORAGE_EMULATOR_HOST")}
    return storage.model_copy(
        update={"s3": storage.s3.model_copy(update=s3), "gcs": storage.gcs.model_copy(update=gcs)}
    )


@functools.cache
def _context(storage: Storage, cache_bytes: int) -> ts.Context:
    """The TensorStore context of settings: one per process, so that its limits hold in total."""
    resources: Json = {f"{kind}_request_retries": _RETRIES for kind in ("gcs", "s3", "http")}
    # TensorStore's locks let a killed write tear the next one: see conditional_writes.
    resources["file_io_locking"] = {"mode": "none"}
    # Threads of its own: an input whose reads hang does not block the writing of records.
    resources["file_io_concurrency"] = {"limit": max(4, os.cpu_count() or 4)}
    for kind in ("gcs", "s3", "http"):
        limit = getattr(storage, kind).concurrency
        if limit is not None:
            resources[f"{kind}_request_concurrency"] = {"limit": limit}
    if storage.gcs.user_project is not None:
        resources["gcs_user_project"] = {"project_id": storage.gcs.user_project}
    if storage.s3.credentials is not None:
        resources["aws_credentials"] = {"type": storage.s3.credentials}
        if storage.s3.profile is not None:
            resources["aws_credentials"]["profile"] = storage.s3.profile
    if cache_bytes:
        resources["cache_pool"] = {"total_bytes_limit": cache_bytes}
    return ts.Context(resources)


def kvstore_spec(url: str, storage: Storage) -> Any:
    """What TensorStore opens to reach the folder at a URL.

    It is the URL itself, or a spec where an endpoint or region is set.
    """
    return with_settings(url if url.endswith("/") else url + "/", storage)


def with_settings(spec: Any, storage: Storage) -> Any:
    """A TensorStore spec with endpoint and region in each ``s3`` store that names none itself."""
    if isinstance(spec, dict):
        spec = {key: with_settings(value, storage) for key, value in spec.items()}
        if spec.get("driver") == "s3" and "endpoint" not in spec and "aws_region" not in spec:
            spec |= _s3_members(storage)
        return spec
    if isinstance(spec, list):
        return [with_settings(value, storage) for value in spec]
    if isinstance(spec, str) and spec.startswith("s3://") and _s3_members(storage):
        return with_settings(ts.KvStore.Spec(spec).to_json(), storage)
    return spec


def _s3_members(storage: Storage) -> dict[str, str]:
    if storage.s3.endpoint is None and storage.s3.region is None:
        return {}
    endpoint = {} if storage.s3.endpoint is None else {"endpoint": storage.s3.endpoint}
    return {**endpoint, "aws_region": storage.s3.region or "us-east-1"}


def open_with(
    opening: Callable[[ts.Context], ts.Future[Value]], storage: Storage, cache_bytes: int = 0
) -> Value:
    """Call a function with the TensorStore context of settings, and wait for what it opens.

    Args:
        opening: begins to open something, given the context.
        storage: the settings.
        cache_bytes: decoded blocks that the context keeps, of all that are opened with so many. By
            default nothing is shared: what TensorStore keeps of an array for all that have it open
            includes the units of its axes as they were when the first one opened it.

    Raises:
        ValueError, OSError: as TensorStore does; also if there is no answer within a minute and a
            half.
    """
    endpoint = storage.gcs.endpoint
    # TensorStore's gcs driver knows its endpoint from the environment alone, and looks when a store
    # is opened.
    with nullcontext() if endpoint is None else set_variable("TENSORSTORE_GCS_HTTP_URL", endpoint):
        shared = _context(storage, cache_bytes)
        context = shared if cache_bytes else ts.Context({"cache_pool": {}}, shared)
        return opening(context).result(timeout=PATIENCE_SECONDS)


def open_kvstore(url: str, storage: Storage = LOCAL) -> KvStore:
    """The key-value store under a URL.

    Raises:
        VolumeError: TensorStore does not know the URL's scheme, or its local folder is a file.
    """
    try:
        return open_with(
            lambda context: ts.KvStore.open(kvstore_spec(url, storage), context=context), storage
        )
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot open {url}: {one_line(error)}") from None


def retry_request(
    what: str, where: str, action: Callable[[], Value], most_bytes: int = MOST_SMALL_BYTES
) -> Value:
    """Make a request; make it again, with backoff, where it fails in a way that may pass.

    Args:
        what: a verb for the message, such as "read".
        where: the URL, for the message.
        action: makes the request, and waits for its result.
        most_bytes: that a local file may have where it is to be read.

    Raises:
        WorkerFault: it failed for good.
    """
    if what == "read":
        refuse_pipe(where, most_bytes)
    try:
        return retry_with_backoff(is_transient, attempts=5, longest_wait=5)(action)
    except (ValueError, OSError) as error:
        raise WorkerFault(f"cannot {what} {where}: {one_line(error)}") from error


def refuse_pipe(url: str, most_bytes: int) -> None:
    """Refuse to read what is no file: a pipe might never answer, and a device never end.

    Args:
        url: of the file, or of an object, which is not looked at.
        most_bytes: that a file may have.

    Raises:
        WorkerFault: something else lies where a local file is expected, or more than fits into
            memory.
    """
    path = local_folder(url)
    if path is not None and (_is_pipe(path) or path.is_dir()):
        raise WorkerFault(f"cannot read {url}: it is a folder, a pipe or the like. Remove it")
    if path is not None and _length_of(path) > most_bytes:
        raise WorkerFault(
            f"cannot read {url}: it has {_length_of(path):,} bytes, more than anything that was "
            "written there. Remove it"
        )


def local_bytes(url: str) -> int:
    """Bytes of a local file; 0 of an object, and where TensorStore will say what is wrong."""
    path = local_folder(url)
    return 0 if path is None else _length_of(path)


def _is_pipe(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False  # TensorStore says what is wrong
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def refuse_link(url: str) -> None:
    """Refuse a folder of ours that is a link, or lies in one: others' files would be changed.

    Raises:
        WorkerFault: it is, or does.
    """
    path = local_folder(url)
    for place in () if path is None else (path, path.parent):
        _refuse_link_at(place)


def _refuse_link_at(place: Path) -> None:
    if place.is_symlink():
        raise WorkerFault(
            f"{place} is a link, and what it leads to would be changed: remove the link"
        )


class LinkGuard:
    """Refuses links among the folders that keys lead through, each folder once.

    Args:
        url: a folder that is not looked at itself.
        folder: the folder of ours in it that the keys are relative to; by default ``url`` itself.
    """

    def __init__(self, url: str, folder: str = "") -> None:
        self._folder = local_folder(url)
        self._prefix = f"{folder}/" if folder else ""
        self._known: set[str] = set()

    def check(self, key: str) -> None:
        """Look at the folders between ours and the file of a key that is to be changed.

        Raises:
            WorkerFault: one is a link: others' files would be changed.
        """
        folders, _, _ = f"{self._prefix}{key}".rpartition("/")
        if self._folder is None or not folders or folders in self._known:
            return
        place = self._folder
        for name in folders.split("/"):
            place /= name
            _refuse_link_at(place)
        self._known.add(folders)


def or_else_again(
    under_way: Any, again: Callable[[], Any], patience: float = PATIENCE_SECONDS
) -> Callable[[], Any]:
    """A function that waits for a request; when it is called again, it makes a new one.

    Args:
        under_way: the request that was begun.
        again: begins a new one.
        patience: seconds to wait for either.
    """
    first = [under_way]

    def result() -> Any:
        return (first.pop() if first else again()).result(timeout=patience)

    return result


def read_key(store: KvStore, key: str, url: str) -> bytes | None:
    """The value of a key, of metadata, or None if it is absent.

    Raises:
        VolumeError: the store does not answer, or it is larger than any metadata.
    """
    spec = store.spec().to_json()  # a store of S3 with an endpoint has no URL
    path = Path(spec["path"]) / key if spec["driver"] == "file" else None
    if path is not None and _is_pipe(path):
        raise VolumeError(f"{url}/{key} is no file, but a pipe or the like: the volume is damaged")
    if path is not None:
        _check_length(_length_of(path), f"{url}/{key}")
    try:
        result = store.read(key).result(timeout=PATIENCE_SECONDS)
    except (ValueError, OSError) as error:
        may_be_absent = spec["driver"] == "http" and status(error) == "PERMISSION_DENIED"
        hint = ". Of what is absent, the server must answer 404" if may_be_absent else ""
        raise VolumeError(f"cannot read {url}/{key}: {one_line(error)}{hint}") from None
    if result.state != "value":
        return None
    _check_length(len(result.value), f"{url}/{key}")
    return bytes(result.value)


def _check_readable(path: Path, url: str) -> None:
    """Refuse what would never be read: pipes, and files larger than memory."""
    if _is_pipe(path):
        raise VolumeError(f"{url} is no file, but a pipe or the like")
    length = _length_of(path)
    available = available_memory()
    if available is not None and length > available:
        raise VolumeError(
            f"{url} has {length:,} bytes, and {available:,} of memory are available: it cannot be "
            "read as a whole"
        )


def _check_length(length: int, url: str) -> None:
    if length > MOST_SMALL_BYTES:
        raise VolumeError(
            f"{url} has {length:,} bytes: metadata of a volume have less than {MOST_SMALL_BYTES:,}"
        )


def _length_of(path: Path) -> int:
    """Bytes of a file; 0 where TensorStore will say what is wrong with it."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def read_file(url: str, storage: Storage = LOCAL, patience: float = PATIENCE_SECONDS) -> bytes:
    """Read the file at a URL; wait at most ``patience`` seconds for it.

    Raises:
        VolumeError: it is absent, no file, larger than the memory that is available, or its store
            does not answer.
    """
    path = local_folder(url)
    if path is not None:
        _check_readable(path, url)
    try:
        # A store rooted at the file itself: TensorStore then decodes the whole URL, and not its
        # folder only.
        store = open_with(
            lambda context: ts.KvStore.open(with_settings(url, storage), context=context), storage
        )
        result = store.read("").result(timeout=patience)
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot read {url}: {one_line(error)}") from None
    if result.state != "value":
        raise VolumeError(f"the file {url} does not exist")
    return bytes(result.value)


def place_of_url(url: str, storage: Storage = LOCAL) -> str:
    """Where a URL leads, made canonical: equal for two ways to name one place."""
    return place_of_store(open_kvstore(url, storage))


def place_of_store(store: KvStore) -> str:
    """Where a key-value store lies, in the form of :func:`place_of_url`."""
    spec = store.spec().to_json()
    if spec["driver"] == "file":
        return os.path.realpath(str(spec["path"]))
    named = ("driver", "bucket", "path", "base_url", "endpoint")
    return json.dumps({key: value for key, value in spec.items() if key in named})


def is_within(place: str, other: str) -> bool:
    """Whether a place, in the form of :func:`place_of_store`, is another or lies inside it."""
    if not (place.startswith("{") and other.startswith("{")):
        return f"{place}/".startswith(f"{other.rstrip('/')}/")
    a = json.loads(place)
    b = json.loads(other)
    paths = [f"{str(each.pop('path', '')).strip('/')}/".lstrip("/") for each in (a, b)]
    return bool(a == b and paths[0].startswith(paths[1]))


def url_of(path: str) -> str:
    """A path, made absolute, as a URL; a URL as it is. Without a slash at its end.

    Raises:
        ConfigError: the URL carries credentials.
    """
    check_url(path)
    return path.rstrip("/") if "://" in path else Path(path).absolute().as_uri()


def local_folder(url: str) -> Path | None:
    """The local folder of a file:// URL, else None."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def leads_elsewhere(url: str, path: str) -> bool:
    """Whether a path below a URL may lie outside of it: by its parts, or locally by a link."""
    if path.startswith("/") or {"", ".", ".."}.intersection(path.split("/")):
        return True
    root = local_folder(url)
    if root is None:
        return False
    return os.path.realpath(root / path) != os.path.join(os.path.realpath(root), path)


def status(error: BaseException) -> str:
    """The status prefix of a TensorStore error's text, such as FAILED_PRECONDITION."""
    match = re.match(r"([A-Z_]{4,})\b", str(error))
    return match[1] if match else ""


def is_transient(error: BaseException) -> bool:
    """Whether a failed request may succeed later; a full disk is RESOURCE_EXHAUSTED, and stays."""
    return status(error) in _TRANSIENT and status(error) != "RESOURCE_EXHAUSTED"


def may_pass(error: BaseException) -> bool:
    """Whether a failed read may succeed later; here RESOURCE_EXHAUSTED is a busy store."""
    return status(error) in _TRANSIENT or isinstance(error, TimeoutError)


_SENT_ELSEWHERE = re.compile(r"Unknown \[HTTP code (30[12378])\]")
"""An answer that leads to another address, to which TensorStore has no name and does not go."""


def one_line(error: Exception) -> str:
    """The error's text without TensorStore's source locations."""
    text = " ".join(str(error).split()) or "no answer in time"
    text = re.sub(r"\s*\[(source locations|tensorstore_spec)=.*", "", text)
    text = _SENT_ELSEWHERE.sub(
        r"the server sends the request on to another address (HTTP code \1), which is not "
        "followed. Give that address instead; of S3, the bucket's region",
        text,
    )
    return re.sub(r'"/[^"]*\\x00[^"]*"', lambda match: _with_slashes(match[0]), text)


def _with_slashes(path: str) -> str:
    r"""Write ``\x00`` as a slash: a folder that cannot be created is named with a NUL for each."""

    def character(match: re.Match[str]) -> str:
        code = int(match[1], 16)
        return chr(code) if 0x20 <= code < 0x7F else "/" if code == 0 else match[0]

    return re.sub(r"\\x([0-9a-f]{2})", character, path)
