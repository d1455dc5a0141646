"""Blocks that metadata speak of, held against the files that are there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import write_volume

from beam_inference.errors import VolumeError
from beam_inference.volumes.opening import open_volume

ARRAY = np.arange(1, 24**3 + 1, dtype=np.uint16).reshape(24, 24, 24)
METADATA = {
    "precomputed": "info",
    "zarr2": ".zarray",
    "zarr3": "zarr.json",
    "n5": "attributes.json",
    "ome_zarr": "0/zarr.json",
}


@pytest.fixture
def volume(tmp_path: Path) -> Callable[..., Path]:
    def make(format: str, change: Callable[[dict[str, Any]], object] | None = None) -> Path:
        write_volume(tmp_path / "em", ARRAY, format=format, block_shape=(8, 8, 8))
        if change is not None:
            path = tmp_path / "em" / METADATA[format]
            metadata = json.loads(path.read_text())
            change(metadata)
            path.write_text(json.dumps(metadata))
        return tmp_path / "em"

    return make


def of_scale(**keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda info: info["scales"][0].update(keys)


def remove_blocks(folder: Path, *, but: int = 0) -> None:
    blocks = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    blocks = [path for path in blocks if path.name not in {*METADATA.values(), ".zattrs"}]
    for path in blocks[: len(blocks) - but]:
        if path.name != "zarr.json":
            path.unlink()


SHARDING = {
    "@type": "neuroglancer_uint64_sharded_v1",
    "hash": "identity",
    "preshift_bits": 0,
    "minishard_bits": 0,
    "shard_bits": 5,
    "minishard_index_encoding": "raw",
    "data_encoding": "raw",
}


def rename_keys(name: str, separator: str) -> Callable[[dict[str, Any]], object]:
    configuration = {"separator": separator}
    return lambda metadata: metadata.update(
        chunk_key_encoding={"name": name, "configuration": configuration}
    )


@pytest.mark.parametrize(
    ("format", "change"),
    [
        ("precomputed", of_scale(chunk_sizes=[[6, 6, 6]])),
        ("precomputed", of_scale(voxel_offset=[1, 0, 0])),
        ("precomputed", of_scale(sharding=SHARDING)),
        ("zarr2", lambda metadata: metadata.update(dimension_separator=".")),
        ("zarr2", lambda metadata: metadata.pop("dimension_separator")),
        ("zarr3", rename_keys("default", ".")),
        ("zarr3", rename_keys("v2", "/")),
        ("ome_zarr", rename_keys("v2", ".")),
    ],
)
def test_metadata_that_speak_of_other_blocks_are_refused(volume, format, change):
    with pytest.raises(VolumeError, match="none has a name that its metadata imply"):
        open_volume(str(volume(format, change)))


@pytest.mark.parametrize("format", METADATA)
def test_one_block_is_enough(volume, format, caplog):
    folder = volume(format)
    remove_blocks(folder, but=1)
    (folder / "README").write_text("a volume")
    (folder / "2021").write_text("the year")
    opened = open_volume(str(folder))
    assert opened.read(opened.bounds).any()
    assert "no blocks" not in caplog.text


@pytest.mark.parametrize("format", METADATA)
def test_a_volume_without_blocks_is_warned_of(volume, format, caplog):
    folder = volume(format)
    remove_blocks(folder)
    with caplog.at_level(logging.WARNING):
        opened = open_volume(str(folder))
    assert "em has no blocks: every voxel of it reads as the fill value" in caplog.text
    assert not opened.read(opened.bounds).any()


def test_shards_are_blocks(tmp_path, caplog):
    for format in ("precomputed", "zarr3"):
        place = tmp_path / format
        write_volume(place, ARRAY, format=format, block_shape=(8, 8, 8), shard_shape=(16, 16, 16))
        opened = open_volume(str(place))
        np.testing.assert_array_equal(opened.read(opened.bounds)[0], ARRAY)
    assert not caplog.text


@pytest.mark.parametrize("key", ["../em/10_10_10", "/etc", "", "a//b", "."])
def test_a_scale_lies_in_its_volume(volume, key):
    folder = volume("precomputed", of_scale(key=key))
    with pytest.raises(VolumeError, match="is no path inside of the volume's folder"):
        open_volume(str(folder))


@pytest.mark.parametrize("size", [0, -8])
def test_a_resolution_that_is_no_length_is_not_stated(volume, size):
    folder = volume("precomputed", of_scale(resolution=[8, size, 8]))
    assert open_volume(str(folder)).voxel_size_nm is None


def test_metadata_of_any_length_are_not_parsed(volume):
    folder = volume("precomputed")
    with (folder / "info").open("a") as file:
        file.write(" " * (2**26 + 1))
    with pytest.raises(VolumeError, match="metadata of a volume have less than 67,108,864"):
        open_volume(str(folder))
