"""Holes of an object: zeros that lie inside it, as a whole look at its volume has found them.

An object is all that is not background. Background is what is zero in every channel and reaches the
border of the volume over such voxels, face by face; so whether a zero belongs to it cannot be seen
in a part of the volume. The zeros that do not are kept in a folder::

    index.json              the volume's box, and the pieces that hold holes
    000000000012.bits       which voxels of the piece's box are holes
"""

from __future__ import annotations

import hashlib
import math
import zlib
from functools import lru_cache
from itertools import product
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from beam_inference.config.fields import Frozen, Point, Shape, describe_fault
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError, PermanentReadError, StalledReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import add, ceil_div, triple
from beam_inference.volumes.kvstores import open_kvstore, read_file
from beam_inference.volumes.volume import read_error

INDEX = "index.json"
_KEPT_PIECES = 4
"""Pieces that a process keeps, of a bit for each voxel."""
_MOST_VOXELS = 2**32
"""Voxels of the holes of a piece, at most, so that damaged files cannot ask for any memory."""


class Piece(Frozen):
    """The holes in one piece of a volume.

    Attributes:
        start, stop: the box of them, ZYX.
        sha256: hash of what :func:`pack_bits` makes of it.
    """

    start: Point
    stop: Point
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @property
    def box(self) -> BoundingBox:
        """The box."""
        return BoundingBox(self.start, self.stop)


class HolesIndex(Frozen):
    """What is known of the holes of a volume.

    Attributes:
        start, stop: of the volume, ZYX.
        piece_shape: voxels of a piece, ZYX; the last ones on each axis may be smaller.
        pieces: those that hold holes, by their numbers in ZYX order.
    """

    start: Point
    stop: Point
    piece_shape: Shape
    pieces: dict[int, Piece]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(a >= b for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError("the volume has no voxels")
        grid = self.grid
        for number, piece in self.pieces.items():
            if not 0 <= number < grid.count:
                raise ValueError(f"there is no piece {number}")
            is_empty = any(a >= b for a, b in zip(piece.start, piece.stop, strict=True))
            if is_empty or not grid.core_box(number).contains(piece.box):
                raise ValueError(f"the holes of piece {number} lie elsewhere")
            if piece.box.size > _MOST_VOXELS:
                raise ValueError(f"the holes of piece {number} have more voxels than a piece")
        return self

    @property
    def grid(self) -> ChunkGrid:
        """The pieces of the volume."""
        return ChunkGrid(BoundingBox(self.start, self.stop), self.piece_shape)

    def pieces_in(self, box: BoundingBox) -> list[int]:
        """Numbers of the pieces with holes in a box inside the volume, perhaps."""
        grid = self.grid
        ends = zip(box.start, box.stop, self.start, self.piece_shape, strict=True)
        ranges = [range((a - start) // n, (b - 1 - start) // n + 1) for a, b, start, n in ends]
        if math.prod(map(len, ranges)) > len(self.pieces):
            return sorted(
                number
                for number in self.pieces
                if all(at in some for at, some in zip(grid.position(number), ranges, strict=True))
            )
        numbers = map(grid.index, product(*ranges))
        return [number for number in numbers if number in self.pieces]


def holes_url(levels: str) -> str:
    """URL of the folder of holes beside a file of levels."""
    return f"{levels}.holes"


def piece_name(number: int) -> str:
    """Name of the file of a piece."""
    return f"{number:012d}.bits"


def pack_bits(holes: NDArray[np.bool_]) -> bytes:
    """Booleans (Z, Y, X) as bits; each section begins with a byte."""
    return np.packbits(holes.reshape(len(holes), -1), axis=1).tobytes()


def _unpack_bits(bits: bytes, box: BoundingBox, part: BoundingBox) -> NDArray[np.bool_]:
    """The booleans of a part of a box, of what :func:`pack_bits` makes of those of the box."""
    depth, height, width = box.shape
    sections = np.frombuffer(bits, np.uint8).reshape(depth, -1)
    z, y, x = part.slices_in(box)
    flat = np.unpackbits(sections[z], axis=1, count=height * width)
    return flat.reshape(-1, height, width)[:, y, x].astype(bool)


class Holes:
    """The holes of an object, each piece read when it is needed, and some of them kept.

    Args:
        url: of their folder.
        storage: how it is reached.
        index: of the pieces.
    """

    def __init__(self, url: str, storage: Storage, index: HolesIndex) -> None:
        self.url = url
        self._index = index
        self._store = open_kvstore(url, storage)
        self._bits = lru_cache(_KEPT_PIECES)(self._read_bits)

    @property
    def bounds(self) -> BoundingBox:
        """The box of the volume whose holes these are."""
        return BoundingBox(self._index.start, self._index.stop)

    def fill(self, inside: NDArray[np.bool_], box: BoundingBox, timeout: float) -> None:
        """Mark the holes in a box.

        Args:
            inside: what is not zero there (Z, Y, X), changed in place.
            box: where that lies in the volume.
            timeout: seconds after which a read is given up.

        Raises:
            TransientReadError, WorkerFault: a piece cannot be read.
            PermanentReadError: a piece is damaged, or a hole is not zero: these are holes of
                another volume.
        """
        for number in self._index.pieces_in(box):
            piece = self._index.pieces[number].box
            part = piece.intersection(box)
            if not part.size:
                continue
            holes = _unpack_bits(self._bits(number, timeout), piece, part)
            there = inside[part.slices_in(box)]
            if (holes & there).any():
                raise PermanentReadError(
                    f"voxels in {part} (z, y, x) are holes by {self.url}, and are not zero: it is "
                    "of another volume, or the volume was changed since. Make it again: "
                    "beam-inference levels INPUT --object --to FILE --overwrite"
                )
            there |= holes

    def _read_bits(self, number: int, timeout: float) -> bytes:
        """The bits of a piece."""
        name = piece_name(number)
        piece = self._index.pieces[number]
        try:
            result = self._store.read(name).result(timeout=timeout)
        except TimeoutError:
            raise StalledReadError(
                f"cannot read {self.url}/{name}: it is not there after {timeout:g} s"
            ) from None
        except (ValueError, OSError) as error:
            raise read_error(error, f"{self.url}/{name}") from error
        depth, height, width = piece.box.shape
        length = depth * ceil_div(height * width, 8)
        bits = None if result.state != "value" else _decompress(bytes(result.value), length)
        if bits is None or hashlib.sha256(bits).hexdigest() != piece.sha256:
            raise PermanentReadError(
                f"{self.url}/{name} is {'absent' if result.state != 'value' else 'damaged'}, so "
                f"which zeros in {piece.box} (z, y, x) lie inside the object is not known. Copy "
                "the folder again, or make it again: beam-inference levels INPUT --object --to "
                "FILE --overwrite"
            )
        return bits


def compress_bits(bits: bytes) -> bytes:
    """Bits of a piece as they are stored."""
    return zlib.compress(bits, 6)


def _decompress(content: bytes, length: int) -> bytes | None:
    """Bits of a piece, of a known length; None if these are none."""
    inflate = zlib.decompressobj()
    try:
        bits = inflate.decompress(content, length + 1)
    except zlib.error:
        return None
    return bits if len(bits) == length and inflate.eof else None


def open_holes(url: str, sha256: str, storage: Storage) -> Holes:
    """Open a folder of holes.

    Args:
        url: of the folder.
        sha256: hash of its index.
        storage: how it is reached.

    Raises:
        ConfigError: it is absent, or another one.
    """
    place = f"{url}/{INDEX}"
    try:
        content = read_file(place, storage)
    except VolumeError as error:
        raise ConfigError(
            f"model.normalize: {error}. It says which zeros lie inside the object, and belongs "
            "beside the levels file that the job was made by: copy it there, or make both again: "
            "beam-inference levels INPUT --object --to FILE --overwrite"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"model.normalize: {place} has the sha256 {found}, expected {sha256}: it is damaged, "
            "or of other levels, and the job would take other voxels for the inside of the "
            "object. Copy it again from beside its levels file, or make both again: "
            "beam-inference levels INPUT --object --to FILE --overwrite"
        )
    try:
        index = HolesIndex.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError(
            f"model.normalize: {place} is not a file that beam-inference levels has written: "
            f"{describe_fault(error)}"
        ) from None
    return Holes(url, storage, index)


def box_of_holes(holes: NDArray[np.bool_], box: BoundingBox) -> BoundingBox:
    """The smallest box that holds all holes, of which there are some, of those of a box."""
    ends = []
    for axis in range(3):
        others = tuple(each for each in range(3) if each != axis)
        there = np.flatnonzero(holes.any(axis=others))
        ends.append((int(there[0]), int(there[-1]) + 1))
    low, high = (triple(each) for each in zip(*ends, strict=True))
    return BoundingBox(add(box.start, low), add(box.start, high))
