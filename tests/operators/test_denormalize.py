"""Normalisation that is undone on the network's values, against NumPy in float64."""

import numpy as np
import pytest
import torch
from helpers import job_values, read_volume, write_volume
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference import predict, prepare
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError
from beam_inference.operators.normalize_steps import StepwiseNormalization, predict_normalized
from beam_inference.worker.worker import Worker

INPUT = np.random.default_rng(2).normal(300, 40, (2, 20, 24, 28)).astype(np.float32)
STEPS = [
    {"scale": [0.5, 2], "offset": 3},
    {"standard": {"mean": [100, 500], "std": 25}},
    {"standard": {"by": "patch", "ddof": 1}, "channels": [1]},
]


def model(**keys):
    return {"input_channels": 2, "output_channels": 2, "denormalize": True} | keys


def steps_of(values):
    job = parse_job(job_values("in", "out", model=model(normalize=values)), "/")
    return StepwiseNormalization(job.model.normalize, is_undone=True)


@settings(deadline=None)  # the first of them takes long
@given(st.permutations(STEPS), st.integers(0, 9))
def test_what_the_network_does_not_change_is_what_it_was(steps, seed):
    batch = np.random.default_rng(seed).normal(300, 40, (3, 2, 4, 5, 6)).astype(np.float32)
    normalize = steps_of(steps)
    found = predict_normalized(lambda values: values, normalize, batch.copy())
    np.testing.assert_allclose(found, batch, rtol=2e-5)
    same = predict_normalized(lambda values: values, normalize, torch.from_numpy(batch.copy()))
    np.testing.assert_allclose(same.numpy(), found, rtol=1e-6)


def test_the_networks_own_array_is_left_as_it_is():
    answer = np.ones((1, 2, 2, 2, 2), np.float32)
    found = predict_normalized(lambda _: answer, steps_of(STEPS[:2]), np.zeros_like(answer))
    assert (answer == 1).all()
    assert found[0, 0, 0, 0, 0] == (25 + 100 - 3) / 0.5


HALF = """
import torch

def half():
    '''Half of what it is given, whatever that was.'''
    network = torch.nn.Conv3d(2, 2, 1, groups=2, bias=False)
    torch.nn.init.constant_(network.weight, 0.5)
    return network
"""


@pytest.mark.parametrize(
    ("chunk_shape", "strategy"),
    [([8, 16, 8], "recompute"), ([24, 24, 32], "recompute"), ([16, 8, 16], "exchange")],
)
def test_patches_are_undone_by_their_own_numbers(tmp_path, chunk_shape, strategy):
    url = write_volume(tmp_path / "in", INPUT, block_shape=(8, 8, 8))
    (tmp_path / "nets.py").write_text(HALF)
    values = job_values(
        url,
        tmp_path / "out",
        model=model(path="nets.py:half", normalize=STEPS),
        inference={
            "patch_shape": [5, 6, 7],
            "patch_overlap": [0, 0, 0],
            "chunk_shape": chunk_shape,
            "strategy": strategy,
        },
        output={"block_shape": [8, 8, 8]},
    )
    worker = Worker(prepare(parse_job(values, tmp_path)))
    chunks = range(worker.job.plan.chunks.count)
    if strategy == "exchange":
        list(worker.sum_chunks(chunks))
        list(worker.merge_seams(chunks))
    else:
        list(worker.infer_chunks(chunks))
    found = read_volume(tmp_path / "out")
    # half the distance from the value that becomes 0: 197 of one channel, a patch's mean of the
    # other one
    np.testing.assert_allclose(found[0], (INPUT[0] + (100 - 3) / 0.5) / 2, rtol=3e-6)
    patches = INPUT[1].reshape(4, 5, 4, 6, 4, 7).astype(np.float64)
    mean = patches.mean(axis=(1, 3, 5), keepdims=True)
    np.testing.assert_allclose(found[1], ((patches + mean) / 2).reshape(20, 24, 28), rtol=3e-6)


@pytest.mark.parametrize(
    "normalize", ["none", "unit", {"scale": 0.5, "offset": -3, "clip": [-100, 100]}], ids=str
)
def test_simple_forms_are_undone_too(normalize):
    array = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
    found = predict(
        array,
        lambda batch: batch,
        patch_shape=(3, 4, 5),
        normalize=normalize,
        denormalize=True,
    )
    np.testing.assert_allclose(found[0], array, atol=2e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"activation": "sigmoid"}, "denormalize undoes normalize, but activation: sigmoid"),
        (
            {"normalize": [{"scale": 2}], "path": "net.pt", "output_channels": 3},
            "input_channels is 2 and output_channels 3: they must be equal",
        ),
        ({"normalize": {"start": 0, "levels": [[0, 1]]}}, "cannot undo what is done by section"),
        (
            {"normalize": {"levels": "levels.json", "by": "section"}},
            "cannot undo what is done by section",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_undone_is_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(job_values("in", tmp_path / "out", model=model(**keys)), tmp_path)
