"""Streams of samples: patches of labelled volumes, in an order that the seed alone determines.

Sample k is drawn from random numbers of (seed, k), whoever reads it and whenever. So the sequence
is the same for any number of worker processes and ranks, after a resume, and however long stores
take; and no process needs to know what another has drawn.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import asdict, dataclass
from threading import Event
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Json
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, ceil_div, is_same_size
from beam_inference.training.labelled_volumes import (
    Cutout,
    LabelledVolume,
    OpenLabelledVolume,
    as_source,
    box_weight,
    open_labelled_volume,
)
from beam_inference.training.look_ahead import LookAhead, make_one_ahead
from beam_inference.training.split import Split, Subset, default_block_shape

logger = logging.getLogger(__name__)

Transform: TypeAlias = Callable[[Cutout, np.random.Generator], Mapping[str, AnyArray]]
"""Makes of a cutout what a network is trained with: arrays (channels, Z, Y, X) by name."""

_MOST_THREADS = 64
_MOST_REFUSALS = 300
"""Boxes in a row that may be refused for what they weigh."""


def _tell_sizes(volumes: Sequence[OpenLabelledVolume]) -> None:
    """Warn where volumes have voxels of other sizes than the first that says one."""
    sizes = [(each.image.url, each.image.voxel_size_nm) for each in volumes]
    stated = [(url, size) for url, size in sizes if size is not None]
    others = [(url, size) for url, size in stated if not is_same_size(size, stated[0][1])]
    if others:
        logger.warning(
            "the voxels of %s are %s nm (z, y, x), those of %s %s nm: the network is trained on "
            "both as if they were one size, and its job will say one. Choose scales of one size, "
            "or make them with beam-inference resample",
            stated[0][0],
            list(stated[0][1]),
            others[0][0],
            list(others[0][1]),
        )


@dataclass(frozen=True)
class Batch:
    """Samples for one step of one rank.

    Attributes:
        number: of the step, from 0.
        volumes: for each sample, which of the stream's volumes it is from.
        boxes: the patch of each sample.
        groups: what the stream's transform made of samples of one shape, stacked (N, channels, Z,
            Y, X): a group for each shape, in the order in which shapes first come in ``boxes``, as
            samples do in a group. Empty where this rank has no sample in the step.
    """

    number: int
    volumes: Sequence[int]
    boxes: Sequence[BoundingBox]
    groups: Sequence[Mapping[str, torch.Tensor]]

    @property
    def arrays(self) -> Mapping[str, torch.Tensor]:
        """What was made of the samples, which must be of one shape.

        Raises:
            ValueError: they are of several shapes, or there are none.
        """
        if len(self.groups) != 1:
            raise ValueError(
                f"the samples of step {self.number} are of {len(self.groups)} shapes; expected "
                "one. Take each of batch.groups."
            )
        return self.groups[0]


def plain_arrays(cutout: Cutout, _random: np.random.Generator) -> Mapping[str, AnyArray]:
    """The transform of a stream that has no other: ``image``, ``labels`` and ``valid``."""
    return {"image": cutout.image, "labels": cutout.labels, "valid": cutout.valid}


class SampleStream(IterableDataset[Batch]):
    """Batches of patches of labelled volumes, one batch for each step.

    Patches are read ahead by threads; no worker process is needed. Where the transform takes longer
    than a step, take worker processes (:meth:`batches`).

    Args:
        volumes: what patches are cut from.
        patch_shape: voxels of a patch, ZYX; or several such shapes, and how often samples are of
            each, compared with the others.
        crop_margin: voxels of the image around a patch, on each side, ZYX.
        batch_size: samples of a step, of all ranks together, which share them as evenly as can be.
        split: how blocks belong to sets; by default in blocks of four patches, of several shapes
            the largest along each axis.
        subset: the set that all voxels of all samples belong to, those around a patch included.
        seed: determines the sequence.
        label_weights: weights of voxels by label, others weighing 1: a box is taken with the
            probability of its mean weight, over the largest. With a mask, voxels outside weigh 0.
        transform: what is made of each cutout, in the threads that read.
        length: batches until the stream ends, counted from step 0; without end if None.
        rank: of this process.
        world_size: number of ranks. The samples of a step are the same, however many ranks share
            them.
        cache_bytes: decoded blocks that are kept, of all volumes of a process together.
        ahead_bytes: bytes of samples that may be read ahead, beside the next batch.

    Raises:
        VolumeError: a volume cannot be read, or has no room for a patch.
        ConfigError: no volume has a patch of the set, or a weight is negative.
    """

    def __init__(
        self,
        volumes: Sequence[LabelledVolume],
        patch_shape: Zyx | Mapping[Zyx, float],
        *,
        crop_margin: Zyx = (0, 0, 0),
        batch_size: int = 1,
        split: Split | None = None,
        subset: Subset = "train",
        seed: int = 0,
        label_weights: Mapping[int, float] | None = None,
        transform: Transform = plain_arrays,
        length: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        cache_bytes: int = 2**28,
        ahead_bytes: int = 2**30,
    ) -> None:
        super().__init__()
        self._shapes = dict(patch_shape) if isinstance(patch_shape, Mapping) else {patch_shape: 1.0}
        self.split = Split(default_block_shape([*self._shapes])) if split is None else split
        self.subset = subset
        self._volumes = tuple(volumes)
        self._crop_margin = crop_margin
        self._batch_size = batch_size
        self._seed = seed
        self._label_weights = None if label_weights is None else dict(label_weights)
        self._transform = transform
        self._length = length
        self._rank = rank
        self._world_size = world_size
        self._cache_bytes = cache_bytes
        self._ahead_bytes = ahead_bytes
        self._position = 0
        self._opened: _Opened | None = None
        self._check_weights()
        self._open()

    def _check_weights(self) -> None:
        weights = [*(self._label_weights or {}).values(), *(each.weight for each in self._volumes)]
        weights += self._shapes.values()
        if not all(0 <= weight < float("inf") for weight in weights):
            raise ConfigError(f"weights are {weights}; expected finite numbers from 0 on")
        if not self._volumes:
            raise ConfigError("there is no volume to take samples from; expected at least one")
        if sum(self._shapes.values()) <= 0:
            raise ConfigError("no shape of patches has a weight above 0; expected at least one")

    def _open(self) -> _Opened:
        if self._opened is None:
            first = next(iter(self._shapes))
            volumes = [
                open_labelled_volume(each, first, self._crop_margin, self._cache_bytes)
                for each in self._volumes
            ]
            if self.subset == "train":
                _tell_sizes(volumes)
            self._opened = _Opened(
                [
                    _open_volumes(
                        [each.with_patch_shape(shape) for each in volumes], self.split, self.subset
                    )
                    for shape in self._shapes
                ],
                os.getpid(),
            )
        if self._opened.process != os.getpid():
            raise ConfigError(
                "this process was forked from one that had opened the volumes, and reads in it "
                "would never end. Take stream.batches(workers=…), or give the DataLoader "
                "multiprocessing_context='spawn'."
            )
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __iter__(self) -> Iterator[Batch]:
        opened = self._open()
        worker = get_worker_info()
        first = self._position + (0 if worker is None else worker.id)
        stride = 1 if worker is None else worker.num_workers
        most = self._ahead_bytes // opened.sample_bytes
        ahead = LookAhead(self._make_sample, max(1, min(most, _MOST_THREADS)))
        samples = ahead.items(
            number for step in self._steps(first, stride) for number in self._samples_of(step)
        )
        is_closed = Event()

        def collect(step: int) -> Batch:
            collected = []
            for _ in self._samples_of(step):
                if is_closed.is_set():  # a signal waits for this thread
                    raise CancelledError
                collected.append(next(samples))
            return _as_batch(step, collected)

        # stacked by a thread of its own: the copying would hold up each step
        batches = make_one_ahead(map(collect, self._steps(first, stride)), is_closed)
        with closing(samples), closing(batches):
            for batch in batches:
                self._position = batch.number + 1
                yield batch

    def _steps(self, first: int, stride: int) -> Iterator[int]:
        step = first
        while self._length is None or step < self._length:
            yield step
            step += stride

    def _samples_of(self, step: int) -> range:
        """Numbers of this rank's samples of a step; the first rank has some in any case."""
        first, last = (
            ceil_div(rank * self._batch_size, self._world_size)
            for rank in (self._rank, self._rank + 1)
        )
        return range(step * self._batch_size + first, step * self._batch_size + last)

    def batches(self, workers: int = 0) -> Generator[Batch]:
        """The batches from the stream's position on, which follows what is taken.

        Args:
            workers: processes that read and transform; 0 for threads of this process alone.
        """
        if workers == 0:
            yield from self
            return
        loader = DataLoader(
            self, batch_size=None, num_workers=workers, multiprocessing_context="spawn"
        )
        for batch in loader:
            self._position = batch.number + 1
            yield batch

    def state_dict(self) -> Json:
        """The position in the sequence, after the last batch that was taken; it is JSON."""
        return {"step": self._position, "sequence": self._sequence}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch that was taken when :meth:`state_dict` was called.

        Raises:
            StateError: the state is one of a stream with another sequence.
        """
        if state.get("sequence") != self._sequence:
            raise StateError(
                "the position is one in another sequence of samples: volumes, patch shape, split, "
                "weights, seed or samples of a step were changed since. Train with what they were, "
                "or begin anew."
            )
        self._position = int(state["step"])

    @property
    def _sequence(self) -> str:
        """A hash of everything that determines the sequence of all ranks together."""
        parts = [
            [_place(each) for each in self._volumes],
            next(iter(self._shapes)) if len(self._shapes) == 1 else [*self._shapes.items()],
            self._crop_margin,
            self._batch_size,
            asdict(self.split),
            self.subset,
            self._seed,
            sorted((self._label_weights or {}).items()),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _make_sample(self, number: int) -> _Sample:
        random = np.random.default_rng([self._seed, 0, number])
        opened = self._open().by_shape[self._draw_shape(random)]
        for _ in range(_MOST_REFUSALS):
            index = int(np.searchsorted(opened.edges, random.random(), side="right"))
            volume = opened.volumes[index]
            box = volume.draw_box(self.split, self.subset, random)
            if box is None:
                raise VolumeError(_no_patch(volume, self.split, self.subset))
            labels, valid = volume.read_labels(box)
            if random.random() < box_weight(labels, valid, self._label_weights):
                cutout = Cutout(box, volume.read_image(box), labels, valid, volume.labels.url)
                transform_random = np.random.default_rng([self._seed, 1, number])
                arrays = self._transform(cutout, transform_random)
                return _Sample(opened.numbers[index], box, arrays)
        raise VolumeError(
            f"{_MOST_REFUSALS} boxes of the {self.subset} set in a row were refused, the last "
            f"being {box} of {volume.labels.url}: by mask and label_weights nearly all weigh "
            "nothing. Widen the mask, or raise weights of labels that are frequent."
        )

    def _draw_shape(self, random: np.random.Generator) -> int:
        """Which shape a sample has; of one shape alone nothing is drawn."""
        if len(self._shapes) == 1:
            return 0
        edges = np.cumsum([*self._shapes.values()])
        return int(np.searchsorted(edges[:-1] / edges[-1], random.random(), side="right"))


@dataclass(frozen=True)
class _Sample:
    volume: int
    box: BoundingBox
    arrays: Mapping[str, AnyArray]


@dataclass(frozen=True)
class _OpenVolumes:
    """The volumes that have patches of one shape that are of the set.

    Attributes:
        volumes: open in one process.
        numbers: which of the stream's volumes each one is.
        edges: where the share of each one ends, the last one's left out, from 0 to 1.
    """

    volumes: Sequence[OpenLabelledVolume]
    numbers: Sequence[int]
    edges: AnyArray


@dataclass(frozen=True)
class _Opened:
    """What a process has opened.

    Attributes:
        by_shape: the volumes, for each shape of patches.
        process: the id of the process.
    """

    by_shape: Sequence[_OpenVolumes]
    process: int

    @property
    def sample_bytes(self) -> int:
        """Bytes of the values of the largest sample, as they are stored."""
        return max(each.sample_bytes for opened in self.by_shape for each in opened.volumes)


def _open_volumes(
    volumes: Sequence[OpenLabelledVolume], split: Split, subset: Subset
) -> _OpenVolumes:
    random = np.random.default_rng(0)
    numbers = []
    for number, volume in enumerate(volumes):
        if volume.draw_box(split, subset, random) is not None:
            numbers.append(number)
        elif subset == "train" or volume.within is None:  # corrected boxes are of one set
            logger.warning("%s", _no_patch(volume, split, subset))
    shares = [volumes[number].starts.size * volumes[number].weight for number in numbers]
    if sum(shares) <= 0:
        raise ConfigError(
            f"no volume has a patch of {list(volumes[0].patch_shape)} voxels whose blocks all "
            f"belong to the {subset} set: blocks are {list(split.block_shape)} voxels "
            "(z, y, x). Make blocks or patches smaller, change the set's share or the split's "
            "seed; beam-inference split VOLUME shows the sets."
        )
    edges = np.cumsum(shares)[:-1] / sum(shares)
    return _OpenVolumes([volumes[number] for number in numbers], numbers, edges)


def _no_patch(volume: OpenLabelledVolume, split: Split, subset: Subset) -> str:
    return (
        f"{volume.image.url} has no patch of {list(volume.patch_shape)} voxels whose blocks of "
        f"{list(split.block_shape)} all belong to the {subset} set: no sample comes from it"
    )


def _place(volume: LabelledVolume) -> list[object]:
    """What of a volume determines samples; not how its store is reached."""
    sources = [as_source(each) for each in (volume.image, volume.labels)]
    places = [
        [each.path, each.spec, each.scale, each.channel, dict(each.select)] for each in sources
    ]
    mask = None if volume.mask is None else volume.mask.model_dump(mode="json")
    place: list[object] = [places, mask, volume.name, volume.weight]
    if volume.within is not None or volume.without:
        within = None if volume.within is None else asdict(volume.within)
        place.append([within, [asdict(each) for each in volume.without]])
    return place


def _as_batch(number: int, samples: Sequence[_Sample]) -> Batch:
    by_shape: dict[Zyx, list[_Sample]] = {}
    for sample in samples:
        by_shape.setdefault(sample.box.shape, []).append(sample)
    groups = [
        {
            name: torch.from_numpy(np.stack([sample.arrays[name] for sample in alike]))
            for name in alike[0].arrays
        }
        for alike in by_shape.values()
    ]
    return Batch(
        number,
        [sample.volume for sample in samples],
        [sample.box for sample in samples],
        groups,
    )
