"""NIfTI: medical images with an affine, axes x, y, z in the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.conversion.file_spec import FileSpec, xyz
from beam_inference.conversion.protocol import (
    FREE,
    Placement,
    SourceInfo,
    check_shape,
    header_errors,
    import_library,
    number_dtype,
    placement_in_space,
    stated_voxel_size,
    voxel_offset,
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
from beam_inference.geometry.zyx import VoxelSizeNm

_NM = {"meter": 1e9, "mm": 1e6, "unknown": 1e6, "micron": 1e3}
"""Nanometres of a unit, by nibabel's names; without a unit, every reader takes millimetres."""
_HEADER_BYTES = 540  # of NIfTI-2, the longer one
_LONGEST_AXIS = 2**15 - 1  # of NIfTI-1
_VECTOR = 1007


def nifti_source(path: StoredFile) -> RawSource:
    """A ``.nii`` or ``.nii.gz`` file; a fourth or fifth axis is that of channels.

    The voxels keep their stored order, whatever the affine says of their orientation.

    Raises:
        VolumeError: it cannot be read as a volume of numbers.
        ConfigError: nibabel is not installed.
    """
    nibabel = import_library("nibabel", "NIfTI")
    complaint = f"{path} is not a NIfTI file"
    # it would print each fault of a header before it raises the first
    with header_errors(complaint), nibabel.imageglobals.LoggingOutputSuppressor():
        return _read(path, "gzip" if suffix_of(path) == ".gz" else None)


def _read(path: StoredFile, packing: str | None) -> RawSource:
    header = _header(path, packing)
    stored = header.get_data_dtype()
    dtype = number_dtype(stored, str(path))
    shape = tuple(int(n) for n in header.get_data_shape())
    check_shape(str(path), shape)
    further = [n for n in shape[3:] if n > 1]
    if len(shape) < 2 or len(further) > 1:
        raise VolumeError(
            f"{path} has the shape {shape}; expected x, y, z and at most one more axis, of channels"
        )
    channels = further[0] if further else 1
    x, y, z = (*shape[:3], 1)[:3]
    layout = RawLayout(stored.str, (channels, z, y, x), "CZYX", _data_offset(header))
    placement = _placement(header)
    notes = placement.notes
    slope, intercept = header.get_slope_inter()
    scaling = (1.0, 0.0) if slope is None else (float(slope), float(intercept))
    is_scaled = scaling != (1.0, 0.0)
    if is_scaled:
        dtype = "float32"
        notes += (
            f"values are the stored {stored.name} × {scaling[0]:g} + {scaling[1]:g}, as its "
            "header says, in float32",
        )
    if packing is None:
        check_length(path, layout)
    else:
        check_packed_length(path, packing, 0, layout)
    info = SourceInfo(
        placement.bounds((z, y, x)),
        channels,
        dtype,
        placement.voxel_size_nm,
        FREE,
        (*notes, _ORDER),
    )
    return RawSource(path, layout, info, packing, scaling=scaling if is_scaled else None)


_ORDER = (
    "its axes, x, y, z in arrays of nibabel, become z, y, x: a job of a network that was trained "
    "on such arrays says model.axes: xyz"
)
"""What is told of every file."""


def _header(path: StoredFile, packing: str | None) -> Any:
    """The header alone: nibabel would read what follows it to whatever length that states."""
    nibabel = import_library("nibabel", "NIfTI")
    start = read_start(path, packing, _HEADER_BYTES)
    for kind in (nibabel.Nifti1Header, nibabel.Nifti2Header):
        if kind.may_contain_header(start):
            return kind(start[: kind.sizeof_hdr])
    raise VolumeError(f"{path} is not a NIfTI file: it does not begin with a header of one")


def _data_offset(header: Any) -> int:
    """Position of the array in the unpacked file.

    Raises:
        ValueError: the header is of a pair of files, or the array would lie in it.
    """
    offset = int(header.get_data_offset())
    is_single = header["magic"].item() == header.single_magic
    if not is_single or offset < header.single_vox_offset:
        raise ValueError(
            f"its array would begin at byte {offset}; expected one file with the array behind the "
            f"header, at byte {header.single_vox_offset} or later"
        )
    return offset


def _placement(header: Any) -> Placement:
    zooms = np.array([float(zoom) for zoom in header.get_zooms()[:3]])
    unit_nm = _unit_nm(header)
    if len(zooms) < 3 or unit_nm is None:
        return Placement(None)
    stated = _size_nm(zooms, unit_nm)
    if not (int(header["sform_code"]) or int(header["qform_code"])):
        return Placement(stated)
    affine = header.get_best_affine()
    spacings = np.linalg.norm(affine[:3, :3], axis=0)
    size = _size_nm(spacings, unit_nm)
    if size is None:
        return Placement(stated)
    notes: tuple[str, ...] = ()
    if stated is not None and np.allclose(size, stated, rtol=1e-3, atol=0):
        size = stated  # an affine has its rounding
    elif stated is not None:
        text = " × ".join(f"{n:g}" for n in stated)
        notes = (f"the voxel size is that of its affine; its pixdim says {text} nm (z, y, x)",)
    placement = placement_in_space(size, affine[:3, :3].T, spacings, affine[:3, 3])
    return replace(placement, notes=placement.notes + notes)


def _check_place(affine: AnyArray, spec: FileSpec) -> None:
    """Refuse a voxel size or an offset that is another one in the numbers of 32 bits of the format.

    Raises:
        VolumeError: it is.
    """
    spacings = affine.diagonal()[:3]
    stored = None
    if np.isfinite(affine).all() and (spacings > 0).all():
        stored = voxel_offset(tuple(affine[:3, 3][::-1]), tuple(spacings[::-1]))
    if stored != spec.bounds.start:
        raise VolumeError(
            f"NIfTI keeps positions in 32 bits, which do not hold the offset "
            f"{list(spec.bounds.start)} (z, y, x) at this voxel size. Write another format, or "
            "--drop offset."
        )


def _size_nm(spacings: AnyArray, unit_nm: float) -> VoxelSizeNm | None:
    """The voxel size, ZYX, of steps along x, y, z in a unit; None if they are no lengths."""
    return stated_voxel_size(float(f"{spacing * unit_nm:.6g}") for spacing in spacings[::-1])


def _unit_nm(header: Any) -> float | None:
    """Nanometres of the header's unit; None of a code that stands for none."""
    try:
        return _NM[header.get_xyzt_units()[0]]
    except KeyError:
        return None


def create_nifti(path: str, spec: FileSpec) -> RawLayout:
    """Write a new file's header; the array is to follow at the offset of the layout returned."""
    nibabel = import_library("nibabel", "NIfTI")
    is_long = max(spec.bounds.shape) > _LONGEST_AXIS or spec.channels > _LONGEST_AXIS
    header = (nibabel.Nifti2Header if is_long else nibabel.Nifti1Header)(endianness="<")
    header.set_data_dtype(np.dtype(spec.dtype))
    z, y, x = spec.bounds.shape
    header.set_data_shape((x, y, z) if spec.channels == 1 else (x, y, z, 1, spec.channels))
    if spec.channels > 1:
        header["intent_code"] = _VECTOR
    if spec.voxel_size_nm is not None:
        unit = "mm" if min(spec.voxel_size_nm) >= 1e4 else "micron"
        sizes = [size / _NM[unit] for size in xyz(spec.voxel_size_nm)]
        header.set_zooms((*sizes, *[1.0] * (len(header.get_data_shape()) - 3)))
        header.set_xyzt_units(unit, "unknown")
        affine = np.diag([*sizes, 1.0])
        affine[:3, 3] = [n * size for n, size in zip(xyz(spec.bounds.start), sizes, strict=True)]
        _check_place(affine.astype(np.float32), spec)
        header.set_sform(affine, 1)
        header.set_qform(affine, 1)
    header.set_slope_inter(1, 0)
    offset = 544 if is_long else 352  # the header, and four bytes that say there is no extension
    header["magic"] = header.single_magic
    header.set_data_offset(offset)
    with Path(path).open("wb") as file:
        file.write(header.binaryblock + bytes(4))
    return spec.layout(offset)
