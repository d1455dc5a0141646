"""The array in which a chunk's weighted predictions are added up, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.engines.protocol import AS_COMPUTED, Device, Encoding
from beam_inference.geometry.blending import BlendWindow
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.exact_sums import STEPS_PER_BOUND, largest_exact, step_of
from beam_inference.geometry.zyx import Zyx
from beam_inference.worker.device_weights import ProductWeights, Weights, WholeWeights
from beam_inference.worker.non_finite import check_finite
from beam_inference.worker.patches import SlicesPerAxis


@dataclass(frozen=True)
class _Download:
    """Rows of the core, along z, that are on their way to the host; ``wait`` returns them."""

    rows: slice
    wait: Callable[[], AnyArray]


@dataclass(frozen=True, slots=True)
class BoundedChannels:
    """Channels of a network's predictions, and how large they are.

    Attributes:
        channels: the channels.
        bound: their prediction bound, a power of two.
        largest: the largest prediction that their activation allows; infinity without one.
    """

    channels: slice
    bound: float
    largest: float = math.inf

    @property
    def can_exceed(self) -> bool:
        """Whether predictions may be too large for exact sums."""
        return self.largest > largest_exact(self.bound)


class Accumulator:
    """Blends a chunk's core in a slab on the device, which moves along z; encodes what it leaves.

    Args:
        work: the chunk's patches and its core box.
        slices: where each patch lies.
        device: holds the slab.
        channels: output channels of the network.
        encoding: dtype and value range of the core.
        heads: the channels of each head of the network; all of them together if it has none.
        window: what a patch's voxels weigh where patches overlap.
    """

    def __init__(
        self,
        work: ChunkWork,
        slices: SlicesPerAxis,
        device: Device,
        channels: int,
        encoding: Encoding,
        heads: Sequence[BoundedChannels],
        window: BlendWindow,
    ) -> None:
        self._depth, y, x = work.core_box.shape
        bound = max(head.bound for head in heads)
        self._bound = bound
        self._heads = heads
        self._beyond_bound: Any = 0
        self._slices = slices
        self._device = device
        self._encoding = encoding
        # All of them are made now: made between the network's answers, they would lie between the
        # holes that these leave.
        patch_depth, *across = work.lattice.patch_shape
        self._weights: Weights = (
            WholeWeights(work, device, window, STEPS_PER_BOUND / bound)
            if window.floor
            else ProductWeights(work, device, window, STEPS_PER_BOUND / bound)
        )
        self._weighted = device.empty((patch_depth, channels, *across))
        self._result: AnyArray | None = None
        self._pending_download: _Download | None = None
        if device.on_host and encoding == AS_COMPUTED:
            self._slab = device.empty((channels, self._depth, y, x)).swapaxes(0, 1)
        else:
            self._result = arrays.empty((channels, self._depth, y, x), encoding.dtype)
            # Z before the channels: rows that leave or move are then one piece of memory.
            self._slab = device.empty((min(patch_depth, self._depth), channels, y, x))
        self._slab_start = 0  # in the core, along z
        self._rows = slice(0, 0)  # of the core, that the layer under way touches

    def blend(self, index: Zyx, prediction: Any) -> None:
        """Add one patch's weighted prediction (C, Z, Y, X); layers in order.

        The prediction is not weighted in place: it may be the network's own buffer, or a view of
        one value. Products are rounded to whole steps before they are added, so that the sums are
        exact: see :mod:`beam_inference.geometry.exact_sums`.
        """
        z, y, x = (slices[k] for slices, k in zip(self._slices, index, strict=True))
        if z.core != self._rows:
            self._move_to_rows(z.core)
        region = (z.patch, slice(None), y.patch, x.patch)
        weights = self._weights.of_patch(index, region)
        weighted = self._weighted[region]
        self._device.multiply(prediction.swapaxes(0, 1)[region], weights, weighted)
        sums = self._slab_rows(z.core.start, z.core.stop)[:, :, y.core, x.core]
        for head in self._heads:
            terms = weighted[:, head.channels]
            if head.bound != self._bound:  # by a power of two, which rounds nothing
                terms *= self._bound / head.bound
            self._device.add_rounded(sums[:, head.channels], terms, step_of(head.bound))
        self._beyond_bound = self._beyond_bound + self._exceeds(prediction)

    def _exceeds(self, prediction: Any) -> Any:
        """Whether a patch's predictions are too large for exact sums, in any head: 1 or 0.

        A comparison with NaN is false: NaN is noticed where rows leave the slab. On a GPU the
        answer stays there, so that nobody waits for it.
        """
        exceeds: Any = 0
        for head in self._heads:
            if head.can_exceed:
                largest = self._device.largest_magnitude(prediction[head.channels])
                exceeds = exceeds | (largest > largest_exact(head.bound))
        return exceeds

    def count_beyond_bound(self) -> int:
        """Count the patches so far whose predictions were too large: their sums may be rounded.

        The whole patch is looked at, whatever of it lies in the core, so that the number of patches
        of a job that are counted does not depend on where chunks are cut.
        """
        return int(self._beyond_bound)

    def finish(self) -> AnyArray:
        """Return the core (C, Z, Y, X), after the last patch."""
        self._flush_rows(self._depth)
        if self._result is None:
            return self._device.download(self._slab)().swapaxes(0, 1)
        self._collect_download(self._result)
        return self._result

    def _slab_rows(self, start: int, stop: int) -> Any:
        """A view of the slab: the given rows of the core."""
        return self._slab[start - self._slab_start : stop - self._slab_start]

    def _move_to_rows(self, rows: slice) -> None:
        """Go on to the next layer's rows: earlier rows are final, new ones begin as zeros."""
        old_stop = self._rows.stop
        self._flush_rows(rows.start)
        if self._result is not None and rows.start > self._slab_start:
            distance = rows.start - self._slab_start
            kept = old_stop - rows.start
            for first in range(0, kept, distance):  # a copy must not overlap its source
                last = min(first + distance, kept)
                self._slab[first:last] = self._slab[first + distance : last + distance]
            self._slab_start = rows.start
        self._slab_rows(old_stop, rows.stop)[...] = 0
        self._rows = rows

    def _flush_rows(self, stop: int) -> None:
        """Check rows before ``stop`` and begin their download; a GPU goes on computing meanwhile.

        Raises:
            NonFiniteError: one of their values is NaN or infinite.
        """
        if stop == self._rows.start:
            return
        rows = self._slab_rows(self._rows.start, stop)
        if self._result is not None:
            # The last download is collected while the GPU still computes these rows.
            self._collect_download(self._result)
        check_finite(rows)
        if self._result is not None:
            download = self._device.download(rows, self._encoding)
            self._pending_download = _Download(slice(self._rows.start, stop), download)
            if self._device.on_host:
                self._collect_download(self._result)  # they are there, and would take memory

    def _collect_download(self, result: AnyArray) -> None:
        """Put the rows that are on their way into the result."""
        if self._pending_download is not None:
            rows = self._pending_download.wait()
            result[:, self._pending_download.rows] = rows.swapaxes(0, 1)
            self._pending_download = None
