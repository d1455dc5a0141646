"""Files of instruments: images of planes, each read whole, and the volumes that a file holds.

Such files hold several images, with further axes such as time: each position on these is a volume
of its own, which has a name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.conversion.process_apart import run_apart
from beam_inference.conversion.protocol import Read, SourceInfo, Voxels, header_errors
from beam_inference.conversion.stored_files import StoredFile, file_identity
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.foreign_text import clean_line, describe_error
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.block_memory import check_block_memory

ReadPlane: TypeAlias = Callable[[int, BoundingBox], Voxels]
"""Reads a window of a plane, by its number along z: (channels, y, x).

The window is in the volume's own voxels; its extent along z is not looked at.
"""

_NAMES_IN_MESSAGE = 10
_MICROMETRE_NM = 1e3


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a file.

    Attributes:
        name: its name; empty where the file holds one image without a name.
        further: letters and lengths of its axes that no volume has, such as ("T", 5) of time.
    """

    name: str
    further: tuple[tuple[str, int], ...] = ()

    def volumes(self) -> Iterator[str]:
        """The names of its volumes: "Series001", or "Series001/T0" and so on."""
        # One by one: a header may speak of more positions than there is memory for.
        for number in range(math.prod(length for _, length in self.further)):
            rest = number
            parts = []
            for axis, length in reversed(self.further):
                rest, position = divmod(rest, length)
                parts.append(f"{axis}{position}")
            yield "/".join([self.name, *reversed(parts)] if self.name else reversed(parts))

    def positions_of(self, volume: str) -> dict[str, int] | None:
        """The positions on the further axes that a volume's name stands for; None if on none."""
        pattern = "/".join([re.escape(self.name)] * bool(self.name))
        for axis, _ in self.further:
            pattern += f"{'/' if pattern else ''}{re.escape(axis)}([0-9]{{1,9}})"
        match = re.fullmatch(pattern, volume)
        if match is None:
            return None
        positions = dict(
            zip((axis for axis, _ in self.further), map(int, match.groups()), strict=True)
        )
        is_inside = all(positions[axis] < length for axis, length in self.further)
        return positions if is_inside else None


@dataclass(frozen=True, slots=True)
class ChosenVolume:
    """A volume of a file.

    Attributes:
        name: its name.
        image: number of its image.
        positions: on the image's further axes, by their letters.
    """

    name: str
    image: int
    positions: dict[str, int]


def choose_volume(path: str, images: Sequence[Image], name: str | None) -> ChosenVolume:
    """Choose a volume of a file by its name; none is needed where there is one volume.

    Raises:
        VolumeError: there is none of that name, or several; or there are several volumes, and none
            was named.
    """
    if name is None:
        names = list(itertools.islice(_volume_names(images), 2))
        if len(names) != 1:
            raise VolumeError(
                f"{path} holds {enumerate_volumes(images)}: name one with --dataset NAME"
            )
        name = names[0]
    found = [
        ChosenVolume(name, number, positions)
        for number, image in enumerate(images)
        if (positions := image.positions_of(name)) is not None
    ]
    if not found:
        raise VolumeError(
            f"{path} has no volume {clean_line(name)}; it holds {enumerate_volumes(images)}"
        )
    if len(found) > 1:
        raise VolumeError(
            f"{path} has {len(found)} volumes of the name {name}, as an image's name ends like a "
            "position on an axis: give that image another name, with the microscope's software"
        )
    return found[0]


def _volume_names(images: Sequence[Image]) -> Iterator[str]:
    return itertools.chain.from_iterable(image.volumes() for image in images)


def enumerate_volumes(images: Sequence[Image]) -> str:
    """The names of the first few volumes, and how many there are."""
    count = sum(math.prod(length for _, length in image.further) for image in images)
    names = list(itertools.islice(_volume_names(images), _NAMES_IN_MESSAGE))
    if not names:
        return "no volume"
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return f"the volumes {', '.join(map(clean_line, names))}{more}"


@dataclass(frozen=True, slots=True)
class PlaneSource:
    """A volume in the file of an instrument.

    Attributes:
        path: path of the file.
        volume: name of the volume in it.
        info: its extent, dtype, and so on.
        open_planes: opens the file, once per process, for reading planes of the volume of a name.
    """

    path: str
    volume: str
    info: SourceInfo
    open_planes: Callable[[str, str], ReadPlane]

    @property
    def identity(self) -> Json:
        """Path, size and time of the file, and the volume's name."""
        return file_identity(self.path) | {"volume": self.volume}

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels."""
        return [self.path]

    def open(self) -> Read:
        """Open the file."""
        read_plane = self.open_planes(self.path, self.volume)

        def read(box: BoundingBox) -> Voxels:
            out = np.empty((self.info.channels, *box.shape), self.info.dtype)
            for z in range(box.start[0], box.stop[0]):
                try:
                    plane = read_plane(z, box)
                    if plane.dtype.newbyteorder("=") != out.dtype:
                        raise ValueError(f"it holds {plane.dtype}, and the first {out.dtype}")
                    out[:, z - box.start[0]] = plane
                except Exception as error:  # libraries raise whatever a value runs into
                    reason = describe_error(error, with_type=False)
                    raise PermanentReadError(
                        f"cannot read plane {z} of {self.path}: {reason}. The file is damaged, or "
                        "was cut off: copy it again."
                    ) from error
            return out

        return read


def instrument_source(
    path: str,
    kind: str,
    name: str | None,
    describe: Callable[[str, str | None], PlaneSource],
) -> PlaneSource:
    """The volume of a name in the file of an instrument.

    Args:
        path: path of the file.
        kind: name of the format, for messages.
        name: name of the volume; None if there is one alone.
        describe: reads the file's header; a function of a module. It is called in a process apart
            first.

    Raises:
        VolumeError: it cannot be read as one volume of numbers.
    """
    complaint = f"{path} cannot be read as {kind}"
    function = f"{describe.__module__}:{describe.__name__}"
    run_apart(
        complaint,
        __name__,
        try_first_plane.__name__,
        function,
        path,
        *([] if name is None else [name]),
    )
    with header_errors(complaint):
        source = describe(path, name)
        check_block_memory(path, source.info.grain, source.info.itemsize)
        return source


def try_first_plane(function: str, path: str, name: str | None = None) -> None:
    """Describe a file, and read its first plane, to see whether its library survives that."""
    import importlib

    module, _, attribute = function.partition(":")
    describe = getattr(importlib.import_module(module), attribute)
    with header_errors(path):
        source: PlaneSource = describe(path, name)
        info = source.info
        check_block_memory(path, info.grain, info.itemsize)
        start = info.bounds.start
        source.open()(BoundingBox(start, (start[0] + 1, *info.bounds.stop[1:])))


def nm_of_micrometres(micrometres: float) -> float:
    """A length in nanometres, without the digits that binary fractions add."""
    return float(f"{float(micrometres) * _MICROMETRE_NM:.9g}")
