"""Test components of a real volume (FIB-25, 250³ voxels) against cc3d, and killed runs."""

import csv
import subprocess
import sys
from pathlib import Path

import cc3d
import numpy as np
import pytest
from helpers import files_of, killed_in_each, read_volume, truncated, write_volume

from beam_inference.cli.main import main

CHUNK_SHAPES = ["64x64x64", "128x64x192", "64x256x128"]
CROP = (slice(20, 110), slice(60, 150), slice(100, 200))
STAGES = ["label", "match", "unite", "number", "deliver", "relabel", "tabulate"]


def left_behind(output: Path) -> list[Path]:
    return [
        path for path in output.rglob("*") if "components_scratch" in path.parts and path.is_file()
    ]


def without_small(components: np.ndarray, min_size: int) -> np.ndarray:
    stays = np.bincount(components.ravel()) >= min_size
    stays[0] = False
    return np.where(stays, np.cumsum(stays), 0)[components]


@pytest.mark.slow
def test_a_crop_by_the_command(fib25_labels, tmp_path, capsys):
    crop = fib25_labels[CROP]
    source = write_volume(tmp_path / "in", crop, (5, -7, 11), block_shape=(32, 32, 32))
    words = [
        "components",
        source,
        str(tmp_path / "out"),
        "--multilabel",
        "--connectivity=26",
        "--min-size=50",
    ]
    assert main([*words, "--chunk_shape=32x64x64"]) == 0
    expected = without_small(cc3d.connected_components(crop, connectivity=26), 50)
    np.testing.assert_array_equal(read_volume(tmp_path / "out")[0], expected)
    told = capsys.readouterr().out
    assert f"{expected.max()} components in file://" in told
    assert not left_behind(tmp_path / "out")
    table = list(
        csv.DictReader((tmp_path / "out" / "components" / "000000.csv").read_text().splitlines())
    )
    assert [int(row["voxels"]) for row in table] == np.bincount(expected.ravel())[1:].tolist()
    assert main([*words, "--chunk_shape=64x64x64"]) == 2, "another way to the same place"
    assert "records of another job" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("connectivity", [6, 18, 26])
@pytest.mark.parametrize("of", ["labels", "image"])
def test_the_whole_volume_in_three_chunk_shapes(
    of, connectivity, fib25_labels, fib25_image, tmp_path
):
    values = fib25_labels if of == "labels" else fib25_image
    source = write_volume(tmp_path / "in", values, block_shape=(64, 64, 64))
    what = ["--multilabel"] if of == "labels" else ["--threshold=165.5"]
    expected = cc3d.connected_components(
        values if of == "labels" else values >= 165.5, connectivity=connectivity
    )
    assert expected.max() > 500
    files = []
    for number, chunk_shape in enumerate(CHUNK_SHAPES):
        output = tmp_path / f"out{number}"
        command = ["components", source, str(output), *what, f"--connectivity={connectivity}"]
        assert main([*command, f"--chunk_shape={chunk_shape}"]) == 0
        np.testing.assert_array_equal(read_volume(output)[0], expected)
        files.append(files_of(output))
        assert not left_behind(output)
    assert files[0] == files[1] == files[2]
    sizes = np.bincount(expected.ravel())[1:]
    centres = cc3d.statistics(expected)["centroids"][1:]
    table = np.genfromtxt(
        tmp_path / "out0" / "components" / "000000.csv", delimiter=",", names=True
    )
    np.testing.assert_array_equal(table["voxels"], sizes)
    np.testing.assert_allclose(
        np.stack([table[f"{axis}_nm"] for axis in "zyx"], 1), 10 * centres + 5, atol=6e-4
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_in_every_stage_then_finished(fib25_image, tmp_path):
    source = write_volume(tmp_path / "in", fib25_image[CROP], block_shape=(16, 16, 16))
    words = [
        "components",
        source,
        "--threshold=150",
        "--min-size=3",
        "--connectivity=26",
        "--chunk_shape=32x32x32",
    ]
    assert main([*words[:2], str(tmp_path / "undisturbed"), *words[2:]]) == 0
    output = tmp_path / "out"
    command = [sys.executable, "-m", "beam_inference", *words[:2], str(output), *words[2:]]
    for _ in killed_in_each(command, output, "components", STAGES):
        assert left_behind(output)
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert files_of(output) == files_of(tmp_path / "undisturbed")
    assert not left_behind(output)


@pytest.mark.slow
def test_a_corrupt_block_is_told_of_and_done_later(fib25_image, tmp_path, capsys):
    source = write_volume(tmp_path / "in", fib25_image[CROP], block_shape=(32, 32, 32))
    words = [
        "components",
        source,
        str(tmp_path / "out"),
        "--threshold=150",
        "--chunk_shape=32x32x32",
    ]
    block = tmp_path / "in" / "10_10_10" / "32-64_0-32_0-32"
    with truncated(block):
        assert main(words) == 1
        assert "failed: label, chunk 1: cannot read" in capsys.readouterr().out
    assert main(words) == 0
    np.testing.assert_array_equal(
        read_volume(tmp_path / "out")[0],
        cc3d.connected_components(fib25_image[CROP] >= 150, connectivity=6),
    )
    assert main([*words[:4], "--chunk_shape=64x64x64", "--overwrite"]) == 0


def test_what_the_command_refuses(tmp_path, capsys):
    source = write_volume(tmp_path / "in", np.zeros((2, 8, 8, 8), np.uint8), block_shape=(8, 8, 8))
    out = str(tmp_path / "out")
    for words, told in [
        ([source, out, "--threshold=1"], "say which with --channel"),
        ([source, source, "--threshold=1", "--channel=1"], "the same place"),
        ([str(tmp_path / "nowhere"), out, "--threshold=1"], "no volume at"),
        ([source, out, "--threshold=1", "--channel=0", "--nonsense=3"], "unknown flag --nonsense"),
        ([source, "https://example.com/out", "--threshold=1"], "can only be read from"),
        ([source, f"{tmp_path}/a|b", "--threshold=1"], "has | in it"),
        ([source, "gs://key:secret@bucket/out", "--threshold=1"], "holds credentials"),
    ]:
        assert main(["components", *words]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing is created before all is checked"
    for words in (
        [source, out],
        [source, out, "--threshold=1", "--multilabel"],
        [source, out, "--threshold=x"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["components", *words])
