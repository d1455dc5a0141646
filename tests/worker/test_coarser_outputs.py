"""Networks whose output is coarser than their input, in whole jobs, against the float64 oracle."""

import numpy as np
import pytest
import torch
import toy_networks
from fakes.networks import position_dependent
from helpers import do_and_read, job_values, oracle, toy, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.scaled import repeat_output
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.launch.planned_job import plan_job
from beam_inference.volumes.opening import open_volume

IMAGE = np.random.default_rng(1).integers(1, 256, (13, 31, 46), dtype=np.uint8)
START = (4, -6, 10)
SIZE = (16.0, 8.0, 8.0)
WAYS = [([8, 16, 16], "recompute"), ([16, 16, 24], "exchange"), ([8, 8, 32], "exchange")]
HALVED = toy("halved", output_channels=2, output_scale=[1, "1/2", "1/2"], normalize="unit")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    return write_volume(folder / "in", IMAGE, START, voxel_size_nm=SIZE, block_shape=(8, 16, 16))


def values_of(source, out, way=WAYS[0], **sections):
    chunk_shape, strategy = way
    inference = {"patch_shape": [4, 8, 8], "patch_overlap": [2, 4, 4], "strategy": strategy}
    inference |= {"chunk_shape": chunk_shape, "threads": 1}
    extra = {key: sections.pop(key) for key in ("roi", "postprocess") if key in sections}
    values = job_values(
        source,
        out,
        inference=inference | sections.pop("inference", {}),
        model=HALVED | sections.pop("model", {}),
        output={"block_shape": [8, 8, 8]} | sections.pop("output", {}),
        **sections,
    )
    return values | extra


def outputs(source, folder, **sections):
    """What a job gives in several ways of cutting it, which must have the same bits."""
    found = [
        do_and_read(values_of(source, folder / f"out{number}", way, **sections), folder)
        for number, way in enumerate(WAYS)
    ]
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    return found[0]


def expected(values, folder, image=IMAGE):
    """The same by definition, in float64: patches of the network's voxels, blended, at each cell.

    Weights are those of the input's voxels, of which a cell takes the one above its middle.
    """
    config = parse_job(values, folder)
    plan = plan_job(config).plan
    more = [(0, n - m) for n, m in zip(plan.volume.shape, image.shape, strict=True)]
    volume = np.pad(image, more, mode="edge").astype(np.float64) / 255
    around = max(plan.lattice.patch_shape)
    padded = np.pad(volume, around, mode="reflect")
    assert plan.volume.shape == volume.shape

    def predict_patch(box):
        at = [
            slice(start - first + around, stop - first + around)
            for start, stop, first in zip(box.start, box.stop, plan.volume.start, strict=True)
        ]
        fine = position_dependent(padded[tuple(at)][None, None].astype(np.float32))[0]
        c, z, y, x = fine.shape
        means = fine.reshape(c, z, y // 2, 2, x // 2, 2).mean(axis=(3, 5), dtype=np.float64)
        return means.repeat(2, axis=2).repeat(2, axis=3)

    blended, _ = oracle(plan.lattice, predict_patch, 2, window=config.inference.window)
    inside = plan.volume.slices_in(plan.lattice.domain)
    return blended[(slice(None), *inside)][:, :, 1::2, 1::2]


def test_each_answer_is_repeated_over_its_cell():
    values = np.arange(12, dtype=np.float32).reshape(1, 2, 1, 2, 3)
    repeated = repeat_output(lambda batch: batch, NumpyDevice(), (2, 1, 3))(values)
    np.testing.assert_array_equal(repeated, values.repeat(2, axis=2).repeat(3, axis=4))


@pytest.mark.parametrize(
    "inference",
    [
        pytest.param({}, id="stride"),
        pytest.param({"lattice": "pad"}, id="pad", marks=pytest.mark.slow),
        pytest.param({"blend": "constant"}, id="constant", marks=pytest.mark.slow),
    ],
)
def test_the_voxels_are_those_of_the_oracle_for_every_chunk_shape(stored, tmp_path, inference):
    found = outputs(stored, tmp_path, inference=inference)
    out = open_volume(f"file://{tmp_path}/out0")
    assert out.voxel_size_nm == (16.0, 16.0, 16.0)
    assert out.bounds == BoundingBox((4, -3, 5), (17, 13, 28))
    whole = expected(values_of(stored, tmp_path / "plan", inference=inference), tmp_path)
    assert found.shape == whole.shape == (2, 13, 16, 23)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-6 * np.ptp(whole))


def test_a_margin_is_of_the_networks_input(stored, tmp_path):
    """A network of convolutions sees over its patch, so that the whole is its answer at once."""
    model = toy("coarser", output_channels=2, output_scale=["1/2"] * 3, crop_margin=[4, 4, 4])
    found = outputs(
        stored,
        tmp_path,
        model=model,
        inference={"patch_overlap": [0, 0, 0]},
        input={"fill": "edge"},
    )
    around = [(8, 8 + n % 2) for n in IMAGE.shape]
    padded = torch.from_numpy(np.pad(IMAGE.astype(np.float32) / 255, around, mode="edge"))
    with torch.inference_mode():
        whole = toy_networks.coarser()(padded[None, None])[0].numpy()[:, 4:-4, 4:-4, 4:-4]
    assert found.shape == whole.shape
    np.testing.assert_allclose(found, whole, rtol=0, atol=2e-6 * np.ptp(whole))


CASES = [
    {"postprocess": [{"operator": "smooth", "sigma": [0.5, 1, 0.7]}]},
    {"roi": {"start": [6, 0, 8], "stop": [15, 11, 25]}, "output": {"format": "ome_zarr"}},
    {"roi": {"start": [6, 0, 8], "stop": [15, 11, 25], "context": [2, 4, 4]}},
    {
        "inference": {"augment": {"mirror": ["z", "y", "x"]}},
        "model": {"channels": [{}, {}]},
    },
    {"inference": {"blend": {"gaussian": 0.125, "floor": "nnunet"}}},
    {"inference": {"patch_shape": [4, 16, 16], "patch_overlap": [0, 0, 0]}},
    {"input": {"resample": {"voxel_size_nm": [32, 12, 12], "order": 3}}},
    {
        "output": {
            "preview": {"scale": [2, 1, 1], "value_range": [-60, 60]},
        }
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_chunk_shape_and_strategy_gives_the_same_bits(stored, tmp_path, case):
    found = outputs(stored, tmp_path, **case)
    assert np.unique(found).size > 50


@pytest.mark.slow
@pytest.mark.parametrize("size", ["input", [32, 12, 12]], ids=str)
def test_other_voxels_are_made_of_the_repeated_ones(tmp_path, size):
    image = IMAGE[:, :30]
    source = write_volume(tmp_path / "in", image, START, voxel_size_nm=SIZE)
    found = outputs(source, tmp_path, output={"voxel_size_nm": size})
    coarse = do_and_read(values_of(source, tmp_path / "coarse"), tmp_path)
    assert np.ptp(found) <= np.ptp(coarse) * 1.5
    assert found.shape[1:] == ((13, 30, 46) if size == "input" else (6, 20, 31))
    if size == "input":
        np.testing.assert_array_equal(found[:, :, 1::2, 1::2], coarse)


@pytest.mark.slow
def test_the_command_runs_it_with_a_pyramid_and_verifies_it(stored, tmp_path):
    output = {"format": "ome_zarr", "pyramid": {"levels": 1}}
    job = str(write_job(tmp_path / "job.yaml", values_of(stored, tmp_path / "out", output=output)))
    assert main(["run", job]) == 0
    assert main(["verify", job, "--recompute", "1"]) == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"inference": {"patch_shape": [4, 8, 7]}}, "inference.patch_shape"),
        ({"inference": {"patch_overlap": [2, 3, 4]}}, "inference.patch_overlap"),
        ({"inference": {"lattice": "spread"}}, "lattice: spread"),
        ({"inference": {"seams": "crop", "strategy": "auto"}}, "seams: crop"),
        ({"inference": {"patch_shape": [4, 8, 48]}}, "smaller than a patch"),
        ({"model": {"output_scale": [2, "1/2", "1/2"]}}, "finer on one axis"),
        ({"model": {"output_scale": [1, "1/1", "1/2"]}}, "output_scale"),
        ({"model": {"output_scale": [1, 0.5, 0.5]}}, "output_scale"),
        ({"output": {"voxel_size_nm": "input"}}, "end beyond it"),
        ({"roi": {"start": [6, 0, 8], "stop": [15, 11, 25], "context": [0, 3, 0]}}, "roi.context"),
    ],
)
def test_what_would_cut_voxels_is_refused(stored, tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        plan_job(parse_job(values_of(stored, tmp_path / "out", **sections), tmp_path))


@pytest.mark.parametrize(
    ("start", "format", "is_told"),
    [
        ((3, 5, 8), "precomputed", True),
        ((3, 6, 8), "precomputed", False),
        ((3, 5, 8), "ome_zarr", False),
    ],
)
def test_coarse_voxels_that_begin_between_voxels_are_told(start, format, is_told, tmp_path, caplog):
    """Formats whose offsets are whole voxels lay them up to half a voxel elsewhere."""
    source = write_volume(tmp_path / "in", IMAGE, start, voxel_size_nm=SIZE)
    values = values_of(source, tmp_path / "out", output={"format": format})
    plan_job(parse_job(values, tmp_path))
    assert (
        "the output in voxels of [16.0, 16.0, 16.0] nm begins between" in caplog.text
    ) == is_told
