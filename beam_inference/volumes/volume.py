"""An open volume on disk or in an object store: reading, aligned writing, and their errors.

Whatever a store's own axis order is, a :class:`Volume` is (channel, z, y, x): the transpose is a
TensorStore index transform, made once, here. Creating outputs is in
:mod:`beam_inference.volumes.outputs`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import tensorstore as ts

from beam_inference import arrays
from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.fields import Json
from beam_inference.errors import (
    BeamInferenceError,
    PermanentReadError,
    StalledReadError,
    TransientReadError,
    WorkerFault,
)
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.fill import Fill, fill_outside, source_box
from beam_inference.geometry.origin import AT_ZERO, Origin
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, add, subtract, triple
from beam_inference.limits import layers_at_once
from beam_inference.volumes.block_files import block_fault
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    KvStore,
    is_transient,
    may_pass,
    one_line,
    status,
)
from beam_inference.volumes.packed_shards import packs_shards, write_shards
from beam_inference.volumes.sharding import blank_shards
from beam_inference.volumes.views import View, view_of

logger = logging.getLogger(__name__)


TensorStore: TypeAlias = ts.TensorStore
"""An open array."""

_NOT_THE_CHUNKS_FAULT = ("PERMISSION_DENIED", "UNAUTHENTICATED")


def read_error(error: Exception, what: str) -> BeamInferenceError:
    """The error to raise where TensorStore fails to read something.

    Returns:
        A WorkerFault, where this process may not read it at all; a TransientReadError, where
        another attempt may succeed; else a PermanentReadError.
    """
    message = f"cannot read {what}: {one_line(error)}"
    if status(error) in _NOT_THE_CHUNKS_FAULT:
        return WorkerFault(message)
    return TransientReadError(message) if may_pass(error) else PermanentReadError(message)


@dataclass(frozen=True)
class Volume:
    """An open volume, axes (channel, z, y, x).

    Attributes:
        url: where it lies, for messages.
        place: where it lies, made canonical: equal for two ways to name one place.
        store: the TensorStore, transposed.
        bounds: its extent, in voxels, ZYX.
        channels: number of channels.
        dtype: of the stored values.
        block_shape: the storage's write unit, ZYX; blocks start at ``bounds.start``.
        voxel_size_nm: ZYX, or None where the volume does not say.
        origin: where index zero of the stored array lies; at 0 where the array counts its voxels as
            the volume does.
    """

    url: str
    place: str
    store: TensorStore
    bounds: BoundingBox
    channels: int
    dtype: AnyDtype
    block_shape: Zyx
    voxel_size_nm: VoxelSizeNm | None
    origin: Origin = AT_ZERO

    def place_at(self, origin: Origin) -> Volume:
        """The volume with the stored array's index zero at another place."""
        shift = subtract(origin.voxel, self.origin.voxel)
        if not any(shift):
            return replace(self, origin=origin)
        store = self.store[ts.d[1, 2, 3].translate_by[shift]]
        return replace(self, store=store, bounds=self.bounds.translate(shift), origin=origin)

    def start_at(self, start: Zyx) -> Volume:
        """The volume moved so that its first voxel is ``start``."""
        shift = subtract(start, self.bounds.start)
        return self.place_at(replace(self.origin, voxel=add(self.origin.voxel, shift)))

    def crop(self, box: BoundingBox) -> Volume:
        """The volume as if it ended where a box inside it does."""
        return replace(self, bounds=box)

    @property
    def read_shape(self) -> Zyx:
        """The unit of reading, ZYX: one block of a shard, else ``block_shape``."""
        return extents(self.store.chunk_layout.read_chunk.shape)

    @property
    def driver(self) -> str:
        """TensorStore's name of the driver that reads the stored array."""
        return str(self.stored_spec.get("driver"))

    @property
    def stored_dtype(self) -> str:
        """Name of the dtype of the stored array, from which ``dtype`` may be converted."""
        return str(self.stored_spec["dtype"])

    @property
    def has_channel_axis(self) -> bool:
        """Whether the stored array has an axis of channels."""
        return self.view.transforms[-1].output_rank > len(self.bounds.shape)

    @property
    def values_dtype(self) -> AnyDtype:
        """The dtype whose range the values have, in whatever dtype they are read."""
        return self.dtype

    @property
    def axis_layout(self) -> list[list[int]]:
        """Which axes of the stored array these are, and in which order its blocks hold them.

        An array of equal extents reads as one whose axes are exchanged if its metadata change in
        this alone. A list for each level of the view, and one of the axes, slowest first. Another
        one, of a 1, says that zarr's metadata have the highest byte of each number first.
        """
        axes = [
            [-1 if each.input_dimension is None else each.input_dimension for each in level.output]
            for level in self.view.transforms
        ]
        inner = self.store.chunk_layout.inner_order
        stored = [*axes, [] if inner is None else list(map(int, inner))]
        return [*stored, [1]] if _has_high_bytes_first(self.stored_spec) else stored

    @property
    def encoding(self) -> str | None:
        """Encoding of blocks, where the format has a choice; else None."""
        codec = self.store.codec
        encoding = None if codec is None else codec.to_json().get("encoding")
        return None if encoding is None else str(encoding)

    @property
    def kvstore(self) -> KvStore:
        """The key-value store that the array lies in."""
        store = self.store.kvstore
        assert store is not None, "an array in memory is refused where it is opened"
        return store

    @property
    def kvstore_url(self) -> str:
        """URL of the stored array, without a slash at its end."""
        return str(self.kvstore.url).rstrip("/")

    @property
    def precomputed_type(self) -> str | None:
        """The type that a precomputed volume states: "image" or "segmentation"; None of others."""
        kind: str | None = self.stored_spec.get("multiscale_metadata", {}).get("type")
        return kind

    @property
    def precomputed_scale(self) -> Json | None:
        """The metadata of its scale, of a precomputed volume; None of others."""
        scale: Json | None = self.stored_spec.get("scale_metadata")
        return scale

    @property
    def stored_spec(self) -> Json:
        """TensorStore's spec of the stored array."""
        return self.view.stored

    def check_dtype(self, planned: str) -> None:
        """Refuse the volume of a worker if it holds other values than at the plan.

        Args:
            planned: name of the dtype that it had.

        Raises:
            WorkerFault: it has another one.
        """
        if self.dtype.name != planned:
            raise WorkerFault(
                f"{self.url} holds {self.dtype.name}, and held {planned} when this was planned: it "
                "is another volume. Put that one back, or pass --overwrite to make everything again"
            )

    @cached_property
    def view(self) -> View:
        """What it is made of."""
        return view_of(self.store)

    def read(self, box: BoundingBox, timeout: float = TRANSFER_SECONDS) -> AnyArray:
        """Read the voxels of a box inside the bounds: (channels, *box.shape), in the stored dtype.

        Args:
            box: the voxels.
            timeout: seconds after which the read is given up.

        Raises:
            The errors of :meth:`read_into`.
        """
        array = arrays.empty((self.channels, *box.shape), self.dtype)
        self.read_into(box, array, timeout)
        return array

    def read_into(
        self, box: BoundingBox, array: AnyArray, timeout: float = TRANSFER_SECONDS
    ) -> None:
        """Read the voxels of a box inside the bounds into an array, which may be part of another.

        Args:
            box: the voxels.
            array: (channels, *box.shape), of the stored dtype or one that values are converted to.
            timeout: seconds after which the read is given up.

        Raises:
            StalledReadError: it took longer than ``timeout``.
            TransientReadError: another attempt may succeed.
            PermanentReadError: a block is corrupt, is no file, or cannot be decoded.
            WorkerFault: this process may not read the volume at all.
        """
        z0, y0, x0 = box.start
        z1, y1, x1 = box.stop
        try:
            voxels = self.store[:, z0:z1, y0:y1, x0:x1][ts.d[:].translate_to[0]]
            self._check_blocks(voxels, f"{box} of {self.url}")
            if array.dtype != self.dtype:
                voxels = voxels.astype(array.dtype)
            ts.array(array, copy=False).write(voxels).result(timeout=timeout)
        except TimeoutError:
            raise StalledReadError(
                f"cannot read {box} of {self.url}: it is not there after {timeout:g} s"
            ) from None
        except (ValueError, OSError) as error:
            raise read_error(error, f"{box} of {self.url}") from error

    def _check_blocks(self, window: ts.TensorStore, name: str) -> None:
        """Refuse a window of which TensorStore would read a block wrongly, without an error."""
        if not window.domain.size:
            return
        fault = block_fault(self.stored_spec, self.view.stored_spans(window))
        if fault is not None:
            raise PermanentReadError(
                f"cannot read {name}: {fault}, which would go unnoticed, mostly as zeros. Copy "
                "that file again."
            )

    def begin_sampling(self, channels: int, wanted: Sequence[slice]) -> ts.Future[AnyArray]:
        """Begin to read some voxels of a box inside the bounds.

        Args:
            channels: how many of the first channels.
            wanted: the voxels on each axis, ZYX, with steps.

        Returns:
            TensorStore's future of the values (channels, Z, Y, X).

        Raises:
            PermanentReadError: a block would be read wrongly, without an error.
        """
        window = self.store[(slice(0, channels), *wanted)]
        self._check_blocks(window, f"voxels of {self.url}")
        return window.read()

    def cutout(
        self,
        box: BoundingBox,
        fill: Fill,
        fill_value: float,
        timeout: float = TRANSFER_SECONDS,
    ) -> AnyArray:
        """Read the voxels of any box; raises as :meth:`read` does.

        Args:
            box: it may reach beyond the bounds.
            fill: what lies there.
            fill_value: the value for "constant".
            timeout: seconds after which the read is given up.
        """
        source = source_box(box, self.bounds, fill)
        return fill_outside(self.read(source, timeout), source, box, self.bounds, fill, fill_value)

    def write(self, box: BoundingBox, array: AnyArray, timeout: float = TRANSFER_SECONDS) -> None:
        """Write the voxels of a box of whole blocks; they are durable when this returns.

        Args:
            box: its blocks are written whole.
            array: values (channels, *box.shape).
            timeout: seconds after which a write is given up.

        Raises:
            TransientWriteError: another attempt may succeed.
            WorkerFault: the destination cannot be written (disk full, no permission, …).
        """
        z0, y0, x0 = box.start
        z1, y1, x1 = box.stop
        scale = self.precomputed_scale
        try:
            if scale is not None and packs_shards(scale):
                keep_blank = bool(self.stored_spec.get("store_data_equal_to_fill_value"))
                values = np.asarray(array, self.dtype)
                write_shards(
                    self.kvstore, scale, box, values, keep_blank=keep_blank, timeout=timeout
                )
                return
            # TensorStore leaves such a shard as it was
            for key in self._blank_shards(box, array):
                self.kvstore.write(key, None).result(timeout=timeout)
            depth = self.block_shape[0]
            step = depth * int(layers_at_once(array[:, :depth].nbytes))
            for z in range(z0, z1, step):  # the store makes a copy of what it is given
                piece = array[:, z - z0 : z - z0 + step]
                self.store[:, z : min(z + step, z1), y0:y1, x0:x1].write(piece).result(
                    timeout=timeout
                )
        except TimeoutError:
            raise WorkerFault(
                f"cannot write {box} of {self.url}: it is not done after {timeout:g} s"
            ) from None
        except (ValueError, OSError) as error:
            message = f"cannot write {box} of {self.url}: {one_line(error)}"
            if "Existing shard" in message:  # of which only a part is written, at a border
                message += (
                    ". A shard that lies there already is damaged, as by a cut or an incomplete "
                    "copy: remove this file; all of it is written anew"
                )
            if is_transient(error):
                raise TransientWriteError(message) from error
            raise WorkerFault(message) from error

    def _blank_shards(self, box: BoundingBox, array: AnyArray) -> list[str]:
        scale = self.precomputed_scale
        is_sharded = scale is not None and scale.get("sharding")
        return blank_shards(scale, box, array) if scale is not None and is_sharded else []


class TransientWriteError(WorkerFault):
    """A write failed in a way that may pass; once attempts are used up it is the worker's fault."""


def extents(shape: Iterable[int | None] | None) -> Zyx:
    """Extents along z, y, x in a shape (channel, z, y, x) that TensorStore states.

    Along an axis of which it states none, as one that a transform only repeats, they are one voxel.
    """
    _, *others = shape or (None,) * 4
    return triple(1 if extent is None else extent for extent in others)


def _has_high_bytes_first(spec: Json) -> bool:
    """Whether the metadata of a zarr array say that numbers are big-endian."""
    metadata = spec.get("metadata", {})
    return ">" in json.dumps(metadata.get("dtype", "")) or _is_big_endian(metadata)


def _is_big_endian(settings: Json) -> bool:
    """Whether a codec of zarr 3 among some, or one inside of a shard, says so."""
    inner = [codec.get("configuration", {}) for codec in settings.get("codecs", [])]
    return settings.get("endian") == "big" or any(map(_is_big_endian, inner))
