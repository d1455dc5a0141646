"""Conversion as a user asks for it, on the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest
import tensorstore as ts
from fakes.gcs import GcsStandIn
from foreign_files import tiff_bytes, write_file
from helpers import DATAFLOW, files_of, read_volume, truncated, write_volume
from source_volumes import assert_holds, random_array, save_slices, source_of

from beam_inference.cli.main import main
from beam_inference.conversion.convert import convert as convert_volume
from beam_inference.conversion.convert import plan_conversion
from beam_inference.conversion.options import ConversionOptions
from beam_inference.volumes.opening import open_volume

SIZE = ["--voxel-size", "40,4,4"]


def convert(*words):
    return main(["convert", *map(str, words)])


@pytest.fixture
def slices(tmp_path):
    """Twenty slices of 70 × 90 voxels, and their array."""
    array = random_array("uint8", (20, 70, 90))
    return save_slices(tmp_path / "slices", array), array


def check(path, array, size=(40.0, 4.0, 4.0), start=(0, 0, 0)):
    volume = open_volume(f"file://{path}")
    box = volume.bounds
    stop = tuple(a + n for a, n in zip(start, array.shape[-3:], strict=True))
    assert box.stop == stop
    assert volume.voxel_size_nm == pytest.approx(size)
    found = volume.read(box)[
        (slice(None), *(slice(a - b, None) for a, b in zip(start, box.start, strict=True)))
    ]
    np.testing.assert_array_equal(found, array if array.ndim == 4 else array[None])
    assert found.dtype == array.dtype


def test_slices_into_blocks_with_gaps_told(slices, tmp_path, capsys):
    folder, array = slices
    (folder / "s7.png").unlink()
    assert convert(f"{folder}/*.png", tmp_path / "em", *SIZE) == 0
    told = capsys.readouterr()
    assert "slices are missing, and those behind them move up: 7;" in told.err
    assert "19 × 70 × 90 voxels (z, y, x)" in told.out
    assert "each thread holds 0.1 MiB of voxels in memory\n" in told.out
    assert f"complete: {tmp_path}/em" in told.out
    check(tmp_path / "em", np.delete(array, 7, axis=0))
    info = json.loads((tmp_path / "em" / "info").read_text())
    assert info["scales"][0]["chunk_sizes"] == [[128, 128, 16]]


BLOCKS = [
    *product(
        ["precomputed", "zarr3", "zarr2", "n5", "ome_zarr", "ome_zarr_0.4"],
        [("float32", 3), ("uint64", 1)],
    ),
    ("precomputed", ("uint16", 1)),
]
WITH_OFFSET = ("precomputed", "ome_zarr", "ome_zarr_0.4")
"""Formats that state where a volume starts."""


@pytest.mark.parametrize(
    ("format", "volume"),
    [BLOCKS[0], *(pytest.param(*b, marks=pytest.mark.slow) for b in BLOCKS[1:])],
)
def test_round_trips_through_blocks(tmp_path, format, volume):
    dtype, channels = volume
    array = random_array(dtype, (channels, 21, 70, 90))
    start = (3, 5, 70) if format != "precomputed" else (3, -5, 70_001)
    np.save(tmp_path / "a.npy", array)
    shift = f"--offset={','.join(map(str, start))}"
    words = [*SIZE, shift, "--format", format, "--block_shape=8,32,64"]
    if format not in WITH_OFFSET:
        assert convert(tmp_path / "a.npy", tmp_path / "v", *words) == 2
        assert not (tmp_path / "v").exists()
        words.append("--pad")
    assert convert(tmp_path / "a.npy", tmp_path / "v", *words) == 0
    check(tmp_path / "v", array, start=start)
    assert convert(tmp_path / "v", tmp_path / "b.h5:volumes/raw") == 0
    source = source_of(tmp_path / "b.h5")
    assert source.dataset == "volumes/raw"
    if format not in WITH_OFFSET:
        array = np.pad(array, ((0, 0), *((at, 0) for at in start)))
        start = (0, 0, 0)
    assert_holds(source, array, (40.0, 4.0, 4.0), start)


@pytest.mark.slow
def test_volumes_that_other_libraries_wrote(tmp_path):
    import zarr
    from cloudvolume import CloudVolume

    array = random_array("uint16", (20, 30, 40))
    for version in (2, 3):
        stored = zarr.create_array(
            tmp_path / f"z{version}", data=array, zarr_format=version, chunks=(8, 8, 8)
        )
        assert stored.shape == array.shape
        assert convert(tmp_path / f"z{version}", tmp_path / f"z{version}.nrrd", *SIZE) == 0
        assert_holds(source_of(tmp_path / f"z{version}.nrrd"), array, (40.0, 4.0, 4.0))
    CloudVolume.from_numpy(
        np.asfortranarray(array.T),
        f"file://{tmp_path}/cv",
        (4, 4, 40),
        (1, -5, 3),
        (32, 32, 32),
        max_mip=0,
        compress=False,
    )
    assert convert(tmp_path / "cv", tmp_path / "cv.nii.gz") == 0
    assert_holds(source_of(tmp_path / "cv.nii.gz"), array, (40.0, 4.0, 4.0), (3, -5, 1))


@pytest.mark.slow
def test_shards_labels_and_encodings(tmp_path):
    array = random_array("uint64", (64, 64, 64)) // 2**60
    np.save(tmp_path / "a.npy", array)
    words = [
        "--labels",
        "--encoding=compressed_segmentation",
        "--block_shape=32,32,32",
        "--shard_shape=64,64,64",
    ]
    assert convert(tmp_path / "a.npy", tmp_path / "seg", *SIZE, *words) == 0
    check(tmp_path / "seg", array)
    info = json.loads((tmp_path / "seg" / "info").read_text())
    assert (info["type"], info["scales"][0]["encoding"]) == (
        "segmentation",
        "compressed_segmentation",
    )
    assert info["scales"][0]["sharding"]["shard_bits"] == 0


def test_a_big_endian_tiff_on_another_grid(tmp_path):
    array = random_array("uint16", (20, 70, 90))
    path = write_file(tmp_path / "a.tif", tiff_bytes(array, tile=32))
    assert (
        convert(
            path,
            tmp_path / "z",
            *SIZE,
            "--offset=9,17,33",
            "--format=zarr3",
            "--block_shape=8,16,32",
            "--pad",
        )
        == 0
    )
    check(tmp_path / "z", array, start=(9, 17, 33))


@contextmanager
def damaged(path):
    """Within, a file is damaged; its size and times stay, so that it counts as the same file."""
    status = path.stat()
    times = (status.st_atime_ns, status.st_mtime_ns)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + bytes(len(whole) - 1000))
    os.utime(path, ns=times)
    yield
    path.write_bytes(whole)
    os.utime(path, ns=times)


def test_a_slice_that_cannot_be_read_is_reported_and_copied_later(slices, tmp_path):
    folder, array = slices
    options = ConversionOptions(
        voxel_size_nm=(40.0, 4.0, 4.0),
        block_shape=(4, 32, 32),
        flags=("--direct_num_workers=2",),
        window_bytes=10_000,  # every slab by way of the disk
    )
    plan = plan_conversion(str(folder), str(tmp_path / "em"), options)
    with damaged(folder / "s9.png"):
        result = plan.run()
        assert result.exit_code == result.outcome.exit_code == 1
        assert (result.outcome.done, result.outcome.chunks) == (4, 5)
        (failure,) = result.outcome.failures
        assert failure.startswith("copy, chunk 2: cannot read")
        assert "s9.png" in failure
    result = plan_conversion(str(folder), str(tmp_path / "em"), options).run()
    assert result.exit_code == 0
    assert (result.outcome.done, result.outcome.chunks) == (5, 5)
    check(tmp_path / "em", array)


def test_the_command_that_continues_is_named(slices, tmp_path, capsys):
    folder, array = slices
    with damaged(folder / "s9.png"):
        assert convert(folder, tmp_path / "em", *SIZE) == 1
        told = capsys.readouterr().out
        assert "0 of 1 chunks done" in told
        assert "failed: copy, chunk 0: cannot read" in told
        assert "s9.png" in told
        assert f"to do what is missing: beam-inference convert {folder}" in told
    assert convert(folder, tmp_path / "em", *SIZE) == 0
    assert "1 of 1 chunks done" in capsys.readouterr().out
    check(tmp_path / "em", array)


def test_a_conversion_returns_a_result_and_prints_nothing(slices, tmp_path, capsys):
    folder, array = slices
    size = (40.0, 4.0, 4.0)
    blocks = convert_volume(str(folder), str(tmp_path / "em"), voxel_size_nm=size)
    assert (blocks.exit_code, blocks.format) == (0, "precomputed")
    assert blocks.bounds.shape == array.shape
    file = convert_volume(str(tmp_path / "em"), str(tmp_path / "a.npy"), drop=["voxel-size"])
    assert (file.exit_code, file.format, file.outcome) == (0, "npy", None)
    assert_holds(source_of(file.target), array)
    assert capsys.readouterr().out == ""


SLOW_CONVERSION = """
import time
import PIL.Image
from beam_inference.conversion.convert import convert

open_image = PIL.Image.open


def open_slowly(*arguments, **options):
    time.sleep(0.2)
    return open_image(*arguments, **options)


PIL.Image.open = open_slowly
convert({folder!r}, {target!r}, **{options!r})
"""


@pytest.mark.slow
def test_a_killed_conversion_goes_on(slices, tmp_path):
    folder, array = slices
    target = str(tmp_path / "em")
    options = {  # a chunk a slice
        "voxel_size_nm": (40.0, 4.0, 4.0),
        "block_shape": (1, 16, 16),
        "window_bytes": 1,
    }
    script = SLOW_CONVERSION.format(folder=str(folder), target=target, options=options)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[2]
    )
    records = tmp_path / "em" / "_beam_inference"
    deadline = time.monotonic() + 90
    while len(done := list(records.rglob("done/*/*.json"))) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < len(done) < 20
    seen = {path: path.stat().st_mtime_ns for path in done}
    assert convert_volume(str(folder), target, **options).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in done} == seen, (
        "what was done is not done again"
    )
    check(tmp_path / "em", array)


def test_files_of_the_source_are_not_written_over(slices, tmp_path, capsys):
    folder, array = slices
    write_volume(tmp_path / "em", array)
    save_slices(tmp_path / "tiffs", array, "s{}.tif")
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["v"] = array
    with h5py.File(tmp_path / "whole.h5", "w") as file:
        layout = h5py.VirtualLayout(array.shape, array.dtype)
        layout[:] = h5py.VirtualSource("part.h5", "v", array.shape)
        file.create_virtual_dataset("v", layout)
    (tmp_path / "a.nhdr").write_text(
        "NRRD0004\ntype: uint8\ndimension: 3\nsizes: 90 70 20\nencoding: raw\ndata file: raw.npy\n"
    )
    (tmp_path / "raw.npy").write_bytes(array.tobytes())
    before = files_of(tmp_path)
    for source, target, *more in (
        (f"{folder}/s1*.png", folder, "--format=png"),
        (tmp_path / "tiffs", tmp_path / "tiffs" / "s3.tif"),
        (tmp_path / "whole.h5", tmp_path / "part.h5"),
        (tmp_path / "a.nhdr", tmp_path / "raw.npy"),
        (tmp_path / "em", tmp_path / "em", "--format=png"),
    ):
        words = [source, target, *more, "--overwrite", "--drop=voxel-size"]
        assert convert(*words) == 2, words
        assert "of the source with it: choose another place" in capsys.readouterr().err
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("name", ["/", "a/", ".", "a/.", "//a", "a//b", "a/../b"])
def test_names_that_no_dataset_has(slices, tmp_path, capsys, name):
    folder, array = slices
    assert convert(folder, f"{tmp_path}/out.h5:{name}", *SIZE) == 2
    assert f"{name} is no name of a dataset" in capsys.readouterr().err
    assert not (tmp_path / "out.h5").exists()
    assert convert(folder, f"{tmp_path}/out.h5:/a/b", *SIZE) == 0
    assert_holds(source_of(f"{tmp_path}/out.h5:/a/b"), array, (40.0, 4.0, 4.0))


def test_what_is_there_is_not_written_over(slices, tmp_path, capsys):
    folder, array = slices
    write_volume(tmp_path / "em", array, block_shape=(16, 128, 128), voxel_size_nm=(40.0, 4.0, 4.0))
    assert convert(folder, tmp_path / "em", *SIZE) == 2
    assert "this conversion did not begin" in capsys.readouterr().err
    assert convert(folder, tmp_path / "em", *SIZE, "--overwrite") == 0
    assert convert(folder, tmp_path / "em", "--voxel_size=40,8,8") == 2
    assert "exists and differs" in capsys.readouterr().err
    (tmp_path / "a.npy").write_text("mine")
    assert convert(folder, tmp_path / "a.npy") == 2
    assert (tmp_path / "a.npy").read_text() == "mine"
    assert convert(folder, tmp_path / "a.npy", "--overwrite") == 0
    assert_holds(source_of(tmp_path / "a.npy"), array)
    assert convert(tmp_path / "a.npy", tmp_path / "a.npy", "--overwrite") == 2
    assert convert(tmp_path / "em", tmp_path / "em", "--overwrite") == 2
    assert capsys.readouterr().err.count("the source") == 2
    assert convert(tmp_path / "a.npy", tmp_path / "em", "--format=png", "--overwrite") == 2
    assert "is a folder that holds" in capsys.readouterr().err
    assert convert(tmp_path / "a.npy", folder, "--format=png", "--overwrite") == 0
    assert not (folder / "s0.png").exists()
    assert_holds(source_of(folder), array)


def test_what_is_wrong_is_said_before_anything_is_written(slices, tmp_path, capsys):
    folder, _ = slices
    out = tmp_path / "out"
    np.save(tmp_path / "f.npy", random_array("float32", (3, 4, 5, 6)))
    np.save(tmp_path / "d.npy", random_array("float64", (4, 5, 6)))
    refused = [
        ([folder, out], "does not state its voxel size: give --voxel-size Z,Y,X"),
        ([folder, out / "a.nii"], "does not state its voxel size"),
        ([folder, f"{out}.nii"], "or --drop voxel-size to write it without"),
        ([folder, f"{out}/deep/a.npy"], "there is no folder"),
        ([folder, out, *SIZE, "--format=tif"], "expected one of n5, ome_zarr"),
        (
            [folder, out, *SIZE, "--format=zarr3", "--offset=-1,0,0"],
            "To move them instead: --offset=0,0,0",
        ),
        (
            [folder, out, *SIZE, "--format=zarr2", "--shard_shape=32,128,128"],
            "zarr2 has no shards",
        ),
        (
            [folder, out, *SIZE, "--block_shape=8,8,8", "--shard_shape=12,16,16"],
            "must be a multiple",
        ),
        ([folder, out, *SIZE, "--format=n5", "--encoding=raw"], "is for --format precomputed"),
        ([tmp_path / "f.npy", out, *SIZE, "--encoding=png"], "is for one channel"),
        ([tmp_path / "f.npy", out, *SIZE, "--labels"], "names of objects are integers"),
        ([folder, out, *SIZE, "--drop=offset"], "can hold everything"),
        (
            [folder, out, *SIZE, "--drop=offset", "--drop=voxel-size"],
            "--drop offset,voxel-size: format precomputed can hold everything",
        ),
        ([folder, f"{out}.npy", "--drop=colour"], "--drop colour: expected offset, voxel-size"),
        ([folder, f"{out}.npy", "--block_shape=8,8,8"], "has no blocks"),
        ([folder, f"{out}.npy", "--runner=DirectRunner"], "by this process alone"),
        ([folder, out, *SIZE, "--unheard_of=1"], "--unheard_of"),
        ([folder, "gs://bucket/a.npy"], "to this machine's disks only"),
        ([folder, "https://user:secret@host/x", *SIZE], "holds credentials"),
        ([tmp_path / "d.npy", out, *SIZE], "float64 data type is not one of the supported"),
        ([folder, out, *SIZE, "--encoding=nope"], 'Expected one of "raw", "png"'),
        ([folder, "https://host/x", *SIZE], "can only be read from"),
        ([folder, f"{out}|b", *SIZE], "has | in it"),
        ([folder, "s3://bucket/a*b", *SIZE], "has * in it"),
        ([folder, "gs://bucket/a%0ab", *SIZE], "has a line break in it"),
        ([folder, f"{out}\\b", *SIZE], "has \\ in it"),
        ([f"{folder}/nothing*", out, *SIZE], "matches no slices"),
    ]
    for words, message in refused:
        assert convert(*words) == 2, words
        told = capsys.readouterr().err
        assert message in told, (words, told)
        assert "secret" not in told
    assert not out.exists()
    with pytest.raises(SystemExit):
        convert(folder, out, "--voxel-size", "4,4")
    assert "is not three numbers" in capsys.readouterr().err


def test_workers_that_do_not_share_this_machines_disks(slices, monkeypatch, capsys):
    folder, _ = slices
    with GcsStandIn("bucket") as gcs:  # Beam looks for the buckets of the flags
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        assert convert(folder, "memory://em", *SIZE, *DATAFLOW) == 2
    assert "is on this machine, which remote workers cannot reach" in capsys.readouterr().err


def test_a_source_that_breaks_on_the_way_to_a_file_leaves_none(volume_in, tmp_path, capsys):
    block = next(path for path in volume_in.glob("10*/*") if path.stat().st_size > 20)
    with truncated(block):
        assert convert(volume_in, tmp_path / "a.h5") == 1
    assert "cannot read" in capsys.readouterr().err
    assert not list(tmp_path.glob("*a.h5*"))
    assert convert(volume_in, tmp_path / "a.h5") == 0
    assert_holds(
        source_of(tmp_path / "a.h5"), read_volume(volume_in)[0], (10.0, 10.0, 10.0), (3, -5, 2)
    )


def test_a_scale_of_a_pyramid(tmp_path):
    array = random_array("uint8", (8, 16, 16))
    url = write_volume(tmp_path / "em", array)
    coarse = {"driver": "neuroglancer_precomputed", "kvstore": url, "open": False, "create": True}
    coarse["scale_metadata"] = {
        "size": [8, 8, 8],
        "resolution": [20, 20, 10],
        "chunk_size": [8] * 3,
        "encoding": "raw",
    }
    ts.open(coarse).result()[...] = array[:, ::2, ::2].T[..., None]
    assert convert(tmp_path / "em", tmp_path / "a.tif", "--scale=1") == 0
    assert_holds(source_of(tmp_path / "a.tif"), array[:, ::2, ::2], (10.0, 20.0, 20.0))
