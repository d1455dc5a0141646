"""Thresholds of label jobs: in the stored units of the input, and refused where they cannot be."""

from __future__ import annotations

import math

import numpy as np

from beam_inference.arrays import AnyDtype
from beam_inference.errors import ConfigError

_SMALL_BYTES = 2
"""Bytes of the integers that are used for values of 0 to 1, spread over the dtype's range."""


def check_threshold(
    flag: str, threshold: float, dtype: AnyDtype, source: str, *, may_exclude_all: bool = False
) -> None:
    """Refuse a threshold that cannot be in the stored units of a volume.

    A fraction on a volume of integers is refused, too: it separates nothing but 0 from the rest,
    and is what somebody writes who thinks of values from 0 to 1.

    Args:
        flag: the option, for messages.
        threshold: its value.
        dtype: what the volume holds.
        source: the volume's URL, for messages.
        may_exclude_all: whether the integer above the dtype's range is allowed, which no value
            reaches.

    Raises:
        ConfigError: it is refused.
    """
    if not math.isfinite(threshold):
        raise ConfigError(f"{flag} {threshold} is no number that values can be compared with")
    is_whole = dtype.kind != "f"
    if is_whole and 0 < abs(threshold) < 1:
        raise ConfigError(_fraction_message(flag, threshold, dtype, source))
    low, high = _limits(dtype)
    most = high + 1 if is_whole and may_exclude_all else high
    if not low <= threshold <= most:
        hint = f", or {most} for a limit that none reaches" if most > high else ""
        raise ConfigError(
            f"{flag} {threshold:g}: {source} holds {dtype}, values from {low} to {high}, and "
            "thresholds are in these stored units. So it would separate nothing. Write a number "
            f"from {low} to {high}{hint}."
        )


def check_separates(flag: str, threshold: float, dtype: AnyDtype, source: str) -> None:
    """Refuse a threshold that every value of a dtype of integers reaches.

    Raises:
        ConfigError: it is refused.
    """
    if dtype.kind == "f":
        return
    low, high = _limits(dtype)
    if threshold <= low:
        raise ConfigError(
            f"{flag} {threshold:g}: {source} holds {dtype}, and every value is at least {low}. So "
            f"the whole volume would be foreground. Write a number from {low + 1} to {high}."
        )


def comparable_threshold(threshold: float, dtype: AnyDtype) -> float:
    """A threshold that voxels of a dtype can be compared with exactly.

    For integers it is the next whole number: a float could not hold all their values.
    """
    return float(threshold) if dtype.kind == "f" else math.ceil(threshold)


def _limits(dtype: AnyDtype) -> tuple[float, float]:
    """The lowest and the highest value of a dtype, whole numbers exactly."""
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _fraction_message(flag: str, threshold: float, dtype: AnyDtype, source: str) -> str:
    low, high = _limits(dtype)
    either = ""
    if threshold > 0 and dtype.itemsize <= _SMALL_BYTES:
        either = f"{flag} {math.ceil(threshold * high)} if 0 to 1 is stored as 0 to {high}, or "
    return (
        f"{flag} {threshold:g}: {source} holds {dtype}, whole numbers from {low} to "
        f"{high}, and thresholds are in these stored units. So it would only separate "
        f"{'0' if threshold > 0 else 'what is less than 0'} from the rest. Write {either}"
        f"{flag} {math.ceil(threshold)} if that is what you mean."
    )
