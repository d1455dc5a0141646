"""Pyramids: scales are what brute force makes of those below, and are listed once complete."""

import json
import shutil
import threading

import numpy as np
import pytest
from helpers import files_of, truncated, write_volume
from oracles.downsampling import level_above

from beam_inference.cli.main import main
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import make_pyramid, plan_pyramid, run_pyramid
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume


def random(shape, dtype):
    values = np.random.default_rng(0).integers(0, 5 if dtype == "uint64" else 256, shape)
    return values.astype(dtype) + (np.uint64(2**63) if dtype == "uint64" else 0)


def planned(url, scale=0, **settings):
    return plan_pyramid(multiscale_volume(url, LOCAL, scale), **settings)


def made(url, scale=0, **settings):
    """A pyramid that was made without Beam, and listed."""
    pyramid = planned(url, scale, **settings)
    for stage in pyramid.stages:
        do = stage.make_worker()
        for index in reversed(range(stage.count)):
            do(index)
    pyramid.volume.list_scales(pyramid.scales)
    return pyramid


def scales(url):
    """What a reader sees: start and voxels of every scale."""
    volumes = [open_volume(url, scale=k) for k in range(len(volume_at(url).scales))]
    return [(volume.bounds.start, volume.read(volume.bounds)) for volume in volumes]


@pytest.mark.parametrize(
    ("format", "dtype", "method", "shape", "start", "size"),
    [
        ("precomputed", "uint8", "mean", (2, 21, 33, 50), (3, -5, 2), (40.0, 8.0, 8.0)),
        ("precomputed", "uint64", "mode", (1, 33, 20, 35), (-1, 4, 7), (10.0, 10.0, 10.0)),
        ("precomputed", "float32", "mean", (1, 17, 34, 19), (1, 1, 1), (10.0, 10.0, 10.0)),
        ("precomputed", "uint64", "mode", (1, 17, 34, 19), (1, 1, 1), (40.0, 8.0, 8.0)),
        ("ome_zarr", "uint16", "mean", (3, 17, 34, 19), (0, 0, 0), (40.0, 8.0, 8.0)),
        ("ome_zarr_0.4", "uint64", "mode", (1, 17, 34, 19), (0, 0, 0), (10.0, 10.0, 10.0)),
    ],
)
def test_every_level_is_what_brute_force_makes_of_the_one_below(
    tmp_path, format, dtype, method, shape, start, size
):
    array = random(shape, dtype)
    url = write_volume(
        tmp_path / "v", array, start, block_shape=(8, 8, 8), voxel_size_nm=size, format=format
    )
    pyramid = made(url, method=method, chunk_bytes=2**14)
    found = scales(url)
    assert len(found) == len(pyramid.scales) + 1 >= 3
    assert max(found[-1][1].shape[1:]) <= 8 < max(found[-2][1].shape[1:])
    np.testing.assert_array_equal(found[0][1], array)
    for (below_start, below), (above_start, above), level in zip(
        found, found[1:], pyramid.scales, strict=False
    ):
        assert above_start == tuple(a // f for a, f in zip(below_start, level.factor, strict=True))
        np.testing.assert_array_equal(above, level_above(below, below_start, level.factor, method))
    voxel_sizes = [each.voxel_size_nm for each in volume_at(url).scales]
    assert voxel_sizes[1] == ((40, 16, 16) if size[0] == 40 else (20, 20, 20))
    assert voxel_sizes[-1] == tuple(
        a * b for a, b in zip(size, pyramid.scales[-1].total, strict=True)
    )


@pytest.mark.parametrize("format", ["precomputed", "ome_zarr"])
@pytest.mark.parametrize(("dtype", "method"), [("float32", "mean"), ("uint64", "mode")])
def test_the_shape_of_chunks_changes_no_bit(tmp_path, format, dtype, method):
    array = random((1, 37, 45, 51), dtype)
    start = (3, -5, 2) if format == "precomputed" else (0, 0, 0)
    results = []
    for number, chunk_bytes in enumerate((1, 2**13 * array.itemsize, 2**30)):
        url = write_volume(
            tmp_path / f"{number}", array, start, block_shape=(8, 8, 8), format=format
        )
        pyramid = made(url, method=method, chunk_bytes=chunk_bytes)
        results.append((pyramid.stages[0].count, [voxels for _, voxels in scales(url)]))
    many, some, one = (count for count, _ in results)
    assert many > some > one == 1
    for _, levels in results[1:]:
        for some, others in zip(levels, results[0][1], strict=True):
            assert some.tobytes() == others.tobytes()


SHARDING = {
    "@type": "neuroglancer_uint64_sharded_v1",
    **{"preshift_bits": 3, "minishard_bits": 1, "shard_bits": 4, "hash": "identity"},
    **{"minishard_index_encoding": "gzip", "data_encoding": "gzip"},
}


def labels(tmp_path, **scale):
    """A segmentation of 60 × 64 × 70 voxels, in compressed blocks and shards."""
    import tensorstore as ts

    array = random((60, 64, 70), "uint64")
    entry = {
        "size": [70, 64, 60],
        "resolution": [8, 8, 8],
        "chunk_size": [8, 8, 8],
        "key": "full",
        **scale,
    }
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"file://{tmp_path}/seg",
        "multiscale_metadata": {"type": "segmentation", "data_type": "uint64", "num_channels": 1},
        "scale_metadata": {
            **{
                "encoding": "compressed_segmentation",
                "compressed_segmentation_block_size": [8, 8, 8],
            },
            **{"sharding": SHARDING, "voxel_offset": [0, 0, 0]},
            **entry,
        },
    }
    ts.open(spec, create=True).result().write(array.T[..., None]).result()
    return f"file://{tmp_path}/seg", array


def test_blocks_encoding_and_shards_are_the_bases_and_shards_are_made_in_parts(tmp_path):
    url, array = labels(tmp_path)
    pyramid = made(url, chunk_bytes=2**15)
    assert pyramid.method == "mode", "as the volume says its kind"
    first = pyramid.stages[0]
    assert first.chunks.chunk_shape == (16, 16, 32), "a shard"
    assert first.part_shape == (8, 8, 8), "smaller than a shard"
    base, *others = json.loads((tmp_path / "seg" / "info").read_text())["scales"]
    for key in ("encoding", "sharding", "chunk_sizes", "compressed_segmentation_block_size"):
        assert all(each[key] == base[key] for each in others)
    assert [each["key"] for each in others] == ["16_16_16", "32_32_32", "64_64_64", "128_128_128"][
        : len(others)
    ]
    files = {path.name for path in (tmp_path / "seg" / "16_16_16").iterdir()}
    assert files == {f"{k:x}.shard" for k in range(pyramid.blocks[0])}
    np.testing.assert_array_equal(
        scales(url)[1][1], level_above(array[None], (0, 0, 0), (2, 2, 2), "mode")
    )


@pytest.mark.parametrize(
    ("dtype", "method"),
    [pytest.param("uint16", "mean", marks=pytest.mark.slow), ("uint64", "mode")],
)
def test_shards_of_ome_zarr_are_the_bases_and_each_is_written_once(tmp_path, dtype, method):
    zarr = pytest.importorskip("zarr")
    array = random((2, 50, 70, 45), dtype)
    url = write_volume(
        tmp_path / "v", array, block_shape=(8, 8, 8), format="ome_zarr", shard_shape=(16, 32, 16)
    )
    pyramid = made(url, method=method, chunk_bytes=2**17, num_scales=3)
    first = pyramid.stages[0]
    assert all(
        n % shard == 0 for n, shard in zip(first.chunks.chunk_shape, (16, 32, 16), strict=True)
    ), "whole shards"
    assert first.count > 1
    assert np.prod(first.part_shape) < 16 * 32 * 16, "made in parts"
    group = zarr.open_group(str(tmp_path / "v"), mode="r")
    start = (0, 0, 0)
    level = array
    for number, blocks in enumerate(
        [(4, 3, 3), *(ChunkGrid(each.bounds, (16, 32, 16)).shape for each in pyramid.scales)]
    ):
        stored = group[str(number)]
        assert (stored.shards, stored.chunks) == ((2, 16, 32, 16), (2, 8, 8, 8))
        assert len(
            [path for path in (tmp_path / "v" / str(number) / "c").rglob("*") if path.is_file()]
        ) == np.prod(blocks)
        np.testing.assert_array_equal(stored[:], level)
        level = level_above(level, start, (2, 2, 2), method)


@pytest.mark.parametrize("by_url", [True, False])
def test_making_a_pyramid_returns_values_and_prints_nothing(tmp_path, capsys, by_url):
    url = write_volume(tmp_path / "v", random((32, 32, 32), "uint8"), block_shape=(8, 8, 8))
    volume = url if by_url else multiscale_volume(url, LOCAL)
    result = make_pyramid(volume, method="mean", factor=(2, 2, 2), num_scales=2)
    assert result.url == url
    assert [scale.bounds.shape for scale in result.scales] == [(16, 16, 16), (8, 8, 8)]
    assert result.outcome.is_complete
    assert len(volume_at(url).scales) == 3
    assert capsys.readouterr().out == ""


def test_a_level_is_listed_once_it_is_complete_and_never_before(tmp_path):
    array = random((1, 40, 40, 40), "uint8")
    url = write_volume(tmp_path / "v", array, block_shape=(8, 8, 8))
    before = (tmp_path / "v" / "info").read_text()
    pyramid = planned(url, chunk_bytes=1)
    first, second, *_ = pyramid.stages
    block = tmp_path / "v" / "20_20_20" / "0-8_0-8_0-8"
    with truncated(tmp_path / "v" / "10_10_10" / "0-8_0-8_0-8"):
        outcome = run_pyramid(pyramid).outcome
        assert (outcome.exit_code, outcome.done) == (1, first.count - 1)
        assert "level-1, chunk 0" in outcome.failures[0]
        assert (tmp_path / "v" / "info").read_text() == before
    assert not block.exists()
    # what is under way can be opened by who makes it, and by nobody else
    second.volume.open_scale(first.scale)
    assert len(volume_at(url).scales) == 1
    outcome = run_pyramid(planned(url, chunk_bytes=1)).outcome
    assert outcome.exit_code == 0
    np.testing.assert_array_equal(
        scales(url)[1][1], level_above(array, (0, 0, 0), (2, 2, 2), "mean")
    )
    assert len(volume_at(url).scales) == len(pyramid.scales) + 1


@pytest.mark.parametrize("format", ["precomputed", "ome_zarr", "ome_zarr_0.4"])
def test_levels_that_are_listed_at_the_same_time_are_all_kept_and_in_order(tmp_path, format):
    url = write_volume(
        tmp_path / "v", random((64, 64, 64), "uint8"), block_shape=(8, 8, 8), format=format
    )
    pyramid = planned(url, num_scales=6)
    threads = [
        threading.Thread(target=multiscale_volume(url, LOCAL).list_scales, args=([level],))
        for level in reversed(pyramid.scales)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = [each.voxel_size_nm for each in volume_at(url).scales]
    assert sizes == [(10 * 2**k,) * 3 for k in range(7)]
    volume = multiscale_volume(url, LOCAL)
    assert volume.listed_scales(pyramid.scales) == pyramid.scales
    volume.list_scales(pyramid.scales)
    assert len(volume_at(url).scales) == 7, "once each"
    volume.remove_scales(pyramid.scales[1:3])
    assert [each.voxel_size_nm[0] for each in volume_at(url).scales] == [10, 20, 80 * 2, 320, 640]


@pytest.mark.parametrize(
    ("format", "metadata", "folder"),
    [("ome_zarr", "zarr.json", "1"), ("precomputed", "info", "20_20_20")],
)
def test_a_folder_that_the_volume_does_not_list_is_not_written_into(
    tmp_path, format, metadata, folder
):
    array = random((1, 32, 32, 32), "uint8")
    url = write_volume(tmp_path / "v", array, format=format, voxel_size_nm=(10, 10, 10))
    unlisted = (tmp_path / "v" / metadata).read_bytes()
    make_pyramid(url, num_scales=1)
    (tmp_path / "v" / metadata).write_bytes(unlisted)
    shutil.rmtree(tmp_path / "v" / "_beam_inference")
    before = files_of(tmp_path)
    with pytest.raises(VolumeError, match=f"/v/{folder} is to be a scale .* does not list"):
        make_pyramid(url, method="mode", num_scales=1)
    assert files_of(tmp_path) == before
    assert make_pyramid(url, method="mode", num_scales=1, overwrite=True).outcome.is_complete


def test_other_peoples_levels_are_refused_and_replaced_if_told_so(tmp_path):
    array = random((1, 32, 32, 32), "uint8")
    url = write_volume(tmp_path / "v", array, block_shape=(8, 8, 8))
    made(url, num_scales=1, method="mode")  # leaves no record
    with pytest.raises(VolumeError, match="has level-1 of this pyramid already"):
        run_pyramid(planned(url, num_scales=2))
    assert run_pyramid(planned(url, num_scales=2), overwrite=True).outcome.exit_code == 0
    means = level_above(array, (0, 0, 0), (2, 2, 2), "mean")
    np.testing.assert_array_equal(scales(url)[1][1], means)
    assert main(["pyramid", str(tmp_path / "v"), "--levels=3"]) == 0, (
        "more levels go on where fewer have ended"
    )
    assert len(volume_at(url).scales) == 4
    with pytest.raises(VolumeError, match="already"):
        run_pyramid(planned(url, num_scales=2, method="mode"))
    with pytest.raises(StateError, match="records of another job"):
        run_pyramid(planned(url, scale=3, num_scales=1))
    np.testing.assert_array_equal(scales(url)[1][1], means)


def test_a_folder_that_is_another_scales_is_not_written_to(tmp_path):
    url = write_volume(tmp_path / "v", random((32, 32, 32), "uint8"), block_shape=(8, 8, 8))
    info = tmp_path / "v" / "info"
    # its voxel size was put right, say
    info.write_text(info.read_text().replace('"10_10_10"', '"20_20_20"'))
    (tmp_path / "v" / "10_10_10").rename(tmp_path / "v" / "20_20_20")
    for overwrite in (False, True):
        with pytest.raises(VolumeError, match="is that of a scale of another voxel size"):
            run_pyramid(planned(url), overwrite=overwrite)
    assert (tmp_path / "v" / "20_20_20").is_dir()


def test_what_cannot_be_guessed_is_asked(tmp_path):
    url = write_volume(tmp_path / "v", random((32, 32, 32), "uint64"), block_shape=(8, 8, 8))
    with pytest.raises(ConfigError, match="--method=mode for labels"):
        planned(url)
    with pytest.raises(ConfigError, match="makes no smaller volume"):
        planned(url, method="mode", factor=(1, 1, 1))
    url = write_volume(tmp_path / "small", random((8, 8, 8), "uint8"), block_shape=(8, 8, 8))
    with pytest.raises(ConfigError, match="one block holds it"):
        planned(url)
    assert len(planned(url, num_scales=1).scales) == 1
    with pytest.raises(VolumeError, match="the scales 0 … 0"):
        planned(url, scale=1)
    url = write_volume(
        tmp_path / "zarr", random((8, 8, 8), "uint8"), block_shape=(8, 8, 8), format="zarr3"
    )
    with pytest.raises(VolumeError, match="no place for scales"):
        planned(url)
    with pytest.raises(VolumeError, match="no volume at"):
        planned(f"file://{tmp_path}/nowhere")


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    for format in ("precomputed", "ome_zarr"):
        array = random((20, 64, 64), "uint8")
        size = (40.0, 10.0, 10.0)
        write_volume(
            tmp_path / format, array, block_shape=(16, 16, 16), voxel_size_nm=size, format=format
        )
        before = sorted(tmp_path.rglob("*"))
        assert main(["pyramid", str(tmp_path / format), "--dry-run"]) == 0
        told = [line.split() for line in capsys.readouterr().out.split("\n")]
        assert [
            "level-1",
            "20×32×32",
            "40",
            "×",
            "20",
            "×",
            "20",
            "1×2×2",
            "1",
            "8",
            "20",
            "KiB",
        ] in told
        assert [
            "level-2",
            "20×16×16",
            "40",
            "×",
            "40",
            "×",
            "40",
            "1×2×2",
            "1",
            "2",
            "5",
            "KiB",
        ] in told
        assert main(["pyramid", str(tmp_path / format), "--dry-run", "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        level = {
            "name": "level-2",
            "shape": [20, 16, 16],
            "voxel_size_nm": [40, 40, 40],
            "factor": [1, 2, 2],
        }
        assert values["levels"][1] == level | {"chunks": 1, "blocks": 2, "bytes": 5 * 2**10}
        base = {
            "shape": [20, 64, 64],
            "dtype": "uint8",
            "channels": 1,
            "method": "mean",
            "bytes": 41 * 640,
        }
        assert values | base == values
        assert [len(values["levels"]), values["volume"]] == [3, f"file://{tmp_path}/{format}"]
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "no volume at"),
        (["http://host/em"], "can only be read from"),
        (["gs://b/em?token=abc"], "credentials"),
        (["em", "--runner=NoSuch"], "NoSuch"),
        (["em", "--json"], "give it with --dry-run"),
        (["em", "--no_such_flag=1"], "no_such_flag"),
    ],
)
def test_mistakes_are_told_in_one_message(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "em", random((32, 32, 32), "uint8"), block_shape=(16, 16, 16))
    assert main(["pyramid", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert "abc" not in error
