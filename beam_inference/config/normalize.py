"""From stored values to what the network expects, as a job file describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Self, TypeAlias, TypeGuard

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    Tag,
    model_validator,
)

from beam_inference.config.fields import (
    LEAST_NUMBER,
    Integer,
    Model,
    Natural,
    Numbers,
    Range,
    Url,
    has_zero,
)
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


class _Step(Model):
    channels: Annotated[list[Natural], Field(min_length=1)] | None = Field(
        None, description="the channels that it changes; default all"
    )


ClipPairs = Annotated[list[Clip], Field(min_length=1), Tag("list")]
"""Lowest and highest value of each channel."""


class ClipStep(_Step):
    """Values beyond two limits become these."""

    clip: Annotated[
        Annotated[Clip, Tag("pair")] | ClipPairs,
        Discriminator(lambda value: "list" if is_list_of_lists(value) else "pair"),
    ] = Field(description="lowest and highest value, or a list with such a pair for each channel")

    @property
    def lengths(self) -> dict[str, int]:
        """Length of each list with a value for each channel, by its key."""
        return {"clip": len(self.clip)} if isinstance(self.clip, list) else {}


class AffineStep(_Step):
    """``value * scale + offset``."""

    scale: Numbers = Field(1.0, description="factor, or a list with one for each channel")
    offset: Numbers = Field(0.0, description="what is added then, or a list with one per channel")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if has_zero(self.scale):
            raise ValueError(
                "scale must not be 0: the network would see one value throughout the volume"
            )
        return self

    @property
    def lengths(self) -> dict[str, int]:
        """Length of each list with a number for each channel, by its key."""
        return _list_lengths(self, "scale", "offset")


Divisor = Annotated[FiniteFloat, Field(ge=LEAST_NUMBER)]
"""A positive number that is one in float32, too."""


class Moments(Model):
    """A mean and a standard deviation."""

    mean: Numbers = Field(description="becomes 0; or a list with one for each channel")
    std: Annotated[
        Annotated[Divisor, Tag("number")]
        | Annotated[list[Divisor], Field(min_length=1), Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number"),
    ] = Field(description="becomes 1; or a list with one for each channel")


class StandardStep(_Step):
    """``(value - mean) / std``."""

    standard: Moments

    @property
    def lengths(self) -> dict[str, int]:
        """Length of each list with a number for each channel, by its key."""
        return _list_lengths(self.standard, "mean", "std")


class SectionMoments(Model):
    """A mean and a standard deviation of each section along z, from ``start`` on.

    A section whose deviation is 0 is 0 throughout.
    """

    start: Integer
    mean: list[FiniteFloat]
    std: list[NonNegativeFloat]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean is of {len(self.mean)} sections, and std of {len(self.std)}")
        return self

    @property
    def count(self) -> int:
        """Number of sections."""
        return len(self.mean)


class SectionStandardStep(_Step):
    """``(value - mean) / std``, of each section along z."""

    standard: SectionMoments


class SectionLimits(Model):
    """Lowest and highest value of each section along z, from ``start`` on."""

    start: Integer
    limits: list[Range]

    @property
    def count(self) -> int:
        """Number of sections."""
        return len(self.limits)


class SectionClipStep(_Step):
    """Values beyond two limits of their section become these."""

    clip: SectionLimits


class Statistics(Model):
    """Numbers of each channel, that a levels file holds."""

    levels: Url = Field(description="a file that beam-inference levels has made of the input")
    by: Literal["volume", "section"] = Field(
        "volume",
        description="values of the whole, or of each section along z (all channels together)",
    )
    of: Literal["volume", "nonzero_box", "object", "nonzero"] = Field(
        "volume",
        description=(
            "all voxels, those in the bounding box of all that are not zero, those inside the "
            "object, or in each channel those that are not zero; the last two are then changed "
            "alone"
        ),
    )

    @model_validator(mode="after")
    def _check_by(self) -> Self:
        if self.by == "section" and self.of != "volume":
            raise ValueError(
                f"of: {self.of} is not known by section: a levels file holds the levels of whole "
                "sections. Remove of, or by"
            )
        return self

    @property
    def changed_alone(self) -> Literal["object", "nonzero"] | None:
        """The voxels that a step changes alone; None if it changes all."""
        match self.of:
            case "object" | "nonzero":
                return self.of
            case _:
                return None


class Quantiles(Statistics):
    """The values at two quantiles."""

    low: float = Field(0.005, description="the lower quantile")
    high: float = Field(0.995, description="the upper quantile")


class _Division(Model):
    """What a step divides by: a number of the volume, kept away from zero."""

    eps: NonNegativeFloat = Field(0.0, description="is added to what is divided by")
    floor: NonNegativeFloat = Field(
        1e-8, description="what is divided by is at least this, before eps is added"
    )

    def divisor(self, number: float) -> float:
        """The number that a step divides by, where the volume has another one."""
        return max(number, self.floor) + self.eps


class QuantileClipStep(_Step):
    """Values beyond two quantiles of the volume become these."""

    clip: Quantiles

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.clip.changed_alone:
            raise ValueError(
                f"clip: of: {self.clip.of} is not known: only standard and rescale change some "
                "voxels alone"
            )
        return self


class QuantileRange(Quantiles, _Division):
    """Two quantiles that become 0 and 1."""

    low: float = Field(0.0, description="quantile that becomes 0")
    high: float = Field(1.0, description="quantile that becomes 1")


class RescaleStep(_Step):
    """``(value - low) / (high - low)``, of two quantiles of the volume."""

    rescale: QuantileRange


class _Deviation(_Division):
    ddof: Literal[0, 1] = Field(
        0, description="the deviation's divisor is the number of voxels less this"
    )


class MomentsFromLevels(Statistics, _Deviation):
    """Mean and standard deviation of each channel of the volume."""


class LevelsStandardStep(_Step):
    """``(value - mean) / std``, of the volume, as the steps before have changed it."""

    standard: MomentsFromLevels


class Holes(Model):
    """Zeros inside an object, which a part of the volume does not tell from background."""

    path: Url = Field(description="folder of holes that beam-inference levels has made")
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = Field(
        description="hash of the index in it"
    )


class InsideMoments(Moments):
    """A mean and a standard deviation of what is inside an object, or of what is not zero."""

    of: Literal["object", "nonzero"]
    holes: Holes | None = Field(
        None, description="zeros that are inside the object, too; default none"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.of == "nonzero" and self.holes is not None:
            raise ValueError("holes are zero, and of: nonzero leaves zeros as they are: remove one")
        return self


class InsideStandardStep(_Step):
    """``(value - mean) / std`` of some voxels alone; elsewhere, where all is zero, it stays so."""

    standard: InsideMoments

    @property
    def lengths(self) -> dict[str, int]:
        """Length of each list with a number for each channel, by its key."""
        return _list_lengths(self.standard, "mean", "std")


class PatchMoments(_Deviation):
    """Mean and standard deviation of each channel of each patch."""

    by: Literal["patch"]


class PatchStandardStep(_Step):
    """``(value - mean) / std``, of each patch that the network takes."""

    standard: PatchMoments


def is_list_of_lists(value: object) -> bool:
    """Whether a value holds several ones for each channel."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], list | tuple)


def _list_lengths(section: Model, *keys: str) -> dict[str, int]:
    values = {key: getattr(section, key) for key in keys}
    return {key: len(value) for key, value in values.items() if isinstance(value, list)}


def _step_kind(value: object) -> str | None:
    """Tag of a step: the name of its class, in lower case."""
    if not isinstance(value, dict):
        return type(value).__name__.lower()
    key = next((key for key in _KINDS_BY_KEY if key in value), None)
    if key is None:
        return None
    inner = value[key] if isinstance(value[key], dict) else {}
    kinds = _KINDS_BY_KEY[key]
    return next((kind for mark, kind in kinds.items() if mark in inner), kinds[""])


_KINDS_BY_KEY = {
    "standard": {
        "levels": "levelsstandardstep",
        "by": "patchstandardstep",
        "of": "insidestandardstep",
        "start": "sectionstandardstep",
        "": "standardstep",
    },
    "rescale": {"": "rescalestep"},
    "scale": {"": "affinestep"},
    "offset": {"": "affinestep"},
    "clip": {"levels": "quantileclipstep", "start": "sectionclipstep", "": "clipstep"},
}
"""Kinds of steps by a key of theirs, and by a key of what that holds."""


_KINDS = {kind for kinds in _KINDS_BY_KEY.values() for kind in kinds.values()}


def _check_step(value: object) -> object:
    if _step_kind(value) not in _KINDS:
        raise ValueError(
            f"{shorten_value(value)} is no step: each is one of {{clip: [low, high]}}, "
            "{clip: {levels: FILE, low: …, high: …}}, {scale: …, offset: …}, {rescale: {levels: "
            "FILE, low: …, high: …}}, {standard: {mean: …, std: …}}, {standard: {levels: FILE}}, "
            "the same with by: section beside levels, and {standard: {by: patch}}"
        )
    return value


SectionStep: TypeAlias = SectionStandardStep | SectionClipStep
"""A step whose numbers are known, others for each section."""
DefiniteStep: TypeAlias = (
    ClipStep | AffineStep | StandardStep | InsideStandardStep | PatchStandardStep | SectionStep
)
"""A step whose numbers are known, or follow from a patch."""
LevelsStep: TypeAlias = QuantileClipStep | RescaleStep | LevelsStandardStep
"""A step whose numbers are made of a levels file."""
Step: TypeAlias = DefiniteStep | LevelsStep
"""What is done to the values as they are after the steps before."""

_Definite = (
    Annotated[ClipStep, Tag("clipstep")]
    | Annotated[AffineStep, Tag("affinestep")]
    | Annotated[StandardStep, Tag("standardstep")]
    | Annotated[InsideStandardStep, Tag("insidestandardstep")]
    | Annotated[PatchStandardStep, Tag("patchstandardstep")]
    | Annotated[SectionStandardStep, Tag("sectionstandardstep")]
    | Annotated[SectionClipStep, Tag("sectionclipstep")]
)

DefiniteSteps = tuple[Annotated[_Definite, Discriminator(_step_kind)], ...]


def _not_empty(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    if not steps:
        raise ValueError("an empty list of steps: write none")
    return steps


Steps = Annotated[
    tuple[
        Annotated[
            _Definite
            | Annotated[QuantileClipStep, Tag("quantileclipstep")]
            | Annotated[RescaleStep, Tag("rescalestep")]
            | Annotated[LevelsStandardStep, Tag("levelsstandardstep")],
            Discriminator(_step_kind),
            BeforeValidator(_check_step),
        ],
        ...,
    ],
    AfterValidator(_not_empty),
]


def statistics_of(step: Step) -> Statistics | None:
    """What a step takes from a levels file; None if it takes nothing."""
    match step:
        case QuantileClipStep():
            return step.clip
        case RescaleStep():
            return step.rescale
        case LevelsStandardStep():
            return step.standard
        case _:
            return None


def sees_patches(normalize: object) -> bool:
    """Whether a normalisation depends on each patch."""
    steps = normalize if isinstance(normalize, tuple) else ()
    return any(isinstance(step, PatchStandardStep) for step in steps)


def object_steps(normalize: object) -> list[InsideStandardStep]:
    """The steps of a normalisation that change the inside of an object alone."""
    steps = normalize if isinstance(normalize, tuple) else ()
    return [step for step in steps if is_of_object(step)]


def section_steps(normalize: object) -> list[SectionMoments | SectionLimits]:
    """What the steps of a normalisation hold that have numbers of each section."""
    steps = normalize if isinstance(normalize, tuple) else ()
    return [
        step.standard if isinstance(step, SectionStandardStep) else step.clip
        for step in steps
        if isinstance(step, SectionStandardStep | SectionClipStep)
    ]


def depends_on_place(normalize: object) -> bool:
    """Whether a normalisation changes a voxel by where it lies in its volume."""
    is_by_step = bool(object_steps(normalize) or section_steps(normalize))
    return isinstance(normalize, Sections) or is_by_step


def is_of_object(step: Step) -> TypeGuard[InsideStandardStep]:
    """Whether a step of numbers changes the inside of an object alone."""
    return isinstance(step, InsideStandardStep) and step.standard.of == "object"


def holes_of(normalize: object) -> Holes | None:
    """The holes of the object whose inside a normalisation changes alone; None if it has none.

    Raises:
        ValueError: two steps name other ones.
    """
    named = [step.standard.holes for step in object_steps(normalize)]
    hashes = {None if holes is None else holes.sha256 for holes in named}
    if len(hashes) > 1:
        raise ValueError(
            "normalize: its steps are for the inside of several objects, and a job has one: take "
            "all of them from one levels file"
        )
    return named[0] if named else None


def levels_files(normalize: object) -> list[str]:
    """The levels files that a normalisation, or any other value, names."""
    if isinstance(normalize, FromLevels):
        return [normalize.levels]
    steps = normalize if isinstance(normalize, tuple) else ()
    return [taken.levels for taken in map(statistics_of, steps) if taken is not None]


def rename_levels(normalize: Normalize, rename: Callable[[str], str]) -> Normalize:
    """A normalisation with other names of its levels files, and of the holes beside them."""
    if isinstance(normalize, FromLevels):
        return normalize.model_copy(update={"levels": rename(normalize.levels)})
    if not isinstance(normalize, tuple):
        return normalize
    return tuple(_rename_step(step, rename) for step in normalize)


def _rename_step(step: Step, rename: Callable[[str], str]) -> Step:
    if isinstance(step, InsideStandardStep):
        holes = step.standard.holes
        renamed = holes and holes.model_copy(update={"path": rename(holes.path)})
        return step.model_copy(
            update={"standard": step.standard.model_copy(update={"holes": renamed})}
        )
    taken = statistics_of(step)
    if taken is None:
        return step
    key = next(key for key in ("clip", "rescale", "standard") if key in type(step).model_fields)
    return step.model_copy(update={key: taken.model_copy(update={"levels": rename(taken.levels)})})


def dump_normalize(normalize: Normalize) -> object:
    """A normalisation as a job file has it."""
    if isinstance(normalize, tuple):
        return [step.model_dump(exclude_none=True) for step in normalize]
    return normalize if isinstance(normalize, str) else normalize.model_dump()


def check_listed(steps: Sequence[Step], channels: int) -> None:
    """Refuse lists that do not have a value for each of so many channels. Raises ValueError."""
    holes_of(steps)
    for number, step in enumerate(steps):
        chosen = list(range(channels)) if step.channels is None else step.channels
        if len(set(chosen)) < len(chosen) or max(chosen) >= channels:
            raise ValueError(
                f"normalize.{number}: channels {chosen} must be different ones of 0 … "
                f"{channels - 1}, the input_channels"
            )
        if not isinstance(step, (ClipStep, AffineStep, StandardStep, InsideStandardStep)):
            continue
        for key, length in step.lengths.items():
            if length != len(chosen):
                origin = "input_channels" if step.channels is None else "channels"
                raise ValueError(
                    f"normalize.{number}: {key} lists {length} values, but {origin} says "
                    f"{channels if step.channels is None else chosen}: write one for each, or one "
                    "for all"
                )


def check_undone(normalize: Normalize, input_channels: int, output_channels: int) -> None:
    """Refuse to undo what depends on sections, or on other channels than there are. ValueError."""
    if (
        isinstance(normalize, Sections)
        or (isinstance(normalize, FromLevels) and normalize.by == "section")
        or (isinstance(normalize, tuple) and any(map(_is_by_section, normalize)))
    ):
        raise ValueError(
            "denormalize cannot undo what is done by section: normalise by the whole volume"
        )
    if isinstance(normalize, tuple) and any(map(_is_inside_alone, normalize)):
        raise ValueError(
            "denormalize cannot undo what is done to some voxels alone: normalise all of the "
            "volume (of: nonzero_box)"
        )
    if input_channels != output_channels and isinstance(normalize, tuple):
        raise ValueError(
            f"denormalize undoes the steps of each channel, but input_channels is {input_channels} "
            f"and output_channels {output_channels}: they must be equal"
        )


def _is_by_section(step: Step) -> bool:
    taken = statistics_of(step)
    return isinstance(step, SectionStandardStep | SectionClipStep) or (
        taken is not None and taken.by == "section"
    )


def _is_inside_alone(step: Step) -> bool:
    taken = statistics_of(step)
    return isinstance(step, InsideStandardStep) or (
        taken is not None and taken.changed_alone is not None
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

LevelsRequest: TypeAlias = Contrast | Standard | Steps
"""A normalisation that names a levels file."""
