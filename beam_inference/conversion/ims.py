"""IMS, the files of Imaris: HDF5 with a dataset for each scale, time and channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.conversion.hdf5 import Hdf5Source, hdf5_dataset
from beam_inference.conversion.hdf5_file import as_argument, file_of_argument, open_file
from beam_inference.conversion.planes import Image, choose_volume
from beam_inference.conversion.process_apart import run_apart
from beam_inference.conversion.protocol import (
    Read,
    SourceInfo,
    Voxels,
    check_shape,
    header_errors,
    import_library,
    stated_voxel_size,
)
from beam_inference.conversion.stored_files import StoredFile, file_identity
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, triple
from beam_inference.volumes.axes import length_nm

_INFO = "DataSetInfo/Image"
_LEVEL = "DataSet/ResolutionLevel {}"
_MOST_GROUPS = 100_000
_MOST_CHANNELS = 1000


@dataclass(frozen=True, slots=True)
class ImsSource:
    """A volume of an Imaris file: a scale of a time.

    Attributes:
        path: the file.
        channels: the dataset of each channel; its extent is rounded up to whole blocks.
        info: its extent, dtype, and so on.
    """

    path: StoredFile
    channels: tuple[Hdf5Source, ...]
    info: SourceInfo

    @property
    def identity(self) -> Json:
        """Path, size and time of the file, and the datasets' names."""
        return file_identity(self.path) | {"datasets": [each.dataset for each in self.channels]}

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels."""
        return [file for channel in self.channels for file in channel.files]

    def open(self) -> Read:
        """Open the file."""
        reads = [channel.open() for channel in self.channels]

        def read(box: BoundingBox) -> Voxels:
            return np.concatenate([read_channel(box) for read_channel in reads])

        return read


def ims_source(path: StoredFile, name: str | None, scale: int) -> ImsSource:
    """A volume of an ``.ims`` file; with several times, "T0", "T1" and so on.

    Args:
        path: path of the file.
        name: name of the volume; None if there is one alone.
        scale: number of its scale, which Imaris calls a resolution level.

    Raises:
        VolumeError: it cannot be read as one volume of numbers.
        ConfigError: there is no such scale, or h5py is not installed.
    """
    import_library("h5py", "IMS")
    complaint = f"{path} cannot be read as IMS"
    arguments = [as_argument(path), str(scale), *([] if name is None else [name])]
    run_apart(complaint, __name__, try_volume.__name__, *arguments)
    with header_errors(complaint):
        return _describe(path, name, scale)


def try_volume(argument: str, scale: str, name: str | None = None) -> None:
    """Read what :func:`ims_source` reads, and where the chunks of its datasets lie.

    Args:
        argument: the file, as :func:`~beam_inference.conversion.hdf5_file.as_argument` has it.
        scale: number of its scale.
        name: name of the volume; None if there is one alone.
    """
    path = file_of_argument(argument)
    source = _describe(path, name, int(scale))
    with open_file(path) as file:
        for channel in source.channels:
            dataset = file[channel.dataset]
            if dataset.chunks:
                dataset.id.get_num_chunks()


def _describe(path: StoredFile, name: str | None, scale: int) -> ImsSource:
    with open_file(path) as file:
        levels = _count(path, _group(path, file, "DataSet"), "ResolutionLevel")
        if not levels:
            raise VolumeError(
                f"{path} has no group DataSet/ResolutionLevel 0: it is no Imaris file"
            )
        if scale >= levels:
            raise ConfigError(f"--scale {scale}: {path} has the scales 0 … {levels - 1}")
        level = _LEVEL.format(scale)
        times = _count(path, _group(path, file, level), "TimePoint")
        further = (("T", times),) if times > 1 else ()
        chosen = choose_volume(str(path), [Image("", further)], name)
        place = f"{level}/TimePoint {chosen.positions.get('T', 0)}"
        count = _count(path, _group(path, file, place), "Channel")
        if not 1 <= count <= _MOST_CHANNELS:
            raise VolumeError(f"{path} has {count} channels at {place}: it is damaged")
        groups = [_group(path, file, f"{place}/Channel {n}") for n in range(count)]
        sizes = {_extent(group, "ImageSize") for group in groups}
        extents = _physical_extents(_group(path, file, _INFO))
    if len(sizes) > 1:
        raise VolumeError(f"{path} states several sizes of its channels at {place}: {sizes}")
    (size,) = sizes
    check_shape(str(path), size)
    channels = tuple(hdf5_dataset(path, f"{place}/Channel {n}/Data") for n in range(count))
    first = channels[0].info
    if any(each.axes != "ZYX" or any(each.info.bounds.start) for each in channels):
        raise VolumeError(
            f"{path} has datasets at {place} that are not of z, y, x from 0, as Imaris writes "
            "them: other axes or an offset are stated. Convert such a dataset as HDF5, from a "
            "copy of the file named .h5."
        )
    if any(each.info != first for each in channels) or any(
        n > m for n, m in zip(size, first.bounds.shape, strict=True)
    ):
        raise VolumeError(
            f"{path} has channels of several dtypes or shapes at {place}, or fewer voxels than it "
            "states: it is damaged"
        )
    if any(
        m > -(-n // block) * block
        for n, m, block in zip(size, first.bounds.shape, first.grain, strict=True)
    ):
        raise VolumeError(
            f"{path} states {size} voxels (z, y, x) at {place}, and holds {first.bounds.shape}, in "
            f"blocks of {first.grain}: more than whole blocks take. It is damaged, or was changed. "
            "Copy it again, or convert the dataset as HDF5, from a copy of the file named .h5."
        )
    info = SourceInfo(
        BoundingBox((0, 0, 0), size),
        count,
        first.dtype,
        _voxel_size(extents, size),
        first.grain,
    )
    return ImsSource(path, channels, info)


def _group(path: StoredFile, file: Any, name: str) -> Any:
    """A group of a file, of a path in it; None if there is none.

    Raises:
        VolumeError: a link is on the way, which HDF5 would follow anywhere on the machine.
    """
    h5py = import_library("h5py", "IMS")
    group = file
    for part in name.split("/"):
        link = group.get(part, getlink=True) if isinstance(group, h5py.Group) else None
        if link is None:
            return None
        if not isinstance(link, h5py.HardLink):
            raise VolumeError(
                f"{path} has a link in place of the group {part} of {name}: Imaris writes none, "
                "and it is not followed. Copy what it leads to into the file."
            )
        group = group[part]
    return group


def _count(path: StoredFile, group: Any, kind: str) -> int:
    """How many groups "kind 0", "kind 1", … there are.

    Raises:
        VolumeError: a number is left out.
    """
    count = 0
    while group is not None and f"{kind} {count}" in group:
        count += 1
    if group is not None and len(group) > count:
        later = [name for name in islice(group, _MOST_GROUPS) if _is_after(name, kind, count)]
        if later:
            raise VolumeError(
                f"{path} has the group {group.name}/{later[0]}, and no {kind} "
                f"{count}: it is damaged, or was changed. Copy it again."
            )
    return count


def _is_after(name: str, kind: str, number: int) -> bool:
    stated = name.removeprefix(f"{kind} ")
    return stated != name and stated.isdecimal() and int(stated) > number


def _extent(group: Any, key: str) -> Zyx:
    """A size that a group states, ZYX.

    Raises:
        ValueError: it is not positive.
    """
    size = triple(int(_text(group, f"{key}{axis}")) for axis in "ZYX")
    if min(size) < 1:
        raise ValueError(f"it states a size of {size} (z, y, x)")
    return size


def _physical_extents(info: Any) -> list[float]:
    """The extents along z, y and x in nanometres; empty where they are not stated."""
    try:
        unit_nm = length_nm(_text(info, "Unit").lower())
        if unit_nm is None:
            return []
        return [
            (float(_text(info, f"ExtMax{axis}")) - float(_text(info, f"ExtMin{axis}"))) * unit_nm
            for axis in (2, 1, 0)
        ]
    except (KeyError, ValueError, TypeError):
        return []


def _voxel_size(extents: list[float], shape: Zyx) -> VoxelSizeNm | None:
    if not extents:
        return None
    return stated_voxel_size(
        float(f"{extent / n:.7g}") for extent, n in zip(extents, shape, strict=True)
    )


def _text(group: Any, key: str) -> str:
    """An attribute, which Imaris writes as an array of single letters."""
    attribute = group.attrs.get_id(key)
    if attribute.dtype.kind != "S" or attribute.dtype.itemsize > 1 or attribute.shape == ():
        raise ValueError(f"the attribute {key} is no text")
    return b"".join(np.ravel(group.attrs[key])).decode(errors="replace").strip("\0 ")
