"""Targets: what a network is to answer, computed from labels, and where that is known.

A target is unknown where a label is unlabelled or masked, and where it depends on voxels outside
of the patch. The loss leaves such voxels out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator
from scipy import ndimage

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Count, Label, Model, Point, Range, VoxelSize
from beam_inference.config.network import Channel
from beam_inference.geometry.zyx import Zyx
from beam_inference.training.symmetry import pair_slices


@dataclass(frozen=True)
class Target:
    """What a network is to answer.

    Attributes:
        values: float32 (channels, Z, Y, X); numbers of classes in one channel for ``classes``.
        known: where they count, of the same shape.
    """

    values: NDArray[np.float32]
    known: NDArray[np.bool_]


class _TargetConfig(Model):
    unlabelled: Label | None = Field(
        None, description="the label of voxels of which nothing is known"
    )

    def _known(self, labels: AnyArray, valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return valid if self.unlabelled is None else valid & (labels != self.unlabelled)


class Affinities(_TargetConfig):
    """Whether a voxel and another belong to the same object; label 0 belongs to none."""

    kind: Literal["affinities"] = "affinities"
    offsets: list[Point] = Field(
        [(-1, 0, 0), (0, -1, 0), (0, 0, -1)],
        min_length=1,
        description="for each channel, where the other voxel lies, ZYX in voxels",
    )

    @field_validator("offsets")
    @classmethod
    def _check(cls, offsets: list[Zyx]) -> list[Zyx]:
        if (0, 0, 0) in offsets or len(set(offsets)) < len(offsets):
            raise ValueError("each affinity needs an offset of its own, other than [0, 0, 0]")
        return offsets

    @property
    def channel_offsets(self) -> list[Zyx | None]:
        """The offset of each channel."""
        return list(self.offsets)

    def compute(self, labels: AnyArray, valid: NDArray[np.bool_]) -> Target:
        """Compute the target of labels (Z, Y, X) that count where ``valid``."""
        counts = self._known(labels, valid)
        values = np.zeros((len(self.offsets), *labels.shape), np.float32)
        known = np.zeros(values.shape, bool)
        for channel, offset in enumerate(self.offsets):
            if any(abs(n) >= extent for n, extent in zip(offset, labels.shape, strict=True)):
                continue
            here, there = pair_slices(offset)
            first = labels[here]
            values[channel][here] = (first == labels[there]) & (first != 0)
            known[channel][here] = counts[here] & counts[there]
        return Target(values, known)


class Boundaries(_TargetConfig):
    """Whether a voxel shares a face with one of another label."""

    kind: Literal["boundaries"] = "boundaries"

    @property
    def channel_offsets(self) -> list[Zyx | None]:
        """None for the one channel: it is about voxels themselves."""
        return [None]

    def compute(self, labels: AnyArray, valid: NDArray[np.bool_]) -> Target:
        """Compute the target of labels (Z, Y, X) that count where ``valid``."""
        counts = self._known(labels, valid)
        found = np.zeros(labels.shape, bool)
        is_certain = counts.copy()
        for axis, step in product(range(3), (1, -1)):
            z, y, x = (step if axis == k else 0 for k in range(3))
            here, there = pair_slices((z, y, x))
            other = np.zeros(labels.shape, bool)
            other[here] = counts[there]
            found[here] |= (labels[here] != labels[there]) & other[here]
            is_certain &= other
        return Target(found[None].astype(np.float32), (counts & (is_certain | found))[None])


class Distance(_TargetConfig):
    """tanh(d / scale_nm), d being how far a voxel of an object lies from its boundary; else 0."""

    kind: Literal["distance"] = "distance"
    voxel_size_nm: VoxelSize = Field(description="of the image, z, y, x")
    scale_nm: float = Field(gt=0, description="distance that is much: there the target is 0.76")

    @property
    def channel_offsets(self) -> list[Zyx | None]:
        """None for the one channel: it is about voxels themselves."""
        return [None]

    def compute(self, labels: AnyArray, valid: NDArray[np.bool_]) -> Target:
        """Compute the target of labels (Z, Y, X) that count where ``valid``.

        The distance is to the nearest voxel with another label beside it. It is known only where no
        nearer voxel may be such a one: at the patch's edge, and beside labels that do not count,
        nobody can tell.
        """
        edges = Boundaries(unlabelled=self.unlabelled).compute(labels, valid)
        counts = self._known(labels, valid)
        to_edge = _distance_to(edges.values[0] > 0, self.voxel_size_nm)
        to_unknown = _distance_to(~edges.known[0], self.voxel_size_nm)
        nearest = np.tanh(to_edge / self.scale_nm) * (labels != 0)
        known = counts & ((to_edge <= to_unknown) | (labels == 0))
        return Target(nearest[None].astype(np.float32), known[None])


def _distance_to(
    voxels: NDArray[np.bool_], voxel_size_nm: tuple[float, float, float]
) -> NDArray[np.float64]:
    if not voxels.any():
        return np.full(voxels.shape, np.inf)
    distances: NDArray[np.float64] = ndimage.distance_transform_edt(~voxels, sampling=voxel_size_nm)
    return distances


class Classes(_TargetConfig):
    """The label itself, as the number of a class: 0 to ``count - 1``; other labels are unknown."""

    kind: Literal["classes"] = "classes"
    count: Count = Field(description="number of classes, and of the network's channels")

    @property
    def channel_offsets(self) -> list[Zyx | None]:
        """None for each channel: they are about voxels themselves."""
        return [None] * self.count

    def compute(self, labels: AnyArray, valid: NDArray[np.bool_]) -> Target:
        """Compute the target of labels (Z, Y, X) that count where ``valid``."""
        known = self._known(labels, valid) & (labels >= 0) & (labels < self.count)
        return Target(np.where(known, labels, 0)[None].astype(np.float32), known[None])


_ROUNDED = 1e-5
"""How far beyond 0 or 1 a value may lie that was rounded."""


class Stored(Model):
    """What the labels' volume holds, channel by channel, such as affinities made elsewhere."""

    kind: Literal["stored"] = "stored"
    channels: list[Channel] = Field(min_length=1, description="what each channel says")
    value_range: Range | None = Field(
        None,
        description=(
            "[low, high] that the whole range of the volume's integers stands for, as "
            "output.value_range of a job; by default values are taken as they are"
        ),
    )

    @field_validator("value_range")
    @classmethod
    def _check_range(cls, value_range: Range | None) -> Range | None:
        if value_range is not None and value_range[0] >= value_range[1]:
            raise ValueError(f"{list(value_range)} must be [low, high] with low < high")
        return value_range

    @property
    def channel_offsets(self) -> list[Zyx | None]:
        """The offset of each channel that is an affinity; None for others."""
        return [channel.affinity for channel in self.channels]

    def compute(self, labels: AnyArray, valid: NDArray[np.bool_]) -> Target:
        """The labels (channels, Z, Y, X) themselves, known where ``valid``; 0 elsewhere.

        Raises:
            ValueError: values that are known do not lie between 0 and 1, or have no such range as
                ``value_range`` tells of.
        """
        known = np.broadcast_to(valid, labels.shape)
        with np.errstate(over="ignore"):  # infinite values are refused
            values = np.where(known, self._scale(labels), np.float32(0))
        found = (float(values.min()), float(values.max()))
        if not (found[0] >= -_ROUNDED and found[1] <= 1 + _ROUNDED):  # nor is NaN
            raise ValueError(self._explain_values(labels, found))
        return Target(values.clip(0, 1), known)

    def _scale(self, labels: AnyArray) -> NDArray[np.float32]:
        if self.value_range is None:
            return labels.astype(np.float32)
        if labels.dtype.kind not in "iu":
            raise ValueError(
                f"they are {labels.dtype}, and target.value_range tells what integers stand for: "
                "remove it"
            )
        low, high = self.value_range
        info = np.iinfo(labels.dtype)
        share = (labels.astype(np.float64) - info.min) / (float(info.max) - info.min)
        return (low + (high - low) * share).astype(np.float32)

    def _explain_values(self, labels: AnyArray, found: tuple[float, float]) -> str:
        text = f"values lie from {found[0]:g} to {found[1]:g}"
        if np.isnan(found).any():
            text = "values are NaN"
        text += "; expected 0 to 1 wherever the mask does not say that they do not count"
        if labels.dtype.kind in "iu" and self.value_range is None:
            text += (
                f". If all of the range of {labels.dtype} stands for 0 to 1, as where a job wrote "
                "them with output.value_range: [0, 1], write target.value_range: [0, 1]"
            )
        return text


TargetConfig = Annotated[
    Affinities | Boundaries | Distance | Classes | Stored, Field(discriminator="kind")
]
"""What a network is trained to answer."""
