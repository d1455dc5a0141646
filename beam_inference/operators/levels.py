"""The levels of a volume, as a whole and by section along z, and the normalisation made of them.

Levels are quantiles, means and standard deviations of the values. They do not depend on how the
volume is cut, so what is made of them has no seams. How they are counted is in
:mod:`beam_inference.operators.level_counts`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import LEAST_NUMBER, Frozen, Point, SafeText, describe_fault
from beam_inference.config.normalize import (
    Affine,
    Contrast,
    Sections,
    Standard,
)
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.operators.distributions import (
    QUANTILES,
    ArrayValues,
    Deviation,
    StoredFloat,
    StoredInteger,
    ValueLevels,
    describe_values,
)
from beam_inference.volumes.kvstores import read_file
from beam_inference.volumes.volume import Volume

logger = logging.getLogger(__name__)


class NonzeroLevels(Frozen):
    """Levels of the voxels in the bounding box of all that are not zero in every channel.

    Attributes:
        start, stop: of the box, ZYX.
        channels: levels of each channel there.
    """

    start: Point
    stop: Point
    channels: list[ValueLevels]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(a >= b for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError("the box of what is not zero has no voxels")
        return self

    @property
    def box(self) -> BoundingBox:
        """The box."""
        return BoundingBox(self.start, self.stop)


class ObjectLevels(Frozen):
    """Levels of the voxels inside the object; see :mod:`beam_inference.volumes.holes`.

    Attributes:
        channels: levels of each channel there.
        holes_sha256: hash of the index of the holes; None if the object has none.
    """

    channels: list[ValueLevels]
    holes_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None


class Levels(Frozen):
    """Levels of a volume, as :class:`beam_inference.operators.level_counts.WriteLevels` has them.

    Attributes:
        input: URL of the volume.
        dtype: name of its dtype.
        start: number of the first section.
        quantiles: the quantiles, ascending.
        volume: the values at them: the smallest stored value that at least such a share of all
            voxels does not exceed.
        sections: such values of each section, from ``start`` on; None of a volume of floats.
        mean, std: of all voxels.
        section_moments: mean and std of each section; files of earlier versions do not have them.
        channels: levels of each channel; files of earlier versions do not have them.
        nonzero: levels of what is not background; None where all voxels are zero.
        object: levels of the inside of the object, if that was looked for; None where all voxels
            are zero.
        without_zeros: levels of what is not zero in each channel, whatever the others are; None for
            one that is zero throughout. Files of earlier versions do not have them.
        mask: URL of the volume that says which voxels were counted; None if all were.
    """

    input: str
    dtype: str
    start: int
    quantiles: list[float]
    volume: list[StoredInteger | StoredFloat]
    sections: list[list[StoredInteger | StoredFloat]] | None
    mean: StoredFloat
    std: Deviation
    section_moments: list[tuple[StoredFloat, Deviation]] | None = None
    channels: list[ValueLevels] | None = None
    nonzero: NonzeroLevels | None = None
    object: ObjectLevels | None = None
    without_zeros: list[ValueLevels | None] | None = None
    mask: SafeText | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts: list[Sequence[ValueLevels | None]] = [
            each.channels for each in (self.nonzero, self.object) if each is not None
        ]
        parts += [] if self.without_zeros is None else [self.without_zeros]
        channels = [level for each in (self.channels or [], *parts) for level in each if level]
        lengths = {len(self.volume), *map(len, self.sections or [])}
        if lengths | {len(each.values) for each in channels} != {len(self.quantiles)}:
            raise ValueError("it does not hold a value for each quantile")
        rows: list[Sequence[float]] = [self.volume, *(self.sections or [])]
        if any(list(each) != sorted(each) for each in rows):
            raise ValueError("its values at quantiles do not ascend")
        if self.object is not None and self.nonzero is None:
            raise ValueError("it holds levels of an object, and of nothing that is not zero")
        if any(len(each) != len(self.channels or []) for each in parts):
            raise ValueError("it does not hold levels of each channel in the box, or the object")
        depths = {len(each) for each in (self.sections, self.section_moments) if each is not None}
        if len(depths) != 1:
            raise ValueError("it does not hold mean and std of each section")
        return self

    def channels_of(
        self, of: Literal["volume", "nonzero_box", "object", "nonzero"]
    ) -> list[ValueLevels]:
        """Levels of each channel in a part of the volume.

        Raises:
            LookupError: the file does not hold these; the message is a clause that says why.
        """
        if self.channels is None:
            raise LookupError(
                "it was made by an earlier version, without levels of each channel: make it again "
                "(beam-inference levels INPUT --to FILE --overwrite)"
            )
        if of == "volume":
            return self.channels
        if of == "nonzero":
            return self._channels_without_zeros()
        if self.mask is not None:
            raise LookupError(
                f"it was counted within a mask, {self.mask}, and knows no {of}: write of: volume, "
                "which is all that the mask keeps"
            )
        if self.nonzero is None:
            raise LookupError(f"{self.input} is zero throughout: there is no {of}")
        if of == "nonzero_box":
            return self.nonzero.channels
        if self.object is None:
            raise LookupError(
                "it was made without looking for the object: make it again (beam-inference levels "
                "INPUT --object --to FILE --overwrite)"
            )
        return self.object.channels

    def _channels_without_zeros(self) -> list[ValueLevels]:
        if self.without_zeros is None:
            raise LookupError(
                "it was made by an earlier version, without levels of what is not zero in each "
                "channel: make it again (beam-inference levels INPUT --to FILE --overwrite)"
            )
        there = [each for each in self.without_zeros if each is not None]
        if len(there) < len(self.without_zeros):
            raise LookupError(f"a channel of {self.input} is zero throughout: it has no nonzero")
        return there

    @property
    def section_count(self) -> int:
        """Number of sections."""
        return len(self.section_moments or self.sections or [])


def load_levels(url: str, storage: Storage, key: str = "model.normalize.levels") -> Levels:
    """Read a file of levels; ``key`` of the job file names it in messages.

    Raises:
        ConfigError: it is absent, or was not made by ``beam-inference levels``.
    """
    try:
        return Levels.model_validate_json(read_file(url, storage))
    except VolumeError as error:
        raise ConfigError(
            f"{key}: {error}. Make it with: beam-inference levels INPUT --to FILE"
        ) from None
    except ValidationError as error:
        raise ConfigError(
            f"{key}: {url} is not a file that beam-inference levels has written: "
            f"{describe_fault(error)}"
        ) from None


def normalization_from_levels(wanted: Contrast | Standard, levels: Levels) -> Affine | Sections:
    """Make a normalisation of a volume's levels.

    Raises:
        ConfigError: the levels do not hold what is wanted, or are one value only.
    """
    return _contrast(wanted, levels) if isinstance(wanted, Contrast) else _standard(wanted, levels)


def levels_of_volume(volume: Volume, url: str, storage: Storage) -> Levels:
    """Read a volume's levels; warn where they are of a volume elsewhere.

    Raises:
        ConfigError: the file is absent, is no file of levels, or is of another volume.
    """
    levels = load_levels(url, storage)
    first = levels.start
    last = levels.start + levels.section_count
    z = (volume.bounds.start[0], volume.bounds.stop[0])
    if levels.dtype != volume.dtype.name or z[0] < first or last < z[1]:
        raise ConfigError(
            f"model.normalize.levels: {url} was made of {levels.input}, {levels.dtype} "
            f"with the sections {first} … {last - 1}; the input is {volume.dtype.name} with the "
            f"sections {z[0]} … {z[1] - 1}"
        )
    if levels.input not in (volume.url, ""):
        logger.warning("%s was made of %s, the input is %s", url, levels.input, volume.url)
    return levels


def levels_of_array(array: AnyArray) -> Levels:
    """The levels of an array in memory.

    Args:
        array: finite numbers (C, Z, Y, X).
    """
    sections = [np.asarray(array[:, z], np.float64) for z in range(array.shape[1])]
    whole = describe_values(ArrayValues(array))
    return Levels(
        input="",
        dtype=array.dtype.name,
        start=0,
        quantiles=list(QUANTILES),
        volume=whole.values,
        sections=[describe_values(ArrayValues(array[:, z])).values for z in range(array.shape[1])],
        mean=whole.mean,
        std=whole.std,
        section_moments=[(float(each.mean()), float(each.std())) for each in sections],
        channels=[describe_values(ArrayValues(channel)) for channel in array],
    )


def _contrast(wanted: Contrast, levels: Levels) -> Affine | Sections:
    if not {wanted.low, wanted.high} <= set(levels.quantiles) or wanted.low >= wanted.high:
        raise ConfigError(
            f"model.normalize: low {wanted.low:g} and high {wanted.high:g} must be two of the "
            f"quantiles that {wanted.levels} holds, low < high: "
            f"{', '.join(f'{quantile:g}' for quantile in levels.quantiles)}"
        )
    low, high = (levels.quantiles.index(quantile) for quantile in (wanted.low, wanted.high))
    if wanted.by == "section":  # a section of one value is 0 throughout
        if levels.sections is None:
            raise ConfigError(
                f"model.normalize: {wanted.levels} holds no quantiles of each section, because "
                f"{levels.dtype} values are counted as a whole: write by: volume, or to: standard"
            )
        pairs = [(float(of[low]), float(max(of[high], of[low] + 1))) for of in levels.sections]
        return Sections(start=levels.start, levels=pairs)
    span = levels.volume[high] - levels.volume[low]
    if span < LEAST_NUMBER:
        raise ConfigError(
            f"model.normalize: {levels.input} has one value at both quantiles, {levels.volume[low]}"
        )
    return Affine(scale=1 / span, offset=-levels.volume[low] / span, clip=(0.0, 1.0))


def _standard(wanted: Standard, levels: Levels) -> Affine | Sections:
    if wanted.by == "section":
        if levels.section_moments is None:
            raise ConfigError(
                f"model.normalize: {wanted.levels} was made by an earlier version, without mean "
                "and standard deviation of each section. Make it again: beam-inference levels "
                "INPUT --to FILE --overwrite"
            )
        pairs = [(mean, mean + std) for mean, std in levels.section_moments]
        return Sections(start=levels.start, levels=pairs, clip=wanted.clip)
    if levels.std < LEAST_NUMBER:
        raise ConfigError(
            f"model.normalize: {levels.input} has one value throughout, {levels.mean:g}"
        )
    return Affine(scale=1 / levels.std, offset=-levels.mean / levels.std, clip=wanted.clip)


def by_section(
    array: AnyArray, numbers: NDArray[np.int64], sections: Sections
) -> NDArray[np.float32]:
    """Normalise each section by its own levels.

    Args:
        array: stored values (C, Z, Y, X).
        numbers: number of each section in the volume.
        sections: levels of all sections.

    Returns:
        Normalised values (C, Z, Y, X), clipped.
    """
    pairs = np.asarray(sections.levels, np.float64)[numbers - sections.start]
    zero, unit = (values.astype(np.float32) for values in (pairs[:, 0], pairs[:, 1] - pairs[:, 0]))
    result = array.astype(np.float32)
    result -= zero.reshape(1, -1, 1, 1)
    result /= np.where(unit, unit, 1).reshape(1, -1, 1, 1)
    result[:, unit == 0] = 0  # what lies outside the volume, too
    return result if sections.clip is None else np.clip(result, *sections.clip, out=result)
