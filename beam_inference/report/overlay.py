"""An output in colours upon the input in grey."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.fields import INTEGER_DTYPES
from beam_inference.config.job import JobConfig
from beam_inference.job.records import ChannelStatistics
from beam_inference.report.slices import Plane

PALETTE = ("#ff8c32", "#3aa0ff", "#35c46a", "#e0559b", "#f2d13c", "#8a6cff", "#2fc6c6", "#c98a5a")
"""Colours of the coloured channels, in order."""
OPACITY = 0.62
"""Opacity of a voxel whose value is the highest."""


def channels_to_colour(
    config: JobConfig, statistics: Sequence[ChannelStatistics], shown: int
) -> list[int]:
    """The channels among the first ``shown`` that get a colour, as far as there are colours.

    The commonest class of a softmax gets none: classes add up to one, so it is what the others
    leave, and would hide the input.
    """
    channels = list(range(shown))
    if config.model.activation == "softmax" and len(statistics) > 1:
        commonest = max(range(len(statistics)), key=lambda channel: statistics[channel].mean)
        channels = [channel for channel in channels if channel != commonest] or channels
    return channels[: len(PALETTE)]


def colour_ranges(config: JobConfig, planes: Sequence[Plane]) -> list[tuple[float, float]]:
    """The stored values of each channel that get no colour and full colour.

    Where it is known what values there can be, these are the ends; else they bound the middle 99 %
    of the planes.
    """
    channels = range(len(planes[0].output))
    interval = config.output_interval
    if interval is not None and config.output.value_range is None:
        if config.output.dtype in INTEGER_DTYPES:
            interval = (0.0, float(np.iinfo(config.output.dtype).max))
        return [interval for _ in channels]
    return [brightness_range([plane.output[channel] for plane in planes]) for channel in channels]


def brightness_range(arrays: Sequence[NDArray[np.float32]]) -> tuple[float, float]:
    """Range of the middle 99 % of the values that are not missing; 0 to 1 if all are."""
    values = np.concatenate([array.reshape(-1) for array in arrays])
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0
    low, high = (float(value) for value in np.percentile(values, (0.5, 99.5)))
    return (low, high) if high > low else (low, low + 1.0)


def grey(source: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
    """A picture (rows, columns, RGBA), transparent where it is missing."""
    brightness = _brightness(source, low, high)
    return _bytes(np.stack([brightness, brightness, brightness, np.isfinite(source)], axis=-1))


def draw_overlay(
    source: NDArray[np.float32],
    output: NDArray[np.float32],
    brightness: tuple[float, float],
    ranges: Sequence[tuple[float, float]],
) -> NDArray[np.uint8]:
    """Draw the output over the input: (rows, columns, RGBA), transparent where it is missing.

    Each channel of ``output`` (channels, rows, columns) has its colour; these are mixed by their
    values, and cover the input as far as the highest of these says. ``brightness`` is the range of
    the input, ``ranges`` are those of the channels.
    """
    base = 0.85 * _brightness(source, *brightness)[..., None]
    scaled = np.stack(
        [_brightness(channel, *each) for channel, each in zip(output, ranges, strict=True)]
    )
    colours = np.array([_rgb(PALETTE[channel]) for channel in range(len(output))])
    mixed = (
        np.einsum("cyx,ck->yxk", scaled, colours) / np.maximum(scaled.sum(axis=0), 1e-9)[..., None]
    )
    cover = OPACITY * scaled.max(axis=0)[..., None]
    is_present = np.isfinite(output).min(axis=0)[..., None]
    return _bytes(np.concatenate([base * (1 - cover) + mixed * cover, is_present], axis=-1))


def _brightness(values: NDArray[np.float32], low: float, high: float) -> NDArray[np.float64]:
    return np.clip((np.nan_to_num(values.astype(np.float64), nan=low) - low) / (high - low), 0, 1)


def _bytes(picture: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.rint(255 * picture).astype(np.uint8)


def _rgb(colour: str) -> list[float]:
    return [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
