"""Blocks that TensorStore would read as zeros are noticed by every command that reads."""

import lzma

import numpy as np
import pytest

from beam_inference.cli.main import main


def replace_block_by_folder(volume):
    block = min(path for path in volume.rglob("*-*_*") if path.is_file())
    block.unlink()
    block.mkdir()


def test_a_job_quarantines_the_chunks_of_a_folder(volume_in, job, capsys):
    replace_block_by_folder(volume_in)
    assert main(["run", job(), "--max_failed_chunks=100"]) == 3
    assert "is a folder or the like" in capsys.readouterr().out


def test_a_conversion_fails(volume_in, tmp_path, capsys):
    replace_block_by_folder(volume_in)
    assert main(["convert", str(volume_in), f"{tmp_path}/a.npy", "--drop=voxel-size,offset"]) == 1
    assert "Copy that file again" in capsys.readouterr().err
    assert not (tmp_path / "a.npy").exists()


@pytest.mark.parametrize("command", ["plan", "convert"])
@pytest.mark.parametrize("suffix", [".lzma", ".zst"])
def test_blocks_that_are_packed_in_another_way(suffix, command, volume_in, job, tmp_path, capsys):
    for path in [path for path in volume_in.rglob("*-*_*") if path.is_file()]:
        path.with_name(path.name + suffix).write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    words = {"plan": [job()], "convert": [str(volume_in), f"{tmp_path}/a.nii"]}[command]
    assert main([command, *words]) == 2
    message = capsys.readouterr().err
    assert "would read every voxel as zero" in message
    assert suffix in message
    assert not (tmp_path / "a.nii").exists()


def test_sound_volumes_are_read(volume_in, tmp_path):
    assert main(["convert", str(volume_in), f"{tmp_path}/a.npy", "--drop=voxel-size,offset"]) == 0
    assert np.load(tmp_path / "a.npy").any()
