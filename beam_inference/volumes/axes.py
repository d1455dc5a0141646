"""Axes of a stored array: their names, their order, and the voxel size along each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorstore as ts

from beam_inference.errors import VolumeError
from beam_inference.volumes.ome_zarr import NM_PER_UNIT
from beam_inference.volumes.views import View

logger = logging.getLogger(__name__)

_CHANNEL_LABELS = ("c", "channel", "channels")
_SPACE_LABELS = ("z", "y", "x")
_UNLABELLED: Mapping[int, tuple[str, ...]] = {3: ("z", "y", "x"), 4: ("c", "z", "y", "x")}


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of an array, in its own order.

    Attributes:
        labels: their names, empty where the array states none.
        sizes_nm: the voxel size along each, in nanometres; None where it is not known.
    """

    labels: list[str]
    sizes_nm: list[float | None]

    def without(self, axis: int) -> Axes:
        """The axes that are left where one is taken out."""
        labels = [*self.labels[:axis], *self.labels[axis + 1 :]]
        return Axes(labels, [*self.sizes_nm[:axis], *self.sizes_nm[axis + 1 :]])

    def order(self, url: str, driver: str) -> list[int]:
        """Positions of (channel,) z, y, x among these axes.

        Args:
            url: where the array lies, for messages.
            driver: TensorStore's name of its driver.

        Raises:
            VolumeError: they are not z, y, x and perhaps one of channels.
        """
        names = ["c" if is_channel(label) else label.lower() for label in self.labels]
        if not any(names):
            unlabelled = list(_UNLABELLED.get(len(names), ()))
            names = unlabelled[::-1] if driver == "n5" else unlabelled  # N5 lists its axes x first
        expected = ["c", "z", "y", "x"] if "c" in names else ["z", "y", "x"]
        if sorted(names) != sorted(expected):
            raise VolumeError(
                f"{url} has the axes {self.labels}; expected z, y, x and at most one of channels. "
                "Choose a position on each other one with input.select, such as {t: 0}; where axes "
                "have no names, with input.spec, a TensorStore spec with a transform."
            )
        return [names.index(name) for name in expected]


def is_channel(label: str) -> bool:
    """Whether the name of an axis says that it is the axis of channels."""
    return label.lower() in _CHANNEL_LABELS


def read_axes(url: str, store: ts.TensorStore, view: View, attributes: Mapping[str, Any]) -> Axes:
    """Read the axes of an array, as far as it describes them itself.

    Args:
        url: where it lies, for messages.
        store: the array.
        view: what it is made of.
        attributes: where arrays of Zarr version 2 keep names and units; empty for others. They are
            those of the stored array.
    """
    labels = [dimension.label for dimension in store.domain]
    rank = view.transforms[-1].output_rank
    names = attributes.get("_ARRAY_DIMENSIONS")
    units = attributes.get("dimension_units")
    has_names = not any(labels) and isinstance(names, list) and len(names) == rank
    has_units = isinstance(units, list) and len(units) == rank
    named, sizes = view.axes(
        [str(name) for name in names or ()] if has_names else [""] * rank,
        _sizes_nm(url, [_unit(unit) for unit in units or ()]) if has_units else [None] * rank,
    )
    return Axes(
        named if has_names else labels,
        sizes if has_units else _sizes_nm(url, store.dimension_units),
    )


def take_positions(
    url: str, store: ts.TensorStore, axes: Axes, select: Mapping[str, int]
) -> tuple[ts.TensorStore, Axes]:
    """Cut an array at positions on axes that are neither of space nor of channels.

    Args:
        url: where it lies, for messages.
        store: the array.
        axes: its axes.
        select: positions by name of the axis; an axis of length one needs none.

    Returns:
        The part of the array, and its axes.

    Raises:
        VolumeError: there is no such axis, or no such position on it.
    """
    positions = dict(select)
    for label, dimension in zip(axes.labels, store.domain, strict=True):
        is_other = label and label.lower() not in _SPACE_LABELS and not is_channel(label)
        if is_other and dimension.size == 1:
            positions.setdefault(label, int(dimension.inclusive_min))
    for label, position in positions.items():
        if label not in axes.labels or label.lower() in _SPACE_LABELS:
            raise VolumeError(
                f"input.select names the axis {label!r}; {url} has {axes.labels}, and z, y "
                "and x are read whole"
            )
        axis = axes.labels.index(label)
        start = store.domain[axis].inclusive_min
        stop = store.domain[axis].exclusive_max
        if not start <= position < stop:
            raise VolumeError(
                f"input.select is {position} on {label}; {url} has {start} … {stop - 1} there"
            )
        store = store[ts.d[axis][position]]
        axes = axes.without(axis)
    return store, axes


def length_nm(unit: str) -> float | None:
    """A unit of length, by one of its names, in nm; None if it is not known here."""
    return NM_PER_UNIT.get(unit.strip())


def _sizes_nm(url: str, units: Sequence[ts.Unit | None]) -> list[float | None]:
    """Lengths of a step along each axis in nm, as far as they are known."""
    names = {unit.base_unit for unit in units if unit is not None}
    unknown = sorted(names - {"", *NM_PER_UNIT})
    if unknown:
        logger.warning(
            "%s states voxel sizes in %s, which is not a known unit of length",
            url,
            " and ".join(unknown),
        )
    return [None if unit is None else _size_nm(unit) for unit in units]


def _unit(text: object) -> ts.Unit | None:
    """A unit that metadata state; None for what is no text, or none that can be encoded."""
    try:
        return ts.Unit(text) if isinstance(text, str) else None
    except TypeError:  # of half of a character, which JSON may hold
        return None


def _size_nm(unit: ts.Unit) -> float | None:
    factor = NM_PER_UNIT.get(unit.base_unit)
    return None if factor is None else unit.multiplier * factor
