"""The same bits for every chunk shape, by every engine."""

from functools import partial

import numpy as np
import pytest
from engine_jobs import FIB25, PATCH, ROI, UNET, load, run_job
from fib25_job import affinity_job
from helpers import plan_of, read_volume, write_job
from oracles.chunks import infer_once

from beam_inference.cli.main import main
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.operators.normalize import unit


@pytest.mark.parametrize(
    "engine",
    [
        "torch",
        "openvino",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("onnxruntime", "compile")),
    ],
)
def test_chunks_of_any_shape_have_the_bits_of_the_whole(engine):
    box = BoundingBox((0, 0, 0), (20, 48, 80))
    array = np.random.default_rng(0).integers(0, 256, (1, *box.shape), dtype=np.uint8)
    predictor = load(UNET, engine, threads=2)
    results = []
    for shape in (box.shape, (20, 24, 40), (7, 48, 33)):
        plan = plan_of(box, PATCH, (2, 4, 8), shape)
        result = np.empty((3, *box.shape), np.float32)
        for work in map(plan.work, range(plan.chunks.count)):
            read = array[(slice(None), *work.input_box.slices_in(box))]
            found = infer_once(read, work, predictor, 3, 2, normalize=unit(array.dtype))
            result[(slice(None), *work.core_box.slices_in(box))] = found.core
        results.append(result)
    assert results[0].std() > 0.01
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "onnxruntime", "compile"])
def test_a_job_gives_the_same_bits_for_every_chunk_shape(fib25, tmp_path, engine, capsys):
    volumes = []
    for chunk_shape, batch_size in [((16, 32, 64), 4), ((11, 64, 32), 4)]:
        output = tmp_path / "x".join(map(str, chunk_shape))
        values = affinity_job(fib25, output, chunk_shape, batch_size=batch_size, roi=ROI)
        values["inference"]["engine"] = engine
        job = run_job(tmp_path, values)
        volumes.append(read_volume(output))
    name = "openvino" if engine == "auto" else engine
    assert job["engine"]["engine"] == job["config"]["inference"]["engine"] == name
    np.testing.assert_array_equal(volumes[0], volumes[1])
    values["inference"]["engine"] = "torch"
    values["output"]["path"] = str(tmp_path / "torch")
    run_job(tmp_path, values)
    np.testing.assert_allclose(volumes[1], read_volume(tmp_path / "torch"), rtol=0, atol=2e-5)
    values["output"]["path"] = str(output)
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert f"engine.engine: torch here, {name} there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "engine", ["torch", "openvino", pytest.param("onnxruntime", marks=pytest.mark.slow)]
)
def test_uniform_patches_have_the_bits_that_a_mixed_batch_would_give_them(engine):
    box = BoundingBox((0, 0, 0), (24, 32, 64))
    plan = plan_of(box, PATCH, (2, 4, 8), box.shape)
    array = np.zeros((1, *box.shape), np.uint8)
    array[0, :10, :20, :30] = np.random.default_rng(0).integers(0, 256, (10, 20, 30))
    predictor = load(FIB25, engine, batch_size=3, threads=2)
    infer = partial(infer_once, array, plan.work(0), predictor, 3, 3, normalize=unit(array.dtype))
    known = infer()
    assert 0 < known.uniform_patches < plan.work(0).patch_count
    np.testing.assert_array_equal(known.core, infer(uniform_answers=0).core)
