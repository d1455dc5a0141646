"""Streams of samples: one sequence, from the right boxes, whoever reads it."""

import json
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import zarr
from helpers import write_volume

from beam_inference.config.volumes import Mask
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.training.labelled_volumes import LabelledVolume
from beam_inference.training.samples import SampleStream
from beam_inference.training.split import Split

SHAPE = (32, 64, 64)
PATCH = (4, 8, 8)
SPLIT = Split((8, 16, 16), validation=0.3, test=0.2)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Two labelled volumes at different places; labels are the voxels' places in their volume."""
    made = []
    for number, start in enumerate([(0, 0, 0), (5, -40, 7)]):
        folder = tmp_path_factory.mktemp(f"volume{number}")
        places = np.arange(np.prod(SHAPE), dtype=np.uint32).reshape(SHAPE)
        write_volume(folder / "labels", places, start)
        write_volume(folder / "em", (places % 251).astype(np.uint8), start)
        made.append(LabelledVolume(str(folder / "em"), str(folder / "labels"), name=f"v{number}"))
    return made


def stream(volumes, **options):
    return SampleStream(volumes, PATCH, split=SPLIT, batch_size=2, seed=3, **options)


def first(batches, count):
    return [(batch, next(batches))[1] for batch in range(count)]


def described(batches):
    return [
        (
            batch.number,
            tuple(batch.volumes),
            tuple(batch.boxes),
            batch.arrays["image"].numpy().tobytes(),
            batch.arrays["labels"].numpy().tobytes(),
        )
        for batch in batches
    ]


def slow_transform(cutout, random):
    time.sleep(random.random() * 0.01)
    return {"image": cutout.image, "labels": cutout.labels}


def test_samples_are_cut_where_their_boxes_say(volumes):
    (batch,) = stream(volumes, crop_margin=(1, 2, 2), length=1).batches()
    assert batch.arrays["image"].shape == (2, 1, 6, 12, 12)
    assert batch.arrays["labels"].shape == (2, 1, *PATCH)
    for number, (volume, box) in enumerate(zip(batch.volumes, batch.boxes, strict=True)):
        start = [(0, 0, 0), (5, -40, 7)][volume]
        inside = tuple(
            slice(a - o, b - o) for a, b, o in zip(box.start, box.stop, start, strict=True)
        )
        places = np.arange(np.prod(SHAPE), dtype=np.uint32).reshape(SHAPE)[inside]
        np.testing.assert_array_equal(batch.arrays["labels"][number, 0], places)
        np.testing.assert_array_equal(
            batch.arrays["image"][number, 0, 1:-1, 2:-2, 2:-2], places % 251
        )


def test_the_sequence_depends_on_the_seed_alone(volumes):
    expected = described(stream(volumes, length=12))
    assert expected == described(stream(volumes, length=12, transform=slow_transform))
    assert expected == described(stream(volumes, length=12, ahead_bytes=1, cache_bytes=0))
    other = SampleStream(volumes, PATCH, split=SPLIT, batch_size=2, seed=4, length=12)
    assert expected != described(other)
    assert {volume for _, each, *_ in expected for volume in each} == {0, 1}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than cores
@pytest.mark.parametrize("workers", [1, 3])
def test_worker_processes_give_the_same_sequence(volumes, workers):
    expected = described(stream(volumes, length=10))
    made = stream(volumes, length=10, transform=slow_transform)
    batches = made.batches(workers)
    begun = described(first(batches, 4))
    state = made.state_dict()
    batches.close()
    resumed = stream(volumes, length=10)
    resumed.load_state_dict(state)
    assert begun + described(resumed.batches(workers)) == expected


def test_a_resumed_stream_goes_on_where_it_was(volumes):
    expected = described(stream(volumes, length=10))
    made = stream(volumes, length=10)
    begun = described(first(iter(made), 3))
    state = json.loads(json.dumps(made.state_dict()))
    resumed = stream(volumes, length=10)
    resumed.load_state_dict(state)
    assert begun + described(resumed) == expected


SHAPES = {PATCH: 1.0, (2, 12, 6): 3.0, (8, 4, 16): 1.0}


@pytest.mark.parametrize("shapes", [PATCH, SHAPES], ids=["one shape", "several"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_share_the_samples_of_a_step(volumes, shapes, ranks):
    def made(**options):
        options = {"split": SPLIT, "batch_size": 4, "seed": 3, "length": 3} | options
        return SampleStream(volumes, shapes, **options)

    whole = made()
    boxes = [box for batch in whole for box in batch.boxes]
    parts = [made(rank=rank, world_size=ranks) for rank in range(ranks)]
    steps = [*zip(*parts, strict=True)]
    assert boxes == [box for step in steps for batch in step for box in batch.boxes]
    for step in steps:
        shares = [len(batch.boxes) for batch in step]
        assert max(shares) - min(shares) <= 1
        assert all(len(batch.groups) == len({b.shape for b in batch.boxes}) for batch in step)
    parts[0].load_state_dict(whole.state_dict())


def test_patches_of_several_shapes_come_by_shape(volumes):
    def made(**options):
        options = {"split": SPLIT, "batch_size": 5, "seed": 3} | options
        return SampleStream(volumes, SHAPES, crop_margin=(0, 1, 1), **options)

    seen = dict.fromkeys(SHAPES, 0)
    for batch in made(length=40).batches():
        for group in batch.groups:
            _, _, *shape = group["labels"].shape
            boxes = [box for box in batch.boxes if box.shape == tuple(shape)]
            seen[tuple(shape)] += len(boxes)
            assert group["image"].shape[2:] == (shape[0], shape[1] + 2, shape[2] + 2)
            for box, labels in zip(boxes, group["labels"], strict=True):
                volume = batch.volumes[batch.boxes.index(box)]
                start = np.subtract(box.start, [(0, 0, 0), (5, -40, 7)][volume])
                assert labels[0, 0, 0, 0] == np.ravel_multi_index(start, SHAPE)
    assert 0.5 < seen[(2, 12, 6)] / 200 < 0.7
    assert min(seen.values()) > 20
    several = next(each for each in made().batches() if len(each.groups) > 1)
    with pytest.raises(ValueError, match="of 3 shapes|of 2 shapes"):
        _ = several.arrays
    with pytest.raises(StateError, match="another sequence"):
        stream(volumes).load_state_dict(made().state_dict())
    with pytest.raises(ConfigError, match="no shape of patches has a weight above 0"):
        SampleStream(volumes, {PATCH: 0.0})


def test_a_position_in_another_sequence_is_refused(volumes):
    with pytest.raises(StateError, match="another sequence"):
        stream(volumes).load_state_dict(stream(volumes, label_weights={0: 0.5}).state_dict())


def test_sets_share_no_voxel_and_hold_their_crop_margins(volumes):
    seen = {}
    for subset in ("train", "validation", "test"):
        made = stream(volumes[:1], subset=subset, crop_margin=(1, 1, 1), length=40)
        touched = np.zeros(SHAPE, bool)
        for batch in made:
            for box in batch.boxes:
                touched[box.grow((1, 1, 1)).slices_in(BoundingBox((0, 0, 0), SHAPE))] = True
        assert touched.any()
        seen[subset] = touched
    assert not sum(each.astype(int) for each in seen.values()).max() > 1


def test_rare_labels_can_be_sought(tmp_path):
    labels = np.zeros(SHAPE, np.uint8)
    labels[:, :16, :16] = 1
    write_volume(tmp_path / "labels", labels)
    write_volume(tmp_path / "em", labels)
    volume = LabelledVolume(str(tmp_path / "em"), str(tmp_path / "labels"))
    split = Split((8, 16, 16), 0, 0)
    shares = []
    for weights in (None, {0: 0.01}):
        made = SampleStream([volume], PATCH, split=split, label_weights=weights, length=30)
        shares.append(np.mean([batch.arrays["labels"].numpy().any() for batch in made]))
    assert shares[0] < 0.4 < 0.8 < shares[1]


def test_boxes_lie_where_a_mask_is(tmp_path, volumes):
    mask = np.zeros((16, 32, 32), np.uint8)
    mask[:, 16:] = 1
    write_volume(tmp_path / "mask", mask, voxel_size_nm=(20.0, 20.0, 20.0))
    volume = LabelledVolume(
        volumes[0].image, volumes[0].labels, mask=Mask(path=str(tmp_path / "mask"))
    )
    for batch in SampleStream([volume], PATCH, split=Split((8, 16, 16), 0, 0), length=10):
        (box,) = batch.boxes
        assert box.stop[1] > 32
        valid = batch.arrays["valid"][0, 0].numpy()
        y = np.arange(box.start[1], box.stop[1]) >= 32
        np.testing.assert_array_equal(valid, np.broadcast_to(y[:, None], valid.shape))


def test_a_volume_without_a_patch_of_the_set_is_left_out(volumes, caplog):
    split = Split((8, 16, 16), 0.3, 0.2)
    tiny = LabelledVolume(volumes[0].image, volumes[0].labels, weight=0)
    made = SampleStream([tiny, volumes[0]], PATCH, split=split, length=5)
    assert {volume for batch in made for volume in batch.volumes} == {1}
    with pytest.raises(ConfigError, match="no volume has a patch .* the test set"):
        SampleStream(volumes, PATCH, split=Split((8, 16, 16), 0, 0), subset="test")
    assert "no sample comes from it" in caplog.text


def test_what_cannot_be_sampled_is_refused(tmp_path, volumes):
    with pytest.raises(VolumeError, match="no patch of"):
        SampleStream(volumes, (33, 8, 8))
    with pytest.raises(ConfigError, match="at least one"):
        SampleStream([], PATCH)
    with pytest.raises(ConfigError, match="weights are"):
        stream(volumes, label_weights={1: -1.0})
    write_volume(tmp_path / "fine", np.zeros(SHAPE, np.uint8), voxel_size_nm=(4.0, 4.0, 4.0))
    with pytest.raises(VolumeError, match="expected one size"):
        SampleStream([LabelledVolume(str(tmp_path / "fine"), volumes[0].labels)], PATCH)
    with pytest.raises(VolumeError, match="no volume at"):
        SampleStream([LabelledVolume(str(tmp_path / "none"), volumes[0].labels)], PATCH)


def test_a_mask_beside_a_volume_without_a_voxel_size_is_refused(tmp_path, volumes):
    zarr.save_array(tmp_path / "image", np.zeros(SHAPE, np.uint8))
    mask = Mask(path=volumes[0].labels)
    with pytest.raises(VolumeError, match="image does not say its voxel size.*convert --voxel"):
        SampleStream([LabelledVolume(str(tmp_path / "image"), volumes[0].labels, mask)], PATCH)


def test_a_mask_that_keeps_nothing_is_told(tmp_path, volumes):
    write_volume(tmp_path / "mask", np.zeros(SHAPE, np.uint8))
    volume = LabelledVolume(
        volumes[0].image, volumes[0].labels, mask=Mask(path=str(tmp_path / "mask"))
    )
    with pytest.raises(VolumeError, match="in a row were refused"):
        next(iter(SampleStream([volume], PATCH, split=SPLIT, length=1)))


def test_a_signal_does_not_wait_for_the_rest_of_a_batch(volumes):
    made = SampleStream(volumes, PATCH, split=SPLIT, batch_size=10**9)
    # Sent to the process, it may reach another thread, and leave the main one waiting.
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(made))


def test_a_forked_process_is_told_what_to_do(volumes):
    made = stream(volumes, length=1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(iter(made))
        except ConfigError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as told:
        assert "spawn" in told.read()
    assert described(pickle.loads(pickle.dumps(made))) == described(made)


@pytest.mark.parametrize("size", [(10.0, 10.0, 10.0), (20.0, 4.0, 4.0)])
def test_volumes_of_two_voxel_sizes_are_told_of(size, volumes, tmp_path, caplog):
    image = np.arange(np.prod(SHAPE), dtype=np.uint32).reshape(SHAPE)
    for name, array in (("labels", image), ("em", (image % 251).astype(np.uint8))):
        write_volume(tmp_path / name, array, voxel_size_nm=size)
    other = LabelledVolume(str(tmp_path / "em"), str(tmp_path / "labels"), name="other")
    first(stream([*volumes, other], length=1).batches(), 1)
    assert ("those of" in caplog.text) == (size != (10.0, 10.0, 10.0))
