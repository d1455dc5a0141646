"""Random changes: determined by their generator, and of image and labels alike."""

import numpy as np
import pytest
from pydantic import ValidationError

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.training.augmentation import Augmentation, Elastic
from beam_inference.training.labelled_volumes import Cutout

STILL = {"flips": "", "transpose": False, "contrast": 0, "brightness": 0}
MARGIN = (1, 2, 2)


def cutout(shape=(8, 24, 24)):
    """A cutout whose image shows its labels, with a margin."""
    box = BoundingBox((0, 0, 0), shape)
    places = np.indices(box.grow(MARGIN).shape)
    labels = (places[1] // 5 + places[2] // 7).astype(np.float32)[None]
    inside = (slice(None), *(slice(m, -m) for m in MARGIN))
    return Cutout(box, labels.copy(), labels[inside].astype(np.uint64), np.ones((1, *shape), bool))


def apply(seed=0, **keys):
    return Augmentation(**(STILL | keys)).apply(cutout(), np.random.default_rng(seed))


def inner(image):
    return image[(slice(None), *(slice(m, -m) for m in MARGIN))]


def test_without_changes_a_cutout_stays_as_it_is():
    np.testing.assert_array_equal(apply().image, cutout().image)
    np.testing.assert_array_equal(apply().labels, cutout().labels)


def test_all_changes_follow_from_the_generator():
    keys = {
        "flips": "zyx",
        "transpose": True,
        "elastic": Elastic(probability=1),
        "noise": 0.1,
        "blur": 2,
        "blur_probability": 1,
        "missing_sections": 0.2,
        "shifted_sections": 0.2,
        "contrast": 0.2,
        "brightness": 0.2,
    }
    first = [apply(seed, **keys) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(first[0].image, first[1].image)
    np.testing.assert_array_equal(first[0].labels, first[1].labels)
    assert (first[0].image != first[2].image).any()
    assert first[0].image.dtype == np.float32


@pytest.mark.parametrize("seed", range(8))
def test_image_and_labels_are_flipped_alike(seed):
    changed = apply(seed, flips="zyx", transpose=True)
    np.testing.assert_array_equal(inner(changed.image), changed.labels)


def test_image_and_labels_are_deformed_alike():
    changed = apply(elastic=Elastic(probability=1, amplitude=(0, 3, 3)))
    assert (changed.labels != cutout().labels).mean() > 0.1
    # Between labels the image is interpolated: away from edges both agree.
    whole = inner(changed.image) == np.rint(inner(changed.image))
    agree = (inner(changed.image) == changed.labels) & whole & changed.valid
    assert agree.sum() > 0.99 * (whole & changed.valid).sum() > 0.3 * changed.labels.size
    assert not changed.valid.all()


def test_sections_are_missing_or_out_of_place_in_the_image_alone():
    missing = apply(missing_sections=0.5)
    gone = ~missing.image.any(axis=(0, 2, 3))
    assert 0 < gone.sum() < len(gone)
    shifted = apply(shifted_sections=0.5)
    moved = (shifted.image != cutout().image).any(axis=(0, 2, 3))
    assert 0 < moved.sum() < len(moved)
    for changed in (missing, shifted):
        np.testing.assert_array_equal(changed.labels, cutout().labels)


def test_intensities_change_within_their_bounds():
    changed = apply(contrast=0.5, brightness=0.25)
    scale, added = np.polyfit(cutout().image.ravel(), changed.image.ravel(), 1)
    assert 0.5 <= scale <= 1.5
    assert abs(added) <= 0.25
    assert apply(noise=0.5).image.std() > 0
    blurred = apply(blur=3, blur_probability=1).image
    assert np.abs(np.diff(blurred, axis=3)).max() < np.abs(np.diff(cutout().image, axis=3)).max()


def test_axes_that_are_none_are_refused():
    with pytest.raises(ValidationError, match="flips"):
        Augmentation(flips="zq")
