"""MRC, the format of electron tomography: one channel, voxel sizes in ångström."""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any

import numpy as np

from beam_inference.conversion.file_spec import FileSpec, xyz
from beam_inference.conversion.protocol import (
    FREE,
    Placement,
    SourceInfo,
    check_shape,
    header_errors,
    import_library,
    number_dtype,
    stated_voxel_size,
)
from beam_inference.conversion.raw_array import (
    RawLayout,
    RawSource,
    check_length,
    check_packed_length,
    read_start,
)
from beam_inference.conversion.stored_files import StoredFile, suffix_of
from beam_inference.errors import VolumeError

_HEADER_BYTES = 1024
_NM_PER_ANGSTROM = 0.1
_EXTENSION_LENGTH = slice(92, 96)
_VOLUME_STACKS = range(401, 631)
_IMOD_STAMP = 1146047817
_IMOD_AT = 152
_IMOD_SIGNED = 1
_IMOD_HALF_BYTES = 16


def mrc_source(path: StoredFile) -> RawSource:
    """An ``.mrc``, ``.rec``, ``.map`` or ``.st`` file, or one compressed with gzip or bzip2.

    Raises:
        VolumeError: it cannot be read as one volume of numbers.
        ConfigError: mrcfile is not installed.
    """
    import_library("mrcfile", "MRC")
    packing = {".gz": "gzip", ".bz2": "bzip2"}.get(suffix_of(path))
    with header_errors(f"{path} is not an MRC file"), np.errstate(all="ignore"):
        return _read(path, packing)


def _read(path: StoredFile, packing: str | None) -> RawSource:
    mrcfile = import_library("mrcfile", "MRC")
    start = read_start(path, packing, _HEADER_BYTES)
    with warnings.catch_warnings():
        # Unusual header fields that do not concern the voxels.
        warnings.simplefilter("ignore")
        # mrcfile would read the extended header too, to whatever length the header states.
        alone = io.BytesIO(start[: _EXTENSION_LENGTH.start] + bytes(4) + start[96:])
        mrc = mrcfile.mrcinterpreter.MrcInterpreter(alone, permissive=True, header_only=True)
    header = mrc.header
    byteorder = header.dtype["nx"].byteorder
    dtype = mrcfile.utils.dtype_from_mode(header.mode).newbyteorder(byteorder)
    flags = _imod_flags(start, byteorder)
    if dtype == np.int8 and flags is not None:
        if flags & _IMOD_HALF_BYTES:
            raise VolumeError(
                f"{path} holds two values of 4 bits in each byte, as IMOD packs them; expected one "
                "value a byte or more. Save it as bytes first."
            )
        if not flags & _IMOD_SIGNED:  # MRC2014 itself has signed bytes only
            dtype = np.dtype(np.uint8)
    dtype_name = number_dtype(dtype, str(path))
    _check_axes(path, header)
    shape = (int(header.nz), int(header.ny), int(header.nx))
    extension = int(np.frombuffer(start[_EXTENSION_LENGTH], header.dtype["nsymbt"])[0])
    check_shape(str(path), (*shape, extension))
    layout = RawLayout(dtype.str, shape, "ZYX", _HEADER_BYTES + extension)
    if packing is None:
        check_length(path, layout)
    else:
        check_packed_length(path, packing, 0, layout)
    sizes = (mrc.voxel_size.z, mrc.voxel_size.y, mrc.voxel_size.x)
    placement = Placement(
        stated_voxel_size(float(f"{float(n) * _NM_PER_ANGSTROM:.6g}") for n in sizes),
        offset=(int(mrc.nstart.z), int(mrc.nstart.y), int(mrc.nstart.x)),
    )
    info = SourceInfo(
        placement.bounds(shape), 1, dtype_name, placement.voxel_size_nm, FREE, _notes(header)
    )
    return RawSource(path, layout, info, packing)


def _notes(header: Any) -> tuple[str, ...]:
    """Notes on what is lost of where the voxels lie."""
    angles = [float(header.cellb[name]) for name in ("alpha", "beta", "gamma")]
    if any(angle not in (0, 90) for angle in angles):
        stated = ", ".join(f"{angle:g}" for angle in angles)
        turned = (f"its axes meet at {stated} degrees, and are taken as at right angles",)
        return turned + _origin_notes(header)
    return _origin_notes(header)


def _origin_notes(header: Any) -> tuple[str, ...]:
    """A note on an origin that is lost: the offset is that of NXSTART, NYSTART and NZSTART."""
    origin = [float(header.origin[axis]) for axis in "xyz"]
    if not any(origin):
        return ()
    stated = ", ".join(f"{coordinate:g}" for coordinate in origin)
    return (f"its origin, {stated} Å (x, y, z), is not read: the offset is that of NXSTART …",)


def _check_axes(path: StoredFile, header: Any) -> None:
    """Refuse files whose axes are not x, y, z from the fastest on. Raises VolumeError."""
    order = (int(header.mapc), int(header.mapr), int(header.maps))
    is_stack = int(header.ispg) in _VOLUME_STACKS
    if is_stack or order not in ((1, 2, 3), (0, 0, 0)):
        kind = "a stack of volumes" if is_stack else f"stored in the axis order {order}"
        raise VolumeError(
            f"{path} is {kind}; expected one volume with the axis order (1, 2, 3). Save it as such "
            "first."
        )


def _imod_flags(header: bytes, byteorder: str) -> int | None:
    """What IMOD says of the bytes of a file that it wrote; None of files of others."""
    stamp, flags = struct.unpack_from(f"{'>' if byteorder == '>' else '<'}2i", header, _IMOD_AT)
    return int(flags) if stamp == _IMOD_STAMP else None


def create_mrc(path: str, spec: FileSpec) -> RawLayout:
    """Write a new file's header; the array is to follow at the offset of the layout returned."""
    mrcfile = import_library("mrcfile", "MRC")
    if not all(-(2**31) <= n < 2**31 for n in spec.bounds.start):
        raise VolumeError(
            f"MRC keeps an offset in 32 bits, which do not hold {list(spec.bounds.start)} "
            "(z, y, x). Write another format, or --drop offset."
        )
    mode = mrcfile.utils.mode_from_dtype(np.dtype(spec.dtype))
    with mrcfile.new_mmap(path, spec.bounds.shape, mrc_mode=mode, overwrite=True) as mrc:
        mrc.set_volume()
        mrc.header.mx, mrc.header.my, mrc.header.mz = spec.bounds.shape[::-1]
        if spec.voxel_size_nm is not None:
            mrc.voxel_size = tuple(size / _NM_PER_ANGSTROM for size in xyz(spec.voxel_size_nm))
        mrc.nstart = tuple(int(n) for n in xyz(spec.bounds.start))
    return spec.layout(_HEADER_BYTES)
