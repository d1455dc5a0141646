"""Stored volumes as a job's network sees them: at another voxel size, and behind a mask."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import tensorstore as ts

from beam_inference import arrays
from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.volumes import OutputVoxels, Resample, ResampleBack
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.fill import Fill
from beam_inference.geometry.origin import Origin
from beam_inference.geometry.resampling import (
    Grid,
    Order,
    Resampling,
    coarse_axis,
    extend_to_cells,
    make_resampling,
)
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, ceil_div, subtract
from beam_inference.limits import Numbers, maximum, minimum
from beam_inference.volumes.kvstores import TRANSFER_SECONDS
from beam_inference.volumes.mask import Mask
from beam_inference.volumes.opening import tell_rest_of_voxels
from beam_inference.volumes.volume import Volume

logger = logging.getLogger(__name__)

_FLOAT_BYTES = 4
"""Bytes of a float32."""

_LEAST_OF_WANTED = 0.5
"""Share of a voxel's wanted size below which no rounding to whole voxels leads."""


@dataclass(frozen=True)
class InputVolume(Volume):
    """A volume that reads as if it had been resampled, and then masked, before it was stored.

    Bounds, voxel size and dtype are those of what is read; ``store`` is the stored array.

    Attributes:
        stored: the volume as it is stored.
        resampling: from its voxels to those that are read; None where they are the same.
        limits: lowest and highest stored value of each channel, or of all, before and after
            resampling; empty for none.
        mask: where the volume is kept; None if it is everywhere.
        whole: bounds of all that is stored, where the job reads a box of it; else None.
        further: volumes whose channels follow in a cutout. All else is of this volume alone.
        inside: where the object is that these volumes show, of one channel; None where that is not
            asked for.
    """

    stored: Volume = field(kw_only=True)
    resampling: Resampling | None = field(default=None, kw_only=True)
    limits: tuple[tuple[float, float], ...] = field(default=(), kw_only=True)
    mask: Mask | None = field(default=None, kw_only=True)
    whole: BoundingBox | None = field(default=None, kw_only=True)
    further: tuple[FurtherVolume, ...] = field(default=(), kw_only=True)
    inside: InputVolume | None = field(default=None, kw_only=True)

    @property
    def volumes(self) -> list[InputVolume]:
        """This volume, and then the further ones."""
        return [self, *(each.volume for each in self.further)]

    @property
    def all_channels(self) -> int:
        """Number of channels of a cutout."""
        return sum(volume.channels for volume in self.volumes)

    @property
    def cutout_dtype(self) -> AnyDtype:
        """The dtype of a cutout: the least that holds the values of all volumes, or float32."""
        return common_dtype([volume.dtype for volume in self.volumes])

    def cutout(
        self, box: BoundingBox, fill: Fill, fill_value: float, timeout: float = TRANSFER_SECONDS
    ) -> AnyArray:
        """Read the voxels of any box, of this volume and of those that follow, in one array.

        Args:
            box: it may reach beyond the bounds.
            fill: what lies there, in this volume; the others have a fill of their own.
            fill_value: the value for "constant".
            timeout: seconds after which a read is given up.
        """
        first = super().cutout(box, fill, fill_value, timeout)
        if not self.further:
            return first
        joined = arrays.empty((self.all_channels, *box.shape), self.cutout_dtype)
        stop = self.channels
        joined[:stop] = first
        del first  # before the next one is read
        for each in self.further:
            start = stop
            stop += each.volume.channels
            joined[start:stop] = each.volume.cutout(box, each.fill, each.fill_value, timeout)
        return joined

    @property
    def values_dtype(self) -> AnyDtype:
        """The stored dtype; what is resampled is read as float32."""
        return self.stored.dtype

    def stored_shape(self, shape: tuple[Numbers, Numbers, Numbers]) -> tuple[Numbers, ...]:
        """The most stored voxels, ZYX, that a box of a shape is made of."""
        return shape if self.resampling is None else self.resampling.source_shape(shape)

    def decoded_bytes(self, shape: Zyx) -> int:
        """Bytes of the stored values that a box of a shape is made of, at most, of all volumes."""
        return sum(each.own_decoded_bytes(shape) for each in self.volumes)

    def own_decoded_bytes(self, shape: Zyx) -> int:
        """The same of this volume alone."""
        z, y, x = self.stored_shape(shape)
        return int(self.channels * z * y * x * self.values_dtype.itemsize)

    def block_bytes(self, shape: tuple[Numbers, Numbers, Numbers]) -> Numbers:
        """Bytes of the decoded storage blocks that a box of a shape is made of, at most.

        Of this volume alone.
        """
        stored = zip(
            self.stored_shape(shape), self.read_shape, self.stored.bounds.shape, strict=True
        )
        z, y, x = (
            minimum((length + block - 2) // block + 1, ceil_div(whole, block)) * block
            for length, block, whole in stored
        )
        return self.channels * z * y * x * self.values_dtype.itemsize

    def resampling_bytes(self, shape: tuple[Numbers, Numbers, Numbers]) -> Numbers:
        """Bytes beside a cutout of a shape while it is resampled, axis by axis; of this volume."""
        if self.resampling is None:
            return 0
        z, y, x = self.resampling.source_shape(shape)
        stored = z * y * x
        read = shape[0] * shape[1] * shape[2]
        stored_bytes = self.values_dtype.itemsize + (_FLOAT_BYTES if self.limits else 0)
        made = _FLOAT_BYTES * (2 * maximum(stored, read) - read)
        return self.channels * (stored * stored_bytes + made)

    def joining_bytes(self, shape: tuple[Numbers, Numbers, Numbers]) -> Numbers:
        """Bytes beside a cutout of a shape while it is read and put together, of all volumes."""
        inside = self._inside_bytes(shape)
        if not self.further:
            return maximum(inside, self.resampling_bytes(shape))
        read = shape[0] * shape[1] * shape[2]
        most: Numbers = 0
        for each in self.volumes:
            own = each.channels * read * each.dtype.itemsize
            most = maximum(most, own + each.resampling_bytes(shape))
        return maximum(inside, most)

    def _inside_bytes(self, shape: tuple[Numbers, Numbers, Numbers]) -> Numbers:
        """Bytes beside a cutout of a shape while it is found where the object is."""
        if self.inside is None:
            return 0
        z, y, x = self.stored_shape(shape)
        itemsize = max(volume.values_dtype.itemsize for volume in self.volumes)
        looked_at = (self.all_channels * itemsize + 2) * z * y * x  # and of each voxel two booleans
        own = shape[0] * shape[1] * shape[2] * self.inside.dtype.itemsize
        return own + maximum(looked_at, self.inside.resampling_bytes(shape))

    def place_at(self, origin: Origin) -> InputVolume:
        """The volume at another place; what it is made of stays, but where nothing is resampled."""
        if self.resampling is None:
            stored = self.stored.place_at(origin)
            return replace(_as_read(stored), limits=self.limits, mask=self.mask, whole=self.whole)
        bounds = self.bounds.translate(subtract(origin.voxel, self.origin.voxel))
        resampling = replace(self.resampling, target=bounds)
        return replace(self, bounds=bounds, origin=origin, resampling=resampling)

    def read(self, box: BoundingBox, timeout: float = TRANSFER_SECONDS) -> AnyArray:
        """Read as from any volume; where nothing of a box is kept, nothing of it is read."""
        if self.mask is None:
            return self._read_unmasked(box, timeout)
        if not self.mask.keeps_any(box):
            return np.full((self.channels, *box.shape), self.mask.fill_value, self.dtype)
        array = self._read_unmasked(box, timeout)
        self.mask.fill(array, box)
        return array

    def read_into(
        self, box: BoundingBox, array: AnyArray, timeout: float = TRANSFER_SECONDS
    ) -> None:
        """Read as :meth:`read` does, into an array."""
        array[...] = self.read(box, timeout)

    def _read_unmasked(self, box: BoundingBox, timeout: float) -> AnyArray:
        if self.resampling is None:
            return self.stored.read(box, timeout)
        source = self.resampling.source_box(box)
        array = self.stored.read(source, timeout)
        if self.limits:
            low, high = np.array(self.limits, np.float32).T[..., None, None, None]
            array = array.astype(np.float32)
            np.clip(array, low, high, out=array)
        array = self.resampling.resample(array, source, box).astype(np.float32, copy=False)
        if self.limits:  # a cubic spline goes beyond the values that it passes through
            np.clip(array, low, high, out=array)
        return array

    def begin_sampling(self, channels: int, wanted: Sequence[slice]) -> ts.Future[AnyArray]:
        """Begin to read some voxels, each as the stored voxel nearest to it."""
        if self.resampling is None:
            return self.stored.begin_sampling(channels, wanted)
        z, y, x = self.resampling.nearest_voxels(wanted)
        return self.store[:channels].oindex[:, z, y, x].read()


def common_dtype(dtypes: Sequence[AnyDtype]) -> AnyDtype:
    """The dtype itself if there is one, else the least integer that holds all, or float32."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    common = np.result_type(*dtypes)
    is_small = common.kind in "iu" and common.itemsize <= _FLOAT_BYTES
    return common if is_small else np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class FurtherVolume:
    """A volume whose channels the network sees after those of a job's input.

    Attributes:
        volume: the volume, with the voxels and the bounds of the input.
        fill: what lies beyond them.
        fill_value: the value for "constant", in stored units.
    """

    volume: InputVolume
    fill: Fill
    fill_value: float


def _as_read(stored: Volume) -> InputVolume:
    """A volume that is read as it is stored."""
    return InputVolume(
        **{each.name: getattr(stored, each.name) for each in fields(Volume)}, stored=stored
    )


def as_input(
    stored: Volume,
    request: Resample | None,
    wanted: VoxelSizeNm | None,
    output_scale: Zyx = (1, 1, 1),
    cell: Zyx = (1, 1, 1),
) -> InputVolume:
    """A volume as a job reads it, without its mask.

    Args:
        stored: the volume as it is stored.
        request: how the job resamples it; None if it does not.
        wanted: the voxel size to resample to, ZYX.
        output_scale: voxels of the network's output for each of its input, ZYX: each of the input
            is read so many times.
        cell: voxels of the network's input for each of its output, ZYX: the volume is read as if
            its outermost voxels went on up to a multiple of them.

    Raises:
        ConfigError: it is to be resampled, and does not say its voxel size, or one that cannot be
            resampled to the one that is wanted.
    """
    if request is None and output_scale == (1, 1, 1) and cell == (1, 1, 1):
        return _as_read(stored)
    source = _grid_of(stored)
    key = "input.resample"
    seen = source if wanted is None else _resampled_grid(stored, source, wanted, key)
    try:
        target = seen.divide(output_scale)
    except ValueError as error:
        raise ConfigError(f"model.output_scale: {stored.url}: {error}") from None
    limits = () if request is None else request.limits
    if len(limits) not in (0, 1, stored.channels):
        raise ConfigError(
            f"input.resample.clip has limits of {len(limits)} channels, and {stored.url} "
            f"{stored.channels}: write one pair for each"
        )
    is_whole = all(n % k == 0 for n, k in zip(target.bounds.shape, cell, strict=True))
    if target == source and not limits and is_whole:
        return _as_read(stored)
    begin = Origin(target.bounds.start, target.rest)
    tell_rest_of_voxels(stored.url, target.voxel_size_nm, begin)
    order: Order = 0
    coarse = None
    if request is not None and wanted is not None and seen != source:
        order = request.order
        coarse = coarse_axis(source.voxel_size_nm, wanted, request.separate_z)
    resampling = extend_to_cells(make_resampling(source, target, order, coarse, output_scale), cell)
    return replace(
        _as_read(stored),
        bounds=resampling.target,
        dtype=np.dtype(np.float32),
        voxel_size_nm=None if stored.voxel_size_nm is None else target.voxel_size_nm,
        origin=Origin(rest=target.rest),
        resampling=resampling,
        limits=limits,
    )


def output_grid(volume: InputVolume, wanted: OutputVoxels, cell: Zyx = (1, 1, 1)) -> Grid:
    """The voxels that a job's output has, over the space of its input.

    Args:
        volume: the input, as the job reads it.
        wanted: ``output.voxel_size_nm`` of the job file.
        cell: voxels of the network's input for each of its output, ZYX.

    Raises:
        ConfigError: a size is asked for, and the input does not say its own, or none can be made.
    """
    if wanted == "network":
        return _grid_of(volume).join(cell)
    _check_cells(volume, wanted, cell)
    if wanted == "input":
        return _grid_of(volume.stored)
    key = "output.voxel_size_nm"
    return _resampled_grid(volume.stored, _grid_of(volume.stored), wanted, key)


def _check_cells(volume: InputVolume, wanted: OutputVoxels, cell: Zyx) -> None:
    """Refuse an output of other voxels than the network's where these end beyond the input."""
    stored = volume.stored
    places = None if volume.resampling is None else volume.resampling.places
    if cell == (1, 1, 1) or places is None:
        return
    raise ConfigError(
        f"output.voxel_size_nm: {wanted}: each voxel of the network's output is {list(cell)} of "
        f"its input (z, y, x), and {stored.url} has {list(stored.bounds.shape)} voxels, so that "
        "the last ones of the output end beyond it. Read a box of the input that they fit "
        "(input.box), or write output.voxel_size_nm: network, and resample the output afterwards "
        "(beam-inference resample)."
    )


def _grid_of(volume: Volume) -> Grid:
    size = volume.voxel_size_nm or (1.0, 1.0, 1.0)
    return Grid(volume.bounds, size, volume.origin.rest)


def resampling_to_output(
    volume: InputVolume, grid: Grid, request: ResampleBack
) -> Resampling | None:
    """How the voxels of a job's output are made of those that its network answers at.

    Args:
        volume: the input, as the job reads it.
        grid: the voxels of the output, over the same space.
        request: how they are to be made.

    Returns:
        None where they are the same voxels.
    """
    source = _grid_of(volume)
    if source.bounds == grid.bounds:
        return None
    coarse = coarse_axis(source.voxel_size_nm, grid.voxel_size_nm, request.separate_z)
    return make_resampling(source, grid, request.order, coarse)


def _resampled_grid(stored: Volume, source: Grid, wanted: VoxelSizeNm, key: str) -> Grid:
    if stored.voxel_size_nm is None:
        raise ConfigError(
            f"{key}: the input {stored.url} does not say its voxel size, so it cannot be "
            f"resampled to {list(wanted)} nm (z, y, x). Copy it with its size (beam-inference "
            f"convert --voxel_size), or remove {key}."
        )
    try:
        grid = source.with_voxel_size(wanted)
    except ValueError as error:
        raise ConfigError(f"{key}: {stored.url}: {error}") from None
    sizes = zip(grid.voxel_size_nm, wanted, strict=True)
    if any(found < _LEAST_OF_WANTED * size for found, size in sizes):
        found = ", ".join(f"{size:g}" for size in grid.voxel_size_nm)
        logger.warning(
            "%s: %s is smaller than half a voxel of %s nm (z, y, x), and becomes one of [%s] nm: "
            "is its voxel size right, and in nanometres?",
            key,
            stored.url,
            list(wanted),
            found,
        )
    return grid
