"""Counting a volume's values by channel and by section along z: exact, in stages."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import Mask as MaskConfig
from beam_inference.errors import (
    ConfigError,
    PermanentReadError,
    StateError,
    TransientReadError,
    VolumeError,
    WorkerFault,
)
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import ceil_div, maximum, minimum, triple
from beam_inference.operators.background import Background, find_background
from beam_inference.operators.distributions import (
    QUANTILES,
    WideSum,
    describe_values,
    ranks_of,
)
from beam_inference.operators.float_counts import (
    BINS,
    FloatCounts,
    count_floats,
    count_in_bins,
    section_moments,
)
from beam_inference.operators.integer_counts import (
    IntegerCounts,
    count_values,
    lowest,
    mean_and_std,
    values_at,
)
from beam_inference.operators.levels import Levels, NonzeroLevels, ObjectLevels
from beam_inference.volumes.further_input import join_volumes
from beam_inference.volumes.holes import INDEX, HolesIndex, Piece, holes_url
from beam_inference.volumes.kvstores import (
    MOST_PART_BYTES,
    PATIENCE_SECONDS,
    open_kvstore,
    or_else_again,
    refuse_link,
    retry_request,
)
from beam_inference.volumes.mask import open_mask
from beam_inference.volumes.object_volume import find_nonzero
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.packed_arrays import Arrays, pack_arrays, unpack_arrays
from beam_inference.volumes.volume import Volume

CHUNK_VOXELS = 2**25
"""Voxels that are read at a time, about."""
_BINS_KEY = "bins"
OUTSIDE_KEY = "outside"
"""Name of the file that says which parts of background are outside of the object."""
SOME_BLOCKS = 8
"""Blocks that are looked at to notice that a volume was changed, at most."""
SOME_VOXELS = 2**27
"""Voxels that these hold, at most, unless a single block holds more."""


@dataclass(frozen=True)
class CountValues:
    """First stage: count the values of each section and each channel of a chunk.

    Attributes:
        path, scale, channel, storage: the volume, as
            :func:`beam_inference.volumes.opening.open_volume` takes it.
        counts_url: a folder for the counts; they may be removed once all is done.
        chunks: of the volume.
        channels: number of its channels.
        dtype: name of its dtype.
        beside: further volumes of the same voxels, whose channels are counted with its own.
        finds_object: whether background is looked for, too.
        mask: where voxels count; None for all.
    """

    path: str
    scale: int
    channel: tuple[int, ...] | None
    storage: Storage
    counts_url: str
    chunks: ChunkGrid
    channels: int
    dtype: str
    beside: tuple[str, ...] = ()
    finds_object: bool = False
    mask: MaskConfig | None = None
    name: str = "values"

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.chunks.count

    def volume(self) -> Volume:
        """Open the volume. Raises WorkerFault if its dtype is not that of the plan."""
        urls = [self.path, *self.beside]
        volume = open_volumes(urls, self.scale, self.channel, self.storage)
        volume.check_dtype(self.dtype)
        return volume

    def find_kept(self, volume: Volume) -> Callable[[BoundingBox], NDArray[np.bool_] | None]:
        """Return a function that says which voxels (Z, Y, X) of a box count; None if all do."""
        if self.mask is None:
            return lambda _: None
        mask = open_mask(
            "--mask", self.mask, volume.voxel_size_nm, volume.origin.rest, self.storage
        )
        return mask.kept_in

    def make_worker(self) -> Callable[[int], None]:
        """See :class:`beam_inference.job.stage_job.ChunkStage`."""
        volume = self.volume()
        find_kept = self.find_kept(volume)
        count = count_floats if self.dtype == "float32" else count_values

        def do(index: int) -> None:
            box = self.chunks.core_box(index)
            array = volume.read(box)
            kept = find_kept(box)
            try:
                sections, channels = count(array, kept)
            except ValueError as error:
                raise VolumeError(
                    f"{box} of {self.path} holds {error}, with which no mean or quantile is "
                    "defined. Replace them in a copy of the volume."
                ) from None
            nonzero = box_of_nonzero(array, box)
            if self.finds_object:
                self._write_background(index, find_background(find_nonzero(array)))
            zeros = np.array([(part == 0).sum() for part in counted_values(array, kept)], np.int64)
            self.write(
                _key(index), sections=sections, channels=channels, nonzero=nonzero, zeros=zeros
            )

        return do

    def _write_background(self, index: int, found: Background) -> None:
        faces = {f"face{number}": face for number, face in enumerate(found.faces)}
        key = _background_key(index)
        self.write(key, sizes=found.sizes, inner=np.array(found.inner), **faces)

    def read_background(self, index: int) -> Background:
        """Read the background of a chunk."""
        found = self.read(_background_key(index))
        faces = tuple(found[f"face{number}"] for number in range(6))
        return Background(faces, found["sizes"], int(found["inner"]))

    def write(self, key: str, **values: AnyArray) -> None:
        """Write arrays to a file in the folder for the counts."""
        refuse_link(self.counts_url)
        store = open_kvstore(self.counts_url, self.storage)
        content = pack_arrays(values, self._place(key))
        retry_request(
            "write",
            f"{self.counts_url}/{key}",
            lambda: store.write(key, content).result(timeout=PATIENCE_SECONDS),
        )

    def read(self, key: str) -> Arrays:
        """Read the arrays of such a file.

        Raises:
            StateError: it is absent, damaged, or another one.
        """
        store = open_kvstore(self.counts_url, self.storage)
        result = retry_request(
            "read",
            f"{self.counts_url}/{key}",
            or_else_again(store.read(key), partial(store.read, key)),
            MOST_PART_BYTES,
        )
        try:
            if result.state != "value":
                raise ValueError("it is absent")
            return unpack_arrays(bytes(result.value), self._place(key))
        except ValueError as error:
            raise StateError(
                f"the counts in {self.counts_url}/{key} cannot be used: {error}. An earlier stage "
                "wrote them. Was the folder changed? Give the command with --overwrite to count "
                "again."
            ) from None

    def _place(self, key: str) -> str:
        """Which file of which count a key names."""
        counted = (self.path, *self.beside, self.scale, self.channel, self.dtype, self.chunks)
        counted += () if self.mask is None else (self.mask.model_dump_json(),)
        return f"{hashlib.sha256(repr(counted).encode()).hexdigest()[:16]}/{key}"


@dataclass(frozen=True)
class FindBins:
    """Second stage, only for floats, one chunk of work: find the bins that hold the quantiles.

    Attributes:
        counting: the first stage.
    """

    counting: CountValues
    name: str = "bins"
    count: int = 1

    def make_worker(self) -> Callable[[int], None]:
        """See :class:`beam_inference.job.stage_job.ChunkStage`."""

        def do(_: int) -> None:
            totals = Totals(self.counting)
            for _sections in totals.layers():
                pass
            whole, *channels = (FloatCounts(bins) for bins in totals.float_bins())
            bins = set()
            zeros = [0] if self.counting.mask else [0, totals.zeros_outside]
            if self.counting.finds_object:
                zeros.append(zeros_outside_object(self.counting))
            for number, channel in enumerate(channels):
                parts = map(channel.without_zeros, (*zeros, int(totals.zeros[number])))
                for counts in (whole, *parts):
                    if counts.number:
                        ranks = ranks_of(QUANTILES, counts.number)
                        bins |= {(number, each) for each in counts.bins_of(ranks)}
            self.counting.write(_BINS_KEY, bins=np.array(sorted(bins), np.int64))

        return do


@dataclass(frozen=True)
class CountInBins:
    """Third stage, only for floats: count the values of these bins in a chunk one by one.

    Attributes:
        counting: the first stage.
    """

    counting: CountValues
    name: str = "in bins"

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.counting.count

    def make_worker(self) -> Callable[[int], None]:
        """See :class:`beam_inference.job.stage_job.ChunkStage`."""
        counting = self.counting
        volume = counting.volume()
        find_kept = counting.find_kept(volume)
        bins = counting.read(_BINS_KEY)["bins"]

        def do(index: int) -> None:
            box = counting.chunks.core_box(index)
            parts = counted_values(volume.read(box), find_kept(box))
            counts = [
                count_in_bins(part, bins[bins[:, 0] == channel, 1].tolist())
                for channel, part in enumerate(parts)
            ]
            flat = np.concatenate(counts).ravel()
            places = np.flatnonzero(flat)
            counting.write(_refined_key(index), places=places, counts=flat[places])

        return do


@dataclass(frozen=True)
class WriteLevels:
    """Last stage, one chunk of work: quantiles, means and standard deviations, written to a file.

    Attributes:
        counting: the first stage.
        to: a folder's URL, and the file's name in it.
    """

    counting: CountValues
    to: tuple[str, str]
    name: str = "levels"
    count: int = 1

    def make_worker(self) -> Callable[[int], None]:
        """See :class:`beam_inference.job.stage_job.ChunkStage`."""
        counting = self.counting
        volume = counting.volume()

        def do(_: int) -> None:
            totals = Totals(counting)
            sections: list[list[int] | None] | None = None if totals.has_floats else []
            moments: list[tuple[float, float] | None] = []
            for counts in totals.layers():
                if sections is None:
                    moments += [section_moments(each) if each.any() else None for each in counts]
                    continue
                for each in counts:
                    is_there = each.any()
                    sections.append(values_at(QUANTILES, each, volume.dtype) if is_there else None)
                    moments.append(mean_and_std(each, volume.dtype) if is_there else None)
            whole, *channels = totals.distributions()
            if not whole.number:
                raise VolumeError(
                    f"--mask keeps no voxel of {counting.path}: there is nothing to count. Check "
                    "its voxel size, where it begins and which values are kept"
                )
            described = describe_values(whole)
            nonzero = None
            if totals.nonzero is not None and counting.mask is None:
                outside = totals.zeros_outside
                nonzero = NonzeroLevels(
                    start=totals.nonzero.start,
                    stop=totals.nonzero.stop,
                    channels=[describe_values(each.without_zeros(outside)) for each in channels],
                )
            folder, name = self.to
            inside = None
            if totals.nonzero is not None and counting.finds_object:
                outside = zeros_outside_object(counting)
                inside = ObjectLevels(
                    channels=[describe_values(each.without_zeros(outside)) for each in channels],
                    holes_sha256=_write_index(counting, f"{folder}/{name}"),
                )
            own = [
                channels[number].without_zeros(zeros)
                for number, zeros in enumerate(totals.zeros.tolist())
            ]
            if sections is not None:
                # one of which the mask keeps nothing has the levels of the whole
                values = [int(value) for value in described.values]
                sections = [each or values for each in sections]
            levels = Levels(
                input=counting.path,
                dtype=counting.dtype,
                start=volume.bounds.start[0],
                quantiles=list(QUANTILES),
                volume=described.values,
                sections=sections,
                mean=described.mean,
                std=described.std,
                section_moments=[each or (described.mean, described.std) for each in moments],
                channels=[describe_values(each) for each in channels],
                nonzero=nonzero,
                object=inside,
                without_zeros=[describe_values(each) if each.number else None for each in own],
                mask=None if counting.mask is None else counting.mask.path,
            )
            _write_file(folder, name, levels.model_dump_json(), counting.storage)

        return do


def _write_file(folder: str, name: str, text: str, storage: Storage) -> None:
    target = open_kvstore(folder, storage)
    retry_request(
        "write",
        f"{folder}/{name}",
        lambda: target.write(name, text).result(timeout=PATIENCE_SECONDS),
    )


def zeros_outside_object(counting: CountValues) -> int:
    """Number of voxels outside of the object, which are zero in every channel."""
    return int(counting.read(OUTSIDE_KEY)["number"])


def _write_index(counting: CountValues, levels: str) -> str | None:
    """Write the index of an object's holes beside its levels; its hash, or None without holes."""
    pieces = {}
    for number in np.flatnonzero(counting.read(OUTSIDE_KEY)["with_holes"]).tolist():
        found = counting.read(piece_key(number))
        start, stop = map(triple, found["corners"].tolist())
        pieces[number] = Piece(start=start, stop=stop, sha256=found["sha256"].tobytes().hex())
    if not pieces:
        return None
    roi = counting.chunks.roi
    index = HolesIndex(
        start=roi.start, stop=roi.stop, piece_shape=counting.chunks.chunk_shape, pieces=pieces
    )
    text = index.model_dump_json()
    _write_file(holes_url(levels), INDEX, text, counting.storage)
    return hashlib.sha256(text.encode()).hexdigest()


class Totals:
    """The counts of all chunks together.

    Args:
        counting: the stage that has counted them.

    Attributes:
        has_floats: whether the values are floats.
        nonzero: bounding box of all voxels that are not zero in every channel, once
            :meth:`layers` has ended; None if all are.
        zeros: number of zeros in each channel, once it has ended.
    """

    def __init__(self, counting: CountValues) -> None:
        self.has_floats = counting.dtype == "float32"
        self.nonzero: BoundingBox | None = None
        self.zeros: NDArray[np.int64] = np.zeros(counting.channels, np.int64)
        self._counting = counting
        self._channels = WideSum()

    def layers(self) -> Iterator[NDArray[Any]]:
        """Counts of all sections, some at a time, in order."""
        chunks = self._counting.chunks
        per_layer = chunks.shape[1] * chunks.shape[2]
        for layer in range(chunks.shape[0]):
            total = WideSum()
            for index in range(layer * per_layer, (layer + 1) * per_layer):
                counts = self._counting.read(_key(index))
                total.add(counts["sections"])
                self._channels.add(counts["channels"])
                self._add_box(counts["nonzero"])
                self.zeros += counts["zeros"]
            yield total.as_integers() if self.has_floats else total.as_int64()

    def _add_box(self, corners: NDArray[np.int64]) -> None:
        if not len(corners):
            return
        box = BoundingBox(triple(corners[0].tolist()), triple(corners[1].tolist()))
        known = self.nonzero or box
        self.nonzero = BoundingBox(minimum(known.start, box.start), maximum(known.stop, box.stop))

    @property
    def zeros_outside(self) -> int:
        """Number of voxels outside of the box, which are zero in every channel."""
        return self._counting.chunks.roi.size - (self.nonzero.size if self.nonzero else 0)

    def float_bins(self) -> list[NDArray[np.object_]]:
        """Bins of all channels together, and of each channel."""
        channels = self._channels.as_integers()
        return [channels.sum(axis=0), *channels]

    def distributions(self) -> list[FloatCounts] | list[IntegerCounts]:
        """The values of all channels together, and of each channel."""
        if not self.has_floats:
            channels = self._channels.as_int64()
            least = lowest(np.dtype(self._counting.dtype))
            return [IntegerCounts(each, least) for each in (channels.sum(axis=0), *channels)]
        bins = self._counting.read(_BINS_KEY)["bins"]
        refined = np.zeros((len(bins), BINS), np.int64)
        for index in range(self._counting.count):
            some = self._counting.read(_refined_key(index))
            refined.ravel()[some["places"]] += some["counts"]
        whole: dict[int, Any] = {}
        by_channel: list[dict[int, Any]] = [{} for _ in range(self._counting.channels)]
        for (channel, place), values in zip(bins.tolist(), refined, strict=True):
            by_channel[channel][place] = values
            whole[place] = whole.get(place, 0) + values
        return [
            FloatCounts(each, values)
            for each, values in zip(self.float_bins(), [whole, *by_channel], strict=True)
        ]


def counted_values(array: AnyArray, kept: NDArray[np.bool_] | None) -> Iterator[AnyArray]:
    """The values of each channel of an array (C, Z, Y, X) that count."""
    return (channel if kept is None else channel[kept] for channel in array)


def box_of_nonzero(array: AnyArray, box: BoundingBox) -> NDArray[np.int64]:
    """Start and stop of the voxels of a box that are not zero in every channel; else empty."""
    sections = []
    rows = np.zeros(box.shape[1], bool)
    columns = np.zeros(box.shape[2], bool)
    for z in range(box.shape[0]):
        there = (array[:, z] != 0).any(axis=0)
        rows |= there.any(axis=1)
        columns |= there.any(axis=0)
        if there.any():
            sections.append(z)
    if not sections:
        return np.empty((0, 3), np.int64)
    ends = [np.flatnonzero(each)[[0, -1]] for each in (rows, columns)]
    corners = np.array([[sections[0], sections[-1]], *ends], np.int64).T
    corners += np.array([box.start, np.add(box.start, 1)])
    return corners


def open_volumes(
    urls: Sequence[str], scale: int, channel: Sequence[int] | None, storage: Storage
) -> Volume:
    """Open a volume, or several as one."""
    channels = None if channel is None else list(channel)
    first, *others = (
        open_volume(url, scale=scale, channel=channels, storage=storage) for url in urls
    )
    return join_volumes(first, others) if others else first


def chunks_to_count(volume: Volume) -> ChunkGrid:
    """Whole blocks, as many along x and then y as are read at a time.

    Raises:
        ConfigError: values of this dtype cannot be counted one by one.
    """
    if volume.dtype not in (np.uint8, np.int8, np.uint16, np.int16, np.float32):
        raise ConfigError(
            f"levels are counted of 8-bit and 16-bit integers and of float32; {volume.url} holds "
            f"{volume.dtype.name}: write model.normalize: {{scale: …, offset: …, clip: …}} by "
            "hand"
        )
    z, y, x = (min(b, n) for b, n in zip(volume.read_shape, volume.bounds.shape, strict=True))
    x *= max(
        1, min(ceil_div(volume.bounds.shape[2], x), CHUNK_VOXELS // (volume.channels * z * y * x))
    )
    y *= max(
        1, min(ceil_div(volume.bounds.shape[1], y), CHUNK_VOXELS // (volume.channels * z * y * x))
    )
    return ChunkGrid(volume.bounds, (z, y, x))


def _key(index: int) -> str:
    return f"{index:012d}"


def _background_key(index: int) -> str:
    return f"{index:012d}.background"


def piece_key(index: int) -> str:
    """Name of the file that tells of the holes of a chunk."""
    return f"{index:012d}.piece"


def _refined_key(index: int) -> str:
    return f"{index:012d}.bins"


def describe_input(
    path: str,
    scale: int,
    channel: tuple[int, ...] | None,
    volume: Volume,
    beside: Sequence[str] = (),
    *,
    finds_object: bool = False,
    mask: tuple[MaskConfig, Volume] | None = None,
) -> Json:
    """Describe the volume whose values are counted as JSON, with a cheap check of its content."""
    start = volume.bounds.start
    stop = volume.bounds.stop
    values = {"path": path, "scale": scale, "channel": channel, "start": start, "stop": stop}
    values |= {"beside": list(beside)} if beside else {}
    values |= {"object": True} if finds_object else {}
    if mask is not None:
        values["mask"] = mask[0].model_dump(mode="json", exclude={"fill_value"})
        values["mask_values"] = hash_of_some_blocks(mask[1])
    return dict(json.loads(json.dumps({**values, "input_values": hash_of_some_blocks(volume)})))


def hash_of_some_blocks(volume: Volume, most_voxels: int = SOME_VOXELS) -> str:
    """Hash of the values in a few blocks, spread over a volume.

    It differs where any of them was changed. It knows neither when they were written, which copying
    a volume changes, nor the volume's metadata, which most changes do not touch. The places
    are the first points of Roberts' R3 sequence (2018), which lie evenly, and within.

    Args:
        volume: the volume.
        most_voxels: voxels that are read at most, unless a single block holds more.

    Raises:
        VolumeError: one of them cannot be read.
    """
    shape = [min(b, n) for b, n in zip(volume.read_shape, volume.bounds.shape, strict=True)]
    blocks = ChunkGrid(volume.bounds, (shape[0], shape[1], shape[2]))
    some = max(1, min(SOME_BLOCKS, most_voxels // (volume.channels * math.prod(shape))))
    points = (0.5 + np.outer(np.arange(some), (0.8191725134, 0.6710436067, 0.5497004779))) % 1
    digest = hashlib.sha256(volume.dtype.name.encode())
    for index in sorted(
        {blocks.index(position) for position in (points * blocks.shape).astype(int).tolist()}
    ):
        try:
            digest.update(np.ascontiguousarray(volume.read(blocks.core_box(index))).data)
        except (TransientReadError, PermanentReadError, WorkerFault) as error:
            raise VolumeError(str(error)) from None
    return digest.hexdigest()
