"""From stored values to what the network expects, as a job file describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    model_validator,
)

from beam_inference.config.fields import Integer, Model, Numbers, Range, Url
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


class ClipStep(Model):
    """Values beyond two limits become these."""

    clip: Annotated[
        Annotated[Clip, Tag("pair")] | Annotated[list[Clip], Field(min_length=1), Tag("list")],
        Discriminator(lambda value: "list" if _is_list_of_lists(value) else "pair"),
    ] = Field(description="lowest and highest value, or a list with such a pair for each channel")

    @property
    def listed(self) -> dict[str, int]:
        """Length of each list with a value for each channel, by its key."""
        return {"clip": len(self.clip)} if isinstance(self.clip, list) else {}


class AffineStep(Model):
    """``value * scale + offset``."""

    scale: Numbers = Field(1.0, description="factor, or a list with one for each channel")
    offset: Numbers = Field(0.0, description="what is added then, or a list with one per channel")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if 0 in (self.scale if isinstance(self.scale, list) else [self.scale]):
            raise ValueError(
                "scale must not be 0: the network would see one value throughout the volume"
            )
        return self

    @property
    def listed(self) -> dict[str, int]:
        """Length of each list with a number for each channel, by its key."""
        return _listed(self, "scale", "offset")


Divisor = Annotated[FiniteFloat, Field(ge=2.0**-126)]
"""A positive number that is one in float32, too."""


class Moments(Model):
    """A mean and a standard deviation."""

    mean: Numbers = Field(description="becomes 0; or a list with one for each channel")
    std: Annotated[
        Annotated[Divisor, Tag("number")]
        | Annotated[list[Divisor], Field(min_length=1), Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number"),
    ] = Field(description="becomes 1; or a list with one for each channel")


class StandardStep(Model):
    """``(value - mean) / std``."""

    standard: Moments

    @property
    def listed(self) -> dict[str, int]:
        """Length of each list with a number for each channel, by its key."""
        return _listed(self.standard, "mean", "std")


def _is_list_of_lists(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], list | tuple)


def _listed(section: Model, *keys: str) -> dict[str, int]:
    values = {key: getattr(section, key) for key in keys}
    return {key: len(value) for key, value in values.items() if isinstance(value, list)}


_STEPS = {"standard": StandardStep, "scale": AffineStep, "offset": AffineStep, "clip": ClipStep}
"""Kinds of steps, by a key that only they have."""


def _step_kind(value: object) -> str | None:
    """Tag of a step: the name of its class, in lower case."""
    if isinstance(value, dict):
        return next((_STEPS[key].__name__.lower() for key in _STEPS if key in value), None)
    return type(value).__name__.lower()


def _check_step(value: object) -> object:
    if _step_kind(value) not in {kind.__name__.lower() for kind in _STEPS.values()}:
        raise ValueError(
            f"{shorten_value(value)} is no step: each is one of {{clip: [low, high]}}, "
            "{scale: …, offset: …} and {standard: {mean: …, std: …}}"
        )
    return value


Step: TypeAlias = ClipStep | AffineStep | StandardStep
"""What is done to the values as they are after the steps before."""

Steps = Annotated[
    list[
        Annotated[
            Annotated[ClipStep, Tag("clipstep")]
            | Annotated[AffineStep, Tag("affinestep")]
            | Annotated[StandardStep, Tag("standardstep")],
            Discriminator(_step_kind),
            BeforeValidator(_check_step),
        ]
    ],
    Field(min_length=1),
]


def check_listed(steps: Sequence[Step], channels: int) -> None:
    """Refuse lists that do not have a value for each of so many channels. Raises ValueError."""
    for number, step in enumerate(steps):
        for key, length in step.listed.items():
            if length != channels:
                raise ValueError(
                    f"normalize.{number}: {key} lists {length} values, but input_channels says "
                    f"{channels}: write one for each, or one for all"
                )


def normalization_kind(value: object) -> str:
    """Tag of the union's member: name, steps, affine, contrast, standard or sections."""
    if isinstance(value, list | tuple):
        return "steps"
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
            "clip: [low, high]}, {levels: FILE, low: …, high: …, by: volume or section}, "
            "{levels: FILE, to: standard, by: …, clip: [low, high]} or a list of steps"
        )
    return value


Normalize = Annotated[
    Annotated[Literal["none", "unit"], Tag("name")]
    | Annotated[Affine, Tag("affine")]
    | Annotated[Contrast, Tag("contrast")]
    | Annotated[Standard, Tag("standard")]
    | Annotated[Sections, Tag("sections")]
    | Annotated[Steps, Tag("steps")],
    Discriminator(normalization_kind),
    BeforeValidator(_check_kind),
]
