"""Named arrays in one frame: whatever is wrong with it is one kind of error."""

import json

import numpy as np
import pytest
import zstandard

from beam_inference.volumes.packed_arrays import pack_arrays, unpack_arrays


def framed(arrays, values=b"", file="a"):
    line = json.dumps({"file": file, "arrays": arrays}).encode() + b"\n"
    return zstandard.ZstdCompressor(write_checksum=True).compress(line + values)


def test_arrays_come_back():
    arrays = {
        "one": np.arange(6, dtype=np.int16).reshape(2, 3),
        "none": np.zeros((0, 4), np.float32),
        "records": np.zeros(2, [("a", "<i4"), ("b", "<f8", (3,))]),
    }
    found = unpack_arrays(pack_arrays(arrays, "a"), "a")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no frame",
        pack_arrays({"a": np.ones(3)}, "b"),
        pack_arrays({"a": np.ones(3)}, "a")[:-4],
        framed([["a", "<i4", [2**70]]]),
        framed([["a", "<i4", [-1]]], b"1234"),
        framed([["a", "i4,(2,i4", [1]]], b"1234"),
        framed([["a", [["f", "<i4", [2**40]]], [2**40]]], b"1234"),
        framed([["a", "<i4", [1]]], b"12345"),
        framed([["a", "<i4", "1"]], b"1234"),
        framed([["a", 5, [1]]], b"1234"),
        framed("abc"),
    ],
)
def test_damaged_ones(packed):
    with pytest.raises(ValueError, match="."):
        unpack_arrays(packed, "a")
