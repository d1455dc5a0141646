"""Blocks that metadata speak of, held against the files that are there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from helpers import write_volume

from beam_inference.errors import PermanentReadError, VolumeError
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


def blocks_of(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if path.name not in {*METADATA.values(), ".zattrs", "zarr.json"}]


def with_text_after(text: str) -> Callable[[Path], Path]:
    return lambda path: path.with_name(path.name + text)


@pytest.mark.parametrize(
    ("format", "rename"),
    [(format, with_text_after(".part")) for format in METADATA if format != "precomputed"]
    + [
        ("precomputed", with_text_after(" (1)")),
        ("precomputed", with_text_after(".gz.1")),
        ("zarr2", lambda path: path.parents[2] / ".".join(path.parts[-3:])[0:5]),
        ("n5", lambda path: path.with_name(f"0{path.name}")),
    ],
)
def test_one_file_of_another_name_is_refused(volume, format, rename):
    folder = volume(format)
    block = blocks_of(folder)[5]
    block.rename(rename(block))
    with pytest.raises(VolumeError, match=r"seems to be meant as the block .*would read as"):
        open_volume(str(folder))


def test_a_file_of_another_name_beside_its_block_is_left_alone(volume):
    folder = volume("precomputed")
    block = blocks_of(folder)[5]
    block.with_name(f"{block.name} (1)").write_bytes(b"old")
    block.with_name(f"{block.name}_0123456789abcdef.__lock").write_bytes(b"draft")
    opened = open_volume(str(folder))
    np.testing.assert_array_equal(opened.read(opened.bounds)[0], ARRAY)


@pytest.mark.parametrize(
    "change",
    [
        of_scale(size=[20, 24, 24]),
        of_scale(size=[32, 24, 22]),
        of_scale(chunk_sizes=[[16, 8, 8], [8, 8, 8]]),
    ],
)
def test_blocks_at_the_end_of_other_extents_are_refused(volume, change):
    with pytest.raises(VolumeError, match="seems to be meant as the block|none has a name"):
        open_volume(str(volume("precomputed", change)))


@pytest.mark.parametrize("name", ["0A.shard", "00a.shard", "0a.shard.part", "0a.shard.gz"])
def test_one_shard_of_another_name_is_refused(name, tmp_path):
    place = tmp_path / "em"
    write_volume(place, np.tile(ARRAY, (4, 4, 2)), block_shape=(8, 8, 8), shard_shape=(16, 16, 16))
    (place / "10_10_10" / "0a.shard").rename(place / "10_10_10" / name)
    with pytest.raises(VolumeError, match="seems to be meant as the block 0a.shard"):
        open_volume(str(place))


def test_a_hashed_shard_that_is_no_file_is_noticed(tmp_path):
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"file://{tmp_path}/em/",
        "multiscale_metadata": {"data_type": "uint16", "num_channels": 1, "type": "image"},
        "scale_metadata": {
            "size": [24, 24, 24],
            "chunk_size": [8, 8, 8],
            "resolution": [8, 8, 8],
            "encoding": "raw",
            "sharding": {**SHARDING, "hash": "murmurhash3_x86_128", "shard_bits": 1},
        },
    }
    store = ts.open(spec, create=True).result()
    store.write(ARRAY.T[..., None]).result()
    shard = next((tmp_path / "em").rglob("*.shard"))
    shard.unlink()
    for put in (lambda: shard.symlink_to("nowhere"), shard.mkdir):
        put()
        volume = open_volume(f"file://{tmp_path}/em")
        with pytest.raises(PermanentReadError, match=f"{shard.name} is a folder or the like"):
            volume.read(volume.bounds)
        if shard.is_symlink():
            shard.unlink()


def of_array(**keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda metadata: metadata.update(keys)


def of_grid(*extents: int) -> Callable[[dict[str, Any]], object]:
    return lambda metadata: metadata["chunk_grid"]["configuration"].update(chunk_shape=extents)


@pytest.mark.parametrize(
    ("format", "change"),
    [
        ("precomputed", of_scale(size=[16, 24, 24])),
        ("zarr2", of_array(shape=[24, 8, 24])),
        ("zarr2", of_array(chunks=[4, 16, 8])),
        ("zarr3", of_array(shape=[24, 24, 16])),
        ("zarr3", of_grid(16, 4, 8)),
        ("n5", of_array(dimensions=[24, 24, 8])),
        ("n5", of_array(blockSize=[4, 16, 8])),
    ],
)
def test_blocks_outside_of_the_volume_are_refused(volume, format, change):
    """Others fit, by their names, and by their sizes: voxels would be lost, or exchanged."""
    message = "a block that by the metadata lies outside|holds files of blocks"
    with pytest.raises(VolumeError, match=message):
        open_volume(str(volume(format, change)))


@pytest.mark.parametrize("name", ["0-0-1", "0_0_1", ".0.0.1.a8Dk2d", ".0.0.1"])
def test_an_absent_block_is_found_under_other_names(tmp_path, name):
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/em/"}
    ts.open(spec | {"dtype": "uint16"}, create=True, shape=(24, 24, 24)).result()
    metadata = json.loads((tmp_path / "em" / ".zarray").read_text())
    (tmp_path / "em" / ".zarray").write_text(json.dumps(metadata | {"chunks": [8, 8, 8]}))
    ts.open(spec).result().write(ARRAY).result()
    open_volume(f"{tmp_path}/em")
    (tmp_path / "em" / "0.0.1").rename(tmp_path / "em" / name)
    with pytest.raises(VolumeError, match=r"seems to be meant as the block 0\.0\.1"):
        open_volume(f"{tmp_path}/em")
