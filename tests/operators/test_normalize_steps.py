"""Normalisation by a list of steps, against NumPy in float64 on the whole volume."""

import numpy as np
import pytest
import torch
from helpers import job_values, read_volume, write_volume
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference import predict, prepare
from beam_inference.config.job_file import parse_job
from beam_inference.config.network import Network
from beam_inference.errors import ConfigError
from beam_inference.operators.normalize_steps import StepwiseNormalization
from beam_inference.worker.worker import Worker

INPUT = np.random.default_rng(5).normal(40, 300, (2, 20, 24, 28)).astype(np.float32)

STEPS = [
    [{"clip": [-100, 200]}, {"scale": 0.01, "offset": -0.5}],
    [
        {"clip": [[-100, 200], [-50.5, 90]]},
        {"standard": {"mean": [30.0, 7.5], "std": [110.0, 20.0]}},
    ],
    [{"scale": [2, -3]}, {"standard": {"mean": 5, "std": 250}}, {"offset": [1, 0]}],
]


def by_hand(array, steps):
    """What steps make of (C, Z, Y, X) in float64, and how far float32 may be from it."""
    values = array.astype(np.float64)
    bound = np.zeros_like(values)
    rounding = 2.0**-23

    def column(numbers):
        return np.broadcast_to(np.asarray(numbers, float), (len(values),)).reshape(-1, 1, 1, 1)

    for step in steps:
        if "clip" in step:
            limits = np.broadcast_to(np.asarray(step["clip"], float), (len(values), 2))
            low, high = (column(limits[:, end]) for end in (0, 1))
            values = np.clip(values, low, high)
            bound = bound + rounding * np.maximum(abs(low), abs(high))
            continue
        if "standard" in step:
            mean, std = (column(step["standard"][key]) for key in ("mean", "std"))
            values = values - mean
            bound = bound + rounding * (abs(values) + 2 * abs(mean))
            scale, offset = 1 / std, 0
        else:
            scale, offset = column(step.get("scale", 1)), column(step.get("offset", 0))
        values = values * scale
        bound = bound * abs(scale) + 2 * rounding * abs(values)
        values = values + offset
        bound = bound + rounding * (abs(values) + abs(offset))
    return values, bound


def assert_near(found, array, steps, share=1.0):
    """Compare with float64; predictions are besides rounded to steps of what they are at most."""
    values, bound = by_hand(array, steps)
    rounded = (share - 1.0) * 1e-6 * abs(values).max()
    assert (abs(found - values) <= share * bound + rounded + 1e-30).all()


def network(steps, channels=2):
    """The network's section of a job file with such steps."""
    return Network.model_validate(
        {
            "path": "identity",
            "input_channels": channels,
            "output_channels": channels,
            "normalize": steps,
        }
    )


def numbers(low, high):
    """One number for all of two channels, or one for each."""
    number = st.floats(low, high, width=32)
    return number | st.lists(number, min_size=2, max_size=2)


LIMITS = st.tuples(st.floats(-500, -1), st.floats(1, 500)).map(list)
SOME_STEPS = st.lists(
    st.fixed_dictionaries({"clip": LIMITS | st.lists(LIMITS, min_size=2, max_size=2)})
    | st.fixed_dictionaries({"scale": numbers(0.125, 8)}, optional={"offset": numbers(-99, 99)})
    | st.fixed_dictionaries(
        {
            "standard": st.fixed_dictionaries(
                {"mean": numbers(-500, 500), "std": numbers(0.125, 500)}
            )
        }
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)  # the first of them takes long
@given(steps=SOME_STEPS, seed=st.integers(0, 99), dtype=st.sampled_from(["f4", "u1", "i2"]))
def test_numpy_and_torch_agree_and_are_near_float64(steps, seed, dtype):
    normalize = StepwiseNormalization(network(steps).normalize)
    array = np.random.default_rng(seed).normal(60, 30, (2, 3, 4, 5)).astype(dtype)
    batch = array[None].astype(np.float32)
    found = normalize(batch.copy())
    assert found.tobytes() == normalize(torch.from_numpy(batch.copy())).numpy().tobytes()
    assert_near(found[0], array, steps)


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_steps_give_the_same_bits_for_all_chunk_shapes_and_strategies(tmp_path, steps):
    url = write_volume(tmp_path / "in", INPUT, block_shape=(8, 8, 8))
    outputs = results(url, tmp_path, {"normalize": steps})
    assert_near(outputs[0], INPUT, steps, share=2.0)


def results(url, folder, model, **sections):
    """What a job with a model's keys gives in three ways, which must have the same bits."""
    ways = [
        ([8, 16, 8], "recompute"),
        ([24, 24, 32], "recompute"),
        ([16, 8, 16], "exchange"),
    ]
    outputs = [
        done(url, folder / f"out{number}", model, *way, **sections)
        for number, way in enumerate(ways)
    ]
    assert outputs[0].tobytes() == outputs[1].tobytes() == outputs[2].tobytes()
    return outputs


def done(url, out, model, chunk_shape, strategy, **sections):
    """Do a job without Beam; its output."""
    values = job_values(
        url,
        out,
        model={"input_channels": 2, "output_channels": 2} | model,
        inference={"chunk_shape": chunk_shape, "strategy": strategy},
        output={"block_shape": [8, 8, 8]},
        **sections,
    )
    launch = prepare(parse_job(values, out.parent))
    worker = Worker(launch)
    chunks = range(launch.read_job().plan.chunks.count)
    if strategy == "exchange":
        assert {record.outcome for record in worker.sum_chunks(chunks)} == {"summed"}
        assert {record.outcome for record in worker.merge_seams(chunks)} == {"done"}
    else:
        assert {record.outcome for record in worker.infer_chunks(chunks)} == {"done"}
    prepare(parse_job(values, out.parent))  # it may be resumed: the same fingerprint
    return read_volume(out)


def test_predict_takes_steps():
    steps = STEPS[1]
    found = predict(
        INPUT,
        lambda batch: batch,
        patch_shape=(10, 12, 14),
        patch_overlap=(2, 4, 4),
        output_channels=2,
        normalize=steps,
    )
    assert_near(found, INPUT, steps, share=2.0)


@pytest.mark.parametrize("of", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_numbers_that_float32_does_not_hold_are_its_largest(of):
    steps = [{"clip": [-1e300, 1e300]}, {"offset": 1e300}]
    batch = np.array([-3e38, -1, -2, -3e38], np.float32).reshape(1, 2, 1, 1, 2)
    found = StepwiseNormalization(network(steps).normalize)(of(batch.copy()))
    assert np.asarray(found).tobytes() == (batch + np.finfo(np.float32).max).tobytes()


def test_the_fingerprint_holds_the_numbers(tmp_path):
    url = write_volume(tmp_path / "in", INPUT, block_shape=(8, 8, 8))

    def fingerprint(steps):
        model = {"input_channels": 2, "output_channels": 2, "normalize": steps}
        values = job_values(url, tmp_path / f"{len(list(tmp_path.iterdir()))}", model=model)
        return prepare(parse_job(values, tmp_path)).read_job().fingerprint

    first, same, second, third = map(
        fingerprint,
        (
            [{"clip": [0, 1]}, {"scale": 2}],
            [{"clip": [0, 1.0]}, {"scale": 2, "offset": 0}],
            [{"clip": [0, 2]}, {"scale": 2}],
            [{"scale": 2}, {"clip": [0, 1]}],
        ),
    )
    assert first == same
    assert len({first, second, third}) == 3


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "an empty list of steps"),
        ([{"clip": [2, 1]}], "low < high"),
        ([{"clip": [[0, 1]]}], r"normalize.0: clip lists 1 values, but input_channels says 2"),
        ([{"scale": [1, 2, 3]}], "normalize.0: scale lists 3"),
        ([{"standard": {"mean": 0, "std": [1, 0]}}], "greater than or equal"),
        ([{"scale": 0}], "scale must not be 0"),
        ([{"scale": 1e-50}], "scale must not be 0"),
        ([{"clip": [0, 1], "scale": 2}], "clip"),
        ([{"stretch": 1}], "is no step"),
        (["unit"], "is no step"),
    ],
    ids=str,
)
def test_steps_that_make_no_sense_are_refused(tmp_path, steps, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(
            job_values(
                "in",
                tmp_path / "out",
                model={"normalize": steps, "input_channels": 2, "output_channels": 2},
            ),
            tmp_path,
        )
