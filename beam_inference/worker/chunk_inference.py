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
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

from numpy.typing import NDArray

from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.errors import DeviceOutOfMemory
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.worker.accumulator import Accumulator
from beam_inference.worker.patches import Patches, places_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk's blended core.

    Attributes:
        core: in the output's dtype, shape (output channels, *core_box.shape).
        batch_size: patches per network call in the end; smaller than asked for if the device ran
            out of memory.
        uniform_patches: patches whose input was one value throughout, and whose answer was known.
    """

    core: NDArray[Any]
    batch_size: int
    uniform_patches: int


def infer_chunk(
    cutout: NDArray[Any],
    work: ChunkWork,
    network: Predictor,
    normalize: Callable[[Any], Any],
    output_channels: int,
    batch_size: int,
    encoding: Encoding = AS_COMPUTED,
    answers: MutableMapping[tuple[float, ...], Any] | None = None,
    uploaded: Callable[[], Any] | None = None,
) -> ChunkResult:
    """Compute all patches of a chunk and blend them into its core.

    ``cutout`` holds ``work.input_box``, shape (input channels, Z, Y, X), in its stored dtype.
    ``normalize`` maps a float32 batch of stored values to what the network expects, and may do so
    in place. Every network call has exactly ``batch_size`` patches; a short batch is filled up with
    repeats, whose results are dropped, because the batch's size changes a network's last bits.
    Contributions are added in the lattice's lexicographic order, each voxel's sum being the same
    operations whatever the chunk.

    ``answers`` keeps what the network answers to patches of one value throughout (background, or
    what lies outside the
    volume), from chunk to chunk: it is computed once for each of a few values, and changes nothing
        but the time. ``uploaded`` gives the cutout as a device array, where it is on its way there.

    Raises:
        ModelContractError: the network returns arrays of an unexpected shape.
        NonFiniteError: the core holds NaN or infinite values.
        DeviceOutOfMemory: one patch at a time is still too much.
    """
    if cutout.shape[1:] != work.input_box.shape:
        raise ValueError(
            f"the cutout has shape {cutout.shape[1:]}, the input box {work.input_box.shape}"
        )
    uniform_patches = 0
    places = [places_of(work, axis) for axis in range(3)]
    with network.device.session():
        with _told_of_chunk(work):
            known = {} if answers is None else answers
            volume = uploaded() if uploaded else network.device.upload(cutout)
            patches = Patches(
                cutout, volume, work, places, network, normalize, output_channels, known
            )
            core = Accumulator(work, places, network.device, output_channels, encoding)
        waiting = deque(product(*work.patches))
        while waiting:
            try:
                window = list(patches.window(waiting, batch_size))
                unknown = [index for index, answer in window if answer is None]
                predictions = iter(patches.predict(unknown, batch_size) if unknown else ())
            except DeviceOutOfMemory:
                if not network.device.make_room():
                    if batch_size == 1:
                        with _told_of_chunk(work):
                            raise
                    logger.warning(
                        "device out of memory with %d patches a batch; halving it", batch_size
                    )
                    batch_size //= 2
                    patches.forget_answers()  # of the larger batch
                continue
            # a smaller batch would not help: half of this one is blended
            with _told_of_chunk(work):
                for index, answer in window:
                    core.blend(index, next(predictions) if answer is None else answer)
                    waiting.popleft()
            del predictions  # before the next ones: they would lie beside them
            uniform_patches += len(window) - len(unknown)
        with _told_of_chunk(work):
            finished = core.finished()
    return ChunkResult(finished, batch_size, uniform_patches)


@contextmanager
def _told_of_chunk(work: ChunkWork) -> Iterator[None]:
    """Where nothing smaller is left to try: the error says how large what was tried is."""
    try:
        yield
    except DeviceOutOfMemory as error:
        raise DeviceOutOfMemory(
            "the device is out of memory at a batch of one patch of "
            f"{list(work.lattice.patch_shape)} voxels, with a chunk of "
            f"{list(work.core_box.shape)} and its input of {list(work.input_box.shape)} on it. "
            f"Make inference.chunk_shape smaller, or use a device with more memory. ({error})"
        ) from None
