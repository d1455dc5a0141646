"""Segmentations at several thresholds from one watershed, against each made alone."""

import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from helpers import write_volume
from oracles.label_volumes import read_table, run_stages, with_layout, write

from beam_inference.cli.main import main
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.segmentation.make_labels import make_labels, make_series
from beam_inference.segmentation.segment_job import plan_segmentation
from beam_inference.segmentation.segment_stages import segment_stages
from beam_inference.segmentation.series import plan_series, read_thresholds, volume_name
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.opening import open_volume

_numbers = itertools.count()
LIMITS = {"low": 20, "high": 250, "block_shape": (4, 4, 4)}


def read(url):
    volume = open_volume(url)
    return volume.read(volume.bounds)[0]


@pytest.mark.parametrize("chunk_shape", [(4, 8, 8), (24, 24, 24)])
def test_each_volume_is_that_of_its_threshold_alone(chunk_shape):
    affinities = np.random.default_rng(3).integers(0, 256, (3, 10, 13, 17)).astype(np.uint8)
    url = write(affinities)
    options = with_layout(LIMITS | {"chunk_shape": chunk_shape, "min_size": 3})
    thresholds = (110, 150, 190)
    target = f"memory://series{next(_numbers)}"
    series = plan_series(url, target, thresholds=[150, 190, 110, 150], **options)
    assert [plan.threshold for plan in series.plans] == list(thresholds)
    plans = [replace(plan, scratch_url=f"{target}/scratch") for plan in series.plans]
    stages = segment_stages(*plans)
    watersheds = [stage for stage in stages if stage.name in ("label", "match", "number")]
    alone = segment_stages(plans[0])
    assert [(each.name, each.count) for each in watersheds] == [
        (each.name, each.count) for each in alone if each.name in ("label", "match", "number")
    ]
    for stage in stages:
        do = pickle.loads(pickle.dumps(stage)).make_worker()
        for index in range(stage.count):
            do(index)
    assert open_kvstore(f"{target}/scratch").list().result() == []
    counts = []
    for plan, threshold in zip(plans, thresholds, strict=True):
        single = plan_segmentation(
            url, f"memory://single{next(_numbers)}", threshold=threshold, **options
        )
        single, expected = run_stages(single, segment_stages)
        np.testing.assert_array_equal(read(plan.output.url), expected)
        assert read_table(plan) == read_table(single)
        counts.append(len(np.unique(expected)))
    assert counts == sorted(counts)
    assert len(set(counts)) == 3


def test_names_of_volumes_tell_thresholds_apart():
    assert volume_name(150.0) == "threshold_150"
    assert volume_name(1e-7) == "threshold_0.0000001"
    assert volume_name(0.1) != volume_name(np.nextafter(0.1, 1))


@pytest.fixture
def affinities(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (3, 12, 16, 16)).astype(np.uint8)
    return write_volume(tmp_path / "affinities", values, block_shape=(8, 8, 8))


def test_what_cannot_be_a_series_is_refused_before_anything_is_made(affinities, tmp_path):
    options = with_layout({"low": 20, "high": 250})
    for target, thresholds, match in (
        ("out", [150, 999], "--threshold 999: .* from 0 to 255"),
        ("affinities", [100, 150], "input and output are the same place"),
    ):
        with pytest.raises(ConfigError, match=match):
            plan_series(affinities, str(tmp_path / target), thresholds=thresholds, **options)
    write_volume(tmp_path / "other", np.ones((12, 16, 16), np.uint32), block_shape=(8, 8, 8))
    with pytest.raises((StateError, VolumeError), match="other"):
        make_series(
            plan_series(affinities, str(tmp_path / "other"), thresholds=[1, 2], **options), ()
        )
    assert {path.name for path in tmp_path.iterdir()} == {"affinities", "other"}
    assert not list((tmp_path / "other").glob("threshold*"))


@pytest.mark.parametrize("parts", ["", "|neuroglancer-precomputed:"])
def test_a_volume_is_no_series(affinities, parts):
    assert read_thresholds(f"{affinities}/{parts}" if parts else affinities, LOCAL) is None


@pytest.mark.parametrize("text", ['{"thresholds": []}', '{"thresholds": [1, 1e999]}', "[1, 2]"])
def test_a_damaged_record_of_thresholds_is_refused(tmp_path, text):
    (tmp_path / "thresholds.json").write_text(text)
    with pytest.raises(VolumeError, match="does not list thresholds"):
        read_thresholds(tmp_path.as_uri(), LOCAL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_series_and_single_volumes_replace_one_another(affinities, tmp_path, capsys):
    target = tmp_path / "out"
    words = ["segment", affinities, str(target), "--low=20", "--high=250"]
    several = [*words, "--threshold=120", "--threshold=160"]
    assert main([*several, "--json", "--pyramid", "--block_shape=8x8x8"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["complete"]
    assert [each["threshold"] for each in told["volumes"]] == [120, 160]
    assert all(each["pyramid"]["scales"] == 1 for each in told["volumes"])
    assert read_thresholds(target.as_uri(), LOCAL) == (120, 160)
    assert main(several) == 0  # nothing is left to do
    assert main([*several, "--threshold=200"]) == 2
    assert "records of another job (what differs: threshold" in capsys.readouterr().err
    assert main([*words, "--threshold=120"]) == 2
    assert "records of another job (what differs: threshold" in capsys.readouterr().err
    expected = read((target / "threshold_120").as_uri())
    (target / "threshold_160" / "notes").write_text("mine")
    assert main([*words, "--threshold=120", "--overwrite"]) == 2
    assert "holds notes" in capsys.readouterr().err
    (target / "threshold_160" / "notes").unlink()
    assert main([*words, "--threshold=120", "--overwrite"]) == 0
    np.testing.assert_array_equal(read(target.as_uri()), expected)
    assert not list(target.glob("threshold*"))
    assert read_thresholds(target.as_uri(), LOCAL) is None
    assert main([*several, "--overwrite"]) == 0
    assert "threshold 160: " in capsys.readouterr().out
    assert not (target / "info").exists()
    assert not (target / "segments").exists()
    np.testing.assert_array_equal(read((target / "threshold_120").as_uri()), expected)
    provenance = json.loads((target / "threshold_160" / "provenance").read_text())
    assert "160" in json.dumps(provenance)


@pytest.mark.slow
def test_a_series_that_is_not_complete_is_none(affinities, tmp_path):
    options = with_layout({"low": 20, "high": 250})
    plan = plan_segmentation(affinities, str(tmp_path / "one"), threshold=150, **options)
    assert make_labels(plan, ()).exit_code == 0
    block = next(path for path in (tmp_path / "affinities").rglob("*-*") if path.is_file())
    content = block.read_bytes()
    block.write_bytes(b"damaged")
    series = plan_series(affinities, str(tmp_path / "out"), thresholds=[150, 200], **options)
    assert make_series(series, ())[0].exit_code == 1
    assert read_thresholds(series.url, LOCAL) is None
    block.write_bytes(content)
    assert [each.exit_code for each in make_series(series, ())] == [0, 0]
    assert read_thresholds(series.url, LOCAL) == (150, 200)
    np.testing.assert_array_equal(read(series.plans[0].output.url), read(plan.output.url))
