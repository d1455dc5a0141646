"""Which chunk shape is best: against trying all, and never one that the alignment check refuses."""

import json
import math
from itertools import product

import numpy as np
import pytest
import yaml
from helpers import OF_RANGE, job_values, plan_of, read_volume, toy, write_job
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.geometry.alignment import check_alignment
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.chunk_shape import (
    busiest_worker,
    with_best_chunk_shape,
    with_chunk_shape,
)
from beam_inference.geometry.zyx import ceil_div
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.job_files import set_chunk_shape
from beam_inference.launch.planned_job import NetworkNeeds, best_plan_for, plan_job


@st.composite
def jobs(draw):
    shape = tuple(draw(st.tuples(*[st.integers(6, 30)] * 3)))
    start = (4, -3, 0)
    volume = BoundingBox(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    patch = draw(st.tuples(*[st.integers(2, 12)] * 3))
    return plan_of(
        volume,
        patch,
        tuple(draw(st.integers(0, p - 1)) for p in patch),
        (1, 1, 1),
        crop_margin=draw(st.tuples(*[st.integers(0, 2)] * 3)),
        strategy=draw(st.sampled_from(["exchange", "recompute"])),
        block_shape=draw(st.tuples(*[st.integers(2, 8)] * 3)),
    )


def cost(plan, workers):
    return busiest_worker(plan, workers) * plan.totals.patch_count


# to shrink takes long
@settings(deadline=None, max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(jobs(), st.integers(1, 9), st.integers(200, 60_000))
def test_the_best_is_within_three_percent_of_trying_all(plan, workers, room):
    def fits(extremes):
        return math.prod(extremes.input) + 4 * math.prod(extremes.core) <= room

    best = with_best_chunk_shape(plan, fits, workers)
    multiples = [
        range(block, ceil_div(n, block) * block + 1, block)
        for n, block in zip(plan.chunks.roi.shape, plan.block_shape, strict=True)
    ]
    tried = [with_chunk_shape(plan, shape) for shape in product(*multiples)]
    fitting = [p for p in tried if fits(p.totals.extremes)]
    if best is None:
        assert not fitting
        return
    check_alignment(best.chunks, plan.block_shape, plan.chunks.roi, plan.volume)
    assert fits(best.totals.extremes)
    assert cost(best, workers) <= 1.03 * min(cost(p, workers) for p in fitting)


@settings(deadline=None, max_examples=20, phases=[Phase.generate])
@given(st.data())
def test_axes_of_many_blocks_are_thinned_out_and_lose_little(data):
    """Of 65 to 300 blocks not all are tried."""
    block = data.draw(st.integers(1, 6))
    patch = data.draw(st.integers(4, 40))
    roi = BoundingBox((0, 0, 0), (1, 1, block * data.draw(st.integers(65, 300))))
    overlap = (0, 0, data.draw(st.integers(0, patch - 2)))
    plan = plan_of(roi, (1, 1, patch), overlap, (1, 1, 1), block_shape=(1, 1, block))
    room = data.draw(st.integers(40 * block, 300 * block))
    workers = data.draw(st.integers(1, 3))

    def fits(extremes):
        return extremes.input[2] <= room

    best = with_best_chunk_shape(plan, fits, workers)
    tried = [with_chunk_shape(plan, (1, 1, n)) for n in range(block, roi.stop[2] + 1, block)]
    costs = [cost(p, workers) for p in tried if p.totals.extremes.input[2] <= room]
    assert (best is None) == (not costs)
    # or one patch
    assert best is None or cost(best, workers) <= max(1.03 * min(costs), min(costs) + 1)


def test_a_petavoxel_is_searched_in_seconds():
    roi = BoundingBox((0, 0, 0), (40_000, 200_000, 150_000))
    plan = plan_of(roi, (20, 256, 256), (4, 64, 64), (64, 64, 64), block_shape=(64, 64, 64))

    def fits(extremes):
        return math.prod(extremes.input) + 3 * math.prod(extremes.core) <= 2**31

    best = with_best_chunk_shape(plan, fits, 1000)
    floor = plan.lattice.count * math.prod(plan.lattice.patch_shape) / roi.size
    assert floor < best.totals.patch_voxels_per_voxel < 1.4 * floor
    assert (
        best.totals.patch_voxels_per_voxel
        < with_chunk_shape(plan, (128, 1024, 1024)).totals.patch_voxels_per_voxel
    )


def test_auto_is_decided_at_the_first_launch_and_kept(volume_in, tmp_path, capsys):
    values = job_values(
        volume_in, tmp_path / "out", model=toy("same"), inference={"chunk_shape": "auto"}
    )
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["plan", job]) == 0
    assert main(["run", job]) == 0
    recorded = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    shape = recorded["config"]["inference"]["chunk_shape"]
    assert all(n % 16 == 0 for n in shape)
    assert main(["run", job]) == 0
    assert main(["verify", job, "--deep"]) == 0
    np.testing.assert_allclose(
        read_volume(tmp_path / "out"), read_volume(volume_in), rtol=0, atol=OF_RANGE
    )


def test_suggest_prints_a_table_and_writes_the_shape(volume_in, tmp_path, capsys):
    values = job_values(volume_in, tmp_path / "out")
    job = write_job(tmp_path / "job.yaml", values)
    job.write_text("# mine\n" + job.read_text())
    assert (
        main(["plan", str(job), "--suggest", "--workers", "2", "--worker-memory", "0.5", "--write"])
        == 0
    )
    said = capsys.readouterr().out
    for word in ("exchange", "recompute", "crop", "inference.chunk_shape is now"):
        assert word in said
    text = job.read_text()
    assert text.startswith("# mine\n")
    shape = yaml.safe_load(text)["inference"]["chunk_shape"]
    assert shape != values["inference"]["chunk_shape"]
    assert main(["plan", str(job)]) == 0


def test_what_does_not_fit_is_said(job, capsys):
    assert main(["plan", job(), "--suggest", "--worker-memory", "0.00001", "--write"]) == 2
    said = capsys.readouterr()
    assert "none fits" in said.out
    assert "nothing was written" in said.err
    assert main(["plan", job(), "--write"]) == 2


def test_what_the_network_allocates_is_counted_once_it_is_measured(volume_in, tmp_path, capsys):
    keys = {
        "patch_shape": [32, 64, 48],
        "patch_overlap": [4, 16, 16],
        "batch_size": 4,
        "chunk_shape": "auto",
    }
    values = job_values(
        volume_in, tmp_path / "out", model=toy("batch_norm", output_channels=2), inference=keys
    )
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["plan", path, "--suggest"]) == 0
    assert "without what the network itself allocates" in capsys.readouterr().out
    assert main(["plan", path, "--suggest", "--calibrate"]) == 0
    assert "that the network allocates for a batch, as measured here" in capsys.readouterr().out
    assert main(["plan", path, "--suggest", "--calibrate", "--worker-price", "1"]) == 2
    assert not (tmp_path / "out").exists()
    planned = plan_job(parse_job(values, tmp_path))
    room = 2**29
    for allocated, fits in ((0, True), (room // 2, True), (room, False)):
        needs = NetworkNeeds.of_engine("torch", 4, allocated)
        best = best_plan_for(planned, "recompute", THIS_PROCESS, room, 1, needs)
        assert (best is not None) == fits


def test_operators_that_look_beyond_a_chunk_leave_every_strategy(volume_in, tmp_path, capsys):
    values = job_values(volume_in, tmp_path / "out") | {
        "postprocess": [{"operator": "smooth", "sigma": [0, 1, 1]}]
    }
    path = str(write_job(tmp_path / "job.yaml", values))
    for words in (
        ["plan", path, "--suggest", "--json"],
        ["plan", path, "--suggest"],
        ["plan", path],
    ):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert "exchange" in said
        assert "recompute" in said
        assert "crop" in said
    assert main(["plan", path, "--set", "inference.strategy=exchange"]) == 0
    assert "exchange (this job)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "inference: {chunk_shape: [16, 32, 32], batch_size: 1}  # one line\n",
        "inference:\n  chunk_shape: auto\n",
        "inference:\n  chunk_shape:\n  - 16\n  - 32\n  - 32\n  batch_size: 1\n",
        "inference:\n  chunk_shape: 16x32x32\n",
        'inference:\n  "chunk_shape": "16x32x32" # quoted\n',
        '{"inference": {"chunk_shape": [16,\n 32, 32]}}',
    ],
)
def test_the_shape_is_put_where_it_stood(tmp_path, text):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    set_chunk_shape(str(file), (8, 16, 24))
    assert yaml.safe_load(file.read_text())["inference"]["chunk_shape"] == [8, 16, 24]
    assert ("#" in text) == ("#" in file.read_text())
