"""Zip archives as PyTorch writes them, judged by their directory before PyTorch opens them.

PyTorch reads archives by a library of its own, which finds the directory in another way than
Python's does. So only archives that can be read in one way are let through: those whose directory
is the last thing in the file, and which have neither a comment nor bytes before the first member.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from beam_inference.errors import ModelContractError

UNPACKED_LIMIT = 1 << 28
"""Bytes into which the compressed members of an archive may unpack, all together.

PyTorch compresses nothing but source code.
"""

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENCRYPTED = 0x41  # encryption, and the kind of it that hides names as well
_EXTRA_FIELDS = {0x0001, 0x4246}  # sizes of 64 bits, and PyTorch's padding


class BrokenArchive(Exception):
    """The file is no archive that can be read in one way only; the message says why."""


def is_archive(path: Path) -> bool:
    """Whether a file begins as a zip archive does; PyTorch goes by the same four bytes."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


@contextmanager
def open_archive(path: Path, kind: str) -> Iterator[zipfile.ZipFile]:
    """Open an archive, and check it as a whole.

    Args:
        path: of the file.
        kind: what it should be, for messages, such as "TorchScript file".

    Raises:
        ModelContractError: it is no archive, damaged, encrypted, or unpacks into too much.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            check_archive(file, archive)
            for member in archive.infolist():
                _check_content(archive, member)
            yield archive
    except (BrokenArchive, *_ZIP_ERRORS) as error:
        raise ModelContractError(
            f"cannot load the {kind} {path}: it is damaged, or no archive as PyTorch writes them: "
            f"{error}. Save or copy it again."
        ) from None


_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    # what zipfile raises on directories that contradict themselves
    NotImplementedError,
    UnicodeDecodeError,
    EOFError,
    OverflowError,
    ValueError,
    struct.error,
)


def check_archive(file: IO[bytes], archive: zipfile.ZipFile) -> None:
    """Check that an archive can be read in one way, and that it unpacks into a bounded size.

    Args:
        file: the open file.
        archive: the same file as Python's library reads it.

    Raises:
        BrokenArchive: it cannot, or does not.
    """
    size = file.seek(0, 2)
    members = archive.infolist()
    if _directory(file, size) != (archive.start_dir, len(members)):
        raise BrokenArchive("its directory is not where the end of the file says")
    names = [member.orig_filename for member in members]
    if len({name.lower() for name in names}) < len(names):
        raise BrokenArchive("two of its members have one name")
    for member in members:
        _check_member(member)
    if sum(member.compress_size for member in members) > size:
        raise BrokenArchive("its members overlap")
    unpacked = sum(
        member.file_size for member in members if member.compress_type != zipfile.ZIP_STORED
    )
    if unpacked > UNPACKED_LIMIT:
        raise BrokenArchive(
            f"it unpacks into {unpacked:,} bytes; at most {UNPACKED_LIMIT:,} are unpacked"
        )


def _check_member(member: zipfile.ZipInfo) -> None:
    name = member.orig_filename
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or ".." in parts or "" in parts:
        raise BrokenArchive(f"the name of its member {name!a:.100} is not a plain path")
    if member.flag_bits & _ENCRYPTED:
        raise BrokenArchive(f"its member {name} is encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BrokenArchive(f"its member {name} is compressed in a way that PyTorch does not read")
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        raise BrokenArchive(f"the sizes of its member {name} contradict each other")
    if not _extra_fields(member.extra) <= _EXTRA_FIELDS:
        raise BrokenArchive(f"its member {name} has fields that PyTorch does not write")


def _check_content(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Read a member, for Python's library compares its checksum; PyTorch does not."""
    if member.CRC == 0:
        return  # PyTorch leaves it out if it was told to
    with archive.open(member) as content:
        while content.read(1 << 20):
            pass


def _extra_fields(extra: bytes) -> set[int]:
    """The numbers of a member's extra fields; -1 where they do not fill their space."""
    fields: set[int] = set()
    while extra:
        if len(extra) < 4:
            return {*fields, -1}
        number, length = struct.unpack_from("<2H", extra)
        fields.add(number)
        extra = extra[4 + length :]
    return fields


def _directory(file: IO[bytes], size: int) -> tuple[int, int] | None:
    """Where the directory begins, and how many members it has; None if it does not end the file."""
    end = _read_at(file, size - _END.size, _END)
    if end is None or end[0] != b"PK\x05\x06" or end[-1] != 0 or any(end[1:3]):
        return None
    told = (end[3], end[4], end[5], end[6])
    stop = size - _END.size
    found = told
    locator = _read_at(file, stop - _LOCATOR.size, _LOCATOR)
    if locator is not None and locator[0] == b"PK\x06\x07":
        stop -= _LOCATOR.size + _END_64.size
        end_64 = _read_at(file, stop, _END_64)
        if locator[1:] != (0, stop, 1) or end_64 is None or end_64[0] != b"PK\x06\x06":
            return None
        if end_64[1] != _END_64.size - 12 or any(end_64[4:6]):
            return None
        found = end_64[6:]
    masks = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    same = all(t in (f, mask) for t, f, mask in zip(told, found, masks, strict=True))
    here, count, length, start = found
    return (start, count) if same and here == count and start + length == stop else None


def _read_at(file: IO[bytes], offset: int, record: struct.Struct) -> tuple[Any, ...] | None:
    if offset < 0:
        return None
    file.seek(offset)
    return record.unpack(file.read(record.size))
