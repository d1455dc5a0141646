"""State of Neuroglancer as the JSON that its URLs hold, made of facts about volumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from beam_inference.config.fields import Json
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm

HOSTED_VIEWER = "https://neuroglancer-demo.appspot.com"

_PANEL_PIXELS = 450
"""The shorter side of one of four panels, on a common screen."""
_MOST_VOXELS_PER_PIXEL = 2.0
"""Limit of zooming out: beyond it, a volume of one scale would load too many blocks at once."""

_OUTLINED = "void main() { setColor(vec4(defaultColor(), 0.5)); setBoundingBoxBorderWidth(1.0); }\n"
_FILLED = """\
void main() {
  setColor(defaultColor());
  setBoundingBoxBorderWidth(2.0);
  setBoundingBoxFillColor(vec4(defaultColor(), 0.25));
}
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis of a volume: ``c``, ``z``, ``y`` or ``x``; or one without name, shown at a position.

    Attributes:
        name: of it.
        position: on it.
        stretch: how many times as long as Neuroglancer takes it for a voxel is along it.
        shift: how far beyond where Neuroglancer puts it a voxel lies along it, in voxels.
    """

    name: str
    position: int = 0
    stretch: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class VolumeLayer:
    """A volume as a layer.

    Attributes:
        name: of the layer.
        source: Neuroglancer's name of the volume: a format and a URL, as
            ``precomputed://gs://bucket/em``.
        axes: the volume's own axes in their own order; none if Neuroglancer knows them itself.
        voxel_size_nm: ZYX.
        shader: None for labels, which have a colour each.
        opacity: over the layers before it, 0 to 1.
    """

    name: str
    source: str
    axes: Sequence[Axis]
    voxel_size_nm: VoxelSizeNm
    shader: str | None
    opacity: float


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes as a layer of annotations.

    Attributes:
        name: of the layer.
        color: as ``#rrggbb``.
        boxes: what each is, to be read when it is chosen, and where, in voxels of the view.
        filled: whether slices through it are tinted.
    """

    name: str
    color: str
    boxes: Sequence[tuple[str, BoundingBox]]
    filled: bool = False


def view_state(
    title: str,
    volumes: Sequence[VolumeLayer],
    boxes: Sequence[Boxes],
    roi: BoundingBox,
    voxel_size_nm: VoxelSizeNm,
) -> Json:
    """Make the state: later layers lie over earlier ones, and the middle of ``roi`` is centred.

    ``roi`` and ``boxes`` are in voxels of ``voxel_size_nm``, ZYX.
    """
    finest = min(voxel_size_nm)
    extent = max(n * size / finest for n, size in zip(roi.shape, voxel_size_nm, strict=True))
    return {
        "title": title,
        "dimensions": _dimensions(voxel_size_nm),
        "position": [(a + b) // 2 + 0.5 for a, b in zip(roi.start, roi.stop, strict=True)][::-1],
        "crossSectionScale": min(extent / _PANEL_PIXELS, _MOST_VOXELS_PER_PIXEL),
        "projectionScale": 1.5 * extent,
        "layers": [
            *map(_volume_layer, volumes),
            *(_boxes_layer(each, voxel_size_nm) for each in boxes),
        ],
        "layout": "4panel",
        "showSlices": True,
        "showDefaultAnnotations": False,
        "crossSectionBackgroundColor": "#000000",
    }


def hosted_link(state: Json) -> str:
    """Link to a state in the viewer hosted by Neuroglancer's authors, for volumes it can reach."""
    return f"{HOSTED_VIEWER}/#!" + quote(
        json.dumps(state, separators=(",", ":")), safe="~@#$&()*!+=:;,.?/'"
    )


def _dimensions(voxel_size_nm: VoxelSizeNm) -> Json:
    """Neuroglancer's coordinate space of the view, in metres."""
    return {axis: [size * 1e-9, "m"] for axis, size in zip("xyz", voxel_size_nm[::-1], strict=True)}


def _volume_layer(volume: VolumeLayer) -> Json:
    source: Json = {"url": volume.source}
    layer: Json = {"name": volume.name, "source": source}
    if volume.axes:
        source["transform"] = _transform(volume)
        # Other axes are the layer's own, with a slider.
        own = [axis.position + 0.5 for axis in volume.axes if not axis.name]
        layer |= {"localPosition": own} if own else {}
    if volume.shader is None:
        return {"type": "segmentation", **layer, "selectedAlpha": volume.opacity}
    return {
        "type": "image",
        **layer,
        "tab": "rendering",
        "shader": volume.shader,
        "opacity": volume.opacity,
    }


def _transform(volume: VolumeLayer) -> Json:
    """Axes of a volume, as far as Neuroglancer must be told them."""
    space = _dimensions(volume.voxel_size_nm)
    dimensions: Json = {}
    for number, axis in enumerate(volume.axes):
        if axis.name in space:
            dimensions[axis.name] = space[axis.name]
        # ^ marks channels, which shaders select from, and ' a dimension of this layer alone
        else:
            dimensions["c^" if axis.name == "c" else f"d{number}'"] = [1, ""]
    if all((axis.stretch, axis.shift) == (1.0, 0.0) for axis in volume.axes):
        return {"outputDimensions": dimensions}
    count = len(volume.axes)
    rows = [
        [axis.stretch if row == column else 0 for column in range(count)] + [axis.shift]
        for row, axis in enumerate(volume.axes)
    ]
    return {"outputDimensions": dimensions, "matrix": rows}


def _boxes_layer(boxes: Boxes, voxel_size_nm: VoxelSizeNm) -> Json:
    return {
        "type": "annotation",
        "name": boxes.name,
        "source": {
            "url": "local://annotations",
            "transform": {"outputDimensions": _dimensions(voxel_size_nm)},
        },
        "annotationColor": boxes.color,
        "annotations": [
            {
                "type": "axis_aligned_bounding_box",
                "id": str(number),
                "pointA": box.start[::-1],
                "pointB": box.stop[::-1],
                "description": description,
            }
            for number, (description, box) in enumerate(boxes.boxes)
        ],
        "shader": _FILLED if boxes.filled else _OUTLINED,
    }
