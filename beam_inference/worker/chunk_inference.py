"""From a chunk's input and a network to the blended core of the chunk, wherever arrays live.

The loop uses only slicing and in-place arithmetic, which NumPy arrays and torch tensors share. So
the accumulator, the blending and the network are all on the network's device, and this module knows
no array library but NumPy.

Patches come in layers: the patches of one index along z. Once the patches of a layer are blended,
the voxels before the next layer's start are final: they are converted to the output's dtype on the
device, and downloaded. So the accumulator is a slab as deep as one patch, whatever the chunk's
depth::

    z →      ├──── layer 0 ────┤
                       ├──── layer 1 ────┤
             └ flushed ┘└──── slab ──────┘

Where the device is the host and float32 is wanted, the result itself is the accumulator, and
nothing is moved.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from beam_inference.arrays import AnyArray
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.engines.trial import crop_to_patch
from beam_inference.errors import DeviceOutOfMemory
from beam_inference.geometry.blending import BUMP, BlendWindow
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.zyx import Zyx
from beam_inference.operators.normalize_steps import predict_normalized
from beam_inference.worker.accumulator import Accumulator, BoundedChannels
from beam_inference.worker.chunk_input import ChunkInput
from beam_inference.worker.patches import ChunkPatches, PatchBatch, Row

logger = logging.getLogger(__name__)

UNIFORM_ANSWERS = 2
"""Uniform values whose predictions are kept: the background, and perhaps its opposite."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk's blended core.

    Attributes:
        core: in the dtype of the encoding, shape (output channels, *core_box.shape).
        batch_size: patches per network call in the end.
        uniform_patches: patches whose input was one value throughout, and whose prediction was
            known already.
        patches_beyond_bound: patches whose predictions went beyond the prediction bound.
    """

    core: AnyArray
    batch_size: int
    uniform_patches: int
    patches_beyond_bound: int


@dataclass(frozen=True, slots=True)
class NetworkFill:
    """What the network sees beyond the volume, whatever normalisation would make of it.

    Attributes:
        volume: the volume's bounds.
        value: the value there.
    """

    volume: BoundingBox
    value: float


@dataclass(frozen=True, slots=True)
class WaitingChunk:
    """A chunk that waits for its turn on the device, while patches of it may be computed.

    Attributes:
        inference: is going to compute it.
        cutout: its input, to which predictions are added.
        work: its patches.
    """

    inference: ChunkInference
    cutout: ChunkInput
    work: ChunkWork


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is known of a patch before its batch: its prediction, or None."""

    index: Zyx
    prediction: Any
    is_uniform: bool = False

    @property
    def is_unknown(self) -> bool:
        """Whether it is to be computed."""
        return self.prediction is None


class ChunkInference:
    """Computes all patches of a chunk and blends them into its core; one thread at a time.

    Every network call has exactly ``batch_size`` patches, because the size of a batch changes a
    network's last bits; what else is in it changes nothing. A short batch is filled up with patches
    of chunks that wait for the device, or with repeats, whose results are dropped.
    Contributions are rounded to multiples of one step and added exactly, so each voxel's sum is the
    same whatever the chunk and the order of its patches.

    Predictions for patches of one value throughout (background, or what lies outside the volume)
    are kept from chunk to chunk: each is computed once, for a few values. This changes nothing but
    the time.

    Args:
        predictor: the network on its device.
        normalize: maps a float32 batch of stored values to what the network expects; may work in
            place.
        channels: output channels of the network.
        batch_size: patches per network call.
        bound: the prediction bound, a power of two.
        largest: the largest prediction that the network's activation allows; infinity without one.
        heads: channels of the network with bounds of their own, all of them, instead of ``bound``
            and ``largest``.
        uniform_answers: number of uniform values whose predictions are kept.
        window: what a patch's voxels weigh where patches overlap.
        fill: what patches see beyond the volume, if it is not to be normalised.

    Attributes:
        batch_size: patches per network call; smaller than at the start once the device was out of
            memory.
        answers: kept predictions, by batch size and what the patch's one value is.
    """

    def __init__(
        self,
        predictor: Predictor,
        normalize: Callable[[Any], Any],
        channels: int,
        batch_size: int,
        bound: float,
        *,
        largest: float = math.inf,
        heads: Sequence[BoundedChannels] = (),
        uniform_answers: int = UNIFORM_ANSWERS,
        window: BlendWindow = BUMP,
        fill: NetworkFill | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.answers: dict[tuple[int, bytes], Any] = {}
        self._predictor = predictor
        self._normalize = normalize
        self._channels = channels
        self._heads = heads or [BoundedChannels(slice(None), bound, largest)]
        self._uniform_answers = uniform_answers
        self._window = window
        self._fill = fill

    def start_upload(self, array: AnyArray, box: BoundingBox) -> ChunkInput:
        """Begin to bring a chunk's input to the device; any thread may do so.

        Args:
            array: shape (input channels, Z, Y, X), in the stored dtype.
            box: the voxels that the array holds.
        """
        return ChunkInput(array, box, self._predictor.device.begin_upload(array))

    def infer(
        self,
        cutout: ChunkInput,
        work: ChunkWork,
        encoding: Encoding = AS_COMPUTED,
        waiting: Callable[[], Sequence[WaitingChunk]] = tuple,
    ) -> ChunkResult:
        """Compute the patches of ``work`` and blend them into its core box.

        Args:
            cutout: an input whose box holds ``work.input_box``.
            work: the patches, and the voxels that they are blended into.
            encoding: dtype and value range of the core.
            waiting: tells which chunks of the same network wait for the device, the next one first.

        Raises:
            ModelContractError: the network returns arrays of an unexpected shape.
            NonFiniteError: the core holds NaN or infinite values.
            DeviceOutOfMemory: one patch at a time is still too much.
        """
        batch_size = self.batch_size
        uniform_patches = 0
        with self._predictor.device.session():
            with _explain_out_of_memory(work):
                patches = ChunkPatches(cutout, work)
                batch = PatchBatch(patches.input_shape, self._predictor.device)
                core = Accumulator(
                    work,
                    patches.slices,
                    self._predictor.device,
                    self._channels,
                    encoding,
                    self._heads,
                    self._window,
                )
            undone = deque(product(*work.patches))
            while undone:
                try:
                    answers = self._next_answers(patches, undone, batch, batch_size)
                    unknown = [Row(patches, each.index) for each in answers if each.is_unknown]
                    predictions = self._predict_among(unknown, waiting, batch, batch_size)
                except DeviceOutOfMemory as error:
                    if not self._predictor.device.make_room():
                        batch_size = self._halved_batch_size(batch_size, work, error)
                    continue
                # a smaller batch would not help: half of this one is blended
                with _explain_out_of_memory(work):
                    computed = iter(predictions)
                    for each in answers:
                        prediction = next(computed) if each.is_unknown else each.prediction
                        core.blend(each.index, prediction)
                        patches.known.pop((batch_size, each.index), None)
                        uniform_patches += each.is_uniform
                        undone.popleft()
                del answers, computed, prediction, predictions  # before the next ones are made
            with _explain_out_of_memory(work):
                blended = core.finish()
                beyond_bound = core.count_beyond_bound()
        self.batch_size = batch_size  # what was too much once is not tried again
        return ChunkResult(blended, batch_size, uniform_patches, beyond_bound)

    def _next_answers(
        self, patches: ChunkPatches, indices: Iterable[Zyx], batch: PatchBatch, batch_size: int
    ) -> list[_Answer]:
        """The answers of the first patches, up to a full batch of unknown ones."""
        answers = []
        unknown = 0
        for index in indices:
            answers.append(self._find_answer(patches, index, batch, batch_size))
            unknown += answers[-1].is_unknown
            if unknown == batch_size:
                break
        return answers

    def _find_answer(
        self, patches: ChunkPatches, index: Zyx, batch: PatchBatch, batch_size: int
    ) -> _Answer:
        """What is known of a patch: it was computed before, or is of one value."""
        computed = patches.known.get((batch_size, index))
        if computed is not None:
            return _Answer(index, computed)
        value = patches.uniform_value(index)
        if value is None or (self._fill and patches.beyond(index, self._fill.volume)):
            return _Answer(index, None)
        key = (batch_size, value)  # in another size of batch the bits may differ
        if key not in self.answers and len(self.answers) < self._uniform_answers:
            prediction = self._predict([Row(patches, index)], batch, batch_size)[0]
            self.answers[key] = self._predictor.device.copy(prediction)
        answer = self.answers.get(key)
        return _Answer(index, answer, is_uniform=answer is not None)

    def _predict_among(
        self,
        rows: Sequence[Row],
        waiting: Callable[[], Sequence[WaitingChunk]],
        batch: PatchBatch,
        batch_size: int,
    ) -> Any:
        """Predictions for patches of a chunk, beside which those of waiting chunks are computed.

        Their predictions become known to them.
        """
        if len(rows) in (0, batch_size):
            return self._predict(rows, batch, batch_size)
        chunks = waiting()
        others = self._find_others(rows[0].patches, chunks, batch_size - len(rows), batch_size)
        try:
            predictions = self._predict([*rows, *others], batch, batch_size)
            for row, prediction in zip(others, predictions[len(rows) :], strict=False):
                copy = self._predictor.device.copy(prediction)
                row.patches.known[batch_size, row.index] = copy
        except Exception:
            if not others:
                raise
            for chunk in chunks:
                chunk.cutout.free_device_arrays()
            # what fails in another chunk is not to be this one's fault
            return self._predict(rows, batch, batch_size)
        return predictions

    def _find_others(
        self, patches: ChunkPatches, waiting: Sequence[WaitingChunk], room: int, batch_size: int
    ) -> list[Row]:
        """Patches of chunks that wait, which may stand in a batch with those of this chunk.

        Only the first ones of each chunk are looked at: patches of one value are left to its turn.
        """
        rows: list[Row] = []
        for chunk in waiting:
            if len(rows) == room:
                break
            if not self._may_mix_with(chunk.inference, batch_size):
                continue
            try:
                others = ChunkPatches(chunk.cutout, chunk.work)
            except DeviceOutOfMemory:  # of its input
                break
            if others.input_shape != patches.input_shape:
                continue
            unknown = (
                index
                for index in product(*chunk.work.patches)
                if (batch_size, index) not in others.known
            )
            for index in islice(unknown, room - len(rows)):
                if others.uniform_value(index) is None:
                    rows.append(Row(others, index))
        return rows

    def _may_mix_with(self, other: ChunkInference, batch_size: int) -> bool:
        """Whether patches of another inference, by the same network, are treated like these."""
        return (
            other.batch_size == batch_size
            and other._normalize == self._normalize
            and other._fill == self._fill
        )

    def _predict(self, rows: Sequence[Row], batch: PatchBatch, batch_size: int) -> Any:
        """Predictions (batch_size, C, *patch_shape) of at most ``batch_size`` patches."""
        if not rows:
            return ()

        def predict(array: Any) -> Any:
            if self._fill is not None:
                _fill_beyond(self._fill, rows, array)
            return self._predictor.predict(array)

        array = batch.fill(rows, batch_size)
        predictions = predict_normalized(predict, self._normalize, array)
        work = rows[0].patches.work
        leading = (batch_size, self._channels)
        return crop_to_patch(predictions, leading, work.lattice.patch_shape, work.crop_margin)

    def _halved_batch_size(self, batch_size: int, work: ChunkWork, error: DeviceOutOfMemory) -> int:
        if batch_size == 1:
            raise _out_of_memory(work, error) from None
        logger.warning("device out of memory with %d patches a batch; halving it", batch_size)
        self.answers.clear()  # they belong to the larger batch
        return batch_size // 2


def _fill_beyond(fill: NetworkFill, rows: Sequence[Row], batch: Any) -> None:
    """Put a value into the voxels of normalised patches that lie beyond the volume."""
    for position, row in enumerate(rows):
        for part in row.patches.beyond(row.index, fill.volume):
            batch[(position, slice(None), *part)] = fill.value


@contextmanager
def _explain_out_of_memory(work: ChunkWork) -> Iterator[None]:
    """Raise an out-of-memory error again with the sizes that did not fit."""
    try:
        yield
    except DeviceOutOfMemory as error:
        raise _out_of_memory(work, error) from None


def _out_of_memory(work: ChunkWork, error: DeviceOutOfMemory) -> DeviceOutOfMemory:
    return DeviceOutOfMemory(
        "the device is out of memory at a batch of one patch of "
        f"{list(work.lattice.patch_shape)} voxels, with a chunk of "
        f"{list(work.core_box.shape)} and its input of {list(work.input_box.shape)} on it. "
        f"Make inference.chunk_shape smaller, or use a device with more memory. ({error})"
    )
