"""Seam profiles: their values against brute force, and what they show of real jobs."""

import itertools

import numpy as np
import pytest
from helpers import do_job, job_values, read_volume, toy, write_job, write_volume
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from beam_inference.cli.main import main
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.job.parts import output_spec
from beam_inference.job.state import State
from beam_inference.report.seam_profile import REACH, border_box, differences, seam_profiles
from beam_inference.volumes.outputs import open_output


def brute_force(array, grid, axis):
    """Mean absolute difference of neighbours by distance, over pairs nearest to a chunk border."""
    length = grid.roi.shape[axis]
    borders = list(range(grid.chunk_shape[axis], length, grid.chunk_shape[axis]))
    values = np.moveaxis(array.astype(float), axis + 1, 0)
    found = {}
    for place in range(1, length):
        nearest = sorted((abs(place - cut), cut) for cut in [0, *borders, length])
        distance, cut = nearest[0]
        if cut in borders and (nearest[1][0] > distance) and distance < REACH:
            found.setdefault(distance, []).extend(
                np.abs(values[place] - values[place - 1]).reshape(-1)
            )
    return found


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 60), st.integers(1, 25), st.sampled_from([0, 1, 2]))
def test_cut_outs_hold_each_pair_that_is_nearest_to_a_border_once(length, chunk, axis):
    shape = [2, 2, 2]
    chunk_shape = [2, 2, 2]
    shape[axis] = length
    chunk_shape[axis] = chunk
    start = (5, -3, 1)
    grid = ChunkGrid(
        BoundingBox(start, tuple(a + n for a, n in zip(start, shape, strict=True))),
        tuple(chunk_shape),
    )
    array = np.random.default_rng(0).random((1, *shape))
    found = {}
    for index in range(grid.shape[axis] - 1):
        position = [0, 0, 0]
        position[axis] = index
        box = border_box(grid, axis, grid.index(position))
        cut = array[(slice(None), *box.slices_in(grid.roi))]
        border = grid.core_box(grid.index(position)).stop[axis]
        for distance, total, count in differences(cut, axis + 1, border - box.start[axis]):
            sums = found.setdefault(distance, [0.0, 0])
            sums[0] += total
            sums[1] += count
    expected = brute_force(array, grid, axis)
    assert sorted(found) == sorted(expected)
    for distance, (total, count) in found.items():
        assert count == len(expected[distance])
        assert total == pytest.approx(sum(expected[distance]))


def profiles_of(folder):
    state = State(f"file://{folder}/_beam_inference")
    job = state.load_job()
    state = state.of(job)
    receipts = state.read_receipts(range(job.plan.chunks.count))
    return job.plan.chunks, seam_profiles(
        job.plan.chunks, receipts, state, open_output(output_spec(job))
    )


@pytest.mark.parametrize(
    "seams", ["crop", "recompute", pytest.param("exchange", marks=pytest.mark.slow)]
)
def test_a_job_with_seams_shows_them_and_others_show_none(volume_in, tmp_path, seams):
    inference = {"seams": seams, "patch_overlap": [4, 8, 8]}
    # a convolution sees zeros beyond its patch: nothing is cropped, so chunks do not fit together
    if seams == "crop":
        inference["chunk_crop_margin"] = [0, 0, 0]
    values = job_values(
        volume_in, tmp_path / "out", model=toy("conv", output_channels=2), inference=inference
    )
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    grid, profiles = profiles_of(tmp_path / "out")
    array = read_volume(tmp_path / "out")
    assert [profile.axis for profile in profiles] == [0, 1, 2]
    for profile in profiles:
        expected = brute_force(array, grid, profile.axis)
        assert len(profile.differences) == len(expected)
        for distance, (mean, pairs) in enumerate(
            zip(profile.differences, profile.pairs, strict=True)
        ):
            assert pairs == len(expected[distance])
            assert mean == pytest.approx(np.mean(expected[distance]))
        elsewhere = list(
            itertools.chain(*(expected[distance] for distance in expected if distance))
        )
        assert profile.at_border == pytest.approx(np.mean(expected[0]))
        assert profile.elsewhere == pytest.approx(np.mean(elsewhere))
        assert profile.stands_out == (seams == "crop")
        if seams == "crop":
            assert profile.at_border > 1.2 * profile.elsewhere


@pytest.mark.parametrize("sigma", [1.5, 6, 10])
def test_smooth_values_of_few_places_have_no_seams(sigma, tmp_path):
    shape = (48, 48, 48)
    found = []
    for seed in range(3):
        noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=shape), sigma)
        array = (255 / (1 + np.exp(-4 * noise / noise.std()))).astype(np.uint8)
        folder = tmp_path / str(seed)
        write_volume(folder / "in", array)
        model = {"path": "identity", "output_channels": 1}
        values = job_values(folder / "in", folder / "out", model=model)
        do_job(values, folder)
        found += profiles_of(folder / "out")[1]
    assert len(found) == 9
    assert not any(profile.stands_out for profile in found)


def test_borders_of_chunks_that_are_not_finished_are_left_out(job, tmp_path):
    (tmp_path / "some").write_text("0\n1\n17\n")
    path = job()
    assert main(["run", path, "--chunks", str(tmp_path / "some")]) == 0
    grid, profiles = profiles_of(tmp_path / "out")
    (profile,) = profiles
    assert (profile.axis, profile.cutouts) == (2, 1), "of 0, 1 and 17 only 0 and 1 meet, on x"
    one, two = (grid.core_box(chunk) for chunk in (0, 1))
    array = read_volume(tmp_path / "out").astype(float)
    z, y, _ = one.slices_in(grid.roi)
    border = two.start[2] - grid.roi.start[2]
    across = np.abs(array[:, z, y, border] - array[:, z, y, border - 1])
    assert profile.at_border == pytest.approx(across.mean())
