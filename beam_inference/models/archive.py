"""Zip archives of strangers, judged by their directory before anything of them is unpacked.

PyTorch reads archives by a library of its own, which finds the directory in another way than
Python's does. So only archives that can be read in one way are let through: those whose directory
is the last thing in the file, and which have neither a comment nor bytes before the first member.

Packages of networks are read by Python's library alone, and are packed by whatever their authors
use: they may have folders, comments and fields that PyTorch never writes.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from beam_inference.errors import ModelContractError

UNPACKED_LIMIT = 1 << 28
"""Bytes into which the compressed members of an archive may unpack, all together.

PyTorch compresses nothing but source code. Packages, which may be compressed as a whole, unpack
into this or into MOST_RATIO times their own size.
"""

MOST_RATIO = 16
"""How many times its own size a large package may unpack into. Weights hardly become smaller."""

_MOST_MEMBERS = 1 << 16
_MOST_FOLDERS = 32
_LONGEST_NAME = 1024
"""Bounds of a package's names: Python's library makes a list of all folders above each."""

ZIP_ERRORS = (
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
"""What Python's library raises where an archive, or a member of one, is damaged."""

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_LEAST_HEADER = 30
"""Bytes before each member's content, but for its name and fields."""

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
    except (BrokenArchive, *ZIP_ERRORS) as error:
        raise ModelContractError(
            f"cannot load the {kind} {path}: it is damaged, or no archive as PyTorch writes them: "
            f"{error}. Save or copy it again."
        ) from None


@contextmanager
def open_packed(path: Path) -> Iterator[zipfile.Path]:
    """Open a zip file of any packer, and check what its directory says.

    The checksum of a member is compared when the member is read.

    Args:
        path: of the file.

    Returns:
        The folder that is packed.

    Raises:
        ModelContractError: it is no zip file, damaged, encrypted, or unpacks into too much.
    """
    if not path.is_file():  # nor a link to a device, which has no end
        raise ModelContractError(f"{path} is no zip file, but a pipe or the like, or absent")
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, *ZIP_ERRORS) as error:
        raise ModelContractError(f"{path} is no zip file: {error}") from None
    with archive:
        try:
            _check_packed(archive, path.stat().st_size)
        except BrokenArchive as error:
            raise ModelContractError(
                f"the zip file {path} is not read: {error}. Pack it again, or unpack it yourself "
                "and name the folder."
            ) from None
        yield zipfile.Path(archive)


def _check_packed(archive: zipfile.ZipFile, size: int) -> None:
    members = archive.infolist()
    if len(members) > _MOST_MEMBERS:
        raise BrokenArchive(f"it has {len(members):,} members; at most {_MOST_MEMBERS:,} are read")
    for member in members:
        name = member.orig_filename
        _check_member(member, name.removesuffix("/") if member.file_size == 0 else name)
        if len(name) > _LONGEST_NAME or name.count("/") > _MOST_FOLDERS:
            raise BrokenArchive(f"the name of its member {name!a:.100} is too long or too deep")
    if len({member.orig_filename for member in members}) < len(members):
        raise BrokenArchive("two of its members have one name")
    _check_places(archive)
    _check_unpacked(members, max(UNPACKED_LIMIT, MOST_RATIO * size))


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
        _check_member(member, member.orig_filename)
        if not _extra_fields(member.extra) <= _EXTRA_FIELDS:
            raise BrokenArchive(
                f"its member {member.filename} has fields that PyTorch never writes"
            )
    _check_places(archive)
    _check_unpacked(members, UNPACKED_LIMIT)


def _check_places(archive: zipfile.ZipFile) -> None:
    """Check that each member ends before the next begins, and the last before the directory."""
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    starts = [*(member.header_offset for member in members[1:]), archive.start_dir]
    for member, next_start in zip(members, starts, strict=True):
        if member.header_offset < 0 or member.header_offset + _held_bytes(member) > next_start:
            raise BrokenArchive(f"its members overlap: {member.filename} and what follows it")


def _held_bytes(member: zipfile.ZipInfo) -> int:
    """Bytes that a member takes at least; its header there may have more fields."""
    return _LEAST_HEADER + len(member.orig_filename) + member.compress_size


def _check_unpacked(members: Sequence[zipfile.ZipInfo], limit: int) -> None:
    unpacked = sum(
        member.file_size for member in members if member.compress_type != zipfile.ZIP_STORED
    )
    if unpacked > limit:
        raise BrokenArchive(f"it unpacks into {unpacked:,} bytes; at most {limit:,} are unpacked")


def _check_member(member: zipfile.ZipInfo, name: str) -> None:
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or ".." in parts or "" in parts:
        raise BrokenArchive(f"the name of its member {name!a:.100} is not a plain path")
    if member.flag_bits & _ENCRYPTED:
        raise BrokenArchive(f"its member {name} is encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BrokenArchive(f"its member {name} is compressed otherwise than by deflate")
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        raise BrokenArchive(f"the sizes of its member {name} contradict each other")


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
