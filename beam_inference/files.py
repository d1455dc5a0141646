"""Whole files from anywhere: the job file, and the files of a network, which are fetched once per machine.

They are read through TensorStore's key-value stores, as volumes and receipts are: one set of settings and one place to
look for credentials, for all that a job touches.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import yaml
from pydantic import ValidationError

from beam_inference.bounding_box import Zyx
from beam_inference.config import JobConfig, Network, factory_parts
from beam_inference.cost import Prices
from beam_inference.errors import ConfigError, ModelContractError, VolumeError
from beam_inference.job_file import parse_job_text
from beam_inference.storage import Storage, refuse_credentials
from beam_inference.stores import LOCAL, TRANSFER_SECONDS, read_file, storage_of_environment, url_of


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a job file from a path or URL and apply ``key.key=value`` overrides (values are YAML).

    Paths without a scheme, in the file as in overrides, are relative to the job file's folder. Storage settings that
    the job leaves open are taken from the environment, see
    :func:`beam_inference.stores.storage_of_environment`.

    Raises:
        ConfigError: the file is absent or no YAML, or the job is not valid; the message names every fault.
    """
    url = str(path)
    try:
        refuse_credentials(url)
    except ValueError as error:
        raise ConfigError(f"the job file: {error}") from None
    try:
        if "://" in url:
            folder: str | Path = url.rpartition("/")[0]
            text = read_file(url, storage_of_environment(LOCAL)).decode()
        else:
            folder, text = Path(url).absolute().parent, Path(url).read_text()
    except VolumeError as error:
        raise ConfigError(f"cannot read the job file: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the job file {url}: {getattr(error, 'strerror', None) or error}") from None
    job = parse_job_text(text, folder, url, overrides)
    return job.model_copy(update={"storage": storage_of_environment(job.storage)})


def file_sha256(path: Path) -> str:
    """The hash of a local file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_model(model: Network, storage: Storage = LOCAL, sha256: str | None = None) -> Network:
    """The model with its files on this machine: those in object stores are fetched, once, and kept.

    ``sha256`` is what :func:`beam_inference.predictors.model_sha256` said at launch; copies that agree with it are used
    again, by every worker process of this machine.

    Raises:
        ModelContractError: a file cannot be fetched, or is not the one that the job was launched with.
    """
    hashes = sha256.split("+") if sha256 is not None else [None, None]
    factory = factory_parts(model.path)
    path = _local_file(factory[0] if factory else model.path, "model.path", storage, hashes[0])
    weights = model.weights and _local_file(model.weights, "model.weights", storage, hashes[-1])
    return model.model_copy(update={"path": f"{path}:{factory[1]}" if factory else path, "weights": weights})


def _local_file(url: str, key: str, storage: Storage, sha256: str | None) -> str:
    """A path of a file's content; ``url`` itself where that is local, or no file at all (``identity``, a module)."""
    if "://" not in url or url.startswith("file://"):
        return url
    name = unquote(url.rpartition("/")[2])
    folder = _cache_folder()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a machine fetch a file once, not once each
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
                f"{key}: {url} has the sha256 {found}, the job was launched with {sha256}: the file was changed since. "
                "Restore it, or launch again with another output.path."
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
        raise ModelContractError(f"{folder} belongs to someone else: networks are not fetched into it. Set TMPDIR.")
    return folder


def load_prices(path: str) -> Prices:
    """Read prices from a YAML file, a path or URL.

    Raises:
        ConfigError: it is absent, or not what it should be.
    """
    try:
        url = url_of(path)
        return Prices.model_validate(yaml.safe_load(read_file(url, storage_of_environment(LOCAL))) or {})
    except VolumeError as error:
        raise ConfigError(f"cannot read the prices: {error}") from None
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no file of prices: {' '.join(str(error).split())[:300]}") from None


_CHUNK_SHAPE = re.compile(r"""(\bchunk_shape["']?\s*:\s*)(\[[^\]]*\]|(?:\n\s*-[^\n]*){3}|[\w"']+)""")


def set_chunk_shape(path: str, chunk_shape: Zyx) -> None:
    """Put a chunk shape into a local job file, which otherwise stays as it is, comments and all.

    Raises:
        ConfigError: the file says it in a way that is not understood here.
    """
    if "://" in path:
        raise ConfigError(f"{path} is not a local file: set inference.chunk_shape to {list(chunk_shape)} there")
    file = Path(path)
    text, count = _CHUNK_SHAPE.subn(
        lambda found: f"{found[1].rstrip()} {list(chunk_shape)}", file.read_bytes().decode()
    )
    written = yaml.safe_load(text) if count == 1 else None
    if not isinstance(written, dict) or written.get("inference", {}).get("chunk_shape") != list(chunk_shape):
        raise ConfigError(f"cannot find inference.chunk_shape in {path}: write {list(chunk_shape)} there")
    file.write_bytes(text.encode())
