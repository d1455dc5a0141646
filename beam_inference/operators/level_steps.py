"""Steps of a normalisation whose numbers are made of a volume's levels.

Each step takes the values as they are after the steps before. Quantiles go through every step that
keeps the order of values. Mean and standard deviation go through scale and offset, and through a
clip to quantiles of the same levels, for which a levels file holds sums up to each quantile. Those
of each section go through the same steps, and through those by section before them; after such a
step, those of the volume are not known any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from typing import Literal

from beam_inference.arrays import AnyArray
from beam_inference.config.definite import DefiniteNormalize
from beam_inference.config.fields import LEAST_NUMBER
from beam_inference.config.normalize import (
    AffineStep,
    ClipStep,
    Contrast,
    DefiniteStep,
    Holes,
    InsideMoments,
    InsideStandardStep,
    LevelsStandardStep,
    LevelsStep,
    Moments,
    MomentsFromLevels,
    Normalize,
    PatchStandardStep,
    QuantileClipStep,
    QuantileRange,
    Quantiles,
    RescaleStep,
    SectionClipStep,
    SectionLimits,
    SectionMoments,
    SectionStandardStep,
    Standard,
    StandardStep,
    Statistics,
    Step,
    holes_of,
    statistics_of,
)
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError
from beam_inference.operators.distributions import ValueLevels
from beam_inference.operators.levels import (
    Levels,
    levels_of_array,
    levels_of_volume,
    load_levels,
    normalization_from_levels,
)
from beam_inference.operators.section_values import SectionPairs, SectionValues
from beam_inference.volumes.holes import holes_url
from beam_inference.volumes.input_volume import common_dtype
from beam_inference.volumes.volume import Volume


def definite_normalization(
    wanted: Normalize, volumes: Sequence[Volume], storage: Storage
) -> DefiniteNormalize:
    """Make a normalisation of numbers of one that may name levels files.

    Args:
        wanted: the normalisation.
        volumes: those whose channels, one after another, it is for. A levels file is of one, or of
            all together.
        storage: how levels files are reached.

    Raises:
        ConfigError: levels are of another volume, do not hold what is wanted, or are one value
            only.
    """
    if isinstance(wanted, Contrast | Standard):
        levels = levels_of_volume(volumes[0], wanted.levels, storage)
        return normalization_from_levels(wanted, levels)
    if isinstance(wanted, tuple):
        load = cache(lambda url, number: _levels_of_channels(volumes, number, url, storage))
        _check_levels_of_one(wanted, [volume.channels for volume in volumes], load)
        channels = [
            _Channel(first + channel, partial(load, number=number), channel, count)
            for number, (first, count) in enumerate(_ranges(volumes))
            for channel in range(count)
        ]
        return _definite_steps(wanted, channels)
    return wanted


def _ranges(volumes: Sequence[Volume]) -> list[tuple[int, int]]:
    """Number of the first channel of each volume among those of all, and of its channels."""
    stops = list(accumulate(volume.channels for volume in volumes))
    return [
        (stop - volume.channels, volume.channels)
        for stop, volume in zip(stops, volumes, strict=True)
    ]


def _check_levels_of_one(
    steps: Sequence[Step], counts: Sequence[int], load: Callable[[str, int], Levels]
) -> None:
    """Refuse steps that take the levels of one volume for channels of several."""
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    for number, step in enumerate(steps):
        channels = range(len(owners)) if step.channels is None else step.channels
        taken = statistics_of(step)
        if taken is None or len(counts) == 1:
            continue
        is_of_object = taken.of == "object"
        if not is_of_object and len({owners[channel] for channel in channels}) == 1:
            continue
        if len(load(taken.levels, owners[channels[0]]).channels or []) != len(owners):
            if is_of_object:
                raise ConfigError(
                    f"model.normalize.{number}: {taken.levels} is of one volume, and the object is "
                    "what input and inputs show together: count all volumes together "
                    "(beam-inference levels VOLUME VOLUME … --object)."
                )
            raise ConfigError(
                f"model.normalize.{number}: {taken.levels} is of one volume, and this step is for "
                "channels of several: write a step for each, with its channels and its levels, or "
                "count all volumes together (beam-inference levels VOLUME VOLUME …). The channels "
                f"of input and inputs are {_channels_text(counts)}."
            )


def _channels_text(counts: Sequence[int]) -> str:
    stops = list(accumulate(counts))
    return "; ".join(
        ", ".join(map(str, range(stop - count, stop)))
        for stop, count in zip(stops, counts, strict=True)
    )


def normalization_of_array(wanted: Normalize, array: AnyArray) -> DefiniteNormalize:
    """Make a normalisation of numbers, of an array's own levels where it names levels files.

    Args:
        wanted: the normalisation.
        array: finite numbers (C, Z, Y, X).

    Raises:
        ConfigError: the array is one value only.
    """
    if isinstance(wanted, Contrast | Standard):
        return normalization_from_levels(wanted, levels_of_array(array))
    if isinstance(wanted, tuple):
        load = cache(lambda _: levels_of_array(array))
        return definite_steps(wanted, len(array), load)
    return wanted


def _levels_of_channels(
    volumes: Sequence[Volume], number: int, url: str, storage: Storage
) -> Levels:
    """The levels of a volume, or of all together."""
    if len(volumes) > 1:
        levels = load_levels(url, storage)
        if len(levels.channels or []) == sum(volume.channels for volume in volumes):
            dtype = common_dtype([volume.dtype for volume in volumes])
            return levels_of_volume(replace(volumes[0], dtype=dtype), url, storage)
    volume = volumes[number]
    levels = levels_of_volume(volume, url, storage)
    count = len(levels.channels or [])
    if count not in (0, volume.channels):
        raise ConfigError(
            f"model.normalize: {url} holds levels of {count} channels, and the input has "
            f"{volume.channels}: make it again with the same channels (--channel)"
        )
    return levels


def definite_steps(
    steps: Sequence[Step], channels: int, load: Callable[[str], Levels]
) -> tuple[DefiniteStep, ...]:
    """Make steps of numbers of those that name levels files.

    Args:
        steps: in their order.
        channels: channels of the volume.
        load: reads a levels file.

    Raises:
        ConfigError: a file does not hold what a step wants, or steps before it make it unknown.
    """
    every = [_Channel(number, load, number, channels) for number in range(channels)]
    return _definite_steps(steps, every)


def _definite_steps(steps: Sequence[Step], every: Sequence[_Channel]) -> tuple[DefiniteStep, ...]:
    made = []
    for number, step in enumerate(steps):
        key = f"model.normalize.{number}"
        chosen = every if step.channels is None else [every[each] for each in step.channels]
        made.append(_definite(key, step, chosen))
    try:
        holes_of(tuple(made))
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None
    return tuple(made)


def _definite(key: str, step: Step, channels: Sequence[_Channel]) -> DefiniteStep:
    """Take a step on each of some channels, and return it as numbers."""
    match step:
        case QuantileClipStep() if step.clip.by == "section":
            found = _of_all(key, [each.clip_sections(key, step.clip) for each in channels])
            return SectionClipStep(
                clip=SectionLimits(start=found.start, limits=found.pairs), channels=step.channels
            )
        case RescaleStep(rescale=wanted) | LevelsStandardStep(standard=wanted) if (
            wanted.by == "section"
        ):
            found = _of_all(key, [each.standardise_sections(key, wanted) for each in channels])
            mean, std = (list(each) for each in zip(*found.pairs, strict=True))
            return SectionStandardStep(
                standard=SectionMoments(start=found.start, mean=mean, std=std),
                channels=step.channels,
            )
        case QuantileClipStep():
            pairs = [each.clip_to_quantiles(key, step.clip) for each in channels]
            return ClipStep(clip=pairs, channels=step.channels)
        case RescaleStep() | LevelsStandardStep():
            wanted = step.rescale if isinstance(step, RescaleStep) else step.standard
            moments = [each.standardise(key, wanted) for each in channels]
            mean = [zero for zero, _ in moments]
            std = [divisor for _, divisor in moments]
            if wanted.changed_alone is None:
                return StandardStep(standard=Moments(mean=mean, std=std), channels=step.channels)
            levels = channels[0].load(wanted.levels)
            holes = _holes(wanted.levels, levels) if wanted.of == "object" else None
            return InsideStandardStep(
                standard=InsideMoments(mean=mean, std=std, of=wanted.changed_alone, holes=holes),
                channels=step.channels,
            )
    for position, channel in enumerate(channels):
        channel.take(key, step, position)
    return step


def _of_all(key: str, found: Sequence[SectionPairs]) -> SectionPairs:
    """The numbers of some channels, if they are the same: levels by section are of all together."""
    if any(each != found[0] for each in found):
        raise ConfigError(
            f"{key}: levels by section are of all channels together, and the steps before it have "
            "changed channels in different ways: write it before them"
        )
    return found[0]


def _holes(url: str, levels: Levels) -> Holes | None:
    """The holes of the object that a levels file tells of."""
    sha256 = None if levels.object is None else levels.object.holes_sha256
    return None if sha256 is None else Holes(path=holes_url(url), sha256=sha256)


@dataclass(frozen=True)
class _Clipped:
    """Clips to quantiles so far.

    Attributes:
        url: the levels that they are of.
        of: the part of the volume that these are of.
        low: position of the lower quantile.
        high: position of the upper quantile.
    """

    url: str
    of: str
    low: int
    high: int


@dataclass
class _Channel:
    """What the steps so far make of the values of a channel.

    Attributes:
        number: its number among those that the network takes.
        load: reads a levels file.
        place: its number in its volume.
        count: number of channels of that volume.
        maps: what each step makes of a value.
        scale: of all steps so far together, but for clips.
        offset: is added then.
        clipped: the clips to quantiles.
        outside: what becomes of a zero outside of the object.
        inside: the voxels that a step has changed alone; None if none has.
        is_scaled_alone: whether the steps so far have kept which values are zero.
        moments_unknown: why mean and standard deviation are not known any more.
        unknown: why quantiles are not, either.
        sections: the same of each section.
    """

    number: int
    load: Callable[[str], Levels]
    place: int
    count: int
    maps: list[Callable[[float], float]] = field(default_factory=list)
    scale: float = 1.0
    offset: float = 0.0
    clipped: _Clipped | None = None
    outside: float = 0.0
    inside: Literal["object", "nonzero"] | None = None
    is_scaled_alone: bool = True
    moments_unknown: str | None = None
    unknown: str | None = None
    sections: SectionValues = field(default_factory=SectionValues)

    def take(self, key: str, step: DefiniteStep | LevelsStep, position: int) -> None:
        """Note a step of numbers, or of each patch; the channel has a position in its lists."""
        match step:
            case StandardStep() | InsideStandardStep():
                std = _at(step.standard.std, position)
                offset = -_at(step.standard.mean, position) / std
                if isinstance(step, InsideStandardStep):
                    self._multiply_inside(key, step.standard.of, 1 / std, offset)
                else:
                    self._multiply(1 / std, offset)
            case AffineStep():
                self._multiply(_at(step.scale, position), _at(step.offset, position))
            case ClipStep():
                pair = step.clip[position] if isinstance(step.clip, list) else step.clip
                self._clip(pair)
                self.moments_unknown = "a clip to fixed numbers changes both"
            case PatchStandardStep():
                self._lose("a step before it depends on each patch")
                self.sections.lose("a step before it depends on each patch")
            case SectionStandardStep() | SectionClipStep():
                self._lose("a step before it is by section")
                self.sections.lose("a step before it names numbers of sections")

    def _lose(self, why: str) -> None:
        """Note a step after which the levels of the volume are not known."""
        self.is_scaled_alone = False
        self.unknown = self.unknown or why
        self.moments_unknown = self.moments_unknown or why

    def clip_sections(self, key: str, wanted: Quantiles) -> SectionPairs:
        """Clip each section to two of its quantiles; the values there."""
        levels = self.load(wanted.levels)
        places = _positions(key, wanted, levels)
        found = self.sections.clip_to_quantiles(key, wanted, levels, places)
        self._lose("a step before it is by section")
        return found

    def standardise_sections(
        self, key: str, wanted: QuantileRange | MomentsFromLevels
    ) -> SectionPairs:
        """Subtract a number in each section, and divide by another one; both of them."""
        levels = self.load(wanted.levels)
        if isinstance(wanted, QuantileRange):
            places = _positions(key, wanted, levels)
            found = self.sections.rescale(key, wanted, levels, places)
        else:
            found = self.sections.standardise(key, wanted, levels)
        self._lose("a step before it is by section")
        return found

    def _multiply_inside(
        self, key: str, of: Literal["object", "nonzero"], scale: float, offset: float
    ) -> None:
        """Note a step of some voxels alone, for which all others must be zero."""
        if of == "nonzero" and not self.is_scaled_alone:
            raise ConfigError(
                f"{key}: of: nonzero changes what is stored as another value than zero, and steps "
                f"before it change which values of channel {self.number} are zero. Write it before "
                "them."
            )
        if self.outside:
            raise ConfigError(
                f"{key}: of: object changes the inside of the object alone, where all is zero "
                f"outside, and the steps before it make {self.outside:g} of the zeros there in "
                f"channel {self.number}. Write it before them."
            )
        self._multiply(scale, offset)
        self.sections.lose("a step before it has changed some voxels alone")
        self.outside = 0.0
        self.inside = of
        self.is_scaled_alone = False

    def _multiply(self, scale: float, offset: float) -> None:
        self.is_scaled_alone = self.is_scaled_alone and not offset
        self.maps.append(lambda value: value * scale + offset)
        self.sections.multiply(scale, offset)
        self.outside = self.outside * scale + offset
        self.scale *= scale
        self.offset = self.offset * scale + offset
        if scale < 0:
            self.unknown = self.unknown or "a scale before it is negative"

    def _clip(self, limits: tuple[float, float]) -> None:
        low, high = limits
        self.is_scaled_alone = False
        self.maps.append(lambda value: min(max(value, low), high))
        self.sections.clip(low, high)
        self.outside = min(max(self.outside, low), high)

    def clip_to_quantiles(self, key: str, wanted: Quantiles) -> tuple[float, float]:
        """Clip to two quantiles; the values there."""
        limits = self._quantiles(key, wanted)
        if not limits[0] < limits[1]:
            raise ConfigError(
                f"{key}: channel {self.number} has one value at both quantiles, {wanted.low:g} and "
                f"{wanted.high:g}. Choose others."
            )
        low, high = _positions(key, wanted, self.load(wanted.levels))
        before = self.clipped or _Clipped(wanted.levels, wanted.of, low, high)
        if (before.url, before.of) != (wanted.levels, wanted.of):
            self.moments_unknown = "clips before it are to quantiles of other levels"
        self.clipped = _Clipped(before.url, before.of, max(low, before.low), min(high, before.high))
        self._clip(limits)
        return limits

    def standardise(
        self, key: str, wanted: QuantileRange | MomentsFromLevels
    ) -> tuple[float, float]:
        """Subtract a number, and divide by another one; both of them."""
        if isinstance(wanted, QuantileRange):
            zero, one = self._quantiles(key, wanted)
            divisor = wanted.divisor(one - zero)
        else:
            zero, std = self._moments(key, wanted)
            divisor = wanted.divisor(std)
        if not (math.isfinite(zero) and math.isfinite(divisor)):
            raise ConfigError(
                f"{key}: channel {self.number} has values that are too large to be normalised by"
            )
        if divisor < LEAST_NUMBER:
            raise ConfigError(
                f"{key}: would divide by {divisor:g}, because channel {self.number} has one value "
                "there. Write eps or floor."
            )
        if wanted.changed_alone is not None:
            self._multiply_inside(key, wanted.changed_alone, 1 / divisor, -zero / divisor)
        else:
            self._multiply(1 / divisor, -zero / divisor)
        return zero, divisor

    def _quantiles(self, key: str, wanted: Quantiles) -> tuple[float, float]:
        """The values at two quantiles, after the steps so far."""
        if self.unknown is not None:
            raise ConfigError(f"{key}: its quantiles are not known, because {self.unknown}")
        low, high = _positions(key, wanted, self.load(wanted.levels))
        if self.inside not in (None, wanted.of):
            return self._extremes(key, wanted)
        values = self._levels(key, wanted).values
        return self._after_steps(values[low]), self._after_steps(values[high])

    def _extremes(self, key: str, wanted: Quantiles) -> tuple[float, float]:
        """Least and greatest value, where a step before has changed some voxels alone."""
        if (wanted.low, wanted.high) != (0.0, 1.0):
            raise ConfigError(
                f"{key}: a step before it has changed some voxels alone (of: {self.inside}), so "
                f"that of {wanted.of} only the least and the greatest value are known (low: 0, "
                f"high: 1): write these, or of: {self.inside}"
            )
        every = self._levels(key, wanted)
        inside = self._levels(key, wanted.model_copy(update={"of": self.inside}))
        found = [self._after_steps(each) for each in (inside.values[0], inside.values[-1])]
        if every.number > inside.number:
            found.append(self.outside)
        return min(found), max(found)

    def _after_steps(self, value: float) -> float:
        for each in self.maps:
            value = each(value)
        return value

    def _moments(self, key: str, wanted: MomentsFromLevels) -> tuple[float, float]:
        """Mean and standard deviation after the steps so far."""
        clipped = self.clipped
        unknown = self.moments_unknown
        if self.inside not in (None, wanted.of):
            unknown = unknown or f"a step before it has changed some voxels alone ({self.inside})"
        if clipped is not None and (clipped.url, clipped.of) != (wanted.levels, wanted.of):
            unknown = unknown or "the values were clipped to quantiles of other levels"
        if unknown is not None:
            raise ConfigError(
                f"{key}: mean and standard deviation are not known here, because {unknown}. Clip "
                "to quantiles of the same levels, or write mean and std as numbers."
            )
        levels = self._levels(key, wanted)
        mean = levels.mean
        std = levels.std
        if clipped is not None:
            try:
                mean, std = levels.clipped_moments(clipped.low, clipped.high)
            except (OverflowError, ValueError):
                raise ConfigError(
                    f"{key}: {wanted.levels} holds sums that are too large for mean and standard "
                    f"deviation of channel {self.number}"
                ) from None
        std *= math.sqrt(levels.number / max(1, levels.number - wanted.ddof))
        return mean * self.scale + self.offset, std * abs(self.scale)

    def _levels(self, key: str, wanted: Statistics) -> ValueLevels:
        try:
            channels = self.load(wanted.levels).channels_of(wanted.of)
        except LookupError as error:
            raise ConfigError(f"{key}: {wanted.levels}: {error}") from None
        return channels[self.place if len(channels) == self.count else self.number]


def _at(numbers: float | list[float], position: int) -> float:
    return numbers[position] if isinstance(numbers, list) else numbers


def _positions(key: str, wanted: Quantiles, levels: Levels) -> tuple[int, int]:
    """Positions of two quantiles among those of levels."""
    if not {wanted.low, wanted.high} <= set(levels.quantiles) or wanted.low >= wanted.high:
        raise ConfigError(
            f"{key}: low {wanted.low:g} and high {wanted.high:g} must be two of the quantiles that "
            f"{wanted.levels} holds, low < high: "
            f"{', '.join(f'{quantile:g}' for quantile in levels.quantiles)}"
        )
    return levels.quantiles.index(wanted.low), levels.quantiles.index(wanted.high)
