"""Boxes and points that somebody has drawn in Neuroglancer, from a saved state, as voxels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from beam_inference.config.json_text import parse_json
from beam_inference.errors import ConfigError
from beam_inference.foreign_text import shorten_text
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, triple

_NANOMETRES: Final = {"m": 1e9, "mm": 1e6, "um": 1e3, "µm": 1e3, "nm": 1.0}
_ROUNDING = 1e-6
"""Part of a voxel by which a coordinate may miss the border that is meant: it was in metres."""


def read_viewer_state(text: str) -> dict[str, Any] | None:
    """Return a state of Neuroglancer; None if a text is none."""
    if not text.lstrip("\ufeff \n\r\t").startswith("{"):
        return None
    try:
        values = parse_json(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("layers"), list) else None


def boxes_of_state(
    state: dict[str, Any], name: str, voxel_size_nm: VoxelSizeNm, where: str
) -> list[BoundingBox]:
    """Return the boxes and points of an annotation layer, in voxels of the output.

    Args:
        state: the state of Neuroglancer.
        name: of the layer; empty for the only one that has annotations.
        voxel_size_nm: of the output, ZYX.
        where: the file, for messages.
    """
    layers = {
        str(layer.get("name")): layer
        for layer in state["layers"]
        if isinstance(layer, dict) and layer.get("type") == "annotation" and _annotations(layer)
    }
    if not layers:
        raise ConfigError(f"{where} has no layer with annotations: draw boxes in one, and save it")
    if not name and len(layers) > 1:
        raise ConfigError(
            f"{where} has several layers with annotations: say which one, as --chunks 'FILE#LAYER'."
            f" They are: {', '.join(map(shorten_text, layers))}"
        )
    if name and name not in layers:
        raise ConfigError(
            f"{where} has no annotations in a layer {name}, only in "
            f"{', '.join(map(shorten_text, layers))}"
        )
    layer = layers[name] if name else next(iter(layers.values()))
    try:
        coordinates = _coordinates_of(layer, state, voxel_size_nm)
        return [_box_of_annotation(each, coordinates) for each in _annotations(layer)]
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise ConfigError(
            f"{where}: its annotations cannot be taken as boxes: {shorten_text(str(error))}"
        ) from None


def _annotations(layer: dict[str, Any]) -> list[Any]:
    found = layer.get("annotations")
    return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class _Coordinates:
    """How coordinates of annotations become voxels.

    Attributes:
        positions: where z, y and x are among the coordinates.
        factors: voxels of the output in a unit of each.
    """

    positions: Zyx
    factors: tuple[float, float, float]

    def voxels(self, coordinates: Sequence[float]) -> list[float]:
        """Return a point in voxels, ZYX."""
        return [
            coordinates[position] * factor
            for position, factor in zip(self.positions, self.factors, strict=True)
        ]


def _coordinates_of(
    layer: dict[str, Any], state: dict[str, Any], voxel_size_nm: VoxelSizeNm
) -> _Coordinates:
    source = layer.get("source")
    if isinstance(source, list) and len(source) == 1:
        source = source[0]
    transform = source.get("transform", {}) if isinstance(source, dict) else {}
    if "matrix" in transform:
        raise ValueError("the layer is transformed by a matrix; draw them in a layer of its own")
    dimensions = transform.get("outputDimensions") or state.get("dimensions")
    if not isinstance(dimensions, dict) or not {*"zyx"} <= dimensions.keys():
        raise ValueError("the layer has no dimensions z, y and x")
    names = list(dimensions)
    factors = []
    for axis, size in zip("zyx", voxel_size_nm, strict=True):
        scale, unit = dimensions[axis]
        if unit not in _NANOMETRES:
            raise ValueError(f"the unit of {axis} is {unit!r}, and not m")
        if not 0 < float(scale) < math.inf:
            raise ValueError(f"the scale of {axis} is {scale!r}, and no length")
        factors.append(float(scale) * _NANOMETRES[unit] / size)
    z, y, x = factors
    return _Coordinates(triple([names.index(axis) for axis in "zyx"]), (z, y, x))


def _box_of_annotation(annotation: dict[str, Any], coordinates: _Coordinates) -> BoundingBox:
    kind = annotation.get("type", "point")
    if kind == "point":
        point = coordinates.voxels(annotation["point"])
        corners = [point, point]
    elif kind == "axis_aligned_bounding_box":
        corners = [coordinates.voxels(annotation[name]) for name in ("pointA", "pointB")]
    else:
        raise ValueError(f"an annotation of type {kind!r} is neither a box nor a point")
    if not all(map(math.isfinite, chain(*corners))):
        raise ValueError(f"a coordinate of {annotation.get('id', 'one')!r} is no number")
    start = [math.floor(min(pair) + _ROUNDING) for pair in zip(*corners, strict=True)]
    ends = [math.ceil(max(pair) - _ROUNDING) for pair in zip(*corners, strict=True)]
    stop = [max(a + 1, b) for a, b in zip(start, ends, strict=True)]
    return BoundingBox(triple(start), triple(stop))
