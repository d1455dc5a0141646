"""Networks of arrays x, y, z, in whole jobs."""

import warnings

import numpy as np
import pytest
import torch
import toy_networks
from helpers import job_values, read_volume, toy, write_volume

from beam_inference import prepare
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError
from beam_inference.worker.worker import Worker

IMAGE = np.random.default_rng(1).integers(0, 256, (20, 36, 44), dtype=np.uint8)
KEYS = {"output_channels": 2, "normalize": "unit", "prediction_bound": 16}


def done(folder, name, image, chunk_shape, patch_shape, **sections):
    """What a job gives of an image (Z, Y, X)."""
    write_volume(folder / f"in {name}", image, block_shape=(16, 16, 16))
    inference = {
        "patch_shape": patch_shape,
        "patch_overlap": [n // 2 for n in patch_shape],
        "chunk_shape": chunk_shape,
        "threads": 1,
    }
    values = job_values(
        folder / f"in {name}",
        folder / name,
        inference=inference | sections.pop("inference", {}),
        model=toy("position", **KEYS) | sections.pop("model", {}),
    )
    worker = Worker(prepare(parse_job(values | sections, folder)))
    chunks = range(worker.job.plan.chunks.count)
    if worker.job.plan.exchange is not None:
        assert {each.outcome for each in worker.sum_chunks(chunks)} == {"summed"}
        assert {each.outcome for each in worker.merge_seams(chunks)} == {"done"}
    else:
        assert {each.outcome for each in worker.infer_chunks(chunks)} == {"done"}
    return read_volume(folder / name)


@pytest.mark.parametrize(
    "strategy", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"]
)
def test_it_is_the_job_of_the_turned_volume_turned_back(tmp_path, strategy):
    """The position network tells the place in its patch, which is 8 × 16 × 12 voxels here."""
    inference = {"strategy": strategy}
    model = {"axes": "xyz"}
    found = done(
        tmp_path, "out", IMAGE, [16, 32, 32], [8, 16, 12], model=model, inference=inference
    )
    turned = IMAGE.transpose(2, 1, 0)
    expected = done(tmp_path, "turned", turned, [32, 32, 16], [12, 16, 8], inference=inference)
    np.testing.assert_allclose(found, expected.transpose(0, 3, 2, 1), atol=2e-5)
    as_it_is = done(tmp_path, "zyx", IMAGE, [16, 32, 32], [8, 16, 12])
    assert np.abs(found - as_it_is).max() > 1


def test_an_engine_of_fixed_shapes_is_given_turned_ones(tmp_path):
    path = tmp_path / "conv.ts"
    network = toy_networks.conv()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(network).save(str(path))
    model = {"path": str(path), "axes": "xyz", "crop_margin": [1, 2, 3]}
    found = {
        engine: done(
            tmp_path,
            engine,
            IMAGE,
            [32, 48, 48],
            [8, 16, 12],
            model=model,
            inference={"engine": engine},
        )
        for engine in ("torch", "openvino")
    }
    np.testing.assert_allclose(found["openvino"], found["torch"], atol=1e-5)
    inner = (slice(None), *(slice(4, -4),) * 3)
    with torch.inference_mode():
        batch = torch.from_numpy(IMAGE.astype(np.float32) / 255).permute(2, 1, 0)[None, None]
        whole = network(batch)[0].permute(0, 3, 2, 1).numpy()
    np.testing.assert_allclose(found["torch"][inner], whole[inner], atol=1e-5)


def test_it_is_part_of_the_job_only_where_it_is_said(tmp_path):
    write_volume(tmp_path / "in", IMAGE)
    jobs = [
        prepare(
            parse_job(
                job_values(
                    tmp_path / "in", tmp_path / f"out{axes}", model=toy("conv", **KEYS, **axes)
                ),
                tmp_path,
            )
        ).read_job()
        for axes in ({}, {"axes": "zyx"}, {"axes": "xyz"})
    ]
    plain, said, turned = (job.fingerprint for job in jobs)
    assert plain == said != turned


@pytest.mark.parametrize(
    ("model", "inference", "message"),
    [
        (
            {"axes": "xyz", "dims": 2},
            {"patch_shape": [1, 16, 16], "patch_overlap": [0, 0, 0]},
            "axes: xyz turns",
        ),
        ({"axes": "xyz"}, {"precision": "int8", "engine": "openvino"}, "int8 is calibrated"),
        ({"axes": "zxy"}, {}, "model.axes"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, model, inference, message):
    values = job_values("in", "out", model=toy("conv", **KEYS, **model), inference=inference)
    with pytest.raises(ConfigError, match=message):
        parse_job(values, tmp_path)
