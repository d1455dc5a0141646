"""The DICOM files that a folder, glob or URL names."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from beam_inference.config.storage import Storage
from beam_inference.conversion.stored_files import (
    FILES_AT_A_TIME,
    StoredFile,
    count_bytes,
    find_files,
    is_url,
    open_stream,
    suffix_of,
)
from beam_inference.errors import VolumeError
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.remote_names import is_range, list_remote_files, names_files

_PREAMBLE_BYTES = 132


def is_dicom_folder(folder: Path) -> bool:
    """Whether the files of a folder are DICOM's, by their names or the first one's content."""
    return holds_dicom(sorted(str(each) for each in folder.iterdir() if each.is_file()), LOCAL)


def holds_dicom(paths: Sequence[str], storage: Storage) -> bool:
    """Whether files are DICOM's, by their names or the content of the first without a suffix.

    Args:
        paths: paths of files, or URLs.
        storage: how object stores are reached.
    """
    suffixes = [Path(path).suffix.lower() for path in paths]
    if ".dcm" in suffixes:
        return True
    plain = [
        path
        for path, suffix in zip(paths, suffixes, strict=True)
        if suffix == "" or suffix[1:].isdecimal()
    ]
    return bool(plain) and all(map(_is_dicom, find_files(plain[:1], storage)))


def _is_dicom(file: StoredFile) -> bool:
    with open_stream(file) as stream:
        return stream.read(_PREAMBLE_BYTES)[128:] == b"DICM"


def list_dicom_files(pattern: str, storage: Storage) -> list[StoredFile]:
    """List the DICOM files that a pattern names, in the order of their names.

    Args:
        pattern: path of a folder or a file, or a glob; URL of a file, a glob, a range or a list.
        storage: how object stores are reached.

    Raises:
        VolumeError: there are none, or another one looks like a slice of which little is left.
    """
    return _remote_files(pattern, storage) if is_url(pattern) else _paths(pattern)


def _paths(pattern: str) -> list[StoredFile]:
    path = Path(pattern)
    if path.is_file():
        return [pattern]
    found = path.iterdir() if path.is_dir() else map(Path, glob.iglob(pattern))
    paths = sorted(
        str(each.absolute()) for each in found if each.is_file() and each.name != "DICOMDIR"
    )
    return _choose_dicom(pattern, paths, [_is_dicom(each) for each in paths])


def _remote_files(url: str, storage: Storage) -> list[StoredFile]:
    """The DICOM files that a URL names; other files are left out, but for those of a range."""
    if not names_files(url):
        return find_files([url], storage)
    urls = [each for each in list_remote_files(url, storage) if not each.endswith("/DICOMDIR")]
    files = find_files(urls, storage)
    with ThreadPoolExecutor(FILES_AT_A_TIME) as executor:
        are_dicom = list(executor.map(_is_dicom, files))
    if is_range(url) and not all(are_dicom):
        raise VolumeError(f"{files[are_dicom.index(False)]} is no DICOM file")
    return _choose_dicom(url, files, are_dicom)


def _choose_dicom(
    pattern: str, files: Sequence[StoredFile], are_dicom: Sequence[bool]
) -> list[StoredFile]:
    """The files that are DICOM's.

    Raises:
        VolumeError: there are none, or another one looks like a slice of which little is left.
    """
    found = [file for file, is_dicom in zip(files, are_dicom, strict=True) if is_dicom]
    if not found:
        raise VolumeError(f"{pattern} holds no DICOM files")
    kinds = {_kind_of_name(file) for file in found}
    for file, is_dicom in zip(files, are_dicom, strict=True):
        if is_dicom:
            continue
        kind = _kind_of_name(file)
        size = count_bytes(file)
        if kind == ".dcm" or (kind in kinds and size < _PREAMBLE_BYTES):
            raise VolumeError(
                f"{file} has the name of a DICOM file, but does not begin as one, and has "
                f"{size:,} bytes: a slice would be missing. Copy it again; or name the others "
                "alone, if it is none of them."
            )
    return found


def _kind_of_name(file: StoredFile) -> str:
    """The suffix of a file; the numbers that scanners put there are none."""
    suffix = suffix_of(file)
    return "" if suffix[1:].isdecimal() else suffix
