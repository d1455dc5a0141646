import gzip
import json
import shutil

import numpy as np
import pytest
import tensorstore as ts
from fakes.hugging_face import files_of_folder
from fakes.web_files import WebFiles
from helpers import read_volume, write_volume

from beam_inference.config.formats import OutputSpec
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import PermanentReadError, VolumeError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_source, open_volume
from beam_inference.volumes.outputs import create_output, open_output

ARRAY = np.random.default_rng(0).integers(0, 2000, (2, 10, 20, 30)).astype(np.uint16)


def numpy_read(box):
    return ARRAY[(slice(None), *box.slices_in(BoundingBox((0, 0, 0), ARRAY.shape[1:])))]


BOX = BoundingBox((1, 3, 5), (9, 20, 21))


@pytest.mark.parametrize("format", ["precomputed", "zarr3", "zarr2"])
def test_what_is_written_is_read_in_zyx_with_its_voxel_size(tmp_path, format):
    url = write_volume(
        tmp_path / "v",
        ARRAY,
        voxel_size_nm=(40.0, 8.0, 7.16),
        block_shape=(8, 16, 16),
        format=format,
    )
    volume = open_volume(url)
    assert (volume.bounds, volume.channels, volume.dtype) == (
        BoundingBox((0, 0, 0), (10, 20, 30)),
        2,
        np.uint16,
    )
    assert volume.voxel_size_nm == pytest.approx((40, 8, 7.16))
    assert volume.block_shape == (8, 16, 16)
    np.testing.assert_array_equal(volume.read(BOX), numpy_read(BOX))
    np.testing.assert_array_equal(open_volume(url, channel=[1]).read(BOX), numpy_read(BOX)[1:])
    np.testing.assert_array_equal(
        open_volume(url, channel=[1, 0, 1]).read(BOX), numpy_read(BOX)[[1, 0, 1]]
    )


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
@pytest.mark.parametrize("format", ["precomputed", "zarr3", "zarr2", "n5"])
def test_a_volume_that_took_another_ones_place_is_read_anew(tmp_path, format, cache_bytes):
    """The first one is held open, as in a notebook."""
    url = write_volume(tmp_path / "v", ARRAY, voxel_size_nm=(40.0, 8.0, 8.0), format=format)
    write_volume(tmp_path / "w", ARRAY + 1, voxel_size_nm=(50.0, 8.0, 8.0), format=format)
    former = open_source(VolumeSource(url), cache_bytes=cache_bytes)
    np.testing.assert_array_equal(former.read(BOX), numpy_read(BOX))
    shutil.rmtree(tmp_path / "v")
    (tmp_path / "w").rename(tmp_path / "v")
    volume = open_source(VolumeSource(url), cache_bytes=cache_bytes)
    assert volume.voxel_size_nm == pytest.approx((50, 8, 8))
    np.testing.assert_array_equal(volume.read(BOX), numpy_read(BOX) + 1)


def test_n5_lists_its_axes_x_first(tmp_path):
    spec = {
        "driver": "n5",
        "kvstore": f"file://{tmp_path}/n5/",
        "metadata": {
            "dimensions": [30, 20, 10, 2],
            "blockSize": [16, 16, 8, 2],
            "dataType": "uint16",
            "compression": {"type": "gzip"},
        },
    }
    ts.open(spec, create=True).result().write(ARRAY.T).result()
    np.testing.assert_array_equal(read_volume(tmp_path / "n5"), ARRAY)


def test_a_zarr_array_without_names_is_zyx_and_a_spec_can_say_otherwise(tmp_path):
    spec = {
        "driver": "zarr",
        "kvstore": f"file://{tmp_path}/z/",
        "metadata": {"shape": [10, 20, 30], "chunks": [8, 8, 8], "dtype": "<u2"},
    }
    ts.open(spec, create=True).result().write(ARRAY[0]).result()
    volume = open_volume(f"file://{tmp_path}/z")
    assert volume.voxel_size_nm is None
    np.testing.assert_array_equal(volume.read(volume.bounds)[0], ARRAY[0])
    labelled = {
        "driver": "zarr",
        "kvstore": f"file://{tmp_path}/z/",
        "transform": {
            "input_inclusive_min": [0, 0, 0],
            "input_shape": [10, 20, 30],
            "input_labels": ["x", "y", "z"],
        },
    }
    volume = open_source(VolumeSource(spec=labelled))
    np.testing.assert_array_equal(volume.read(volume.bounds)[0], ARRAY[0].T)


@pytest.mark.parametrize(
    ("stored", "read"),
    [("bfloat16", "float32"), ("float8_e4m3fn", "float32"), ("int4", "int8"), ("int2", "int8")],
)
def test_numbers_that_few_tools_know_are_read_in_wider_ones(stored, read, tmp_path):
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{tmp_path}/z/",
        "metadata": {"shape": [2, 2, 2], "data_type": stored},
    }
    store = ts.open(spec, create=True).result()
    array = np.array([-2, -1, 0, 1] * 2).reshape(2, 2, 2)
    store.write(array.astype(store.dtype.numpy_dtype)).result()
    found = read_volume(tmp_path / "z")
    assert found.dtype == read
    np.testing.assert_array_equal(found[0], array)


def test_cutouts_reach_beyond_the_volume(tmp_path):
    volume = open_volume(write_volume(tmp_path / "v", ARRAY[0], (5, -3, 0)))
    box = BoundingBox((2, -3, -4), (8, 1, 3))
    reflected = volume.cutout(box, "reflect", 0)
    np.testing.assert_array_equal(reflected[0], np.pad(ARRAY[0], 4, mode="reflect")[1:7, 4:8, 0:7])
    constant = volume.cutout(box, "constant", 7)
    np.testing.assert_array_equal(
        constant[0], np.pad(ARRAY[0], 4, constant_values=7)[1:7, 4:8, 0:7]
    )
    outside = volume.cutout(BoundingBox((50, 0, 0), (52, 1, 1)), "constant", 7)
    assert outside.tolist() == [[[[7]], [[7]]]]


def test_zeros_are_written_like_any_other_value(tmp_path):
    for format in ("precomputed", "zarr3", "zarr2"):
        write_volume(
            tmp_path / format, np.zeros((8, 8, 8), np.uint8), block_shape=(8, 8, 8), format=format
        )
        blocks = [p for p in (tmp_path / format).rglob("*") if p.is_file() and p.name[0] in "0c"]
        assert len(blocks) == 1, blocks


def test_a_truncated_block_cannot_be_read_and_the_rest_can(tmp_path):
    volume = open_volume(write_volume(tmp_path / "v", ARRAY[0], block_shape=(8, 16, 16)))
    block = next((tmp_path / "v").rglob("0-16_0-16_0-8"))
    block.write_bytes(block.read_bytes()[:100])
    with pytest.raises(
        PermanentReadError, match=r"cannot read \[0, 0, 0 to 9, 9, 9\).*FAILED_PRECONDITION"
    ):
        volume.read(BoundingBox((0, 0, 0), (9, 9, 9)))
    assert volume.read(BoundingBox((8, 16, 16), (10, 20, 30))).shape == (1, 2, 4, 14)


def test_what_cannot_be_written_is_the_workers_fault(tmp_path):
    url = write_volume(tmp_path / "v", ARRAY[0], block_shape=(8, 16, 16))
    folder = next(p for p in (tmp_path / "v").iterdir() if p.is_dir())
    for block in folder.iterdir():
        block.unlink()
    folder.rmdir()
    folder.write_text("a file where the blocks' folder should be")
    spec = OutputSpec(
        url,
        "precomputed",
        "uint16",
        1,
        BoundingBox((0, 0, 0), (10, 20, 30)),
        (8, 16, 16),
        (10.0,) * 3,
    )
    volume = open_output(spec)
    assert volume is not None
    with pytest.raises(WorkerFault, match="cannot write"):
        volume.write(BoundingBox((0, 0, 0), (8, 16, 16)), ARRAY[:1, :8, :16, :16])


@pytest.mark.parametrize("suffix", [".bz2", ".lzma", ".zst"])
def test_compressed_block_files_are_refused_instead_of_read_as_zeros(tmp_path, suffix):
    url = write_volume(tmp_path / "v", ARRAY[0])
    for block in [p for p in (tmp_path / "v").rglob("*-*_*") if p.is_file()]:
        block.with_name(block.name + suffix).write_bytes(gzip.compress(block.read_bytes()))
        block.unlink()
    with pytest.raises(
        VolumeError, match="compressed block files .* would read every voxel as zero"
    ):
        open_volume(url)


def test_a_scale_without_a_folder_is_refused(tmp_path):
    create_output(
        OutputSpec(
            f"file://{tmp_path}/v",
            "precomputed",
            "uint8",
            1,
            BoundingBox((0,) * 3, (8,) * 3),
            (8,) * 3,
            (1.0,) * 3,
        )
    )
    with pytest.raises(VolumeError, match="there is no such folder"):
        open_volume(f"file://{tmp_path}/v")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "found there: nothing"),
        (lambda path: path.write_text("x"), "is a file, not a folder"),
        (lambda path: (path.mkdir(), (path / "info").write_text("{")), "not valid JSON"),
        (lambda path: (path.mkdir(), (path / "info").write_text("{}")), "lists no scales"),
        (
            lambda path: (path.mkdir(), (path / "zarr.json").write_text('{"node_type": "group"}')),
            "group of arrays",
        ),
        (lambda path: (path.mkdir(), (path / ".zgroup").write_text("{}")), "group of arrays"),
        (
            lambda path: (path.mkdir(), (path / "attributes.json").write_text("{}")),
            "group of arrays",
        ),
    ],
)
def test_what_is_no_volume(tmp_path, prepare, message):
    prepare(tmp_path / "v")
    with pytest.raises(VolumeError, match=message):
        open_volume(f"file://{tmp_path}/v")


def test_scales_and_channels_that_are_not_there(tmp_path):
    url = write_volume(tmp_path / "v", ARRAY[0])
    with pytest.raises(VolumeError, match=r"has the scales 0 … 0, and scale 3 is asked for"):
        open_volume(url, scale=3)
    with pytest.raises(VolumeError, match=r"has the channels 0 … 0"):
        open_volume(url, channel=[1])
    zarr = write_volume(tmp_path / "z", ARRAY[0], format="zarr3")
    with pytest.raises(VolumeError, match="single zarr3 array"):
        open_volume(zarr, scale=1)
    with pytest.raises(VolumeError, match="unsupported URL scheme"):
        open_volume("ftp://host/volume")


def test_five_axes_are_refused_with_a_way_out(tmp_path):
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{tmp_path}/z/",
        "metadata": {"shape": [2] * 5, "data_type": "uint8"},
    }
    ts.open(spec, create=True).result()
    with pytest.raises(VolumeError, match="where axes have no names, with input.spec"):
        open_volume(f"file://{tmp_path}/z")


def test_zarr_v2_says_its_axes_in_its_attributes(tmp_path):
    spec = {
        "driver": "zarr",
        "kvstore": f"file://{tmp_path}/z/",
        "metadata": {"shape": [10, 20, 30, 2], "chunks": [8, 8, 8, 2], "dtype": "<u2"},
    }
    ts.open(spec, create=True).result().write(np.moveaxis(ARRAY, 0, -1)).result()
    attributes = {
        "_ARRAY_DIMENSIONS": ["z", "y", "x", "c"],
        "dimension_units": ["40 nm", "8 nm", "0.008 micrometer", None],
    }
    (tmp_path / "z" / ".zattrs").write_text(json.dumps(attributes))
    volume = open_volume(f"file://{tmp_path}/z")
    np.testing.assert_array_equal(volume.read(volume.bounds), ARRAY)
    assert volume.voxel_size_nm == pytest.approx((40, 8, 8))


@pytest.mark.parametrize(
    "text", ["not json", "[]", '{"dimension_units": null}', '{"dimension_units": [1, 2, 3, 4]}']
)
def test_odd_attributes_of_zarr_v2(tmp_path, text):
    url = write_volume(tmp_path / "z", ARRAY, format="zarr2")
    (tmp_path / "z" / ".zattrs").write_text(text)
    if text.startswith("{"):
        assert open_volume(url).voxel_size_nm is None
    else:
        with pytest.raises(VolumeError, match="metadata are damaged"):
            open_volume(url)


@pytest.mark.parametrize(
    "text", ["[]", '{"scales": 3}', '{"scales": []}', '{"scales": [3]}', '{"scales": [{}]}']
)
def test_odd_info_files(tmp_path, text):
    url = write_volume(tmp_path / "v", ARRAY)
    (tmp_path / "v" / "info").write_text(text)
    with pytest.raises(VolumeError):
        open_volume(url)


def test_long_names_of_units_are_lengths_and_others_are_told_of(tmp_path, caplog):
    metadata = {
        "dimensions": [3, 3, 3],
        "blockSize": [3, 3, 3],
        "dataType": "uint8",
        "compression": {"type": "raw"},
    }
    for name, unit in (("a", "micrometer"), ("b", "pixel")):
        units = {"axes": ["x", "y", "z"], "units": [unit] * 3, "resolution": [1, 1, 2]}
        ts.open(
            {
                "driver": "n5",
                "kvstore": f"file://{tmp_path}/{name}/",
                "metadata": metadata | units,
            },
            create=True,
        ).result()
    assert open_volume(f"file://{tmp_path}/a").voxel_size_nm == (2000, 1000, 1000)
    assert open_volume(f"file://{tmp_path}/b").voxel_size_nm is None
    assert "states voxel sizes in pixel" in caplog.text


def test_tensorstores_own_urls_and_specs_are_checked_too(tmp_path):
    url = write_volume(tmp_path / "v", ARRAY)
    assert open_volume(f"{url}|neuroglancer-precomputed:").channels == 2
    for block in [p for p in (tmp_path / "v").rglob("*-*_*") if p.is_file()]:
        block.rename(block.with_name(block.name + ".bz2"))
    with pytest.raises(VolumeError, match="would read every voxel as zero"):
        open_source(VolumeSource(spec={"driver": "neuroglancer_precomputed", "kvstore": f"{url}/"}))


@pytest.mark.parametrize("format", ["precomputed", "zarr3"])
@pytest.mark.parametrize("there", ["whole", "empty", "absent"])
def test_shards_that_a_web_server_does_not_have_are_told_of(tmp_path, format, there, caplog):
    array = np.ones((16, 32, 32), np.uint8)
    write_volume(tmp_path, array, block_shape=(16, 16, 16), shard_shape=(16, 32, 32), format=format)
    files = {f"/{name}": content for name, content in files_of_folder(tmp_path).items()}
    (shard,) = (name for name in files if name.count("/") > 1)
    if there == "empty":
        files[shard] = b""
    elif there == "absent":
        del files[shard]
    with WebFiles(files) as server:
        open_volume(server.url)
    assert server.sent[shard] == (1 if there == "whole" else 0)
    told = "has none of its first, middle and last block" in caplog.text
    assert told == (there != "whole")
