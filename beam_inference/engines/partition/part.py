"""The part of a divided array that a member of a mesh holds, and how parts are cut otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from beam_inference.engines.partition.mesh import (
    Mesh,
    add_up,
    assemble,
    connect,
    fetch,
    plan_fetch,
)
from beam_inference.errors import ModelContractError
from beam_inference.geometry.shares import Box, Cuts, Division, is_empty, slices_in

SPATIAL = (2, 3, 4)
"""The axes of (N, C, Z, Y, X) that are divided."""


@dataclass(frozen=True)
class Part:
    """What one member holds of an array (N, C, Z, Y, X).

    Attributes:
        values: (N, C, *box of this member).
        division: who holds what.
        mesh: the members.
        cut_from: shape of the array that the whole one is a slice of, in the same memory; None
            where it has memory of its own.
    """

    values: Tensor
    division: Division
    mesh: Mesh
    cut_from: tuple[int, ...] | None = None

    @property
    def box(self) -> Box:
        """Where the values lie in the whole array."""
        return self.division.boxes[self.mesh.rank]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return (*self.values.shape[:2], *self.division.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the whole array would be, which decides what of it is copied when."""
        if self.cut_from is None:
            return self.values.is_contiguous()
        whole = torch.empty(self.cut_from, device="meta")
        return whole[tuple(slice(n) for n in self.shape)].is_contiguous()

    def with_values(self, values: Tensor) -> Part:
        """Other values in the same place."""
        return replace(self, values=values, cut_from=None)

    def cut(self, values: Tensor, division: Division | None = None) -> Part:
        """A slice of the whole array, whose values here are a slice of this member's."""
        return replace(
            self,
            values=values,
            division=division or self.division,
            cut_from=self.cut_from or self.shape,
        )


def gather_box(part: Part, needs: Sequence[Box], fill: float = 0) -> Tensor:
    """What this member needs of the whole array; ``fill`` where that lies beyond it.

    Args:
        part: what each has.
        needs: what each member needs; all members must give the same list.
        fill: stands for what lies beyond the array.
    """
    plan = plan_fetch(part.mesh, part.division, needs)
    box = needs[part.mesh.rank]
    pieces = fetch(plan, part.values)
    if is_empty(box):
        return connect_empty(pieces[0].values, [max(0, b - a) for a, b in box])
    return assemble(pieces, box, fill)


def connect_empty(values: Tensor, shape: Sequence[int], channels: int | None = None) -> Tensor:
    """An empty tensor through which gradients pass back."""
    empty = values.new_zeros((values.shape[0], channels or values.shape[1], *shape))
    return connect(empty, values)


def divide_alike(part: Part, division: Division, *, broadcasts: bool = False) -> Tensor:
    """The values of a part for another division of an array of its extents.

    Args:
        part: what each has.
        division: who is to hold what.
        broadcasts: whether the array may have one voxel along an axis, which stands for all.

    Raises:
        ModelContractError: the array has other extents.
    """
    if part.division == division:
        return part.values
    extents = list(zip(part.division.shape, division.shape, strict=True))
    if any(own != other and not (broadcasts and own == 1) for own, other in extents):
        raise ModelContractError(
            f"an array of {list(part.division.shape)} voxels does not fit one of "
            f"{list(division.shape)}"
        )
    needs = [
        tuple(
            interval if own == other else (0, 1)
            for interval, (own, other) in zip(box, extents, strict=True)
        )
        for box in division.boxes
    ]
    return gather_box(part, needs)


def own_values(whole: Tensor, like: Part) -> Tensor:
    """What a member uses of a tensor that all members have, beside a part.

    Raises:
        ModelContractError: it is neither of the whole array's extent nor of one voxel, somewhere.
    """
    axes = min(whole.ndim, len(SPATIAL))
    if not axes:
        return whole
    index: list[slice] = []
    box = like.box[-axes:]
    shape = like.division.shape[-axes:]
    for n, length, (start, stop) in zip(whole.shape[-axes:], shape, box, strict=True):
        if n not in (1, length):
            raise ModelContractError(
                f"an array of {list(whole.shape)} does not fit one of {list(like.shape)}"
            )
        index.append(slice(None) if n == 1 else slice(start, stop))
    return whole[tuple([slice(None)] * (whole.ndim - axes) + index)]


def crop(part: Part, intervals: Box) -> Part:
    """The part of a box of the whole array; nothing moves between members."""
    division = part.division.crop(intervals)
    kept = tuple(
        (min(max(a, start), stop), min(max(b, start), stop))
        for (a, b), (start, stop) in zip(part.box, intervals, strict=True)
    )
    return part.cut(part.values[slices_in(kept, part.box)], division)


def pad(part: Part, margins: Sequence[tuple[int, int]], mode: str, value: float) -> Part:
    """Pad the whole array; only members at its faces have anything to do.

    Args:
        part: what each has.
        margins: voxels in front and behind, per axis; below 0 they are cut off.
        mode: "constant", "replicate" or "reflect".
        value: for "constant".

    Raises:
        ModelContractError: another mode, or a share too thin to be extended so.
    """
    if mode not in ("constant", "replicate", "reflect"):
        raise ModelContractError(f"padding in mode {mode}")
    shape = part.division.shape
    cut = tuple(
        (max(0, -before), n + min(0, after))
        for (before, after), n in zip(margins, shape, strict=True)
    )
    part = crop(part, cut)
    grown = [(max(0, before), max(0, after)) for before, after in margins]
    cuts: list[Cuts] = []
    local: list[int] = []
    for place, old, (before, after) in zip(part.mesh.place, part.division.cuts, grown, strict=True):
        cuts.append((0, *(c + before for c in old[1:-1]), old[-1] + before + after))
        # All members judge all shares: one that refused alone would leave the others waiting.
        thinnest = min(b - a for a, b in pairwise(old))
        if mode == "reflect" and thinnest <= max(before, after):
            raise ModelContractError("a share thinner than what is reflected")
        if mode != "constant" and thinnest == 0:
            raise ModelContractError("a share without voxels beside a face that is extended")
        # By number: where shares have no voxels, several members begin or end at a face.
        local = [before * (place == 0), after * (place == len(old) - 2), *local]
    values = functional.pad(part.values, local, mode, value if mode == "constant" else None)
    return Part(values, Division(tuple(cuts)), part.mesh)


def mean(part: Part) -> Tensor:
    """The mean over space, (N, C, 1, 1, 1), which all members have."""
    dtype = part.values.dtype
    # A sum of many half-precision numbers is beyond their range.
    single = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = add_up(part.values.sum(SPATIAL, keepdim=True, dtype=single), part.mesh)
    return (total / math.prod(part.division.shape)).to(dtype)


def align(argument: object, part: Part) -> object:
    """An argument as the function of one member's values takes it, beside a part."""
    if isinstance(argument, Part):
        return divide_alike(argument, part.division, broadcasts=True)
    if isinstance(argument, Tensor):
        return own_values(argument, part)
    return argument


def join(parts: Sequence[Part], axis: int) -> Part:
    """Concatenate parts along the batch or the channels."""
    first = parts[0]
    return first.with_values(torch.cat([divide_alike(p, first.division) for p in parts], axis))
