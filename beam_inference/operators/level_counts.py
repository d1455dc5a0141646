"""Counting a volume's values, as a whole and by section along z: exact, in one pass."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import (
    ConfigError,
    PermanentReadError,
    TransientReadError,
    VolumeError,
    WorkerFault,
)
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import ceil_div
from beam_inference.operators.levels import Levels
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    KvStore,
    open_kvstore,
    or_else_again,
    retry_request,
)
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import Volume

QUANTILES = (
    0.0,
    0.001,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.25,
    0.5,
    0.75,
    0.9,
    0.95,
    0.98,
    0.99,
    0.995,
    0.999,
    1.0,
)
CHUNK_VOXELS = 2**25
"""Voxels that are read at a time, about."""
SOME_BLOCKS = 8
"""Blocks that are looked at to notice that a volume was changed, at most."""
SOME_VOXELS = 2**27
"""Voxels that these hold, at most, unless a single block holds more."""


@dataclass(frozen=True)
class CountValues:
    """First stage: count how often each value occurs in each section of a chunk.

    Attributes:
        path, scale, channel, storage: the volume, as
            :func:`beam_inference.volumes.opening.open_volume` takes it.
        counts_url: a folder for the counts; they may be removed once all is done.
        chunks: of the volume.
    """

    path: str
    scale: int
    channel: tuple[int, ...] | None
    storage: Storage
    counts_url: str
    chunks: ChunkGrid
    name: str = "count"

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.chunks.count

    def volume(self) -> Volume:
        """Open the volume."""
        channel = None if self.channel is None else list(self.channel)
        return open_volume(self.path, scale=self.scale, channel=channel, storage=self.storage)

    def make_worker(self) -> Callable[[int], None]:
        """See :class:`beam_inference.job.stage_job.ChunkStage`."""
        volume = self.volume()
        store = open_kvstore(self.counts_url, self.storage)

        def do(index: int) -> None:
            counts = count_values(volume.read(self.chunks.core_box(index)))
            content = io.BytesIO()
            np.savez_compressed(content, counts=counts)
            key = _key(index)
            retry_request(
                "write",
                f"{self.counts_url}/{key}",
                lambda: store.write(key, content.getvalue()).result(timeout=PATIENCE_SECONDS),
            )

        return do


@dataclass(frozen=True)
class SumCounts:
    """Second stage, one chunk of work: quantiles, means and standard deviations, written to a file.

    Attributes:
        counting: the first stage.
        to: a folder's URL, and the file's name in it.
    """

    counting: CountValues
    to: tuple[str, str]
    name: str = "sum"
    count: int = 1

    def make_worker(self) -> Callable[[int], None]:
        """See :class:`beam_inference.job.stage_job.ChunkStage`."""
        counting = self.counting
        volume = counting.volume()
        store = open_kvstore(counting.counts_url, counting.storage)

        def do(_: int) -> None:
            sections: list[list[int]] = []
            moments: list[tuple[float, float]] = []
            whole: NDArray[np.int64] | int = 0
            for counts in _layers(counting.chunks, store, counting.counts_url):
                sections += [values_at(QUANTILES, section, volume.dtype) for section in counts]
                moments += [mean_and_std(section, volume.dtype) for section in counts]
                whole = whole + counts.sum(axis=0)
            assert not isinstance(whole, int)
            mean, std = mean_and_std(whole, volume.dtype)
            levels = Levels(
                input=counting.path,
                dtype=volume.dtype.name,
                start=volume.bounds.start[0],
                quantiles=list(QUANTILES),
                volume=values_at(QUANTILES, whole, volume.dtype),
                sections=sections,
                mean=mean,
                std=std,
                section_moments=moments,
            )
            folder, name = self.to
            target = open_kvstore(folder, counting.storage)
            retry_request(
                "write",
                f"{folder}/{name}",
                lambda: target.write(name, levels.model_dump_json()).result(
                    timeout=PATIENCE_SECONDS
                ),
            )

        return do


def plan_level_stages(
    url: str, to: str, *, scale: int, channel: Sequence[int] | None, storage: Storage
) -> tuple[CountValues, SumCounts]:
    """Both stages of counting a volume's values.

    Args:
        url: of the volume.
        to: URL of the file to write; counts are put into a folder beside it.
        scale: of the volume.
        channel: channels to count; None for all.
        storage: settings of the object stores.

    Raises:
        VolumeError: the volume cannot be opened.
        ConfigError: values of its dtype cannot be counted one by one.
    """
    channels = None if channel is None else list(channel)
    volume = open_volume(url, scale=scale, channel=channels, storage=storage)
    count = CountValues(
        path=url,
        scale=scale,
        channel=None if channel is None else tuple(channel),
        storage=storage,
        counts_url=f"{to}.parts/counts",
        chunks=chunks_to_count(volume),
    )
    folder, _, name = to.rpartition("/")
    return count, SumCounts(count, (folder, name))


def chunks_to_count(volume: Volume) -> ChunkGrid:
    """Whole blocks, as many along x and then y as are read at a time.

    Raises:
        ConfigError: values of this dtype cannot be counted one by one.
    """
    if volume.dtype not in (np.uint8, np.int8, np.uint16, np.int16):
        raise ConfigError(
            f"levels are counted of 8-bit and 16-bit integers; {volume.url} holds "
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


def count_values(array: AnyArray) -> NDArray[np.int64]:
    """Count how often each value occurs in each section.

    Args:
        array: (C, Z, Y, X), of an 8-bit or 16-bit integer dtype.

    Returns:
        Counts (Z, values), from the dtype's lowest value on.
    """
    size = 2 ** (8 * array.dtype.itemsize)
    lowest = _lowest(array.dtype)
    sections = array.swapaxes(0, 1)  # one at a time: numbers to count by take eight bytes each
    return np.stack(
        [
            np.bincount(section.ravel().astype(np.int64) - lowest, minlength=size)
            for section in sections
        ]
    )


def values_at(
    quantiles: tuple[float, ...], counts: NDArray[np.int64], dtype: AnyDtype
) -> list[int]:
    """The smallest values that such shares of all do not exceed (NumPy's ``inverted_cdf``)."""
    upto = np.cumsum(counts)
    # From the decimals as they are written: products in float64 are off by a rank for some numbers
    # of voxels.
    ranks = [max(1, math.ceil(Fraction(str(quantile)) * int(upto[-1]))) for quantile in quantiles]
    return [int(place) + _lowest(dtype) for place in np.searchsorted(upto, ranks)]


def mean_and_std(counts: NDArray[np.int64], dtype: AnyDtype) -> tuple[float, float]:
    """Mean and standard deviation of all values, from their exact sums."""
    values = np.arange(len(counts)) + _lowest(dtype)
    number = int(counts.sum())
    total = _sum_of_products(values, counts)
    of_squares = _sum_of_products(values**2, counts)
    # Python divides integers of any size with one rounding; the difference is 0 for one value
    # throughout.
    return total / number, math.sqrt((number * of_squares - total**2) / number**2)


def _sum_of_products(values: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
    """The exact sum, which 64 bits may not hold: 15 bits of the counts are added up at a time.

    A sum of 2^16 products, each of a square of 32 bits and of 15 bits, stays below 2^63.
    """
    parts = range(0, int(counts.max()).bit_length(), 15)
    return sum(int((values * (counts >> bits & 0x7FFF)).sum()) << bits for bits in parts)


def _lowest(dtype: AnyDtype) -> int:
    return int(np.iinfo(dtype).min)


def _layers(chunks: ChunkGrid, store: KvStore, url: str) -> Iterator[NDArray[np.int64]]:
    """The counts of all sections, some at a time, in order."""
    per_layer = chunks.shape[1] * chunks.shape[2]
    for layer in range(chunks.shape[0]):
        total: Any = 0
        for index in range(layer * per_layer, (layer + 1) * per_layer):
            key = _key(index)
            result = retry_request(
                "read", f"{url}/{key}", or_else_again(store.read(key), partial(store.read, key))
            )
            total = total + np.load(io.BytesIO(bytes(result.value)))["counts"]
        yield total


def _key(index: int) -> str:
    return f"{index:012d}.npz"


def describe_input(path: str, scale: int, channel: tuple[int, ...] | None, volume: Volume) -> Json:
    """Describe the volume whose values are counted as JSON, with a cheap check of its content."""
    start = volume.bounds.start
    stop = volume.bounds.stop
    values = {"path": path, "scale": scale, "channel": channel, "start": start, "stop": stop}
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
