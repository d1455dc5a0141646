"""Random changes of cutouts, by which a network learns what does not matter.

Each sample has a generator of its own, so an augmented sample is as determined as a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy import ndimage

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Model, Natural
from beam_inference.engines.augmented import symmetries
from beam_inference.geometry.zyx import Zyx
from beam_inference.training.labelled_volumes import Cutout
from beam_inference.training.symmetry import map_array, map_channels


class Elastic(Model):
    """A smooth deformation of image and labels."""

    probability: float = Field(0.5, ge=0, le=1, description="share of samples that are deformed")
    spacing: tuple[float, float, float] = Field(
        (4, 16, 16), description="voxels over which the shift changes, z, y, x"
    )
    amplitude: tuple[float, float, float] = Field(
        (0, 2, 2), description="standard deviation of the shift, in voxels, z, y, x"
    )


class Augmentation(Model):
    """What is changed at random. Intensities are those after normalisation."""

    flips: str = Field("zyx", pattern="^z?y?x?$", description="axes that are flipped")
    transpose: bool = Field(True, description="whether y and x are swapped")
    elastic: Elastic | None = Field(None, description="deforms image and labels")
    contrast: float = Field(
        0.1, ge=0, le=1, description="values are scaled by up to this, more or less"
    )
    brightness: float = Field(0.1, ge=0, description="up to this is added to values, or taken off")
    noise: float = Field(
        0.0, ge=0, description="greatest standard deviation of noise, which is drawn per sample"
    )
    blur: float = Field(
        0.0, ge=0, description="greatest sigma of a Gaussian blur within sections, in voxels"
    )
    blur_probability: float = Field(
        0.2, ge=0, le=1, description="share of samples that are blurred"
    )
    missing_sections: float = Field(
        0.0, ge=0, le=1, description="share of sections that are 0, after normalize: image only"
    )
    shifted_sections: float = Field(
        0.0, ge=0, le=1, description="share of sections that are out of place: image only"
    )
    shift: Natural = Field(4, description="by how many voxels at most, along y and x")

    def apply(
        self,
        cutout: Cutout,
        random: np.random.Generator,
        offsets: Sequence[Zyx | None] | None = None,
    ) -> Cutout:
        """Change a cutout.

        Args:
            cutout: its image is normalised, float32.
            random: what all changes are drawn from.
            offsets: of channels of labels that are affinities themselves, as for
                :func:`.symmetry.map_channels`; None for labels of objects or classes.

        Returns:
            Another one, of the same shape; its box is the old one's.
        """
        if self.elastic is not None and random.random() < self.elastic.probability:
            cutout = _deform(cutout, self.elastic, random)
        choices = symmetries(self.flips, transpose=self.transpose)
        symmetry = choices[int(random.integers(len(choices)))]
        if offsets is None:
            labels = map_array(cutout.labels, symmetry)
            valid = map_array(cutout.valid, symmetry)
        else:
            known = np.broadcast_to(cutout.valid, cutout.labels.shape)
            labels, valid = map_channels(cutout.labels, known, symmetry, offsets)
        image = self._change_image(map_array(cutout.image, symmetry).copy(), random)
        return replace(cutout, image=image, labels=labels, valid=valid)

    def _change_image(
        self, image: NDArray[np.float32], random: np.random.Generator
    ) -> NDArray[np.float32]:
        """Change intensities and sections of an image (channels, Z, Y, X), in place where it can.

        The same numbers are drawn whatever is turned off, so that a key changes what it names.
        """
        is_blurred = random.random() < self.blur_probability
        sigma = self.blur * random.random()
        scale = 1 + self.contrast * (2 * random.random() - 1)
        added = self.brightness * (2 * random.random() - 1)
        deviation = self.noise * random.random()
        shifted = random.random(image.shape[1]) < self.shifted_sections
        shifts = random.integers(-self.shift, self.shift + 1, size=(image.shape[1], 2))
        missing = random.random(image.shape[1]) < self.missing_sections
        for z in np.flatnonzero(shifted):
            image[:, z] = _shift(image[:, z], int(shifts[z, 0]), int(shifts[z, 1]))
        if is_blurred and sigma > 0:
            image = ndimage.gaussian_filter(image, (0, 0, sigma, sigma), mode="nearest")
        image *= np.float32(scale)
        image += np.float32(added)
        if deviation > 0:
            image += random.standard_normal(image.shape, np.float32) * np.float32(deviation)
        image[:, missing] = 0
        return image


def _shift(section: AnyArray, y: int, x: int) -> AnyArray:
    """A section (channels, Y, X) moved by some voxels; its edge is repeated."""
    rows = np.clip(np.arange(section.shape[1]) - y, 0, section.shape[1] - 1)
    columns = np.clip(np.arange(section.shape[2]) - x, 0, section.shape[2] - 1)
    return section[:, rows][:, :, columns]


def _deform(cutout: Cutout, elastic: Elastic, random: np.random.Generator) -> Cutout:
    """Deform image and labels by one field; labels from outside of the patch do not count."""
    shape = cutout.image.shape[1:]
    coarse = [max(2, 1 + round(n / each)) for n, each in zip(shape, elastic.spacing, strict=True)]
    shifts = random.standard_normal((3, *coarse)) * np.reshape(elastic.amplitude, (3, 1, 1, 1))
    zoomed = np.meshgrid(
        *(np.linspace(0, few - 1, n) for few, n in zip(coarse, shape, strict=True)),
        indexing="ij",
    )
    field = np.stack([ndimage.map_coordinates(each, zoomed, order=1) for each in shifts])
    places = np.indices(shape) + field
    margin = [(whole - n) // 2 for whole, n in zip(shape, cutout.labels.shape[1:], strict=True)]
    inside = tuple(slice(m, m + n) for m, n in zip(margin, cutout.labels.shape[1:], strict=True))
    label_places = places[(slice(None), *inside)] - np.reshape(margin, (3, 1, 1, 1))
    nearest = np.rint(label_places).astype(np.int64)
    clipped = [np.clip(nearest[k], 0, cutout.labels.shape[k + 1] - 1) for k in range(3)]
    is_inside = np.all([nearest[k] == clipped[k] for k in range(3)], axis=0)
    where = (slice(None), *clipped)
    image = np.stack(
        [
            ndimage.map_coordinates(channel, places, order=1, mode="nearest")
            for channel in cutout.image
        ]
    )
    return replace(
        cutout, image=image, labels=cutout.labels[where], valid=cutout.valid[where] & is_inside
    )
