"""Volumes in memory for tests of components and segmentation, and what their tables should say."""

import pickle
from dataclasses import fields, replace
from itertools import count

import numpy as np

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.segmentation.layout import Layout
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output

_numbers = count()


def write(array, start=(3, -5, 2), voxel_size_nm=(40.0, 8.0, 4.0), **spec):
    """A volume in memory; its URL."""
    array = array if array.ndim == 4 else array[None]
    box = BoundingBox(start, tuple(a + n for a, n in zip(start, array.shape[1:], strict=True)))
    url = f"memory://volume{next(_numbers)}"
    create_output(
        OutputSpec(
            **{
                "url": url,
                "format": "precomputed",
                "dtype": array.dtype.name,
                "channels": len(array),
                "bounds": box,
                "block_shape": (8, 8, 8),
                "voxel_size_nm": voxel_size_nm,
            }
            | spec
        )
    ).write(box, array)
    return url


def with_layout(options):
    """Options of a job with those of its layout in one value, on this machine."""
    keys = {field.name for field in fields(Layout)}
    layout = Layout(**{key: value for key, value in options.items() if key in keys})
    return {"storage": LOCAL, "layout": layout} | {
        key: value for key, value in options.items() if key not in keys
    }


def run_stages(plan, stages):
    """Run all stages of a plan, without Beam: the plan with scratch folder, the output's voxels."""
    plan = replace(plan, scratch_url=f"{plan.output.url}/scratch")
    for stage in stages(plan):
        do = pickle.loads(pickle.dumps(stage)).make_worker()
        for index in range(stage.count):
            do(index)
    output = open_volume(plan.output.url)
    return plan, output.read(output.bounds)[0]


def read_table(plan, parts=1):
    store = open_kvstore(plan.table_url)
    texts = [store.read(f"{part:06d}.csv").result().value.decode() for part in range(parts)]
    assert store.read(f"{parts:06d}.csv").result().state == "missing"
    return texts


def rows_by_brute_force(labels, start, voxel_size_nm):
    for label in np.unique(labels[labels > 0]):
        places = np.argwhere(labels == label)
        box = [*(places.min(0) + start), *(places.max(0) + 1 + start)]
        centre = ((places + start + 0.5) * voxel_size_nm).mean(0)
        yield [label, len(places), *box, *centre]
