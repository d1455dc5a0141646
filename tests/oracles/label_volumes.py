"""Volumes in memory for tests of components and segmentation, and the rows of their tables."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.job.stage_job import ChunkStage
from beam_inference.segmentation.layout import Layout
from beam_inference.segmentation.plans import LabelPlan
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output

_numbers = count()

Plan = TypeVar("Plan", bound=LabelPlan)


def write(
    array: np.ndarray,
    start: Zyx = (3, -5, 2),
    voxel_size_nm: VoxelSizeNm = (40.0, 8.0, 4.0),
    **spec: Any,
) -> str:
    """Write a volume in memory and return its URL."""
    array = array if array.ndim == 4 else array[None]
    box = BoundingBox(start, zyx.add(start, zyx.triple(array.shape[1:])))
    url = f"memory://volume{next(_numbers)}"
    values: dict[str, Any] = {
        "url": url,
        "format": "precomputed",
        "dtype": array.dtype.name,
        "channels": len(array),
        "bounds": box,
        "block_shape": (8, 8, 8),
        "voxel_size_nm": voxel_size_nm,
    }
    create_output(OutputSpec(**values | spec)).write(box, array)
    return url


def with_layout(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a local job, with those of its layout in one value."""
    keys = {field.name for field in fields(Layout)}
    layout = Layout(**{key: value for key, value in options.items() if key in keys})
    return {"storage": LOCAL, "layout": layout} | {
        key: value for key, value in options.items() if key not in keys
    }


def run_stages(
    plan: Plan, stages: Callable[[Plan], Iterable[ChunkStage]]
) -> tuple[Plan, np.ndarray]:
    """Run all stages of a plan without Beam.

    Returns:
        the plan with its scratch folder, and the voxels of the output.
    """
    plan = replace(plan, scratch_url=f"{plan.output.url}/scratch")
    for stage in stages(plan):
        do = pickle.loads(pickle.dumps(stage)).make_worker()
        for index in range(stage.count):
            do(index)
    output = open_volume(plan.output.url)
    return plan, output.read(output.bounds)[0]


def read_table(plan: LabelPlan, parts: int = 1) -> list[str]:
    """Texts of the parts of a table, which has no more than these."""
    store = open_kvstore(plan.table_url)
    texts = [store.read(f"{part:06d}.csv").result().value.decode() for part in range(parts)]
    assert store.read(f"{parts:06d}.csv").result().state == "missing"
    return texts


def rows_by_brute_force(
    labels: np.ndarray, start: Zyx, voxel_size_nm: VoxelSizeNm
) -> Iterator[list[float]]:
    """Rows of a table: label, voxels, bounding box, and centre in nanometres."""
    for label in np.unique(labels[labels > 0]):
        places = np.argwhere(labels == label)
        box = [*(places.min(0) + start), *(places.max(0) + 1 + start)]
        centre = ((places + start + 0.5) * voxel_size_nm).mean(0)
        yield [label, len(places), *box, *centre]
