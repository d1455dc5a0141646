"""Fetches a network's files to this machine, once, by their hashes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from urllib.parse import unquote

from beam_inference.config.factories import factory_parts
from beam_inference.config.job import Network
from beam_inference.config.storage import Storage
from beam_inference.errors import ModelContractError, VolumeError
from beam_inference.volumes.kvstores import LOCAL, TRANSFER_SECONDS, read_file


def file_sha256(path: Path) -> str:
    """The hash of a local file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_model(model: Network, storage: Storage = LOCAL, sha256: str | None = None) -> Network:
    """The model with its files on this machine: those in object stores are fetched, once, and kept.

    ``sha256`` is what :func:`beam_inference.models.files.model_sha256` said at launch; copies that
    agree with it are used again, by every worker process of this machine.

    Raises:
        ModelContractError: a file cannot be fetched, or is not the one that the job was launched
            with.
    """
    hashes = sha256.split("+") if sha256 is not None else [None, None]
    factory = factory_parts(model.path)
    path = _local_file(factory[0] if factory else model.path, "model.path", storage, hashes[0])
    weights = model.weights and _local_file(model.weights, "model.weights", storage, hashes[-1])
    return model.model_copy(
        update={"path": f"{path}:{factory[1]}" if factory else path, "weights": weights}
    )


def _local_file(url: str, key: str, storage: Storage, sha256: str | None) -> str:
    """A path of a file's content; ``url`` itself where that is local, or no file at all (``identity``, a module)."""
    if "://" not in url or url.startswith("file://"):
        return url
    name = unquote(url.rpartition("/")[2])
    folder = _cache_folder()
    with (folder / "lock").open("w") as lock:
        # the processes of a machine fetch a file once, not once each
        fcntl.flock(lock, fcntl.LOCK_EX)
        if sha256 is not None:
            kept = folder / sha256 / name
            if kept.is_file() and file_sha256(kept) == sha256:
                return str(kept)
        try:
            content = read_file(url, storage, TRANSFER_SECONDS)
        except VolumeError as error:
            raise ModelContractError(f"{key}: {error}") from None
        found = hashlib.sha256(content).hexdigest()
        if sha256 is not None and found != sha256:
            raise ModelContractError(
                f"{key}: {url} has the sha256 {found}, the job was launched with {sha256}: the "
                "file was changed since. Restore it, or launch again with another output.path."
            )
        path = folder / found / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_name(f"{name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)
        return str(path)


def _cache_folder() -> Path:
    """A folder of this user's own: what lies there is loaded as a network."""
    folder = Path(tempfile.gettempdir()) / f"beam_inference_models_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise ModelContractError(
            f"{folder} belongs to someone else: networks are not fetched into it. Set TMPDIR."
        )
    return folder
