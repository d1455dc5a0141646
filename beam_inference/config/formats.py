"""Formats of volumes: what each can hold, and what the metadata of a new volume say.

A format is one value of :class:`Format`, installed under its name as an entry point
``beam_inference.formats``. Whoever has to tell formats apart asks the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import AfterValidator, GetJsonSchemaHandler, Strict
from pydantic_core import CoreSchema

from beam_inference.config.fields import Json, meant_hint
from beam_inference.config.plugins import list_plugins, load_plugin, load_usable
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import NO_REST, Rest
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

ChannelAxis: TypeAlias = Literal["auto", "always"]
"""Whether arrays have an axis of channels: "auto" of several channels only, or "always"."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """Everything about an output volume that is decided before it is made.

    Attributes:
        url: where it lies.
        format: name of its format.
        dtype: name of the stored dtype.
        channels: number of channels; all channels of a voxel are in one block.
        bounds: its extent, ZYX; volumes of formats without offset start at 0.
        block_shape: ZYX, what is read at once.
        voxel_size_nm: ZYX.
        storage: how object stores are reached.
        encoding: of blocks: "raw", or one of those that the format has.
        shard_shape: ZYX, a file of many blocks, for formats that have shards; None for a file a
            block.
        labels: whether values are names of objects, which readers colour, and never average.
        rest: part of a voxel by which the volume begins beyond ``bounds``, where its format can
            state that.
        channel_axis: whether an array of one channel has an axis of channels all the same.
    """

    url: str
    format: str
    dtype: str
    channels: int
    bounds: BoundingBox
    block_shape: Zyx
    voxel_size_nm: VoxelSizeNm
    storage: Storage = field(default_factory=Storage)
    encoding: str = "raw"
    shard_shape: Zyx | None = None
    labels: bool = False
    rest: Rest = NO_REST
    channel_axis: ChannelAxis = "auto"

    @property
    def axes(self) -> str:
        """Names of the axes of a new array, where a format may do without that of channels."""
        return "zyx" if self.channels == 1 and self.channel_axis == "auto" else "czyx"

    def along_axes(self, channels: int, zyx: Zyx) -> list[int]:
        """An extent of channels and extents in space, as far as a new array has these axes."""
        return [channels, *zyx][-len(self.axes) :]

    @property
    def write_shape(self) -> Zyx:
        """The unit of writing, ZYX: a shard where there are any, else a block."""
        return self.shard_shape or self.block_shape


def _no_files(_: OutputSpec) -> dict[str, Json]:
    return {}


def _no_shards(_shape: Zyx, _block_shape: Zyx) -> Sequence[Zyx]:
    return ()


@dataclass(frozen=True, slots=True)
class ProvenancePlace:
    """Where the metadata of a volume tell how it was made: a list in one JSON file.

    Attributes:
        file: path of that file, relative to the volume.
        entries: the list in the file's object, which is ``{}`` where the file is absent. Raises
            ValueError where something else stands in its place.
        with_entries: the object with another list, and all else as it was.
    """

    file: str
    entries: Callable[[Json], list[Json]]
    with_entries: Callable[[Json, list[Json]], Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of volumes that TensorStore reads and writes.

    Attributes:
        name: the name by which job files choose it.
        driver: TensorStore's name of the driver of its arrays.
        metadata: what TensorStore creates a volume from beside driver and place: members of its
            spec, such as ``{"metadata": {…}}``. Raises AlignmentError where there can be no such
            shards.
        markers: files by which such a volume is recognised, relative to its URL.
        suffixes: endings of names that ask for this format where none is said.
        group: what a group of arrays is detected as, see :func:`~.detection.volume_at`; None where
            the volume is one array, or TensorStore knows its scales by itself.
        array_path: path of the finest array inside the volume, for groups of arrays.
        array_files: JSON files, by path, to be written before the array is created.
        group_files: JSON files, by path, to be written once the array is there.
        is_multiscale: whether it has a place for coarser scales.
        has_offset: whether it may start at other voxels than 0.
        has_shards: whether many blocks may lie in one file.
        clips_shards: whether shards end with the volume's last block.
        usual_shards: shapes, ZYX, of the shards that a new volume may have where none is asked for,
            the smallest first, from the volume's shape and a block's; none for a file a block.
        encodings: beside "raw", how blocks may be encoded, and the dtypes that each takes.
        label_encoding: encoding of labels where none is asked for, if it takes their dtype.
        unread_dtypes: dtypes that it could hold, but readers do not understand.
        viewer: Neuroglancer's name of the format of its arrays; None where it has none.
        provenance: where its metadata tell how a volume was made; None where they have no place
            for that.
    """

    name: str
    driver: str
    metadata: Callable[[OutputSpec], Json]
    markers: tuple[str, ...]
    suffixes: tuple[str, ...] = ()
    group: str | None = None
    array_path: str = ""
    array_files: Callable[[OutputSpec], dict[str, Json]] = _no_files
    group_files: Callable[[OutputSpec], dict[str, Json]] = _no_files
    is_multiscale: bool = False
    has_offset: bool = False
    has_shards: bool = False
    clips_shards: bool = False
    usual_shards: Callable[[Zyx, Zyx], Sequence[Zyx]] = _no_shards
    encodings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_encoding: str = "raw"
    unread_dtypes: tuple[str, ...] = ()
    viewer: str | None = None
    provenance: ProvenancePlace | None = None

    def usual_encoding(self, dtype: str, channels: int, *, labels: bool) -> str:
        """Encoding of the blocks of a new volume where none is asked for.

        Args:
            dtype: name of the stored dtype.
            channels: number of channels.
            labels: whether values are names of objects.
        """
        takes_labels = dtype in self.encodings.get(self.label_encoding, ())
        return self.label_encoding if labels and channels == 1 and takes_labels else "raw"

    @property
    def kind(self) -> str:
        """What volumes of this format are detected as: a driver, or a kind of group."""
        return self.group or self.driver


def get_format(name: str) -> Format:
    """Get the installed format of a name.

    Raises:
        ConfigError: there is none, or it is none.
    """
    if name not in list_plugins("formats"):
        raise ConfigError(
            f"'{name}' is not among the installed formats: {', '.join(list_plugins('formats'))}"
            f"{meant_hint(name, list_plugins('formats'))}"
        )
    loaded = load_plugin("formats", name)
    if not isinstance(loaded, Format) or loaded.name != name:
        raise ConfigError(
            f"{name} is installed as {list_plugins('formats')[name].object}, which is not a "
            f"beam_inference.config.formats.Format of the name {name}"
        )
    return loaded


def installed_formats() -> list[Format]:
    """All installed formats, in alphabetical order; a broken one is left out with a warning."""
    return list(load_usable("formats", get_format).values())


def names_of(formats: Iterable[Format]) -> str:
    """Names of formats as text, for messages."""
    return ", ".join(each.name for each in formats)


def offset_formats() -> str:
    """Names of the installed formats that may start at any voxel, for messages."""
    return names_of(each for each in installed_formats() if each.has_offset)


def sharded_formats() -> str:
    """Names of the installed formats that have shards, for messages."""
    return names_of(each for each in installed_formats() if each.has_shards)


def multiscale_formats() -> str:
    """Names of the installed formats that have a place for coarser scales, for messages."""
    return names_of(each for each in installed_formats() if each.is_multiscale)


def _check_name(name: str) -> str:
    try:
        return get_format(name).name
    except ConfigError as error:
        raise ValueError(str(error)) from None


class _ListInstalled:
    """Lists the installed formats in a JSON schema."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "enum": list(list_plugins("formats"))}


FormatName = Annotated[str, Strict(), AfterValidator(_check_name), _ListInstalled()]
"""The name of an installed format, as a field of a model."""
