"""2-D networks over planes of a volume: which planes, and how their answers become one."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator

from beam_inference.config.fields import Model, Natural

Plane = Literal["yx", "xy", "zx", "xz", "zy", "yz"]
"""A plane by its axes: of ``zx`` the network sees (N, C, Z, X)."""


def normal_axis(plane: Plane) -> int:
    """Number of the axis, ZYX, that a plane is perpendicular to."""
    return next(number for number, axis in enumerate("zyx") if axis not in plane)


def check_planes(planes: list[Plane]) -> None:
    """Refuse planes that are named twice. Raises ValueError."""
    if len(set(planes)) < len(planes):
        raise ValueError(f"planes {planes} names a plane twice")


class PlaneSum(Model):
    """Output channels as sums of channels that the network answers for several planes."""

    sum: Annotated[
        list[Annotated[dict[Plane, Natural], Field(min_length=1)]], Field(min_length=1)
    ] = Field(
        description=(
            "one mapping for each output channel: which channel of the network's answer for which "
            "plane is added to it"
        )
    )

    @field_validator("sum")
    @classmethod
    def _sort(cls, sums: list[dict[Plane, int]]) -> list[dict[Plane, int]]:
        """The order in which planes are named changes nothing."""
        return [{plane: terms[plane] for plane in sorted(terms)} for terms in sums]

    @property
    def most_terms(self) -> int:
        """The most channels that are added up."""
        return max(map(len, self.sum))

    @property
    def network_channels(self) -> int:
        """The least number of channels that the network must answer."""
        return 1 + max(channel for terms in self.sum for channel in terms.values())


CombinePlanes: TypeAlias = Annotated[
    Annotated[Literal["mean", "vote"], Tag("word")] | Annotated[PlaneSum, Tag("planesum")],
    Discriminator(lambda value: "planesum" if isinstance(value, dict | PlaneSum) else "word"),
]
"""How the answers of several planes become one."""
