"""What steps of a normalisation make of the levels of each section of a volume."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.fields import LEAST_NUMBER
from beam_inference.config.normalize import (
    MomentsFromLevels,
    QuantileRange,
    Quantiles,
)
from beam_inference.errors import ConfigError
from beam_inference.operators.levels import Levels

Numbers: TypeAlias = NDArray[np.float64]
"""A number of each section."""


@dataclass(frozen=True, slots=True)
class SectionPairs:
    """Two numbers of each section, from ``start`` on."""

    start: int
    pairs: list[tuple[float, float]]


@dataclass
class SectionValues:
    """What the steps so far make of values, in each section; levels are of all channels together.

    Attributes:
        maps: what each step makes of a value of each section.
        scale: of all steps so far together, but for clips.
        offset: is added then.
        moments_unknown: why mean and standard deviation are not known any more.
        unknown: why quantiles are not, either.
    """

    maps: list[Callable[[Numbers], Numbers]] = field(default_factory=list)
    scale: Numbers | float = 1.0
    offset: Numbers | float = 0.0
    moments_unknown: str | None = None
    unknown: str | None = None

    def multiply(self, scale: Numbers | float, offset: Numbers | float) -> None:
        """Note a step that multiplies, and adds then."""
        self.maps.append(lambda values: values * scale + offset)
        self.scale = self.scale * scale
        self.offset = self.offset * scale + offset
        if np.any(np.asarray(scale) < 0):
            self.lose("a scale before it is negative", with_moments=False)

    def clip(self, low: Numbers | float, high: Numbers | float) -> None:
        """Note a clip."""
        self.maps.append(lambda values: np.clip(values, low, high))
        self.moments_unknown = self.moments_unknown or "a clip before it changes both"

    def lose(self, why: str, *, with_moments: bool = True) -> None:
        """Note a step after which the levels of sections are not known."""
        self.unknown = self.unknown or why
        if with_moments:
            self.moments_unknown = self.moments_unknown or why

    def clip_to_quantiles(
        self, key: str, wanted: Quantiles, levels: Levels, positions: tuple[int, int]
    ) -> SectionPairs:
        """Clip each section to two of its quantiles; the values there.

        Args:
            key: of the step, for messages.
            wanted: the step.
            levels: that it names.
            positions: of the quantiles among those of the levels.

        Raises:
            ConfigError: they are not known.
        """
        low, high = self._quantiles(key, wanted, levels, positions)
        self.clip(low, high)
        return SectionPairs(levels.start, list(zip(low.tolist(), high.tolist(), strict=True)))

    def rescale(
        self, key: str, wanted: QuantileRange, levels: Levels, positions: tuple[int, int]
    ) -> SectionPairs:
        """Make 0 and 1 of two quantiles of each section; see :meth:`clip_to_quantiles`.

        Returns:
            What is subtracted, and what is divided by; the latter is 0 where a section has one
            value at both.
        """
        low, high = self._quantiles(key, wanted, levels, positions)
        return self._divide(key, wanted, levels.start, low, high - low)

    def standardise(self, key: str, wanted: MomentsFromLevels, levels: Levels) -> SectionPairs:
        """Make 0 of the mean of each section, and 1 of its standard deviation; see :meth:`rescale`.

        Raises:
            ConfigError: they are not known.
        """
        if self.moments_unknown is not None:
            raise ConfigError(
                f"{key}: mean and standard deviation of each section are not known here, because "
                f"{self.moments_unknown}"
            )
        if levels.section_moments is None:
            raise ConfigError(
                f"{key}: {wanted.levels} was made by an earlier version, without mean and std of "
                "each section: make it again (beam-inference levels INPUT --to FILE --overwrite)"
            )
        found = np.array(levels.section_moments, np.float64)
        std = found[:, 1] * abs(np.asarray(self.scale))
        if wanted.ddof:
            voxels = (
                sum(each.number for each in levels.channels_of("volume")) / levels.section_count
            )
            std *= math.sqrt(voxels / max(1, voxels - wanted.ddof))
        return self._divide(key, wanted, levels.start, found[:, 0] * self.scale + self.offset, std)

    def _quantiles(
        self, key: str, wanted: Quantiles, levels: Levels, positions: tuple[int, int]
    ) -> tuple[Numbers, Numbers]:
        if self.unknown is not None:
            raise ConfigError(
                f"{key}: quantiles of each section are not known here, because {self.unknown}"
            )
        if levels.sections is None:
            raise ConfigError(
                f"{key}: {wanted.levels} holds no quantiles of sections, because {levels.input} "
                "has floats: standardise instead (standard: {levels: FILE, by: section})"
            )
        values = np.array(levels.sections, np.float64)
        low, high = (self._after_steps(values[:, position]) for position in positions)
        return low, high

    def _after_steps(self, values: Numbers) -> Numbers:
        for each in self.maps:
            values = each(values)
        return values

    def _divide(
        self,
        key: str,
        wanted: QuantileRange | MomentsFromLevels,
        start: int,
        zero: Numbers,
        number: Numbers,
    ) -> SectionPairs:
        """Subtract a number in each section, and divide by another; where that is 0, all is 0."""
        divisor = np.where(number == 0, 0, np.maximum(number, wanted.floor) + wanted.eps)
        divisor[divisor < LEAST_NUMBER] = 0
        if not (np.isfinite(zero).all() and np.isfinite(divisor).all()):
            raise ConfigError(f"{key}: sections have values that are too large to be normalised by")
        scale = np.divide(1, divisor, out=np.zeros_like(divisor), where=divisor > 0)
        self.multiply(scale, -zero * scale)
        return SectionPairs(start, list(zip(zero.tolist(), divisor.tolist(), strict=True)))
