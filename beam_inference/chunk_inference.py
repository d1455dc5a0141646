"""From a cutout and a network to the blended core of a chunk: pure, and blind to where arrays live.

The loop uses only slicing and in-place arithmetic, which NumPy arrays and torch tensors share. So the accumulator, the
blending and the network are all on the network's device, and this module knows no array library but NumPy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from beam_inference.blending import patch_weights
from beam_inference.bounding_box import BoundingBox, Zyx
from beam_inference.errors import DeviceOutOfMemory, ModelContractError
from beam_inference.plan import ChunkWork

logger = logging.getLogger(__name__)


class Network(Protocol):
    """What patch inference needs of a network, wherever its arrays live ("device arrays")."""

    def session(self) -> AbstractContextManager[object]:
        """A context in which all the following are called (torch: inference mode)."""

    def upload(self, array: NDArray[Any]) -> Any:
        """A device array of the same shape, dtype and values."""

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """A float32 device array of zeros."""

    def predict(self, batch: Any) -> Any:
        """Predict a batch (N, C_in, Z, Y, X) float32: a float32 device array (N, C_out, Z', Y', X').

        Z', Y', X' are the patch, or the patch grown by the crop margin. The activation is applied.

        Raises:
            DeviceOutOfMemory: the batch is too large; a smaller one may do.
        """

    def download(self, array: Any) -> NDArray[np.float32]:
        """A NumPy array of the same shape and values."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk's blended core.

    Attributes:
        core: float32, shape (output channels, *core_box.shape).
        batch_size: patches per network call in the end; smaller than asked for if the device ran out of memory.
    """

    core: NDArray[np.float32]
    batch_size: int


def infer_chunk(
    cutout: NDArray[Any],
    work: ChunkWork,
    network: Network,
    normalize: Callable[[Any], Any],
    output_channels: int,
    batch_size: int,
) -> ChunkResult:
    """Compute all patches of a chunk and blend them into its core.

    ``cutout`` holds ``work.input_box``, shape (input channels, Z, Y, X), in its stored dtype. ``normalize`` maps a
    float32 batch of stored values to what the network expects, and may do so in place. Every network call has exactly
    ``batch_size`` patches; a short batch is filled up with repeats, whose results are dropped, because the batch's size
    changes a network's last bits. Contributions are added in the lattice's lexicographic order, each voxel's sum being
    the same operations whatever the chunk.

    Raises:
        ModelContractError: the network returns arrays of an unexpected shape.
        DeviceOutOfMemory: one patch at a time is still too much.
    """
    if cutout.shape[1:] != work.input_box.shape:
        raise ValueError(f"the cutout has shape {cutout.shape[1:]}, the input box {work.input_box.shape}")
    patch_shape = work.lattice.patch_shape
    with network.session():
        try:
            volume = network.upload(cutout)
            accumulator = network.zeros((output_channels, *work.core_box.shape))
        except DeviceOutOfMemory as error:
            raise _too_large(work, error) from None
        indices = product(*work.patches)
        while pending := list(islice(indices, batch_size)):
            while pending:
                group = pending[:batch_size]
                try:
                    predictions = _predict(volume, cutout.shape[0], group, work, network, normalize, batch_size)
                except DeviceOutOfMemory as error:
                    batch_size = _halved(batch_size, error, work)
                    continue
                predictions = cropped_to_patch(
                    predictions, (batch_size, output_channels), patch_shape, work.crop_margin
                )
                for index, prediction in zip(group, predictions, strict=False):  # what filled the batch up is dropped
                    _blend(accumulator, prediction, index, work)
                del pending[: len(group)]
        core = network.download(accumulator)
    return ChunkResult(core, batch_size)


def _predict(
    volume: Any,
    channels: int,
    group: list[Zyx],
    work: ChunkWork,
    network: Network,
    normalize: Callable[[Any], Any],
    batch_size: int,
) -> Any:
    """Gather the inputs of ``group`` (at most ``batch_size`` patches) into a full batch, and predict it."""
    boxes = [work.lattice.patch_box(index).grow(work.crop_margin) for index in group]
    batch = network.zeros((batch_size, channels, *boxes[0].shape))
    for position in range(batch_size):
        box = boxes[min(position, len(boxes) - 1)]
        batch[position] = volume[(slice(None), *box.slices_in(work.input_box))]
    return network.predict(normalize(batch))


def _blend(accumulator: Any, prediction: Any, index: Zyx, work: ChunkWork) -> None:
    """Add one patch's weighted prediction (C, Z, Y, X) to the core's accumulator.

    The first product makes a new array: what the network returned may be its own buffer, or a view of one value.

    Products and sum are separate operations, each rounded on its own: a fused multiply-add may be used for some voxels
    of an array and not for others, which would make the bits depend on where a chunk is cut.
    """
    box = work.lattice.patch_box(index)
    here = box.intersection(work.core_box)
    weights = patch_weights(work.lattice, index)
    part = prediction[(slice(None), *here.slices_in(box))]
    for axis, (vector, inside) in enumerate(zip(weights, here.slices_in(box), strict=True)):
        shape = [1, 1, 1, 1]
        shape[axis + 1] = -1
        factor = _like(part, vector[inside]).reshape(shape)
        part = part * factor if axis == 0 else part.__imul__(factor)
    accumulator[(slice(None), *here.slices_in(work.core_box))] += part


def _like(array: Any, vector: NDArray[np.float32]) -> Any:
    """``vector`` as an array of the same library and device as ``array``."""
    return vector if isinstance(array, np.ndarray) else array.new_tensor(vector)


def cropped_to_patch(predictions: Any, leading: tuple[int, int], patch_shape: Zyx, crop_margin: Zyx) -> Any:
    """Predictions (N, C, Z, Y, X) cropped to the patch, for networks that return it grown by the crop margin.

    Raises:
        ModelContractError: the shape is neither ``(*leading, *patch_shape)`` nor that grown by the margin.
    """
    grown = BoundingBox((0, 0, 0), patch_shape).grow(crop_margin).shape
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


def _halved(batch_size: int, error: DeviceOutOfMemory, work: ChunkWork) -> int:
    if batch_size == 1:
        raise _too_large(work, error) from None
    logger.warning("device out of memory with %d patches a batch; going on with %d", batch_size, batch_size // 2)
    return batch_size // 2


def _too_large(work: ChunkWork, error: DeviceOutOfMemory) -> DeviceOutOfMemory:
    return DeviceOutOfMemory(
        f"the device is out of memory at a batch of one patch of {list(work.lattice.patch_shape)} voxels, "
        f"with a chunk of {list(work.core_box.shape)} and its input of {list(work.input_box.shape)} on it. "
        f"Make inference.chunk_shape smaller, or use a device with more memory. ({error})"
    )
