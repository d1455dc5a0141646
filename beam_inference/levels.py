"""Quantiles of a volume's values, of the whole and of each section along z, counted chunk by chunk: exact, in one pass.

They do not depend on how the volume is cut, so a contrast that is made of them has no seams.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from beam_inference.bounding_box import BoundingBox
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.grids import ChunkGrid
from beam_inference.normalize_config import Affine, Contrast, Sections
from beam_inference.resolved_job import Frozen
from beam_inference.storage import Storage
from beam_inference.stores import (
    PATIENCE_SECONDS,
    again_if_failed,
    open_kvstore,
    persistently,
    read_file,
)
from beam_inference.volumes import Volume, open_volume

logger = logging.getLogger(__name__)

QUANTILES = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
CHUNK_VOXELS = 2**25
"""About so many are read at a time."""


class Levels(Frozen):
    """What :class:`SumCounts` writes.

    Attributes:
        input: what was looked at. dtype: its.
        start: number of the first section.
        quantiles: which, ascending.
        volume: the values at them: the smallest stored value that at least such a share of all voxels does not exceed.
        sections: the same of each section, from ``start`` on.
        mean, std: of all voxels.
    """

    input: str
    dtype: str
    start: int
    quantiles: list[float]
    volume: list[int]
    sections: list[list[int]]
    mean: float
    std: float


def load_levels(url: str, storage: Storage) -> Levels:
    """The file at a URL.

    Raises:
        ConfigError: it is absent, or was not made by ``beam-inference levels``.
    """
    try:
        return Levels.model_validate_json(read_file(url, storage))
    except VolumeError as error:
        raise ConfigError(
            f"model.normalize.levels: {error}. Make it with: beam-inference levels INPUT --to FILE"
        ) from None
    except ValidationError as error:
        raise ConfigError(
            f"model.normalize.levels: {url} is no file of beam-inference levels: {error.errors()[0]['msg']}"
        ) from None


def decided(contrast: Contrast, volume: Volume, storage: Storage) -> Affine | Sections:
    """What a contrast comes to on a volume; a file that was made of another place is warned about.

    Raises:
        ConfigError: the levels are of another volume, do not hold these quantiles, or are one value only.
    """
    levels = load_levels(contrast.levels, storage)
    first, last = levels.start, levels.start + len(levels.sections)
    z = (volume.bounds.start[0], volume.bounds.stop[0])
    if levels.dtype != volume.dtype.name or z[0] < first or last < z[1]:
        raise ConfigError(
            f"model.normalize.levels: {contrast.levels} was made of {levels.input}, {levels.dtype} with the sections "
            f"{first} … {last - 1}; the input is {volume.dtype.name} with the sections {z[0]} … {z[1] - 1}"
        )
    if not {contrast.low, contrast.high} <= set(levels.quantiles) or contrast.low >= contrast.high:
        raise ConfigError(
            f"model.normalize: low {contrast.low:g} and high {contrast.high:g} must be two of the quantiles that "
            f"{contrast.levels} holds, low < high: {', '.join(f'{quantile:g}' for quantile in levels.quantiles)}"
        )
    if levels.input not in (volume.url, ""):
        logger.warning("%s was made of %s, the input is %s", contrast.levels, levels.input, volume.url)
    low, high = (levels.quantiles.index(quantile) for quantile in (contrast.low, contrast.high))
    if contrast.by == "section":  # a section of one value is 0 throughout
        pairs = [(float(of[low]), float(max(of[high], of[low] + 1))) for of in levels.sections]
        return Sections(start=levels.start, levels=pairs)
    span = levels.volume[high] - levels.volume[low]
    if not span:
        raise ConfigError(f"model.normalize: {levels.input} has one value at both quantiles, {levels.volume[low]}")
    return Affine(scale=1 / span, offset=-levels.volume[low] / span, clip=(0.0, 1.0))


def stretched(array: NDArray[Any], numbers: NDArray[np.int64], sections: Sections) -> NDArray[np.float32]:
    """Stored values (C, Z, Y, X), each section by its own contrast; ``numbers`` are those of the sections."""
    pairs = np.asarray(sections.levels, np.float32)[numbers - sections.start]
    low, span = (values.reshape(1, -1, 1, 1) for values in (pairs[:, 0], pairs[:, 1] - pairs[:, 0]))
    result = array.astype(np.float32)
    result -= low
    result /= span
    return np.clip(result, 0, 1, out=result)


@dataclass(frozen=True)
class CountValues:
    """First stage: how often each value occurs in each section of a chunk.

    Attributes:
        path, scale, channel, storage: the volume, as :func:`beam_inference.volumes.open_volume` takes it.
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
        """The volume, opened."""
        channel = None if self.channel is None else list(self.channel)
        return open_volume(self.path, scale=self.scale, channel=channel, storage=self.storage)

    def opened(self) -> Callable[[int], None]:
        """See :class:`beam_inference.chunk_tasks.ChunkTask`."""
        volume, store = self.volume(), open_kvstore(self.counts_url, self.storage)

        def do(index: int) -> None:
            counts = counted(volume.read(self.chunks.core_box(index)))
            content = io.BytesIO()
            np.savez_compressed(content, counts=counts)
            key = _key(index)
            persistently(
                "write",
                f"{self.counts_url}/{key}",
                lambda: store.write(key, content.getvalue()).result(timeout=PATIENCE_SECONDS),
            )

        return do


@dataclass(frozen=True)
class SumCounts:
    """Second stage, one chunk of work: the quantiles, written to a file.

    Attributes:
        counting: the first stage.
        to: a folder's URL, and the file's name in it.
    """

    counting: CountValues
    to: tuple[str, str]
    name: str = "sum"
    count: int = 1

    def opened(self) -> Callable[[int], None]:
        """See :class:`beam_inference.chunk_tasks.ChunkTask`."""
        counting = self.counting
        volume, store = counting.volume(), open_kvstore(counting.counts_url, counting.storage)

        def do(_: int) -> None:
            sections: list[list[int]] = []
            whole: NDArray[np.int64] | int = 0
            for counts in _layers(counting.chunks, store, counting.counts_url):
                sections += [values_at(QUANTILES, section, volume.dtype) for section in counts]
                whole = whole + counts.sum(axis=0)
            assert not isinstance(whole, int)
            values = np.arange(len(whole)) + _lowest(volume.dtype)
            mean = float((values * whole).sum() / whole.sum())
            levels = Levels(
                input=counting.path,
                dtype=volume.dtype.name,
                start=volume.bounds.start[0],
                quantiles=list(QUANTILES),
                volume=values_at(QUANTILES, whole, volume.dtype),
                sections=sections,
                mean=mean,
                std=float(np.sqrt((((values - mean) ** 2) * whole).sum() / whole.sum())),
            )
            folder, name = self.to
            target = open_kvstore(folder, counting.storage)
            persistently(
                "write",
                f"{folder}/{name}",
                lambda: target.write(name, levels.model_dump_json()).result(timeout=PATIENCE_SECONDS),
            )

        return do


def chunks_to_count(volume: Volume) -> ChunkGrid:
    """Whole blocks, as many along x and then y as are read at a time.

    Raises:
        ConfigError: values of this dtype cannot be counted one by one.
    """
    if volume.dtype not in (np.uint8, np.int8, np.uint16, np.int16):
        raise ConfigError(
            f"levels are counted of 8-bit and 16-bit integers; {volume.url} holds {volume.dtype.name}: write "
            "model.normalize: {scale: …, offset: …, clip: …} by hand"
        )
    z, y, x = (min(b, n) for b, n in zip(volume.read_shape, volume.bounds.shape, strict=True))
    x *= max(1, min(-(-volume.bounds.shape[2] // x), CHUNK_VOXELS // (volume.channels * z * y * x)))
    y *= max(1, min(-(-volume.bounds.shape[1] // y), CHUNK_VOXELS // (volume.channels * z * y * x)))
    return ChunkGrid(volume.bounds, (z, y, x))


def counted(array: NDArray[Any]) -> NDArray[np.int64]:
    """How often each value of an 8-bit or 16-bit dtype occurs in each section of (C, Z, Y, X): (Z, values)."""
    size = 2 ** (8 * array.dtype.itemsize)
    lowest = _lowest(array.dtype)
    sections = array.swapaxes(0, 1)  # one at a time: numbers to count by take eight bytes each
    return np.stack([np.bincount(section.ravel().astype(np.int64) - lowest, minlength=size) for section in sections])


def values_at(quantiles: tuple[float, ...], counts: NDArray[np.int64], dtype: np.dtype[Any]) -> list[int]:
    """The smallest values that at least such shares do not exceed (NumPy's ``inverted_cdf``)."""
    upto = np.cumsum(counts)
    ranks = np.maximum(1, np.ceil(np.asarray(quantiles) * upto[-1] - 1e-9))
    return [int(place) + _lowest(dtype) for place in np.searchsorted(upto, ranks)]


def _lowest(dtype: np.dtype[Any]) -> int:
    return int(np.iinfo(dtype).min)


def _layers(chunks: ChunkGrid, store: Any, url: str) -> Iterator[NDArray[np.int64]]:
    """The counts of all sections, some at a time, in order."""
    per_layer = chunks.shape[1] * chunks.shape[2]
    for layer in range(chunks.shape[0]):
        total: Any = 0
        for index in range(layer * per_layer, (layer + 1) * per_layer):
            key = _key(index)
            found = persistently("read", f"{url}/{key}", again_if_failed(store.read(key), partial(store.read, key)))
            total = total + np.load(io.BytesIO(bytes(found.value)))["counts"]
        yield total


def _key(index: int) -> str:
    return f"{index:012d}.npz"


def described(path: str, scale: int, channel: tuple[int, ...] | None, bounds: BoundingBox) -> dict[str, Any]:
    """What determines the levels, as JSON values."""
    values = {"path": path, "scale": scale, "channel": channel, "start": bounds.start, "stop": bounds.stop}
    return dict(json.loads(json.dumps(values)))
