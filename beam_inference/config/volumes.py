"""The volumes that a job reads and writes, as its file describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    model_validator,
)

from beam_inference.config.fields import (
    Count,
    Json,
    Margin,
    Model,
    Natural,
    Point,
    Range,
    Shape,
    Url,
    VoxelSize,
    WritableUrl,
    as_list,
)
from beam_inference.config.formats import (
    ChannelAxis,
    Format,
    FormatName,
    get_format,
    installed_formats,
    multiscale_formats,
    names_of,
    sharded_formats,
)
from beam_inference.config.heads import HeadKey
from beam_inference.config.normalize import Clip, ClipPairs, Statistics, is_list_of_lists
from beam_inference.config.storage import Storage
from beam_inference.foreign_text import holds_credentials, is_secret_name, shorten_value
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.fill import Fill
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

_Scale = Annotated[
    Annotated[Natural, Tag("index")] | Annotated[VoxelSize, Tag("voxel size")],
    Discriminator(lambda value: "index" if isinstance(value, (int, str)) else "voxel size"),
]


@dataclass(frozen=True, slots=True)
class VolumeSource:
    """A volume to read, and what of it.

    Attributes:
        path: URL of the volume; None if there is a spec.
        spec: a TensorStore spec instead.
        scale: which scale of a multiscale volume: its index, 0 the finest, or its voxel size, ZYX,
            in nanometres.
        channel: numbers of the channels to read; None for all.
        select: positions on axes other than z, y, x and channels, by name.
        storage: how object stores are reached.
    """

    path: str | None = None
    spec: Json | None = None
    scale: int | VoxelSizeNm = 0
    channel: Sequence[int] | None = None
    select: Mapping[str, int] = field(default_factory=dict)
    storage: Storage = field(default_factory=Storage)


def _as_values(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _sort_values(values: list[int | float]) -> list[int | float]:
    """Distinct values in order, whole numbers as such: what is the same is written the same."""
    return sorted({int(value) if value == int(value) else value for value in values})


MaskValues = Annotated[
    list[int | FiniteFloat],
    Field(min_length=1, max_length=256),
    BeforeValidator(_as_values, json_schema_input_type=int | FiniteFloat | list[int | FiniteFloat]),
    AfterValidator(_sort_values),
]
"""One or several values of a mask."""


_LARGEST_STORED = 2**64
"""No integer of a volume is as large."""


class Mask(Model):
    """Where a volume is kept: where another one is not zero, or has the values asked for."""

    path: Url = Field(
        description=(
            "a volume of one channel and any voxel size; beyond its bounds it counts as zero"
        )
    )
    scale: Natural = Field(0, description="which scale of a multiscale volume, 0 the finest")
    above: int | FiniteFloat | None = Field(
        None, description="what is kept is where the volume is larger than this"
    )
    below: int | FiniteFloat | None = Field(
        None,
        description="what is kept is where the volume is smaller; beside above, where both hold",
    )
    equals: MaskValues | None = Field(
        None, description="what is kept is where the volume has this value, or one of these"
    )
    inverse: bool = Field(
        False, description="what is kept is where the volume is zero, or not as asked for, instead"
    )
    fill_value: int | FiniteFloat = Field(0, description="what stands elsewhere, in stored units")

    @model_validator(mode="after")
    def _check(self) -> Self:
        values = (self.above, self.below, *(self.equals or ()))
        if any(isinstance(value, int) and abs(value) > _LARGEST_STORED for value in values):
            raise ValueError("above, below and equals must be numbers that a volume can hold")
        if self.equals is not None and (self.above is not None or self.below is not None):
            raise ValueError(
                "equals lists the values that are kept, above and below a range of them: remove one"
            )
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(
                f"no value is above {self.above} and below {self.below}: write above < below, or "
                "with inverse: true what is to be left out"
            )
        return self

    def source(self, storage: Storage) -> VolumeSource:
        """The volume to open."""
        return VolumeSource(self.path, scale=self.scale, storage=storage)


def _clip_kind(value: object) -> str:
    if isinstance(value, Statistics | dict):
        return "levels"
    return "list" if is_list_of_lists(value) else "pair"


class Resample(Model):
    """How the input is resampled to the voxel size that the network sees."""

    voxel_size_nm: VoxelSize | None = Field(
        None, description="the voxel size, ZYX, nanometres; default model.voxel_size_nm"
    )
    order: Literal[0, 1, 3] = Field(
        1, description="0: nearest voxel. 1: linear. 3: cubic spline through the voxels"
    )
    separate_z: bool | Literal["auto"] = Field(
        False,
        description=(
            "whether the axis of the longest voxels is resampled by nearest voxels. auto: where "
            "they are more than three times as long as the shortest, as nnU-Net"
        ),
    )
    clip: (
        Annotated[
            Annotated[Clip, Tag("pair")] | ClipPairs | Annotated[Statistics, Tag("levels")],
            Discriminator(_clip_kind),
        ]
        | None
    ) = Field(
        None,
        description=(
            "lowest and highest value, in stored units, before and after resampling: a pair, a "
            "list with one for each channel, or those that occur, from a levels file"
        ),
    )

    @property
    def limits(self) -> tuple[tuple[float, float], ...]:
        """Lowest and highest value of each channel, or of all; empty where nothing is clipped."""
        assert not isinstance(self.clip, Statistics), "a launch puts numbers in its place"
        if self.clip is None:
            return ()
        return tuple(self.clip) if isinstance(self.clip, list) else (self.clip,)


class ResampleBack(Model):
    """How blended values are resampled to the output's voxels."""

    order: Literal[0, 1, 3] = Field(
        1, description="0: nearest voxel. 1: linear. 3: cubic spline through the voxels"
    )
    separate_z: bool | Literal["auto"] = Field(
        False,
        description=(
            "whether the axis of the longest voxels is resampled by nearest voxels. auto: where "
            "they are more than three times as long as the shortest, as nnU-Net"
        ),
    )


def _voxels_kind(value: object) -> str:
    return "word" if isinstance(value, str) else "size"


OutputVoxels = Annotated[
    Annotated[Literal["input", "network"], Tag("word")] | Annotated[VoxelSize, Tag("size")],
    Discriminator(_voxels_kind),
]
"""Which voxels an output has: those of a volume, or of a size, ZYX, in nanometres."""


class LevelsBox(Model):
    """The bounding box of what is not zero."""

    levels: Url = Field(description="a file that beam-inference levels has made of the input")


class Bounds(Model):
    """A box, ZYX."""

    start: Point
    stop: Point

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(b <= a for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(
                f"stop {list(self.stop)} must lie beyond start {list(self.start)} on every axis "
                "(z, y, x)"
            )
        return self

    @property
    def box(self) -> BoundingBox:
        """The box."""
        return BoundingBox(self.start, self.stop)


def _box_kind(value: object) -> str:
    is_of_levels = isinstance(value, LevelsBox) or (isinstance(value, dict) and "levels" in value)
    return "levelsbox" if is_of_levels else "bounds"


class Input(Model):
    """The volume to read."""

    path: Url | None = Field(
        None, description="URL or path of a precomputed, zarr v2/v3 or n5 volume"
    )
    spec: Json | None = Field(None, description="a full TensorStore spec, instead of path")
    scale: _Scale = Field(
        0,
        description=(
            "which scale of a multiscale volume: its index, 0 the finest, or its voxel size, ZYX, "
            "nanometres"
        ),
    )
    select: dict[str, Natural] = Field(
        {}, description="position on axes other than z, y, x and channels, as {t: 0}"
    )
    channel: (
        Annotated[list[Natural], BeforeValidator(as_list, json_schema_input_type=int | list[int])]
        | None
    ) = Field(None, description="channel or channels to read; default all")
    fill: Fill = Field(
        "reflect",
        description=(
            "what lies outside the volume. reflect: its mirror image, border voxels once. "
            "symmetric: border voxels twice. edge: border voxels. constant: fill_value"
        ),
    )
    fill_value: FiniteFloat = Field(0.0, description="value for fill: constant")
    fill_units: Literal["stored", "network"] = Field(
        "stored",
        description=(
            "what fill_value is: a stored value, which is normalised as others are, or one that "
            "the network sees"
        ),
    )
    box: (
        Annotated[
            Annotated[LevelsBox, Tag("levelsbox")] | Annotated[Bounds, Tag("bounds")],
            Discriminator(_box_kind),
        ]
        | None
    ) = Field(
        None,
        description=(
            "the volume is read as if it ended there, in stored voxels: start and stop, or the box "
            "of what is not zero, from a levels file. Default: all of it"
        ),
    )
    mask: Mask | None = Field(
        None, description="where the network sees the volume, and elsewhere mask.fill_value"
    )

    resample: Resample | None = Field(
        None, description="to another voxel size than stored, on the fly; default as it is stored"
    )

    def source(self, storage: Storage) -> VolumeSource:
        """The volume to open, and what of it."""
        return VolumeSource(self.path, self.spec, self.scale, self.channel, self.select, storage)

    @property
    def network_fill(self) -> float | None:
        """What the network sees beyond the volume; None if that is made of stored values."""
        return self.fill_value if self.fill_units == "network" else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.spec is None):
            raise ValueError("give either path or spec")
        if self.spec is not None and "driver" not in self.spec:
            raise ValueError("spec is not a TensorStore spec: it has no 'driver'")
        if self.spec is not None and _spec_holds_credentials(self.spec):
            raise ValueError(
                "spec holds credentials (headers, or a URL with user:password@, a signature or a "
                "token). The job is recorded beside its output, where others can read it. See "
                "docs/object-stores.md"
            )
        if self.spec is not None and self.scale != 0:
            raise ValueError("scale has no effect beside spec: put scale_index into the spec")
        if self.fill != "constant" and self.fill_units != "stored":
            raise ValueError(
                f"fill_units has no effect with fill: {self.fill}; write fill: constant, or remove "
                "it"
            )
        if self.fill != "constant" and self.fill_value:
            raise ValueError(
                f"fill_value has no effect with fill: {self.fill}; write fill: constant, or remove "
                "it"
            )
        return self


class FurtherResample(Model):
    """How a further input is resampled to the voxels of the input, where its own are others."""

    order: Literal[0, 1, 3] = Field(
        1, description="0: nearest voxel. 1: linear. 3: cubic spline through the voxels"
    )
    separate_z: bool | Literal["auto"] = Field(
        False, description="as input.resample.separate_z, of this volume's voxels"
    )
    clip: (
        Annotated[
            Annotated[Clip, Tag("pair")] | ClipPairs,
            Discriminator(lambda value: "list" if is_list_of_lists(value) else "pair"),
        ]
        | None
    ) = Field(
        None,
        description=(
            "lowest and highest value, in stored units, before and after resampling: a pair, or a "
            "list with one for each channel of this volume"
        ),
    )

    @property
    def limits(self) -> tuple[tuple[float, float], ...]:
        """Lowest and highest value of each channel, or of all; empty where nothing is clipped."""
        if self.clip is None:
            return ()
        return tuple(self.clip) if isinstance(self.clip, list) else (self.clip,)


class FurtherInput(Model):
    """A volume over the same box as the input, whose channels the network sees after its own."""

    path: Url = Field(description="URL or path of a precomputed, zarr v2/v3 or n5 volume")
    scale: _Scale = Field(0, description="as input.scale")
    select: dict[str, Natural] = Field({}, description="as input.select")
    channel: (
        Annotated[list[Natural], BeforeValidator(as_list, json_schema_input_type=int | list[int])]
        | None
    ) = Field(None, description="channel or channels to read; default all")
    fill: Fill | None = Field(
        None, description="what lies outside the volume; default as input.fill"
    )
    fill_value: FiniteFloat | None = Field(
        None, description="value for fill: constant, in stored units; default as input.fill_value"
    )
    resample: FurtherResample | None = Field(
        None,
        description=(
            "how it is resampled where its voxels are not those that the network sees; default "
            "with the order of input.resample, else linear"
        ),
    )

    def source(self, storage: Storage) -> VolumeSource:
        """The volume to open, and what of it."""
        return VolumeSource(self.path, None, self.scale, self.channel, self.select, storage)

    def fill_beside(self, first: Input) -> tuple[Fill, float]:
        """What lies outside this volume, and the value for "constant", beside a job's input."""
        if first.network_fill is not None:
            return first.fill, 0.0
        fill = first.fill if self.fill is None else self.fill
        return fill, first.fill_value if self.fill_value is None else self.fill_value

    def resample_beside(self, first: Input) -> FurtherResample:
        """How it is resampled beside a job's input."""
        if self.resample is not None:
            return self.resample
        request = first.resample
        if request is None:
            return FurtherResample()
        return FurtherResample(order=request.order, separate_z=request.separate_z)

    def check_fill(self, first: Input) -> None:
        """Refuse a fill that has no effect beside a job's input. Raises ValueError."""
        if first.network_fill is not None and (self.fill, self.fill_value) != (None, None):
            raise ValueError(
                "fill and fill_value have no effect with input.fill_units: network, where the "
                "network sees one value beyond all volumes: remove them"
            )
        fill, _ = self.fill_beside(first)
        if fill != "constant" and self.fill_value is not None:
            raise ValueError(
                f"fill_value has no effect with fill: {fill}; write fill: constant, or remove it"
            )


def _spec_holds_credentials(spec: object) -> bool:
    if isinstance(spec, dict):
        return any(
            is_secret_name(str(key)) or _spec_holds_credentials(value)
            for key, value in spec.items()
        )
    if isinstance(spec, list):
        return any(map(_spec_holds_credentials, spec))
    return isinstance(spec, str) and holds_credentials(spec)


def _domain_kind(value: object) -> str:
    return "word" if isinstance(value, str) else "bounds"


class Roi(Bounds):
    """The box to produce."""

    context: Margin = Field(
        (0, 0, 0), description="voxels by which the patch lattice reaches beyond the ROI"
    )
    domain: (
        Annotated[
            Annotated[Literal["volume"], Tag("word")] | Annotated[Bounds, Tag("bounds")],
            Discriminator(_domain_kind),
        ]
        | None
    ) = Field(
        None,
        description=(
            "the box that the patch lattice tiles, in which a later launch may enlarge the ROI: "
            "start and stop, or volume. Default: the ROI and its context"
        ),
    )

    @model_validator(mode="after")
    def _check_domain(self) -> Self:
        if self.domain is not None and any(self.context):
            raise ValueError(
                "context is how far the lattice reaches beyond the ROI, and domain says where it "
                "lies: remove one of them"
            )
        if isinstance(self.domain, Bounds) and not self.domain.box.contains(self.box):
            raise ValueError(f"{self.box} is not inside domain, {self.domain.box} (z, y, x)")
        return self


class Pyramid(Model):
    """Coarser scales of the output, as the command ``pyramid`` makes them."""

    levels: Count | None = Field(
        None, description="how many; default until one block holds the volume"
    )
    factor: Shape | None = Field(
        None,
        description=(
            "from scale to scale, ZYX; default [1, 2, 2], say, until voxels are isotropic, then "
            "[2, 2, 2]"
        ),
    )
    method: Literal["mean", "mode"] | None = Field(
        None, description="default mode where threshold or argmax make labels, else mean"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.factor == (1, 1, 1):
            raise ValueError("factor [1, 1, 1] makes no smaller volume")
        return self


_ShardShape = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[Shape | None, Tag("shape")],
    Discriminator(lambda value: "auto" if value == "auto" else "shape"),
]


class Preview(Model):
    """A small copy of a float32 output, in few values, for a viewer."""

    scale: Shape = Field(
        description="voxels of the output along each side of a voxel, ZYX; it divides blocks"
    )
    dtype: Literal["uint8", "uint16"] = "uint8"
    value_range: Range | None = Field(
        None,
        description=(
            "what maps onto the dtype's full range; default 0 to 1 after sigmoid or softmax"
        ),
    )
    path: WritableUrl | None = Field(
        None, description="URL or path; default that of the output with _preview at its end"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.value_range is not None and self.value_range[0] >= self.value_range[1]:
            raise ValueError(
                f"value_range {list(self.value_range)} must be [low, high] with low < high"
            )
        return self


def _as_pyramid(value: object) -> object:
    if value is True:
        return {}
    if value is False:
        return None
    if value is None or isinstance(value, (dict, Pyramid)):
        return value
    raise ValueError(
        f"write true, or a mapping with {', '.join(Pyramid.model_fields)}; found "
        f"{shorten_value(value)}"
    )


class Output(Model):
    """The volume to write."""

    path: WritableUrl = Field(description="URL or path; created at launch if absent")
    head: HeadKey | None = Field(
        None,
        description="which of model.heads is written, by its key; default: all of them, joined",
    )
    format: FormatName = Field(
        "precomputed",
        description=(
            "ome_zarr is version 0.5, a group of zarr v3 arrays; ome_zarr_0.4 one of zarr v2"
        ),
    )
    dtype: Literal["float32", "uint8", "uint16", "int8", "int16", "uint32", "uint64"] = "float32"
    block_shape: Shape = Field(
        (64, 64, 64), description="voxels of a storage block, ZYX: what a reader fetches"
    )
    shard_shape: _ShardShape = Field(
        "auto",
        description=(
            "voxels of a shard, ZYX: a file of many blocks, written whole; precomputed, zarr3, "
            "ome_zarr. null: a file a block. auto: of a new precomputed volume, up to 8 blocks, as "
            "chunks allow; of others a file a block. An existing output keeps what it has"
        ),
    )
    encoding: Literal["auto", "raw", "jpeg", "png", "compressed_segmentation"] = Field(
        "auto",
        description=(
            "of precomputed blocks; jpeg is lossy, and what receipts tell is of what reads back. "
            "auto: compressed_segmentation of labels of uint32 and uint64, else raw. An existing "
            "output keeps what it has"
        ),
    )
    channel_axis: ChannelAxis = Field(
        "auto",
        description=(
            "always: arrays of one channel have an axis of channels, too; auto: of several "
            "channels only, but precomputed volumes always, and an existing output keeps its axes"
        ),
    )
    value_range: Range | None = Field(
        None,
        description=(
            "what maps onto an integer dtype's full range; 0 to 1 after sigmoid or softmax"
        ),
    )
    bounds: Bounds | None = Field(
        None, description="extent of a new output, when the ROI is only a part of it"
    )
    voxel_size_nm: OutputVoxels = Field(
        "network",
        description=(
            "the output's voxels: those that the network answers at; those of the input as it is "
            "stored; or of a size, ZYX, nanometres. Blended values are resampled to them, before "
            "postprocess"
        ),
    )
    resample: ResampleBack | None = Field(
        None, description="how blended values are resampled to voxel_size_nm; default linearly"
    )
    pyramid: Annotated[
        Pyramid | None, BeforeValidator(_as_pyramid, json_schema_input_type=bool | Pyramid | None)
    ] = Field(
        None,
        description=(
            "coarser scales, made once every chunk is done: true, or levels, factor and method"
        ),
    )

    preview: Preview | None = Field(
        None, description="a small copy beside it, written in the same pass; of float32 outputs"
    )

    @property
    def preview_path(self) -> str | None:
        """URL or path of the preview; None if there is none."""
        if self.preview is None:
            return None
        return self.preview.path or f"{self.path.rstrip('/')}_preview"

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_value_range()
        if self.resample is not None and self.voxel_size_nm == "network":
            raise ValueError(
                "resample has no effect as long as the output has the network's voxels: write "
                "voxel_size_nm: input, or [z, y, x], or remove it"
            )
        if self.preview is not None and self.voxel_size_nm != "network":
            raise ValueError(
                "preview is of an output that has the network's voxels: remove preview or "
                "voxel_size_nm"
            )
        if self.preview is not None and self.dtype != "float32":
            raise ValueError(
                f"preview is a copy of float32 values, and dtype is {self.dtype}: remove preview; "
                "pyramid makes coarser scales of any dtype"
            )
        format = get_format(self.format)
        self._check_format(format)
        self._check_shards(format)
        self._check_pyramid(format)
        return self

    @property
    def how_resampled(self) -> ResampleBack:
        """How blended values are resampled to the output's voxels, if they are other ones."""
        return self.resample or ResampleBack()

    @property
    def write_shape(self) -> Zyx:
        """Shape ZYX that is written whole by one chunk: a shard if there are any, else a block.

        As long as ``auto`` is not decided it is a block.
        """
        if self.shard_shape is None or self.shard_shape == "auto":
            return self.block_shape
        return self.shard_shape

    def _check_value_range(self) -> None:
        if self.value_range is None:
            return
        if self.dtype == "float32":
            raise ValueError(
                "value_range has no effect with dtype: float32, which is written as it is; remove "
                "it"
            )
        if self.value_range[0] >= self.value_range[1]:
            raise ValueError(
                f"value_range {list(self.value_range)} must be [low, high] with low < high"
            )

    def _check_format(self, format: Format) -> None:
        if self.encoding not in ("auto", "raw") and self.dtype not in format.encodings.get(
            self.encoding, ()
        ):
            takers = [each for each in installed_formats() if self.encoding in each.encodings]
            dtypes = sorted({dtype for each in takers for dtype in each.encodings[self.encoding]})
            raise ValueError(
                f"encoding: {self.encoding} is for {names_of(takers)} volumes of "
                f"{' or '.join(dtypes)}"
            )
        if self.dtype in format.unread_dtypes:
            raise ValueError(
                f"{format.name} volumes of {self.dtype} are not read by Neuroglancer; use zarr3 or "
                "zarr2"
            )

    def _check_shards(self, format: Format) -> None:
        if self.shard_shape is None or self.shard_shape == "auto":
            return
        if not format.has_shards:
            raise ValueError(
                f"{format.name} has no shards: remove shard_shape, or write one of "
                f"{sharded_formats()}"
            )
        if any(s % b for s, b in zip(self.shard_shape, self.block_shape, strict=True)):
            raise ValueError(
                f"shard_shape {list(self.shard_shape)} must be a multiple of block_shape "
                f"{list(self.block_shape)}"
            )

    def _check_pyramid(self, format: Format) -> None:
        if self.pyramid is None:
            return
        if not format.is_multiscale:
            raise ValueError(
                f"{format.name} is a single array, which has no place for the scales of a pyramid: "
                f"remove pyramid, or write one of {multiscale_formats()}"
            )
        if self.bounds is not None:
            raise ValueError(
                "pyramid makes scales of the whole volume, and bounds says that this job fills "
                "a part of it: remove pyramid, and give the command beam-inference pyramid once "
                "all parts are there"
            )
