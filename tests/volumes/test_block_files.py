"""Files of blocks that would be read as zeros, or never."""

import gzip
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from helpers import write_volume
from PIL import Image

from beam_inference.config.formats import OutputSpec
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.block_files import sample_block_keys, unread_suffix
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.opening import open_source, open_volume
from beam_inference.volumes.outputs import create_output

ARRAY = np.random.default_rng(0).integers(1, 256, (3, 20, 40, 50), np.uint8)
FORMATS = ["precomputed", "zarr2", "zarr3", "n5", "ome_zarr", "ome_zarr_0.4"]
METADATA = {"info", "zarr.json", ".zarray", ".zattrs", ".zgroup", "attributes.json"}


def write(folder, format, start=(0, 0, 0), **keys):
    bounds = BoundingBox(start, tuple(a + n for a, n in zip(start, ARRAY.shape[1:], strict=True)))
    spec = OutputSpec(
        f"file://{folder}", format, "uint8", 3, bounds, (8, 16, 16), (8.0, 8.0, 8.0), **keys
    )
    create_output(spec).write(bounds, ARRAY)
    return open_volume(spec.url)


def blocks(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in METADATA)


def check_each_block_is_looked_at(folder, volume):
    """Put a folder in place of each block, one after the other: reading around it fails."""
    paths = blocks(folder)
    for path in paths:
        content = path.read_bytes()
        path.unlink()
        path.mkdir()
        with pytest.raises(PermanentReadError, match=f"{path.name} is a folder or the like"):
            open_volume(volume.url).read(volume.bounds)
        path.rmdir()
        path.write_bytes(content)
    return len(paths)


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_in_place_of_any_block_is_noticed(tmp_path, format):
    volume = write(tmp_path / "v", format)
    assert check_each_block_is_looked_at(tmp_path / "v", volume) == 3 * 3 * 4
    np.testing.assert_array_equal(volume.read(volume.bounds), ARRAY)


@pytest.mark.parametrize("format", ["precomputed", "zarr3", "ome_zarr"])
def test_a_folder_in_place_of_any_shard_is_noticed(tmp_path, format):
    volume = write(tmp_path / "v", format, shard_shape=(8, 32, 32))
    assert check_each_block_is_looked_at(tmp_path / "v", volume) >= 6


def test_offsets_and_separators(tmp_path):
    volume = write(tmp_path / "v", "precomputed", (-3, 70, -1000))
    check_each_block_is_looked_at(tmp_path / "v", volume)
    for number, encoding in enumerate(
        [{"name": "v2"}, {"name": "default", "configuration": {"separator": "."}}]
    ):
        folder = tmp_path / str(number)
        store = ts.open(
            {
                "driver": "zarr3",
                "kvstore": f"file://{folder}/",
                "metadata": {
                    "shape": [20, 40, 50],
                    "data_type": "uint8",
                    "dimension_names": list("zyx"),
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": [8, 16, 16]},
                    },
                    "chunk_key_encoding": encoding,
                },
            },
            create=True,
        ).result()
        store.write(ARRAY[0]).result()
        check_each_block_is_looked_at(folder, open_volume(f"file://{folder}"))


def test_only_the_blocks_that_are_read_are_looked_at(tmp_path):
    volume = write(tmp_path / "v", "precomputed")
    block = tmp_path / "v" / "8_8_8" / "16-32_16-32_8-16"
    block.unlink()
    os.mkfifo(block)
    apart = BoundingBox((0, 0, 0), (8, 16, 50))
    np.testing.assert_array_equal(volume.read(apart), ARRAY[:, :8, :16])
    with pytest.raises(PermanentReadError, match="Copy that file again"):
        volume.read(BoundingBox((15, 16, 16), (16, 17, 17)))
    channel = open_source(VolumeSource(volume.url, channel=[2]))
    with pytest.raises(PermanentReadError):
        channel.read(BoundingBox((15, 31, 31), (16, 32, 32)))


def test_names_of_blocks():
    assert unread_suffix("0-64_0-64_-64-0") is None
    assert unread_suffix("0-64_0-64_-64-0.__lock") is None
    assert unread_suffix("-64--32_0-64_-64-0.xz") == ".xz"
    assert unread_suffix("00.shard") is None


@pytest.mark.parametrize(
    ("format", "keys"),
    [
        ("precomputed", ["10_10_10/-5-59_0-8_0-8", "10_10_10/59-95_0-8_0-8"]),
        ("zarr2", ["0/0/0", "0/0/1"]),
        ("zarr3", ["c/0/0/0", "c/0/0/1"]),
        ("n5", ["0/0/0", "1/0/0"]),
    ],
)
def test_some_blocks_of_each_format(tmp_path, format, keys):
    start = (0, 0, -5) if format == "precomputed" else (0, 0, 0)
    url = write_volume(
        tmp_path / "v", np.ones((8, 8, 100), np.uint8), start, format=format, block_shape=(8, 8, 64)
    )
    volume = open_source(VolumeSource(url))
    domain = volume.store.domain
    ends = (domain.inclusive_min, [stop - 1 for stop in domain.exclusive_max])
    windows = (volume.store[tuple(slice(a, a + 1) for a in end)] for end in ends)
    found = sample_block_keys(volume.stored_spec, map(volume.view.stored_spans, windows))
    assert found == keys


@pytest.mark.parametrize("format", ["precomputed", "zarr2", "zarr3", "n5"])
def test_a_block_that_is_too_large_is_not_read(tmp_path, format):
    url = write_volume(tmp_path / "v", ARRAY, format=format)
    (tmp_path / "v" / "others").mkdir()
    blocks = [path for path in (tmp_path / "v").rglob("*") if path.is_file()]
    for block in blocks:
        if not block.name.startswith((".", "info", "zarr", "attributes", "provenance")):
            os.truncate(block, 2**37)
    volume = open_source(VolumeSource(url))
    with pytest.raises(PermanentReadError, match="more than a block can have"):
        volume.read(volume.bounds)


def test_metadata_that_are_too_large_are_not_read(tmp_path):
    url = write_volume(tmp_path / "v", ARRAY)
    os.truncate(tmp_path / "v" / "info", 2**37)
    with pytest.raises(VolumeError, match="metadata of a volume have less than"):
        open_source(VolumeSource(url))


def test_a_bucket_is_asked_for_three_blocks_only():
    store = open_kvstore("memory://bucket/v/", LOCAL)
    bounds = BoundingBox((0, 0, 0), ARRAY.shape[1:])
    spec = OutputSpec(
        "memory://bucket/v", "precomputed", "uint8", 3, bounds, (8, 16, 16), (8.0, 8.0, 8.0)
    )
    create_output(spec).write(bounds, ARRAY)
    np.testing.assert_array_equal(open_volume(spec.url).read(bounds), ARRAY)
    for key in store.list().result():
        name = key.decode()
        if name.endswith("_16-20"):
            store.write(f"{name}.zstd", store.read(name).result().value).result()
            store.write(name, None).result()
    with pytest.raises(VolumeError, match=r"such as 48-50_32-40_16-20\.zstd"):
        open_volume(spec.url)


def test_pipes_are_not_waited_for(tmp_path):
    url = write_volume(tmp_path / "v", ARRAY[0], block_shape=(20, 40, 50))
    (block,) = blocks(tmp_path / "v")
    block.unlink()
    os.mkfifo(block)
    with pytest.raises(PermanentReadError):
        open_volume(url).read(BoundingBox((0, 0, 0), (1, 1, 1)))


@pytest.mark.parametrize("format", FORMATS)
def test_a_link_that_leads_nowhere_in_place_of_a_block_is_noticed(tmp_path, format):
    """As git-annex and datalad leave them for files whose content was not fetched."""
    volume = write(tmp_path / "v", format)
    block = blocks(tmp_path / "v")[7]
    block.unlink()
    block.symlink_to("../../.git/annex/objects/nowhere")
    with pytest.raises(PermanentReadError, match=f"{block.name} is a folder or the like, or a li"):
        volume.read(volume.bounds)
    block.unlink()
    assert (volume.read(volume.bounds) == 0).sum() > 0  # absent blocks are background


@pytest.mark.parametrize("put", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_folder_in_place_of_a_folder_of_blocks_is_noticed(tmp_path, put):
    volume = write(tmp_path / "v", "zarr3")
    folder = tmp_path / "v" / "c" / "0" / "1"
    shutil.rmtree(folder)
    put(folder)
    with pytest.raises(PermanentReadError, match=f"{folder} is a folder or the like, or a link"):
        volume.read(volume.bounds)


def test_a_block_of_n5_that_is_smaller_than_its_place_is_noticed(tmp_path):
    volume = write(tmp_path / "v", "n5")
    block = blocks(tmp_path / "v")[0]
    content = block.read_bytes()
    block.write_bytes(content[:4] + (8).to_bytes(4, "big") + content[8:])
    with pytest.raises(
        PermanentReadError, match="is a block of .* voxels where 16 × 16 × 8 × 3 are"
    ):
        volume.read(volume.bounds)
    block.write_bytes(content)
    np.testing.assert_array_equal(open_volume(volume.url).read(volume.bounds), ARRAY)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("volume_bits", "picture_bits", "keys", "message"),
    [
        (8, 16, {}, "is a PNG of 16 bits and 1 channels, in a volume of 8 bits"),
        (16, 8, {}, "is a PNG of 8 bits and 1 channels, in a volume of 16 bits"),
        (16, 16, {"transparency": 0}, "is a PNG with transparency"),
    ],
)
def test_a_png_of_another_depth_never_reaches_its_decoder(
    tmp_path, volume_bits, picture_bits, keys, message, suffix
):
    info = {
        "@type": "neuroglancer_multiscale_volume",
        "type": "image",
        "data_type": f"uint{volume_bits}",
        "num_channels": 1,
        "scales": [
            {
                "key": "s0",
                "size": [8, 8, 8],
                "chunk_sizes": [[8, 8, 8]],
                "resolution": [4, 4, 40],
                "voxel_offset": [0, 0, 0],
                "encoding": "png",
            }
        ],
    }
    (tmp_path / "s0").mkdir()
    (tmp_path / "info").write_text(json.dumps(info))
    picture = io.BytesIO()
    Image.fromarray(np.zeros((64, 8), f"uint{picture_bits}")).save(picture, "PNG", **keys)
    content = picture.getvalue()
    packed = gzip.compress(content) if suffix else content
    (tmp_path / "s0" / f"0-8_0-8_0-8{suffix}").write_bytes(packed)
    volume = open_volume(f"file://{tmp_path}")
    with pytest.raises(PermanentReadError, match=message):
        volume.read(volume.bounds)
    if not suffix:
        with pytest.raises(PermanentReadError, match=message):
            volume.begin_sampling(1, [slice(0, 8, 2)] * 3)
    base = {"driver": "neuroglancer_precomputed", "kvstore": f"file://{tmp_path}/"}
    cast = {"driver": "cast", "dtype": f"uint{picture_bits}", "base": base}
    twice = {"driver": "cast", "dtype": "float32", "base": cast}
    for spec in (cast, twice) if not suffix else ():
        volume = open_source(VolumeSource(spec=spec))
        with pytest.raises(PermanentReadError, match=message):
            volume.read(volume.bounds)


@pytest.mark.parametrize("driver", ["zarr", "zarr3", "n5"])
def test_a_block_that_blosc_would_unpack_to_more_is_noticed(tmp_path, driver):
    blosc = {"cname": "lz4", "clevel": 5, "shuffle": 1}
    metadata = {
        "zarr": {"shape": [8, 8, 8], "chunks": [8, 8, 8], "dtype": "<u2"}
        | {"compressor": {"id": "blosc", **blosc}},
        "zarr3": {"shape": [8, 8, 8], "data_type": "uint16"}
        | {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 8, 8]}}}
        | {"codecs": [{"name": "blosc", "configuration": blosc | {"shuffle": "shuffle"}}]},
        "n5": {"dimensions": [8, 8, 8], "blockSize": [8, 8, 8], "dataType": "uint16"}
        | {"compression": {"type": "blosc", **blosc}},
    }[driver]
    spec = {"driver": driver, "kvstore": f"file://{tmp_path}/", "metadata": metadata}
    ts.open(spec, create=True).result()[...] = np.arange(512, dtype=np.uint16).reshape(8, 8, 8)
    volume = open_volume(f"file://{tmp_path}")
    assert volume.read(volume.bounds).any()
    (block,) = blocks(tmp_path)
    start = 16 if driver == "n5" else 0
    content = block.read_bytes()
    large = content[: start + 4] + (2**31 - 1).to_bytes(4, "little") + content[start + 8 :]
    block.write_bytes(large)
    with pytest.raises(PermanentReadError, match="unpacks to 2,147,483,647 bytes, where"):
        open_volume(volume.url).read(volume.bounds)


def test_codecs_before_blosc_and_fields_are_read(tmp_path):
    regular = {"name": "regular", "configuration": {"chunk_shape": [8, 8, 8]}}
    blosc = {
        "name": "blosc",
        "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "noshuffle"},
    }
    packed = [blosc, {"name": "gzip", "configuration": {"level": 1}}]
    for number, codecs in enumerate((["crc32c", blosc], [blosc, "crc32c"], [blosc, blosc], packed)):
        named = [codec if isinstance(codec, dict) else {"name": codec} for codec in codecs]
        folder = tmp_path / f"{number}"
        metadata = {"shape": [8, 8, 8], "data_type": "uint16", "chunk_grid": regular}
        metadata["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}, *named]
        spec = {"driver": "zarr3", "kvstore": f"file://{folder}/", "metadata": metadata}
        array = np.arange(512, dtype=np.uint16).reshape(8, 8, 8)
        ts.open(spec, create=True).result()[...] = array
        volume = open_volume(f"file://{folder}")
        if codecs is packed:
            with pytest.raises(PermanentReadError, match="is packed by gzip behind blosc"):
                volume.read(volume.bounds)
        else:
            np.testing.assert_array_equal(volume.read(volume.bounds)[0], array)
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/fields/", "field": "a"}
    metadata = {"shape": [8, 8, 8], "chunks": [8, 8, 8]}
    metadata["dtype"] = [["a", "<u2"], ["b", "<f8", [4, 4]]]
    metadata["compressor"] = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}
    ts.open({**spec, "metadata": metadata}, create=True).result()[...] = array
    wide = {"driver": "cast", "dtype": "float64", "base": spec}
    for each in (spec, wide):
        volume = open_source(VolumeSource(spec=each))
        np.testing.assert_array_equal(volume.read(volume.bounds)[0], array)
