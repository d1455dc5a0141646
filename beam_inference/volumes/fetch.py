"""Fetches files from object stores to this machine, once, by their hashes."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path
from urllib.parse import unquote

from beam_inference.config.storage import Storage
from beam_inference.errors import ModelContractError, VolumeError
from beam_inference.volumes.file_locks import lock_file
from beam_inference.volumes.kvstores import TRANSFER_SECONDS, read_file


def fetch_file(url: str, key: str, storage: Storage, sha256: str | None = None) -> str:
    """Return a local path of a file's content; from an object store it is fetched once and kept.

    Args:
        url: of the file; what is no URL of a store is returned as it is.
        key: under which the job names it, for messages.
        storage: how stores are reached.
        sha256: the content's hash, if it is known. Copies that agree with it are used again, by
            every process of this machine.

    Raises:
        ModelContractError: the file cannot be fetched, or has another hash.
    """
    if "://" not in url or url.startswith("file://"):
        return url
    name = _file_name(url)
    folder = _cache_folder()
    with (folder / "lock").open("w") as lock:
        # the processes of a machine fetch a file once, not once each
        try:
            lock_file(lock.fileno(), folder / "lock", TRANSFER_SECONDS)
        except TimeoutError as error:
            raise ModelContractError(f"{key}: {error}") from None
        if sha256 is not None:
            kept = folder / sha256 / name
            if kept.is_file() and _sha256(kept) == sha256:
                return str(kept)
        try:
            content = read_file(url, storage, TRANSFER_SECONDS)
        except VolumeError as error:
            raise ModelContractError(f"{key}: {error}") from None
        digest = hashlib.sha256(content).hexdigest()
        if sha256 is not None and digest != sha256:
            raise ModelContractError(
                f"{key}: {url} has the sha256 {digest}, the job was launched with {sha256}: the "
                "file was changed since. Restore it, or launch again with another output.path."
            )
        path = folder / digest / name
        try:
            _write(path, content)
        except OSError as error:
            raise ModelContractError(
                f"{key}: cannot keep a copy of {url} in {folder}: {error.strerror}. Set TMPDIR to "
                "a folder with space."
            ) from None
        return str(path)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def _file_name(url: str) -> str:
    """A name for a copy of a file, with the suffix of its own; it never leads to another folder."""
    name = re.sub(r"[^\w.+-]", "_", unquote(url.rpartition("/")[2]), flags=re.ASCII)
    # of long ones the end, with the suffix; a name is not hidden, and not "." or ".."
    return name[-100:].lstrip(".") or "file"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_folder() -> Path:
    """A folder that belongs to this user: what lies there is loaded as a network."""
    folder = Path(tempfile.gettempdir()) / f"beam_inference_models_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise ModelContractError(
            f"{folder} belongs to someone else: networks are not fetched into it. Set TMPDIR."
        )
    return folder
