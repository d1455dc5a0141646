"""What the network sees beyond the volume, put there after normalisation."""

import numpy as np
import pytest
import torch
from helpers import job_values, read_volume, write_volume
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chunks import small_plan

from beam_inference import predict, prepare
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.worker.chunk_input import ChunkInput
from beam_inference.worker.patches import ChunkPatches
from beam_inference.worker.worker import Worker

ARRAY = np.random.default_rng(0).integers(0, 256, (2, 14, 20, 22)).astype(np.int16)
ARRAY[:, :, :, 12:] = 0  # patches of one value, some of which reach beyond the volume
STEPS = [{"standard": {"mean": [100.0, 90.0], "std": [50.0, 60.0]}}]
NORMALIZED = (ARRAY - np.array([100, 90]).reshape(2, 1, 1, 1)) / np.array([50, 60]).reshape(
    2, 1, 1, 1
)
NETWORK = """
import torch

def averages():
    '''The mean of 27 neighbours, without padding.'''
    network = torch.nn.Conv3d(2, 1, 3, bias=False)
    torch.nn.init.constant_(network.weight, 1 / 54)
    return network
"""


def averages(padded):
    """The same of a whole array, in float64."""
    weight = torch.full((1, 2, 3, 3, 3), 1 / 54, dtype=torch.float64)
    return torch.nn.functional.conv3d(torch.from_numpy(padded)[None], weight)[0].numpy()


@pytest.mark.parametrize(
    ("chunk_shape", "strategy"), [((8, 8, 8), "recompute"), ((16, 16, 24), "exchange")]
)
@pytest.mark.parametrize("dtype", [np.int16, np.float32])
@pytest.mark.parametrize("lattice", ["stride", "pad"])
def test_the_network_sees_the_value_beyond_the_volume(
    tmp_path, chunk_shape, strategy, dtype, lattice
):
    url = write_volume(tmp_path / "in", ARRAY.astype(dtype), (3, -5, 2), block_shape=(8, 8, 8))
    (tmp_path / "nets.py").write_text(NETWORK)
    values = job_values(
        url,
        tmp_path / "out",
        input={"fill": "constant", "fill_value": 0.25, "fill_units": "network"},
        model={
            "path": "nets.py:averages",
            "input_channels": 2,
            "normalize": STEPS,
            "crop_margin": [1, 1, 1],
        },
        inference={
            "patch_shape": [6, 8, 8],
            "patch_overlap": [2, 2, 4],
            "lattice": lattice,
            "chunk_shape": chunk_shape,
            "strategy": strategy,
        },
        output={"block_shape": [8, 8, 8]},
    )
    worker = Worker(prepare(parse_job(values, tmp_path)))
    chunks = range(worker.job.plan.chunks.count)
    if strategy == "exchange":
        list(worker.sum_chunks(chunks))
        records = list(worker.merge_seams(chunks))
    else:
        records = list(worker.infer_chunks(chunks))
    assert {record.outcome for record in records} == {"done"}
    padded = np.pad(NORMALIZED, ((0, 0), (1, 1), (1, 1), (1, 1)), constant_values=0.25)
    np.testing.assert_allclose(read_volume(tmp_path / "out"), averages(padded), atol=3e-6)


def test_a_volume_smaller_than_a_patch_is_padded_as_the_network_sees_it():
    padded = np.pad(NORMALIZED, ((0, 0), (2, 3), (2, 2), (1, 1))).astype(np.float32)
    network = torch.nn.Conv3d(2, 1, 3, padding=1)
    weights = {"weight": torch.full((1, 2, 3, 3, 3), 0.01), "bias": torch.tensor([0.5])}
    network.load_state_dict(weights)
    found = predict(
        ARRAY,
        network,
        patch_shape=(19, 24, 24),
        normalize=STEPS,
        fill="constant",
        fill_units="network",
    )
    with torch.no_grad():
        expected = network(torch.from_numpy(padded)[None])[0].numpy()
    np.testing.assert_allclose(found, expected[:, 2:16, 2:22, 1:23], atol=2e-6)


@settings(deadline=None)  # the first of them takes long
@given(
    st.tuples(*[st.integers(-4, 8)] * 3),
    st.tuples(*[st.integers(1, 30)] * 3),
    st.integers(0, 3),
)
def test_the_parts_beyond_the_volume(start, shape, margin):
    plan = small_plan(crop_margin=(margin, margin, margin))
    volume = BoundingBox(start, tuple(np.add(start, shape).tolist()))
    work = plan.work(plan.chunks.count // 2)
    array = np.zeros((1, *work.input_box.shape), np.float32)
    patches = ChunkPatches(ChunkInput(array, work.input_box, lambda: array), work)
    index = tuple(axis[0] for axis in work.patches)
    box = plan.lattice.patch_box(index).grow(plan.crop_margin)
    beyond = np.zeros(box.shape, bool)
    for part in patches.beyond(index, volume):
        beyond[part] = True
    inside = box.intersection(volume)
    expected = np.ones(box.shape, bool)
    expected[inside.slices_in(box) if inside.size else np.zeros(box.shape, bool)] = False
    np.testing.assert_array_equal(beyond, expected)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"input": {"fill_units": "network"}}, "fill_units has no effect with fill: reflect"),
        (
            {
                "input": {"fill": "constant", "fill_units": "network"},
                "model": {"normalize": [{"standard": {"by": "patch"}}]},
            },
            "a step of model.normalize is by: patch",
        ),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(job_values("in", tmp_path / "out", **sections), tmp_path)
