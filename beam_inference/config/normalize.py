"""From stored values to what the network expects, as a job file describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, FiniteFloat, Tag

from beam_inference.config.fields import Integer, Model, Range, Url
from beam_inference.foreign_text import shorten_value


def _ascending(clip: tuple[float, float]) -> tuple[float, float]:
    if clip[0] >= clip[1]:
        raise ValueError(f"clip {list(clip)} must be [low, high] with low < high")
    return clip


Clip = Annotated[Range, AfterValidator(_ascending)]


class Affine(Model):
    """The network's input is ``clip(value * scale + offset)``."""

    scale: FiniteFloat
    offset: FiniteFloat = 0.0
    clip: Clip | None = Field(None, description="lowest and highest value, after scale and offset")


class FromLevels(Model):
    """A normalisation that is made of a volume's own values, once its levels file is read."""

    levels: Url = Field(description="a file that beam-inference levels has made of the input")
    by: Literal["volume", "section"] = Field(
        "volume", description="values of the whole, or of each section along z"
    )


class Contrast(FromLevels):
    """The values at two quantiles become 0 and 1; what lies beyond is clipped."""

    low: float = Field(0.01, description="quantile that becomes 0")
    high: float = Field(0.99, description="quantile that becomes 1")


class Standard(FromLevels):
    """The mean becomes 0, the standard deviation 1: ``clip((value - mean) / std)``."""

    to: Literal["standard"]
    clip: Clip | None = Field(None, description="lowest and highest value, in standard deviations")


class Sections(Model):
    """Two values of each section, from ``start`` on, that become 0 and 1.

    They are made of levels by section. A section where both are one value is 0 throughout.
    """

    start: Integer
    levels: list[Range]
    clip: Clip | None = (0.0, 1.0)


def normalization_kind(value: object) -> str:
    """Tag of the union's member: name, affine, contrast, standard or sections."""
    if isinstance(value, dict):
        for key, kind in (("start", "sections"), ("to", "standard"), ("levels", "contrast")):
            if key in value:
                return kind
        return "affine"
    return (
        type(value).__name__.lower()
        if isinstance(value, (Affine, FromLevels, Sections))
        else "name"
    )


def _check_kind(value: object) -> object:
    if normalization_kind(value) == "name" and value not in ("none", "unit"):
        raise ValueError(
            f"{shorten_value(value)} is not one of none, unit, {{scale: …, offset: …, "
            "clip: [low, high]}, {levels: FILE, low: …, high: …, by: volume or section} or "
            "{levels: FILE, to: standard, by: …, clip: [low, high]}"
        )
    return value


Normalize = Annotated[
    Annotated[Literal["none", "unit"], Tag("name")]
    | Annotated[Affine, Tag("affine")]
    | Annotated[Contrast, Tag("contrast")]
    | Annotated[Standard, Tag("standard")]
    | Annotated[Sections, Tag("sections")],
    Discriminator(normalization_kind),
    BeforeValidator(_check_kind),
]
