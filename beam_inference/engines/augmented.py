"""Test-time augmentation: a network's mean answer over flips and transposes of its patch.

A symmetry g maps voxel u of a patch to g(u). The network is given the mapped patch, and its answer
is mapped back. An affinity channel says whether voxel w and w + o belong together, o being its
offset. What it says of a mapped patch is, mapped back, about the pair u and u + g⁻¹(o): the pair of
the channel with that offset; or, where that is the negative of a channel's offset o', the pair that
this channel keeps at w = u - o', so its values move by o', and a margin as wide as o' is left
without one. A channel that no other answers for under g goes without: each voxel's mean is over the
symmetries that say something about it, which always include the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any

from numpy.typing import NDArray

from beam_inference.engines.protocol import AS_COMPUTED, Encoding, Predictor
from beam_inference.geometry.zyx import Zyx


@dataclass(frozen=True, slots=True)
class Symmetry:
    """Flips of some axes, ZYX, after a transpose of y and x."""

    flips: tuple[bool, bool, bool]
    transpose: bool

    @property
    def flipped_axes(self) -> list[int]:
        """Of arrays (N, C, Z, Y, X)."""
        return [2 + axis for axis, flipped in enumerate(self.flips) if flipped]

    def maps_back(self, offset: Zyx) -> Zyx:
        """The offset between two voxels of a patch whose images are ``offset`` apart."""
        z, y, x = (-n if flipped else n for n, flipped in zip(offset, self.flips, strict=True))
        return (z, x, y) if self.transpose else (z, y, x)


def symmetries(kind: str) -> list[Symmetry]:
    """The eight of the plane ("xy"), or with flips of z sixteen ("xyz"); the identity first."""
    z_flips = (False, True) if kind == "xyz" else (False,)
    return [
        Symmetry((z, y, x), transpose)
        for z, transpose, y, x in product(z_flips, (False, True), (False, True), (False, True))
    ]


class AugmentedPredictor:
    """A predictor whose predictions are means over symmetries; all else is the inner one's.

    ``offsets`` has each output channel's offset, ZYX in voxels, or None for one that is about
    voxels themselves.
    """

    def __init__(self, inner: Predictor, kind: str, offsets: Sequence[Zyx | None]) -> None:
        self._inner = inner
        self._symmetries = symmetries(kind)
        self._sources = [list(_sources(symmetry, offsets)) for symmetry in self._symmetries]
        self._shares: dict[tuple[int, ...], Any] = {}

    def predict(self, batch: Any) -> Any:
        """Predict (N, C_in, Z, Y, X) float32, Y and X alike: means (N, C_out, Z', Y', X')."""
        total: Any = None
        for symmetry, sources in zip(self._symmetries, self._sources, strict=True):
            answer = self._mapped_back(self._inner.predict(self._mapped(batch, symmetry)), symmetry)
            total = self._zeros(tuple(answer.shape)) if total is None else total
            _add(total, answer, sources)
        shape = (1, *total.shape[1:])
        if shape not in self._shares:
            counts = self._zeros(shape)
            for sources in self._sources:
                _add(counts, counts * 0 + 1, sources)
            self._shares[shape] = 1 / counts
        total *= self._shares[shape]
        return total

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        array = self._inner.empty(shape)
        array[:] = 0
        return array

    def _mapped(self, array: Any, symmetry: Symmetry) -> Any:
        array = array.swapaxes(3, 4) if symmetry.transpose else array
        return self._inner.flip(array, symmetry.flipped_axes)

    def _mapped_back(self, array: Any, symmetry: Symmetry) -> Any:
        array = self._inner.flip(array, symmetry.flipped_axes)
        return array.swapaxes(3, 4) if symmetry.transpose else array

    @property
    def on_host(self) -> bool:
        """The inner one's."""
        return self._inner.on_host

    def session(self) -> AbstractContextManager[object]:
        """The inner one's."""
        return self._inner.session()

    def upload(self, array: NDArray[Any]) -> Any:
        """The inner one's."""
        return self._inner.upload(array)

    def begin_upload(self, array: NDArray[Any]) -> Callable[[], Any]:
        """The inner one's."""
        return self._inner.begin_upload(array)

    def make_room(self) -> bool:
        """The inner one's."""
        return self._inner.make_room()

    def empty(self, shape: tuple[int, ...]) -> Any:
        """The inner one's."""
        return self._inner.empty(shape)

    def copy(self, array: Any) -> Any:
        """The inner one's."""
        return self._inner.copy(array)

    def flip(self, array: Any, axes: Sequence[int]) -> Any:
        """The inner one's."""
        return self._inner.flip(array, axes)

    def multiply(self, array: Any, by: Any, out: Any) -> None:
        """The inner one's."""
        self._inner.multiply(array, by, out)

    def download(self, array: Any, encoding: Encoding = AS_COMPUTED) -> Callable[[], NDArray[Any]]:
        """The inner one's."""
        return self._inner.download(array, encoding)

    def describe(self) -> dict[str, str]:
        """The inner one's."""
        return self._inner.describe()


def _sources(symmetry: Symmetry, offsets: Sequence[Zyx | None]) -> Iterator[tuple[int, int, Zyx]]:
    """For each channel that has one: itself, the channel that answers for it, and by how much its values move."""
    mapped = [None if offset is None else symmetry.maps_back(offset) for offset in offsets]
    for channel, offset in enumerate(offsets):
        if offset is None:
            yield channel, channel, (0, 0, 0)
        elif offset in mapped:
            yield channel, mapped.index(offset), (0, 0, 0)
        elif (opposite := (-offset[0], -offset[1], -offset[2])) in mapped:
            yield channel, mapped.index(opposite), offset


def _add(total: Any, answer: Any, sources: Sequence[tuple[int, int, Zyx]]) -> None:
    """Add to each channel the one that answers for it: at w its value at w + offset."""
    for channel, source, offset in sources:
        there = tuple(slice(max(0, o), min(0, o) or None) for o in offset)
        here = tuple(slice(max(0, -o), min(0, -o) or None) for o in offset)
        total[(slice(None), channel, *here)] += answer[(slice(None), source, *there)]
