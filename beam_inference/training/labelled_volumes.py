"""Volumes with labels: what a sample is cut from, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.volumes import Mask as MaskConfig
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import TransientReadError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, is_same_size
from beam_inference.training.split import Split, Subset
from beam_inference.volumes.backoff import retry_with_backoff
from beam_inference.volumes.kvstores import url_of
from beam_inference.volumes.mask import Mask, open_mask
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.volume import Volume

_CANDIDATES = 64
"""Boxes that are drawn at a time until one is of the set."""
_MOST_DRAWS = 256
_READ_ATTEMPTS = 5


@dataclass(frozen=True)
class LabelledVolume:
    """A volume and its labels, on one grid of voxels.

    Attributes:
        image: what the network reads: a path, a URL or more than that.
        labels: what is known of it, likewise.
        mask: where labels count; everywhere if None. Its own voxels may be of another size.
        name: what the split hashes beside a block's start. Volumes of one place need one name,
            the empty one being as good as any; volumes of several places are split alike unless
            they have names of their own.
        weight: how often boxes come from here, for each place where one fits, compared with other
            volumes.
        within: box in which labels count; everywhere if None.
        without: boxes in which they do not.
    """

    image: str | VolumeSource
    labels: str | VolumeSource
    mask: MaskConfig | None = None
    name: str = ""
    weight: float = 1.0
    within: BoundingBox | None = None
    without: tuple[BoundingBox, ...] = ()


@dataclass(frozen=True)
class Cutout:
    """Voxels of a labelled volume.

    Attributes:
        box: the patch.
        image: stored values (channels, Z, Y, X) of the patch grown by the crop margin.
        labels: stored values (channels, Z, Y, X) of the patch.
        valid: where labels count, of the patch (1, Z, Y, X).
        labels_url: where the labels are from, for messages.
    """

    box: BoundingBox
    image: AnyArray
    labels: AnyArray
    valid: NDArray[np.bool_]
    labels_url: str = ""


@dataclass(frozen=True)
class OpenLabelledVolume:
    """A labelled volume that is open for reading.

    Attributes:
        image: what the network reads.
        labels: what is known of it.
        mask: where labels count; everywhere if None.
        name: as of :class:`LabelledVolume`.
        weight: as of :class:`LabelledVolume`.
        within: as of :class:`LabelledVolume`.
        without: as of :class:`LabelledVolume`.
        patch_shape: voxels of a patch, ZYX.
        crop_margin: voxels of the image around the patch, on each side, ZYX.
    """

    image: Volume
    labels: Volume
    mask: Mask | None
    name: str
    weight: float
    within: BoundingBox | None
    without: tuple[BoundingBox, ...]
    patch_shape: Zyx
    crop_margin: Zyx

    @property
    def starts(self) -> BoundingBox:
        """Where patches may start: with the crop margin they lie in image and labels."""
        inside = self.image.bounds.grow(zyx.negative(self.crop_margin))
        patches = inside.intersection(self.labels.bounds)
        return BoundingBox(
            patches.start,
            zyx.maximum(
                patches.start, zyx.add(zyx.subtract(patches.stop, self.patch_shape), (1, 1, 1))
            ),
        )

    @property
    def sample_bytes(self) -> int:
        """Bytes of the values of a sample, as they are stored."""
        patch = BoundingBox((0, 0, 0), self.patch_shape)
        image = patch.grow(self.crop_margin).size * self.image.channels * self.image.dtype.itemsize
        labels = patch.size * (self.labels.channels * self.labels.dtype.itemsize + 1)
        return image + labels

    def with_patch_shape(self, patch_shape: Zyx) -> OpenLabelledVolume:
        """The same volume, for patches of another shape.

        Raises:
            VolumeError: no patch of it fits.
        """
        other = replace(self, patch_shape=patch_shape)
        if other.starts.size == 0:
            raise VolumeError(
                f"no patch of {list(patch_shape)} voxels (z, y, x) with a crop margin of "
                f"{list(self.crop_margin)} lies in both {self.image.url}, {self.image.bounds}, and "
                f"its labels {self.labels.url}, {self.labels.bounds}. Make patches smaller, or "
                "move the labels (see beam-inference convert --offset)."
            )
        return other

    def draw_box(
        self, split: Split, subset: Subset, random: np.random.Generator
    ) -> BoundingBox | None:
        """A random patch of a set, each as likely as any other; None if there seems to be none.

        The image's voxels around a patch belong to the same set.
        """
        starts = self.starts
        read = BoundingBox((0, 0, 0), self.patch_shape).grow(self.crop_margin)
        for _ in range(_MOST_DRAWS):
            drawn = random.integers(starts.start, starts.stop, size=(_CANDIDATES, 3))
            found = split.contains_each(
                subset, drawn - self.crop_margin, read.shape, self.name
            ).nonzero()[0]
            if len(found):
                start = zyx.triple(int(each) for each in drawn[found[0]])
                return BoundingBox(start, zyx.add(start, self.patch_shape))
        return None

    def read_labels(self, box: BoundingBox) -> tuple[AnyArray, NDArray[np.bool_]]:
        """Labels of a patch (channels, Z, Y, X), and where they count (1, Z, Y, X)."""
        labels = _read_patiently(self.labels, box)
        valid = np.ones((1, *box.shape), np.uint8)
        if self.mask is not None:
            retry_with_backoff(_may_pass, attempts=_READ_ATTEMPTS)(self.mask.fill, valid, box)
        self._leave_out_boxes(valid, box)
        return labels, valid.astype(bool)

    def _leave_out_boxes(self, valid: NDArray[np.uint8], box: BoundingBox) -> None:
        """Set to zero where labels of a patch (1, Z, Y, X) do not count, for the boxes they are in.

        Args:
            valid: where they count by the mask; changed in place.
            box: the patch.
        """
        if self.within is not None:
            counts = np.zeros_like(valid)
            part = box.intersection(self.within)
            if part.size:
                z, y, x = part.slices_in(box)
                counts[:, z, y, x] = valid[:, z, y, x]
            valid[...] = counts
        for each in self.without:
            part = box.intersection(each)
            if part.size:
                z, y, x = part.slices_in(box)
                valid[:, z, y, x] = 0

    def read_image(self, box: BoundingBox) -> AnyArray:
        """Image of a patch grown by the crop margin (channels, Z, Y, X)."""
        return _read_patiently(self.image, box.grow(self.crop_margin))


def open_labelled_volume(
    volume: LabelledVolume, patch_shape: Zyx, crop_margin: Zyx, cache_bytes: int
) -> OpenLabelledVolume:
    """Open a volume and its labels.

    Args:
        volume: which ones.
        patch_shape: voxels of a patch, ZYX.
        crop_margin: voxels of the image around a patch, on each side, ZYX.
        cache_bytes: decoded blocks that are kept, of all volumes together.

    Raises:
        VolumeError: one of them cannot be read, their voxels have two sizes, or no patch fits.
    """
    image_source = as_source(volume.image)
    image = open_source(image_source, cache_bytes=cache_bytes)
    labels = open_source(as_source(volume.labels), cache_bytes=cache_bytes, booleans=True)
    sizes = (image.voxel_size_nm, labels.voxel_size_nm)
    if sizes[0] is not None and sizes[1] is not None and not is_same_size(sizes[0], sizes[1]):
        raise VolumeError(
            f"the voxels of {image.url} are {list(sizes[0])} nm (z, y, x), those of its labels "
            f"{labels.url} {list(sizes[1])}; expected one size. Choose another scale of one of "
            "them, or make one with beam-inference resample."
        )
    mask = None
    if volume.mask is not None:
        if image.voxel_size_nm is None:
            raise VolumeError(
                f"{image.url} does not say its voxel size, so the position of its mask is unknown. "
                "Write the size into its metadata, or make a volume that says it with "
                "beam-inference convert --voxel-size."
            )
        config = volume.mask.model_copy(update={"path": as_url(volume.mask.path), "fill_value": 0})
        mask = open_mask(
            "mask", config, image.voxel_size_nm, image.origin.rest, image_source.storage
        )
    opened = OpenLabelledVolume(
        image,
        labels,
        mask,
        volume.name,
        volume.weight,
        volume.within,
        volume.without,
        patch_shape,
        crop_margin,
    )
    return opened.with_patch_shape(patch_shape)


def as_source(volume: str | VolumeSource) -> VolumeSource:
    """What to open: a path or URL as a whole volume, its finest scale."""
    return VolumeSource(as_url(volume)) if isinstance(volume, str) else volume


def as_url(path: str) -> str:
    """A URL as it is; a path as a URL."""
    return path if "://" in path or "|" in path else url_of(path)


def box_weight(
    labels: AnyArray, valid: NDArray[np.bool_], label_weights: Mapping[int, float] | None
) -> float:
    """The probability to take a box: the mean weight of its voxels, over the largest weight.

    Args:
        labels: of the box (channels, Z, Y, X); the first channel is looked at.
        valid: where labels count (1, Z, Y, X); elsewhere the weight is zero.
        label_weights: weights of voxels by label; others weigh 1. None if all do.
    """
    weights = valid[0].astype(np.float64)
    if label_weights is not None:
        for label, weight in label_weights.items():
            weights[valid[0] & (labels[0] == label)] = weight
        weights /= max(1.0, *label_weights.values())
    return float(weights.mean())


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, TransientReadError)


def _read_patiently(volume: Volume, box: BoundingBox) -> AnyArray:
    return retry_with_backoff(_may_pass, attempts=_READ_ATTEMPTS)(volume.read, box)
