import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from beam_inference.errors import ConfigError
from beam_inference.operators.normalize import Normalization, unit
from beam_inference.operators.quantize import quantize


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "uint32"])
def test_unit_maps_the_dtypes_maximum_to_one(dtype):
    normalize = unit(np.dtype(dtype))
    assert normalize(np.array([0, np.iinfo(dtype).max], np.float32)).tolist() == [0, 1]


def test_unit_needs_integers():
    with pytest.raises(ConfigError, match="unit needs an integer input"):
        unit(np.dtype("float32"))


def test_scale_offset_and_clip_on_arrays_and_tensors_alike():
    normalize = Normalization(scale=0.5, offset=-1, clip=(-0.5, 2))
    values = np.array([0, 1, 2, 4, 100], np.float32)
    expected = [-0.5, -0.5, 0, 1, 2]
    assert normalize(values.copy()).tolist() == expected
    assert normalize(torch.from_numpy(values.copy())).tolist() == expected


def test_the_default_changes_nothing():
    values = np.array([-3, 7], np.float32)
    assert Normalization()(values) is values


@given(
    hnp.arrays(np.float32, 20, elements=st.floats(-1e6, 1e6, width=32)),
    st.sampled_from(["uint8", "uint16", "int8", "int16"]),
    st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (-3.5, 1000.0)]),
)
def test_quantising_clips_and_rounds_to_nearest_and_never_wraps(values, dtype, value_range):
    low, high = value_range
    info = np.iinfo(dtype)
    exact = (values.astype(np.float64) - low) / (high - low) * (info.max - info.min) + info.min
    found = quantize(values.copy(), np.dtype(dtype), value_range).astype(np.float64)
    assert found.min() >= info.min
    assert found.max() <= info.max
    # Half a level, and what float32 arithmetic may add before the rounding.
    assert (
        np.abs(found - np.clip(exact, info.min, info.max)).max()
        <= 0.5 + 2e-7 * (info.max - info.min) * 2
    )


def test_quantised_ends_of_the_range_are_the_dtypes_ends():
    assert quantize(np.array([-1, 1, 9, -9], np.float32), np.dtype("int8"), (-1, 1)).tolist() == [
        -128,
        127,
        127,
        -128,
    ]
    assert quantize(np.array([0, 1, 0.5], np.float32), np.dtype("uint8"), (0, 1)).tolist() == [
        0,
        255,
        128,
    ]


def test_float32_is_written_as_it_is():
    values = np.array([1.5, -2], np.float32)
    assert quantize(values, np.dtype("float32"), None) is values


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int16"])
def test_whole_numbers_are_written_as_they_are_without_a_range(dtype):
    written = quantize(np.array([0, 7, 100], np.float32), np.dtype(dtype), None)
    assert (written.dtype, written.tolist()) == (np.dtype(dtype), [0, 7, 100])
