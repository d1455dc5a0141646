"""What is done to the blended values before they are written, as a job file describes it."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, FiniteFloat, NonNegativeFloat, model_validator

from beam_inference.config.fields import Count, Margin, Model, Natural

SMOOTH_RADIUS = 4
"""Standard deviations beyond which a Gaussian is cut off."""


class Smooth(Model):
    """Each channel smoothed by a Gaussian; at the domain's ends the last voxel is repeated."""

    operator: Literal["smooth"]
    sigma: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = Field(
        description="standard deviation, ZYX, voxels"
    )

    @property
    def halo(self) -> tuple[int, int, int]:
        """Voxels that a result depends on, per side, ZYX."""
        z, y, x = (math.ceil(SMOOTH_RADIUS * sigma) for sigma in self.sigma)
        return (z, y, x)


class Select(Model):
    """Some of the channels, in the order given."""

    operator: Literal["select"]
    channels: list[Natural] = Field(min_length=1)


class Threshold(Model):
    """1 where a value is at least ``at``, else 0."""

    operator: Literal["threshold"]
    at: FiniteFloat


class Argmax(Model):
    """The number of the channel with the largest value, the first of equal ones.

    With ``background`` it is 0 where no channel reaches that value, and channels are counted from 1
    (a vote).
    """

    operator: Literal["argmax"]
    background: FiniteFloat | None = Field(
        None,
        description=(
            "the result is 0 where no channel's value is at least this, and channels count from 1"
        ),
    )


class Own(Model):
    """A function of yours: float32 (C, Z, Y, X) to float32 (output_channels, Z, Y, X), the same for every place."""

    operator: Literal["own"]
    function: str = Field(description="package.module:function, importable where the job runs")
    output_channels: Count
    halo: Margin = Field((0, 0, 0), description="voxels that a result depends on, per side, ZYX")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.function):
            raise ValueError(f"function {self.function} is not of the form package.module:function")
        return self


Operator = Annotated[Smooth | Select | Threshold | Argmax | Own, Discriminator("operator")]


def total_halo(operators: list[Operator]) -> tuple[int, int, int]:
    """Voxels beyond its core that a chunk must compute, per side, ZYX, for all operators one after the other."""
    halos = [operator.halo for operator in operators if isinstance(operator, (Smooth, Own))]
    return (
        sum(halo[0] for halo in halos),
        sum(halo[1] for halo in halos),
        sum(halo[2] for halo in halos),
    )


def channels_after(operators: list[Operator], channels: int) -> int:
    """Channels of the result, of ``channels`` of the network.

    Raises:
        ValueError: an operator cannot take what the one before gives.
    """
    for operator in operators:
        if isinstance(operator, Select):
            if max(operator.channels) >= channels:
                raise ValueError(
                    f"postprocess: select {operator.channels}, but there are the channels 0 … "
                    f"{channels - 1}"
                )
            channels = len(operator.channels)
        elif isinstance(operator, Own):
            channels = operator.output_channels
        elif isinstance(operator, Argmax):
            if channels == 1 and operator.background is None:
                raise ValueError(
                    "postprocess: argmax of one channel is 0 everywhere; threshold makes two "
                    "classes of it"
                )
            channels = 1
    return channels


def largest_label(operators: list[Operator], channels: int) -> int:
    """The largest value that operators which give labels can give, of ``channels`` of the network."""
    last = operators[-1]
    if not isinstance(last, Argmax):
        return 1
    channels = channels_after(operators[:-1], channels)
    return channels - 1 if last.background is None else channels


def operator_bytes(operators: list[Operator], channels: int) -> int:
    """The most that operators hold at a time, per voxel, beyond the values that the first one is given."""
    most = held = 0
    for operator in operators:
        after = channels_after([operator], channels)
        beside = 0
        if isinstance(operator, Threshold):
            beside = channels  # what is so, as bools
        elif isinstance(operator, Argmax):
            # NumPy's copy with the channels last, and the numbers as int64
            beside = 4 * channels + 8
        elif isinstance(operator, Own):
            beside = 4 * max(channels, after)  # not known: one array on the way
        most = max(most, held + 4 * after + beside)
        held = 4 * after
        channels = after
    return max(most, held + channels) if operators else 0  # what is finite, as bools


def gives_labels(operators: list[Operator]) -> bool:
    """Whether the result is whole numbers, which are written as they are."""
    return bool(operators) and isinstance(operators[-1], (Threshold, Argmax))
