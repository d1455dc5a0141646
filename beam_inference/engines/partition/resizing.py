"""Interpolation of divided arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from beam_inference.engines.partition.part import Part, connect_empty, gather_box
from beam_inference.errors import ModelContractError
from beam_inference.geometry.shares import Division, Interval, box_shape, is_empty, scaled_cuts

MODES = ("nearest", "nearest-exact", "trilinear")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one axis is interpolated.

    Attributes:
        length: of the input.
        out_length: of the output.
        scale_factor: by which the axis becomes longer, as PyTorch is told; None where it is told
            the output's length.
        mode: one of MODES.
        align_corners: whether the first and last voxels' centres stay, as PyTorch means it.
    """

    length: int
    out_length: int
    scale_factor: float | None
    mode: str
    align_corners: bool

    @property
    def step(self) -> float:
        """Inputs from one output to the next."""
        if self.align_corners:
            return (self.length - 1) / (self.out_length - 1) if self.out_length > 1 else 0.0
        if self.scale_factor is None:
            return self.length / self.out_length
        return 1 / self.scale_factor

    @property
    def factor(self) -> int | None:
        """The whole number by which the axis becomes longer, if it is one."""
        factor = self.out_length // self.length
        is_whole = factor * self.length == self.out_length and self.step == 1 / factor
        return factor if is_whole and not self.align_corners else None

    def places(self, outputs: Interval) -> tuple[list[int], list[int], list[float]]:
        """For each output the two inputs that it lies between, and how far towards the second."""
        if self.mode != "trilinear":
            nearest = _list_nearest(self)[slice(*outputs)]
            return nearest, nearest, [0.0] * len(nearest)
        first = []
        second = []
        weights = []
        for o in range(*outputs):
            place = o * self.step if self.align_corners else (o + 0.5) * self.step - 0.5
            place = max(place, 0.0)
            low = min(int(place), self.length - 1)
            first.append(low)
            second.append(min(low + 1, self.length - 1))
            weights.append(place - low)
        return first, second, weights

    def sees(self, outputs: Interval) -> Interval:
        """The inputs that some outputs are made of."""
        if outputs[1] <= outputs[0]:
            return 0, 0
        first, *_ = self.places((outputs[0], outputs[0] + 1))
        _, second, _ = self.places((outputs[1] - 1, outputs[1]))
        return first[0], second[0] + 1


def samplings(
    part: Part,
    size: Sequence[int] | None,
    factors: Sequence[float] | None,
    mode: str,
    align_corners: bool,
) -> list[Sampling]:
    """How each axis is interpolated, by the arguments of ``interpolate``.

    Raises:
        ModelContractError: a mode that cannot be divided.
    """
    if mode not in MODES:
        raise ModelContractError(f"interpolation in mode {mode}")
    found = []
    for axis, length in enumerate(part.division.shape):
        out = size[axis] if size is not None else math.floor(length * (factors or ())[axis])
        factor = None if factors is None else float(factors[axis])
        found.append(Sampling(length, out, factor, mode, align_corners))
    return found


@lru_cache
def _list_nearest(sampling: Sampling) -> list[int]:
    """The input that each output is a copy of.

    PyTorch itself is asked: it rounds in single precision, so that where an output lies between two
    inputs it may take another one than the formula does.
    """
    numbers = torch.arange(sampling.length, dtype=torch.float32)
    nearest = functional.interpolate(
        numbers.view(1, 1, 1, 1, -1),
        size=None if sampling.scale_factor else (1, 1, sampling.out_length),
        scale_factor=(1.0, 1.0, sampling.scale_factor) if sampling.scale_factor else None,
        mode=sampling.mode,
    )
    return [int(each) for each in nearest.flatten()]


def resize(part: Part, axes: Sequence[Sampling]) -> Part:
    """Interpolate a divided array."""
    division = Division(
        tuple(
            scaled_cuts(cuts, each.out_length)
            for cuts, each in zip(part.division.cuts, axes, strict=True)
        )
    )
    result = replace(part, division=division)
    needs = [
        tuple(each.sees(interval) for each, interval in zip(axes, box, strict=True))
        for box in division.boxes
    ]
    values = gather_box(part, needs)
    own = division.boxes[part.mesh.rank]
    if is_empty(own):
        return result.with_values(connect_empty(values, box_shape(own)))
    starts = [start for start, _ in needs[part.mesh.rank]]
    factors = [each.factor for each in axes]
    if all(factors):
        whole = functional.interpolate(
            values, scale_factor=[float(f or 1) for f in factors], mode=axes[0].mode
        )
        index = [
            slice(a - s * (f or 1), b - s * (f or 1))
            for (a, b), s, f in zip(own, starts, factors, strict=True)
        ]
        return result.with_values(whole[(slice(None), slice(None), *index)].contiguous())
    for axis, (each, interval, start) in enumerate(zip(axes, own, starts, strict=True)):
        values = _along(values, axis + 2, each, interval, start)
    return result.with_values(values)


def _along(values: Tensor, axis: int, sampling: Sampling, outputs: Interval, start: int) -> Tensor:
    """Interpolate along one axis, of which the values begin at ``start``."""
    first, second, weights = sampling.places(outputs)
    low = values.index_select(axis, torch.tensor(first, device=values.device) - start)
    if sampling.mode != "trilinear":
        return low
    high = values.index_select(axis, torch.tensor(second, device=values.device) - start)
    shape = [-1 if a == axis else 1 for a in range(values.ndim)]
    share = torch.tensor(weights, device=values.device, dtype=values.dtype).view(shape)
    return torch.lerp(low, high, share.expand_as(low))
