"""Evaluations of whole volumes: against scikit-image and scikit-learn, for several chunk shapes."""

import json
import shutil
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from helpers import write_volume
from oracles.label_volumes import write
from skimage.metrics import adapted_rand_error, variation_of_information
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from beam_inference.cli.main import main
from beam_inference.errors import AlignmentError, ConfigError, VolumeError
from beam_inference.evaluation.evaluate import plan_evaluation, read_evaluation
from beam_inference.evaluation.page import describe_evaluation, place_states, render_evaluation
from beam_inference.evaluation.stages import evaluation_stages
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.view.layers import view_of
from beam_inference.volumes.kvstores import LOCAL

CHUNK_SHAPES = ((8, 8, 8), (16, 24, 8), (40, 40, 40))
START = (3, -5, 2)
_numbers = count()


def judge(output, labels, **options):
    """Do all stages without Beam, and read what they have counted."""
    usual = {
        "kind": None,
        "scale": 0,
        "labels_scale": 0,
        "channel": None,
        "ignore": (),
        "positive": (),
        "thresholds": (),
        "value_range": (0.0, 1.0),
        "cell_shape": (8, 8, 8),
        "chunk_shape": (16, 16, 16),
        "worst": 5,
        "storage": LOCAL,
    }
    plan = plan_evaluation(output, labels, **usual | options)
    plan = replace(plan, scratch_url=f"memory://judged{next(_numbers)}")
    for stage in evaluation_stages(plan):
        do = stage.make_worker()
        for index in range(stage.count):
            do(index)
    return read_evaluation(plan)


def blobs(seed, shape=(21, 26, 30), side=6, most=9):
    """Labels in blocks, with some voxels changed."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, most, [-(-n // side) for n in shape])
    labels = coarse.repeat(side, 0).repeat(side, 1).repeat(side, 2)
    labels = labels[tuple(slice(n) for n in shape)].astype(np.uint32)
    is_other = random.random(shape) < 0.05
    labels[is_other] = random.integers(0, most, np.count_nonzero(is_other))
    return labels


@pytest.fixture(scope="module")
def objects():
    truth = blobs(1)
    segments = blobs(2, side=5, most=12)
    return segments, truth, write(segments), write(truth)


@pytest.mark.parametrize("chunk_shape", CHUNK_SHAPES)
@pytest.mark.parametrize("ignore", [(), (0,), (0, 3)])
def test_objects_are_scored_as_by_scikit_image(objects, chunk_shape, ignore):
    segments, truth, output, labels = objects
    found = judge(output, labels, chunk_shape=chunk_shape, ignore=ignore)
    scores = found.objects
    split, merge = variation_of_information(truth, segments, ignore_labels=ignore)
    error, precision, recall = adapted_rand_error(truth, segments, ignore_labels=ignore)
    assert scores.information_split == pytest.approx(split, abs=1e-9)
    assert scores.information_merge == pytest.approx(merge, abs=1e-9)
    assert scores.variation_of_information == pytest.approx(split + merge, abs=1e-9)
    assert scores.adapted_rand_error == pytest.approx(error, abs=1e-9)
    assert (scores.rand_split, scores.rand_merge) == pytest.approx((precision, recall), abs=1e-9)
    assert found.judged == np.count_nonzero(~np.isin(truth, ignore))


def test_no_score_depends_on_the_chunks(objects):
    _, _, output, labels = objects
    first, *others = (judge(output, labels, chunk_shape=each) for each in CHUNK_SHAPES)
    assert all(each == first for each in others)
    assert first.places
    assert first.split


def test_the_worst_objects_and_places_are_those_of_brute_force(objects):
    segments, truth, output, labels = objects
    found = judge(output, labels, ignore=[0])
    judged = truth != 0
    worst = found.split[0]
    parts = np.unique(segments[truth == worst.id], return_counts=True)[1]
    places = np.argwhere(truth == worst.id)
    assert (worst.voxels, worst.parts, worst.largest) == (parts.sum(), len(parts), parts.max())
    assert worst.box == BoundingBox(
        tuple(places.min(axis=0) + START), tuple(places.max(axis=0) + 1 + START)
    )
    share = parts / parts.sum()
    bits = -(parts * np.log2(share)).sum() / np.count_nonzero(judged)
    assert worst.bits == pytest.approx(bits)
    assert [each.bits for each in found.split] == sorted(
        (each.bits for each in found.split), reverse=True
    )
    ids = [np.unique(each, return_inverse=True) for each in (truth[judged], segments[judged])]
    table = np.zeros([len(names) for names, _ in ids], int)
    np.add.at(table, tuple(inverse for _, inverse in ids), 1)
    best = (table == table.max(0)) & (table == table.max(1, keepdims=True)) & (table > 0)
    is_wrong = np.zeros(truth.shape, bool)
    is_wrong[judged] = ~best[tuple(inverse for _, inverse in ids)]
    cells = {
        (z, y, x): np.count_nonzero(is_wrong[z : z + 8, y : y + 8, x : x + 8])
        for z in range(0, 21, 8)
        for y in range(0, 26, 8)
        for x in range(0, 30, 8)
    }
    expected = sorted(cells.items(), key=lambda item: (-item[1], item[0]))[:5]
    assert [
        (tuple(np.subtract(place.box.start, START)), place.wrong) for place in found.places
    ] == expected


def test_ids_may_be_of_64_bits(objects):
    segments, _, output, labels = objects
    url = write(segments.astype(np.uint64) + 2**63)
    found = judge(url, labels)
    usual = judge(output, labels)
    assert found.objects == usual.objects
    assert [each.id for each in found.merged] == [each.id + 2**63 for each in usual.merged]


@pytest.mark.parametrize("chunk_shape", CHUNK_SHAPES)
def test_classes_are_scored_by_dice(chunk_shape):
    truth = blobs(3, most=4).astype(np.uint8)
    output = np.where(np.random.default_rng(0).random(truth.shape) < 0.7, truth, 2).astype(np.uint8)
    found = judge(write(output), write(truth), kind="classes", ignore=[3], chunk_shape=chunk_shape)
    judged = truth != 3
    expected = f1_score(truth[judged], output[judged], average=None, labels=[0, 1, 2])
    assert [each.dice for each in found.classes[:3]] == pytest.approx(list(expected), abs=1e-9)
    both = ((truth == output) & (truth > 0) & judged).sum()
    sizes = ((truth > 0) & judged).sum() + ((output > 0) & judged).sum()
    assert found.dice == pytest.approx(2 * both / sizes, abs=1e-12)
    assert found.places[0].wrong > 0


@pytest.mark.parametrize("chunk_shape", CHUNK_SHAPES)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_maps_are_scored_as_by_scikit_learn(dtype, chunk_shape):
    random = np.random.default_rng(5)
    truth = blobs(4, most=4)
    share = np.clip(random.normal(0.4 + 0.2 * (truth == 1), 0.15), 0, 1)
    top = {"uint8": 255, "uint16": 65535, "float32": 1}[dtype]
    values = (share * top).astype(dtype)
    url = write(values)
    found = judge(
        url,
        write(truth),
        kind="map",
        ignore=[2],
        positive=[1],
        thresholds=[int(0.6 * top) or 0.6],
        chunk_shape=chunk_shape,
    )
    judged = truth != 2
    expected = truth[judged] == 1
    precision = average_precision_score(expected, values[judged])
    area = roc_auc_score(expected, values[judged])
    scores = found.map
    if dtype == "float32":
        assert scores.average_precision.low <= precision <= scores.average_precision.high
        assert scores.roc_auc.low <= area <= scores.roc_auc.high
        assert scores.roc_auc.high - scores.roc_auc.low < 1e-3
    else:
        assert scores.average_precision.value == pytest.approx(precision, abs=1e-9)
        assert scores.roc_auc.value == pytest.approx(area, abs=1e-9)
        assert scores.roc_auc.low == scores.roc_auc.high
    at = scores.thresholds[0]
    is_found = values[judged] >= at.threshold
    assert at.dice == pytest.approx(f1_score(expected, is_found), abs=1e-12)
    assert scores.best.dice >= at.dice - 1e-3
    assert scores.roc[0] == (0, 0)
    assert scores.roc[-1] == (1, 1)
    assert sum(place.wrong for place in found.places) <= np.count_nonzero(is_found != expected)


def test_ids_of_64_bits_are_told_apart_in_maps():
    truth = np.full((8, 8, 8), 2**63 + 1, np.uint64)
    truth[:4] = 2**63 - 1
    values = write(np.zeros(truth.shape, np.uint8))
    labels = write(truth)
    everything = [2**63 + 1, 2**63 - 1, 2**70]
    assert judge(values, labels, kind="map", ignore=[2**63 + 1, 5, 2**70]).judged == 256
    assert judge(values, labels, kind="map", positive=[2**63 - 1], thresholds=[9]).judged == 512
    with pytest.raises(VolumeError, match="no voxel"):
        judge(values, labels, kind="map", ignore=everything)


@pytest.mark.parametrize("kind", ["objects", "map"])
def test_negative_labels_are_refused(kind):
    labels = write(np.full((8, 8, 8), -1, np.int64), format="zarr3", start=(0, 0, 0))
    dtype = np.uint32 if kind == "objects" else np.uint8
    output = write(np.ones((8, 8, 8), dtype), start=(0, 0, 0))
    with pytest.raises(ValueError, match="labels are 0 or more"):
        judge(output, labels, kind=kind)


def test_a_map_without_positives_has_no_precision():
    shape = (8, 8, 8)
    found = judge(write(np.zeros(shape, np.float32)), write(np.zeros(shape, np.uint32)))
    assert found.map.average_precision.value is None
    assert found.map.roc_auc.value is None
    assert "average precision: none" in describe_evaluation(found)


def test_a_value_that_is_no_number_is_refused():
    shape = (8, 8, 8)
    url = write(np.full(shape, np.nan, np.float32))
    with pytest.raises(ValueError, match="no numbers"):
        judge(url, write(np.ones(shape, np.uint32)))


def test_what_cannot_be_judged_is_refused(objects):
    _, _, output, labels = objects
    byte = write(np.ones((8, 8, 8), np.uint8))
    floats = write(np.ones((8, 8, 8), np.float32))
    two = write(np.ones((2, 8, 8, 8), np.uint8))
    for wrong, error, match in (
        (lambda: judge(byte, labels), ConfigError, "--as objects"),
        (lambda: judge(floats, labels, kind="objects"), ConfigError, "numbered by integers"),
        (lambda: judge(output, floats), ConfigError, "labels are integers"),
        (lambda: judge(two, labels, kind="map"), ConfigError, "say which with --channel"),
        (lambda: judge(output, two), ConfigError, "labels have one"),
        (lambda: judge(output, labels, thresholds=[1]), ConfigError, "are for maps"),
        (lambda: judge(output, labels, chunk_shape=(9, 8, 8)), AlignmentError, "16x8x8"),
        (lambda: judge(floats, labels, value_range=(1.0, 0.0)), ConfigError, "the lower one"),
        (
            lambda: judge(output, write(np.ones((8, 8, 8), np.uint32), start=(500, 0, 0))),
            VolumeError,
            "no voxel in common",
        ),
        (
            lambda: judge(output, write(np.ones((8, 8, 8), np.uint32), voxel_size_nm=(9, 9, 9))),
            VolumeError,
            "scales of one size",
        ),
        (lambda: judge(output, labels, ignore=range(9)), VolumeError, "no voxel"),
    ):
        with pytest.raises(error, match=match):
            wrong()


@pytest.fixture
def volumes(tmp_path):
    truth = blobs(1)
    output = blobs(2, side=5, most=12)
    options = {"block_shape": (8, 8, 8)}
    return (
        write_volume(tmp_path / "objects", output, **options),
        write_volume(tmp_path / "labels", truth, **options),
        truth,
        output,
    )


def test_the_command_prints_json_writes_a_page_and_leaves_nothing(volumes, tmp_path, capsys):
    output, labels, truth, segments = volumes
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    page = tmp_path / "page.html"
    flags = ["--cell_shape=8x8x8", "--chunk_shape=40x40x40", "--ignore=0", f"--page={page}"]
    assert main(["evaluate", output, labels, *flags, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    split, merge = variation_of_information(truth, segments, ignore_labels=[0])
    scores = printed["objects"]
    assert scores["variation_of_information"] == pytest.approx(split + merge, abs=1e-9)
    assert len(printed["places"]) == 20
    text = page.read_text()
    assert "beam-inference view" in text
    assert f"{printed['places'][0]['wrong']}</td>" in text
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert after - before == {page}
    assert main(["evaluate", output, labels, *flags]) == 0
    assert "variation of information: " in capsys.readouterr().out


@pytest.fixture
def failed(volumes, tmp_path, capsys):
    """The command of an evaluation that failed by a damaged block, which is whole again."""
    output, labels, _, _ = volumes
    block = min(
        path for path in (tmp_path / "labels").rglob("*") if path.is_file() and "-" in path.name
    )
    content = block.read_bytes()
    block.write_bytes(b"damaged")
    words = ["evaluate", output, labels, "--cell_shape=8x8x8", "--chunk_shape=24x32x16"]
    words.append(f"--state={tmp_path / 'records'}")
    assert main(words) == 1
    assert "cannot read" in capsys.readouterr().out
    block.write_bytes(content)
    return words


@pytest.mark.slow
def test_an_evaluation_that_failed_does_not_go_on_with_another_output(
    failed, volumes, tmp_path, capsys
):
    _, _, truth, _ = volumes
    shutil.rmtree(tmp_path / "objects")
    write_volume(tmp_path / "objects", truth, block_shape=(8, 8, 8))
    assert main(failed) == 2
    assert "does not hold what its source gives" in capsys.readouterr().err


@pytest.mark.slow
def test_an_evaluation_that_failed_continues(failed, tmp_path, capsys):
    done = list((tmp_path / "records").rglob("count/done/**/*.json"))
    assert done
    assert main(failed) == 0
    assert "adapted Rand error" in capsys.readouterr().out
    assert not [path for path in (tmp_path / "records").rglob("*") if path.is_file()]


def test_a_page_links_places_of_volumes_on_the_web(volumes):
    output, labels, _, _ = volumes
    found = judge(output, labels)
    states = place_states(view_of(None, [output, labels], patches=False), found)
    box = found.places[0].box
    middle = [(a + b) // 2 + 0.5 for a, b in zip(box.start, box.stop, strict=True)]
    assert states[0]["position"] == middle[::-1]
    boxes = states[0]["layers"][-1]["annotations"]
    assert len(boxes) == len(found.places)
    assert boxes[0]["pointA"] == box.start[::-1]
    assert "<h2>split label</h2>" in render_evaluation(found)
