"""Files that commands write beside their output: none of anybody else's is replaced."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from beam_inference.errors import ConfigError, WorkerFault

_MARK = b'<meta name="generator" content="beam-inference">'
_HEAD_BYTES = 4096


def check_page(flag: str, path: str) -> None:
    """Check that a page can be written to a file, which is absent or a page of ours.

    Args:
        flag: that names the file.
        path: of the file.

    Raises:
        ConfigError: its name or its folder is wrong, or another file lies there.
    """
    if Path(path).suffix not in (".html", ".htm"):
        raise ConfigError(f"{flag} {path}: write a name that ends with .html")
    check_folder(flag, path)
    _refuse_foreign(flag, path, is_ours=_MARK in _read(path))


def check_result(flag: str, path: str, key: str) -> None:
    """Check that a JSON file can be written, which is absent or one of ours, perhaps cut off.

    Args:
        flag: that names the file.
        path: of the file.
        key: the first one of those of ours.

    Raises:
        ConfigError: its folder is wrong, or another file lies there.
    """
    check_folder(flag, path)
    _refuse_foreign(flag, path, is_ours=_read(path).startswith(f'{{\n "{key}":'.encode()))


def refuse_inside(flag: str, path: str, volumes: Iterable[str]) -> None:
    """Refuse to write a file into a volume that is read.

    Args:
        flag: that names the file.
        path: of the file.
        volumes: paths or URLs.

    Raises:
        ConfigError: it would lie in one.
    """
    from beam_inference.volumes.kvstores import is_within, place_of_url, url_of

    folder = place_of_url(url_of(str(Path(path).absolute().parent)))
    for volume in volumes:
        if is_within(folder, place_of_url(url_of(volume))):
            raise ConfigError(
                f"{flag} {path} lies in the volume {volume}, which is read. Write it beside it"
            )


@contextmanager
def replace_file(path: str) -> Iterator[Path]:
    """Write a file whole, or not at all.

    Args:
        path: of the file.

    Yields:
        The path of a draft beside it, with the same suffix; it takes its place at the end.

    Raises:
        WorkerFault: it cannot be written.
    """
    target = Path(path)
    draft = target.with_name(f".{uuid.uuid4().hex[:8]}.{target.name}")
    try:
        yield draft
        draft.replace(target)
    except OSError as error:
        raise WorkerFault(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # of a read-only disk, whether the draft is there or not
            draft.unlink(missing_ok=True)


def check_folder(flag: str, path: str) -> None:
    """Check that the folder of a file is there, and may be written. Raises ConfigError."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: this user may not write into the folder {folder}")


def _read(path: str) -> bytes:
    if not Path(path).is_file():
        return b""
    try:
        with Path(path).open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _refuse_foreign(flag: str, path: str, *, is_ours: bool) -> None:
    is_empty = Path(path).is_file() and not Path(path).stat().st_size
    if not is_ours and not is_empty and Path(path).exists():
        raise ConfigError(
            f"{flag} {path}: another file lies there, which this command did not write. Remove it, "
            "or write another name"
        )
