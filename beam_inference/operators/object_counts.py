"""Finding what lies inside an object, in stages: its holes, however large the volume.

Background is labelled piece by piece; pieces that touch are joined by their faces, in one process
that holds a few numbers for each part of background that reaches a face, and no voxels but those of
a layer's faces. What leads nowhere to the border of the volume is a hole.
:mod:`beam_inference.volumes.holes` reads what is written here.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import VolumeError
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.operators.background import Joints, find_holes
from beam_inference.operators.level_counts import (
    OUTSIDE_KEY,
    CountValues,
    piece_key,
)
from beam_inference.volumes.holes import (
    box_of_holes,
    compress_bits,
    holes_url,
    pack_bits,
    piece_name,
)
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    open_kvstore,
    refuse_link,
    retry_request,
)
from beam_inference.volumes.object_volume import find_nonzero


@dataclass(frozen=True)
class FindOutside:
    """Second stage, one chunk of work: find which background reaches the border of the volume.

    Attributes:
        counting: the first stage, which has found the background of each chunk.
    """

    counting: CountValues
    name: str = "outside"
    count: int = 1

    def make_worker(self) -> Callable[[int], None]:
        """See :class:`beam_inference.job.stage_job.ChunkStage`."""
        counting = self.counting

        def do(_: int) -> None:
            joints = Joints()
            faces = LayerOfFaces(counting.chunks, joints)
            sizes = []
            with_holes = np.zeros(counting.count, bool)
            for index in range(counting.count):
                found = counting.read_background(index)
                faces.add(index, joints.add_piece(found))
                sizes.append(found.sizes)
                with_holes[index] = found.inner > 0
            outside = joints.are_outside()
            starts = np.cumsum([0, *map(len, sizes)])
            for index, (start, stop) in enumerate(pairwise(starts.tolist())):
                with_holes[index] |= not outside[start:stop].all()
            counting.write(
                OUTSIDE_KEY,
                outside=outside,
                starts=starts,
                with_holes=with_holes,
                number=np.concatenate(sizes)[outside].sum(),
            )

        return do


class LayerOfFaces:
    """Faces that later pieces touch; of about one layer of pieces, compressed.

    Args:
        grid: the pieces.
        joints: is told which parts touch.
    """

    def __init__(self, grid: ChunkGrid, joints: Joints) -> None:
        self._grid = grid
        self._joints = joints
        self._waiting: dict[tuple[int, int], bytes] = {}

    def add(self, index: int, faces: Sequence[NDArray[np.int64]]) -> None:
        """Add a piece, the next one; see :class:`.background.Background` for its faces."""
        position = self._grid.position(index)
        for axis in range(3):
            first = faces[2 * axis]
            last = faces[2 * axis + 1]
            if position[axis] == 0:
                self._joints.join_border(first)
            else:
                content = zlib.decompress(self._waiting.pop((axis, index)))
                self._joints.join(first, np.frombuffer(content, np.int64).reshape(first.shape))
            if position[axis] == self._grid.shape[axis] - 1:
                self._joints.join_border(last)
            else:
                step = [int(each == axis) for each in range(3)]
                later = self._grid.index(np.add(position, step).tolist())
                self._waiting[axis, later] = zlib.compress(last.tobytes(), 1)


@dataclass(frozen=True)
class MarkHoles:
    """Third stage: write the holes of each chunk that has any.

    Attributes:
        counting: the first stage.
        levels: URL of the levels file, beside which they are written.
    """

    counting: CountValues
    levels: str
    name: str = "holes"

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.counting.count

    def make_worker(self) -> Callable[[int], None]:
        """See :class:`beam_inference.job.stage_job.ChunkStage`."""
        counting = self.counting
        volume = counting.volume()
        known = counting.read(OUTSIDE_KEY)

        def do(index: int) -> None:
            if not known["with_holes"][index]:
                return
            box = counting.chunks.core_box(index)
            start, stop = known["starts"][index : index + 2]
            try:
                holes = find_holes(find_nonzero(volume.read(box)), known["outside"][start:stop])
            except ValueError as error:
                raise _changed(counting, str(error)) from None
            if not holes.any():
                raise _changed(counting, "no holes, where there were some")
            there = box_of_holes(holes, box)
            bits = pack_bits(holes[there.slices_in(box)])
            self._write(piece_name(index), compress_bits(bits))
            digest = np.frombuffer(hashlib.sha256(bits).digest(), np.uint8)
            corners = np.array([there.start, there.stop], np.int64)
            counting.write(piece_key(index), corners=corners, sha256=digest)

        return do

    def _write(self, name: str, content: bytes) -> None:
        url = holes_url(self.levels)
        refuse_link(url)
        store = open_kvstore(url, self.counting.storage)
        retry_request(
            "write",
            f"{url}/{name}",
            lambda: store.write(name, content).result(timeout=PATIENCE_SECONDS),
        )


def _changed(counting: CountValues, found: str) -> VolumeError:
    return VolumeError(
        f"{counting.path} was changed while it was looked at: a second look finds {found}. Count "
        "again: beam-inference levels INPUT --object --to FILE --overwrite"
    )
