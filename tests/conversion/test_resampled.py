"""Volumes of another voxel size: the command ``resample``, against scipy on whole arrays."""

import numpy as np
import pytest
from helpers import job_values, read_volume, toy, write_job, write_volume
from scipy import ndimage

from beam_inference.cli.main import main
from beam_inference.config.volumes import Resample
from beam_inference.conversion.convert import plan_conversion
from beam_inference.conversion.options import ConversionOptions, ResamplingOptions
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume

EM = np.random.default_rng(1).integers(1, 256, (12, 30, 44), dtype=np.uint8)
SIZE = (40.0, 10.0, 10.0)
START = (4, -6, 10)
COARSE = [40, 20, 20]


@pytest.fixture
def em(tmp_path):
    write_volume(tmp_path / "em", EM, START, voxel_size_nm=SIZE, block_shape=(8, 16, 16))
    return str(tmp_path / "em")


def zoomed(array, shape, order):
    """What scipy makes of a whole array (C, Z, Y, X)."""
    factors = [n / m for n, m in zip((len(array), *shape), array.shape, strict=True)]
    return ndimage.zoom(
        array.astype(np.float64), factors, order=order, mode="nearest", grid_mode=True
    )


def resampled(source, target, *, window_bytes=2**26, **keys):
    """Resample as the command does, without Beam."""
    options = ConversionOptions(
        format="ome_zarr",
        block_shape=(8, 8, 8),
        window_bytes=window_bytes,
        resampling=ResamplingOptions(**keys),
    )
    return plan_conversion(source, str(target), options)


def values_of(plan):
    """All values that a plan writes, window by window, as it reads them."""
    read = plan.source.open()
    result = np.full((plan.spec.channels, *plan.task.box.shape), 0, plan.spec.dtype)
    for index in range(plan.task.count):
        box = plan.task.grid.core_box(index).intersection(plan.task.box)
        result[(slice(None), *box.slices_in(plan.task.box))] = read(box)
    return result


@pytest.mark.parametrize("order", [0, 1, 3])
def test_a_volume_keeps_its_dtype_and_its_place(tmp_path, em, order, caplog):
    how = Resample(voxel_size_nm=(20, 20, 8), order=order)
    plan = resampled(em, tmp_path / "out", how=how)
    assert plan.task.box == BoundingBox((8, -3, 13), (32, 12, 68))
    assert (plan.spec.voxel_size_nm, plan.spec.dtype) == ((20.0, 20.0, 8.0), "uint8")
    assert plan.spec.rest == (0.0, 0.0, -0.5)
    assert "begins between voxels, [0.0, 0.0, -0.5] of a voxel beyond [8, -3, 13]" in caplog.text
    found = values_of(plan)
    expected = zoomed(EM[None], (24, 15, 55), order).clip(0, 255)
    assert np.abs(found - expected).max() <= 0.5 + 1e-3
    small = resampled(em, tmp_path / "small", how=how, window_bytes=4000)
    assert small.task.count > plan.task.count
    np.testing.assert_array_equal(values_of(small), found)


def test_names_of_objects_are_kept_and_never_mixed(tmp_path):
    names = np.random.default_rng(2).integers(2**60, 2**63, (6, 8, 10), dtype=np.uint64)
    write_volume(tmp_path / "in", names, voxel_size_nm=SIZE)
    how = Resample(voxel_size_nm=(20, 10, 20), order=0)
    found = values_of(resampled(str(tmp_path / "in"), tmp_path / "out", how=how))
    np.testing.assert_array_equal(found[0], names.repeat(2, 0)[:, :, 1::2])
    linear = Resample(voxel_size_nm=(20, 10, 20))
    with pytest.raises(ConfigError, match="only --order 0"):
        resampled(str(tmp_path / "in"), tmp_path / "out", how=linear)


def run_job(tmp_path, em):
    """A job at twice the voxel size, with two channels of float32; its output's path."""
    values = job_values(
        em,
        tmp_path / "out",
        input={"resample": {"order": 1}},
        model=toy("conv", output_channels=2, voxel_size_nm=COARSE, normalize="unit"),
        inference={"chunk_shape": [16, 16, 32]},
    )
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    return str(tmp_path / "out")


@pytest.mark.slow
def test_a_job_at_twice_the_voxel_size_and_back(tmp_path, em):
    logits = run_job(tmp_path, em)
    assert open_volume(logits).bounds.shape == (12, 15, 22)
    back = tmp_path / "back"
    assert main(["resample", logits, str(back), "--like", em, "--block_shape=8,16,16"]) == 0
    volume = open_volume(str(back))
    assert (volume.bounds, volume.voxel_size_nm) == (open_volume(em).bounds, SIZE)
    found = read_volume(back)
    expected = zoomed(read_volume(logits), EM.shape, 1)
    extent = np.ptp(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * extent)
    labels = tmp_path / "labels"
    command = ["resample", logits, str(labels), "--like", em, "--postprocess"]
    assert main([*command, "[{operator: argmax}]"]) == 0
    assert main([*command, "[{operator: argmax}]"]) == 0  # nothing is left to do
    of_labels = open_volume(str(labels))
    assert (of_labels.dtype, of_labels.precomputed_type) == (np.uint8, "segmentation")
    np.testing.assert_array_equal(read_volume(labels)[0], found.argmax(0))
    assert main([*command, "[{operator: softmax}]"]) == 2  # another volume is there


def test_a_box_that_a_job_read_comes_back_to_its_place(tmp_path, em):
    box = BoundingBox((5, -3, 13), (16, 22, 50))
    logits = tmp_path / "out"
    values = job_values(
        em,
        logits,
        input={
            "box": {"start": list(box.start), "stop": list(box.stop)},
            "resample": {"voxel_size_nm": COARSE},
        },
        output={"format": "ome_zarr"},
    )
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    assert open_volume(str(logits)).voxel_size_nm != tuple(COARSE)  # 12 voxels of 25
    plan = resampled(str(logits), tmp_path / "back", how=Resample(), like=em)
    assert plan.task.box == box
    expected = zoomed(read_volume(logits), box.shape, 1)
    np.testing.assert_allclose(values_of(plan), expected, rtol=0, atol=255e-5)


def test_a_part_lies_where_the_whole_has_it(tmp_path, em):
    logits = np.random.default_rng(5).random((2, 12, 15, 22), np.float32)
    size = (40.0, 20.0, 20.0)
    whole = write_volume(tmp_path / "whole", logits, (4, -3, 5), voxel_size_nm=size)
    corner = logits[:, :, 5:15, :16]
    part = write_volume(tmp_path / "part", corner, (4, 2, 5), voxel_size_nm=size)
    how = Resample(order=1)
    plans = [
        resampled(source, tmp_path / f"{number}", how=how, like=em)
        for number, source in enumerate((whole, part))
    ]
    of_part = plans[1].task.box
    assert of_part == BoundingBox((4, 4, 10), (16, 24, 42))
    inside = BoundingBox((4, 5, 11), (16, 23, 41))  # beyond, there are other neighbours
    cut = [values_of(plan)[(slice(None), *inside.slices_in(plan.task.box))] for plan in plans]
    np.testing.assert_array_equal(*cut)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--like", "other"], "they do not cover the same space"),
        (["--like", "plain"], "plain does not state its voxel size"),
        (
            ["--like", "em", "--postprocess", "[{operator: smooth, sigma: [1, 2, 2]}]"],
            "looks at neigh",
        ),
        (["--like", "em", "--postprocess", "[{operator: argmin}]"], "installed operators"),
        (["--like", "em", "--postprocess", "argmax"], "--postprocess"),
        (["--like", "em", "--postprocess", "[{operator: select, channels: [7]}]"], "channel"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, em, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "coarse", EM[:, ::2, ::2], (4, -3, 5), voxel_size_nm=(40.0, 20.0, 20.0))
    write_volume(tmp_path / "other", EM[:6], START, voxel_size_nm=SIZE)
    np.save(tmp_path / "plain.npy", EM)
    words = [word.replace("plain", "plain.npy") for word in words]
    assert main(["resample", "coarse", "out", *words]) == 2
    assert message.replace("plain ", "plain.npy ") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
