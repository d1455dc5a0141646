"""Segmentations at several thresholds scored in one go, against scikit-image on whole volumes."""

import json
import re
import shutil

import numpy as np
import pytest
from helpers import write_volume
from skimage.metrics import adapted_rand_error, variation_of_information

from beam_inference.cli.main import main
from beam_inference.errors import ConfigError
from beam_inference.evaluation.series import evaluate_series
from beam_inference.segmentation.series import volume_name
from beam_inference.volumes.opening import open_volume

THRESHOLDS = (60, 128, 200)


def read(path):
    volume = open_volume(str(path))
    return volume.read(volume.bounds)[0]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Labels, and segmentations of affinities like those of a network that is not certain."""
    folder = tmp_path_factory.mktemp("series")
    random = np.random.default_rng(2)
    coarse = random.integers(1, 30, (4, 5, 6))
    labels = coarse.repeat(6, 0).repeat(6, 1).repeat(6, 2).astype(np.uint32)
    affinities = np.zeros((3, *labels.shape))
    for axis in range(3):
        same = labels == np.roll(labels, 1, axis)
        affinities[axis] = np.where(same, 200, 90) + random.normal(0, 35, labels.shape)
    blocks = {"block_shape": (8, 8, 8)}
    write_volume(folder / "labels", labels, **blocks)
    write_volume(folder / "affinities", affinities.clip(0, 255).astype(np.uint8), **blocks)
    flags = [f"--threshold={threshold}" for threshold in THRESHOLDS]
    words = ["segment", str(folder / "affinities"), str(folder / "out"), *flags]
    assert main([*words, "--low=20", "--high=240", "--chunk_shape=16x16x16"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("chunk_shape", ["8x8x8", "16x24x8", "40x40x40"])
def test_every_threshold_is_scored_as_by_scikit_image(workplace, chunk_shape, capsys):
    truth = read(workplace / "labels")
    before = {path for path in workplace.rglob("*") if path.is_file()}
    words = ["evaluate", str(workplace / "out"), str(workplace / "labels"), "--cell_shape=8x8x8"]
    assert main([*words, f"--chunk_shape={chunk_shape}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["threshold"] for each in told["thresholds"]] == list(THRESHOLDS)
    by_information = {}
    by_rand = {}
    for each in told["thresholds"]:
        segments = read(workplace / "out" / f"threshold_{each['threshold']:g}")
        split, merge = variation_of_information(truth, segments)
        error, precision, recall = adapted_rand_error(truth, segments)
        scores = each["objects"]
        assert scores["information_split"] == pytest.approx(split, abs=1e-9)
        assert scores["information_merge"] == pytest.approx(merge, abs=1e-9)
        assert scores["adapted_rand_error"] == pytest.approx(error, abs=1e-9)
        assert (scores["rand_split"], scores["rand_merge"]) == pytest.approx((precision, recall))
        by_information[each["threshold"]] = split + merge
        by_rand[each["threshold"]] = error
    assert told["best"] == {
        "variation_of_information": min(by_information, key=by_information.get),
        "adapted_rand_error": min(by_rand, key=by_rand.get),
    }
    assert len(set(by_information.values())) == 3
    assert {path for path in workplace.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_the_table_names_the_best_threshold(workplace, tmp_path, capsys):
    page = tmp_path / "page.html"
    out = workplace / "out"
    words = ["evaluate", str(out), str(workplace / "labels"), f"--page={page}"]
    assert main(words) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +[\d,]+ +([\d.]+)", text, re.MULTILINE)
    assert [int(threshold) for threshold, _ in rows] == list(THRESHOLDS)
    best = min(rows, key=lambda row: float(row[1]))[0]
    assert f"least variation of information: threshold {best}, {out.as_uri()}/" in text
    assert f"\nthreshold {best}:\n" in text
    assert "least adapted Rand error: threshold" in page.read_text()


@pytest.mark.slow
def test_volumes_of_unlike_boxes_are_not_compared(workplace, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(workplace / "out", out)
    volume = out / volume_name(THRESHOLDS[0])
    labels = open_volume(str(volume))
    values = labels.read(labels.bounds)[0]
    shutil.rmtree(volume)
    write_volume(volume, values[1:], labels.bounds.start)
    assert main(["evaluate", str(out), str(workplace / "labels")]) == 2
    assert "cover unlike boxes" in capsys.readouterr().err


@pytest.mark.slow
def test_the_volumes_of_a_folder_are_objects(workplace):
    with pytest.raises(ConfigError, match="--as classes: .* which are objects"):
        evaluate_series(
            str(workplace / "out"), str(workplace / "labels"), at=THRESHOLDS, kind="classes"
        )
