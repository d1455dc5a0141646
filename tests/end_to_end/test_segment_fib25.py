"""Test segmentation of a real volume (FIB-25): any chunks, killed runs, and waterz.

The affinities are made of the ground truth's boundaries and of the image's membranes, like those of
a network without errors.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
from fib25_job import affinity_job, run_affinities
from helpers import files_of, killed_in_each, read_volume, write_volume

from beam_inference.cli.main import main

CHUNK_SHAPES = ["64x64x64", "128x64x192", "256x256x256"]
LIMITS = ["--threshold=0.6", "--low=0.1", "--high=0.9999"]
STAGES = [
    "label",
    "match",
    "unite",
    "number",
    "deliver",
    "join0",
    "join1",
    "join2",
    "settle1",
    "paint",
    "tabulate",
]


@pytest.fixture(scope="session")
def affinities(fib25_image, fib25_labels) -> np.ndarray:
    from benchmarks.segment import affinities as made

    return made(fib25_image, fib25_labels)


def variation_of_information(one, other):
    """Splits and merges, in bits (Meila 2007): H(one | other), H(other | one)."""

    def entropy(names):
        shares = np.unique(names, return_counts=True)[1] / names.size
        return -(shares * np.log2(shares)).sum()

    both = one.ravel().astype(np.int64) * (int(other.max()) + 1) + other.ravel()
    joint = entropy(both)
    return joint - entropy(other.ravel()), joint - entropy(one.ravel())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_volume_in_three_chunk_shapes(affinities, fib25_labels, tmp_path):
    source = write_volume(tmp_path / "in", affinities, block_shape=(64, 64, 64))
    files = []
    for number, chunk_shape in enumerate(CHUNK_SHAPES):
        output = tmp_path / f"out{number}"
        assert main(["segment", source, str(output), *LIMITS, f"--chunk_shape={chunk_shape}"]) == 0
        files.append(files_of(output))
    assert files[0] == files[1] == files[2]
    found = read_volume(tmp_path / "out0")[0]
    of_bodies = fib25_labels > 0
    splits, merges = variation_of_information(found[of_bodies], fib25_labels[of_bodies])
    assert merges < 0.001, "no body is joined to another"
    assert splits < 2.5, "here is what dark interiors cost"
    table = np.genfromtxt(tmp_path / "out0" / "segments" / "000000.csv", delimiter=",", names=True)
    sizes = np.bincount(found.ravel())
    np.testing.assert_array_equal(table["id"], np.flatnonzero(sizes[1:]) + 1)
    np.testing.assert_array_equal(table["voxels"], sizes[sizes > 0][int(sizes[0] > 0) :])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_affinities_of_a_network(fib25, fib25_labels, tmp_path):
    """From the image to objects, of planes that the network was not trained on."""
    roi = {"start": [200, 0, 0], "stop": [250, 128, 128]}
    values = affinity_job(fib25, tmp_path / "affinities", (50, 64, 64), roi=roi)
    run_affinities(tmp_path / "job.yaml", values)
    made = []
    for chunk_shape in ("50x64x64", "50x128x64"):
        command = [
            "segment",
            str(tmp_path / "affinities"),
            str(tmp_path / chunk_shape),
            f"--chunk_shape={chunk_shape}",
        ]
        assert (
            main([*command, "--threshold=0.9", "--low=0.5", "--high=0.9999", "--min-size=20"]) == 0
        )
        made.append(files_of(tmp_path / chunk_shape))
    assert made[0] == made[1]
    found = read_volume(tmp_path / chunk_shape)[0]
    truth = fib25_labels[200:, :128, :128]
    splits, merges = variation_of_information(found, truth)
    alone = variation_of_information(np.zeros_like(truth), truth)[1]
    assert splits + merges < 0.75 * alone, "the network is small, but better than nothing"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_waterz_joins_the_same_fragments(affinities, tmp_path):
    """waterz rounds means to float32: where two are nearly equal, another pair may come first."""
    waterz = pytest.importorskip("waterz")
    crop = np.ascontiguousarray(affinities[:, :96, :96, :96])
    source = write_volume(tmp_path / "in", crop, block_shape=(32, 32, 32))
    command = ["segment", source, "--low=0.1", "--high=0.9999", "--chunk_shape=32x64x96"]
    assert main([*command, str(tmp_path / "fragments"), "--threshold=2"]) == 0
    fragments = read_volume(tmp_path / "fragments")[0].astype(np.uint64)
    for threshold in (0.8, 0.6, 0.4):
        output = tmp_path / f"out{threshold}"
        assert main([*command, str(output), f"--threshold={threshold}"]) == 0
        ours = read_volume(output)[0]
        theirs = next(waterz.agglomerate(crop, [1 - threshold], fragments=fragments.copy()))
        assert fragments.max() - len(np.unique(theirs)) > 400, "much is joined"
        assert max(variation_of_information(ours, theirs)) < 0.001


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_in_every_stage_then_finished(affinities, tmp_path):
    source = write_volume(
        tmp_path / "in", affinities[:, 20:110, 60:150, 100:200], block_shape=(16, 16, 16)
    )
    words = ["segment", source, *LIMITS, "--min-size=5", "--chunk_shape=32x32x32", "--pyramid"]
    assert main([*words[:2], str(tmp_path / "undisturbed"), *words[2:]]) == 0
    output = tmp_path / "out"
    command = [sys.executable, "-m", "beam_inference", *words[:2], str(output), *words[2:]]
    assert list(killed_in_each(command, output, "segment", STAGES)) == STAGES
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert files_of(output) == files_of(tmp_path / "undisturbed")
    assert not [
        path for path in output.rglob("*") if "segment_scratch" in path.parts and path.is_file()
    ]


def test_what_the_command_refuses(tmp_path, capsys):
    source = write_volume(tmp_path / "in", np.zeros((3, 8, 8, 8), np.uint8), block_shape=(8, 8, 8))
    out = str(tmp_path / "out")
    limits = ["--threshold=3", "--low=1", "--high=5"]
    for words, told in [
        ([source, out, *limits, "--channels=0,1,3"], "has the channels 0 … 2"),
        ([source, source, *limits], "the same place"),
        ([source, out, *limits, "--format=zarr3", "--pyramid"], "zarr3 holds one scale"),
        ([source, "https://example.com/out", *limits], "can only be read from"),
    ]:
        assert main(["segment", *words]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing is created before all is checked"


@pytest.mark.slow
def test_a_target_holds_one_kind_of_labels(tmp_path, capsys):
    values = np.random.default_rng(0).random((3, 20, 24, 28)).astype(np.float32)
    source = write_volume(tmp_path / "in", values, block_shape=(8, 8, 8))
    out = tmp_path / "out"
    components = ["components", source, str(out), "--channel=0", "--threshold=0.8", "--pyramid"]
    segment = ["segment", source, str(out), "--threshold=0.7", "--low=0.2", "--high=0.95"]
    assert main(components) == 0
    assert (out / "components" / "000000.csv").exists()
    assert main(segment) == 2
    assert "holds records of components" in capsys.readouterr().err
    assert main([*segment, "--overwrite"]) == 0
    assert not (out / "components" / "000000.csv").exists()
    assert len(json.loads((out / "info").read_text())["scales"]) == 1, (
        "coarser levels were of other voxels"
    )
    assert main([*segment, "--pyramid"]) == 0
    assert len(json.loads((out / "info").read_text())["scales"]) > 1
    assert main(components) == 2
    assert (
        main(
            [
                *segment[:2],
                str(tmp_path / "small"),
                *segment[3:],
                "--block_shape=32x32x32",
                "--pyramid",
            ]
        )
        == 0
    )
