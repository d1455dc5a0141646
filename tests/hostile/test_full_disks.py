"""Disks that are full, or cannot be written, while ``convert`` writes: one message, and no file.

They are small file systems in memory, which only root may mount.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import files_of, write_volume

pytestmark = pytest.mark.slow

MIB = 2**20
SHAPE = (64, 256, 256)


def mount(folder: Path, options: str) -> None:
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system in memory")


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    mount(tmp_path / "disk", "size=2m")
    yield tmp_path / "disk"
    unmount(tmp_path / "disk")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A volume of 4 MiB that cannot be compressed."""
    folder = tmp_path_factory.mktemp("source")
    values = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    write_volume(folder / "v", values, block_shape=(64, 64, 64))
    return f"{folder}/v"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which it may take down."""
    command = [sys.executable, "-m", "beam_inference", *words]
    path = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(
        command, env=path, capture_output=True, text=True, timeout=300, check=False
    )


def check_one_message(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode in (1, 2), result.stderr
    assert "not foreseen" not in result.stderr
    assert "Traceback" not in result.stderr
    assert "Segmentation" not in result.stderr


NAMES = ["c", "c.nii", "c.nii.gz", "c.h5", "c.tif", "c.npy", "c.nrrd", "c.mrc", "png"]


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_too_small(name, source, small_disk):  # 289, 292, 294, 297, 299
    words = ["--drop=voxel-size,offset"] if name in ("c.npy", "png", "c.tif") else []
    words += ["--format=png"] if name == "png" else []
    result = run("convert", source, f"{small_disk}/{name}", *words)
    check_one_message(result)
    if name == "c":
        assert "complete:" not in result.stdout
    else:
        assert not list(small_disk.iterdir())


@pytest.mark.parametrize("name", ["c.nii", "c.npy", "c.h5"])
def test_a_disk_that_another_process_fills_meanwhile(name, tmp_path):
    """Memory maps of space that was not taken would end the process by SIGBUS."""
    from beam_inference.conversion.file_spec import FileSpec
    from beam_inference.conversion.targets import fill_file, format_of
    from beam_inference.errors import VolumeError
    from beam_inference.geometry.bounding_box import BoundingBox

    mount(tmp_path / "disk", "size=8m")
    try:
        box = BoundingBox((0, 0, 0), SHAPE)
        spec = FileSpec(box, 1, "uint8", None if name == "c.npy" else (8.0, 8.0, 8.0))
        values = np.random.default_rng(0).integers(0, 256, (1, *SHAPE), np.uint8)
        path = tmp_path / "disk" / name
        try:
            with fill_file(str(path), format_of(name) or "", spec) as target:
                with (tmp_path / "disk" / "other").open("wb") as other:
                    try:
                        other.write(bytes(8 * MIB))
                        other.flush()
                    except OSError:
                        pass
                target.put(box, values)
        except VolumeError:
            assert name == "c.h5"
            assert not path.exists()
        else:
            assert path.stat().st_size > 4 * MIB
    finally:
        unmount(tmp_path / "disk")


def test_a_disk_that_cannot_be_written(source, tmp_path):  # 264
    mount(tmp_path / "disk", "size=2m,ro")
    try:
        for name in ("c", "c.h5", "c.nii"):
            check_one_message(run("convert", source, f"{tmp_path}/disk/{name}"))
    finally:
        unmount(tmp_path / "disk")


def test_a_small_temporary_folder(tmp_path, small_disk):  # 470
    import gzip

    head = "NRRD0004\ntype: uint8\ndimension: 3\nsizes: 16 32 32\nencoding: gzip\n\n"
    (tmp_path / "bomb.nrrd").write_bytes(head.encode() + gzip.compress(bytes(64 * MIB), 1))
    result = run(
        "convert",
        f"{tmp_path}/bomb.nrrd",
        f"{tmp_path}/out",
        "--voxel-size=8,8,8",
        TMPDIR=str(small_disk),
    )
    check_one_message(result)
    assert "unpacks to more than the 16384 bytes" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("kind", "name"), [("npy", "blocks"), ("volume", "c.h5"), ("volume", "c.nii")]
)
def test_conversions_that_are_killed(kind, name, source, tmp_path):  # 338, 340, 346
    if kind == "npy":
        np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8))
        source = f"{tmp_path}/a.npy"
    words = ["convert", source, f"{tmp_path}/target/{name}", "--voxel-size=8,8,8"]
    (tmp_path / "target").mkdir()
    start = time.monotonic()
    assert run(*words).returncode == 0
    seconds = time.monotonic() - start
    shutil.move(tmp_path / "target", tmp_path / "undisturbed")
    (tmp_path / "target").mkdir()
    for share in (0.5, 0.7, 0.8, 0.9):
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "beam_inference", *words],
                env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
                stdout=log,
                stderr=log,
            )
            time.sleep(share * seconds)
            process.kill()
            process.wait()
    if name == "blocks":
        assert run(*words).returncode == 0
        assert files_of(tmp_path / "target" / name) == files_of(tmp_path / "undisturbed" / name)
    else:
        assert run(*words, "--overwrite").returncode == 0
        contents = [tmp_path / folder / name for folder in ("target", "undisturbed")]
        assert contents[0].read_bytes() == contents[1].read_bytes()
        assert [path.name for path in (tmp_path / "target").iterdir()] == [name]
