"""Projected memory of a worker process, computed from a plan's numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyDtype
from beam_inference.engines.devices import device_memory
from beam_inference.environment import format_bytes, usable_memory
from beam_inference.errors import ConfigError
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.place import Place
from beam_inference.limits import (
    MASK_CACHE_BYTES,
    SEAM_FILES_AT_ONCE,
    WRITTEN_BYTES,
    Numbers,
    cached_cutouts,
    layers_at_once,
    maximum,
    minimum,
)

KEPT_BYTES = 32 * 2**20
"""Bytes that the stores' libraries, their threads and the allocator keep (docs/performance.md)."""

HOLES = 0.75
"""Memory that PyTorch leaves free on the heap between its arrays, relative to these arrays.

It varies at random from process to process. Mapping each array by itself would leave no holes, and
take half as much time again.
"""

KEPT_BESIDE_HOLES = 14 * 2**20
"""Part of :data:`KEPT_BYTES` that is not counted in :data:`HOLES`."""

PINNED = 2
"""Pinned memory relative to the array in it, since PyTorch rounds up to powers of two."""

STORE_COPIES = 2
"""Copies of what is handed to the store: one as blocks, one of the blocks encoded."""

SEAM_COPIES = 3
"""Copies of a seam file that is being written: its bytes, and two in the store."""

FLOAT_BYTES = 4
"""Bytes of a float32."""

Shape: TypeAlias = tuple[int, int, Numbers]
"""Voxels on each axis, ZYX; on x there may be one number for each of several chunk shapes."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The extremes that matter for exchange, see ``geometry.plan_totals.Extremes``."""

    private: Shape
    touched: Shape
    shared: Shape

    @property
    def private_voxels(self) -> Numbers:
        """Voxels of the largest private box."""
        return _voxels(self.private)

    @property
    def shared_voxels(self) -> Numbers:
        """Upper bound of the voxels that a chunk shares, each as often as a chunk adds to it.

        It grows with what the chunk shares on each axis.
        """
        z, y, x = (n - more for n, more in zip(self.touched, self.shared, strict=True))
        return _voxels(self.touched) - z * y * x


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShapes:
    """The largest chunk of a job, each axis for itself.

    Attributes:
        input: shape of the box that it reads, ZYX.
        input_blocks_bytes: of the decoded storage blocks that this box touches.
        resampling_bytes: beside its input, while that is resampled; 0 where it is read as stored.
        core: shape of the box that it computes, ZYX.
        patch_input: shape of the network's input, ZYX.
        block_depth: voxels of the output's storage blocks on z.
        is_filled: whether voxels outside the volume are filled in, which takes a second cutout.
        exchanged: what chunks exchange; None if they do not.
        resampled: shape of the box, in the output's voxels, that its values are resampled to, ZYX;
            None where the output has the network's voxels.
    """

    input: Shape
    input_blocks_bytes: Numbers
    core: Shape
    patch_input: Zyx
    block_depth: int
    is_filled: bool
    exchanged: Exchanged | None = None
    resampling_bytes: Numbers = 0
    resampled: Shape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSizes:
    """Sizes of the values of a voxel of a further output.

    Attributes:
        network_channels: of the network, those that the output is made of.
        operator_bytes: bytes per voxel that its operators hold; 0 if there are none.
        written_channels: of the output, which operators have made of the network's.
        dtype: of the output.
        is_read_back: whether what is written is read back, because its encoding is lossy.
    """

    network_channels: int
    operator_bytes: int
    written_channels: int
    dtype: AnyDtype
    is_read_back: bool

    @property
    def stored_bytes(self) -> int:
        """Bytes of a voxel of the output."""
        return self.dtype.itemsize * self.written_channels

    @property
    def finishing_bytes(self) -> int:
        """Bytes of a voxel beside its sums and its result: a copy of the sums, and operators."""
        held = FLOAT_BYTES * self.written_channels if self.operator_bytes else 0
        return FLOAT_BYTES * self.network_channels + max(self.operator_bytes, held)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSizes:
    """Sizes of the values of a voxel, on their way from input to output.

    Attributes:
        input_channels: of the input.
        input_itemsize: bytes of an input value in a cutout.
        output_channels: of the network.
        operator_bytes: bytes per voxel that the operators hold; 0 if there are none.
        written_channels: of the output, which operators have made of the network's.
        output_dtype: of the output.
        is_read_back: whether what is written is read back, because its encoding is lossy.
        is_split: whether outputs are made of copies of some of the network's channels: there are
            several outputs, or one of a single head.
        further: of the other outputs.
        preview_bytes: while a voxel is written, of the previews that are made of it.
    """

    input_channels: int
    input_itemsize: int
    output_channels: int
    operator_bytes: int
    written_channels: int
    output_dtype: AnyDtype
    is_read_back: bool
    is_split: bool
    further: Sequence[OutputSizes]
    preview_bytes: int = 0

    @property
    def leaves_as_float(self) -> bool:
        """Whether values leave the device as float32, for what is done to them on the host."""
        return self.is_float or self.is_finished_on_host

    @property
    def is_finished_on_host(self) -> bool:
        """Whether the host has more to do than to add up: operators, or several outputs."""
        return self.operator_bytes > 0 or self.is_split

    @property
    def _main(self) -> OutputSizes:
        return OutputSizes(
            network_channels=self.output_channels,
            operator_bytes=self.operator_bytes,
            written_channels=self.written_channels,
            dtype=self.output_dtype,
            is_read_back=self.is_read_back,
        )

    @property
    def _outputs(self) -> list[OutputSizes]:
        return [self._main, *self.further]

    @property
    def is_float(self) -> bool:
        """Whether the output is float32, as blended."""
        return self.output_dtype == np.float32

    @property
    def sums_bytes(self) -> int:
        """Bytes of a voxel's blended values."""
        return FLOAT_BYTES * self.output_channels

    @property
    def stored_bytes(self) -> int:
        """Bytes of a voxel of all outputs."""
        return sum(each.stored_bytes for each in self._outputs)

    @property
    def encoded_bytes(self) -> int:
        """Bytes of a voxel of the outputs that are held beside the values they are made of."""
        return 0 if self.is_float and not self.is_split else self.stored_bytes

    @property
    def read_back_bytes(self) -> int:
        """Bytes of a voxel that is read back."""
        return sum(each.stored_bytes for each in self._outputs if each.is_read_back)

    @property
    def finishing_bytes(self) -> int:
        """Bytes of a voxel beside its sums while operators are applied and values are encoded."""
        if self.is_split:  # one after the other, each of a copy of its values
            return self.stored_bytes + max(each.finishing_bytes for each in self._outputs)
        if not self.operator_bytes:
            return self.encoded_bytes
        return max(self.operator_bytes, FLOAT_BYTES * self.written_channels + self.encoded_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of a worker process that bear on its memory.

    Attributes:
        threads: harness threads, which take turns on the device.
        look_ahead: cutouts per thread that are read before they are needed.
        trailing_writes: results per thread that are still being written.
        batch_size: patches per network call.
        working_set_bytes: what the network itself allocates for a batch.
        keeps_working_set: whether the engine keeps it between calls, which PyTorch does not.
        device_is_host: whether the network runs on the CPU.
        mask_piece_bytes: of the pieces of all masks that a chunk uses.
        mask_bytes: of all masks, decoded.
        weights_bytes: of blend weights as large as a patch; 0 where they are products of vectors.
        members: processes that share each patch, this one among them.
        cached_cutouts: number of cutouts whose decoded input blocks it keeps; None for as many as
            its threads need.
    """

    threads: int
    look_ahead: int
    trailing_writes: int
    batch_size: int
    working_set_bytes: int
    keeps_working_set: bool
    device_is_host: bool
    mask_piece_bytes: int
    mask_bytes: int
    weights_bytes: int = 0
    members: int = 1
    cached_cutouts: int | None = None


@dataclass(frozen=True)
class MemoryProjection:
    """Peak bytes that the largest chunks of a job occupy in a worker process, all threads at once.

    This is beyond the interpreter, its libraries and the model's weights. Harness threads take
    turns on the device, so there is one accumulator, one batch and one working set; but each thread
    holds its cutouts and its results.
    """

    shapes: ChunkShapes
    sizes: ValueSizes
    process: ProcessSettings

    @property
    def host_bytes(self) -> int:
        """Bytes in the machine's memory; with the network on the CPU also those of the device."""
        return int(self._host)

    @property
    def device_bytes(self) -> int:
        """Bytes in the memory of the device that runs the network."""
        return int(self._device)

    def fits(self, host_bytes: int, device_bytes: int | None) -> bool | NDArray[np.bool_]:
        """Whether there is room, for each chunk shape if there are several.

        Args:
            host_bytes: that a process may occupy in the machine's memory.
            device_bytes: that it may occupy on its device; None for no bound.
        """
        on_host = self._host <= host_bytes
        return on_host if device_bytes is None else on_host & (self._device <= device_bytes)

    @cached_property
    def _host(self) -> Numbers:
        process = self.process
        chunks = self.computing_bytes
        if self.shapes.exchanged is not None:
            chunks = maximum(chunks, self.second_stage_bytes)
        cutouts = cached_cutouts(process.threads, process.cached_cutouts)
        cached_input = cutouts * self.shapes.input_blocks_bytes
        pieces = process.threads * process.mask_piece_bytes
        masks = pieces + min(MASK_CACHE_BYTES, process.mask_bytes)
        return chunks + cached_input + masks + process.weights_bytes + self.members_bytes

    @cached_property
    def _device(self) -> Numbers:
        if self.process.device_is_host:
            return self.used_on_device_bytes
        # one cutout is sent to a GPU ahead
        return self.used_on_device_bytes + self.cutout_bytes + self.leaving_bytes

    @cached_property
    def cutout_bytes(self) -> Numbers:
        """Bytes of the largest cutout."""
        return self.sizes.input_channels * _voxels(self.shapes.input) * self.sizes.input_itemsize

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch: the network's input and its output."""
        channels = self.sizes.input_channels + self.sizes.output_channels
        return self.process.batch_size * channels * self._patch_bytes

    @property
    def ahead_bytes(self) -> int:
        """Bytes of what is predicted of chunks that wait: less than a batch, if any wait at all.

        Their inputs count as sent ahead, or else are hardly larger than these patches.
        """
        if self.process.threads == 1:
            return 0
        predicted = self.process.batch_size - 1
        return predicted * self.sizes.output_channels * self._patch_bytes

    @property
    def members_bytes(self) -> int:
        """Bytes of the other processes of a mesh: each computes a share of every batch.

        What was measured of the network is what this process allocated: a share, too.
        """
        process = self.process
        share = process.working_set_bytes + self.batch_bytes // process.members
        return (process.members - 1) * (share + round(HOLES * process.working_set_bytes))

    @property
    def patches_bytes(self) -> int:
        """Bytes of single patches: weights, a weighted one, and two answers to uniform input."""
        return (3 * self.sizes.output_channels + 1) * self._patch_bytes

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch on its way through the network: as read, its input, its output."""
        channels = 2 * self.sizes.input_channels + self.sizes.output_channels
        return channels * self._patch_bytes

    @property
    def _patch_bytes(self) -> int:
        z, y, x = self.shapes.patch_input
        return z * y * x * FLOAT_BYTES

    @cached_property
    def slab_bytes(self) -> Numbers:
        """Bytes of the accumulator: a slab of the core box, as deep as a patch."""
        z, y, x = self.shapes.core
        return self.sizes.sums_bytes * min(self.shapes.patch_input[0], z) * y * x

    @property
    def blends_as_float(self) -> bool:
        """Whether a result leaves the accumulator as float32, or else encoded."""
        shapes = self.shapes
        is_added_up = shapes.exchanged is not None or shapes.resampled is not None
        return self.sizes.leaves_as_float or is_added_up

    @property
    def leaving_bytes(self) -> Numbers:
        """Bytes of a slab on its way from the device."""
        if self.blends_as_float:
            return self.slab_bytes
        return self.slab_bytes // FLOAT_BYTES * self.sizes.output_dtype.itemsize

    @cached_property
    def used_on_device_bytes(self) -> Numbers:
        """Bytes that a chunk's patches need where the network runs."""
        used = (
            self.cutout_bytes
            + self.batch_bytes
            + self.ahead_bytes
            + self.patches_bytes
            + self.process.working_set_bytes
        )
        # on the CPU the result itself is the accumulator, if it is float32
        in_result = self.blends_as_float and self.process.device_is_host
        return used if in_result else used + self.slab_bytes

    @property
    def libraries_bytes(self) -> int:
        """Bytes that libraries and the heap keep while chunks are computed."""
        process = self.process
        if process.device_is_host and not process.keeps_working_set:
            return KEPT_BESIDE_HOLES + round(HOLES * process.working_set_bytes)
        return KEPT_BYTES

    @cached_property
    def computing_bytes(self) -> Numbers:
        """Bytes while chunks are computed; with exchange those of the first stage."""
        process = self.process
        cutouts = (1 + process.look_ahead + self.shapes.is_filled) * self.cutout_bytes
        cutouts += process.look_ahead * self.shapes.resampling_bytes
        chunks = self.libraries_bytes + process.threads * (cutouts + self.results_bytes)
        if process.device_is_host:  # the accumulator and the cutout are used where they lie
            return chunks + self.used_on_device_bytes - self.cutout_bytes
        return chunks + self.pinned_bytes

    @property
    def pinned_bytes(self) -> Numbers:
        """Bytes of pinned memory, which grows with cutouts and stays."""
        return PINNED * (self.leaving_bytes + 2 * self.cutout_bytes)

    @cached_property
    def results_bytes(self) -> Numbers:
        """Bytes of the results that a thread holds: one being computed, others being written."""
        if self.shapes.exchanged is None:
            return self._whole_results_bytes
        return self._first_stage_results_bytes(self.shapes.exchanged)

    @property
    def _whole_results_bytes(self) -> Numbers:
        sizes = self.sizes
        writes = self.process.trailing_writes
        voxels = _voxels(self.shapes.core)
        resampled = self.shapes.resampled
        if resampled is not None:
            finished = _voxels(resampled)
            computed = voxels * sizes.sums_bytes + self._resampled_bytes(voxels, finished)
            written = sizes.stored_bytes + sizes.read_back_bytes + sizes.preview_bytes
            return computed + writes * (finished * written + self.at_store_bytes(resampled))
        computed = sizes.stored_bytes
        if self.blends_as_float:
            computed = sizes.sums_bytes + sizes.finishing_bytes
        written = sizes.stored_bytes + sizes.read_back_bytes + sizes.preview_bytes
        at_store = writes * self.at_store_bytes(self.shapes.core)
        return voxels * (computed + writes * written) + at_store

    def _resampled_bytes(self, voxels: Numbers, finished: Numbers) -> Numbers:
        """Bytes beside blended values while they are resampled, and then finished.

        Args:
            voxels: of the network, that are resampled.
            finished: of the output, that are made of them.
        """
        sums = self.sizes.sums_bytes
        axis_by_axis = 2 * sums * maximum(voxels, finished)
        return maximum(axis_by_axis, finished * (sums + self.sizes.finishing_bytes))

    def _first_stage_results_bytes(self, exchanged: Exchanged) -> Numbers:
        sizes = self.sizes
        writes = self.process.trailing_writes
        private = exchanged.private_voxels
        sums = _voxels(self.shapes.core) * sizes.sums_bytes
        seam_file = SEAM_COPIES * minimum(WRITTEN_BYTES, sizes.sums_bytes * exchanged.shared_voxels)
        # its memory stays while the next chunk's seam files are written
        own = private * (sizes.encoded_bytes + sizes.read_back_bytes)
        own_at_store = self.at_store_bytes(exchanged.private)
        if sizes.is_finished_on_host:
            own_at_store += private * (
                sizes.finishing_bytes - sizes.encoded_bytes + sizes.sums_bytes
            )
        return sums * (1 + writes) + writes * (own + maximum(seam_file, own_at_store))

    @property
    def second_stage_bytes(self) -> Numbers:
        """Bytes while sums are merged, when all is given back but what engines keep."""
        process = self.process
        if not process.device_is_host:
            kept = self.pinned_bytes
        else:
            kept = self.patches_bytes
            if process.keeps_working_set:
                kept += process.working_set_bytes
        return KEPT_BYTES + process.threads * self.merging_bytes + kept

    @property
    def merging_bytes(self) -> Numbers:
        """Bytes of the sums that a thread merges, and of their results; 0 without exchange."""
        exchanged = self.shapes.exchanged
        if exchanged is None:
            return 0
        sizes = self.sizes
        process = self.process
        shared = exchanged.shared_voxels
        # one of them is copied
        files = minimum((SEAM_FILES_AT_ONCE + 1) * WRITTEN_BYTES, 2 * sizes.sums_bytes * shared)
        written = sizes.stored_bytes + sizes.read_back_bytes + sizes.preview_bytes
        if self.shapes.resampled is not None:
            finished = _voxels(self.shapes.resampled)
            sums = sizes.sums_bytes * (2 + process.look_ahead) * shared
            at_store = self.at_store_bytes(self.shapes.resampled)
            trailing = process.trailing_writes * (at_store + written * finished)
            return files + sums + self._resampled_bytes(shared, finished) + trailing
        at_store = minimum(
            self.at_store_bytes(exchanged.touched), STORE_COPIES * shared * sizes.stored_bytes
        )
        per_voxel = (
            sizes.sums_bytes * (2 + process.look_ahead)
            + sizes.finishing_bytes
            + process.trailing_writes * written
        )
        return files + process.trailing_writes * at_store + shared * per_voxel

    def at_store_bytes(self, shape: Shape) -> Numbers:
        """Bytes of the store's copies while a box of a shape is written.

        It gets :data:`WRITTEN_BYTES` at a time, or a whole layer of blocks if that is more.
        """
        layer = self.shapes.block_depth * shape[1] * shape[2] * self.sizes.stored_bytes
        layers = layers_at_once(maximum(layer, 1))  # of nothing there is no layer
        at_once = minimum(layer * layers, _voxels(shape) * self.sizes.stored_bytes)
        copies: Numbers = STORE_COPIES * at_once
        return copies


def _voxels(shape: Shape) -> Numbers:
    z, y, x = shape
    return z * y * x


def check_trial_memory(memory: MemoryProjection, available: int | None) -> None:
    """Refuse a patch for which there is no memory now, before it is read.

    This is what trying the network on the host takes at the least; what the network itself
    allocates shows at the trial.

    Args:
        memory: projected memory of one worker process.
        available: bytes that can be taken now; None where unknown.

    Raises:
        ConfigError: there is too little.
    """
    if available is None or memory.patch_bytes <= available:
        return
    raise ConfigError(
        f"the network is tried on one patch of {list(memory.shapes.patch_input)} voxels (z, y, x; "
        f"crop margin included), which takes {format_bytes(memory.patch_bytes)} without what the "
        f"network itself needs; {format_bytes(available)} are free on this machine. Make "
        "inference.patch_shape smaller."
    )


def check_memory(memory: MemoryProjection, place: Place, device: str) -> None:
    """Refuse chunks that cannot fit this machine; nothing is known here of other machines.

    Args:
        memory: projected memory of one worker process.
        place: where the workers run.
        device: as in the job.

    Raises:
        ConfigError: they do not fit.
    """
    if not place.is_this_machine:
        return
    needed = memory.host_bytes * place.processes_per_host
    total = usable_memory()
    if needed > total:
        raise ConfigError(
            f"{place.processes_per_host} worker process(es) would need {format_bytes(needed)} "
            f"for their chunks, this machine has {format_bytes(total)}. Make inference.chunk_shape "
            "or inference.batch_size (or model.crop_margin) smaller."
        )
    on_device = device_memory(device)
    if on_device is not None and memory.device_bytes > on_device:
        raise ConfigError(
            f"a chunk would need {format_bytes(memory.device_bytes)} on the GPU, which has "
            f"{format_bytes(on_device)}. Make inference.chunk_shape or inference.batch_size (or "
            "model.crop_margin) smaller."
        )
