"""From a cutout and a network to the blended core of a chunk: pure, and blind to where arrays live.

The loop uses only slicing and in-place arithmetic, which NumPy arrays and torch tensors share. So the accumulator, the
blending and the network are all on the network's device, and this module knows no array library but NumPy.

Patches come in layers, those of one index along z. Once the patches of a layer are blended, the voxels before the next
layer's start are final: they are brought to the output's dtype on the device, and leave it. So the accumulator is a
slab as deep as one patch, whatever the chunk's depth::

    z →      ├──── layer 0 ────┤
                       ├──── layer 1 ────┤
             └ leave 1 ┘└──── slab ──────┘

Where the device is the host and float32 is what is wanted, the result itself is the accumulator, and nothing moves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.blending import axis_weights
from beam_inference.bounding_box import Zyx, grown_shape
from beam_inference.errors import DeviceOutOfMemory, ModelContractError, NonFiniteError
from beam_inference.plan import ChunkWork

logger = logging.getLogger(__name__)

UNIFORM_ANSWERS = 2
"""Values of uniform patches whose answers are kept: the background, and perhaps the opposite."""


class Encoding(NamedTuple):
    """How float32 values are written.

    Attributes:
        dtype: the output's.
        value_range: (low, high), which maps onto an integer dtype's full range; values beyond are clipped, the rest
            rounded to the nearest integer, halves to even. None for float32, which is written as it is.
    """

    dtype: np.dtype[Any]
    value_range: tuple[float, float] | None = None


AS_COMPUTED = Encoding(np.dtype(np.float32))
"""Float32, as the network and the blending gave it."""


class Network(Protocol):
    """What patch inference needs of a network, wherever its arrays live ("device arrays")."""

    @property
    def on_host(self) -> bool:
        """Whether device arrays are in the machine's memory."""

    def session(self) -> AbstractContextManager[object]:
        """A context in which all the following are called (torch: inference mode)."""

    def upload(self, array: NDArray[Any]) -> Any:
        """A device array of the same shape, dtype and values."""

    def empty(self, shape: tuple[int, ...]) -> Any:
        """A float32 device array of any values: to be written before it is read."""

    def predict(self, batch: Any) -> Any:
        """Predict a batch (N, C_in, Z, Y, X) float32: a float32 device array (N, C_out, Z', Y', X').

        Z', Y', X' are the patch, or the patch grown by the crop margin. The activation is applied. The next call may
        overwrite what this one returned.

        Raises:
            DeviceOutOfMemory: the batch is too large; a smaller one may do.
        """

    def make_room(self) -> bool:
        """Once a call has failed, give up what the device holds for later; whether that was an array."""

    def copy(self, array: Any) -> Any:
        """A device array of its own, with the same values."""

    def multiply(self, array: Any, by: Any, out: Any) -> None:
        """Write the product of two device arrays into a third."""

    def download(self, array: Any, encoding: Encoding = AS_COMPUTED) -> Callable[[], NDArray[Any]]:
        """Encode a float32 device array there, and begin to bring it to the host; a call of what is returned waits.

        The device array may be overwritten by this; and after it by others, except on the host, where it may be what
        is returned. On another device the next call may overwrite what this one's returned.
        """


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk's blended core.

    Attributes:
        core: in the output's dtype, shape (output channels, *core_box.shape).
        batch_size: patches per network call in the end; smaller than asked for if the device ran out of memory.
        uniform_patches: patches whose input was one value throughout, and whose answer was known.
    """

    core: NDArray[Any]
    batch_size: int
    uniform_patches: int


def infer_chunk(
    cutout: NDArray[Any],
    work: ChunkWork,
    network: Network,
    normalize: Callable[[Any], Any],
    output_channels: int,
    batch_size: int,
    encoding: Encoding = AS_COMPUTED,
    answers: MutableMapping[tuple[float, ...], Any] | None = None,
    uploaded: Callable[[], Any] | None = None,
) -> ChunkResult:
    """Compute all patches of a chunk and blend them into its core.

    ``cutout`` holds ``work.input_box``, shape (input channels, Z, Y, X), in its stored dtype. ``normalize`` maps a
    float32 batch of stored values to what the network expects, and may do so in place. Every network call has exactly
    ``batch_size`` patches; a short batch is filled up with repeats, whose results are dropped, because the batch's size
    changes a network's last bits. Contributions are added in the lattice's lexicographic order, each voxel's sum being
    the same operations whatever the chunk.

    ``answers`` keeps what the network answers to patches of one value throughout (background, or what lies outside the
    volume), from chunk to chunk: it is computed once for each of a few values, and changes nothing but the time.
    ``uploaded`` gives the cutout as a device array, where it is on its way there.

    Raises:
        ModelContractError: the network returns arrays of an unexpected shape.
        NonFiniteError: the core holds NaN or infinite values.
        DeviceOutOfMemory: one patch at a time is still too much.
    """
    if cutout.shape[1:] != work.input_box.shape:
        raise ValueError(f"the cutout has shape {cutout.shape[1:]}, the input box {work.input_box.shape}")
    uniform_patches, places = 0, [_places(work, axis) for axis in range(3)]
    with network.session():
        with _told_of_chunk(work):
            known = {} if answers is None else answers
            volume = uploaded() if uploaded else network.upload(cutout)
            patches = _Patches(cutout, volume, work, places, network, normalize, output_channels, known)
            core = _Core(work, places, network, output_channels, encoding)
        waiting = deque(product(*work.patches))
        while waiting:
            try:
                window = list(patches.window(waiting, batch_size))
                unknown = [index for index, answer in window if answer is None]
                predictions = iter(patches.predict(unknown, batch_size) if unknown else ())
            except DeviceOutOfMemory:
                if not network.make_room():
                    if batch_size == 1:
                        with _told_of_chunk(work):
                            raise
                    logger.warning("device out of memory with %d patches a batch; halving it", batch_size)
                    batch_size //= 2
                    patches.forget_answers()  # of the larger batch
                continue
            with _told_of_chunk(work):  # a smaller batch would not help: half of this one is blended
                for index, answer in window:
                    core.blend(index, next(predictions) if answer is None else answer)
                    waiting.popleft()
            del predictions  # before the next ones: they would lie beside them
            uniform_patches += len(window) - len(unknown)
        with _told_of_chunk(work):
            finished = core.finished()
    return ChunkResult(finished, batch_size, uniform_patches)


class _Place(NamedTuple):
    """Of a patch, on one axis: where its input is in the cutout, and what it shares with the core, in either."""

    cutout: slice
    patch: slice
    core: slice


_Places: TypeAlias = list[dict[int, _Place]]
"""By axis and the patch's index on it."""


class _Patches:
    """The network's inputs, cut out of a chunk's, and what it predicts for them."""

    def __init__(
        self,
        cutout: NDArray[Any],
        volume: Any,
        work: ChunkWork,
        places: _Places,
        network: Network,
        normalize: Callable[[Any], Any],
        output_channels: int,
        answers: MutableMapping[tuple[float, ...], Any],
    ) -> None:
        self._cutout, self._volume, self._work, self._places = cutout, volume, work, places
        self._network, self._normalize = network, normalize
        self._output_channels, self._answers = output_channels, answers
        self._batch: Any = None

    def window(self, indices: Iterable[Zyx], batch_size: int) -> Iterator[tuple[Zyx, Any]]:
        """The first of the patches, of which ``batch_size`` are to be predicted; with the answer of each other one."""
        unknown = 0
        for index in indices:
            answer = self._answer(index, batch_size)
            unknown += answer is None
            yield index, answer
            if unknown == batch_size:
                break

    def forget_answers(self) -> None:
        """To uniform patches."""
        self._answers.clear()

    def _answer(self, index: Zyx, batch_size: int) -> Any:
        """What the network answers to a patch of one value throughout; None if it is not, or is one value too many."""
        patch = self._cutout[self._slices(index)]
        first = patch[:, :1, :1, :1]
        # Most patches differ at a glance: only the others are looked at voxel by voxel.
        if not all((part == first).all() for part in (patch[:, :1, :1], patch[:, ::7, ::7, ::7], patch)):
            return None
        values = (batch_size, *first.ravel().tolist())  # answers in another size of batch may be of other bits
        if values not in self._answers and len(self._answers) < UNIFORM_ANSWERS:
            self._answers[values] = self._network.copy(self.predict([index], batch_size)[0])
        return self._answers.get(values)

    def predict(self, indices: list[Zyx], batch_size: int) -> Any:
        """Predict at most ``batch_size`` patches as a full batch, (batch_size, C, *patch_shape); others are repeats."""
        work = self._work
        slices = [self._slices(index) for index in indices]
        if self._batch is None or len(self._batch) != batch_size:
            shape = grown_shape(work.lattice.patch_shape, work.crop_margin)
            self._batch = None
            self._batch = self._network.empty((batch_size, self._cutout.shape[0], *shape))
        for position in range(batch_size):
            self._batch[position] = self._volume[slices[min(position, len(slices) - 1)]]
        predictions = self._network.predict(self._normalize(self._batch))
        leading = (batch_size, self._output_channels)
        return cropped_to_patch(predictions, leading, work.lattice.patch_shape, work.crop_margin)

    def _slices(self, index: Zyx) -> tuple[slice, ...]:
        return (slice(None), *(places[k].cutout for places, k in zip(self._places, index, strict=True)))


class _Core:
    """A chunk's core, blended in a slab on the device that moves along z, and encoded behind it."""

    def __init__(self, work: ChunkWork, places: _Places, network: Network, channels: int, encoding: Encoding) -> None:
        self._work, self._network, self._encoding = work, network, encoding
        depth, y, x = work.core_box.shape
        # All of them now: made between the network's answers, they would lie between the holes that these leave.
        patch_depth, *across = work.lattice.patch_shape
        self._weights, self._weighted = (network.empty((patch_depth, n, *across)) for n in (1, channels))
        self._along_z, self._planes = _axis_and_planes(work, network)
        self._places = places
        self._result: NDArray[Any] | None = None
        self._on_its_way: tuple[slice, Callable[[], NDArray[Any]]] | None = None
        if network.on_host and encoding == AS_COMPUTED:
            self._slab = network.empty((channels, depth, y, x)).swapaxes(0, 1)
        else:
            self._result = arrays.empty((channels, depth, y, x), encoding.dtype)
            # Z before the channels: what leaves, and what moves, is then one piece of memory.
            self._slab = network.empty((min(patch_depth, depth), channels, y, x))
        self._slab_start = 0  # in the core, along z
        self._rows = slice(0, 0)  # of the core, those that the layer under way touches

    def blend(self, index: Zyx, prediction: Any) -> None:
        """Add one patch's weighted prediction (C, Z, Y, X).

        It is not weighted in place: what the network returned may be its own buffer, or a view of one value. Products
        and sum are separate operations, each rounded on its own: a fused multiply-add may be used for some voxels of an
        array and not for others, which would make the bits depend on where a chunk is cut.
        """
        z, y, x = (places[k] for places, k in zip(self._places, index, strict=True))
        if z.core != self._rows:
            self._advance(z.core)
        here = (z.patch, slice(None), y.patch, x.patch)
        weights, part = self._weights[here], self._weighted[here]
        self._network.multiply(self._along_z[index[0]][z.patch], self._planes[index[1:]][y.patch, x.patch], weights)
        self._network.multiply(prediction.swapaxes(0, 1)[here], weights, part)
        sums = self._slab[z.core.start - self._slab_start : z.core.stop - self._slab_start, :, y.core, x.core]
        sums += part  # not self._slab[...] += part, which would write them twice

    def finished(self) -> NDArray[Any]:
        """The core; no patch is left to blend."""
        self._leave(self._work.core_box.shape[0])
        if self._result is None:
            return self._network.download(self._slab)().swapaxes(0, 1)
        self._arrive(self._result)
        return self._result

    def _advance(self, rows: slice) -> None:
        """Go on to the next layer's rows: those before them are final, those after the last ones' begin as zeros."""
        begun = self._rows.stop
        self._leave(rows.start)
        if self._result is not None and rows.start > self._slab_start:
            gone, kept = rows.start - self._slab_start, begun - rows.start
            for moved in range(0, kept, gone):  # a copy must not overlap its source
                here = slice(moved, min(moved + gone, kept))
                self._slab[here] = self._slab[here.start + gone : here.stop + gone]
            self._slab_start = rows.start
        self._slab[begun - self._slab_start : rows.stop - self._slab_start] = 0
        self._rows = rows

    def _leave(self, stop: int) -> None:
        """Check rows before ``stop`` and send them to the result; a GPU computes on while they are on their way."""
        if stop == self._rows.start:
            return
        part = self._slab[self._rows.start - self._slab_start : stop - self._slab_start]
        if self._result is not None:
            self._arrive(self._result)  # the last ones, while the GPU still computes what is to leave now
        # A sum that is finite has finite terms, and takes one pass; one that is not may have overflowed.
        if not (np.isfinite(float(part.sum())) or np.isfinite([float(part.min()), float(part.max())]).all()):
            raise NonFiniteError("NaN or infinite values after blending")
        if self._result is not None:
            self._on_its_way = slice(self._rows.start, stop), self._network.download(part, self._encoding)
            if self._network.on_host:
                self._arrive(self._result)  # they are there, and would take memory

    def _arrive(self, result: NDArray[Any]) -> None:
        """Put what is on its way where it belongs in the result."""
        if self._on_its_way is not None:
            where, arrived = self._on_its_way
            result[:, where] = arrived().swapaxes(0, 1)
            self._on_its_way = None


def _places(work: ChunkWork, axis: int) -> dict[int, _Place]:
    core, lattice, places = work.core_box, work.lattice.axes[axis], {}
    for k in work.patches[axis]:
        first = lattice.patch_start(k)
        start, stop = max(first, core.start[axis]), min(first + lattice.patch, core.stop[axis])
        read = first - work.crop_margin[axis] - work.input_box.start[axis]
        if start >= stop or read < 0:  # a negative slice would wrap around silently
            raise ValueError(f"patch {k} of axis {axis} misses the core {core}, or what is read, {work.input_box}")
        places[k] = _Place(
            slice(read, read + lattice.patch + 2 * work.crop_margin[axis]),
            slice(start - first, stop - first),
            slice(start - core.start[axis], stop - core.start[axis]),
        )
    return places


def _axis_and_planes(work: ChunkWork, network: Network) -> tuple[dict[int, Any], dict[tuple[int, int], Any]]:
    """Blend weights of a chunk's patches, on the device: (Z, 1, 1, 1) by index along z, (Y, X) by the others."""
    z, y, x = (
        {k: axis_weights(axis, k) for k in indices}
        for axis, indices in zip(work.lattice.axes, work.patches, strict=True)
    )
    planes, alike = {}, {}  # away from the domain's ends axes' weights are the same arrays
    for j, i in product(y, x):
        weights = (id(y[j]), id(x[i]))
        if weights not in alike:
            alike[weights] = network.upload(y[j][:, None] * x[i])
        planes[j, i] = alike[weights]
    return {k: network.upload(weights.reshape(-1, 1, 1, 1)) for k, weights in z.items()}, planes


def cropped_to_patch(predictions: Any, leading: tuple[int, int], patch_shape: Zyx, crop_margin: Zyx) -> Any:
    """Predictions (N, C, Z, Y, X) cropped to the patch, for networks that return it grown by the crop margin.

    Raises:
        ModelContractError: the shape is neither ``(*leading, *patch_shape)`` nor that grown by the margin.
    """
    grown = grown_shape(patch_shape, crop_margin)
    shape = tuple(predictions.shape)
    if shape == (*leading, *patch_shape):
        return predictions
    if shape == (*leading, *grown):
        z, y, x = (slice(m, m + p) for m, p in zip(crop_margin, patch_shape, strict=True))
        return predictions[:, :, z, y, x]
    margin = f" or {[*leading, *grown]} (grown by model.crop_margin)" if any(crop_margin) else ""
    raise ModelContractError(
        f"the network returns an array of shape {list(shape)} (batch, channels, z, y, x) for an input of "
        f"{list(grown)}; expected {[*leading, *patch_shape]}{margin}. Check model.output_channels, "
        "model.crop_margin and inference.patch_shape."
    )


@contextmanager
def _told_of_chunk(work: ChunkWork) -> Iterator[None]:
    """Where nothing smaller is left to try: the error says how large what was tried is."""
    try:
        yield
    except DeviceOutOfMemory as error:
        raise DeviceOutOfMemory(
            f"the device is out of memory at a batch of one patch of {list(work.lattice.patch_shape)} voxels, "
            f"with a chunk of {list(work.core_box.shape)} and its input of {list(work.input_box.shape)} on it. "
            f"Make inference.chunk_shape smaller, or use a device with more memory. ({error})"
        ) from None
