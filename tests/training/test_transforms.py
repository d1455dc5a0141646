"""Arrays for training: normalised, augmented, with their target."""

from dataclasses import replace

import numpy as np
import pytest

from beam_inference.config.network import Channel
from beam_inference.config.normalize import Affine
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.training.augmentation import Augmentation
from beam_inference.training.labelled_volumes import Cutout
from beam_inference.training.targets import Affinities, Boundaries, Classes, Stored
from beam_inference.training.transforms import TrainingTransform

SHAPE = (4, 8, 8)
OFFSETS = [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (0, -3, 0), (0, 0, 3)]
GEOMETRY = Augmentation(contrast=0, brightness=0)


def cutout(labels, valid=None):
    valid = np.ones((1, *SHAPE), bool) if valid is None else valid
    image = np.random.default_rng(1).integers(0, 256, (1, *SHAPE)).astype(np.uint8)
    return Cutout(BoundingBox((0, 0, 0), SHAPE), image, labels, valid)


def objects():
    return np.random.default_rng(2).integers(0, 3, (1, *SHAPE)).astype(np.uint64)


def test_images_are_normalised_as_a_job_does():
    made = cutout(objects())
    for normalize, expected in [
        ("unit", made.image / np.float32(255)),
        (Affine(scale=0.5, offset=-1.0), made.image * np.float32(0.5) - 1),
    ]:
        arrays = TrainingTransform(Affinities(), normalize)(made, np.random.default_rng(0))
        np.testing.assert_allclose(arrays["image"], expected, rtol=1e-6)
    assert made.image.dtype == np.uint8


@pytest.mark.parametrize("seed", range(6))
def test_stored_affinities_are_augmented_as_their_labels(seed):
    of_labels = Affinities(offsets=OFFSETS)
    target = of_labels.compute(objects()[0], np.ones(SHAPE, bool))
    stored = cutout(target.values, target.known)
    channels = Stored(channels=[Channel(affinity=offset) for offset in OFFSETS])
    found, expected = (
        TrainingTransform(config, "unit", GEOMETRY)(made, np.random.default_rng(seed))
        for config, made in ((channels, stored), (of_labels, cutout(objects())))
    )
    np.testing.assert_array_equal(found["image"], expected["image"])
    known = found["known"] & expected["known"]
    assert known[:3].sum() == expected["known"][:3].sum()
    np.testing.assert_array_equal(found["target"][known], expected["target"][known])


def test_labels_of_other_channels_are_refused():
    with pytest.raises(ConfigError, match="the labels have 2 channels"):
        TrainingTransform(Affinities())(
            cutout(np.zeros((2, *SHAPE), np.uint64)), np.random.default_rng(0)
        )


def test_stored_values_are_refused_by_volume_and_box():
    values = np.zeros((1, *SHAPE), np.float32)
    values[0, 1, 2, 3] = 7
    made = replace(cutout(values), labels_url="file:///labels")
    transform = TrainingTransform(Stored(channels=[Channel()]))
    message = r"file:///labels cannot be learnt: in \[0, 0, 0 to 4, 8, 8\) values lie from 0 to 7"
    with pytest.raises(VolumeError, match=message):
        transform(made, np.random.default_rng(0))


def test_nan_counts_nothing_where_the_mask_says_so():
    values = np.full((1, *SHAPE), 0.5, np.float32)
    values[0, 1] = np.nan
    transform = TrainingTransform(Stored(channels=[Channel()]), "unit", GEOMETRY)
    arrays = transform(cutout(values, ~np.isnan(values)), np.random.default_rng(0))
    assert arrays["known"].sum() == 3 * 64
    assert (arrays["target"][arrays["known"]] == 0.5).all()
    assert np.isfinite(arrays["target"]).all()


@pytest.mark.parametrize("target", [Affinities(), Classes(count=2), Boundaries()], ids=str)
def test_labels_of_floats_are_refused_unless_they_are_values(target):
    made = replace(cutout(np.full((1, *SHAPE), 0.7, np.float32)), labels_url="file:///labels")
    with pytest.raises(ConfigError, match="file:///labels hold float32; .* made of integers"):
        TrainingTransform(target)(made, np.random.default_rng(0))
    TrainingTransform(target)(cutout(np.ones((1, *SHAPE), bool)), np.random.default_rng(0))
