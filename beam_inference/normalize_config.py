"""From stored values to what the network expects, as a job file describes it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, FiniteFloat, Tag, model_validator

from beam_inference.storage import Integer, Model, Url
from beam_inference.volume_config import Range


class Affine(Model):
    """The network's input is ``clip(value * scale + offset)``."""

    scale: FiniteFloat
    offset: FiniteFloat = 0.0
    clip: Range | None = Field(None, description="lowest and highest value, after scale and offset")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {list(self.clip)} must be [low, high] with low < high")
        return self


class Contrast(Model):
    """The values at two quantiles become 0 and 1; what lies beyond is clipped."""

    levels: Url = Field(description="a file that beam-inference levels has made of the input")
    low: float = Field(0.01, description="quantile that becomes 0")
    high: float = Field(0.99, description="quantile that becomes 1")
    by: Literal["volume", "section"] = Field("volume", description="quantiles of the whole, or of each section along z")


class Sections(Model):
    """What a contrast by section comes to: for each section from ``start`` on, the values that become 0 and 1."""

    start: Integer
    levels: list[Range]


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "sections" if "start" in value else "contrast" if "levels" in value else "affine"
    return type(value).__name__.lower() if isinstance(value, (Affine, Contrast, Sections)) else "name"


def _known(value: object) -> object:
    if _kind(value) == "name" and value not in ("none", "unit"):
        raise ValueError(
            f"{value!r} is not one of none, unit, {{scale: …, offset: …, clip: [low, high]}} or {{levels: FILE, "
            "low: …, high: …, by: volume or section}"
        )
    return value


Normalize = Annotated[
    Annotated[Literal["none", "unit"], Tag("name")]
    | Annotated[Affine, Tag("affine")]
    | Annotated[Contrast, Tag("contrast")]
    | Annotated[Sections, Tag("sections")],
    Discriminator(_kind),
    BeforeValidator(_known),
]
