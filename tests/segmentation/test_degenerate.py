"""Test the words on results that separate nothing, and their absence for any other."""

import itertools
import re

import numpy as np
import pytest
from oracles.label_volumes import run_stages, with_layout, write

from beam_inference.segmentation.component_job import plan_components
from beam_inference.segmentation.component_stages import component_stages
from beam_inference.segmentation.degenerate import degenerate_warning
from beam_inference.segmentation.segment_job import plan_segmentation
from beam_inference.segmentation.segment_stages import segment_stages
from beam_inference.segmentation.table import count_of

_numbers = itertools.count()
MAP = (np.indices((8, 8, 8)).sum(axis=0) % 6 / 8).astype(np.float32)


def warning_of(values, **options):
    """The warning on a volume that is labelled in all stages, without Beam."""
    kind = (
        (plan_segmentation, segment_stages)
        if values.ndim == 4
        else (plan_components, component_stages)
    )
    target = f"memory://degenerate{next(_numbers)}"
    plan, _ = run_stages(kind[0](write(values), target, **with_layout(options)), kind[1])
    return degenerate_warning(plan, count_of(plan))


@pytest.mark.parametrize(
    ("values", "options", "warning"),
    [
        (MAP, {"threshold": 128}, "is empty: no voxel of memory:.* is at least 128. Compare"),
        (MAP, {"threshold": 0.5, "min_size": 999}, "or every object has fewer than 999 voxels"),
        (MAP, {"threshold": -1}, "one object has 100 % of the voxels .*: nearly every voxel is fo"),
        (np.zeros((4, 4, 4), np.uint8), {"threshold": None}, "has no label but 0"),
        (
            np.stack([MAP] * 3),
            {"threshold": 128, "low": 25, "high": 253},
            "is empty: no affinity of memory.* is at least 25",
        ),
        (
            np.stack([MAP] * 3),
            {"threshold": -1, "low": -1, "high": -1},
            "one object has 100 % of the voxels .*: nearly all voxels were joined",
        ),
        (MAP, {"threshold": 0.5}, None),
        (np.eye(8, dtype=np.uint8)[None] + MAP.astype(np.uint8), {"threshold": 1}, None),
    ],
)
def test_only_a_result_that_separates_nothing_is_warned_of(values, options, warning):
    found = warning_of(values, **options)
    assert (found is None) if warning is None else re.search(warning, found)
