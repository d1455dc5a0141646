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
from typing import Any, NamedTuple, Protocol

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

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """A float32 device array of zeros."""

    def predict(self, batch: Any) -> Any:
        """Predict a batch (N, C_in, Z, Y, X) float32: a float32 device array (N, C_out, Z', Y', X').

        Z', Y', X' are the patch, or the patch grown by the crop margin. The activation is applied. The next call may
        overwrite what this one returned.

        Raises:
            DeviceOutOfMemory: the batch is too large; a smaller one may do.
        """

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
) -> ChunkResult:
    """Compute all patches of a chunk and blend them into its core.

    ``cutout`` holds ``work.input_box``, shape (input channels, Z, Y, X), in its stored dtype. ``normalize`` maps a
    float32 batch of stored values to what the network expects, and may do so in place. Every network call has exactly
    ``batch_size`` patches; a short batch is filled up with repeats, whose results are dropped, because the batch's size
    changes a network's last bits. Contributions are added in the lattice's lexicographic order, each voxel's sum being
    the same operations whatever the chunk.

    ``answers`` keeps what the network answers to patches of one value throughout (background, or what lies outside the
    volume), from chunk to chunk: it is computed once for each of a few values, and changes nothing but the time.

    Raises:
        ModelContractError: the network returns arrays of an unexpected shape.
        NonFiniteError: the core holds NaN or infinite values.
        DeviceOutOfMemory: one patch at a time is still too much.
    """
    if cutout.shape[1:] != work.input_box.shape:
        raise ValueError(f"the cutout has shape {cutout.shape[1:]}, the input box {work.input_box.shape}")
    uniform_patches = 0
    with network.session():
        with _told_of_chunk(work):
            patches = _Patches(cutout, work, network, normalize, output_channels, {} if answers is None else answers)
            core = _Core(work, network, output_channels, encoding)
        waiting = deque(product(*work.patches))
        while waiting:
            try:
                window = list(patches.window(waiting, batch_size))
                unknown = [index for index, answer in window if answer is None]
                predictions = iter(patches.predict(unknown, batch_size) if unknown else ())
            except DeviceOutOfMemory:
                if batch_size == 1:
                    with _told_of_chunk(work):
                        raise
                logger.warning(
                    "device out of memory with %d patches a batch; going on with %d", batch_size, batch_size // 2
                )
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


class _Patches:
    """The network's inputs, cut out of a chunk's, and what it predicts for them."""

    def __init__(
        self,
        cutout: NDArray[Any],
        work: ChunkWork,
        network: Network,
        normalize: Callable[[Any], Any],
        output_channels: int,
        answers: MutableMapping[tuple[float, ...], Any],
    ) -> None:
        self._cutout, self._work, self._network, self._normalize = cutout, work, network, normalize
        self._output_channels, self._answers = output_channels, answers
        self._volume = network.upload(cutout)
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
            self._batch = self._network.zeros((batch_size, self._cutout.shape[0], *shape))
        for position in range(batch_size):
            self._batch[position] = self._volume[slices[min(position, len(slices) - 1)]]
        predictions = self._network.predict(self._normalize(self._batch))
        leading = (batch_size, self._output_channels)
        return cropped_to_patch(predictions, leading, work.lattice.patch_shape, work.crop_margin)

    def _slices(self, index: Zyx) -> tuple[slice, ...]:
        box = self._work.lattice.patch_box(index).grow(self._work.crop_margin)
        return (slice(None), *box.slices_in(self._work.input_box))


class _Core:
    """A chunk's core, blended in a slab on the device that moves along z, and encoded behind it."""

    def __init__(self, work: ChunkWork, network: Network, channels: int, encoding: Encoding) -> None:
        self._work, self._network, self._encoding = work, network, encoding
        self._layer = work.patches[0][0]
        z, y, x = work.core_box.shape
        depth, *across = work.lattice.patch_shape
        self._weights, self._weighted = (network.zeros((depth, n, *across)) for n in (1, channels))
        # All of them now: made between the network's answers, they would lie between the holes that these leave.
        self._along_z, self._planes = _axis_and_planes(work, network)
        self._result: NDArray[Any] | None = None
        self._on_its_way: tuple[slice, Callable[[], NDArray[Any]]] | None = None
        if network.on_host and encoding == AS_COMPUTED:
            self._slab = network.zeros((channels, z, y, x)).swapaxes(0, 1)
        else:
            self._result = arrays.empty((channels, z, y, x), encoding.dtype)
            # Z before the channels: what leaves, and what moves, is then one piece of memory.
            self._slab = network.zeros((min(work.lattice.patch_shape[0], z), channels, y, x))

    def blend(self, index: Zyx, prediction: Any) -> None:
        """Add one patch's weighted prediction (C, Z, Y, X).

        It is not weighted in place: what the network returned may be its own buffer, or a view of one value. Products
        and sum are separate operations, each rounded on its own: a fused multiply-add may be used for some voxels of an
        array and not for others, which would make the bits depend on where a chunk is cut.
        """
        if index[0] != self._layer:
            self._advance(index[0])
        work = self._work
        box = work.lattice.patch_box(index)
        here = box.intersection(work.core_box)
        z, y, x = here.slices_in(box)
        weights, part = self._weights[z, :, y, x], self._weighted[z, :, y, x]
        self._network.multiply(self._along_z[index[0]][z], self._planes[index[1:]][:, :, y, x], weights)
        self._network.multiply(prediction[:, z, y, x].swapaxes(0, 1), weights, part)
        first = self._rows(self._layer).start
        _, y, x = here.slices_in(work.core_box)
        sums = self._slab[here.start[0] - first : here.stop[0] - first, :, y, x]
        sums += part  # not self._slab[...] += part, which would write them twice

    def finished(self) -> NDArray[Any]:
        """The core; no patch is left to blend."""
        stop = self._work.core_box.stop[0]
        if self._result is None:
            return self._leaving(stop)().swapaxes(0, 1)
        self._leave(self._result, stop)
        self._arrive(self._result)
        return self._result

    def _rows(self, layer: int) -> range:
        """The core's voxels along z that the slab holds while a layer's patches are blended."""
        core = self._work.core_box
        if self._result is None:
            return range(core.start[0], core.stop[0])
        start = self._work.lattice.axes[0].patch_start(layer)
        return range(max(start, core.start[0]), min(start + self._work.lattice.patch_shape[0], core.stop[0]))

    def _advance(self, layer: int) -> None:
        """Move the slab to another layer: what lies before it leaves, what both share moves to the front."""
        before, after = self._rows(self._layer), self._rows(layer)
        gone, kept = after.start - before.start, before.stop - after.start
        if self._result is not None and gone:
            self._leave(self._result, after.start)
            for moved in range(0, kept, gone):  # a copy must not overlap its source
                here = slice(moved, min(moved + gone, kept))
                self._slab[here] = self._slab[here.start + gone : here.stop + gone]
            self._slab[kept:] = 0
        self._layer = layer

    def _leave(self, result: NDArray[Any], stop: int) -> None:
        """Send the slab's voxels before ``stop`` to the result; a GPU computes on while they are on their way."""
        self._arrive(result)  # the last ones, while the GPU still computes what is to leave now
        first, offset = self._rows(self._layer).start, self._work.core_box.start[0]
        self._on_its_way = slice(first - offset, stop - offset), self._leaving(stop)
        if self._network.on_host:
            self._arrive(result)  # they are there, and would take memory

    def _arrive(self, result: NDArray[Any]) -> None:
        """Put what is on its way where it belongs in the result."""
        if self._on_its_way is not None:
            where, arrived = self._on_its_way
            result[:, where] = arrived().swapaxes(0, 1)
            self._on_its_way = None

    def _leaving(self, stop: int) -> Callable[[], NDArray[Any]]:
        """The slab's voxels before ``stop`` as they are written, (Z, C, Y, X), on their way to the host."""
        part = self._slab[: stop - self._rows(self._layer).start]
        # A sum that is finite has finite terms, and takes one pass; one that is not may have overflowed.
        if not (np.isfinite(float(part.sum())) or np.isfinite([float(part.min()), float(part.max())]).all()):
            raise NonFiniteError("NaN or infinite values after blending")
        return self._network.download(part, self._encoding)


def _axis_and_planes(work: ChunkWork, network: Network) -> tuple[dict[int, Any], dict[tuple[int, int], Any]]:
    """Blend weights of a chunk's patches, on the device: (Z, 1, 1, 1) by index along z, (1, 1, Y, X) by the others."""
    z, y, x = (
        {k: axis_weights(axis, k) for k in indices}
        for axis, indices in zip(work.lattice.axes, work.patches, strict=True)
    )
    planes, alike = {}, {}  # away from the domain's ends axes' weights are the same arrays
    for j, i in product(y, x):
        weights = (id(y[j]), id(x[i]))
        if weights not in alike:
            alike[weights] = network.upload((y[j][:, None] * x[i])[None, None])
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
