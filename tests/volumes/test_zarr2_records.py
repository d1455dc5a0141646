"""Arrays of zarr v2 whose values are records that no memory holds."""

import json

import pytest

from beam_inference.errors import VolumeError
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.zarr2_records import check_records

LARGE = [["a", "<f4", [1000, 1000]], ["b", [["c", "|u1"], ["d", "|S99"]]]]


def spec_of(folder, dtype):
    (folder / ".zarray").write_text(json.dumps({"dtype": dtype}))
    return {"driver": "zarr", "kvstore": f"file://{folder}/"}


@pytest.mark.parametrize(
    "dtype", ["<f8", "|V100", LARGE[1:], None, 7, [["a"]], [["a", "<f4", "b"]]]
)
def test_records_of_ordinary_sizes_pass_and_damaged_ones_are_left_to_tensorstore(dtype, tmp_path):
    check_records(spec_of(tmp_path, dtype), "em", LOCAL)


def test_arrays_without_metadata_and_of_other_drivers_pass(tmp_path):
    check_records({"driver": "zarr", "kvstore": f"file://{tmp_path}/"}, "em", LOCAL)
    spec = spec_of(tmp_path, LARGE)
    check_records(spec | {"driver": "zarr3"}, "em", LOCAL)


def test_large_records_are_refused_also_inside_of_other_specs(tmp_path):
    spec = spec_of(tmp_path, LARGE)
    for each in (
        spec,
        spec | {"driver": "zarr2"},
        spec | {"kvstore": f"file://{tmp_path}"},
        {"driver": "stack", "layers": [{"driver": "cast", "dtype": "uint8", "base": spec}]},
    ):
        with pytest.raises(VolumeError, match=r"em says in \.zarray .* a record of 4000100 bytes"):
            check_records(each, "em", LOCAL)
