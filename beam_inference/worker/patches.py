"""Patches of a chunk: where each lies in the cutout and in the core box."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from beam_inference.engines.predictor import Predictor
from beam_inference.engines.trial import cropped_to_patch
from beam_inference.geometry.bounding_box import grown_shape
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.zyx import Zyx

UNIFORM_ANSWERS = 2
"""Values of uniform patches whose answers are kept: the background, and perhaps the opposite."""


class Place(NamedTuple):
    """Of a patch, on one axis: where its input is in the cutout, and what it shares with the core, in either."""

    cutout: slice
    patch: slice
    core: slice


Places: TypeAlias = list[dict[int, Place]]
"""By axis and the patch's index on it."""


class Patches:
    """The network's inputs, cut out of a chunk's, and what it predicts for them."""

    def __init__(
        self,
        cutout: NDArray[Any],
        volume: Any,
        work: ChunkWork,
        places: Places,
        network: Predictor,
        normalize: Callable[[Any], Any],
        output_channels: int,
        answers: MutableMapping[tuple[float, ...], Any],
    ) -> None:
        self._cutout = cutout
        self._volume = volume
        self._work = work
        self._places = places
        self._network = network
        self._normalize = normalize
        self._output_channels = output_channels
        self._answers = answers
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
        if not all(
            (part == first).all() for part in (patch[:, :1, :1], patch[:, ::7, ::7, ::7], patch)
        ):
            return None
        # answers in another size of batch may be of other bits
        values = (batch_size, *first.ravel().tolist())
        if values not in self._answers and len(self._answers) < UNIFORM_ANSWERS:
            self._answers[values] = self._network.device.copy(self.predict([index], batch_size)[0])
        return self._answers.get(values)

    def predict(self, indices: list[Zyx], batch_size: int) -> Any:
        """Predict at most ``batch_size`` patches as a full batch, (batch_size, C, *patch_shape); others are repeats."""
        work = self._work
        slices = [self._slices(index) for index in indices]
        if self._batch is None or len(self._batch) != batch_size:
            shape = grown_shape(work.lattice.patch_shape, work.crop_margin)
            self._batch = None
            self._batch = self._network.device.empty((batch_size, self._cutout.shape[0], *shape))
        for position in range(batch_size):
            self._batch[position] = self._volume[slices[min(position, len(slices) - 1)]]
        predictions = self._network.predict(self._normalize(self._batch))
        leading = (batch_size, self._output_channels)
        return cropped_to_patch(predictions, leading, work.lattice.patch_shape, work.crop_margin)

    def _slices(self, index: Zyx) -> tuple[slice, ...]:
        return (
            slice(None),
            *(places[k].cutout for places, k in zip(self._places, index, strict=True)),
        )


def places_of(work: ChunkWork, axis: int) -> dict[int, Place]:
    """Where each of a chunk's patches lies along one axis, by its index in the lattice."""
    core = work.core_box
    lattice = work.lattice.axes[axis]
    places = {}
    for k in work.patches[axis]:
        first = lattice.patch_start(k)
        start = max(first, core.start[axis])
        stop = min(first + lattice.patch, core.stop[axis])
        read = first - work.crop_margin[axis] - work.input_box.start[axis]
        if start >= stop or read < 0:  # a negative slice would wrap around silently
            raise ValueError(
                f"patch {k} of axis {axis} misses the core {core}, or what is read, "
                f"{work.input_box}"
            )
        places[k] = Place(
            slice(read, read + lattice.patch + 2 * work.crop_margin[axis]),
            slice(start - first, stop - first),
            slice(start - core.start[axis], stop - core.start[axis]),
        )
    return places
