"""Totals of a plan, against sums over all of its chunks and figures by hand."""

import math
import subprocess
import sys
from collections import Counter

import pytest
from helpers import plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.plans import cube, plans

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.seam_sums import seam_boxes
from beam_inference.geometry.zyx import ceil_div


def check_input_blocks(plan, works, axis):
    """Extents of the storage blocks that are read: at most one block too many.

    And only where chunks are placed differently on the blocks.
    """
    block = plan.input_block_shape[axis]
    origin = plan.volume.start[axis]
    read = [work.input_box.intersection(plan.volume) for work in works]
    intervals = [(box.start[axis] - origin, box.stop[axis] - origin) for box in read]
    most = max(
        len({voxel // block for voxel in range(*interval)}) * block for interval in intervals
    )
    found = plan.totals.extremes.input_blocks[axis]
    assert found == most or (most < found <= most + block and plan.chunks.chunk_shape[axis] % block)


@given(plans())
def test_totals_equal_the_sum_over_chunks(plan):
    if plan.strategy == "exchange":
        works = [
            work for index in range(plan.chunks.count) if (work := plan.exchange.owned_work(index))
        ]
        pairs = [(c, r) for c in range(plan.chunks.count) for r in plan.exchange.receivers(c)]
        assert plan.totals.seam_voxels == sum(
            box.size for pair in pairs for box in seam_boxes(plan.exchange, *pair)
        )
        assert plan.totals.shared_voxels == sum(
            box.intersection(plan.chunks.core_box(c)).size
            for c in range(plan.chunks.count)
            for box in plan.exchange.shared_boxes(c)
        )
    else:
        works = [plan.work(index) for index in range(plan.chunks.count)]
        pairs = []
        assert plan.totals.seam_voxels == plan.totals.shared_voxels == 0
    assert (
        plan.totals.patch_count == plan.totals.calls(1) == sum(work.patch_count for work in works)
    )
    assert plan.totals.calls(3) == sum(ceil_div(work.patch_count, 3) for work in works)
    assert plan.totals.input_voxels == sum(
        work.input_box.intersection(plan.volume).size for work in works
    )
    for axis in range(3):
        assert plan.totals.extremes.input[axis] == max(work.input_box.shape[axis] for work in works)
        check_input_blocks(plan, works, axis)
        assert plan.totals.extremes.core[axis] == max(work.core_box.shape[axis] for work in works)
        boxes = [
            plan.exchange.private_box(work.index) if plan.strategy == "exchange" else work.core_box
            for work in works
        ]
        assert plan.totals.extremes.private[axis] >= max(
            (box.shape[axis] for box in boxes if box is not None), default=0
        )
    together = plan.totals.extremes.touched
    shared = plan.totals.extremes.shared
    alone = [n - more for n, more in zip(together, shared, strict=True)]
    received = Counter({None: 0})
    for contributor, receiver in pairs:
        received[receiver] += sum(
            box.size for box in seam_boxes(plan.exchange, contributor, receiver)
        )
    assert max(received.values()) <= math.prod(together) - math.prod(alone)
    if sum(n > 1 for n in plan.chunks.shape) == 1 and sum(map(bool, shared)) == 1:
        assert max(received.values()) == math.prod(together) - math.prod(alone)


@settings(deadline=None)
@given(st.data())
def test_totals_of_long_axes_are_counted_by_period_and_equal_the_sum_over_chunks(data):
    patch = data.draw(st.integers(1, 9))
    length = data.draw(st.integers(200, 900))
    start = data.draw(st.integers(-5, 30))
    volume = BoundingBox((0, 0, -20), (1, 1, length))
    plan = plan_of(
        BoundingBox((0, 0, start), (1, 1, length - data.draw(st.integers(0, 25)))),
        (1, 1, patch),
        (0, 0, data.draw(st.integers(0, patch - 1))),
        (1, 1, data.draw(st.integers(1, 20))),
        volume=volume,
        context=(0, 0, data.draw(st.integers(0, 30))),
        crop_margin=(0, 0, data.draw(st.integers(0, 12))),
        strategy=data.draw(st.sampled_from(["recompute", "exchange", "crop"])),
        lattice=data.draw(st.sampled_from(["stride", "spread", "pad"])),
        chunk_crop_margin=(0, 0, data.draw(st.integers(0, 12))),
        block_shape=(1, 1, data.draw(st.integers(1, 4))),
        halo=(0, 0, data.draw(st.just(0) | st.integers(1, 6))),
        input_block_shape=(1, 1, data.draw(st.integers(1, 8))),
    )
    if plan.strategy == "exchange":
        works = [
            work for index in range(plan.chunks.count) if (work := plan.exchange.owned_work(index))
        ]
    else:
        works = [plan.work(index) for index in range(plan.chunks.count)]
    assert plan.totals.patch_count == sum(work.patch_count for work in works)
    assert plan.totals.input_voxels == sum(
        work.input_box.intersection(plan.volume).size for work in works
    )
    assert plan.totals.extremes.input[2] == max(work.input_box.shape[2] for work in works)
    check_input_blocks(plan, works, axis=2)
    if plan.strategy == "exchange":
        axis = plan.exchange.ownership[2]
        positions = range(plan.chunks.count)
        private = map(plan.exchange.private_box, positions)
        alone = [0 if box is None else box.shape[2] for box in private]
        assert plan.totals.extremes.touched[2] == max(map(axis.touched_voxels, positions))
        assert plan.totals.extremes.shared[2] == max(
            axis.touched_voxels(p) - n for p, n in zip(positions, alone, strict=True)
        )


@settings(deadline=None)
@given(st.data())
def test_totals_of_blocks_around_the_roi_are_those_of_what_lies_in_the_domain(data):
    block = data.draw(st.integers(1, 7))
    patch = data.draw(st.integers(1, 9))
    start = data.draw(st.integers(-9, 9))
    stop = start + data.draw(st.integers(1, 60))
    plan = plan_of(
        BoundingBox((0, 0, start), (1, 1, stop)),
        (1, 1, patch),
        (0, 0, data.draw(st.integers(0, patch - 1))),
        (1, 1, block * data.draw(st.integers(1, 4))),
        crop_margin=(0, 0, data.draw(st.integers(0, 3))),
        strategy=data.draw(st.sampled_from(["recompute", "exchange", "crop"])),
        lattice=data.draw(st.sampled_from(["stride", "spread", "pad"])),
        block_shape=(1, 1, block),
        halo=(0, 0, data.draw(st.just(0) | st.integers(1, 6))),
        written=BoundingBox((0, 0, start // block * block), (1, 1, ceil_div(stop, block) * block)),
    )
    chunks = range(plan.chunks.count)
    works = [plan.work(index) for index in chunks]
    if plan.strategy == "exchange":
        works = [work for index in chunks if (work := plan.exchange.owned_work(index))]
        pairs = [(c, r) for c in chunks for r in plan.exchange.receivers(c)]
        boxes = [box for pair in pairs for box in seam_boxes(plan.exchange, *pair)]
        assert plan.totals.seam_voxels == sum(box.size for box in boxes)
        summed = set()  # each voxel of the ROI is alone a chunk's, or its sums are exchanged
        for index in chunks:
            for box in (plan.exchange.private_box(index), *plan.exchange.shared_boxes(index)):
                summed |= set(range(box.start[2], box.stop[2])) if box else set()
        assert summed >= set(range(start, stop))
    assert plan.totals.patch_count == sum(work.patch_count for work in works)
    assert all(work.core_box.size for work in works)
    assert plan.lattice.domain == plan_of_roi_alone(plan).lattice.domain


def plan_of_roi_alone(plan):
    """The plan of the same ROI, whose chunks tile that alone."""
    axis = plan.lattice.axes[2]
    return plan_of(
        plan.volume,
        plan.lattice.patch_shape,
        plan.lattice.patch_overlap,
        (1, 1, max(1, axis.patch)),
        lattice=plan.lattice.kind,
    )


def test_redundancy_is_as_the_formulas_say():
    """Per axis (n + ⌈p/s⌉ - 1)/n · p/s, for patches on the chunk grid, away from its ends."""
    patch = 8
    overlap = 4
    strides_per_chunk = 4
    stride = patch - overlap
    roi = cube(0, 4000)
    plan = plan_of(roi, (patch,) * 3, (overlap,) * 3, (stride * strides_per_chunk,) * 3)
    per_axis = (
        (strides_per_chunk + math.ceil(patch / stride) - 1) / strides_per_chunk * patch / stride
    )
    assert plan.totals.patch_voxels_per_voxel == pytest.approx(per_axis**3, rel=5e-3)


def test_the_published_redundancies():
    """20×256×256 patches, overlap 4×64×64: a floor of 2.22, computed by hand from p/s."""
    roi = BoundingBox((0, 0, 0), (16 * 500 + 4, 192 * 60 + 64, 192 * 60 + 64))
    plan = plan_of(roi, (20, 256, 256), (4, 64, 64), (128, 1152, 1152))
    floor = plan.lattice.count * 20 * 256 * 256 / roi.size
    assert floor == pytest.approx(20 / 16 * (256 / 192) ** 2, rel=0.02)
    assert plan.totals.patch_voxels_per_voxel > floor


def test_a_billion_chunks_on_one_axis_are_planned_too():
    roi = BoundingBox((0, 0, 0), (20, 256, 10**11))
    plan = plan_of(roi, (20, 256, 256), (4, 64, 64), (20, 256, 100))
    assert plan.chunks.count == 10**9
    assert plan.totals.patch_voxels_per_voxel == pytest.approx(
        256 / 192 * (100 + 256) / 100 * 192 / 256 * 256 / 192, rel=0.2
    )


def test_a_billion_chunks_are_planned_in_seconds_and_little_memory():
    code = """
import time
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan import make_plan
start = time.monotonic()
roi = BoundingBox((0, 0, 0), (128_000, 1_024_000, 1_024_000))
plan = make_plan(volume=roi, roi=roi, context=(0, 0, 0), patch_shape=(20, 256, 256),
    patch_overlap=(4, 64, 64), chunk_shape=(128, 1024, 1024), crop_margin=(0, 0, 0),
    strategy="recompute", chunk_crop_margin=(0, 0, 0), block_shape=(64, 64, 64))
totals = plan.totals
print(plan.chunks.count, totals.patch_count, totals.input_voxels, totals.extremes.input)
peak = next(line.split()[1] for line in open("/proc/self/status") if "VmHWM" in line)
print(time.monotonic() - start, peak)
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(output[0]) == 10**9
    assert float(output[-2]) < 10
    assert int(output[-1]) * 1024 < 500e6
