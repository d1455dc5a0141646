"""NumPy's own files: ``.npy``, and ``.npz`` with one array or several, one of which is named."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.protocol import (
    FREE,
    SourceInfo,
    check_shape,
    header_errors,
    number_dtype,
)
from beam_inference.conversion.raw_array import RawLayout, RawSource, check_length
from beam_inference.conversion.stored_files import StoredFile, open_stream
from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox

_AXES = {2: "YX", 3: "ZYX", 4: "CZYX"}
_NAMES_IN_MESSAGE = 10
_HEADER_BYTES = 2**17
"""Bytes that are read for a header: NumPy refuses those of more than 10,000 characters."""


def npy_source(path: StoredFile) -> RawSource:
    """A ``.npy`` file with the axes (channels,) z, y, x, or y, x.

    Raises:
        VolumeError: it holds no such array.
    """
    with open_stream(path) as file:
        layout = _layout(file, str(path))
    check_length(path, layout)
    return _source(path, layout, None)


def npz_source(path: StoredFile, name: str | None) -> RawSource:
    """The array ``name`` of a ``.npz`` archive, or its only one.

    Raises:
        VolumeError: there is no such array, or it is no volume of numbers.
    """
    with (
        header_errors(f"{path} is not an .npz archive"),
        open_stream(path) as stream,
        zipfile.ZipFile(stream) as archive,
    ):
        members = {entry.removesuffix(".npy"): entry for entry in archive.namelist()}
        is_clear = len(members) == 1 if name is None else name in members
        if not is_clear:
            missing = f", not {name}" if name else ""
            names = ", ".join(list(members)[:_NAMES_IN_MESSAGE]) or "nothing"
            raise VolumeError(f"{path} holds {names}{missing}: name one with --dataset")
        member = members[name or next(iter(members))]
        with archive.open(member) as file:
            layout = _layout(file, f"{path}:{member}")
        _check_member(path, archive.getinfo(member), layout)
    return _source(path, layout, member)


def _check_member(path: StoredFile, member: zipfile.ZipInfo, layout: RawLayout) -> None:
    """Refuse a member whose length is not what its header requires. Raises VolumeError."""
    if member.file_size != layout.stop:
        raise VolumeError(
            f"{path}:{member.filename} has {member.file_size} bytes, but its header requires "
            f"{layout.stop}: it is damaged. Copy or save it again."
        )


def _layout(file: IO[bytes], name: str) -> RawLayout:
    header = io.BytesIO(file.read(_HEADER_BYTES))
    with header_errors(f"{name} is not an array of numbers as NumPy saves it"):
        version = np.lib.format.read_magic(header)
        reads = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in reads:
            raise ValueError(f"its version is {version}; expected 1.0 or 2.0")
        shape, fortran, dtype = reads[version](header)
        check_shape(name, shape)
    number_dtype(dtype, name)
    if len(shape) not in _AXES:
        raise VolumeError(f"{name} has the shape {shape}; expected z, y, x, or channels, z, y, x")
    axes = _AXES[len(shape)]
    if fortran:
        shape = shape[::-1]
        axes = axes[::-1]
    return RawLayout(dtype.str, shape, axes, header.tell())


def _source(path: StoredFile, layout: RawLayout, packing: str | None) -> RawSource:
    extent = dict(zip(layout.axes, layout.shape, strict=True))
    bounds = BoundingBox((0, 0, 0), (extent.get("Z", 1), extent["Y"], extent["X"]))
    dtype = number_dtype(np.dtype(layout.dtype), str(path))
    return RawSource(
        path, layout, SourceInfo(bounds, extent.get("C", 1), dtype, None, FREE), packing
    )


def create_npy(path: str, spec: FileSpec) -> RawLayout:
    """Write a new file's header; the array is to follow at the offset of the layout returned."""
    header = {"descr": spec.layout(0).dtype, "fortran_order": False, "shape": spec.shape}
    with Path(path).open("wb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        return spec.layout(file.tell())
