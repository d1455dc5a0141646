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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from beam_inference.engines.protocol import Device, Forward
from beam_inference.geometry.zyx import Zyx


@dataclass(frozen=True, slots=True)
class Symmetry:
    """Flips of some axes, ZYX, after a transpose of y and x."""

    flips: tuple[bool, bool, bool]
    transpose: bool

    @property
    def flipped_axes(self) -> list[int]:
        """Numbers of the flipped axes, in arrays (N, C, Z, Y, X)."""
        return [2 + axis for axis, flipped in enumerate(self.flips) if flipped]

    def maps_back(self, offset: Zyx) -> Zyx:
        """The offset between two voxels of a patch whose images are ``offset`` apart."""
        z, y, x = (-n if flipped else n for n, flipped in zip(offset, self.flips, strict=True))
        return (z, x, y) if self.transpose else (z, y, x)


def symmetries(flipped_axes: str, *, transpose: bool) -> list[Symmetry]:
    """All combinations of some flips, and perhaps of a transpose of y and x; the identity first.

    Args:
        flipped_axes: letters of the axes, such as "yx".
        transpose: whether each combination comes transposed, too.
    """
    z, y, x = ((False, True) if axis in flipped_axes else (False,) for axis in "zyx")
    transposes = (False, True) if transpose else (False,)
    return [
        Symmetry((flip_z, flip_y, flip_x), is_transposed)
        for flip_z, is_transposed, flip_y, flip_x in product(z, transposes, y, x)
    ]


def augment(
    forward: Forward,
    device: Device,
    symmetries: Sequence[Symmetry],
    offsets: Sequence[Zyx | None],
) -> Forward:
    """A forward pass whose answers are means over symmetries.

    Args:
        forward: the network's own forward pass.
        device: where its arrays are.
        symmetries: of a patch; with transposes, batches must be as long in y as in x.
        offsets: of each output channel, ZYX in voxels; None for a channel that is about voxels
            themselves.
    """
    mappings = [(symmetry, _sources(symmetry, offsets)) for symmetry in symmetries]
    shares: dict[tuple[int, ...], Any] = {}

    def zeros(shape: tuple[int, ...]) -> Any:
        array = device.empty(shape)
        array[:] = 0
        return array

    def shares_of(shape: tuple[int, ...]) -> Any:
        """One over the number of symmetries that say something about each voxel."""
        if shape not in shares:
            counts = zeros(shape)
            for _, sources in mappings:
                _add(counts, counts * 0 + 1, sources)
            shares[shape] = 1 / counts
        return shares[shape]

    def augmented_forward(batch: Any) -> Any:
        total: Any = None
        for symmetry, sources in mappings:
            answer = _map_back(forward(_map(batch, symmetry, device)), symmetry, device)
            total = zeros(tuple(answer.shape)) if total is None else total
            _add(total, answer, sources)
        total *= shares_of((1, *total.shape[1:]))
        return total

    return augmented_forward


def _map(array: Any, symmetry: Symmetry, device: Device) -> Any:
    array = array.swapaxes(3, 4) if symmetry.transpose else array
    return device.flip(array, symmetry.flipped_axes)


def _map_back(array: Any, symmetry: Symmetry, device: Device) -> Any:
    array = device.flip(array, symmetry.flipped_axes)
    return array.swapaxes(3, 4) if symmetry.transpose else array


@dataclass(frozen=True, slots=True)
class _Source:
    """The channel of a mapped-back answer that contributes to a channel of the result.

    Attributes:
        channel: of the result.
        answering: the channel of the answer.
        offset: by which the answering channel's values move, ZYX.
    """

    channel: int
    answering: int
    offset: Zyx


def _sources(symmetry: Symmetry, offsets: Sequence[Zyx | None]) -> list[_Source]:
    """The source of each channel that has one."""
    sources = []
    mapped = [None if offset is None else symmetry.maps_back(offset) for offset in offsets]
    for channel, offset in enumerate(offsets):
        if offset is None:
            sources.append(_Source(channel, channel, (0, 0, 0)))
        elif offset in mapped:
            sources.append(_Source(channel, mapped.index(offset), (0, 0, 0)))
        elif (opposite := (-offset[0], -offset[1], -offset[2])) in mapped:
            sources.append(_Source(channel, mapped.index(opposite), offset))
    return sources


def _add(total: Any, answer: Any, sources: Sequence[_Source]) -> None:
    """Add to each channel the one that answers for it: at w its value at w + offset."""
    for source in sources:
        read = tuple(slice(max(0, o), min(0, o) or None) for o in source.offset)
        written = tuple(slice(max(0, -o), min(0, -o) or None) for o in source.offset)
        total[(slice(None), source.channel, *written)] += answer[
            (slice(None), source.answering, *read)
        ]
