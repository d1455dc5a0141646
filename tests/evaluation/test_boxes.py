"""Boxes for annotators: what is exported, and how corrected labels come back into training."""

import json
import os
import shutil

import numpy as np
import pytest
import tifffile
import yaml
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.conversion.find_source import find_source
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.evaluation.boxes import export_boxes, load_boxes, load_evaluation
from beam_inference.evaluation.corrections import take_corrections
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.training.config import load_training
from beam_inference.training.samples import SampleStream
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume

SHAPE = (32, 48, 48)
START = (4, -16, 8)
PATCH = (4, 8, 8)
CELL = (8, 16, 16)
EXPORTED = ["box_0001", "box_0002", "box_0003"]


@pytest.fixture
def workplace(tmp_path):
    """A training, its volume, and an evaluation that ranks every place in blocks of its split."""
    random = np.random.default_rng(0)
    arrays = {
        "em": random.integers(0, 256, SHAPE).astype(np.uint8),
        "labels": random.integers(0, 9, SHAPE).astype(np.uint32),
        "objects": random.integers(0, 9, SHAPE).astype(np.uint32),
    }
    for name, array in arrays.items():
        write_volume(tmp_path / name, array, START, block_shape=(16, 16, 16))
    training = {
        "volumes": [{"image": "em", "labels": "labels", "name": "here"}],
        "output": "trained",
        "patch_shape": list(PATCH),
        "target": {"kind": "affinities"},
        "split": {"block_shape": [8, 16, 16], "validation": 0.2, "test": 0.2},
        "augmentation": None,
        "steps": 2,
    }
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(training))
    places = [
        {"box": {"start": start, "stop": np.add(start, CELL).tolist()}, "judged": 2048, "wrong": 9}
        for start in (
            [z, y, x] for z in range(8, 32, 8) for y in range(-16, 32, 16) for x in (16, 32)
        )
    ]
    evaluation = {
        "output": (tmp_path / "objects").as_uri(),
        "scale": 0,
        "channel": 0,
        "labels": (tmp_path / "labels").as_uri(),
        "labels_scale": 0,
        "places": places,
        "dice": None,
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    return tmp_path


def export(workplace, **options):
    evaluation = load_evaluation(workplace / "evaluation.json")
    options = {"context": (2, 4, 4), "most": 3} | options
    return export_boxes(workplace / "worst", evaluation, workplace / "training.yaml", **options)


def take(workplace, folder="worst", training="training.yaml", to="second.yaml", **options):
    return take_corrections(workplace / folder, workplace / training, workplace / to, **options)


def read(path):
    source = find_source(str(path), None, 0, LOCAL)
    return source.open()(source.info.bounds)[0]


def cut(workplace, name, box):
    volume = open_volume(str(workplace / name))
    return volume.read(box)[0]


def correct(folder, box, change):
    """Save changed labels over those that were exported, as an annotator's tool does."""
    path = folder / box.name / "labels"
    changed = change(read(path))
    shutil.rmtree(path)
    write_volume(path, changed, box.box.start, block_shape=(64, 64, 64))
    return changed


@pytest.mark.parametrize(
    ("format", "suffix"),
    [
        ("precomputed", ""),
        ("ome_zarr", ""),
        ("zarr3", ""),
        ("n5", ""),
        ("tiff", ".tif"),
        ("nrrd", ".nrrd"),
        ("npy", ".npy"),
    ],
)
def test_boxes_are_exported_in_formats_that_annotators_open(workplace, format, suffix):
    made = export(workplace, format=format)
    assert [box.name for box in made.record.boxes] == EXPORTED
    for box in made.record.boxes:
        for name, volume in (("image", "em"), ("labels", "labels"), ("prediction", "objects")):
            values = read(workplace / "worst" / box.name / f"{name}{suffix}")
            np.testing.assert_array_equal(values, cut(workplace, volume, box.box.box))
    if format in ("precomputed", "ome_zarr"):
        there = open_volume(str(workplace / "worst" / "box_0001" / "labels"))
        assert there.bounds == made.record.boxes[0].box.box
        assert there.voxel_size_nm == (10, 10, 10)


def test_only_places_of_the_training_set_are_exported_with_context(workplace):
    made = export(workplace, most=99)
    config = load_training(workplace / "training.yaml")
    split = config.definite_split
    cores = [box.core.box for box in made.record.boxes]
    assert all(split.contains("train", core, "here") for core in cores)
    evaluation = load_evaluation(workplace / "evaluation.json")
    others = [place.box.box for place in evaluation.places if place.box.box not in cores]
    assert made.left_out == len(others) > 0
    assert not any(split.contains("train", box, "here") for box in others)
    whole = BoundingBox(START, tuple(np.add(START, SHAPE).tolist()))
    for box in made.record.boxes:
        assert box.box.box == box.core.box.grow((2, 4, 4)).intersection(whole)
    assert load_boxes(workplace / "worst") == made.record


def samples_of(path, subset="train"):
    """Which volume each of some samples is from, where, and its arrays."""
    config = load_training(path)
    stream = SampleStream(
        config.labelled_volumes,
        config.patch_shape,
        split=config.definite_split,
        subset=subset,
        length=80,
        seed=4,
    )
    for batch in stream.batches():
        yield batch.volumes[0], batch.boxes[0], batch.arrays


def test_corrected_labels_are_trained_with_in_the_same_split(workplace, caplog):
    made = export(workplace)
    boxes = made.record.boxes
    corrected = {
        box.name: correct(workplace / "worst", box, lambda values: values * 3 + 70_000)
        for box in boxes[1:]
    }
    taken = take(workplace, weight=20.0)
    assert (taken.taken, taken.unchanged) == (EXPORTED[1:], EXPORTED[:1])
    assert taken.weights is None
    first = load_training(workplace / "training.yaml")
    second = load_training(workplace / "second.yaml")
    assert second.definite_split == first.definite_split
    assert second.split.block_shape == (8, 16, 16)
    assert second.output == str(workplace / "second")
    assert {each.name for each in second.volumes} == {"here"}
    split = second.definite_split
    seen = set()
    for number, box, arrays in samples_of(workplace / "second.yaml"):
        assert split.contains("train", box, "here")
        valid = arrays["valid"][0, 0].numpy()
        expected = np.zeros(box.shape, bool)
        if number == 0:
            expected[:] = True
            labels = cut(workplace, "labels", box)
            for each in boxes[1:]:
                part = box.intersection(each.core.box)
                if part.size:
                    expected[part.slices_in(box)] = False
        else:
            each = boxes[number]
            part = box.intersection(each.core.box)
            assert part.size
            expected[part.slices_in(box)] = True
            labels = corrected[each.name][box.slices_in(each.box.box)]
        np.testing.assert_array_equal(valid, expected)
        np.testing.assert_array_equal(arrays["labels"][0, 0].numpy(), labels)
        np.testing.assert_array_equal(arrays["image"][0, 0].numpy(), cut(workplace, "em", box))
        seen.add(number)
    assert seen == {0, 1, 2}
    caplog.clear()
    for _, box, _ in samples_of(workplace / "second.yaml", "validation"):
        assert split.contains("validation", box, "here")
    assert not caplog.records, "boxes of the training set are not missed elsewhere"


def test_a_further_round_replaces_what_was_corrected_before(workplace):
    export(workplace)
    box = load_boxes(workplace / "worst").boxes[0]
    correct(workplace / "worst", box, lambda values: values + 1)
    (workplace / "trained").mkdir()
    (workplace / "trained" / "weights.safetensors").write_bytes(b"")
    taken = take(workplace)
    assert taken.weights == str(workplace / "trained" / "weights.safetensors")
    evaluation = load_evaluation(workplace / "evaluation.json")
    again = export_boxes(
        workplace / "again", evaluation, workplace / "second.yaml", context=(2, 4, 4), most=2
    )
    assert again.record.volume.labels == evaluation.labels
    for each in again.record.boxes:
        correct(workplace / "again", each, lambda values: values + 2)
    take(workplace, "again", "second.yaml", to="third.yaml")
    original, before, *now = load_training(workplace / "third.yaml").volumes
    cores = [each.core for each in again.record.boxes]
    assert original.without == [box.core, *cores]
    assert (before.within, before.without) == (box.core, cores[:1])
    assert [each.within for each in now] == cores


def test_files_that_lost_their_place_come_back_where_they_were(workplace):
    made = export(workplace, format="tiff")
    box = made.record.boxes[0]
    path = workplace / "worst" / "box_0001" / "labels.tif"
    values = tifffile.imread(path) + 5
    tifffile.imwrite(path, values.astype(np.uint16))
    take(workplace)
    volume = open_volume(str(workplace / "worst" / "corrected" / "box_0001"))
    assert volume.bounds == box.box.box
    np.testing.assert_array_equal(volume.read(volume.bounds)[0], values)


@pytest.mark.parametrize("format", ["precomputed", "ome_zarr", "nrrd"])
def test_labels_of_two_boxes_that_were_exchanged_are_refused(workplace, format):
    export(workplace, format=format, context=(0, 0, 0))
    folder = workplace / "worst"
    (one,) = (folder / "box_0001").glob("labels*")
    other = folder / "box_0002" / one.name
    one.rename(folder / "kept")
    other.rename(one)
    (folder / "kept").rename(other)
    with pytest.raises(VolumeError, match="Are these the labels of another box"):
        take(workplace)
    assert not (workplace / "second.yaml").exists()


def test_labels_that_a_program_has_turned_round_are_refused(workplace):
    nibabel = pytest.importorskip("nibabel")
    record = export(workplace, format="nifti").record
    path = workplace / "worst" / record.boxes[0].name / "labels.nii"
    image = nibabel.load(path)
    flipped = np.asanyarray(image.dataobj)[::-1].copy()
    nibabel.save(nibabel.Nifti1Image(flipped, np.diag([-1, 1, 1, 1]) @ image.affine), path)
    with pytest.raises(VolumeError, match="turned or flipped in space"):
        take(workplace)


def test_labels_that_do_not_fit_are_refused(workplace):
    export(workplace, format="npy")
    path = workplace / "worst" / "box_0002" / "labels.npy"
    values = np.load(path)
    for wrong, match in (
        (values[1:], "as it was exported"),
        (values.astype(np.float32), "labels are integers"),
        (values.astype(np.int32) - 1, "from -1 on"),
    ):
        np.save(path, wrong)
        with pytest.raises(VolumeError, match=match):
            take(workplace)
    np.save(path, values)
    with pytest.raises(ConfigError, match="labels of all 3 boxes .* as they were exported"):
        take(workplace)
    assert not (workplace / "second.yaml").exists()
    assert not (workplace / "worst" / "corrected").exists()


@pytest.mark.parametrize("name", ["training.yaml", "trained.yaml", "second"])
def test_no_earlier_training_is_overwritten(workplace, name):
    export(workplace)
    with pytest.raises(ConfigError, match="expected the name of a new YAML file"):
        take(workplace, to=name)


@pytest.mark.parametrize(
    "change",
    [
        {"split": {"block_shape": [8, 16, 16], "validation": 0.2, "test": 0.2, "seed": 1}},
        {"volumes": [{"image": "em", "labels": "labels"}]},
    ],
)
def test_another_split_is_noticed(workplace, change):
    export(workplace)
    path = workplace / "training.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(StateError, match="were not exported for .* as it is"):
        take(workplace)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"volume": {"image": "file:///elsewhere"}}, "were not exported for"),
        ({"core": {"start": [0, 0, 0], "stop": [1, 1, 1]}}, "is not inside of its box"),
        ({"everywhere": True}, "not of the training set alone"),
        ({"box": {"start": list(START), "stop": [10**5] * 3}}, "which is not in the image"),
    ],
)
def test_a_record_that_somebody_has_changed_is_refused(workplace, changed, match):
    made = export(workplace)
    path = workplace / "worst" / "boxes.json"
    record = json.loads(path.read_text())
    record["volume"] |= changed.get("volume", {})
    box = record["boxes"][0]
    box |= {key: changed[key] for key in ("core", "box") if key in changed}
    if "everywhere" in changed:
        whole = {"start": list(START), "stop": np.add(START, SHAPE).tolist()}
        box |= {"core": whole, "box": whole}
    path.write_text(json.dumps(record))
    correct(workplace / "worst", made.record.boxes[1], lambda values: values + 1)
    with pytest.raises(StateError, match=match):
        take(workplace)
    assert not (workplace / "second.yaml").exists()


def test_boxes_that_do_not_fit_into_memory_are_refused(workplace, monkeypatch):
    made = export(workplace)
    correct(workplace / "worst", made.record.boxes[1], lambda values: values + 1)
    monkeypatch.setattr("beam_inference.evaluation.corrections.available_memory", lambda: 1000)
    with pytest.raises(StateError, match="and 1,000 are available: export smaller boxes"):
        take(workplace)


def test_a_record_that_names_a_training_is_refused(workplace):
    """Older ones did: whoever returned the boxes chose which network's code was run next."""
    export(workplace)
    path = workplace / "worst" / "boxes.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "training": "evil.yaml"}))
    with pytest.raises(ConfigError, match=r"boxes.json is not what boxes wrote: training"):
        take(workplace)


def test_a_record_that_is_a_pipe_is_not_waited_for(workplace):
    export(workplace)
    path = workplace / "worst" / "boxes.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"cannot read .*boxes\.json"):
        take(workplace)


def test_a_box_that_is_listed_twice_is_refused(workplace):
    export(workplace)
    path = workplace / "worst" / "boxes.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"boxes": [*record["boxes"], record["boxes"][0]]}))
    with pytest.raises(StateError, match="lists a box twice"):
        take(workplace)


def test_a_place_beyond_the_volume_is_left_out(workplace):
    path = workplace / "evaluation.json"
    values = json.loads(path.read_text())
    far = {"start": [0, 0, 0], "stop": [2**39] * 3}
    values["places"].insert(0, values["places"][0] | {"box": far})
    path.write_text(json.dumps(values))
    assert len(export(workplace).record.boxes) == 3


@pytest.mark.parametrize("place", ["corrected", "corrected/box_0001", "second.yaml"])
def test_no_link_is_followed_where_corrections_are_written(workplace, place):
    made = export(workplace)
    correct(workplace / "worst", made.record.boxes[0], lambda values: values + 1)
    precious = workplace / "precious"
    write_volume(precious, cut(workplace, "em", made.record.boxes[0].box.box))
    before = {path: path.read_bytes() for path in precious.rglob("*") if path.is_file()}
    link = workplace / ("" if place == "second.yaml" else "worst") / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious if "corrected" in place else workplace / "new.yaml")
    with pytest.raises((StateError, ConfigError), match="is a link|name of a new YAML file"):
        take(workplace)
    assert before == {path: path.read_bytes() for path in precious.rglob("*") if path.is_file()}
    assert not (workplace / "new.yaml").exists()


def test_what_cannot_be_exported_is_refused(workplace):
    for options, error, match in (
        ({"format": "jpeg2000"}, ConfigError, "expected one of n5, ome_zarr"),
        ({"image": "file:///elsewhere"}, ConfigError, "say which of its images"),
    ):
        with pytest.raises(error, match=match):
            export(workplace, **options)
    assert not (workplace / "worst").exists()
    (workplace / "worst").mkdir()
    (workplace / "worst" / "mine").write_text("")
    with pytest.raises(StateError, match="is not empty"):
        export(workplace)
    shutil.rmtree(workplace / "worst")
    (workplace / "worst").symlink_to(workplace / "nothing")
    with pytest.raises(StateError, match="leads nowhere"):
        export(workplace)


def test_boxes_without_room_for_a_patch_are_refused(workplace):
    path = workplace / "training.yaml"
    values = yaml.safe_load(path.read_text()) | {"patch_shape": [12, 16, 16]}
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="no room for a patch .* --context"):
        export(workplace, context=(1, 0, 0))
    assert len(export(workplace, context=(4, 0, 0)).record.boxes) == 3


def test_places_outside_of_the_training_set_alone_are_none(workplace):
    path = workplace / "training.yaml"
    values = yaml.safe_load(path.read_text())
    values["split"] = {"block_shape": [2, 2, 2]}
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="lies in the training set alone"):
        export(workplace)


def test_the_command_exports_and_takes_back(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    words = ["boxes", "worst", "--from", "evaluation.json", "--context=2,4,4", "--most=2"]
    words.append("--training=training.yaml")
    assert main([*words, "--json", "--format=npy"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [box["name"] for box in told["boxes"]] == EXPORTED[:2]
    assert told["left_out"] > 0
    path = workplace / "worst" / "box_0002" / "labels.npy"
    np.save(path, np.load(path) + 1)
    words = ["boxes", "worst", "--training=training.yaml", "--take", "second.yaml"]
    assert main([*words, "--weight=3"]) == 0
    out = capsys.readouterr().out
    assert "corrected: box_0002" in out
    assert "left out: box_0001" in out
    assert load_training(workplace / "second.yaml").volumes[1].weight == 3
    assert main(words) == 2


def test_of_several_thresholds_the_best_is_taken(workplace):
    path = workplace / "evaluation.json"
    values = json.loads(path.read_text())
    series = {
        "best": {"variation_of_information": 150.0},
        "thresholds": [
            {"threshold": 120.0, **values, "places": []},
            {"threshold": 150.0, **values},
        ],
    }
    expected = load_evaluation(path)
    path.write_text(json.dumps(series))
    assert load_evaluation(path) == expected
