"""Which part of an array each member of a mesh holds, and what it needs to compute its own.

An array's axis of length n is cut at c_0 = 0 <= c_1 <= ... <= c_m = n; member i holds [c_i, c_i+1).
Every member knows all cuts, so each can tell without asking what it must send to whom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from beam_inference.geometry.zyx import ceil_div

Cuts = tuple[int, ...]
"""Where one axis is cut: the first is 0, the last the length, none is below the one before."""

Interval = tuple[int, int]
"""Half-open, on one axis."""

Box = tuple[Interval, ...]
"""Half-open, an interval for each axis."""


def even_cuts(length: int, parts: int) -> Cuts:
    """Cuts into parts that differ by one voxel at most."""
    return tuple(length * part // parts for part in range(parts + 1))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None where that is empty."""
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return None if is_empty(common) else common


def is_empty(box: Box) -> bool:
    """Whether a box has no voxel."""
    return any(stop <= start for start, stop in box)


def slices_in(box: Box, frame: Box) -> tuple[slice, ...]:
    """Index of a box in an array (N, C, *frame) whose voxels are those of ``frame``."""
    inside = (slice(a - c, b - c) for (a, b), (c, _) in zip(box, frame, strict=True))
    return (slice(None), slice(None), *inside)


def box_shape(box: Box) -> tuple[int, ...]:
    """Extent of a box on each axis."""
    return tuple(stop - start for start, stop in box)


@dataclass(frozen=True, slots=True)
class Division:
    """How an array is divided: the cuts of each axis. Members are numbered in C order."""

    cuts: tuple[Cuts, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of the whole array."""
        return tuple(cuts[-1] for cuts in self.cuts)

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of parts on each axis."""
        return tuple(len(cuts) - 1 for cuts in self.cuts)

    @property
    def boxes(self) -> list[Box]:
        """What each member holds."""
        return list(product(*(tuple(pairwise(cuts)) for cuts in self.cuts)))

    def crop(self, intervals: Box) -> Division:
        """How a part of the array is divided if nothing moves between members."""
        return Division(
            tuple(
                tuple(min(max(c, start), stop) - start for c in cuts)
                for cuts, (start, stop) in zip(self.cuts, intervals, strict=True)
            )
        )


def divide(shape: Sequence[int], parts: Sequence[int]) -> Division:
    """Divide an array as evenly as possible."""
    return Division(tuple(even_cuts(n, m) for n, m in zip(shape, parts, strict=True)))


def _moved(cuts: Cuts, length: int, places: Sequence[int]) -> Cuts:
    """Inner cuts at given places, kept in order and in the array."""
    inner = [min(max(place, 0), length) for place in places]
    return (0, *inner, length) if len(cuts) > 1 else cuts


@dataclass(frozen=True, slots=True)
class Window:
    """What a convolution or a pool sees on one axis.

    Output o sees the inputs o * stride - before + dilation * k for 0 <= k < kernel.

    Attributes:
        kernel: number of inputs that one output sees.
        stride: inputs from one output to the next.
        dilation: inputs from one that an output sees to the next.
        before: padding in front.
        after: padding behind.
        ceil: whether a last window that hangs over the end counts, as in ``ceil_mode``.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """From the first input that an output sees to the last."""
        return self.dilation * (self.kernel - 1)

    def out_length(self, length: int) -> int:
        """Number of outputs; 0 or less where the input is too short."""
        room = length + self.before + self.after - self.reach - 1
        if not self.ceil:
            return room // self.stride + 1
        count = ceil_div(room, self.stride) + 1
        # the last window must begin in the input or in the padding in front
        return count - ((count - 1) * self.stride >= length + self.before)

    def out_cuts(self, cuts: Cuts) -> Cuts:
        """Where the output is cut: an output goes to the member that holds its window's centre."""
        places = [
            ceil_div(2 * (c + self.before) - self.reach - (self.stride - 1), 2 * self.stride)
            for c in cuts[1:-1]
        ]
        return _moved(cuts, self.out_length(cuts[-1]), places)

    def sees(self, outputs: Interval) -> Interval:
        """The inputs that some outputs see, also beyond the array; empty for no outputs."""
        start = outputs[0] * self.stride - self.before
        if outputs[1] <= outputs[0]:
            return start, start
        return start, (outputs[1] - 1) * self.stride - self.before + self.reach + 1

    def inner(self, outputs: Interval, held: Interval, length: int) -> Interval:
        """The outputs among some that see nothing beyond what is held, save padding."""
        first, last = outputs
        if held[0] > 0:
            first = max(first, ceil_div(held[0] + self.before, self.stride))
        if held[1] < length:
            last = min(last, (held[1] - 1 - self.reach + self.before) // self.stride + 1)
        return min(first, outputs[1]), max(last, min(first, outputs[1]))


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """What a transposed convolution does on one axis.

    Input i gives to the outputs i * stride - padding + dilation * k for 0 <= k < kernel.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    further: int = 0

    @property
    def reach(self) -> int:
        """From the first output that an input gives to, to the last."""
        return self.dilation * (self.kernel - 1)

    def out_length(self, length: int) -> int:
        """Number of outputs."""
        return (length - 1) * self.stride - 2 * self.padding + self.reach + self.further + 1

    def out_cuts(self, cuts: Cuts) -> Cuts:
        """Where the output is cut: between the centres of what two inputs give to."""
        places = [
            c * self.stride - self.padding + max(0, self.reach - self.stride + 1) // 2
            for c in cuts[1:-1]
        ]
        return _moved(cuts, self.out_length(cuts[-1]), places)

    def sees(self, outputs: Interval, length: int) -> Interval:
        """The inputs, all in the array, that give to some outputs; at least one, if there is.

        The first gives to none behind the first output: where strides leave gaps, one before it.
        """
        if outputs[1] <= outputs[0]:
            return 0, 0
        place = outputs[0] + self.padding
        first = min(ceil_div(place - self.reach, self.stride), place // self.stride)
        last = (outputs[1] - 1 + self.padding) // self.stride
        first = min(max(first, 0), length - 1)
        return first, max(min(last + 1, length), first + 1)


def scaled_cuts(cuts: Cuts, length: int) -> Cuts:
    """Cuts of an axis that is resized to another length."""
    return _moved(cuts, length, [math.floor(c * length / cuts[-1] + 0.5) for c in cuts[1:-1]])
