"""Precomputed volumes whose blocks cloud-volume has packed, read as they lie."""

import errno
import gzip
import lzma
import os
import subprocess
import sys

import brotli
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from browser import served
from helpers import job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes import packed_blocks
from beam_inference.volumes.opening import open_source, open_volume

PACKERS = {
    ".gz": gzip.compress,
    ".br": brotli.compress,
    ".zstd": lambda content: zstandard.ZstdCompressor().compress(content),
    ".xz": lzma.compress,
}


def pack(folder, suffix):
    """Pack the blocks of a volume as cloud-volume does; their new files."""
    files = [path for path in folder.rglob("*-*_*-*_*-*") if path.is_file()]
    packed = []
    for file in files:
        packed.append(file.with_name(file.name + suffix))
        packed[-1].write_bytes(PACKERS[suffix](file.read_bytes()))
        file.unlink()
    return packed


@pytest.fixture
def image():
    """Voxels of a volume that does not end with a block."""
    return np.random.default_rng(0).integers(1, 60000, (2, 20, 37, 45), dtype=np.uint16)


@pytest.mark.parametrize("suffix", PACKERS)
def test_every_box_is_read(suffix, image, tmp_path):
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16), start=(5, -7, 9))
    plain = open_volume(str(tmp_path / "em"))
    voxels = plain.read(plain.bounds)
    assert len(pack(tmp_path / "em", suffix)) == 2 * 3 * 3
    packed = open_volume(str(tmp_path / "em"))
    for name in ("bounds", "channels", "dtype", "block_shape", "voxel_size_nm", "encoding"):
        assert getattr(packed, name) == getattr(plain, name)
    assert packed.read_shape == plain.read_shape
    assert np.array_equal(packed.read(packed.bounds), voxels)
    part = BoundingBox((6, 2, 20), (21, 20, 50))
    assert np.array_equal(packed.read(part), voxels[:, 1:16, 9:27, 11:41])


@pytest.mark.parametrize("encoding", ["compressed_segmentation", "png"])
def test_other_encodings(encoding, tmp_path):
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"file://{tmp_path}/em/",
        "multiscale_metadata": {
            "data_type": "uint32" if encoding != "png" else "uint8",
            "num_channels": 1,
            "type": "segmentation" if encoding != "png" else "image",
        },
        "scale_metadata": {
            "encoding": encoding,
            "size": [40, 30, 20],
            "chunk_size": [16, 16, 16],
            "resolution": [4, 4, 40],
            "voxel_offset": [-8, 0, 3],
            **({} if encoding == "png" else {"compressed_segmentation_block_size": [8, 8, 8]}),
        },
    }
    store = ts.open(spec, create=True).result()
    labels = np.random.default_rng(0).integers(0, 200, (40, 30, 20, 1))
    store.write(labels.astype(store.dtype.numpy_dtype)).result()
    pack(tmp_path / "em", ".gz")
    volume = open_volume(str(tmp_path / "em"))
    assert np.array_equal(volume.read(volume.bounds), labels.transpose(3, 2, 1, 0))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-9], "ends too early"),
        (lambda content: b"no gzip" + content, "Error -[34]"),
        (lambda content: gzip.compress(bytes(10**6)), "unpacks to more than 8,192 bytes"),
        (lambda content: gzip.compress(bytes(100)), "holds 100 bytes, expected 8,192"),
        (lambda content: bytes(10**6), "is larger than a block of 8,192 bytes can be"),
    ],
)
def test_a_damaged_block_is_named(damage, message, tmp_path):
    image = np.random.default_rng(0).integers(1, 60000, (16, 16, 32), dtype=np.uint16)
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16))
    file = sorted(pack(tmp_path / "em", ".gz"))[0]
    file.write_bytes(damage(file.read_bytes()))
    volume = open_volume(str(tmp_path / "em"))
    with pytest.raises(PermanentReadError, match=f"{file.name} is damaged: .*{message}"):
        volume.read(volume.bounds)


def test_a_folder_that_may_not_be_listed_is_told_of(image, tmp_path, monkeypatch):
    write_volume(tmp_path / "em", image)
    list_folder = os.scandir

    def refuse(folder):
        if str(folder).startswith(str(tmp_path / "em")):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return list_folder(folder)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(VolumeError, match=r"folder .*/em/.* cannot be listed: Permission denied\."):
        open_source(VolumeSource(f"file://{tmp_path}/em"))


def test_errors_of_libraries_do_not_stick_to_those_that_tensorstore_pickles(tmp_path):
    """Dask lets exceptions be pickled with their contexts; the errors of isal cannot be."""
    with pytest.raises(ValueError, match="Error -") as raised:
        packed_blocks.unpack_block(b"no gzip" * 99, ".gz", 100)
    assert raised.value.__context__ is None


def test_a_damaged_block_is_named_where_contexts_are_pickled(tmp_path):
    image = np.ones((16, 16, 16), dtype=np.uint8)
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16))
    (file,) = pack(tmp_path / "em", ".gz")
    file.write_bytes(b"no gzip" * 99)
    script = (
        "import tblib.pickling_support, sys\n"
        "tblib.pickling_support.install()\n"
        "from beam_inference.errors import PermanentReadError\n"
        "from beam_inference.volumes.opening import open_volume\n"
        "volume = open_volume(sys.argv[1])\n"
        "try:\n    volume.read(volume.bounds)\n"
        "except PermanentReadError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "em")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{file.name} is damaged: " in done.stdout


def test_an_absent_block_is_background(image, tmp_path):
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16))
    sorted(pack(tmp_path / "em", ".gz"))[0].unlink()
    volume = open_volume(str(tmp_path / "em"))
    assert not volume.read(BoundingBox((0, 0, 0), (16, 16, 16))).any()
    assert np.array_equal(volume.read(volume.bounds)[:, 16:], image[:, 16:])


def test_blocks_are_kept_for_the_next_reader(image, tmp_path):
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16))
    files = pack(tmp_path / "em", ".gz")
    box = BoundingBox((0, 0, 0), (16, 16, 16))
    for cache_bytes in (0, 1 << 20):
        volume = open_source(VolumeSource(f"file://{tmp_path}/em"), cache_bytes=cache_bytes)
        voxels = volume.read(box)
        for file in files:
            file.rename(file.with_suffix(".away"))
        assert np.array_equal(volume.read(box), voxels) == (cache_bytes > 0)
        for file in files:
            file.with_suffix(".away").rename(file)


def test_blocks_of_other_names_than_the_metadata_imply(image, tmp_path):
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16))
    for file in pack(tmp_path / "em", ".gz"):
        file.rename(file.with_name(file.name.replace("_0-16_", "_1-17_", 1)))
    (tmp_path / "em" / "info").write_text(
        (tmp_path / "em" / "info").read_text().replace("[16,16,16]", "[32,32,32]")
    )
    with pytest.raises(VolumeError, match=r"such as .*\.gz, and none has a name"):
        open_volume(str(tmp_path / "em"))


def test_a_package_that_is_absent_is_named(image, tmp_path, monkeypatch):
    write_volume(tmp_path / "em", image)
    pack(tmp_path / "em", ".br")
    monkeypatch.setattr(packed_blocks, "find_spec", lambda _: None)
    with pytest.raises(VolumeError, match="need the package brotli: pip install"):
        open_volume(str(tmp_path / "em"))


def test_a_viewer_reads_them(image, tmp_path):
    for suffix in PACKERS:
        write_volume(tmp_path / suffix, image, block_shape=(16, 16, 16))
        pack(tmp_path / suffix, suffix)
        with served({"0": tmp_path / suffix}, dict) as url:
            volume = open_volume(f"{url}data/0")
            assert np.array_equal(volume.read(volume.bounds), image)


def test_a_job_has_the_same_output_and_quarantines_what_is_damaged(volume_in, tmp_path):
    for name in ("plain", "packed"):
        values = job_values(volume_in, tmp_path / name)
        assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
        if name == "plain":
            files = pack(volume_in, ".gz")
    assert np.array_equal(read_volume(tmp_path / "packed"), read_volume(tmp_path / "plain"))
    files[0].write_bytes(files[0].read_bytes()[:-20])
    values = job_values(volume_in, tmp_path / "damaged", job={"max_failed_chunks": 100})
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 3


def test_a_conversion(image, tmp_path, capsys):
    write_volume(tmp_path / "em", image[0], block_shape=(16, 16, 16))
    file = pack(tmp_path / "em", ".zstd")[0]
    words = ["convert", str(tmp_path / "em"), f"{tmp_path}/a.npy", "--drop=voxel-size,offset"]
    assert main(words) == 0
    assert np.array_equal(np.load(tmp_path / "a.npy"), image[0])
    file.write_bytes(file.read_bytes()[:-5])
    words[2] = f"{tmp_path}/b.npy"
    assert main(words) == 1
    assert f"{file} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "b.npy").exists()


def test_two_files_of_one_block_are_refused(image, tmp_path):
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16))
    file = sorted(pack(tmp_path / "em", ".gz"))[0]
    file.with_suffix("").write_bytes(b"old")
    volume = open_volume(str(tmp_path / "em"))
    with pytest.raises(PermanentReadError, match="has several files of one block"):
        volume.read(volume.bounds)


@pytest.mark.slow
def test_the_line_that_rewrites_what_cannot_be_decoded(tmp_path):
    import re
    import shlex

    from cloudvolume import CloudVolume

    image = np.random.default_rng(0).standard_normal((40, 30, 20)).astype(np.float32)
    CloudVolume.from_numpy(
        np.asfortranarray(image),
        f"file://{tmp_path}/em",
        encoding="fpzip",
        resolution=(4, 4, 40),
        voxel_offset=(1, 2, 3),
        chunk_size=(16, 16, 16),
        progress=False,
    )
    with pytest.raises(VolumeError, match="encoded with fpzip") as raised:
        open_volume(str(tmp_path / "em"))
    assert "pip install cloud-volume fpzip" in str(raised.value)
    (line,) = re.findall(r"python (-c '[^']*')", str(raised.value))
    line = line.replace("file:///IN", f"file://{tmp_path}/em")
    line = line.replace("file:///OUT", f"file://{tmp_path}/raw")
    subprocess.run([sys.executable, *shlex.split(line)], check=True)
    copy = open_volume(str(tmp_path / "raw"))
    assert copy.bounds.start == (3, 2, 1)
    assert np.array_equal(copy.read(copy.bounds)[0].T, image)


@pytest.mark.parametrize("suffix", [".zst", ".gz.part", ".GZ", " (1)"])
def test_one_block_of_another_suffix_is_refused(suffix, image, tmp_path):
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16))
    file = sorted(pack(tmp_path / "em", ".gz"))[5]
    file.rename(file.with_suffix("").with_name(file.stem + suffix))
    with pytest.raises(VolumeError, match=f"seems to be meant as the block {file.stem},"):
        open_volume(str(tmp_path / "em"))


def test_a_packed_block_that_is_a_broken_link_is_named(image, tmp_path):
    write_volume(tmp_path / "em", image, block_shape=(16, 16, 16))
    file = sorted(pack(tmp_path / "em", ".gz"))[5]
    file.unlink()
    file.symlink_to("nowhere")
    volume = open_volume(str(tmp_path / "em"))
    with pytest.raises(PermanentReadError, match="a link that leads nowhere"):
        volume.read(volume.bounds)


def test_a_frame_of_zstd_that_was_cut_off_is_damaged():
    packed = zstandard.ZstdCompressor().compress(np.random.default_rng(0).bytes(300_000))
    with pytest.raises(ValueError, match="it ends too early"):
        packed_blocks.unpack_block(packed[:-100_000], ".zstd", 10**6)


def test_several_members_of_gzip_and_what_follows_them():
    long, short = (gzip.compress(bytes([letter]) * size) for letter, size in ((7, 900), (8, 100)))
    assert packed_blocks.unpack_block(long, ".gz", 900) == bytes([7]) * 900
    for members in (long + short, short + long):
        assert sorted(packed_blocks.unpack_block(members, ".gz", 1000)) == [7] * 900 + [8] * 100
        with pytest.raises(ValueError, match="unpacks to more than 999 bytes"):
            packed_blocks.unpack_block(members, ".gz", 999)
    with pytest.raises(ValueError, match="unpacks to more than 899 bytes"):
        packed_blocks.unpack_block(long, ".gz", 899)
    for damaged in (long[:-1], long[:-9], long + b"more", long[:-8] + bytes(4) + long[-4:], b"x"):
        with pytest.raises(ValueError, match=r"\w"):  # of whichever library
            packed_blocks.unpack_block(damaged, ".gz", 1000)
